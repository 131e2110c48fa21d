"""The benchmark of Transformers' blocks: the layers that it asks for fit them; both backends run, on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.layers import memory
from fusekit.spec import parse_text
from tests.benchmarks import torch_blocks
from tests.benchmarks.torch_blocks import BACKENDS, CASES, main, measure
from tests.layers.host import ALIGNMENT, host

SMALL = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 8}


def layers_of(text: str) -> dict[str, Any]:
    return {spec.layer.name: spec.layer for spec in parse_text(text, "experts")}


def test_the_spec_has_a_layer_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec"]) == 0
    layers = layers_of(capsys.readouterr().out)
    assert [*layers] == [*CASES]
    for name, layer in layers.items():
        assert (layer.hidden, layer.intermediate, layer.experts, layer.topk) == CASES[name].shape
        assert (layer.router["input"], layer.tokens) == ("choices", 24576)
    assert main(["gpt-oss-20b", "--spec", "--tokens", "512"]) == 0
    (layer,) = layers_of(capsys.readouterr().out).values()
    assert (layer.bias, layer.b_major, layer.tokens) == (True, "n", 512)
    with pytest.raises(SystemExit):
        main(["gpt-5"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """small(case) -> the case in a size for the CPU; fusekit has its layer."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    if not hasattr(moe, "ExpertsInterface"):
        pytest.skip("this version of transformers has no ExpertsInterface")
    from fusekit.interop import transformers

    def make(name: str) -> Any:
        sizes = CASES[name].sizes
        less = {key: SMALL[key] for key in sizes if key in SMALL} | {
            key: 8 if "local" in key else 2 for key in sizes if key in ("num_local_experts", "num_experts_per_tok")
        }
        case = replace(CASES[name], sizes={**sizes, **less}, shape=(64, 32, 8, 2))
        options = layers_of("schema = 1\n" + case.table("moe", 64))["moe"]
        layer = host(**options.canonical())
        library = SimpleNamespace(layers=lambda: {"experts/moe": options}, layer=lambda _: layer)
        transformers.register(library)
        return case

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 2.0

    monkeypatch.setattr(memory, "ALIGNMENT", ALIGNMENT)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch_blocks, "_peak", lambda run: run() or 100)
    yield make
    moe.ExpertsInterface._global_mapping.pop("fusekit", None)


@pytest.mark.parametrize("name", CASES)
def test_both_backends_run_and_agree(small: Any, name: str) -> None:
    got = measure(small(name), 40, 0.001, BACKENDS, "cpu")
    assert json.loads(json.dumps(got)) == got
    for each in got["backends"].values():
        assert each == {"peak_bytes": 100, "forward_ms": 2.0, "both_ms": 2.0}, each
    assert (got["tokens"], got["forward_speedup"], got["both_speedup"], got["peak_share"]) == (40, 1, 1, 1)
    assert got["apart"] < 2e-2


def test_a_backend_that_cannot_run_says_why(small: Any) -> None:
    case = small("mixtral-8x7b")
    got = measure(replace(case, sizes={**case.sizes, "hidden_size": 128}), 40, 0.001, BACKENDS, "cpu")
    assert got["backends"]["fusekit"]["error"].startswith("NotBuiltError: MixtralExperts: no layer of the store")
    assert got["backends"]["grouped_mm"]["both_ms"] == 2.0
    assert "both_speedup" not in got

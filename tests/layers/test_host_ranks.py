"""Layers over ranks on host memory, every launch as its formula: what the launches are given is all that they use."""

import runpy
from itertools import product
from pathlib import Path

import pytest

import fusekit
from fusekit.spec import parse_file
from tests.exchange.layers import ANY, ONE, OTHERS, LayerRanks
from tests.layers.host_ranks import HostLibrary
from tests.plan.test_layer_ranks import CASES, over
from tests.soak import sample

pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")


def opened(name, ranks=2, tokens=40, rows=None, **said):
    o = over(ranks, name, **{"grad_dtype": "bf16", **CASES[name], **said})
    return LayerRanks(HostLibrary(o, devices=ranks), "layers/moe", list(range(ranks)), tokens, rows)


SIZES = ((30, 11), (0, 17), (40, 0, 25))
NAMES = ("gpt-oss", "gpt-oss-as-stored", "deepseek", "llama4", "choices", "recompute", "gpt-oss-overlap",
         "recompute-overlap")  # fmt: skip
CODED = zip(
    ("fp8", "fp8-gpt-oss", "fp8-deepseek", "fp8-llama4", "fp8-choices", "fp8-gpt-oss-squares"),
    (*SIZES, *SIZES),
    strict=False,
)


@pytest.mark.parametrize(("name", "tokens"), [*sample(product(NAMES, SIZES), most=3), *sample(CODED, most=1)])
def test_outputs_and_gradients_are_those_of_one_gpu(name, tokens):
    ranks = opened(name, len(tokens))
    for seed in range(2):
        ranks.fill(list(tokens), seed)
        ranks.launch()
        assert ranks.problems() == []
    together = ranks.library.machine.together
    assert together[: len(together) // 2] == together[len(together) // 2 :]
    ranks.close()


@pytest.mark.parametrize("kind", [ANY, ONE, OTHERS])
def test_routings(kind):
    ranks = opened("choices")
    for seed, tokens in enumerate([[40, 40], [1, 0], [0, 0], [7, 33]]):
        ranks.fill(tokens, seed, kind)
        ranks.launch()
        assert ranks.problems() == []
    ranks.close()


def test_an_overflow_is_of_one_layer_and_one_pass_and_every_rank_is_told():
    ranks = opened("choices", rows=90)
    layers = ranks.layers
    other = [ranks.library.layer("layers/other", ranks=each, tokens=40, rows=90) for each in ranks.ranks]
    for kind, tokens, rows in ((ONE, [16, 15], 93), (ANY, [3, 4], 0), (ONE, [0, 31], 93), (ONE, [0, 30], 0)):
        ranks.layers = layers
        ranks.fill(tokens, 1, kind)
        ranks.launch(check=False)
        assert rows or ranks.problems() == []
        ranks.layers = other
        ranks.fill([5, 0], 2)
        ranks.launch()
        assert ranks.problems() == []
        ((text, got),) = ranks.overflows(layers[:1])
        assert got == rows
        assert text.startswith("layers/moe: in a pass the experts of rank 1 were chosen for 93 rows" if rows else "")
    ((text, _),) = ranks.overflows(layers[1:])  # for the first time
    assert "in 2 passes, in the last of which the experts of rank 1 were chosen for 93" in text
    assert ranks.overflows(layers) == ranks.overflows(other) == [("", 0)] * 2
    ranks.close()


def test_windows_are_given_back():
    ranks = opened("choices")
    ranks.fill([3, 4], 1)
    ranks.launch()
    before = len(ranks.library.driver.memory)
    ranks.close()
    assert len(ranks.library.driver.memory) == before - 2 * 4  # sent, grads, sums, and what `check` reads


def test_the_example_without_a_framework(monkeypatch, capsys):
    examples = Path(__file__).parents[2] / "examples"
    library = HostLibrary(parse_file(examples / "ranks.toml")[0].layer)
    monkeypatch.setattr(fusekit, "open_library", lambda: library)
    monkeypatch.setattr(library.devices, "synchronize", lambda device: library.machine.run())
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    runpy.run_path(str(examples / "layer_ranks.py"))
    assert capsys.readouterr().out.count(": right, relative error") == 2

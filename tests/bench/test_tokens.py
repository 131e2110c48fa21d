"""`fusekit bench` of router and permutation kernels, on a stand-in GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusekit.bench.replay import ROTATED_BYTES, Replay, launches_for, sets_for
from fusekit.bench.timing import Stopwatch
from fusekit.errors import DriverError
from fusekit.library import open_library
from fusekit.reference import router as reference
from fusekit.reference.permutation import permutation_inputs
from fusekit.runtime import Devices, Driver
from fusekit.spec import parse_text
from fusekit_cli.main import main
from tests.bench.rig import COPY_MS, PEER_MS, Rig
from tests.bench.rig import bench as of_seconds
from tests.runtime.fake import CUresult

bench = partial(of_seconds, seconds="0.04")

ROUTER = """
schema = 1
[defaults]
arch = "sm_90a"
problem = { T = 24 }
[[kernel]]
name = "topk"
op = "router-topk"
experts = 32
topk = 4
warps = [4, 8]
[[kernel]]
name = "compact"
op = "router-topk"
experts = 32
topk = 4
score_function = "sigmoid"
expert_bias = true
num_groups = 4
group_topk = 2
outputs = "compact"
warps = 8
[[kernel]]
name = "bits"
op = "router-aux-score"
experts = 32
topk = 4
routing_map = "bits"
warps = 8
"""
PERMUTATION = """
schema = 1
[defaults]
arch = "sm_90a"
topk = 4
[[kernel]]
name = "index"
op = "moe-index"
experts = 16
problem = { T = 24 }
[[kernel]]
name = "permute"
op = "moe-permute"
weighted = true
problem = { T = 24, H = 64 }
"""


@pytest.fixture
def stored(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("fusekit.bench.replay.SETS", (2, 3))
    rig.publish(tmp_path, ROUTER, "router")
    rig.publish(tmp_path, PERMUTATION, "permutation")
    rig.cost = lambda name: 0.002
    return rig


def line(document: Any, name: str, what: str = "fusekit") -> Any:
    (kernel,) = (each for each in document["tokens"] if each["name"] == name)
    result = [each for each in kernel["lines"] if each["what"] == what]
    return result[0] if result else None


def test_beside_a_copy(stored: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(capsys, "router", "permutation", "--check")
    assert code == 0, document
    names = ["router/bits", "router/compact", "router/topk", "permutation/index", "permutation/permute"]
    assert sorted(each["name"] for each in document["tokens"]) == sorted(names[:4] + names[4:])
    for name in names:
        ours, copy = line(document, name), line(document, name, "copy")
        assert ours["us"] == pytest.approx(2.0)
        assert copy["us"] == pytest.approx(COPY_MS * 1e3)
        assert ours["of_copy"] == pytest.approx(2.0)
        assert ours["gbs"] > 0
        assert 0 < ours["peak_share"] < 1
        assert ours["check"]["ok"], ours
    assert document["models"] == []
    assert any("PyTorch cannot be imported" in note for note in document["notes"])
    assert not stored.memory
    assert stored.loaded == 0


def test_tokens_and_width_of_the_user(stored: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(
        capsys, "permutation/permute", "router/topk", "--rows", "10", "--rows", "20", "--hidden", "128"
    )
    assert code == 0
    assert [(each["problem"]["T"], each["problem"].get("H")) for each in document["tokens"]] == [
        (10, 128), (20, 128), (10, None), (20, None),
    ]  # fmt: skip


def test_a_wrong_choice_is_noticed(stored: Rig, no_torch: None, capsys: Any) -> None:
    def harm(name: str, arrays: dict[str, Any]) -> None:
        arrays["indices"][3] = arrays["indices"][3][::-1]

    stored.harm = harm
    assert bench(capsys, "router/compact")[0] == 0
    code, document = bench(capsys, "router/compact", "--check")
    assert code == 1
    assert not line(document, "router/compact")["check"]["ok"]


def test_a_sweep_of_warps(stored: Rig, no_torch: None, capsys: Any, tmp_path: Path) -> None:
    stored.cost = lambda name: 0.001 if name.endswith("w4") else 0.003
    assert open_library().find("router/topk").name == "router/topk@w8"
    code, document = bench(capsys, "router", "--sweep")
    assert code == 0
    assert document["tuning"]["rows"] == 1
    assert open_library().find("router/topk").name == "router/topk@w4"
    assert open_library().find("router/topk", problem={"M": 40}).name == "router/topk@w4"
    assert open_library().find("router/topk", problem={"M": 1000}).name == "router/topk@w8"


def test_beside_torch(stored: Rig, cpu_torch: Any, capsys: Any) -> None:
    code, document = bench(capsys, "router", "permutation")
    assert code == 0
    for name in ("router/compact", "router/topk", "permutation/index", "permutation/permute"):
        assert line(document, name, "torch")["error"] is None
        assert line(document, name, "torch")["us"] == pytest.approx(PEER_MS * 1e3)
        assert line(document, name)["speedup"] == pytest.approx(PEER_MS / 0.002)
    assert line(document, "router/bits", "torch") is None
    assert any("no times of te" in note for note in document["notes"])
    assert main(["bench", "router", "--seconds", "0.04"]) == 0
    assert "of a copy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"pre_softmax": "true"}, {"outputs": '"compact"'}, {"score_function": '"sigmoid"', "scaling_factor": "2.5"},
        {"score_function": '"sqrtsoftplus"', "expert_bias": "true", "outputs": '"compact"'},
        {"score_function": '"sigmoid"', "expert_bias": "true", "num_groups": "4", "group_topk": "2"},
        {"op": '"router-aux-score"'}, {"op": '"router-aux-score"', "score_function": '"sigmoid"'},
    ],
)  # fmt: skip
def test_eager_code_means_the_same(keys: dict[str, str]) -> None:
    torch = pytest.importorskip("torch")
    from fusekit.bench.torch_router import eager

    lines = {"op": '"router-topk"', "name": '"k"', "arch": '"sm_90a"', "experts": "32", "topk": "4"} | keys
    text = "schema = 1\n[[kernel]]\n" + "\n".join(f"{key} = {value}" for key, value in lines.items())
    (spec,) = parse_text(text, "f", "f.toml")
    canonical = json.loads(json.dumps(spec.canonical()))
    rng = np.random.default_rng(3)
    inputs = {"logits": rng.standard_normal((50, 32), dtype=np.float32)}
    if spec.expert_bias:
        inputs["expert_bias"] = rng.standard_normal(32, dtype=np.float32) * np.float32(0.1)
    work = eager(canonical, {name: torch.from_numpy(value) for name, value in inputs.items()}, spec.defaults())
    want = reference.route(spec, inputs)
    for name, value in work().items():
        if name == "indices":
            assert np.array_equal(value.numpy(), want[name])
        else:
            assert np.allclose(value.numpy(), want[name], rtol=1e-5, atol=1e-6), name


def test_eager_permutation_means_the_same() -> None:
    torch = pytest.importorskip("torch")
    from fusekit.bench.torch_router import eager
    from fusekit.reference.permutation import index, unpermute

    specs = {spec.kernel: spec for spec in parse_text(PERMUTATION + UNPERMUTE, "f", "f.toml")}

    def tensors(name: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
        spec = specs[name]
        inputs = permutation_inputs(spec, T=24, H=64, seed=1)
        given = {
            key: torch.from_numpy(np.ascontiguousarray(value)).view(torch.bfloat16)
            if value.dtype == np.uint16
            else torch.from_numpy(np.ascontiguousarray(value))
            for key, value in inputs.items()
        }
        return inputs, given, eager(json.loads(json.dumps(spec.canonical())), given, {})()

    inputs, _, got = tensors("index")
    want = index(inputs["indices"], 16)
    rows = len(want["order"])
    assert np.array_equal(got["offsets"].numpy(), want["offsets"])
    assert np.array_equal(got["order"].numpy()[:rows], want["order"])
    owned = want["inverse"] >= 0
    assert np.array_equal(got["inverse"].numpy()[owned], want["inverse"][owned])
    inputs, given, (y, weights) = tensors("permute")
    token, choice = np.nonzero(inputs["inverse"] >= 0)
    row = inputs["inverse"][token, choice]
    assert np.array_equal(y.float().numpy()[row], given["x"].float().numpy()[token])
    assert np.array_equal(weights.numpy()[row], inputs["weights"][token, choice])
    inputs, given, y = tensors("scaled")
    scaled = given["x"].double().numpy()[token] * inputs["weights"][token, choice, None]
    assert np.allclose(y.double().numpy()[row], scaled, rtol=2.0**-8, atol=0)
    inputs, given, y = tensors("unpermute")
    total, size = unpermute(given["x"].double().numpy(), inputs["inverse"], inputs["weights"])
    assert np.all(np.abs(y.double().numpy() - total) <= 2.0**-8 * np.abs(total) + 1e-6 * size + 1e-30)


UNPERMUTE = """
[[kernel]]
name = "scaled"
op = "moe-permute"
scaled = true
problem = { T = 24, H = 64 }
[[kernel]]
name = "unpermute"
op = "moe-unpermute"
weighted = true
problem = { T = 24, H = 64 }
"""


def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions, as their own signatures have them, stand in for it."""
    torch = pytest.importorskip("torch")
    from fusekit.bench.torch_router import transformer_engine

    asked: list[Any] = []

    def topk(logits: Any, *rest: Any) -> Any:
        asked.append(rest)
        return torch.softmax(logits, -1), None

    def aux(logits: Any, *rest: Any) -> Any:
        asked.append(rest)
        return None, torch.softmax(logits, -1)

    router = SimpleNamespace(fused_topk_with_score_function=topk, fused_compute_score_for_moe_aux_loss=aux)
    package = SimpleNamespace(router=router)
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=package))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    logits = torch.randn(5, 32)
    spec = {
        "op": "router-topk", "topk": 4, "routing_map": "bytes", "pre_softmax": False, "num_groups": 4, "group_topk": 2,
        "score_function": "sigmoid",
    }  # fmt: skip
    work = transformer_engine(spec, {"logits": logits}, {"scaling_factor": 2.5})
    assert torch.equal(work(), torch.softmax(logits, -1))
    assert asked.pop() == (4, False, 4, 2, 2.5, "sigmoid", None)
    backward = transformer_engine(spec | {"op": "router-topk-bwd", "num_groups": 0}, {"logits": logits}, {})
    assert backward().shape == backward().shape == logits.shape
    assert asked == [(4, False, None, None, 1.0, "sigmoid", None)]
    scores = transformer_engine(spec | {"op": "router-aux-score-bwd"}, {"grad_scores": logits}, {})
    assert scores().shape == logits.shape
    assert asked.pop() == (4, "sigmoid")
    assert transformer_engine(spec | {"routing_map": "bits"}, {"logits": logits}, {}) is None
    assert transformer_engine(spec | {"op": "moe-index"}, {}, {}) is None


def test_rotation() -> None:
    for nbytes in (1, 1000, 10**6, 10**8, 10**10):
        sets = sets_for(nbytes)
        assert 2 <= sets <= 24
        assert sets * nbytes >= ROTATED_BYTES or sets == 24
        assert launches_for(sets) % sets == 0
        assert launches_for(sets) >= 24


def test_a_graph_is_ended_after_an_error(rig: Rig) -> None:
    devices = Devices(Driver(rig))

    def refused(stream: int) -> None:
        if rig._capture is not None:
            raise DriverError("refused", name="X")

    with devices.active(devices.get(0)):
        with pytest.raises(DriverError, match="refused"):
            Replay(devices, [refused], 4, 77)
        assert rig._capture is None
        rig.fail["cuGraphInstantiate"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(DriverError, match="cuGraphInstantiate"):
            Replay(devices, [lambda stream: None], 4, 77)
    assert not rig._graphs


def noted(rig: Rig, order: list[str], name: str, ms: float) -> Any:
    """Work that takes `ms` on the rig and puts its name into `order`."""

    def run(stream: int) -> None:
        order.append(name)
        rig._clock += ms

    return run


def test_rounds_begin_with_another_one_each_time(rig: Rig) -> None:
    devices = Devices(Driver(rig))
    order: list[str] = []
    named = partial(noted, rig, order)
    with Stopwatch(devices, devices.get(0), 77) as watch:
        times = watch.rounds([named("a", 1.0), named("b", 2.0), named("c", 3.0)], 4)
    assert order == [*"abc", *"bca", *"cab", *"abc"]
    assert times == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert not rig.memory


def test_steady_leaves_the_device_to_one_at_a_time(rig: Rig) -> None:
    devices = Devices(Driver(rig))
    order: list[str] = []
    named = partial(noted, rig, order)
    with Stopwatch(devices, devices.get(0), 77) as watch:
        times = watch.steady([named("a", 1.0), named("b", 2.0)], 40.0)
    assert order == [*"aaabbb", *("a" * 20 + "b" * 10) * 2]  # estimates, then two turns, half of each not counted
    assert times == [[1.0] * 20, [2.0] * 10]
    assert not rig.memory

"""`fusekit run` of a layer: right results pass, wrong ones are found, times and memory are said."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusekit.bench import layer_trial
from fusekit.bench.layer_trial import LayerTrial
from fusekit.choice.tuning import Tuning
from fusekit.errors import UsageError
from fusekit.library import open_library
from fusekit.plan.layer import program
from fusekit.plan.operations import OPERATIONS
from fusekit_cli.main import main
from tests.bench import layer_stand_in
from tests.bench.layer_stand_in import MS, install, publish
from tests.bench.rig import PEER_MS, Rig
from tests.benchmarks.pinned import main as bench_pinned
from tests.plan.test_layer_program import CASES, options
from tests.plans import plan_of
from tests.soak import sample

# gpt-oss, DeepSeek, Llama-4, an MLP; inputs instead of x's logits; gradients that are added.
ADDED = {"bias": True, "grad_dtype": "f32", "accumulate": True, "shared": 16}
# A gate near 0 has another slope once its row, times its weight, was rounded.
RELU = {"activation": {"kind": "reglu"}, "glu_layout": "concat", "router": {"scale": "input"}, "tokens": 256}
CODED = {"weights": "fp8-block", "keep": "none", "hidden": 144, "intermediate": 128, "shared": 128}
PACKED = {"weights": "mxfp4", "keep": "none", "intermediate": 64, "shared": 128, "bias": True}
OTHERS = {"added": ADDED, "relu": RELU, "fp8-weights": CODED, "mxfp4-weights": PACKED}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["run", *arguments, "--json", "--debug"])
    answer = capsys.readouterr()
    assert answer.out, answer.err
    return code, json.loads(answer.out)


def small(**said: Any) -> Any:
    return options(**{"hidden": 64, "intermediate": 32, "tokens": 40, "grad_dtype": "bf16"} | said)


@pytest.mark.parametrize("case", sample([*CASES, *OTHERS], "deepseek", "fp8-interleaved", *OTHERS))
def test_a_right_layer_is_ok(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any, case: str) -> None:
    trial = small(**(CASES | OTHERS)[case])
    name = publish(tmp_path, trial)
    install(monkeypatch, rig)
    code, document = run(capsys, name, "--check")
    assert document["problems"] == []
    assert code == 0
    assert (document["name"], document["arch"], document["ok"]) == (name, "sm_90a", True)
    few = min(trial.tokens, 256)
    assert (document["tokens"], document["checked_tokens"]) == (few, few)
    outputs = {*program(trial).arguments("forward")[1], *program(trial).arguments("backward")[1]}
    assert set(document["errors"]) == outputs | {
        f"inference {each}" for each in program(trial).arguments("inference")[1]
    }
    assert 0 < document["error"]["fro"] < (2.5e-2 if trial.recipe != "none" else 1e-2)
    assert document["error"]["max_scaled"] <= 1
    assert (document["memory"]["kept"] > 0) == (trial.trained and not case.endswith("mlp-as-stored"))
    assert not rig.memory


def off(part: str, name: str, change: Any) -> Any:
    def wrong(which: str, outputs: dict[str, Any]) -> None:
        if which == part:
            outputs[name] = change(outputs[name])

    return wrong


def without_last(values: Any) -> Any:
    values = values.copy()
    values[-1] = 0
    return values


@pytest.mark.parametrize(
    ("part", "name", "change", "said"),
    [
        ("fc2", "y", without_last, {"y", "inference y"}),
        ("fc1-infer", "y", lambda values: 1.05 * values, {"inference y"}),
        ("fc1-wgrad", "dw", without_last, {"dw1"}),
        ("fc2-wgrad", "dw", lambda values: 1.05 * values, {"dw2"}),
        ("b2-grad", "grad_bias", lambda values: 2 * values, {"db2"}),
        ("router-dgrad", "y", lambda values: -values, {"dx"}),
        ("weights-bwd", "grad_weights", lambda values: 0.9 * values, {"drouter"}),
        ("aux-score-bwd", "grad_logits", lambda values: 0 * values, {"drouter"}),
        ("aux-loss", "loss", lambda values: 1.01 * values, {"loss", "inference loss"}),
        ("unpermute", "y", lambda values: np.full_like(values, np.nan), {"y", "inference y"}),
    ],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_layer_is_noticed(
    rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any, part: str, name: str, change: Any, said: set[str],
    sampled: bool,
) -> None:  # fmt: skip
    if sampled:
        monkeypatch.setattr(layer_trial, "WHOLE_ELEMENTS", 0)
        monkeypatch.setattr(layer_trial, "SAMPLED_ROWS", 40)
    layer = publish(tmp_path, small(bias=True, router={"bias": True, "aux_loss": True}, glu_layout="interleaved"))
    install(monkeypatch, rig, off(part, name, change))
    code, document = run(capsys, layer, "--check", "--rows", "40")
    assert code == 1
    assert document["ok"] is False
    wrong = {line.replace("inference: ", "inference ").rpartition(": WRONG")[0] for line in document["problems"]}
    assert wrong >= said
    assert wrong <= said | {"dx", "drouter_bias"}


@pytest.mark.parametrize(
    ("case", "part", "name", "change", "said"),
    sample(
        [
            ("fp8", "quantise-x", "x_s", lambda scale: scale[::-1], {"y", "inference y"}),  # another block's scale
            ("fp8", "quantise-w1", "w_ts", lambda scale: 2 * scale, {"dx"}),
            ("fp8", "quantise-dz", "x_ts", lambda scale: np.roll(scale, 1, axis=0), {"dw1"}),  # another block of tokens
            ("fp8", "quantise-a-turned", "x_t", lambda fp8: np.roll(fp8, 1, axis=0), {"dw2"}),
            ("fp8", "quantise-dy", "x_q", lambda fp8: np.roll(fp8, 1, axis=0), {"dx", "drouter", "dw1"}),
            ("fp8", "fc1-infer", "y_s", lambda scale: scale[::-1], {"inference y"}),
            ("fp8-interleaved", "fc2-dgrad", "dz_q", lambda fp8: np.roll(fp8, 1, axis=0), {"dx"}),
            ("fp8-interleaved", "fc2-dgrad", "dz_ts", lambda scale: np.roll(scale, 1, axis=0), {"dw1"}),
            ("fp8-interleaved", "fc2-dgrad", "y_t", lambda fp8: np.roll(fp8, 1, axis=0), {"dw2"}),
        ],
        most=3,
    ),
)
def test_wrong_fp8_values_are_noticed(
    rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any, case: str, part: str, name: str, change: Any,
    said: set[str],
) -> None:  # fmt: skip
    layer = publish(tmp_path, small(**CASES[case], router={"bias": True}))
    install(monkeypatch, rig, off(part, name, change))
    code, document = run(capsys, layer, "--check", "--rows", "400")
    assert code == 1
    wrong = {line.replace("inference: ", "inference ").rpartition(": WRONG")[0] for line in document["problems"]}
    assert wrong >= said
    assert wrong <= said | {"dx", "drouter", "drouter_bias"} | ({"dw1", "dw2"} if "y" in said else set())


def test_what_is_not_written_or_written_beyond_is_noticed(
    rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    layer = publish(tmp_path, small())
    install(monkeypatch, rig, off("fc1-wgrad", "dw", lambda values: None))
    code, document = run(capsys, layer, "--check")
    assert code == 1
    (said,) = document["problems"]  # of most: until it is written, dw1 serves as scratch memory
    assert 8 * 64 * 64 / 2 < int(said.removeprefix("dw1: ").removesuffix(" elements were not written")) <= 8 * 64 * 64

    def beyond(part: str, outputs: dict[str, Any]) -> None:
        for buffer in rig.memory.values():
            if len(buffer) > 8192 and part == "unpermute-dx":
                guard = len(buffer) - 256 - 2000  # wherever in its 256 spare bytes the memory begins
                buffer[guard : guard + 10] = bytes(10)

    install(monkeypatch, rig, beyond)
    code, document = run(capsys, layer, "--check")
    assert code == 1
    assert any("bytes after the buffer were written to" in line for line in document["problems"])


def test_a_layer_for_inference_that_reads_fp8_values(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    layer = publish(tmp_path, small(**CASES["fp8"], keep="none"))
    install(monkeypatch, rig)
    code, document = run(capsys, layer, "--check", "--rows", "40")
    assert (code, document["problems"], set(document["errors"])) == (0, [], {"y", "inference y"})


def test_a_layer_for_inference(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    layer = publish(tmp_path, small(keep="none", bias=True, router={"aux_loss": True}))
    install(monkeypatch, rig)
    code, document = run(capsys, layer, "--check", "--time")
    assert (code, document["problems"]) == (0, [])
    assert set(document["errors"]) == {"y", "loss", "inference y", "inference loss"}
    assert set(document["passes"]) == {"forward", "both"}
    assert (document["memory"]["kept"], document["memory"]["backward"]) == (0, 0)
    assert main(["bench", layer, "--alone", "--json"]) == 0
    (got,) = json.loads(capsys.readouterr().out)["layers"]
    assert [line["variant"] for line in got["lines"]] == ["forward", "both"]
    install(monkeypatch, rig, off("fc2", "y", without_last))
    assert run(capsys, layer, "--check")[0] == 1


@pytest.fixture
def idle(monkeypatch: Any) -> None:
    """Kernels that take their time and compute nothing."""
    monkeypatch.setattr(layer_stand_in.Formula, "_compute", lambda formula, tensors: None)


@pytest.mark.usefixtures("idle")
def test_times_of_passes_and_of_one_graph(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    trial = small(bias=True)
    layer = publish(tmp_path, trial)
    install(monkeypatch, rig)
    code, document = run(capsys, layer, "--time", "--rows", "4096")
    assert code == 0
    forward, backward = (len(program(trial).steps[which]) for which in ("forward", "backward"))
    passes = document["passes"]
    assert [passes[which]["ms"] for which in ("forward", "backward", "both")] == [
        MS * forward, MS * backward, MS * (forward + backward),
    ]  # fmt: skip
    assert document["ms"] == passes["both"]["ms"]
    rows, tokens = 4096 * 3, 4096
    grouped = 3 * (2 * rows * 64 * 64 + 2 * rows * 64 * 32)
    dense = 2 * tokens * 8 * 64 * 4  # the router's three, and dy . b2
    flops = grouped + dense
    assert document["tflops"] == pytest.approx(flops / (document["ms"] * 1e-3) * 1e-12)
    assert document["checked_tokens"] is None
    assert main(["run", layer, "--time", "--check"]) == 1  # nothing was computed
    out = capsys.readouterr().out
    assert "both, one graph: " in out
    assert "elements were not written" in out
    assert "kept " in out
    assert not rig.memory


@pytest.mark.usefixtures("idle")
def test_the_fp8_values_of_weights_are_timed_apart(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    trial = small(**CASES["fp8"])
    layer = publish(tmp_path, trial)
    install(monkeypatch, rig)
    code, document = run(capsys, layer, "--time", "--rows", "40")
    assert code == 0
    steps = {which: len(each) for which, each in program(trial).steps.items()}
    steps["both"] = steps["forward"] + steps["backward"]
    assert {which: each["ms"] for which, each in document["passes"].items()} == {
        which: MS * steps[which] for which in ("forward", "backward", "both", "quantise")
    }
    assert document["passes"]["quantise"]["tflops"] is None
    assert document["memory"]["fp8_weights"] > 0
    assert main(["run", layer, "--time"]) == 0
    out = capsys.readouterr().out
    assert "quantise: 1 ms, host" in out
    assert "FP8 weights" in out
    assert not rig.memory


@pytest.mark.usefixtures("idle")
def test_a_benchmark_of_a_layer(rig: Rig, cpu_torch: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    trial = small()
    layer = publish(tmp_path, trial)
    install(monkeypatch, rig)
    assert main(["bench", layer, "--peer", "torch", "--rows", "64", "--json", "--csv", str(tmp_path / "t.csv")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["models"], document["tokens"], document["ok"]) == ([], [], True)
    (got,) = document["layers"]
    assert got["problem"] == {"T": 64, "H": 64, "I": 32, "X": 8, "K": 3}
    sizes = program(trial)
    assert got["memory"]["kept"] == sizes.kept(sizes.dims(64))[1]
    steps = {which: len(program(trial).steps[which]) for which in ("forward", "backward")}
    steps["both"] = sum(steps.values())
    gemms = {"forward": 3, "backward": 6}
    gemms["both"] = 9
    for line in got["lines"]:
        assert line["ms"] == MS * steps[line["variant"]]
        assert line["dense_ms"] == PEER_MS * gemms[line["variant"]]
        assert line["dense_share"] == pytest.approx(line["dense_ms"] / line["ms"])
        assert line["tflops"] > 0
    assert [row.split(",")[4:6] for row in (tmp_path / "t.csv").read_text().splitlines()[1:]] == [["moe", ""]] * 3
    assert main(["bench", "layers", "--alone", "--rows", "64"]) == 0
    out = capsys.readouterr().out
    assert "layers/moe" in out
    assert "backward" in out
    assert not rig.memory


@pytest.mark.usefixtures("idle")
def test_a_benchmark_of_few_tokens(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    layer = publish(tmp_path, trial := small())
    install(monkeypatch, rig)
    assert main(["bench", layer, "--decode", "--rows", "1", "--rows", "64", "--json"]) == 0
    one, many = json.loads(capsys.readouterr().out)["layers"]
    assert [got["problem"]["T"] for got in (one, many)] == [1, 64]
    expert = 2 * 64 * (2 * 32 + 32)  # bytes of w1 and w2
    for got, experts in ((one, 3), (many, 8)):  # each token chooses 3 of 8
        (line,) = got["lines"]
        router = 2 * 64 * 8
        assert line["variant"] == "inference"
        assert line["ms"] == MS * len(program(trial).steps["inference"])
        assert line["gbs"] * line["ms"] * 1e6 == pytest.approx(experts * expert + router, rel=1e-3)
    assert main(["bench", layer, "--decode"]) == 0
    out = capsys.readouterr().out
    assert [f"T={1 << power} " in out for power in range(11)] == [*[True] * 10, False]
    assert "GB/s" in out
    for more, rule in (["--sweep"], "--decode with --sweep"), (["--peer", "torch"], "--decode with --peer"):
        assert main(["bench", layer, "--decode", *more]) == 2
        assert rule in capsys.readouterr().err
    assert main(["bench", f"{layer}.*", "--decode"]) == 2
    assert "times GEMMs and layers, and " in capsys.readouterr().err
    assert not rig.memory


SWEPT = """
schema = 1
[[kernel]]
name = "moe"
kind = "moe"
arch = "sm_90a"
hidden = 64
intermediate = 64
experts = 8
topk = 2
tile = [[128, 64], [128, 128], [256, 128]]
cluster = [[1, 1], [2, 1]]
problem = { T = 80 }
"""


def test_a_sweep_of_a_layer_decides_what_it_loads(
    rig: Rig, no_torch: None, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    rig.publish(tmp_path, SWEPT, "model")
    best = {"fc1-fwd": "128x128-c2x1-dynamic", "fc2-dgrad": "128x64-c2x1-dynamic", "fc1-wgrad": "128x64-c1x1-dynamic"}
    rig.cost = lambda name: 1.0 if best.get(name.partition(".")[2].partition("@")[0]) == name.partition("@")[2] else 2.0
    assert main(["bench", "model/moe", "--sweep", "--rows", "80", "--rows", "200", "--seconds", "0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    before = open_library().layer("model/moe").record
    rig.build_layers(open_library().store)
    assert open_library().layer("model/moe").record.tuning["store"]["parts"] and before.tuning.keys() <= {"packaged"}
    layer = open_library().layer("model/moe")
    gemms = [part for part, keys in plan_of(layer).parts.items() if OPERATIONS[keys["op"]].gemm]
    assert document["layers"] == [] and [each["model"] for each in document["models"]] == ["model/moe"] * 2
    for each, tokens in zip(document["models"], (80, 200), strict=True):
        assert [kernel["name"] for kernel in each["kernels"]] == [f"model/moe.{part}" for part in gemms]
        rows = {kernel["name"].partition(".")[2]: kernel["problem"]["M"] for kernel in each["kernels"]}
        assert rows == {part: tokens * (1 if part.startswith("router") else 2) for part in gemms}
    table = Tuning.from_bytes((tmp_path / "tuning" / "sm_90a.json").read_bytes(), "x", "sm_90a")
    gathering = [row for row in table.rows if row.features.get("gather")]
    assert document["tuning"]["rows"] == len(table.rows) and len(gathering) >= 4
    for part, variant in best.items():
        assert layer._kernel(part, layer.dims(80)).name == f"model/moe.{part}@{variant}"
        assert layer._kernel(part, layer.dims(150)).name == f"model/moe.{part}@{variant}"
    assert not rig.memory


def swept(rig: Rig, capsys: Any, *arguments: str) -> tuple[dict[str, Any], Any]:
    """The kernels that a sweep times, by part, and the layer as it is loaded afterwards."""
    assert main(["bench", "model/moe", "--sweep", "--seconds", "0.01", "--json", *arguments]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    rig.build_layers(open_library().store)
    return {each["name"].partition(".")[2]: each for each in model["kernels"]}, open_library().layer("model/moe")


def test_a_sweep_of_a_layer_takes_what_is_faster_inside_its_passes(
    rig: Rig, no_torch: None, tmp_path: Path, capsys: Any
) -> None:
    rig.publish(tmp_path, SWEPT, "model")
    before = open_library().layer("model/moe")
    names = {part: before.kernel_name(part, 80) for part in ("fc1-fwd", "fc2-dgrad", "fc1-wgrad", "fc1-infer")}
    other = {
        part: next(each.name for each in open_library().variants(f"model/moe.{part}", "sm_90a") if each.name != name)
        for part, name in names.items()
    }
    last = [""]

    def cost(name: str) -> float:
        before, last[0] = last[0], name
        if name == other["fc1-fwd"]:
            return 1.0  # alone; what follows then takes longer
        if name == other["fc2-dgrad"]:
            return 1.98  # which is less than .5 % of the pass
        return 2.0 - (name in (other["fc1-wgrad"], other["fc1-infer"])) + 1.5 * (before == other["fc1-fwd"])

    rig.cost = cost
    got, layer = swept(rig, capsys)
    gains = {"fc1-wgrad", "fc1-infer"}
    for part, name in names.items():
        chosen = other[part] if part in gains else name
        assert got[part]["chosen"] == chosen.partition("@")[2]
        assert layer.kernel_name(part, 80) == chosen
    launches = len(plan_of(layer).needed("forward", set(layer.outputs("forward"))))
    ms = {line["variant"]: line["ms"] for line in got["fc1-fwd"]["lines"]}
    assert (ms[names["fc1-fwd"].partition("@")[2]], ms[other["fc1-fwd"].partition("@")[2]]) == (
        pytest.approx(2.0 * launches), pytest.approx(2.0 * launches + 0.5),
    )  # fmt: skip
    passes = {"fc1-fwd": ["forward"], "fc2": ["forward"], "fc1-infer": ["inference"], "fc2-wgrad": ["backward"]}
    assert {part: got[part]["passes"] for part in passes} == passes
    table = Tuning.from_bytes((tmp_path / "tuning" / "sm_90a.json").read_bytes(), "x", "sm_90a")
    assert {us for row in table.rows for _, us in row.variants} == {None}
    assert not rig.memory
    assert main(["bench", "model/moe", "--sweep", "--seconds", "0.01"]) == 0
    assert "moe.fc1-infer in inference" in (out := capsys.readouterr().out) and ", chosen" in out


def test_parts_that_share_a_row_of_the_table_are_swept_together(
    rig: Rig, no_torch: None, tmp_path: Path, capsys: Any
) -> None:
    rig.publish(tmp_path, SWEPT + 'bias = true\ngrad_dtype = "f32"\naccumulate = true\n', "model")
    present = open_library().layer("model/moe").kernel_name("router", 80).partition("@")[2]
    other = next(
        variant for each in open_library().variants("model/moe.router", "sm_90a")
        if (variant := each.name.partition("@")[2]) != present
    )  # fmt: skip
    rig.cost = lambda name: {f"model/moe.router@{other}": 1.0, f"model/moe.dy-b2@{other}": 4.0}.get(name, 2.0)
    got, layer = swept(rig, capsys)
    assert got["router"]["passes"] == got["dy-b2"]["passes"] == ["forward", "backward"]
    assert got["router"]["lines"] == got["dy-b2"]["lines"]
    for part in ("router", "dy-b2"):
        assert got[part]["chosen"] == layer.kernel_name(part, 80).partition("@")[2] == present


@pytest.mark.soak(
    "two sweeps of a layer; tests/layers/test_layer.py and tests/gpu/test_invariance.py hold the same rule"
)
def test_bits_that_depend_on_a_tile_depend_on_no_batch(
    rig: Rig, no_torch: None, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The kernel of dprob is one for any number of tokens, whatever the table says; others follow it."""
    rig.publish(tmp_path, SWEPT, "model")
    rig.cost = lambda name: float(("128x64" in name) + (1 if rig_tokens[0] > 500 else -1) * ("128x128" in name) + 3)
    rig_tokens = [80]
    for rig_tokens[0] in (80, 4096):
        assert main(["bench", "model/moe", "--sweep", "--rows", str(rig_tokens[0]), "--seconds", "0.01", "--json"]) == 0
    capsys.readouterr()
    rig.build_layers(open_library().store)
    layer = open_library().layer("model/moe")
    counts = (1, 80, 100, 2048, 4096, 8000)
    assert plan_of(layer).parts["fc2-dgrad"]["dprob"]
    assert len({layer.kernel_name("fc2-dgrad", tokens) for tokens in counts}) == 1
    assert len({layer.kernel_name("fc1-dgrad", tokens) for tokens in counts}) > 1
    monkeypatch.setattr(rig, "_compute", lambda spec, launched: None)
    assert bench_pinned(["model/moe", "--rows", "4096", "--seconds", "0.01"]) == 0
    (got,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (got["kernel"], got["tokens"]) == ("model/moe.fc2-dgrad", 4096)
    assert got["pinned"]["variant"].startswith("128x128") and got["pinned"]["ms"] == 4.0
    assert got["fastest"]["variant"].startswith("256x128") and got["fastest"]["ms"] == 3.0
    assert got["cost"] == pytest.approx(1.0 / got["layer_ms"])


def test_a_large_layer_is_checked_with_few_tokens(monkeypatch: Any) -> None:
    large = small(hidden=2880, intermediate=2880, experts=128, topk=4, tokens=24576)
    assert layer_trial.checked_tokens(large) == 32
    assert layer_trial.checked_tokens(small(tokens=24576)) == 256
    assert layer_trial.checked_tokens(small()) == 40


def test_the_example(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    root = Path(__file__).parents[2] / "examples"
    (table,) = tomllib.loads((root.parent / "kernel_specs" / "layer.toml").read_text())["kernel"]
    sizes = {name: table[name] for name in ("hidden", "intermediate", "experts", "topk")}
    publish(tmp_path, options(file="layer", tokens=1024, grad_dtype="bf16", **sizes))
    install(monkeypatch, rig)
    runpy.run_path(str(root / "layer.py"))
    assert capsys.readouterr().out.endswith("done\n")


def test_options_of_kernels_are_refused(rig: Rig, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    layer = publish(tmp_path, small())
    for line in (["--cluster-margin", "2"], ["--set", "M=3"]):
        assert main(["run", layer, *line]) == 2
        assert "is a layer, which takes no --cluster-margin and no --set" in capsys.readouterr().err
    assert layer_stand_in.MS


def test_a_layer_over_ranks_has_no_trial():
    layer = SimpleNamespace(name="ranked/moe", options=SimpleNamespace(ranks=2))
    with pytest.raises(UsageError, match=r"ranked/moe is launched by 2 ranks together and has no trial on one device"):
        LayerTrial(None, layer, 10, 1)

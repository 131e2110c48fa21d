"""`fusekit bench` of a model, on a stand-in GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusekit.choice.tuning import Tuning
from fusekit.library import open_library
from fusekit_cli.main import main
from tests.bench.rig import PEER_MS, Rig, bench
from tests.runtime.fake import CUresult

MODEL = """
schema = 1
summary = "a small model"
[defaults]
arch = "sm_90a"
op = "grouped-gemm"
schedule = "dynamic"
cluster = [1, 1]
tile = [[128, 64], [128, 128]]
[[kernel]]
name = "fc2-wgrad"
op = "grouped-wgrad"
problem = { E = 3, M = 150, N = 64, K = 96 }
[[kernel]]
name = "fc1-wgrad"
op = "grouped-wgrad"
out_dtype = "f32"
accumulate = true
problem = { E = 3, M = 150, N = 192, K = 64 }
[[kernel]]
name = "fc1-dgrad"
b_major = "n"
problem = { E = 3, M = 150, N = 64, K = 192 }
[[kernel]]
name = "fc2-dgrad"
b_major = "n"
activation = { kind = "dswiglu", alpha = 1.702, limit = 3.5, up_offset = 1.0 }
glu_layout = "interleaved"
recompute = true
problem = { E = 3, M = 150, N = 96, K = 64 }
[[kernel]]
name = "fc2-fwd"
row_scale = true
problem = { E = 3, M = 150, N = 64, K = 96 }
[[kernel]]
name = "fc1-fwd"
bias = true
activation = { kind = "swiglu", alpha = 1.702, limit = 1.0, up_offset = 1.0 }
glu_layout = "interleaved"
save_preactivation = true
problem = { E = 3, M = 150, N = 192, K = 64 }
"""
KERNELS = ["fc1-fwd", "fc2-fwd", "fc2-dgrad", "fc1-dgrad", "fc1-wgrad", "fc2-wgrad"]


@pytest.fixture
def model(rig: Rig, tmp_path: Path) -> Rig:
    rig.publish(tmp_path, MODEL, "small")
    return rig


def lines(document: Any, kernel: str, what: str = "fusekit") -> list[Any]:
    (got,) = (each for each in document["models"][0]["kernels"] if each["name"] == f"small/{kernel}")
    return [line for line in got["lines"] if line["what"] == what]


def test_six_kernels_without_torch(model: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(capsys, "small")
    assert code == 0
    assert (document["device"], document["arch"], document["sms"]) == ("FAKE H200", "sm_90a", 132)
    assert "PyTorch cannot be imported" in document["notes"][0]
    (small,) = document["models"]
    assert [each["name"].partition("/")[2] for each in small["kernels"]] == KERNELS
    for each in small["kernels"]:
        (line,) = each["lines"]
        problem = each["problem"]
        assert line["ms"] == 2.0
        assert line["tflops"] == pytest.approx(2 * 150 * problem["N"] * problem["K"] / 2e-3 * 1e-12)
        assert 0 < line["peak_share"] < 1
        assert line["dense_share"] is line["speedup"] is line["agrees"] is None
        assert 10 <= line["rounds"] <= 200
    steps = {step["step"]: step for step in small["steps"]}
    assert steps["forward"]["lines"][0]["ms"] == 4.0
    assert steps["backward"]["lines"][0]["ms"] == 8.0
    assert [name.partition("@")[0] for name in steps["forward"]["kernels"]] == ["small/fc1-fwd", "small/fc2-fwd"]
    assert not model.memory
    assert model.loaded == 0


def test_steady(model: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(capsys, "small", "--steady")
    assert code == 0
    assert document["steady"]
    for kernel in KERNELS:
        (line,) = lines(document, kernel)
        assert (line["ms"], line["rounds"]) == (2.0, 4)  # 10 ms: two turns of two, and as many before that


def test_few_rows(model: Rig, no_torch: None, capsys: Any) -> None:
    """Launches of a graph over rotating tensors, of which only weights of groups with rows count."""
    code, document = bench(capsys, "small/fc1-fwd", "--decode", "--rows", "1", "--rows", "64")
    assert code == 0 and document["decode"] and not document["notes"]
    for rows, groups, each in zip((1, 64), (1, 3), document["models"], strict=True):
        (kernel,) = each["kernels"]
        assert kernel["problem"]["M"] == rows
        (line,) = kernel["lines"]
        assert line["ms"] == 2.0 and line["rounds"] >= 4
        moved = 2 * (groups * 192 * 64 + rows * (64 + 96 + 192) + groups * 192)  # w; x, y and preactivation; bias
        assert line["gbs"] == pytest.approx(moved / 2e6)
    assert main(["bench", "small/fc1-fwd", "--decode", "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "GB/s" in out and "3 1 192 64" in out and "TFLOP/s" not in out
    assert not model.memory
    assert model.loaded == 0


def test_other_sizes(model: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(
        capsys, "small", "-E", "5", "--hidden", "128", "--intermediate", "32", "--rows", "40", "--rows", "70"
    )
    assert code == 0
    assert [model["kernels"][0]["problem"]["M"] for model in document["models"]] == [40, 70]
    problems = {each["name"].partition("/")[2]: each["problem"] for each in document["models"][0]["kernels"]}
    widths = {kernel: (problem["N"], problem["K"]) for kernel, problem in problems.items()}
    assert widths == {
        "fc1-fwd": (64, 128), "fc2-fwd": (128, 32), "fc2-dgrad": (32, 128), "fc1-dgrad": (128, 64),
        "fc1-wgrad": (64, 128), "fc2-wgrad": (128, 32),
    }  # fmt: skip
    assert {problem["E"] for problem in problems.values()} == {5}


def test_beside_torch(model: Rig, cpu_torch: Any, capsys: Any) -> None:
    # Few z lie at the limit, where versions of PyTorch give different gradients.
    code, document = bench(capsys, "small", "--all", "--peer", "torch", "--peer", "loop")
    assert code == 0, document
    for kernel in KERNELS:
        ours = lines(document, kernel)
        assert len(ours) == 2
        for line in ours:
            assert line["agrees"]["ok"], (kernel, line)
            assert 0 <= line["agrees"]["fro"] < 1e-2
            assert line["speedup"] == pytest.approx(PEER_MS / 2.0)
            assert line["dense_share"] > 0
        for peer in ("torch", "loop", "dense"):
            (line,) = lines(document, kernel, peer)
            assert line["error"] is None
            assert line["ms"] == PEER_MS
    backward = document["models"][0]["steps"][1]["lines"]
    assert [(line["what"], line["ms"]) for line in backward] == [("fusekit", 8.0), ("torch", 20.0), ("loop", 20.0)]
    assert backward[0]["speedup"] == pytest.approx(2.5)


@pytest.mark.parametrize("output", ["y", "preactivation", "dz", "dw"])
@pytest.mark.parametrize("what", ["left out", "a wrong row"])
def test_a_wrong_result_is_noticed(model: Rig, cpu_torch: Any, capsys: Any, output: str, what: str) -> None:
    def harm(name: str, arrays: dict[str, Any]) -> None:
        if output in arrays:
            arrays[output][1] = 0xFFFF if what == "left out" and arrays[output].itemsize == 2 else arrays[output][0]

    model.harm = harm
    code, document = bench(capsys, "small")
    assert code == 1
    assert document["ok"] is False
    assert main(["bench", "small", "--seconds", "0.01"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_peer_that_fails_is_a_result(model: Rig, cpu_torch: Any, capsys: Any, monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no such product\nand more")

    monkeypatch.setattr(cpu_torch, "_grouped_mm", refuse)
    code, document = bench(capsys, "small", "--peer", "torch", "--peer", "loop")
    assert code == 0
    (line,) = lines(document, "fc2-fwd", "torch")
    assert line["error"] == "RuntimeError: no such product"
    assert line["ms"] is None
    (ours,) = lines(document, "fc2-fwd")
    assert ours["agrees"]["ok"]
    assert ours["speedup"] == pytest.approx(PEER_MS / 2.0)
    assert main(["bench", "small", "--seconds", "0.01"]) == 0
    assert "no such product" in capsys.readouterr().out


def test_a_sweep_writes_what_is_fastest(model: Rig, no_torch: None, capsys: Any, tmp_path: Path) -> None:
    name = "small/fc1-fwd"
    assert open_library().load(name).name.endswith("@128x64-c1x1-dynamic")
    model.cost = lambda full: 1.0 if "128x128" in full else 3.0
    code, document = bench(capsys, "small", "--sweep")
    assert code == 0
    assert document["tuning"] == {"path": str(tmp_path / "tuning" / "sm_90a.json"), "rows": 6}
    table = Tuning.from_bytes((tmp_path / "tuning" / "sm_90a.json").read_bytes(), "x", "sm_90a")
    for row in table.rows:
        assert row.device == "FAKE H200"
        assert row.variants == (("128x128-c1x1-dynamic", 1000.0), ("128x64-c1x1-dynamic", 3000.0))
    assert open_library().load(name).name.endswith("@128x128-c1x1-dynamic")
    assert open_library().find(name, problem={"M": 100_000}).name.endswith("@128x64-c1x1-dynamic")
    # Another sweep replaces what it measured again and keeps the rest.
    model.cost = lambda full: 1.0
    code, document = bench(capsys, "small/fc1-*", "--sweep", "--rows", "150", "--rows", "3000")
    assert document["tuning"]["rows"] == 6 + 3
    step = document["models"][0]
    assert step["steps"] == []
    out = tmp_path / "table.json"
    code, document = bench(capsys, "small/fc2-fwd", "--sweep", "--table", str(out))
    assert document["tuning"] == {"path": str(out), "rows": 1}
    out.write_text("{")
    assert main(["bench", "small/fc2-fwd", "--sweep", "--table", str(out)]) == 1
    assert "is no tuning table of sm_90a" in capsys.readouterr().err


def test_one_variant_by_its_full_name(model: Rig, no_torch: None, capsys: Any) -> None:
    code, document = bench(capsys, "small/fc2-fwd@128x64-c1x1-dynamic", "--groups", "one")
    assert code == 0
    assert [line["variant"] for line in lines(document, "fc2-fwd")] == ["128x64-c1x1-dynamic"]


def test_text_for_people(model: Rig, cpu_torch: Any, capsys: Any) -> None:
    assert main(["bench", "small", "--seconds", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "small (sm_90a) on FAKE H200, groups uneven" in text
    assert "128x64-c1x1-dynamic" in text
    for word in ("fc1-fwd", "fc2-wgrad", "forward", "backward", "torch", "dense"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing"], 3, "fusekit build nothing"),
        (["small", "--table", "x.json"], 2, "--table x.json without --sweep"),
        (["small", "--alone", "--peer", "torch"], 2, "--alone with --peer"),
        (["small", "--rows", "0"], 2, "0 is not in the range"),
        ([], 2, "Missing argument 'MODEL...'"),
    ],
)
def test_what_cannot_be(model: Rig, capsys: Any, arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


def test_sizes_that_mean_nothing(rig: Rig, tmp_path: Path, capsys: Any) -> None:
    text = """
    schema = 1
    [[kernel]]
    name = "odd"
    op = "dense-gemm"
    arch = "sm_90a"
    tile = [128, 64]
    """
    rig.publish(tmp_path, text, "other")
    assert main(["bench", "other", "--hidden", "64"]) == 2
    assert "odd takes no hidden or intermediate size" in capsys.readouterr().err
    assert main(["bench", "other"]) == 2
    assert "odd: no M, N, K; its spec names no problem" in capsys.readouterr().err
    rig.devices = 0
    assert main(["bench", "other"]) == 4


def test_kernels_that_have_no_benchmark(rig: Rig, no_torch: None, tmp_path: Path, capsys: Any) -> None:
    quantise = 'schema = 1\n[[kernel]]\nname = "fp8"\nop = "quantise"\narch = "sm_90a"\nout = "fp8-block"\n'
    rig.publish(tmp_path, quantise, "other")
    assert main(["bench", "other/fp8"]) == 2
    assert "other/fp8 has no benchmark: bench times GEMMs, router and perm" in capsys.readouterr().err
    gemm = """
    [[kernel]]
    name = "product"
    op = "dense-gemm"
    arch = "sm_90a"
    tile = [128, 64]
    problem = { E = 1, M = 150, N = 64, K = 96 }
    """
    rig.publish(tmp_path, quantise + gemm, "other")
    code, got = bench(capsys, "other", "--alone")
    assert code == 0
    assert got["notes"][0].startswith("other/fp8 is left out: bench times GEMMs")
    assert [row["name"] for row in got["models"][0]["kernels"]] == ["other/product"]


def test_out_of_memory(model: Rig, no_torch: None, capsys: Any) -> None:
    model.fail["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert main(["bench", "small"]) == 2
    assert "must fit together; take fewer --rows or -E" in capsys.readouterr().err

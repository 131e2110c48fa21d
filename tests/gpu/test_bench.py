"""`fusekit bench` on the GPU: times that can be, results that agree with PyTorch's where it is installed.

fusekit --store STORE build quickstart tests/gpu/block.toml tests/gpu/layers.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_bench.py
"""

import json

import pytest

from fusekit.choice.gpus import gpu_of
from fusekit.choice.tuning import Tuning
from fusekit_cli.main import main
from tests.benchmarks import pinned


@pytest.fixture
def bench(opened, capsys):
    def run(target, *arguments):
        if not opened.store.names(f"{target.partition('/')[0]}/*"):
            pytest.skip(f"no kernels of {target} in {opened}; build them there and name the store")
        code = main(["bench", target, *arguments, "--seconds", "0.05", "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return code, json.loads(out)

    return run


@pytest.mark.parametrize("groups", ["uneven", "even", "one"])
def test_gemms(bench, groups):
    code, document = bench("quickstart", "--all", "--groups", groups, "--peer", "torch", "--peer", "loop")
    assert code == 0, document
    with_torch = not document["notes"]
    for kernel in document["models"][0]["kernels"]:
        for line in kernel["lines"]:
            assert line["error"] is None, (kernel["name"], line)
            assert 0 < line["best_ms"] <= line["ms"] < 100
            if gpu_of(document["device"]) is not None:
                assert line["peak_share"] < 1.0
            if with_torch and line["what"] == "fusekit":
                assert line["agrees"]["ok"]
                assert line["dense_share"] > 0
                assert line["speedup"] > 0


def test_steady(bench):
    code, document = bench("quickstart", "--all", "--steady", "--peer", "torch")
    assert code == 0, document
    assert document["steady"]
    assert 500 < document["clock_mhz"] < 5000
    for kernel in document["models"][0]["kernels"]:
        for line in kernel["lines"]:
            assert line["error"] is None, (kernel["name"], line)
            assert 0 < line["best_ms"] <= line["ms"] < 100


def test_tokens(bench):
    targets = ("block/topk", "block/index", "block/permute", "block/unpermute")
    code, document = bench(*targets, "--rows", "512", "--alone", "--check")
    assert code == 0, document
    names = {item["name"] for item in document["tokens"]}
    assert names == set(targets)
    for kernel in document["tokens"]:
        for line in kernel["lines"]:
            assert line["error"] is None, (kernel["name"], line)
            assert 0 < line["best_us"] <= line["us"] < 10_000


def test_a_sweep(bench, tmp_path):
    path = tmp_path / "table.json"
    code, document = bench("quickstart/moe-fc1", "--sweep", "--table", str(path))
    assert code == 0
    assert document["tuning"]["rows"] == 1
    (row,) = Tuning.from_bytes(path.read_bytes(), path, "sm_90a").rows
    assert row.device == document["device"]
    assert {variant for variant, _ in row.variants} == {"128x128-c2x1", "128x192-c2x1"}
    assert row.variants[0][1] <= row.variants[1][1]


def test_a_sweep_of_a_layer(bench, tmp_path):
    path = tmp_path / "table.json"
    code, document = bench("layers/qwen3", "--sweep", "--rows", "512", "--table", str(path))
    assert code == 0, document
    (swept,) = document["models"]
    assert swept["model"] == "layers/qwen3" and document["layers"] == []
    assert all(line["error"] is None and line["ms"] > 0 for item in swept["kernels"] for line in item["lines"])
    for entry in swept["kernels"]:  # the chosen one is the fastest, or what saves less than half a percent is not taken
        ms = {line["variant"]: line["ms"] for line in entry["lines"]}
        assert ms[entry["chosen"]] * 0.994 <= min(ms.values())
    rows = Tuning.from_bytes(path.read_bytes(), path, "sm_90a").rows
    assert document["tuning"]["rows"] == len(rows) > 3
    assert any(row.features.get("gather") for row in rows)


def test_what_pinning_costs(opened, capsys):
    if not opened.store.names("layers/*"):
        pytest.skip(f"no kernels of layers in {opened}; build tests/gpu/layers.toml there and name the store")
    assert pinned.main(["layers/qwen3", "--rows", "512", "--seconds", "0.05"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["kernels"]
    assert result["kernel"] == "layers/qwen3.fc2-dgrad"
    assert 0 <= result["cost"] < 1

"""The packaged router and permutation kernels, and those that the GPU tests launch: built and proved with --soak."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.compiler.build import execute, plan_build
from fusekit.spec import find, parse_file
from fusekit.store import Store

GPU = Path(__file__).parents[1] / "gpu"
SPECS = (
    *find(["router", "permutation"]),
    *parse_file(GPU / "router-matrix.toml"),
    *parse_file(GPU / "permutation-matrix.toml"),
)


@pytest.mark.soak("a hundred kernels, of operations that test_router.py builds")
def test_all_are_built_and_proved(tmp_path):
    store = Store(tmp_path)
    report = execute(plan_build(SPECS, store), store)
    assert not report.failed
    for spec in SPECS:
        entry = store.find_entry(store.find_name(spec.full_name, spec.arch).key)
        assert entry.proof["launches"] >= 64, spec.full_name
        if spec.file in ("router", "permutation"):
            assert entry.resources["spill_bytes"] == 0, spec.full_name


def test_they_cover_what_is_asked():
    """Sizes off every warp, single experts and choices, all of them chosen; types and forms of every operation."""
    ops = ("router-topk", "router-topk-bwd", "router-aux-score", "router-aux-score-bwd")
    routed = [spec for spec in SPECS if spec.op in ops]
    for op in ops:
        some = [spec for spec in routed if spec.op == op]
        experts = {spec.experts for spec in some}
        assert {1, 61, 127, 512, 2304, 4096} <= experts, op
        assert {1, 64} <= {spec.topk for spec in some}, op
        assert any(1 < spec.experts == spec.topk for spec in some), op
        assert {spec.score_function for spec in some} == {"softmax", "sigmoid", "sqrtsoftplus"}, op
        assert {spec.dtype for spec in some} == {"f32", "bf16"}, op
    assert {spec.routing_map for spec in routed} == {"bytes", "bits", "none"}
    assert {spec.outputs for spec in routed} == {"dense", "compact"}
    forward = [spec for spec in routed if spec.op == "router-topk"]
    assert {spec.pre_softmax for spec in forward} == {spec.expert_bias for spec in forward} == {True, False}
    assert any(spec.num_groups for spec in forward) and any(spec.scaling_factor != 1 for spec in forward)

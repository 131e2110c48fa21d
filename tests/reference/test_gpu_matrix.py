"""What the GPU tests' kernels and cases must cover between them, so that nobody thins them out by accident."""

from pathlib import Path

import pytest

from fusekit.spec import parse_file
from tests.gpu.cases import TILE_K, cases_of, multiple_of_n

SPECS = parse_file(Path(__file__).parents[1] / "gpu" / "matrix.toml")
GROUPED = [spec for spec in SPECS if spec.op == "grouped-gemm"]


def covered(*keys):
    return {tuple(getattr(spec, key) for key in keys) for spec in SPECS}


def test_few_enough_to_build_in_minutes_and_no_two_share_a_cubin():
    assert len(SPECS) <= 64
    assert len({str(spec.device_spec()) for spec in SPECS}) == len(SPECS)


def test_every_activation_in_every_layout():
    seen = {(spec.activation.kind, spec.activation.approximate, spec.glu_layout) for spec in SPECS}
    for layout in ("concat", "interleaved", "interleaved-32"):
        assert {("swiglu", "none", layout), ("geglu", "none", layout), ("reglu", "none", layout)} <= seen
        assert ("geglu", "tanh", layout) in seen
    plain = {("identity", "none"), ("relu", "none"), ("srelu", "none"), ("silu", "none"), ("gelu", "none")}
    assert {(*kind, "none") for kind in plain | {("gelu", "tanh")}} <= seen


def test_every_layout_with_both_weight_orders_and_both_main_loops():
    for layout in ("none", "concat", "interleaved", "interleaved-32"):
        assert {(layout, "k"), (layout, "n")} <= covered("glu_layout", "b_major")
        assert {(layout, "pingpong"), (layout, "cooperative")} <= covered("glu_layout", "mainloop")


def test_both_operations_with_every_stage_on_and_off():
    for op in ("grouped-gemm", "dense-gemm"):
        for key in ("bias", "save_preactivation", "row_scale"):
            assert {(op, True), (op, False)} <= covered("op", key)
        assert {(op, "bf16"), (op, "fp16")} <= covered("op", "dtype")
        assert {(op, "k"), (op, "n")} <= covered("op", "b_major")
        assert {(op, "none"), (op, "scalar")} <= covered("op", "alpha")
    assert ("grouped-gemm", "group") in covered("op", "alpha")
    assert {("bf16", "fp16"), ("fp16", "bf16")} <= covered("dtype", "out_dtype")


def test_every_cluster_and_the_usual_tiles():
    assert {(1, 1), (2, 1), (1, 2)} == {spec.cluster for spec in SPECS}
    assert {(128, 128), (128, 160), (128, 192), (64, 128), (256, 128), (256, 192)} <= {spec.tile for spec in SPECS}
    assert {("cooperative", (2, 1)), ("cooperative", (1, 2))} <= covered("mainloop", "cluster")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.full_name)
def test_cases_are_legal_and_reach_past_the_tile(spec):
    cases = cases_of(spec)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.n % multiple_of_n(spec) == 0 < case.n
        assert case.k % 8 == 0 < case.k
    assert any(case.n % spec.tile[1] == 0 for case in cases)
    assert any(case.n % spec.tile[1] for case in cases) or multiple_of_n(spec) == spec.tile[1]
    assert any(case.k % TILE_K for case in cases)
    assert any(case.k > spec.budget.stages * TILE_K for case in cases)
    assert any(case.rows == 0 for case in cases)
    tiles = [sum(-(-size // spec.tile[0]) for size in case.sizes) * -(-case.n // spec.tile[1]) for case in cases]
    assert max(tiles) > 132  # the SMs of an H200


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.full_name)
def test_grouped_cases_hold_every_hard_one(spec):
    cases = cases_of(spec)
    sizes = {size for case in cases for size in case.sizes}
    assert {0, 1, 63, 64, 65, 127, 128, 129} <= sizes
    assert {1, 32, 33, 256} <= {len(case.sizes) for case in cases}
    assert any(case.sizes[0] == 0 for case in cases)
    assert any(case.sizes[-1] == 0 for case in cases)
    assert any(case.spare for case in cases)
    assert any(case.nan_group is not None for case in cases)
    assert any(case.pad for case in cases)
    assert len({case.margin for case in cases}) > 4

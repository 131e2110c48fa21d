"""What the GPU tests' kernels and cases must cover between them, so that nobody thins them out by accident."""

from pathlib import Path

import pytest

from fusekit.plan.operands.split import parts
from fusekit.plan.tiles import GLU_LAYOUTS, MAINLOOPS
from fusekit.spec import parse_file
from tests.gpu.cases import TILE_K, cases_of, multiple_of_n
from tests.plans import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, value_of
from tests.soak import sample

GPU = Path(__file__).parents[1] / "gpu"
SPECS = parse_file(GPU / "matrix.toml")
GROUPED = [spec for spec in SPECS if spec.op == "grouped-gemm"]
BACKWARD = parse_file(GPU / "matrix_backward.toml")
WGRAD = [spec for spec in BACKWARD if spec.op == "grouped-wgrad"]
DENSE_WGRAD = [spec for spec in BACKWARD if spec.op == "dense-wgrad"]
FP8 = parse_file(GPU / "matrix_fp8.toml")
CODED = parse_file(GPU / "matrix_fp8_output.toml")
QUANTISED = [spec for spec in FP8 if not spec.op.endswith("wgrad")]
DERIVATIVES = [spec for spec in BACKWARD if spec.activation.backward]


def covered(*keys):
    return {tuple(value_of(spec, key) for key in keys) for spec in SPECS}


def test_few_enough_to_build_in_minutes_and_no_two_share_a_cubin():
    assert len(SPECS) <= 102
    assert len(BACKWARD) <= 61
    assert len({str(spec.device_spec()) for spec in (*SPECS, *BACKWARD)}) == len(SPECS) + len(BACKWARD)
    assert len({spec.full_name.partition("/")[2] for spec in (*SPECS, *BACKWARD)}) == len(SPECS) + len(BACKWARD)


def test_every_activation_in_every_layout():
    seen = {(spec.activation.kind, spec.activation.approximate, spec.glu_layout) for spec in SPECS}
    for layout in ("concat", "interleaved", "interleaved-32"):
        assert {(kind, "none", layout) for kind in GATED_ACTIVATIONS} <= seen
        assert ("geglu", "tanh", layout) in seen
    plain = {(kind, "none") for kind in PLAIN_ACTIVATIONS} | {("gelu", "tanh")}
    assert {(*kind, "none") for kind in plain} <= seen


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


def test_the_dynamic_schedule_under_every_cluster_main_loop_and_layout():
    dynamic = [spec for spec in SPECS if spec.schedule == "dynamic"]
    assert {(1, 1), (2, 1), (1, 2)} == {spec.cluster for spec in dynamic}
    assert {spec.mainloop for spec in dynamic} == set(MAINLOOPS)
    assert {spec.glu_layout for spec in dynamic} == {"none", "concat", "interleaved", "interleaved-32"}
    assert {spec.b_major for spec in dynamic} == {"k", "n"}
    assert {spec.op for spec in dynamic} == {"grouped-gemm", "dense-gemm"}
    for key in ("bias", "save_preactivation", "row_scale"):
        assert {value_of(spec, key) for spec in dynamic} == {True, False}


def test_tiles_of_few_rows_with_every_operand_that_they_can_have():
    some = [spec for spec in SPECS if spec.mainloop == "swap-ab"]
    assert {spec.glu_layout for spec in some} == {"none", *GLU_LAYOUTS}
    for key in ("op", "dtype", "b_major", "bias", "row_scale", "save_preactivation", "schedule", "gather"):
        assert len({value_of(spec, key) for spec in some}) == 2, key
    assert {spec.tile for spec in some} >= {(16, 64), (16, 128), (32, 128), (32, 256)}
    assert {spec.tile[0] for spec in some if spec.b_major == "n"} == {16, 32}


def test_weight_gradients_of_every_type_tile_cluster_and_schedule():
    types = {(spec.dtype, spec.out_dtype, spec.operands["accumulate"]) for spec in WGRAD}
    assert {("bf16", "bf16", False), ("fp16", "fp16", False), ("bf16", "f32", False)} <= types
    assert {("bf16", "f32", True), ("fp16", "f32", True)} <= types
    assert {(128, 128), (128, 192), (256, 128), (64, 128), (64, 64)} == {spec.tile for spec in WGRAD}
    for schedule in ("static", "dynamic"):
        some = [spec for spec in WGRAD if spec.schedule == schedule]
        assert {(1, 1), (2, 1), (1, 2)} == {spec.cluster for spec in some}
        assert {spec.mainloop for spec in some} == {"pingpong", "cooperative"}
        assert {spec.operands["accumulate"] for spec in some} == {True, False}


def test_weight_gradients_with_that_of_the_bias():
    some = [spec for spec in WGRAD if spec.operands["dbias"]]
    # One warp sums dy's columns, or two, or two with two boxes each.
    assert {spec.tile[0] for spec in some} == {64, 128, 256}
    for key in ("dtype", "mainloop", "schedule", "accumulate"):
        assert len({value_of(spec, key) for spec in some}) == 2
    assert {spec.cluster for spec in some} == {(1, 1), (2, 1), (1, 2)}


def test_weight_gradients_of_dense_layers_whole_and_in_parts():
    for split in (True, False):
        some = [spec for spec in DENSE_WGRAD if spec.operands["split"] == split]
        assert {("bf16", "bf16"), ("bf16", "f32")} <= {(spec.dtype, spec.out_dtype) for spec in some}
        for key in ("dtype", "mainloop", "schedule", "accumulate", "dbias"):
            assert len({value_of(spec, key) for spec in some}) == 2, key
        assert {spec.cluster for spec in some} == {(1, 1), (2, 1), (1, 2)}


def test_float32_results_plain_and_gated():
    some = [spec for spec in SPECS if spec.out_dtype == "f32"]
    assert {"none", "interleaved", "concat"} <= {spec.glu_layout for spec in some}
    for key in ("op", "dtype", "b_major", "bias", "schedule", "save_preactivation"):
        assert len({value_of(spec, key) for spec in some}) == 2, key
    assert {spec.mainloop for spec in some} == set(MAINLOOPS)
    assert {spec.cluster for spec in some} == {(1, 1), (2, 1), (1, 2)}
    assert {16, 32} <= {box_of(spec) for spec in some}  # columns that are stored at once


def box_of(spec):
    return spec.plan.box(spec.plan.out_tile_n, spec.plan.epilogue_box // 2)


def test_derivatives_of_every_activation_in_every_layout():
    assert len(WGRAD) + len(DENSE_WGRAD) + len(DERIVATIVES) == len(BACKWARD)
    seen = {(spec.activation.kind, spec.glu_layout) for spec in DERIVATIVES}
    for layout in ("concat", "interleaved", "interleaved-32"):
        assert {(f"d{kind}", layout) for kind in GATED_ACTIVATIONS} <= seen
    assert {(f"d{kind}", "none") for kind in PLAIN_ACTIVATIONS if kind != "identity"} <= seen
    tanh = {spec.activation.kind for spec in DERIVATIVES if spec.activation.approximate == "tanh"}
    assert tanh == {"dgelu", "dgeglu"}
    assert any(spec.activation.limit for spec in DERIVATIVES)


def test_derivatives_with_everything_on_and_off():
    for gated in (True, False):
        some = [spec for spec in DERIVATIVES if spec.activation.gated == gated]
        for key, choices in (
            ("recompute", {True, False}),
            ("row_scale", {True, False}),
            ("schedule", {"static", "dynamic"}),
            ("mainloop", {"pingpong", "cooperative"}),
            ("b_major", {"k", "n"}),
            ("dtype", {"bf16", "fp16"}),
            ("cluster", {(1, 1), (2, 1), (1, 2)}),
            ("op", {"grouped-gemm", "dense-gemm"}),
        ):
            assert {value_of(spec, key) for spec in some} == choices, key
    assert {(128, 160), (128, 192), (256, 128)} <= {spec.tile for spec in DERIVATIVES}


def test_sums_over_rows_and_columns():
    assert {(False, True), (True, False), (True, True)} <= {
        (spec.operands["dprob"], spec.operands["dbias"]) for spec in DERIVATIVES
    }
    for gated in (True, False):
        assert [
            spec
            for spec in DERIVATIVES
            if spec.operands["dprob"] and spec.operands["dbias"] and spec.activation.gated == gated
        ]
    for key in ("op", "schedule", "mainloop"):
        assert len({value_of(spec, key) for spec in DERIVATIVES if spec.operands["dbias"]}) == 2
    assert {spec.cluster for spec in DERIVATIVES if spec.operands["dbias"]} == {(1, 1), (2, 1), (1, 2)}


@pytest.mark.parametrize(
    "spec", [*DENSE_WGRAD, *(spec for spec in FP8 if spec.op == "dense-wgrad")], ids=lambda spec: spec.full_name
)
def test_cases_of_dense_weight_gradients_hold_every_hard_one(spec):
    cases = cases_of(spec)
    assert len({case.name for case in cases}) == len(cases)
    least = spec.plan.vector
    assert all(case.n % least == case.k % least == 0 < min(case.n, case.k) for case in cases)
    assert {len(case.sizes) for case in cases} == {1}
    assert {0, 1, 63, 64, 65, 127, 128, 129} <= {case.rows for case in cases}
    assert any(case.pad for case in cases)
    problems = [{"M": case.rows, "N": case.n, "K": case.k} for case in cases]
    if spec.operands["split"]:
        assert {1, 2, 3, 5} <= {parts(problem) for problem in problems}
        assert any(parts_with_rows(problem) < parts(problem) for problem in problems)


def parts_with_rows(problem):
    stages = -(-problem["M"] // TILE_K)
    height = -(-stages // parts(problem))
    return -(-stages // height) if stages else 0


@pytest.mark.parametrize(
    "spec", [*WGRAD, *(spec for spec in FP8 if spec.op == "grouped-wgrad")], ids=lambda spec: spec.full_name
)
def test_cases_of_weight_gradients_hold_every_hard_one(spec):
    cases = cases_of(spec)
    assert len({case.name for case in cases}) == len(cases)
    least = spec.plan.vector
    assert all(case.n % least == case.k % least == 0 < min(case.n, case.k) for case in cases)
    sizes = {size for case in cases for size in case.sizes}
    assert {0, 1, 63, 64, 65, 127, 128, 129} <= sizes
    assert max(sizes) > 2 * spec.plan.stages * spec.plan.tile_k
    assert {1, 33, 256} <= {len(case.sizes) for case in cases}
    assert any(case.rows == 0 for case in cases)
    assert any(case.spare and not case.sizes[-1] % TILE_K for case in cases)
    assert any(case.pad for case in cases)
    assert {0, 1, 2} <= {case.nan_group for case in cases}
    for extent, tile in (("n", spec.tile[0]), ("k", spec.tile[1])):
        widths = {getattr(case, extent) for case in cases}
        assert {least, tile - least, tile + least, 2 * tile} <= widths
    tiles = [len(case.sizes) * -(-case.n // spec.tile[0]) * -(-case.k // spec.tile[1]) for case in cases]
    assert max(tiles) > 132  # the SMs of an H200


def test_fp8_values_of_every_layout_from_every_kind_of_factor():
    recipes = [spec.plan.quant for spec in CODED]
    assert {recipe.inputs for recipe in recipes} == {"none", "fp8-tensor", "fp8-row", "fp8-block"}
    assert {(recipe.transpose, recipe.keep) for recipe in recipes} >= {(False, False), (False, True), (True, False)}
    assert {recipe.scales for recipe in recipes if recipe.transpose} == {"pow2", "f32"}
    for key, choices in (
        ("glu_layout", {"none", "concat", "interleaved", "interleaved-32"}),
        ("op", {"grouped-gemm", "dense-gemm"}),
        ("cluster", {(1, 1), (2, 1), (1, 2)}),
        ("mainloop", {"pingpong", "cooperative"}),
        ("save_preactivation", {True, False}),
        ("row_scale", {True, False}),
        ("bias", {True, False}),
    ):
        assert {value_of(spec, key) for spec in CODED} == choices, key


@pytest.mark.parametrize(
    "spec", sample([*SPECS, *DERIVATIVES, *QUANTISED, *CODED], most=40), ids=lambda spec: spec.full_name
)
def test_cases_are_legal_and_reach_past_the_tile(spec):
    cases = cases_of(spec)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.n % multiple_of_n(spec) == 0 < case.n
        assert case.k % spec.plan.vector == 0 < case.k
    assert any(case.n % spec.tile[1] == 0 for case in cases)
    assert any(case.n % spec.tile[1] for case in cases) or multiple_of_n(spec) % spec.tile[1] == 0
    assert any(case.k % spec.plan.tile_k for case in cases)
    assert any(case.k > spec.plan.stages * spec.plan.tile_k for case in cases)
    assert any(case.rows == 0 for case in cases)
    tiles = [sum(-(-size // spec.tile[0]) for size in case.sizes) * -(-case.n // spec.tile[1]) for case in cases]
    assert max(tiles) > 132  # the SMs of an H200


@pytest.mark.parametrize(
    "spec",
    sample([*GROUPED, *(spec for spec in (*DERIVATIVES, *CODED) if spec.op == "grouped-gemm")], most=30),
    ids=lambda spec: spec.full_name,
)
def test_grouped_cases_hold_every_hard_one(spec):
    cases = cases_of(spec)
    sizes = {size for case in cases for size in case.sizes}
    unit = spec.plan.quant.group_alignment
    assert {-(-size // unit) * unit for size in (0, 1, 63, 64, 65, 127, 128, 129)} <= sizes
    assert {1, 32, 33, 256} <= {len(case.sizes) for case in cases}
    assert any(case.sizes[0] == 0 for case in cases)
    assert any(case.sizes[-1] == 0 for case in cases)
    assert any(case.spare for case in cases)
    assert any(case.nan_group is not None for case in cases)
    assert any(case.pad for case in cases)
    assert len({case.margin for case in cases}) > 4

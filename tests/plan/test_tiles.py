"""Shared memory, registers, and which tiles fit."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.plan import product
from fusekit.plan.arch.sm_90a import ROW as SM90A
from fusekit.plan.gemm import MAX_STAGES, MIN_STAGES, NAMED_BARRIERS, SWAPPED_STAGES, WARP
from fusekit.plan.operands.split import parts
from fusekit.plan.shared import Region, SharedMemory, barriers, pipeline
from fusekit.plan.tiles import CLUSTERS, GLU_LAYOUTS, MAINLOOPS, accumulators, default_mainloop, refusals
from fusekit.spec import parse_file
from tests.plans import gemm_plan


@pytest.mark.parametrize(
    ("tile", "mainloop", "stages", "staging", "registers"),
    [
        ((16, 64), "swap-ab", 20, 16384, 40),
        ((32, 128), "swap-ab", 8, 32768, 96),
        ((64, 64), "pingpong", 8, 32768, 32),
        ((128, 160), "pingpong", 5, 32768, 160),
        ((128, 192), "pingpong", 5, 16384, 192),
        ((128, 256), "cooperative", 4, 32768, 128),
        ((256, 128), "cooperative", 4, 32768, 128),
        ((256, 192), "cooperative", 3, 32768, 192),
    ],
)
def test_known_tiles(tile, mainloop, stages, staging, registers):
    assert default_mainloop(tile) == mainloop
    plan = gemm_plan(tile=tile)
    assert (plan.stages, plan.warp_bytes * plan.consumer_warps, plan.accumulators) == (stages, staging, registers)
    assert mainloop == "swap-ab" or accumulators(tile, mainloop) == registers  # swapped: those of the epilogue, too


@pytest.mark.parametrize("tile", [(64, 64), (128, 192), (256, 128), (256, 192)])
def test_weight_gradients_use_what_a_gemm_does(tile):
    plan, other = gemm_plan(tile=tile, op="grouped-wgrad"), gemm_plan(tile=tile)
    assert (plan.stages, plan.epilogue_box, plan.registers) == (other.stages, other.epilogue_box, other.registers)


@pytest.mark.parametrize(
    ("tile", "glu_layout", "recompute", "stages", "epilogue"),
    [
        ((128, 160), "interleaved", True, 4, 8 * (3 * 2048 + 2 * 1024)),
        ((128, 160), "concat", False, 4, 8 * 3 * 2048),
        ((256, 128), "interleaved-32", True, 3, 8 * (3 * 2048 + 2 * 1024)),
        ((128, 128), "none", True, 4, 8 * 5 * 2048),
        ((128, 160), "none", False, 5, 8 * 3 * 1024),
    ],
)
def test_a_backward_epilogue_has_boxes_of_z(tile, glu_layout, recompute, stages, epilogue):
    plan = gemm_plan(tile=tile, glu_layout=glu_layout, backward=True, recompute=recompute)
    assert (plan.stages, plan.warp_bytes * plan.consumer_warps) == (stages, epilogue)
    assert plan.shared.bytes <= SM90A.shared_bytes


def test_registers_of_a_cta_fit_the_file():
    for load, consumer in SM90A.splits:
        assert 256 * consumer + 128 * load <= SM90A.registers
    assert gemm_plan(tile=(128, 192)).registers == (24, 240)
    assert gemm_plan(tile=(128, 160)).registers == (40, 232)
    assert gemm_plan(tile=(128, 192), op="grouped-wgrad", dbias=True).registers == (40, 232)


def test_shared_memory_arithmetic_is_in_the_error(monkeypatch):
    monkeypatch.setitem(product.ARCHITECTURES, "sm_90a", dataclasses.replace(SM90A, shared_bytes=102400))
    (refusal,) = refusals(gemm_plan(tile=(128, 128)), "pingpong")
    assert refusal.rule == (
        "(128 + 128) x 64 x 2 = 32768 bytes a stage; 3 of them, at least, 32768 (epilogue) and 176 "
        "(operands, barriers) are more than the 102400 bytes of shared memory; take a smaller tile"
    )


def test_operands_leave_fewer_stages(monkeypatch):
    def stages_with(most: int) -> list[int]:
        regions = (Region("bias", most),)
        monkeypatch.setattr("fusekit.plan.operands.bias.Bias.regions", lambda self, plan, stages: regions)
        plan = gemm_plan(tile=(128, 128), bias=True)
        return [plan.stages, *("(operands, barriers)" in refusal.rule for refusal in refusals(plan, "pingpong"))]

    assert [stages_with(most) for most in (1024, 32768, 65536, 131072)] == [[6], [5], [4], [2, True]]


def test_a_wrong_cluster_is_refused():
    (refusal,) = refusals(gemm_plan(tile=(128, 128), cluster=(3, 1)), "pingpong")
    assert refusal.field == "cluster"
    assert refusal.rule == "a cluster is one of [1, 1], [2, 1], [1, 2]"


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"op": "grouped-wgrad"}, "mainloop"),
        ({"backward": True}, "mainloop"),
        ({"quant": "in=fp8-block"}, "mainloop"),
        ({"quant": "out=fp8-block"}, "mainloop"),
        ({"cluster": (2, 1)}, "cluster"),
        ({"tile": (16, 96)}, "tile"),
        ({"tile": (64, 128)}, "tile"),
    ],
)
def test_a_swapped_tile_has_few_rows_and_a_forward_epilogue(keys, field):
    keys = {"tile": (16, 128), "mainloop": "swap-ab"} | keys
    assert field in {refusal.field for refusal in refusals(gemm_plan(**keys), "swap-ab")}
    assert refusals(gemm_plan(tile=(16, 128)), "swap-ab") == ()


@pytest.mark.parametrize("keys", [{}, {"op": "grouped-wgrad"}, {"b_major": "n"}, {"glu_layout": "concat"}])
def test_a_tile_is_no_wider_than_one_product(keys):
    widest, wider = gemm_plan(tile=(64, 256), **keys), gemm_plan(tile=(64, 384), **keys)
    assert refusals(widest, "pingpong") == ()
    assert wider.accumulators == SM90A.accumulator_registers  # of which there are enough
    (refusal,) = refusals(wider, "pingpong")
    assert "tile N = 384 must be" in refusal.rule and "the nearest: 256" in refusal.rule


@given(
    tile=st.tuples(st.sampled_from([16, 32, 64, 128, 192, 256]), st.integers(1, 300)),
    cluster=st.sampled_from(CLUSTERS),
    mainloop=st.sampled_from(MAINLOOPS),
    op=st.sampled_from(["grouped-gemm", "grouped-wgrad"]),
    b_major=st.sampled_from(["k", "n"]),
    glu_layout=st.sampled_from(["none", *GLU_LAYOUTS]),
    backward=st.booleans(),
    recompute=st.booleans(),
    sums=st.booleans(),
)
def test_what_is_not_refused_fits(tile, cluster, mainloop, op, b_major, glu_layout, backward, recompute, sums):
    keys = {"tile": tile, "cluster": cluster, "mainloop": mainloop, "op": op}
    if op != "grouped-wgrad":
        keys |= {"b_major": b_major, "glu_layout": glu_layout, "backward": backward}
        if backward:
            keys |= {"recompute": recompute, "row_scale": sums, "dprob": sums, "dbias": sums}
        else:
            keys |= {"bias": sums}
    plan = gemm_plan(**keys)
    if refusals(plan, mainloop):
        return
    most = SWAPPED_STAGES if mainloop == "swap-ab" else MAX_STAGES
    assert MIN_STAGES <= plan.stages <= most
    assert plan.shared.bytes > plan.stages * plan.stage_bytes + plan.warp_bytes * plan.consumer_warps
    assert plan.shared.bytes <= SM90A.shared_bytes
    assert plan.stages == most or plan.layout(plan.stages + 1, plan.warp_bytes).bytes > SM90A.shared_bytes
    assert plan.accumulators <= SM90A.accumulator_registers < SM90A.consumer_registers
    if op == "grouped-wgrad":
        assert tile[0] % 64 == tile[1] % 64 == 0
        return
    assert tile[1] % (32 if glu_layout != "none" else 16) == 0


EVERY_SPEC = [
    spec for path in sorted((Path(__file__).parents[1] / "gpu").glob("matrix*.toml")) for spec in parse_file(path)
]


@pytest.mark.parametrize("spec", EVERY_SPEC, ids=lambda spec: spec.full_name)
def test_an_idle_warp_works_for_one_operand(spec):
    """Its program for one ends with the tiles, and would keep that for another waiting for ever."""
    plan = spec.plan
    warps = [warp for operand in plan.operands for warp in operand.warps(plan)]
    assert len(warps) == len(set(warps)) and set(warps) <= {2, 3}
    assert WARP * plan.idle_readers + plan.filling_threads <= WARP * len(warps)


@pytest.mark.parametrize(
    ("keys", "arrivals"),
    [
        ({}, 1),  # the load thread, for the bytes that come by TMA
        ({"quant": "in=fp8-block", "mainloop": "cooperative"}, 33),  # and the lanes that fetch scales
        ({"gather": "x"}, 2),  # and the warp that hands gathered rows on
        ({"gather": "x", "op": "grouped-wgrad", "dbias": True}, 129),  # which is busy here: and who gathers
    ],
)
def test_a_stage_waits_for_all_who_fill_it(keys, arrivals):
    plan = gemm_plan(tile=(128, 128), **keys)
    counts = {count for name, _, count in plan.shared.barriers if name == "stages_full"}
    assert counts == {arrivals}


@pytest.mark.parametrize(
    ("m", "n", "k", "count"),
    [(0, 128, 192, 1), (512, 128, 192, 1), (513, 128, 192, 2), (10**6, 256, 192, 66), (10**6, 4096, 4096, 1)],
)
def test_parts_have_512_rows_and_each_multiprocessor_a_tile(m, n, k, count):
    assert parts({"M": m, "N": n, "K": k}) == count


def test_regions_lie_one_after_the_other():
    shared = SharedMemory([Region("a", 100, 4), *pipeline("p", 2, 1, 8), Region("b", 16, 1024), barriers("q", 3)])
    assert shared.offsets == {"a": 0, "p_full": 104, "p_empty": 120, "b": 1024, "q": 1040}
    assert shared.bytes == 1048
    expected = [("p_full", 0, 1), ("p_empty", 0, 8), ("p_full", 1, 1), ("p_empty", 1, 8), ("q", 0, 3)]
    assert list(shared.barriers) == expected


def test_sets_of_named_barriers_lie_apart_and_leave_that_of_all_threads():
    plan = gemm_plan(tile=(128, 128))
    firsts = [plan.named_barrier(name) for name in NAMED_BARRIERS]
    assert firsts[0] == 1
    sizes = [plan.arch.consumer_warpgroups, *[1 + plan.arch.consumer_warpgroups] * (len(firsts) - 1)]
    ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
    assert ends[:-1] == firsts[1:]
    assert ends[-1] <= 16


def test_barriers_of_operands_follow_each_other():
    plan = gemm_plan(tile=(128, 128), glu_layout="concat", backward=True, row_scale=True, dprob=True, dbias=True)
    counts = {operand.name: len(operand.barriers(plan)) for operand in plan.operands}
    places = sorted((plan.first_barrier(name), count) for name, count in counts.items() if count)
    assert [first for first, _ in places] == [0, *itertools.accumulate(count for _, count in places[:-1])]
    assert counts["saved_preactivation"] == plan.consumer_warps * plan.z_boxes


def test_registers_with_a_fourth_warpgroup_are_those_of_the_row(monkeypatch):
    gathers = {"tile": (256, 128), "op": "grouped-gemm", "gather": "x"}
    assert gemm_plan(**gathers).fourth_registers == SM90A.fourth_registers["tall"]
    assert gemm_plan(**gathers | {"tile": (128, 128)}).fourth_registers == SM90A.fourth_registers["usual"]
    row = dataclasses.replace(
        SM90A, fourth_registers={"few": 32, "usual": 48, "tall": 64}, load_registers=SM90A.load_registers | {"idle": 32}
    )
    monkeypatch.setitem(product.ARCHITECTURES, "sm_90a", row)
    plan = gemm_plan(**gathers)
    load, consumer = plan.registers
    assert (plan.fourth_registers, load, consumer) == (64, 32, (512 - 32 - 64) // 16 * 8)


def test_boxes_and_rows_of_a_warp_follow_the_row(monkeypatch):
    plain = gemm_plan(tile=(128, 128), backward=True)
    monkeypatch.setitem(product.ARCHITECTURES, "sm_90a", dataclasses.replace(SM90A, mma_rows=128))
    assert gemm_plan(tile=(128, 128), backward=True).z_box_bytes == 2 * plain.z_box_bytes
    assert (SM90A.warp_rows, SM90A.box) == (16, 64)

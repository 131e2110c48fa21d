"""The plan of a kernel that gathers a factor: registers, barriers, who hands a stage on, what is refused."""

import pytest

from fusekit.plan.arch.sm_90a import ROW as SM90A
from fusekit.plan.gemm import GATHER_WARPS
from fusekit.plan.tiles import refusals
from tests.plans import gemm_plan

WGRAD = {"op": "grouped-wgrad"}


def arrivals(plan, region):
    return next(item.arrivals for item in plan.shared.regions if item.name == region)


@pytest.mark.parametrize(
    ("keys", "registers"),
    [
        ({"tile": (128, 192), "gather": "x"}, (24, 224, 40)),
        ({"tile": (256, 128), "gather": "x"}, (24, 216, 56)),
        ({"tile": (128, 128), "gather": "x", "backward": True, "dbias": True}, (40, 216, 40)),
        ({"tile": (256, 192), "gather": "dy"} | WGRAD, (24, 224, 40)),
        ({"tile": (128, 192), "gather": "x", "dbias": True} | WGRAD, (32, 224, 32)),
    ],
)
def test_four_warpgroups_share_the_registers(keys, registers):
    plan = gemm_plan(**keys)
    assert plan.threads == 512
    assert (*plan.registers, plan.fourth_registers) == registers
    load, consumer, gather = registers
    assert 128 * (load + 2 * consumer + gather) <= SM90A.registers


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_a_stage_is_there_when_all_who_bring_it_have_arrived(cluster):
    plain = gemm_plan(tile=(128, 128), cluster=cluster)
    relayed = gemm_plan(tile=(128, 128), cluster=cluster, gather="x")
    fenced = gemm_plan(tile=(128, 128), cluster=cluster, gather="x", backward=True, dbias=True)
    assert set(arrivals(plain, "stages_full")) == {1}
    assert set(arrivals(relayed, "stages_full")) == {2}  # the load thread and the warp that hands it on
    assert arrivals(relayed, "landed") == (32 * GATHER_WARPS,) * relayed.stages
    assert set(arrivals(fenced, "stages_full")) == {1 + 32 * GATHER_WARPS}
    assert all(region.name != "landed" for region in fenced.shared.regions)
    assert arrivals(relayed, "stages_empty") == arrivals(plain, "stages_empty")
    assert set(arrivals(relayed, "tiles_empty")) == {arrivals(plain, "tiles_empty")[0] + GATHER_WARPS + 1}


def test_what_comes_by_tma_is_the_other_factor():
    assert gemm_plan(tile=(128, 192)).tma_bytes == (128 + 192) * 128
    assert gemm_plan(tile=(128, 192), gather="x").tma_bytes == 192 * 128
    assert gemm_plan(tile=(128, 192), gather="x", **WGRAD).tma_bytes == 128 * 128
    assert gemm_plan(tile=(128, 192), gather="dy", **WGRAD).tma_bytes == 192 * 128


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"tile": (128, 256), "gather": "x"}, "a multiple of 16 from 16 to 192"),
        ({"tile": (128, 256), "gather": "x"} | WGRAD, "from 64 to 192"),
        ({"tile": (256, 192), "gather": "x"}, "at most 160 of a consumer's 216 are free"),
    ],
)
def test_a_tile_that_leaves_too_few_registers_is_refused(keys, rule):
    plan = gemm_plan(**keys)
    assert any(rule in refusal.rule for refusal in refusals(plan, "pingpong" if plan.pingpong else "cooperative"))

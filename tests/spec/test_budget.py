"""Shared memory and register arithmetic."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.errors import SpecError
from fusekit.spec.budget import CLUSTERS, GLU_LAYOUTS, MAINLOOPS, SM90A, budget, default_mainloop, refusals


@pytest.mark.parametrize(
    ("tile", "mainloop", "stages", "shared", "registers"),
    [
        ((64, 64), "pingpong", 8, 8 * 16384 + 35072, 32),
        ((128, 160), "pingpong", 5, 5 * 36864 + 35072, 160),
        ((128, 192), "pingpong", 5, 5 * 40960 + 18688, 192),
        ((128, 256), "cooperative", 4, 4 * 49152 + 35072, 128),
        ((256, 128), "cooperative", 4, 4 * 49152 + 35072, 128),
        ((256, 192), "cooperative", 3, 3 * 57344 + 35072, 192),
    ],
)
def test_known_tiles(tile, mainloop, stages, shared, registers):
    assert default_mainloop(tile) == mainloop
    found = budget(tile, (1, 1), mainloop)
    assert (found.stages, found.shared_bytes, found.accumulator_registers) == (stages, shared, registers)


@pytest.mark.parametrize("tile", [(64, 64), (128, 192), (256, 128), (256, 192)])
def test_weight_gradients_use_what_a_gemm_does(tile):
    loop = default_mainloop(tile)
    assert budget(tile, (1, 1), loop, op="grouped-wgrad") == budget(tile, (1, 1), loop)


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
    found = budget(tile, (1, 1), default_mainloop(tile), glu_layout=glu_layout, backward=True, recompute=recompute)
    assert (found.stages, found.epilogue_bytes) == (stages, epilogue)
    assert found.shared_bytes <= SM90A.shared_bytes


def test_registers_of_a_cta_fit_the_file():
    found = budget((128, 128), (2, 1), "pingpong")
    consumers = found.threads - 128
    assert consumers * found.consumer_registers + 128 * found.producer_registers <= 65536


def test_shared_memory_arithmetic_is_told():
    small = dataclasses.replace(SM90A, shared_bytes=102400)
    with pytest.raises(SpecError) as caught:
        budget((128, 128), (1, 1), "pingpong", limits=small)
    assert str(caught.value) == (
        "(128 + 128) x 64 x 2 = 32768 bytes a stage; 102400 - 2304 (bias, barriers) - 32768 (epilogue) = 67328 "
        "bytes of shared memory hold 2 stages, at least 3 are needed; take a smaller tile"
    )


def test_cluster_is_told():
    (refusal,) = refusals((128, 128), (3, 1), "pingpong")
    assert refusal.key == "cluster"
    assert refusal.rule == "a cluster is one of [1, 1], [2, 1], [1, 2]"


@given(
    tile=st.tuples(st.sampled_from([32, 64, 128, 192, 256]), st.integers(1, 300)),
    cluster=st.sampled_from(CLUSTERS),
    mainloop=st.sampled_from(MAINLOOPS),
    op=st.sampled_from(["grouped-gemm", "grouped-wgrad"]),
    b_major=st.sampled_from(["k", "n"]),
    glu_layout=st.sampled_from(["none", *GLU_LAYOUTS]),
    backward=st.booleans(),
    recompute=st.booleans(),
)
def test_what_is_not_refused_fits(tile, cluster, mainloop, op, b_major, glu_layout, backward, recompute):
    keys = {"op": op, "b_major": b_major, "glu_layout": glu_layout}
    if backward and op != "grouped-wgrad":
        keys |= {"backward": True, "recompute": recompute}
    if refusals(tile, cluster, mainloop, **keys):
        with pytest.raises(SpecError):
            budget(tile, cluster, mainloop, **keys)
        return
    found = budget(tile, cluster, mainloop, **keys)
    assert SM90A.min_stages <= found.stages <= SM90A.max_stages
    assert found.stages * found.stage_bytes + found.epilogue_bytes < found.shared_bytes <= SM90A.shared_bytes
    assert found.stages == SM90A.max_stages or found.shared_bytes + found.stage_bytes > SM90A.shared_bytes
    assert found.accumulator_registers <= SM90A.accumulator_registers < found.consumer_registers
    if op == "grouped-wgrad":
        assert tile[0] % 64 == tile[1] % 64 == 0
        return
    assert tile[1] % (32 if glu_layout != "none" else 16) == 0

"""Tiles of FP8 weights, on the CPU: the device code runs as it is written, a whole warpgroup at a time, over memory
that lies as TMA leaves it. Registers are arrays with an element for each thread; PTX is interpreted.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.operands import w_scale
from fusekit.kernels.gemm.operands.base import Tile
from fusekit.kernels.gemm.sm90 import dequantised
from fusekit.kernels.gemm.sm90.main_loop import Run
from fusekit.reference.fp8 import table
from tests.kernels.plain import plain
from tests.kernels.warpgroup import LANE, PTX, WARP, Machine, Mma, Registers, interpreted
from tests.plans import gemm_plan

K, N, GROUPS = 320, 384, 2  # two blocks and a half


def module_on(machine, scales, consumer):
    """`dequantised` on this machine."""
    arch = SimpleNamespace(make_warp_uniform=lambda value: value, warp_idx=lambda: 4 * (1 + consumer) + WARP)
    return plain(
        dequantised,
        ptx=PTX,
        inline=interpreted(machine, scales),
        fma=lambda a, b, c: (np.float32(a).astype(float) * np.float32(b) + c).astype(np.float32).astype(float),
        release=machine.release,
        warpgroup=SimpleNamespace(
            Field=SimpleNamespace(ACCUMULATE="accumulate"), wait_group=machine.wait, fence=lambda: None,
            commit_group=machine.commit,
        ),
        column_of=lambda tile: tile,
        cute=SimpleNamespace(
            arch=arch, size=len, gemm=machine.gemm, recast_tensor=lambda tensor, kind: tensor,
            make_tensor=lambda tensor, layout: tensor, make_layout=lambda size: size,
        ),
    )  # fmt: skip


CASES = {
    "few": {"tile": (16, 128)},
    "few, low": {"tile": (32, 64), "glu_layout": "concat"},
    "more": {"tile": (64, 128), "mainloop": "swap-ab"},
    "many": {"tile": (128, 128), "mainloop": "cooperative", "glu_layout": "concat"},
}
LEFT = {"many": [128, 97, 96, 65, 64, 1]}  # rows that a tile has, where it matters
HEIGHTS = {128: 128, 97: 128, 96: 96, 65: 96, 64: 64, 1: 64}  # how many of them are multiplied


@pytest.mark.parametrize("consumer", [0, 1])
@pytest.mark.parametrize(("case", "left"), [(case, left) for case in CASES for left in LEFT.get(case, [16])])
def test_a_tile_is_the_sum_of_its_blocks_times_their_scales(case, left, consumer):
    plan = gemm_plan(quant="in=fp8-weights", **CASES[case])
    (tile_m, tile_n), concat = plan.tile, plan.glu_layout == "concat"
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.resize(np.setdiff1d(np.arange(256), [0x7F, 0xFF]), N * K)).reshape(N, K).astype(np.uint8)
    x = rng.integers(-4, 5, (tile_m, K)).astype(float)
    scales = rng.uniform(0.5, 2, (GROUPS, N // 128, -(-K // 128))).astype(np.float32)
    n_tile, group = 1, 1
    columns = n_tile * tile_n + np.arange(tile_n)
    if concat:
        half = n_tile * tile_n // 2 + np.arange(tile_n // 2)
        columns = np.concatenate([half, N // 2 + half])
    machine = Machine(plan, codes[columns], x)
    of_scales = plain(w_scale, ptx=PTX, Int64=lambda value: np.asarray(value, np.int64))
    module = module_on(machine, scales, consumer)
    loop = object.__new__(module.DequantisedLoop)
    loop.plan, loop.x_dtype, loop.concat = plan, None, plan.halved and concat
    loop.share = tile_n // (1 if plan.pingpong else 2)
    loop.blocks = loop.share // 64
    passed = []
    loop.turns = SimpleNamespace(pass_on=lambda consumer: passed.append(len(machine.there)))
    loop.tiled_mma = Mma
    loop.scales = object.__new__(of_scales.WScale)
    loop.await_stage = machine.await_stage
    got = []
    loop.exchange = loop.hand_over = lambda sums, *rest: got.extend([sums.copy(), rest[-1]])
    work = SimpleNamespace(
        extents=SimpleNamespace(k=K, n=N, half_n=N // 2), warp_of_cta=consumer * 4 + WARP, warpgroup=consumer,
        operands=SimpleNamespace(w_scale=SimpleNamespace(toint=lambda: 0)),
    )  # fmt: skip

    def registers(rows, x):
        products = tuple(Registers(machine, rows // 2) for _ in range(loop.blocks))
        sets = tuple(Registers(machine, 8) for _ in range(module.SETS))
        read, scales = np.zeros((loop.ahead * 4, 128), np.uint32), np.zeros((loop.blocks, 128))
        return module.Fragments(products, sets, read, scales, np.zeros((loop.blocks * rows // 2, 128)), x)

    loop.registers = registers
    where = type("X", (), {"__getitem__": lambda self, at: at})()
    pointer = SimpleNamespace(toint=lambda: 0)
    stages = SimpleNamespace(w=pointer, full=0, empty=0, exchange=None)
    run = loop.of_tile(Run(0, -(-K // 128)), Tile(0, tile_m, n_tile, group, 0), work)
    rows_left = left - (consumer * 64 if case == "many" else 0)
    loop.run_tile(None, where, stages, run, rows_left, consumer, LANE)

    height = HEIGHTS[left] if case == "many" else tile_m
    assert case != "many" or got[1] == height
    assert (machine.held, machine.flown) == ((3, 3) if tile_m <= 32 else (2, 4))  # high tiles read no stage ahead
    assert passed == [3]
    assert len(machine.released) == len(machine.there) == 3
    values = table("e4m3")[codes[columns]].astype(float)
    for block in range(loop.blocks):
        for index in range(height // 2):
            chunk, (r, c) = index // 4, divmod(index % 4, 2)
            row = (0 if plan.pingpong else consumer * 64) + block * 64 + WARP * 16 + LANE // 4 + r * 8
            token = chunk * 8 + LANE % 4 * 2 + c
            want = np.zeros(128)
            for b in range(-(-K // 128)):
                part = slice(b * 128, (b + 1) * 128)
                exact = np.einsum("tk,tk->t", values[row, part], x[token, part])
                scale = scales[group, columns[row] // 128, b]
                want = (exact.astype(np.float32).astype(float) * scale + want).astype(np.float32).astype(float)
            assert np.array_equal(got[0][block * (tile_m // 2) + index], want)

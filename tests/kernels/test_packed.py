"""Tiles of MXFP4 weights, on the CPU: see warpgroup.py. Scales come as the warp that fetches them leaves them."""

from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.operands import w_scale
from fusekit.kernels.gemm.operands.base import Tile
from fusekit.kernels.gemm.sm90 import dequantised, packed
from fusekit.kernels.gemm.sm90.main_loop import Run
from fusekit.reference import mxfp4
from tests.kernels.plain import plain
from tests.kernels.warpgroup import LANE, PTX, WARP, Machine, Mma, Registers, interpreted
from tests.plans import gemm_plan

K, N, GROUPS = 320, 384, 2  # two stages and a half
CASES = {
    "few": {"tile": (16, 128)},
    "more": {"tile": (64, 128), "mainloop": "swap-ab", "glu_layout": "concat"},
    "many": {"tile": (128, 128), "mainloop": "cooperative", "glu_layout": "interleaved"},
}


class Stages(Machine):
    """With a place for scales after all of w; of each row the two words that have its four."""

    def __init__(self, plan, w, x, scales, addresses):
        super().__init__(plan, w, x)
        self.scales, self.addresses, self.first = scales, addresses, self.memory.size
        self.memory = np.concatenate([self.memory, np.zeros(plan.stages * plan.tile[1] * 8, np.uint8)])

    def load(self, stage, number):
        super().load(stage, number)
        at = self.first + stage * self.plan.tile[1] * 8
        end = self.scales.size
        for row, address in enumerate(self.addresses):
            for byte in range(8):
                place = address + 4 * number + byte
                self.memory[at + 8 * row + byte] = self.scales[place] if place - byte % 4 < end else 0


def fetched_from(plan, n_tile, group):
    """Addresses from which the fetching warp's lanes read the rows of a tile."""
    module = plain(w_scale, ptx=PTX, Int64=int)
    operand = object.__new__(module.WScale)
    operand.plan, operand.concat = plan, plan.halved and plan.glu_layout == "concat"
    operand.kit = SimpleNamespace(column_of=lambda tile: tile)
    idle = SimpleNamespace(extents=SimpleNamespace(n=N, half_n=N // 2))
    lanes = [operand.rows_from(idle, 0, n_tile, group, K // 32, lane) for lane in range(32)]
    return [int(lanes[row % 32][row // 32]) for row in range(plan.tile[1])]


@pytest.mark.parametrize("consumer", [0, 1])
@pytest.mark.parametrize(("case", "height"), [("few", 16), ("more", 64), ("many", 128), ("many", 96), ("many", 64)])
def test_a_tile_is_the_product_with_values_times_scales(case, height, consumer):
    plan = gemm_plan(quant="in=mxfp4-weights", **CASES[case])
    (tile_m, tile_n), n_tile, group = plan.tile, 1, 1
    rng = np.random.default_rng(0)
    w = mxfp4.random_bytes((GROUPS, N, K // 32, 16), 1)
    scales = rng.integers(0, 250, (GROUPS, N, K // 32)).astype(np.uint8)
    scales[0] = 255  # of another group
    scales[1, :, -1] = 120
    columns = n_tile * tile_n + np.arange(tile_n)
    if plan.halved and plan.glu_layout == "concat":
        half = n_tile * tile_n // 2 + np.arange(tile_n // 2)
        columns = np.concatenate([half, N // 2 + half])
    # A token for each 16 of K that sees nothing else, so that no sum is rounded.
    x = np.zeros((tile_m, K))
    x[np.arange(tile_m), rng.permutation(np.resize(np.arange(K), tile_m))] = 1
    addresses = fetched_from(plan, n_tile, group)
    machine = Stages(plan, w[group, columns].reshape(tile_n, -1), x, scales.reshape(-1), addresses)
    arch = SimpleNamespace(
        make_warp_uniform=lambda value: value, warp_idx=lambda: 4 * (1 + consumer) + WARP, lane_idx=lambda: LANE
    )
    flags = SimpleNamespace(
        Field=SimpleNamespace(ACCUMULATE="accumulate"), wait_group=machine.wait, fence=lambda: None,
        commit_group=machine.commit,
    )  # fmt: skip
    device = {
        "ptx": PTX, "inline": interpreted(machine), "release": machine.release, "Uint32": np.uint32, "warpgroup": flags,
        "cute": SimpleNamespace(arch=arch, gemm=machine.gemm, recast_tensor=lambda tensor, kind: tensor),
    }  # fmt: skip
    parent = plain(dequantised, **device)
    module = plain(packed, **device)
    module.PackedLoop.__bases__ = (parent.DequantisedLoop,)
    loop = object.__new__(module.PackedLoop)
    loop.plan, loop.share, loop.tiled_mma, loop.await_stage = plan, tile_n // 2, Mma, machine.await_stage
    loop.blocks, loop.turns = 1, SimpleNamespace(pass_on=lambda consumer: None)
    got = []
    loop.exchange = loop.hand_over = lambda product, *_: got.append(product.numbers.copy())

    def registers(rows, x):
        sets = tuple(Registers(machine, 8) for _ in range(parent.SETS))
        read, exponents = np.zeros((loop.ahead * 8, 128), np.uint32), np.zeros((4, 128), np.uint32)
        return parent.Fragments((Registers(machine, rows // 2),), sets, read, exponents, None, x)

    loop.registers = registers
    where = type("X", (), {"__getitem__": lambda self, at: at})()
    stages = SimpleNamespace(
        w=SimpleNamespace(toint=lambda: 0), scales=SimpleNamespace(toint=lambda: machine.first), full=0, empty=0,
        exchange=None,
    )  # fmt: skip
    count = -(-K // 128)
    run = loop.of_tile(Run(0, count), Tile(0, tile_m, n_tile, group, 0), SimpleNamespace(extents=SimpleNamespace(k=K)))
    rows_left = height - (consumer * 64 if case == "many" else 0)
    loop.run_tile(None, where, stages, run, rows_left, consumer, LANE)

    assert (machine.held, machine.flown) == (3, 3)  # tiles of any height read a stage ahead
    assert len(machine.released) == len(machine.there) == count
    want = mxfp4.decode(w[group, columns], scales[group, columns]) @ x.T
    for index in range(height // 2):
        chunk, (r, c) = index // 4, divmod(index % 4, 2)
        row, token = consumer * 64 + WARP * 16 + LANE // 4 + r * 8, chunk * 8 + LANE % 4 * 2 + c
        assert np.array_equal(got[0][index], want[row, token])

"""dbias of a weight gradient as a warp sums it, with 32 lanes of NumPy in the place of its registers."""

import itertools

import numpy as np
import pytest

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands import column_sums
from fusekit.kernels.gemm.operands.column_sums import UNIT, ColumnSums
from fusekit.kernels.gemm.sm90 import kit
from tests.plans import gemm_plan

TILE_K = 64
LANES = np.arange(32)


def plan(tile=(128, 192), cluster=(1, 1), pingpong=True, dynamic=False, **changes):
    keys = {"op": "grouped-wgrad", "dbias": True} | changes
    mainloop, schedule = "pingpong" if pingpong else "cooperative", "dynamic" if dynamic else "static"
    return gemm_plan(tile=tile, cluster=cluster, mainloop=mainloop, schedule=schedule, **keys)


def column_sums_of(plan):
    (result,) = (operand for operand in plan.operands if operand.name == "column_sums")
    return result


def swizzled(dy):
    """A stage of dy [64 tokens, columns] as TMA leaves it: boxes of 64 columns, 16-byte units XOR token % 8."""
    boxes = dy.reshape(TILE_K, -1, 8, 8).transpose(1, 0, 2, 3)
    memory = np.empty_like(boxes)
    for token, unit in itertools.product(range(TILE_K), range(8)):
        memory[:, token, unit ^ (token % 8)] = boxes[:, token, unit]
    return memory.reshape(-1)


@pytest.mark.parametrize("tiles_n", [1, 2, 3, 4, 7, 8, 15, 16, 40])
@pytest.mark.parametrize(("tile", "pingpong"), [((64, 128), True), ((128, 192), True), ((256, 128), False)])
def test_every_column_is_summed_over_all_tokens(tile, pingpong, tiles_n, monkeypatch):
    """The tiles that share out the columns, each with its warps: every column once, every token in it."""
    dy = np.random.default_rng(0).integers(1, 1 << 15, (TILE_K, tile[0]), dtype=np.uint16)
    stage = swizzled(dy).view(np.uint32)

    def load(address):
        assert (address % 16 == 0).all()
        return [stage[address // 4 + word] for word in range(4)]

    monkeypatch.setattr(ptx, "divide", lambda a, b: a // b)
    monkeypatch.setattr(ptx, "flag", int)
    monkeypatch.setattr(ptx, "load_shared_v4", load)
    monkeypatch.setattr(column_sums, "Uint32", lambda word: word)
    monkeypatch.setattr(ptx, "unpack_pair", lambda packed, dtype: (packed & 0xFFFF, packed >> 16))
    some = plan(tile, pingpong=pingpong)
    sums = ColumnSums(some, column_sums_of(some), kit)
    sharers = sums.sharers(tiles_n)
    assert sharers <= tiles_n < 2 * sharers or sharers == sums.units
    units = sums.units // sharers
    result = {}
    for part, warp in itertools.product(range(sharers), range(sums.warps)):
        token, unit = sums.of_lane(LANES, part * sums.warps + warp, units)
        totals = [np.zeros(32, np.int64) for _ in range(UNIT)]
        box = unit // sums.box_units * sums.box_bytes
        for turn in range(units):
            first = token + 2 * turn * (32 // units)
            sums.add_two(totals, box, first, 32 // units, unit & (sums.box_units - 1))
        for lane in LANES[token == 0]:
            mates = (unit == unit[lane]).nonzero()[0]
            assert mates.tolist() == list(range(lane, lane + 32 // units))  # what the shuffles add up
            for index, total in enumerate(totals):
                column = unit[lane] * UNIT + index
                assert column not in result
                result[column] = total[mates].sum()
    assert [result[column] for column in range(tile[0])] == dy.sum(axis=0, dtype=np.int64).tolist()


@pytest.mark.parametrize(
    ("tile", "pingpong", "summing", "reading"),
    [((64, 128), True, 2, 6), ((128, 192), True, 2, 6), ((128, 128), False, 2, 10), ((256, 128), False, 2, 10)],
)
def test_who_reads_tiles_and_stages(tile, pingpong, summing, reading):
    some = plan(tile, pingpong=pingpong)
    assert (some.idle_readers, some.reading_warps) == (summing, reading)
    assert len(column_sums_of(some).warps(some)) == some.idle_readers
    plain = plan(tile, pingpong=pingpong, dbias=False)
    assert (plain.idle_readers, plain.reading_warps) == (0, reading - summing)
    backward = plan(tile, pingpong=pingpong, op="grouped-gemm", backward=True)
    assert (backward.idle_readers, backward.reading_warps) == (0, reading - summing)
    assert backward.sums
    assert not some.sums
    assert some.ring_readers == 1 + reading
    assert plan(tile, (1, 2), pingpong, dynamic=True).ring_readers == 2 * (1 + reading)

"""Where the gathering warps put each 16 bytes of a row: at the 128-byte swizzle's place, whatever the tile's height."""

from types import SimpleNamespace

import pytest

from fusekit.kernels.gemm.operands import gather
from fusekit.plan.gemm import GATHER_WARPS
from tests.kernels.plain import plain
from tests.plans import gemm_plan

WARP, UNITS, ROW_BYTES = 32, 8, 128


@pytest.mark.parametrize(
    "keys", [{"tile": (16, 64)}, {"tile": (32, 128)}, {"tile": (128, 128)}, {"tile": (128, 128), "op": "grouped-wgrad"}]
)
def test_units_of_rows_are_swizzled(keys):
    plan, copies = gemm_plan(gather="x", **keys), {}

    def copy(destination, place, source, offset, flags, number):
        assert destination + place not in copies
        copies[destination + place] = source + offset

    module = plain(gather, ptx=SimpleNamespace(copy_async=copy, all_unless_above=lambda flags, left, bound: flags))
    half = module.Gather(plan, None, None)
    shared = SimpleNamespace(x=SimpleNamespace(toint=lambda: 0), w=SimpleNamespace(toint=lambda: 0))
    for warp in range(GATHER_WARPS):
        for lane in range(WARP):
            first = warp * half.share + lane // UNITS
            rows = [first + 4 * number for number in range(half.share // 4)]
            sources = [row * half.boxes * ROW_BYTES + lane % UNITS * 16 for row in rows]
            half.copy((0, *sources), 0, shared, 0, warp, lane)
    expected = {
        box * half.height * ROW_BYTES + row * ROW_BYTES + (unit ^ row % 8) * 16: (row * half.boxes + box) * ROW_BYTES
        + unit * 16
        for box in range(half.boxes)
        for row in range(half.height)
        for unit in range(UNITS)
    }
    assert copies == expected

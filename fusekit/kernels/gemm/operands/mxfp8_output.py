"""FP8 values of the rows of y or dz as MXFP8: a warp finds the largest of 32 columns of its 16 rows, four times a
block.
"""

from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.operands import fp8_output as blocks
from fusekit.kernels.gemm.operands.fp8_output import Fp8Rows
from fusekit.kernels.quantise import fp8
from fusekit.kernels.quantise.mx import MX_BLOCKS, atom
from fusekit.plan.gemm import WARP
from fusekit.plan.quant import SIDE


class Mxfp8Output(blocks.Fp8Output):
    """Their scales are words of four bytes, one for each of 128 columns of a row."""

    def scales_of(self, pairs):
        """A word of each row, and four reciprocals."""
        return tuple(zip(*(row_scales(words) for words in pairs), strict=True))

    def store_scales(self, scales, column: Int32, width: Int32, rows, target) -> None:
        lane = cute.arch.lane_idx()
        row = rows.row + (lane >> 2) + (lane & 1) * 8
        scale = ptx.choose(lane & 1, lanes.float_of(scales[1]), lanes.float_of(scales[0]))
        first = ((lane & 3) < 2) & (column < width)
        across, step = ptx.divide(width + (SIDE - 1), SIDE), ptx.divide(column, SIDE)
        base = target.scales.toint()
        if not self.plan.quant.swizzled:
            at = base + (Int64(row) * Int64(across) + Int64(step)) * MX_BLOCKS
            lanes.store(at, [lanes.bits_of(scale)], 4, first & (row < rows.end))
            return
        lanes.store(place(base, row, across, step), [lanes.bits_of(scale)], 4, first)
        # Rows of the atom after the last one: by whoever has that.
        last = (rows.end - rows.row <= self.kit.WARP_ROWS) & (column < width)
        end = ptx.divide(rows.end + (SIDE - 1), SIDE) * SIDE
        for turn in range((SIDE - self.kit.WARP_ROWS + WARP - 1) // WARP):
            beyond = rows.row + self.kit.WARP_ROWS + turn * WARP + lane
            lanes.store(place(base, beyond, across, step), [Uint32(0)], 4, last & (beyond < end))


class YMxfp8(Mxfp8Output, blocks.YFp8):
    def parameter(self, given):
        return coded_rows(self.kit, given.y_q, given.y_s)


class DzMxfp8(Mxfp8Output, blocks.DzFp8):
    def parameter(self, given):
        return coded_rows(self.kit, given.dz_q, given.dz_s)


def coded_rows(kit, fp8_, scales) -> Fp8Rows:
    """The parameter; `stride` is not read."""
    return Fp8Rows(kit.ragged_map(kit.store_op(), fp8_, (SIDE, kit.WARP_ROWS)), scales.iterator, Int64(0))


def place(scales: Int64, row: Int32, across: Int32, step: Int32) -> Int64:
    """Address of the swizzled scales of a row in column block `step` of `across`."""
    return atom(scales, Int64(ptx.divide(row, SIDE)) * Int64(across) + Int64(step), row & (SIDE - 1))


def row_scales(words: list):
    """The bytes of a row's four blocks as a word, and their reciprocals. The four lanes of a row share its numbers."""
    packed, inverses, per_block = Uint32(0), [], len(words) // MX_BLOCKS
    for block in range(MX_BLOCKS):
        a = fp8.larger(*fp8.numbers(fp8.largest(words[block * per_block : (block + 1) * per_block])))
        for distance in (1, 2):
            a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, distance))
        byte, inverse = fp8.mx_scale_of(a)
        packed = packed | (byte << (8 * block))
        inverses.append(inverse)
    return packed, inverses

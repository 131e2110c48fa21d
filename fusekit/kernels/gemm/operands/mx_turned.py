"""FP8 values of y or dz along the tokens as MXFP8, by the warps that make the transpose elsewhere (turned.py).

A lane has a column, 32 tokens at a time. Its FP8 values go to shared memory byte by byte, as a box of rows: lanes that
are neighbours write neighbours. Backward that is where half of these tokens were.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.columns import SLABS, Place
from fusekit.kernels.gemm.operands.base import Idle
from fusekit.kernels.gemm.operands.turned import LINE, SIDE, UNIT, DzTurned, YTurned
from fusekit.kernels.quantise import fp8
from fusekit.kernels.quantise.mx import MX_BLOCKS, atom
from fusekit.plan.gemm import WARP
from fusekit.plan.quantise import MX_SIDE

UNITS = MX_SIDE // UNIT  # of a block


class MxColumns:
    """What differs from blocks of 128 tokens."""

    def coordinates(self, token, column) -> tuple:
        return column, token

    def scale_of_block(self, lines: Int32, quarter: Int32, slabs: Int32, lane: Int32, sums=None):
        """The scale of 32 tokens of the lane's column, and its reciprocal. slabs: of 16 tokens that have rows. sums:
        one of the column.
        """
        most = None
        for unit in range(UNITS):
            words = self.tokens(lines, quarter * UNITS + unit, slabs, lane)
            largest = fp8.largest(words)
            most = largest if most is None else fp8.larger_pairs(most, largest)
            self.add_up(sums, words)
        return fp8.mx_scale_of(fp8.larger(*fp8.numbers(most)))

    def values_of_slab(self, lines: Int32, slab: Int32, slabs: Int32, lane: Int32, inverse) -> list:
        """FP8 values of 16 tokens of the lane's column, four in a word."""
        packed = []
        for unit in range(2):
            words = self.tokens(lines, slab * 2 + unit, slabs, lane)
            numbers = [half for word in words for half in fp8.halves(word)]
            packed += [fp8.four_values(numbers[four : four + 4], inverse) for four in range(0, UNIT, 4)]
        return packed

    def tokens(self, lines: Int32, unit: Int32, slabs: Int32, lane: Int32) -> list:
        """Eight tokens of the lane's column; zeros where there are no rows."""
        there = ptx.flag(unit < slabs * 2)
        return [ptx.word_where(there, word) for word in self.load(lines, unit, lane)]

    def store_scale(self, idle: Idle, target, scale: Uint32, where: Place, quarter: Int32, place) -> None:
        """Stores the scale of a column. place: (first of 128 columns, the lane's among them, columns of the result)."""
        first, offset, width = place
        scale = ptx.word_where(ptx.flag(first + offset < width), scale)  # beyond them a tile is filled with zeros
        base, step = target.scales.toint(), ptx.divide(first, SIDE)
        if self.plan.quant.swizzled:
            down = ptx.divide(idle.extents.rows + (SIDE - 1), SIDE)
            at = atom(base, Int64(step) * Int64(down) + Int64(where.block), offset) + Int64(quarter)
        else:
            across = ptx.divide(width + (SIDE - 1), SIDE) * SIDE
            at = base + (Int64(where.block) * MX_BLOCKS + Int64(quarter)) * Int64(across) + Int64(first + offset)
        lanes.store(at, [scale], 1, first < width)


class YMxTurned(MxColumns, YTurned):
    @cute.jit
    def columns(self, idle: Idle, offset: Int32, column: Int32, where: Place, lane: Int32):
        """Quantises 128 columns from `column` on."""
        target, boxes = idle.operands.y_turned, idle.shared.turned_values
        width = idle.extents.half_n if cutlass.const_expr(self.plan.halved) else idle.extents.n
        self.sent(lane)
        for turn in cutlass.range(SIDE // WARP, unroll=1):
            lane_column = turn * WARP + lane
            lines = idle.shared.turned.toint() + offset + turn * (WARP * LINE)
            for quarter in cutlass.range(MX_BLOCKS, unroll=1):
                scale, inverse = self.scale_of_block(lines, quarter, where.slabs, lane)
                self.store_scale(idle, target, scale, where, quarter, (column, lane_column, width))
                box = boxes.toint() + quarter * (MX_SIDE * SIDE)
                for half in cutlass.range_constexpr(2):
                    words = self.values_of_slab(lines, quarter * 2 + half, where.slabs, lane, inverse)
                    store_bytes(words, box, lane_column, SIDE, half)
        self.send_values(target, [boxes], where.block, column, lane)


class DzMxTurned(MxColumns, DzTurned):
    @cute.jit
    def columns(self, idle: Idle, target, offset: Int32, extent, where: Place, lane: Int32, square=None, sums=None):
        """Quantises this warp's 32 of 128 columns; arguments as in `DzTurned.columns`."""
        first, width = extent
        slabs = idle.shared.staging + offset
        total = self.sum_of_column(sums)
        for quarter in cutlass.range(MX_BLOCKS, unroll=1):
            scale, inverse = self.scale_of_block(slabs.toint(), quarter, where.slabs, lane, total)
            self.store_scale(idle, target, scale, where, quarter, (first, idle.warp * WARP + lane, width))
            box = slabs.toint() + (quarter * 2 + 1) * self.plan.warp_bytes
            for half in cutlass.range_constexpr(1, -1, -1):
                words = self.values_of_slab(slabs.toint(), quarter * 2 + half, where.slabs, lane, inverse)
                if cutlass.const_expr(half):
                    cute.arch.sync_warp()  # all have read the slab whose place is taken
                store_bytes(words, box, lane, WARP, half)
        if cutlass.const_expr(sums is not None):
            self.store_number(sums, total[0], where.block, first + idle.warp * WARP + lane, width)
        boxes = [slabs + slab * self.plan.warp_bytes for slab in range(1, SLABS, 2)]
        self.send_values(target, boxes, where.block, first + idle.warp * WARP, lane)


def store_bytes(words: list, box: Int32, column: Int32, width: int, half: int) -> None:
    """FP8 values of 16 of 32 tokens of a column, four in a word, to rows of `width` bytes, whose 16-byte units are
    exchanged by the row, as tensor maps have it.
    """
    units = width // 16
    alike = SIDE // width  # rows whose units lie alike
    places = [box + (column & 15) + ((column >> 4) ^ row) * 16 for row in range(units)]
    for token in range(half * 16, half * 16 + 16):
        code = words[token % 16 // 4] >> (token % 4 * 8)
        ptx.store_shared_u8(places[token // alike % units], code, token * width)

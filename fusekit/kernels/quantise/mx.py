"""quantise to MXFP8: a byte of scale for 32 numbers of a row, and in the same pass for 32 of a column.

Source: OCP Microscaling Formats (MX) 1.0; scales are rounded up, as Transformer Engine does. The scales of a tile of
128 x 128 are 512 bytes in either orientation: the atom of swizzled scales (PTX ISA, "Scale factor layout").
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.ptx import divide, store_shared_u16
from fusekit.kernels.quantise import fp8
from fusekit.kernels.quantise.tiles import ACROSS, DEEP, PAIRS, THREADS, Place, QuantiseTiles, load_words
from fusekit.plan.quantise import ATOM, BF16, MX_SIDE, ROWS, SIDE, SWIZZLED

MX_BLOCKS = SIDE // MX_SIDE


class MxTiles(QuantiseTiles):
    """The kernel; calling it traces host function and device code. Groups begin at multiples of 128, if at all."""

    def __init__(self, transpose: bool, layout: str) -> None:
        super().__init__(BF16, ROWS, "", transpose, ROWS, rows=True, groups=True, gather=False, topk=0)
        self.grouped, self.swizzled = False, layout == SWIZZLED

    @cute.jit
    def tile(self, target, turned, place: Place, extents, step: Int32, tile: Int32, parts: Int32, thread: Int32):
        """Column block `step` of the rows of `place`, which lies at `tile`."""
        self.rows(target, place, extents, step, tile, None, thread)
        if cutlass.const_expr(self.transpose):
            words = self.columns_of(tile, thread)
            cute.arch.sync_threads()
            self.store_tokens(words, turned, place, extents, step, tile, thread)

    @cute.jit
    def row(self, target, place: Place, extents, step: Int32, line: Int32, tile_row: Int32, inverse, part: Int32):
        """One row, of which this thread has pieces `part` and `part` + 8; four threads share a block."""
        x_q, strides, x_s, _, _ = target
        _, columns = extents
        row = place.row + tile_row
        x_q = x_q + Int64(row) * strides[-1]
        two = Uint32(0)
        for half in cutlass.range_constexpr(2):
            words = load_words(line + ((part + half * 8) ^ (tile_row & 7)) * 16)
            a = fp8.larger(*fp8.numbers(fp8.largest(words)))
            for distance in cutlass.range_constexpr(2):
                a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
            scale, inverse = fp8.mx_scale_of(a)
            two = two | (scale << (half * 16))
            column = step * SIDE + (part + half * 8) * 8
            numbers = [number for word in words for number in fp8.halves(word)]
            packed = [fp8.four_values(numbers[:4], inverse), fp8.four_values(numbers[4:], inverse)]
            lanes.store(x_q + Int64(column), packed, 8, (row < place.end) & (column < columns))
        # Threads 0 and 4 have scales 0 and 2, 1 and 3.
        four = two | (cute.arch.shuffle_sync_bfly(two, 4) << 8)
        across = divide(columns + (SIDE - 1), SIDE)
        if cutlass.const_expr(self.swizzled):
            at = atom(x_s, Int64(place.number) * Int64(across) + Int64(step), tile_row)
            lanes.store(at, [four], 4, part == 0)
        else:
            at = x_s + (Int64(row) * Int64(across) + Int64(step)) * MX_BLOCKS
            lanes.store(at, [four], 4, (part == 0) & (row < place.end))

    def store_tokens(self, words, turned, place: Place, extents, step: Int32, tile: Int32, thread: Int32) -> None:
        """FP8 values of 32 rows of a thread's two columns, and their scales; `tile` is free."""
        x_t, strides, x_ts = turned
        rows, columns = extents
        pair, part = thread & (PAIRS - 1), divide(thread, PAIRS)
        scales, inverses = zip(*map(fp8.mx_scale_of, fp8.numbers(fp8.largest(words))), strict=True)
        across = divide(columns + (SIDE - 1), SIDE)
        if self.swizzled:
            down = divide(rows + (SIDE - 1), SIDE)
            for side, scale in enumerate(scales):
                at = atom(x_ts, Int64(step) * Int64(down) + Int64(place.number), pair * 2 + side) + Int64(part)
                lanes.store(at, [scale], 1)
        else:
            line = (Int64(place.number) * MX_BLOCKS + Int64(part)) * Int64(across) * SIDE
            lanes.store(x_ts + line + Int64(step * SIDE + pair * 2), [scales[0] | (scales[1] << 8)], 2)
        for row, word in enumerate(words):
            low, high = (
                fp8.multiply(number, inverse) for number, inverse in zip(fp8.halves(word), inverses, strict=True)
            )
            store_shared_u16(tile + (part * DEEP + row) * SIDE + pair * 2, fp8.two_values(low, high))
        cute.arch.sync_threads()
        tile_row, piece = thread >> 3, thread & 7
        column = step * SIDE + piece * 16
        for turn in range(SIDE * ACROSS // THREADS):
            line = tile_row + turn * (THREADS // ACROSS)
            row = place.row + line
            at = x_t + Int64(row) * strides[-1] + Int64(column)
            lanes.store(at, load_words(tile + line * SIDE + piece * 16), 16, (row < rows) & (column < columns))


def atom(scales: Int64, number: Int64, row: Int32) -> Int64:
    """Address of the four scales of row `row` of 128 in swizzled atom `number`."""
    return scales + number * ATOM + Int64((row & 31) * 16 + ((row >> 5) & 3) * 4)

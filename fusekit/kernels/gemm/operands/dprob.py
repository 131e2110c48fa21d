"""dprob[m]: a warp adds da * y over the tile's columns for its 16 rows; a second launch adds up the tiles along N.

A thread of the second launch has four rows. Rows of no group, whose parts are not written, stay as they are.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Rows, Work
from fusekit.kernels.gemm.parts import THREADS, VECTOR, WIDTH, Parts, sum_of_parts

AT_ONCE = 8  # products of a unit without gates that may wait to be added: both their factors hold a register


class Dots:
    """Both rows' da * y so far. rows: of the tensor. at_once: products that may wait to be added, None for a unit's."""

    def __init__(self, rows: Int32, at_once: int | None) -> None:
        self.sums = cute.make_rmem_tensor((2,), Float32)
        self.sums.fill(0.0)
        self.rows, self.at_once, self.added = rows, at_once, 0

    def add(self, r: int, product: Float32) -> None:
        if self.added == self.at_once:
            self.work_out()
        self.sums[r] = self.sums[r] + product
        self.added += 1

    def work_out(self) -> None:
        self.added = 0
        ptx.worked_out(self.sums[0], self.sums[1], self.rows)


class Dprob(Parts):
    step = 2

    def tiles(self, given) -> Int32:
        """Tiles along N."""
        n = given.preactivation.shape[1] // self.plan.sides
        return (n + (self.plan.tile[1] - 1)) // self.plan.tile[1]

    def words(self, given) -> Int64:
        return Int64(self.tiles(given)) * stride(given.dprob.shape[0])

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def rows(self, rows: Rows, work: Work, state, acc):
        return Dots(work.extents.rows, None if self.plan.kind.gated else AT_ONCE)

    def gradient(self, da, value, row_state, r: int):
        """Before any row_scale."""
        row_state.add(r, da * value)
        return da, value

    def unit(self, state, row_state, unit: int) -> None:
        row_state.work_out()

    @cute.jit
    def rows_end(self, rows: Rows, row_state, work: Work):
        """Stores sums of the lane's columns, added over the four lanes of a row."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.plan.turning):
            lane = ptx.fresh(lane)  # no register holds the address over a tile
        dots = [row_state.sums[0], row_state.sums[1]]
        for r in cutlass.range_constexpr(2):
            for step in cutlass.range_constexpr(2):
                dots[r] = dots[r] + cute.arch.shuffle_sync_bfly(dots[r], 1 << step)
        part = work.operands.dprob + Int64(rows.n_tile) * stride(work.extents.rows)
        row = rows.row + (lane >> 2)
        for r in cutlass.range_constexpr(2):
            if lane & 3 == r and row + 8 * r < rows.end:
                cute.arch.store(part + (row + 8 * r), Float32(dots[r]))

    # -- the second launch --------------------------------------------------------------------------------------------

    def then(self, given, groups, stream) -> None:
        rows = given.dprob.shape[0]
        offsets = None if groups is None else given.offsets.iterator
        blocks = cutlass.max((rows + (WIDTH - 1)) // WIDTH, 1)
        self.add_up(self.parts(given), given.dprob.iterator, offsets, groups, rows, self.tiles(given)).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add_up(self, parts, dprob, offsets, groups, rows: Int32, tiles: Int32):
        """A block has WIDTH rows."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = block * WIDTH + thread * VECTOR
        end = rows
        if cutlass.const_expr(offsets is not None):
            end = cutlass.min(offsets[groups - 1], rows)
        if row < end:
            total = sum_of_parts(parts.toint() + Int64(row) * 4, stride(rows) * 4, tiles)
            for index in cutlass.range_constexpr(VECTOR):
                if row + index < end:
                    cute.arch.store(dprob + (row + index), Float32(total[index]))


def stride(rows: Int32) -> Int64:
    """Words of a tile's part: a whole number of vectors."""
    return Int64((rows + (VECTOR - 1)) & -VECTOR)

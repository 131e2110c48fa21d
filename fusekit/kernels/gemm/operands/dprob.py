"""dprob[m]: a warp adds da * y over the tile's columns for its 16 rows; the parts of a row are its tiles along N.

There is one counter for the rows of each piece, a warpgroup's tile.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Extents, Idle, Rows, Work
from fusekit.kernels.gemm.operands.sums import Note, Summed, fresh
from fusekit.plan.gemm import WARP_ROWS
from fusekit.plan.operands.sums import NOTE_WORDS

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


class Dprob(Summed):
    step = 2

    def parameter(self, given):
        return given.dprob.iterator

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def rows(self, rows: Rows, work: Work, state, acc):
        return Dots(work.extents.rows, None if self.plan.kind.gated else AT_ONCE)

    def gradient(self, da, value, mine, r: int):
        """Before any row_scale."""
        mine.add(r, da * value)
        return da, value

    def unit(self, state, mine, unit: int) -> None:
        mine.work_out()

    def rows_end(self, rows: Rows, mine, work: Work) -> None:
        """Leaves sums of the lane's columns; the four lanes of a row write the same."""
        lane = cute.arch.lane_idx()
        lane = ptx.fresh(lane) if self.plan.turning else lane  # no register holds the address over a tile
        row = (work.warp_of_cta & 3) * WARP_ROWS + rows.block * 64 + (lane >> 2)
        box = work.shared.sums.toint() + (work.warp_of_cta >> 2) * self.sums.box_bytes
        address = box + (NOTE_WORDS + row) * 4
        for r in range(2):
            dot = mine.sums[r]
            for step in range(2):
                dot = dot + cute.arch.shuffle_sync_bfly(dot, 1 << step)
            ptx.store_shared_f32(address + 32 * r, dot)

    # -- an idle warp -------------------------------------------------------------------------------------------------

    def counters(self, extents: Extents) -> Int32:
        return ptx.divide(extents.rows, self.sums.piece) + extents.groups + 1

    def parts(self, extents: Extents) -> Int64:
        return Int64(self.sums.tiles_n(extents.n)) * Int64(extents.rows)

    def add(self, tile: Note, number: Int32, idle: Idle, barriers) -> None:
        self.add_rows(tile, number, fresh(idle), barriers)

    @cute.jit
    def add_rows(self, tile: Note, number: Int32, idle: Idle, barriers):
        """Take the sums of a piece's rows to their part of scratch; maybe add the parts up."""
        row, end, n_tile, group = tile
        operands, rows = idle.operands, idle.extents.rows
        lane = cute.arch.lane_idx()
        steps = self.sums.piece // 32
        dots = idle.shared.sums.toint() + ((number & 1) * self.sums.box_bytes + (NOTE_WORDS + lane) * 4)
        sums = [ptx.load_shared_f32(dots + 128 * step) for step in range(steps)]
        self.sums.taken(barriers, number)
        if row < end:
            tiles_n = self.sums.tiles_n(idle.extents.n)
            parts = self.sums.parts_of(self, operands.scratch, idle.extents) + (row + lane)
            left = end - row - lane
            for step in cutlass.range_constexpr(steps):
                if 32 * step < left:
                    cute.arch.store(parts + (Int64(n_tile) * rows + 32 * step), sums[step])
            counter = operands.scratch + (ptx.divide(row, self.sums.piece) + group)
            if self.sums.arrive(counter, lane) == tiles_n - 1:
                self.add_row_parts(operands.dprob + (row + lane), parts.toint(), left, rows, tiles_n)

    @cute.jit
    def add_row_parts(self, dprob, address: Int64, left: Int32, rows: Int32, count: Int32):
        """Add up the parts of a lane's rows, every 32nd of `left`; the first part of the first one is at `address`."""
        steps = self.sums.piece // 32
        totals = cute.make_rmem_tensor((steps,), Float32)
        totals.fill(0.0)
        for _ in cutlass.range(count, unroll=1):
            parts = [ptx.load_part(address + 128 * step, Int32(32 * step < left)) for step in range(steps)]
            for step in cutlass.range_constexpr(steps):
                totals[step] = totals[step] + parts[step]
            address += Int64(rows) * 4
        for step in cutlass.range_constexpr(steps):
            if 32 * step < left:
                cute.arch.store(dprob + 32 * step, totals[step])

"""dbias[e, n]: a warp adds dz over its rows of the tile, over its lanes as in `Shares`; an idle warp adds over the
four warps of a warpgroup, whose rows are a piece; a second launch adds up the pieces of a group.

Groups begin at any row, so pieces from each group's first row on are numbered row // piece + group: no two have one
number, and those of a group follow each other.

A warpgroup has a note of which tile is in its staging boxes, which the next epilogue alone needs again.

    full[wg]    4 arrivals (one a warp): all is left of the tile
    empty[wg]   1 arrival of the idle warp
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Idle, Rows, Tile, Work
from fusekit.kernels.gemm.parts import GroupSums
from fusekit.plan.operands.dbias import NOTE_BYTES

ROW_BITS = (16, 8, 4)  # of the lane: they number the eight rows of an accumulator fragment
NO_TILE = -1  # instead of a group: there are no more


class Note(NamedTuple):
    """Which tile it is: the warpgroup's first row, the group's end row, tile along N, group."""

    row: Int32
    end: Int32
    n_tile: Int32
    group: Int32


class Shares:
    """What a lane's two of a warp's 16 rows give to sums of columns, taken down while a unit is worked on.

    A column has to be added over the eight lanes that hold other rows of it. As soon as two columns are there, a lane
    keeps one and gives the other to its partner in lane bit 16; of two such results, in bit 8; then in bit 4. So eight
    columns take seven shuffles, few wait at a time, and number i ends with the lanes whose row bits are those of i,
    lowest first, as its i // 8 -th. Of fewer than eight columns, several lanes end with the same one.

    rows: of the tensor, where each eight are to be worked out before the next ones, for want of registers.
    """

    def __init__(self, lane: Int32, rows: Int32 | None) -> None:
        self.lane, self.rows = lane, rows
        self.waiting: list = [None] * len(ROW_BITS)
        self.columns: list = []

    def take(self, first, second) -> None:
        """The dz of the lane's two rows in the next columns: those of the one row, and of the other."""
        for a, b in zip(first, second, strict=True):
            self.pass_on(a + b, 0)

    def pass_on(self, value: Float32, level: int) -> None:
        """One more column that was added over the first `level` row bits."""
        if level == len(ROW_BITS):
            if self.rows is not None:
                ptx.worked_out(value, value, self.rows)
            self.columns.append(value)
        elif self.waiting[level] is None:
            self.waiting[level] = value
        else:
            other, self.waiting[level] = self.waiting[level], None
            upper = self.lane & ROW_BITS[level]
            kept, given = ptx.choose(upper, value, other), ptx.choose(upper, other, value)
            self.pass_on(kept + cute.arch.shuffle_sync_bfly(given, ROW_BITS[level]), level + 1)

    def unit_ends(self) -> list:
        """The lane's columns of a unit that has been worked on; and on to the next one."""
        for level, bit in enumerate(ROW_BITS):
            value, self.waiting[level] = self.waiting[level], None
            if value is not None:
                self.pass_on(value + cute.arch.shuffle_sync_bfly(value, bit), level + 1)
        columns, self.columns = self.columns, []
        return columns


class Dbias(GroupSums):
    step = 1

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.block = plan.warpgroup_rows
        self.barrier = plan.first_barrier("dbias")
        self.columns_at = plan.z_bytes  # in a warp's staging: its sums of columns
        self.sides, self.columns_of_unit = plan.sides, plan.epilogue_box
        self.values = self.sides * self.columns_of_unit // 4  # columns of dz that a lane works on in a unit
        self.kept = max(self.values // 8, 1)  # of them that it ends with
        self.units = plan.tile[1] // self.columns_of_unit
        self.tile_columns = self.sides * plan.tile[1]
        self.column_steps = -(-self.tile_columns // 128)  # of a warp that takes four columns a lane

    def words(self, given) -> Int64:
        rows, columns = given.preactivation.shape
        groups = given.offsets.shape[0] if self.plan.grouped else 1
        return Int64(rows // self.block + groups) * columns

    def first(self, begin: Int32, group: Int32, offsets, rows: Int32) -> Int32:
        return self.number(begin, group)

    def number(self, row: Int32, group: Int32) -> Int32:
        """Number of the piece that begins at a row of a group."""
        return ptx.divide(row, self.block) + group

    # -- consumer warps -----------------------------------------------------------------------------------------------

    @cute.jit
    def ahead(self, tile: Tile, work: Work):
        """The idle warp has read the last tile: what tile this is."""
        turn = tile.count >> 1 if cutlass.const_expr(self.plan.pingpong) else tile.count  # of the warpgroup
        warpgroup = work.warp_of_cta >> 2
        cute.arch.mbarrier_wait(self.empty(work.shared) + warpgroup, (turn & 1) ^ 1)
        note = (tile.row, tile.end, tile.n_tile, tile.group)
        ptx.store_shared_v4(work.shared.notes.toint() + warpgroup * NOTE_BYTES, note)

    def full(self, shared):
        return shared.barriers + self.barrier

    def empty(self, shared):
        return shared.barriers + (self.barrier + self.plan.arch.consumer_warpgroups)

    def start(self, tile, work: Work, warp_state):
        """Where a warp keeps its sums over rows, at zero."""
        sums = cute.make_rmem_tensor((self.units * self.kept,), Float32)
        sums.fill(0.0)
        return sums

    def rows(self, rows: Rows, work: Work, state, acc):
        self.clear_rows(acc, rows.end - rows.row, cute.arch.lane_idx())
        early = self.plan.crowded and self.plan.glu_layout != "interleaved"
        return Shares(cute.arch.lane_idx(), work.extents.rows if early else None)

    @cute.jit
    def clear_rows(self, acc, left: Int32, lane: Int32):
        """Zero da in rows of others, which are not to be summed: the warp has `left` rows of a 64-row block's `acc`."""
        if left < self.plan.arch.warp_rows:
            rows_left = left - ptx.divide(lane, 4)  # from the lane's first row on
            for r in cutlass.range_constexpr(2):
                for element in cutlass.range_constexpr(2 * r, cute.size(acc), 4):
                    for c in cutlass.range_constexpr(2):
                        acc[element + c] = ptx.where_above(rows_left, 8 * r, acc[element + c])

    def take(self, row_state: Shares, first, second) -> None:
        row_state.take(first, second)

    def unit(self, state, row_state: Shares, unit: int) -> None:
        """Add the columns of a unit that has been worked on to the warp's sums."""
        for kept, value in enumerate(row_state.unit_ends()):
            slot = unit * self.kept + kept
            state[slot] = state[slot] + value

    @cute.jit
    def finish_tile(self, state, work: Work):
        """Leave the warp's sums of columns."""
        lane = cute.arch.lane_idx()
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last boxes of y have left
        cute.arch.sync_warp()
        for unit in cutlass.range_constexpr(self.units):
            for kept in cutlass.range_constexpr(self.kept):
                where = work.staging.toint() + self.columns_at + self.column(unit, kept, lane) * 4
                ptx.store_shared_f32(where, state[unit * self.kept + kept])
        self.left(work)

    @cute.jit
    def left(self, work: Work):
        """The warp has left all that it has of the tile."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full(work.shared) + (work.warp_of_cta >> 2))

    @cute.jit
    def finish(self, count: Int32, work: Work):
        """There is no `count`-th tile."""
        if cute.arch.lane_idx() == 0:
            self.ahead(Tile(Int32(0), Int32(0), Int32(0), Int32(NO_TILE), count), work)
        self.left(work)

    def column(self, unit: int, kept: int, lane: Int32):
        """Column of the tile's part of dbias that a lane has the sum of as number `kept` of `unit`."""
        number = ((lane >> 4) & 1) + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1) * 4
        number = (number & (self.values - 1)) + 8 * kept
        side = number & (self.sides - 1)
        pair = ptx.divide(number, self.sides)  # chunk of 8 columns, and which of the lane's two in it
        inside = ptx.divide(pair, 2) * 8 + (lane & 3) * 2 + (pair & 1)
        if self.plan.glu_layout == "interleaved":
            return (unit * self.columns_of_unit + inside) * 2 + side
        if self.plan.glu_layout == "concat":
            return side * self.plan.tile[1] + unit * self.columns_of_unit + inside
        return (unit * self.sides + side) * self.columns_of_unit + inside

    # -- an idle warp -------------------------------------------------------------------------------------------------

    def assist(self, idle: Idle) -> None:
        """All warps of the load warpgroup."""
        self.add_pieces(idle, self.operand.warps(self.plan)[0])

    @cute.jit
    def add_pieces(self, idle: Idle, warp: cutlass.Constexpr):
        """Piece after piece, in turns of the warpgroups, until the tiles are over."""
        if idle.warp == warp:
            number = Int32(0)
            tile = self.note(idle.shared, number)
            while tile.group >= 0:
                self.take_columns(tile, number, idle)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(self.empty(idle.shared) + (number & 1))
                number += 1
                tile = self.note(idle.shared, number)

    @cute.jit
    def note(self, shared, number: Int32) -> Note:
        """Which tile the CTA's `number`-th piece is of, when all of it is there."""
        warpgroup = number & 1
        cute.arch.mbarrier_wait(self.full(shared) + warpgroup, (number >> 1) & 1)
        return Note(*ptx.load_shared_v4(shared.notes.toint() + warpgroup * NOTE_BYTES))

    def place(self, column, n_tile: Int32, n: Int32):
        """Where a column of the tile lies in dbias, and whether it does."""
        tile_n = self.plan.tile[1]
        if self.plan.glu_layout == "concat":
            side = ptx.divide(column, tile_n)
            inside = n_tile * tile_n + column - side * tile_n
            return side * n + inside, inside < n
        where = n_tile * self.tile_columns + column
        return where, where < n * self.sides

    @cute.jit
    def take_columns(self, tile: Note, number: Int32, idle: Idle):
        """Take the sums of a piece's columns, over the four warps, to their part."""
        row, end, n_tile, group = tile
        n = ptx.fresh(idle.extents.n)  # nothing is worked out ahead of the loop: idle warps have few registers
        lane = cute.arch.lane_idx()
        part = idle.operands.dbias + Int64(self.number(row, group)) * (n * self.sides)
        warp_bytes = self.plan.warp_bytes
        left = idle.shared.staging.toint() + ((number & 1) * 4 * warp_bytes + self.columns_at)
        for step in cutlass.range(self.column_steps, unroll=1):
            inside = (step * 32 + lane) * 4
            where, there = self.place(inside, n_tile, n)
            if inside < self.tile_columns and there and row < end:
                totals = list(ptx.load_shared_f32x4(left + inside * 4))
                for warp in range(1, 4):
                    others = ptx.load_shared_f32x4(left + (warp * warp_bytes + inside * 4))
                    totals = [total + other for total, other in zip(totals, others, strict=True)]
                ptx.store_parts_x4((part + where).toint(), totals)

"""dbias[e, n]: a warp adds dz over its rows of the tile, over its lanes as `Shares` says; the parts of a column are the
group's pieces along M. `BLOCK` of them are added up first, then the blocks.

For each tile along N there is one counter a block and one a group. A group without rows is zeroed.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Extents, Idle, Rows, Work
from fusekit.kernels.gemm.operands.sums import Note, Summed, fresh
from fusekit.plan.gemm import WARP_ROWS
from fusekit.plan.operands.dbias import BLOCK

ROW_BITS = (16, 8, 4)  # of the lane: they tell the eight rows of an accumulator fragment apart
PARTS_AT_ONCE = 4  # loads in flight while parts are added


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


class Dbias(Summed):
    step = 1

    def __init__(self, plan, told) -> None:
        super().__init__(plan, told)
        self.columns_at = plan.z_bytes  # in a warp's staging: its sums of columns
        self.sides, self.columns_of_unit = plan.sides, plan.epilogue_box
        self.values = self.sides * self.columns_of_unit // 4  # columns of dz that a lane works on in a unit
        self.kept = max(self.values // 8, 1)  # of them that it ends with
        self.units = plan.tile[1] // self.columns_of_unit
        self.tile_columns = self.sides * plan.tile[1]
        self.column_steps = -(-self.tile_columns // 128)  # of a warp that takes four columns a lane

    def parameter(self, given):
        return given.dbias.iterator

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def start(self, tile, work: Work, own):
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
        if left < WARP_ROWS:
            mine = left - ptx.divide(lane, 4)  # from the lane's first row on
            for r in cutlass.range_constexpr(2):
                for element in cutlass.range_constexpr(2 * r, cute.size(acc), 4):
                    for c in cutlass.range_constexpr(2):
                        acc[element + c] = ptx.where_above(mine, 8 * r, acc[element + c])

    def take(self, mine: Shares, first, second) -> None:
        mine.take(first, second)

    def unit(self, state, mine: Shares, unit: int) -> None:
        """Add the columns of a unit that has been worked on to the warp's sums."""
        for kept, value in enumerate(mine.unit_ends()):
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

    def blocks(self, extents: Extents) -> Int32:
        """The numbers of blocks are less than this."""
        return ptx.divide(ptx.divide(extents.rows, self.sums.piece) + extents.groups, BLOCK) + extents.groups + 1

    def counters(self, extents: Extents) -> Int32:
        return (self.blocks(extents) + extents.groups) * self.sums.tiles_n(extents.n)

    @cute.jit
    def add(self, tile: Note, number: Int32, idle: Idle, barriers):
        self.take_columns(tile, number, fresh(idle))
        self.sums.taken(barriers, number)
        if tile.row < tile.end:
            self.end_piece(tile, idle)

    def open(self, idle: Idle) -> None:
        self.zero_empty(idle)

    @cute.jit
    def zero_empty(self, idle: Idle):
        """Zero dbias of the groups without rows; one warp of each CTA, all of them together."""
        dbias, n = idle.operands.dbias, idle.extents.n
        lane = cute.arch.lane_idx()
        group, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        columns = n * self.sides
        while group < idle.extents.groups:
            begin, end = self.rows_of(idle, group)
            if end <= begin:
                column = lane
                while column < columns:
                    cute.arch.store(dbias + (Int64(group) * columns + column), Float32(0.0))
                    column += 32
            group += blocks

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
        """Take the sums of a piece's columns, over the four warps, to their part of scratch."""
        row, end, n_tile, group = tile
        n = idle.extents.n
        lane = cute.arch.lane_idx()
        columns = n * self.sides
        parts = self.sums.parts_of(self, idle.operands.scratch, idle.extents)
        part = parts + Int64(ptx.divide(row, self.sums.piece) + group) * columns
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

    @cute.jit
    def end_piece(self, tile: Note, idle: Idle):
        """A piece's part is in scratch: maybe add up its block, then maybe its group."""
        if self.end_block(tile, fresh(idle)) != 0:
            self.end_group(tile, fresh(idle))

    # The two steps of it begin anew from the kernel's parameters: the warp cannot keep what they have in common.

    def pieces_of(self, group: Int32, idle: Idle):
        """Number of a group's first piece, and how many it has."""
        piece = self.sums.piece
        begin, end = self.rows_of(idle, group)
        return ptx.divide(begin, piece) + group, ptx.divide(end - begin + (piece - 1), piece)

    @cute.jit
    def end_block(self, tile: Note, idle: Idle) -> Int32:
        """A piece's part is in scratch: 1 if its block is complete, whose sum then is in the first piece's place."""
        row, _, n_tile, group = tile
        scratch, n = idle.operands.scratch, idle.extents.n
        first, pieces = self.pieces_of(group, idle)
        block = ptx.divide(ptx.divide(row, self.sums.piece) + group - first, BLOCK)
        number = ptx.divide(first, BLOCK) + group + block
        counter = scratch + self.counter(number, n_tile, idle)
        parts = cutlass.min(pieces - block * BLOCK, BLOCK)
        done = Int32(0)
        if self.sums.arrive(counter, cute.arch.lane_idx()) == parts - 1:
            done = Int32(1)
            if pieces > BLOCK:
                columns = n * self.sides
                start = self.sums.parts_of(self, scratch, idle.extents) + Int64(first + block * BLOCK) * columns
                self.add_column_parts(start, start, columns, parts, n_tile, n)
        return done

    @cute.jit
    def end_group(self, tile: Note, idle: Idle):
        """A block is complete: maybe its group is."""
        _, _, n_tile, group = tile
        scratch, n = idle.operands.scratch, idle.extents.n
        first, pieces = self.pieces_of(group, idle)
        blocks = ptx.divide(pieces + (BLOCK - 1), BLOCK)
        number = self.blocks(idle.extents) + group
        counter = scratch + self.counter(number, n_tile, idle)
        if self.sums.arrive(counter, cute.arch.lane_idx()) == blocks - 1:
            columns = n * self.sides
            parts = self.sums.parts_of(self, scratch, idle.extents) + Int64(first) * columns
            stride = columns
            count = pieces
            if blocks > 1:
                stride = columns * BLOCK
                count = blocks
            self.add_column_parts(idle.operands.dbias + Int64(group) * columns, parts, stride, count, n_tile, n)

    def counter(self, number: Int32, n_tile: Int32, idle: Idle) -> Int32:
        """Which counter block or group `number` has for a tile along N."""
        before = self.sums.counters_before(self, idle.extents)
        return before + number * self.sums.tiles_n(idle.extents.n) + n_tile

    @cute.jit
    def add_column_parts(self, result, first, stride: Int32, count: Int32, n_tile: Int32, n: Int32):
        """Add up `count` parts of a tile's columns, `stride` words apart; `result` may be the first of them."""
        lane = cute.arch.lane_idx()
        for step in cutlass.range(self.column_steps, unroll=1):
            inside = (step * 32 + lane) * 4
            where, there = self.place(inside, n_tile, n)
            if inside < self.tile_columns and there:
                totals = self.sum_of((first + where).toint(), Int64(stride) * 4, count)
                for column in cutlass.range_constexpr(4):
                    cute.arch.store(result + (where + column), totals[column])

    @cute.jit
    def sum_of(self, address: Int64, stride: Int64, count: Int32):
        """Four neighbours' sums of `count` parts in their order, `stride` bytes apart; past the first-level cache."""
        totals = cute.make_rmem_tensor((4,), Float32)
        totals.fill(0.0)
        left = count
        while left > 0:
            parts = [ptx.load_parts_x4(address + ahead * stride, Int32(ahead < left)) for ahead in range(PARTS_AT_ONCE)]
            for number in cutlass.range_constexpr(PARTS_AT_ONCE):
                for column in cutlass.range_constexpr(4):
                    totals[column] = totals[column] + parts[number][column]
            address += PARTS_AT_ONCE * stride
            left -= PARTS_AT_ONCE
        return totals

    @cute.jit
    def rows_of(self, idle: Idle, group: Int32):
        """First and end row of a group, as the scheduler has them."""
        begin = Int32(0)
        end = idle.extents.rows
        if cutlass.const_expr(self.plan.grouped):
            offsets = idle.operands.offsets
            end = cutlass.min(offsets[group], idle.extents.rows)
            if group > 0:
                begin = cutlass.max(offsets[group - 1], 0)
        return begin, end

"""What idle warps make of the sums that consumer warps leave (sums.py): dprob and dbias. Bitwise repeatable.

No floating-point atomics: every part of a sum goes to scratch memory, whoever brings it arrives at a counter, and the
last to arrive adds all parts up, always in the same order.

- dprob[m]: the parts of a row are its tiles along N. One counter for the rows of each piece, a warpgroup's tile.
- dbias[e, n]: the parts of a column are the group's pieces along M; `BLOCK` of them are added up first, then the
  blocks. For each tile along N one counter a block and one a group. A group without rows is zeroed.

Scratch, in 32-bit words, of any content before and after:

    row counters | column counters: blocks, groups | row parts [tiles along N, M] | column parts [pieces, columns of z]

The counters have to be zero before the first arrival. One warp of the grid clears them while the first main loops run:
the one that takes ticket 0, so that it is surely running. The others wait for the `READY` word. The words of the
workspace that say so are zero between launches; the last to finish leaves them so.

Groups begin at any row, so pieces of `piece` rows from each group's first one on are numbered row // piece + group: no
two have one number, and those of a group follow each other. Blocks of pieces are numbered in the same way.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.config import CONSUMER_WARPGROUPS
from fusekit.kernels.sums import NOTE_WORDS, GradientSums

# Words of the workspace, behind the scheduler's two: see above.
TICKET, READY, FINISHED = 2, 3, 4
BLOCK = 8  # pieces whose columns are added up at once: few, since consumers may wait meanwhile
PARTS_AT_ONCE = 4  # loads in flight while parts are added


def fresh(operands):
    """Kernel parameters of which nothing is worked out ahead of a loop: idle warps have few registers."""
    *pointers, groups, rows, n = operands
    return (*pointers, ptx.fresh(groups), ptx.fresh(rows), ptx.fresh(n))


class Collector:
    """The idle warps' programs for one configuration.

    `operands` of the methods are kernel parameters: dprob, dbias, scratch, counters, offsets; groups, rows, N. `shared`
    is that of `GradientSums`.
    """

    def __init__(self, sums: GradientSums) -> None:
        self.sums, self.config = sums, sums.config
        self.piece = self.config.warpgroup_rows
        self.sides, self.tile_columns = sums.sides, sums.tile_columns
        self.column_steps = -(-self.tile_columns // 128)  # of a warp that takes four columns a lane

    @cute.jit
    def assist(self, operands, shared, warp: Int32):
        """The load warpgroup's share; all its warps."""
        if warp == 2:
            self.clear(operands)
            self.zero_empty(operands)
            self.columns(operands, shared)
            self.finish(operands[3])
        if warp == 3:
            self.rows(operands, shared)

    # -- scratch ------------------------------------------------------------------------------------------------------

    def tiles_n(self, n: Int32) -> Int32:
        """Tiles along N."""
        return ptx.divide(n + (self.config.tile[1] - 1), self.config.tile[1])

    def row_counters(self, operands) -> Int32:
        """How many counters rows have."""
        *_, groups, rows, _ = operands
        return ptx.divide(rows, self.piece) + groups + 1 if self.config.dprob else Int32(0)

    def blocks(self, operands) -> Int32:
        """The numbers of blocks are less than this."""
        *_, groups, rows, _ = operands
        return ptx.divide(ptx.divide(rows, self.piece) + groups, BLOCK) + groups + 1

    def counter_words(self, operands) -> Int32:
        """How many counters there are; behind them the parts of rows begin."""
        *_, groups, _, n = operands
        columns = (self.blocks(operands) + groups) * self.tiles_n(n) if self.config.dbias else Int32(0)
        return (self.row_counters(operands) + columns + 3) & -4  # parts of columns are read by fours

    def row_parts(self, operands):
        """Where the parts of rows begin."""
        return cute.recast_ptr(operands[2], dtype=Float32) + self.counter_words(operands)

    def column_parts(self, operands):
        """Where the parts of columns begin."""
        *_, rows, n = operands
        row_parts = Int64(self.tiles_n(n)) * Int64(rows) if self.config.dprob else Int64(0)
        return self.row_parts(operands) + ((row_parts + 3) & -4)

    # -- counters -----------------------------------------------------------------------------------------------------

    @cute.jit
    def clear(self, operands):
        """Zero the counters, if nobody else does; one warp of each CTA."""
        _, _, scratch, counters, _, _, _, _ = operands
        lane = cute.arch.lane_idx()
        ticket = Int32(0)
        if lane == 0:
            ticket = cute.arch.atomic_add(counters + TICKET, Int32(1), sem="relaxed", scope="gpu")
        ticket = cute.arch.shuffle_sync(ticket, 0)
        if ticket == 0:
            words = self.counter_words(operands)
            index = lane
            while index < words:
                cute.arch.store(scratch + index, Int32(0))
                index += 32
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.store(counters + READY, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def ready(self, counters):
        """Until the counters are zero."""
        while cute.arch.load(counters + READY, Int32, sem="acquire", scope="gpu") == 0:
            pass
        cute.arch.sync_warp()

    @cute.jit
    def finish(self, counters):
        """A warp has done its last; the last of all leaves the workspace as it was."""
        if cute.arch.lane_idx() == 0:
            blocks, _, _ = cute.arch.grid_dim()
            ended = cute.arch.atomic_add(counters + FINISHED, Int32(1), sem="acq_rel", scope="gpu")
            if ended == blocks * (1 + int(self.config.dprob)) - 1:
                for word in cutlass.range_constexpr(TICKET, FINISHED + 1):
                    cute.arch.store(counters + word, Int32(0))

    @cute.jit
    def arrive(self, counter, lane: Int32) -> Int32:
        """Say that this warp's part is there; how many were there before. What those wrote can be read then."""
        cute.arch.sync_warp()
        before = Int32(0)
        if lane == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.sync_warp()
        return before

    # -- a piece ------------------------------------------------------------------------------------------------------

    @cute.jit
    def note(self, shared, number: Int32):
        """Which tile the CTA's `number`-th piece is of, when all of it is there. Pieces take turns over warpgroups."""
        barriers, boxes, _ = shared
        warpgroup = number & 1
        cute.arch.mbarrier_wait(barriers + warpgroup, (number >> 1) & 1)
        return ptx.load_shared_v4(boxes.toint() + warpgroup * self.sums.box_bytes)

    @cute.jit
    def taken(self, shared, number: Int32):
        """The warp needs nothing more of the piece."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared[0] + (CONSUMER_WARPGROUPS + (number & 1)))

    # -- dprob --------------------------------------------------------------------------------------------------------

    @cute.jit
    def rows(self, operands, shared):
        """The program of the warp that adds dprob up, until the tiles are over."""
        if cutlass.const_expr(self.config.dprob):
            self.ready(operands[3])
            number = Int32(0)
            tile = self.note(shared, number)
            while tile[3] >= 0:
                self.add_rows(tile, shared, number, fresh(operands))
                number += 1
                tile = self.note(shared, number)
            self.finish(operands[3])

    @cute.jit
    def add_rows(self, tile, shared, number: Int32, operands):
        """Take the sums of a piece's rows to their part of scratch; maybe add the parts up."""
        dprob, _, scratch, _, _, _, rows, n = operands
        row, end, n_tile, group = tile
        lane = cute.arch.lane_idx()
        steps = self.piece // 32
        dots = shared[1].toint() + ((number & 1) * self.sums.box_bytes + (NOTE_WORDS + lane) * 4)
        sums = [ptx.load_shared_f32(dots + 128 * step) for step in range(steps)]
        self.taken(shared, number)
        if row < end:
            tiles_n = self.tiles_n(n)
            parts = self.row_parts(operands) + (row + lane)
            left = end - row - lane
            for step in cutlass.range_constexpr(steps):
                if 32 * step < left:
                    cute.arch.store(parts + (Int64(n_tile) * rows + 32 * step), sums[step])
            counter = scratch + (ptx.divide(row, self.piece) + group)
            if self.arrive(counter, lane) == tiles_n - 1:
                self.add_row_parts(dprob + (row + lane), parts.toint(), left, rows, tiles_n)

    @cute.jit
    def add_row_parts(self, dprob, address: Int64, left: Int32, rows: Int32, count: Int32):
        """Add up the parts of a lane's rows, every 32nd of `left`; the first part of the first one is at `address`."""
        steps = self.piece // 32
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

    # -- dbias --------------------------------------------------------------------------------------------------------

    @cute.jit
    def zero_empty(self, operands):
        """Zero dbias of the groups without rows; one warp of each CTA, all of them together."""
        if cutlass.const_expr(self.config.dbias):
            _, dbias, _, _, offsets, groups, rows, n = operands
            lane = cute.arch.lane_idx()
            group, _, _ = cute.arch.block_idx()
            blocks, _, _ = cute.arch.grid_dim()
            columns = n * self.sides
            while group < groups:
                begin, end = self.rows_of(offsets, group, rows)
                if end <= begin:
                    column = lane
                    while column < columns:
                        cute.arch.store(dbias + (Int64(group) * columns + column), Float32(0.0))
                        column += 32
                group += blocks

    @cute.jit
    def columns(self, operands, shared):
        """The program of the warp that adds dbias up, until the tiles are over."""
        if cutlass.const_expr(self.config.dbias):
            self.ready(operands[3])
            number = Int32(0)
            tile = self.note(shared, number)
            while tile[3] >= 0:
                self.take_columns(tile, shared, number, fresh(operands))
                self.taken(shared, number)
                if tile[0] < tile[1]:
                    self.end_piece(tile, operands)
                number += 1
                tile = self.note(shared, number)

    def place(self, column, n_tile: Int32, n: Int32):
        """Where a column of the tile lies in dbias, and whether it does."""
        tile_n = self.config.tile[1]
        if self.config.z_layout == "concat":
            side = ptx.divide(column, tile_n)
            inside = n_tile * tile_n + column - side * tile_n
            return side * n + inside, inside < n
        where = n_tile * self.tile_columns + column
        return where, where < n * self.sides

    @cute.jit
    def take_columns(self, tile, shared, number: Int32, operands):
        """Take the sums of a piece's columns, over the four warps, to their part of scratch."""
        *_, n = operands
        row, end, n_tile, group = tile
        lane = cute.arch.lane_idx()
        columns = n * self.sides
        part = self.column_parts(operands) + Int64(ptx.divide(row, self.piece) + group) * columns
        warp_bytes = self.sums.warp_bytes
        left = shared[2].toint() + ((number & 1) * 4 * warp_bytes + self.sums.columns_at)
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
    def end_piece(self, tile, operands):
        """A piece's part is in scratch: maybe add up its block, then maybe its group."""
        if self.end_block(tile, fresh(operands)) != 0:
            self.end_group(tile, fresh(operands))

    # The two steps of it begin anew from the kernel's parameters: the warp cannot keep what they have in common.

    def pieces_of(self, group: Int32, operands):
        """Number of a group's first piece, and how many it has."""
        _, _, _, _, offsets, _, rows, _ = operands
        begin, end = self.rows_of(offsets, group, rows)
        return ptx.divide(begin, self.piece) + group, ptx.divide(end - begin + (self.piece - 1), self.piece)

    @cute.jit
    def end_block(self, tile, operands) -> Int32:
        """A piece's part is in scratch: 1 if its block is complete, whose sum then is in the first piece's place."""
        _, _, scratch, _, _, _, _, n = operands
        row, _, n_tile, group = tile
        first, pieces = self.pieces_of(group, operands)
        block = ptx.divide(ptx.divide(row, self.piece) + group - first, BLOCK)
        number = ptx.divide(first, BLOCK) + group + block
        counter = scratch + (self.row_counters(operands) + number * self.tiles_n(n) + n_tile)
        parts = cutlass.min(pieces - block * BLOCK, BLOCK)
        done = Int32(0)
        if self.arrive(counter, cute.arch.lane_idx()) == parts - 1:
            done = Int32(1)
            if pieces > BLOCK:
                columns = n * self.sides
                start = self.column_parts(operands) + Int64(first + block * BLOCK) * columns
                self.add_column_parts(start, start, columns, parts, n_tile, n)
        return done

    @cute.jit
    def end_group(self, tile, operands):
        """A block is complete: maybe its group is."""
        _, dbias, scratch, _, _, _, _, n = operands
        _, _, n_tile, group = tile
        first, pieces = self.pieces_of(group, operands)
        blocks = ptx.divide(pieces + (BLOCK - 1), BLOCK)
        number = self.blocks(operands) + group
        counter = scratch + (self.row_counters(operands) + number * self.tiles_n(n) + n_tile)
        if self.arrive(counter, cute.arch.lane_idx()) == blocks - 1:
            columns = n * self.sides
            parts = self.column_parts(operands) + Int64(first) * columns
            stride = columns
            count = pieces
            if blocks > 1:
                stride = columns * BLOCK
                count = blocks
            self.add_column_parts(dbias + Int64(group) * columns, parts, stride, count, n_tile, n)

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
    def rows_of(self, offsets, group: Int32, rows: Int32):
        """First and end row of a group, as the scheduler has them."""
        begin = Int32(0)
        end = rows
        if cutlass.const_expr(self.config.grouped):
            end = cutlass.min(offsets[group], rows)
            if group > 0:
                begin = cutlass.max(offsets[group - 1], 0)
        return begin, end

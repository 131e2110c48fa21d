"""Sums of gradients, fused into the backward epilogue: dprob over a row, dbias over a group's rows. Bitwise repeatable.

No floating-point atomics: every part of a sum goes to scratch memory, whoever brings it arrives at a counter, and the
last to arrive adds all parts up, always in the same order.

- dprob[m]: a warp adds da * y over the tile's columns for its 16 rows; the rest is row_sums.py's. The parts of a row
  are its tiles along N. One counter for each tile_m rows.
- dbias[e, n]: a warp adds dz over its rows in registers (over its lanes as `Shares` says), the four warps of a
  warpgroup through their staging boxes; the parts of a column are the warpgroup tiles of the group along M. One counter
  for each group, tile along N and warp. A group without rows is zeroed by the idle warps.

Scratch, in 32-bit words, of any content before and after:

    row counters | column counters | row parts [tiles along N, M] | column parts [warpgroup tiles, columns of z]

The counters have to be zero before the first warp arrives. One warp of the grid clears them while the first main loops
run: the one that takes ticket 0, so that it is surely running. The others look at the `READY` word before their first
arrival. The words of the workspace that say so are zero between launches; the last to finish leaves them so.

Groups begin at any row, so pieces of `size` rows from each group's first one on are numbered row // size + group: no
two have one number, and those of a group follow each other.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.config import CONSUMER_WARPGROUPS, WARPGROUP, GemmConfig
from fusekit.kernels.epilogue import bias_barrier

# Words of the workspace, behind the scheduler's two: see above.
TICKET, READY, FINISHED = 2, 3, 4
PARTS_AT_ONCE = 8  # loads in flight while parts are added
ROW_BITS = (16, 8, 4)  # of the lane: they tell the eight rows of an accumulator fragment apart


class Shares:
    """What a lane's two of a warp's 16 rows give to the sums, taken down while a unit is worked on.

    A column has to be added over the eight lanes that hold other rows of it. As soon as two columns are there, a lane
    keeps one and gives the other to its partner in lane bit 16; of two such results, in bit 8; then in bit 4. So eight
    columns take seven shuffles, few wait at a time, and number i ends with the lanes whose row bits are those of i,
    lowest first, as its i // 8 -th. Of fewer than eight columns, several lanes end with the same one.
    """

    def __init__(self, config: GemmConfig, left: Int32, dots, lane: Int32) -> None:
        """left: rows of the group from the lane's first one on. dots: both rows' da * y so far."""
        self.config, self.left, self.dots, self.lane = config, left, dots, lane
        self.waiting: list = [None] * len(ROW_BITS)
        self.columns: list = []

    def take(self, da, value, r: int):
        """da of the lane's row `r`, 0 in rows of others, so that what follows from it may be summed over the rows.

        value: of the activation, before any row_scale.
        """
        if self.config.dprob:
            self.dots[r] = self.dots[r] + da * value
        return ptx.where_above(self.left, 8 * r, da) if self.config.dbias else da

    def take_columns(self, first, second) -> None:
        """The dz of the lane's two rows in the next columns: those of the one row, and of the other."""
        if self.config.dbias:
            for a, b in zip(first, second, strict=True):
                self.pass_on(a + b, 0)

    def pass_on(self, value: Float32, level: int) -> None:
        """One more column that was added over the first `level` row bits."""
        if level == len(ROW_BITS):
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


def fresh(operands):
    """Kernel parameters of which nothing is worked out before the main loop."""
    *pointers, groups, rows, n = operands
    return (*pointers, ptx.fresh(groups), ptx.fresh(rows), ptx.fresh(n))


class GradientSums:
    """dprob and dbias of one configuration."""

    def __init__(self, config: GemmConfig, unit: int) -> None:
        """unit: columns of da in one unit of the epilogue's work."""
        self.config = config
        self.unit = unit
        self.sides = 2 if config.z_layout != "none" else 1
        self.values = self.sides * unit // 4  # columns of dz that a lane works on in a unit
        self.kept = max(self.values // 8, 1)  # of them that it ends with
        self.units = config.tile[1] // unit
        self.tile_columns = self.sides * config.tile[1]  # of dbias
        self.piece = config.warpgroup_rows

    # -- scratch ------------------------------------------------------------------------------------------------------

    # `operands` of the methods are kernel parameters: dprob, dbias, scratch, counters, offsets; groups, rows, N. What
    # follows from them is worked out where it is used: it would only hold registers through the main loop.

    def tiles_n(self, n: Int32) -> Int32:
        """Tiles along N."""
        return ptx.divide(n + (self.config.tile[1] - 1), self.config.tile[1])

    def row_counters(self, operands) -> Int32:
        """How many counters rows have."""
        *_, groups, rows, _ = operands
        return ptx.divide(rows, self.config.tile[0]) + groups + 1 if self.config.dprob else Int32(0)

    def counter_words(self, operands) -> Int32:
        """How many counters there are; behind them the parts of rows begin."""
        *_, groups, _, n = operands
        columns = groups * self.tiles_n(n) * 4 if self.config.dbias else Int32(0)
        return self.row_counters(operands) + columns

    def row_parts(self, operands):
        """Where the parts of rows begin."""
        return cute.recast_ptr(operands[2], dtype=Float32) + self.counter_words(operands)

    def column_parts(self, operands):
        """Where the parts of columns begin."""
        *_, rows, n = operands
        row_parts = Int64(self.tiles_n(n)) * Int64(rows) if self.config.dprob else Int64(0)
        return self.row_parts(operands) + row_parts

    # -- the idle warps -----------------------------------------------------------------------------------------------

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
        self.finish(counters, lane)

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
    def finish(self, counters, lane: Int32):
        """A warp has done its last; the last of all leaves the workspace as it was."""
        if lane == 0:
            blocks, _, _ = cute.arch.grid_dim()
            warps = 1 + int(self.config.dprob)  # of a CTA: the one that clears, and those that arrive at counters
            if cutlass.const_expr(self.config.dbias):
                warps += CONSUMER_WARPGROUPS * 4
            ended = cute.arch.atomic_add(counters + FINISHED, Int32(1), sem="acq_rel", scope="gpu")
            if ended == blocks * warps - 1:
                for word in cutlass.range_constexpr(TICKET, FINISHED + 1):
                    cute.arch.store(counters + word, Int32(0))

    @cute.jit
    def wait(self, operands, seen: Int32):
        """Until the counters are zero; a warp, before its first arrival: `seen` is 0 then."""
        if seen == 0:
            counters = operands[3]
            ready = cute.arch.load(counters + READY, Int32, sem="acquire", scope="gpu")
            while ready == 0:
                ready = cute.arch.load(counters + READY, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_warp()

    # -- a unit of work -----------------------------------------------------------------------------------------------

    def shares(self, row: Int32, end: Int32, lane: Int32) -> Shares | None:
        """For 16 rows from `row` on; None where nothing is summed."""
        if not self.config.sums:
            return None
        dots = cute.make_rmem_tensor((2,), Float32)
        dots.fill(0.0)
        return Shares(self.config, end - row - ptx.divide(lane, 4), dots, lane)

    def registers(self):
        """Where a warp keeps its sums over rows; they are set in the first of its blocks."""
        return cute.make_rmem_tensor((self.units * self.kept,), Float32) if self.config.dbias else None

    def clear_columns(self, sums) -> None:
        """The sums of a warp without rows."""
        for slot in range(self.units * self.kept):
            sums[slot] = Float32(0.0)

    def collect(self, sums, block: int, unit: int, shares: Shares) -> None:
        """Add the columns of a unit that has been worked on to the warp's sums."""
        for kept, value in enumerate(shares.unit_ends()):
            slot = unit * self.kept + kept
            sums[slot] = sums[slot] + value if block else value

    # -- a column -----------------------------------------------------------------------------------------------------

    def column(self, unit: int, kept: int, lane: Int32):
        """Column of the tile's part of dbias that a lane has the sum of as number `kept` of `unit`."""
        number = ((lane >> 4) & 1) + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1) * 4
        number = (number & (self.values - 1)) + 8 * kept
        side = number & (self.sides - 1)
        pair = ptx.divide(number, self.sides)  # chunk of 8 columns, and which of the lane's two in it
        inside = ptx.divide(pair, 2) * 8 + (lane & 3) * 2 + (pair & 1)
        if self.config.z_layout == "interleaved":
            return (unit * self.unit + inside) * 2 + side
        if self.config.z_layout == "concat":
            return side * self.config.tile[1] + unit * self.unit + inside
        return (unit * self.sides + side) * self.unit + inside

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
    def add_columns(self, sums, tile, staging, warp_bytes: cutlass.Constexpr, operands, warp_of_cta: Int32):
        """A warpgroup's tile is done; all four warps. Arguments as for `add_piece`."""
        tile_row, end, *_ = tile
        if tile_row < end:
            self.add_piece(sums, tile, staging, warp_bytes, operands, warp_of_cta)

    @cute.jit
    def add_piece(self, sums, tile, staging, warp_bytes: cutlass.Constexpr, operands, warp_of_cta: Int32):
        """Leave the parts of a warpgroup's tile, of which `sums` are this warp's; maybe add them up.

        All four warps call it. staging: of this warp, `warp_bytes` before the next one's; its boxes of z are free.
        """
        operands = fresh(operands)
        _, dbias, scratch, _, offsets, _, rows, n = operands
        tile_row, end, n_tile, group, _ = tile
        warp, lane = warp_of_cta & 3, cute.arch.lane_idx()
        barrier = bias_barrier(warp_of_cta >> 2)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last boxes have left
        cute.arch.sync_warp()
        for unit in cutlass.range_constexpr(self.units):
            for kept in cutlass.range_constexpr(self.kept):
                where = staging.toint() + self.column(unit, kept, lane) * 4
                ptx.store_shared_f32(where, sums[unit * self.kept + kept])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        columns = n * self.sides
        parts = self.column_parts(operands)
        own = parts + Int64(ptx.divide(tile_row, self.piece) + group) * columns
        share = self.tile_columns // 4  # columns that a warp goes on with
        base = staging.toint() - warp * warp_bytes
        for step in cutlass.range_constexpr(-(-share // 32)):
            inside = step * 32 + lane
            column = warp * share + inside
            where, there = self.place(column, n_tile, n)
            if inside < share and there:
                total = ptx.load_shared_f32(base + column * 4)
                for other in cutlass.range_constexpr(1, 4):
                    total = total + ptx.load_shared_f32(base + other * warp_bytes + column * 4)
                cute.arch.store(own + where, total)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes the boxes next
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        begin, _ = self.rows_of(offsets, group, rows)
        pieces = ptx.divide(end - begin + (self.piece - 1), self.piece)
        counter = scratch + (self.row_counters(operands) + ((group * self.tiles_n(n) + n_tile) * 4 + warp))
        if self.arrive(counter, lane) == pieces - 1:
            first_part = parts + Int64(ptx.divide(begin, self.piece) + group) * columns
            for step in cutlass.range_constexpr(-(-share // 32)):
                inside = step * 32 + lane
                where, there = self.place(warp * share + inside, n_tile, n)
                if inside < share and there:
                    total = self.sum_of(first_part + where, Int64(columns), pieces)
                    cute.arch.store(dbias + (Int64(group) * columns + where), total)

    # -- inside -------------------------------------------------------------------------------------------------------

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

    @cute.jit
    def sum_of(self, first, stride: Int64, count: Int32) -> Float32:
        """The sum of `count` parts, `stride` words apart, in their order; not from the first-level cache."""
        total = Float32(0.0)
        done = Int32(0)
        while done < count:
            total = self.add_some(total, first, stride, done, count)
            done += PARTS_AT_ONCE
        return total

    def add_some(self, total: Float32, first, stride: Int64, done: Int32, count: Int32) -> Float32:
        """`total` and the next parts, which are loaded before the first of them is added."""
        parts = []
        for ahead in range(PARTS_AT_ONCE):
            there = Int32(done + ahead < count)
            parts.append(ptx.load_part((first + Int64(done + ahead) * stride).toint(), there))
        for part in parts:
            total = total + part
        return total

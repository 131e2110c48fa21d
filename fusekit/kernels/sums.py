"""Sums of gradients, fused into the backward epilogue: dprob over a row, dbias over a group's rows. Bitwise repeatable.

Consumer warps add up what they have in registers, leave that in shared memory and go on. Idle warps of the load
warpgroup do the rest (collect.py): fences and counters in global memory hold up nobody who computes.

- dprob[m]: a warp adds da * y over the tile's columns for its 16 rows.
- dbias[e, n]: a warp adds dz over its rows of the tile, over its lanes as `Shares` says.

A warpgroup has one box for what it leaves of a tile: `NOTE_WORDS` that say which tile it is, then the sums of its rows;
its warps' sums of columns lie in their staging boxes of y, which the next epilogue alone needs again.

    full[wg]    4 arrivals (one a warp): all is left of the tile
    empty[wg]   1 arrival of each idle warp that reads the box
"""

import cutlass
from cutlass import Float32, Int32, cute

from fusekit.kernels import ptx
from fusekit.kernels.config import CONSUMER_WARPGROUPS, GemmConfig
from fusekit.kernels.epilogue import WARP_ROWS

NOTE_WORDS = 4  # first row of the warpgroup, end row of the group, tile along N, group
NO_TILE = -1  # in place of a group: there are no more
ROW_BITS = (16, 8, 4)  # of the lane: they tell the eight rows of an accumulator fragment apart


class Shares:
    """What a lane's two of a warp's 16 rows give to the sums, taken down while a unit is worked on.

    A column has to be added over the eight lanes that hold other rows of it. As soon as two columns are there, a lane
    keeps one and gives the other to its partner in lane bit 16; of two such results, in bit 8; then in bit 4. So eight
    columns take seven shuffles, few wait at a time, and number i ends with the lanes whose row bits are those of i,
    lowest first, as its i // 8 -th. Of fewer than eight columns, several lanes end with the same one.
    """

    def __init__(self, config: GemmConfig, dots, lane: Int32) -> None:
        """dots: both rows' da * y so far."""
        self.config, self.dots, self.lane = config, dots, lane
        self.waiting: list = [None] * len(ROW_BITS)
        self.columns: list = []

    def take(self, da, value, r: int) -> None:
        """da of the lane's row `r`, and the activation's value there, before any row_scale."""
        if self.config.dprob:
            self.dots[r] = self.dots[r] + da * value

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


class GradientSums:
    """What the consumer warps do for dprob and dbias in one configuration.

    `shared`, an argument of its methods: (barriers, boxes, staging of the CTA's first warp); `full` before `empty`.
    """

    def __init__(self, config: GemmConfig, unit: int, warp_bytes: int, columns_at: int) -> None:
        """unit: columns of da in one unit of the epilogue's work. A warp's staging has `warp_bytes`; from its byte
        `columns_at` on there is room for sums of columns.
        """
        self.config = config
        self.unit, self.warp_bytes, self.columns_at = unit, warp_bytes, columns_at
        self.sides = 2 if config.z_layout != "none" else 1
        self.values = self.sides * unit // 4  # columns of dz that a lane works on in a unit
        self.kept = max(self.values // 8, 1)  # of them that it ends with
        self.units = config.tile[1] // unit
        self.tile_columns = self.sides * config.tile[1]  # of dbias
        self.box_bytes = (NOTE_WORDS + (config.warpgroup_rows if config.dprob else 0)) * 4
        self.bytes = CONSUMER_WARPGROUPS * self.box_bytes
        readers = int(config.dprob) + int(config.dbias)
        self.barriers = (4,) * CONSUMER_WARPGROUPS + (readers,) * CONSUMER_WARPGROUPS  # their arrive counts

    # -- a tile -------------------------------------------------------------------------------------------------------

    @cute.jit
    def begin(self, shared, tile, warp_of_cta: Int32):
        """Before a tile's main loop, when the box is free: what tile it is; one lane. tile: as in `Epilogue.run`."""
        barriers, boxes, _ = shared
        *note, count = tile
        turn = count >> 1 if cutlass.const_expr(self.config.pingpong) else count  # of the warpgroup
        warpgroup = warp_of_cta >> 2
        cute.arch.mbarrier_wait(barriers + (CONSUMER_WARPGROUPS + warpgroup), (turn & 1) ^ 1)
        ptx.store_shared_v4(boxes.toint() + warpgroup * self.box_bytes, note)

    @cute.jit
    def end(self, shared, warp_of_cta: Int32):
        """The warp has left all that it has of the tile."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared[0] + (warp_of_cta >> 2))

    @cute.jit
    def finish(self, shared, count: Int32, warp_of_cta: Int32):
        """There is no `count`-th tile."""
        if cute.arch.lane_idx() == 0:
            self.begin(shared, (Int32(0), Int32(0), Int32(0), Int32(NO_TILE), count), warp_of_cta)
        self.end(shared, warp_of_cta)

    # -- a unit of work -----------------------------------------------------------------------------------------------

    def shares(self) -> Shares | None:
        """For 16 rows; None where nothing is summed."""
        if not self.config.sums:
            return None
        dots = cute.make_rmem_tensor((2,), Float32)
        dots.fill(0.0)
        return Shares(self.config, dots, cute.arch.lane_idx())

    @cute.jit
    def clear_rows(self, acc, left: Int32, lane: Int32):
        """Zero da in rows of others, which are not to be summed: the warp has `left` rows of a 64-row block's `acc`."""
        if left < WARP_ROWS:
            mine = left - ptx.divide(lane, 4)  # from the lane's first row on
            for r in cutlass.range_constexpr(2):
                for element in cutlass.range_constexpr(2 * r, cute.size(acc), 4):
                    for c in cutlass.range_constexpr(2):
                        acc[element + c] = ptx.where_above(mine, 8 * r, acc[element + c])

    def registers(self):
        """Where a warp keeps its sums over rows, at zero."""
        if not self.config.dbias:
            return None
        sums = cute.make_rmem_tensor((self.units * self.kept,), Float32)
        sums.fill(0.0)
        return sums

    def collect(self, sums, unit: int, shares: Shares) -> None:
        """Add the columns of a unit that has been worked on to the warp's sums."""
        for kept, value in enumerate(shares.unit_ends()):
            slot = unit * self.kept + kept
            sums[slot] = sums[slot] + value

    # -- what is left -------------------------------------------------------------------------------------------------

    def leave_rows(self, dots, shared, block, warp_of_cta: Int32, lane: Int32) -> None:
        """Sums of the warp's rows of a 64-row block; `dots` are those of a lane's columns.

        The four lanes of a row write the same.
        """
        row = (warp_of_cta & 3) * WARP_ROWS + block * 64 + (lane >> 2)
        address = shared[1].toint() + (warp_of_cta >> 2) * self.box_bytes + (NOTE_WORDS + row) * 4
        for r in range(2):
            dot = dots[r]
            for step in range(2):
                dot = dot + cute.arch.shuffle_sync_bfly(dot, 1 << step)
            ptx.store_shared_f32(address + 32 * r, dot)

    @cute.jit
    def leave_columns(self, sums, staging, lane: Int32):
        """A warp's sums of columns; staging: its own."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last boxes of y have left
        cute.arch.sync_warp()
        for unit in cutlass.range_constexpr(self.units):
            for kept in cutlass.range_constexpr(self.kept):
                where = staging.toint() + self.columns_at + self.column(unit, kept, lane) * 4
                ptx.store_shared_f32(where, sums[unit * self.kept + kept])

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

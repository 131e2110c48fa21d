"""dbias of a weight gradient: each group's sum of the rows of dy, taken while dy passes through the operand pipeline.

Idle warps of the load warpgroup follow the tile ring and the pipeline as further readers: they wait for every stage and
give it back, tile after tile in the load thread's order. The first 1, 2, 4, ... tiles along N, as many as there are,
share out the columns of dy among themselves, in units of eight. So every column is summed by one warp, in the order of
the tokens, the same from launch to launch; and no tile has much to add up while its stages pass.

A stage has dy as boxes of 64 columns by 64 tokens. A token is 128 bytes, its units of 16 bytes XOR token % 8. A lane
has one unit and every n-th token, and the lanes of a unit meet at the end of the tile. (The tensor cores would add it
up in fewer instructions, but mma holds up the consumers' wgmma, and the sums take longer.)
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, Idle

UNIT = 8  # columns


class ColumnSums(DeviceOperand):
    """The sums of one kernel."""

    step = 1

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.first, self.warps = operand.warps(plan)[0], operand.reading_warps(plan)
        self.units = plan.tile[0] // UNIT // self.warps  # for each warp, if one tile has to sum them all
        self.stage_bytes = plan.tile[0] * plan.arch.swizzle_bytes
        self.token_bytes, self.box_units = plan.arch.swizzle_bytes, plan.arch.box // UNIT
        self.box_bytes = plan.tile_k * self.token_bytes
        self.added = plan.adds

    def bind(self, halves) -> None:
        self.split = halves.get("split")

    def parameter(self, given):
        return given.dbias.iterator if self.split is None else self.split.dbias(given)

    def sharers(self, tiles_n):
        """How many tiles along N share out the columns: a power of two, at most so many that a warp has one unit."""
        count, most = 1, 2
        while most <= self.units:
            count = count + ptx.flag(tiles_n >= most) * (most // 2)
            most *= 2
        return count

    @cute.jit
    def assist(self, idle: Idle):
        """The warps that sum."""
        if idle.warp >= self.first and idle.warp < self.first + self.warps:
            self.run(idle, idle.ring, idle.warp - self.first)

    @cute.jit
    def run(self, idle: Idle, ring, warp: Int32):
        """A warp's program, until the tiles are over; dw has `m` rows."""
        plan = self.plan
        full, empty = idle.shared.stages_full, idle.shared.stages_empty
        m, n = idle.extents.k, idle.extents.n
        lane = cute.arch.lane_idx()
        sharers = self.sharers(ptx.divide(n + (plan.tile[1] - 1), plan.tile[1]))
        units = ptx.divide(self.units, sharers)  # of this warp in a tile
        sums = cute.make_rmem_tensor((UNIT,), Float32)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            sums.fill(0.0)
            part = self.kit.column_of(n_tile)
            token, unit = self.of_lane(lane, part * self.warps + warp, units)
            start = idle.shared.x.toint() + ptx.divide(unit, self.box_units) * self.box_bytes
            left = end - row
            while left > 0:
                cute.arch.mbarrier_wait(full + stage, phase)
                if part < sharers:
                    self.add(sums, start + stage * self.stage_bytes, token, unit & (self.box_units - 1), units)
                cute.arch.sync_warp()
                self.kit.release(plan, empty + stage, lane)
                left -= plan.tile_k
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            if part < sharers:
                column = m_tile * plan.tile[0] + unit * UNIT
                if cutlass.const_expr(self.split is not None):  # dbias of a part lies after its dw
                    group = group * (n + 1)
                if cutlass.const_expr(self.added):
                    if end > row:  # nothing is added for an empty group
                        self.store(sums, idle.operands.column_sums, group, column, m, token, units)
                else:
                    self.store(sums, idle.operands.column_sums, group, column, m, token, units)
            count += 1
            row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)

    def of_lane(self, lane, share, units):
        """A lane's first token and its unit, where a warp has `units` of them and is number `share`."""
        lanes = ptx.divide(32, units)  # of a unit
        return lane & (lanes - 1), share * units + ptx.divide(lane, lanes)

    @cute.jit
    def add(self, sums, box: Int32, token: Int32, unit: Int32, units: Int32):
        """One stage; box: address of the lane's box; token: its first one; unit: in the box."""
        lanes = ptx.divide(32, units)
        for turn in cutlass.range(units, unroll=1):
            self.add_two(sums, box, token + 2 * turn * lanes, lanes, unit)

    def add_two(self, sums, box, token, lanes, unit) -> None:
        """A unit of two of a lane's tokens, `lanes` apart; both are loaded before the first is added."""
        loaded = []
        for row in (token, token + lanes):
            loaded += ptx.load_shared_v4(box + row * self.token_bytes + (unit ^ (row & 7)) * 16)
        for number, word in enumerate(loaded):
            for half, value in enumerate(ptx.unpack_pair(Uint32(word), self.dtype)):
                index = (2 * number + half) % UNIT
                sums[index] = sums[index] + value

    @cute.jit
    def store(self, sums, dbias, group: Int32, column: Int32, m: Int32, token: Int32, units: Int32):
        """A tile's sums over the lanes of a unit, whose first column is `column`."""
        lanes = ptx.divide(32, units)
        for index in cutlass.range_constexpr(UNIT):
            total = sums[index]
            for level in cutlass.range_constexpr(5):
                if (1 << level) < lanes:
                    total = total + cute.arch.shuffle_sync_bfly(total, 1 << level)
            if token == 0 and column < m:  # of which there is a multiple of 8
                to = dbias + (Int64(group) * m + (column + index))
                if cutlass.const_expr(self.added):
                    total = cute.arch.load(to, Float32) + total
                cute.arch.store(to, total)

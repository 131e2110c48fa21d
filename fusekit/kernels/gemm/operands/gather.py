"""Rows of a factor that an index on the device chooses, brought into the operand pipeline by cp.async.

A warpgroup of its own does what TMA does for contiguous rows. A stage has rows of one or more boxes of 64 columns; a
row of a box is 128 bytes, its units of 16 bytes XOR row % 8 (the 128-byte swizzle). Eight lanes bring one, so an
instruction of a warp brings four; each warp has a quarter of the rows. The other factor comes by TMA as ever.

    landed[s]  1 arrival of each gathering thread, made when its copies are there
    full[s]    1 arrival with the bytes of what comes by TMA + 1 of the warp that hands stages on

A GEMM's tile has one set of rows, a stage the next columns: each lane keeps where its rows begin for the whole tile. A
weight gradient's tile has one set of columns, a stage the next rows, whose numbers are read `AHEAD` stages before. The
next tile's first numbers are read while the last stages of this one are copied.

Where rows come from other ranks while the kernel runs, a warp waits for those of a tile before it copies the first
(arrivals.py).

A number outside [0, T) chooses nothing: the row is zeros. So is a row beyond its group, and a column beyond the tensor;
none of them is read.

cp.async writes through the generic proxy and wgmma reads through the async one. An idle warp of the load warpgroup
does it: it waits until a stage has landed, fences and hands it on. Where an operand has all idle warps (dbias),
the gathering threads arrive at full[s] and the consumers fence, which takes longer: their fence is between two wgmma.
"""

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, Extents, Idle, struct
from fusekit.plan.gemm import GATHER_WARPS

WARP = 32
UNIT = 8  # elements of 16 bytes
UNITS = 8  # of a row of a box, and lanes that bring it
ROWS_AT_ONCE = WARP // UNITS
ROW_BYTES = 128
AHEAD = 2  # stages


class Gather(DeviceOperand):
    """The gathering warpgroup of one kernel, and the warp that hands its stages on."""

    step = 10  # its warp is idle when the others have what they need of it

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.wgrad = plan.wgrad
        width = plan.tile[plan.gathered_side]
        self.height = plan.tile_k if self.wgrad else width  # rows of a stage
        self.boxes = (width if self.wgrad else plan.tile_k) // plan.arch.box
        self.stage_bytes = width * (plan.arch.swizzle_bytes if self.wgrad else plan.x_row_bytes)
        self.share = self.height // GATHER_WARPS  # rows of a warp
        self.read_ahead = AHEAD if self.wgrad else 1  # sets of row numbers that a lane keeps

    def bind(self, halves) -> None:
        self.arrivals = halves.get("arrivals")

    def parameter(self, given):
        rows = getattr(given, self.plan.gather)
        fields = [
            ("rows", rows.iterator),
            ("units", Int32(rows.stride[0] // UNIT)),
            ("count", rows.shape[0]),
            ("index", given.index.iterator),
        ]
        return struct("Gathered", fields)

    def view(self, parameter):
        return None

    def fourth(self, idle: Idle) -> None:
        """A gathering warp; all its lanes."""
        arrivals = None if self.arrivals is None else idle.operands.arrivals
        self.run(idle.operands.gather, arrivals, idle.shared, idle.ring, idle.extents, idle.warp)

    @cute.jit
    def run(self, gathered, arrivals, shared, ring, extents: Extents, warp: Int32):
        """Its program, until the tiles are over. arrivals: None where all rows are here."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # a fresh barrier counts as passed in the opposite phase
        row, end, n_tile, group, m_tile = self.tile(ring, count, lane)
        numbers = self.first_numbers(gathered, row, end, warp, lane)
        here = Int32(0)  # whether all rows are, as far as the warp knows
        landed = shared.landed if cutlass.const_expr(self.plan.relays) else shared.stages_full
        while group >= 0:
            steps = self.steps(row, end, extents)
            before = cutlass.max(steps - AHEAD, 0)
            column = self.first_column(n_tile, m_tile, lane)
            if cutlass.const_expr(arrivals is not None):
                numbers, here = self.arrivals.wait(arrivals, numbers, gathered.count, here)
            state = self.begin_tile(gathered, numbers, column, lane)
            place = (row, end, column, self.columns(extents) - column, warp, lane, landed)
            state, stage, phase = self.copy_stages(gathered, state, Int32(0), before, shared, stage, phase, place)
            count += 1
            row, end, n_tile, group, m_tile = self.tile(ring, count, lane)
            numbers = self.first_numbers(gathered, row, end, warp, lane)
            state, stage, phase = self.copy_stages(gathered, state, before, steps, shared, stage, phase, place)

    @cute.jit
    def tile(self, ring, count: Int32, lane: Int32):
        """The `count`-th tile, whose slot is given back: first row, end row, tile along N, group, tile along M."""
        words = ring.get(count)
        cute.arch.sync_warp()
        if lane == 0:
            ring.free(count)
        return (*words[:4], words[4] if len(words) > 4 else Int32(0))

    # -- hand over ----------------------------------------------------------------------------------------------------

    @cute.jit
    def assist(self, idle: Idle):
        """The warp that hands stages on."""
        if cutlass.const_expr(self.plan.relays):  # noqa: SIM102
            if idle.warp == self.operand.warps(self.plan)[0]:
                self.relay(idle, idle.ring)

    @cute.jit
    def relay(self, idle: Idle, ring):
        """Its program, until the tiles are over."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        row, end, _, group, _ = self.tile(ring, count, lane)
        while group >= 0:
            for _ in cutlass.range(self.steps(row, end, idle.extents), unroll=1):
                cute.arch.mbarrier_wait(idle.shared.landed + stage, phase)
                if lane == 0:
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.mbarrier_arrive(idle.shared.stages_full + stage)
                cute.arch.sync_warp()
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, end, _, group, _ = self.tile(ring, count, lane)

    # -- row numbers --------------------------------------------------------------------------------------------------

    def numbers(self, gathered, first, end, warp, lane) -> tuple:
        """Numbers of the warp's rows of a stage, -1 from `end` on; a lane has every 32nd."""
        row = first + warp * self.share + (lane & (min(self.share, WARP) - 1))
        load = ptx.load_below if self.plan.order_role == "input" else ptx.load_written_below
        return tuple(load(gathered.index, row + start, end) for start in range(0, self.share, WARP))

    def first_numbers(self, gathered, row, end, warp, lane) -> tuple:
        """Row numbers of a tile, or of its first stages."""
        stages = (
            self.numbers(gathered, row + ahead * self.height, end, warp, lane) for ahead in range(self.read_ahead)
        )
        return tuple(number for stage in stages for number in stage)

    def lane_rows(self, gathered, numbers, lane) -> tuple:
        """What a lane brings: a set of flags, one for each copy that reads nothing; then where each copy's row begins,
        in units of 16 bytes.
        """
        units = [ptx.units_where_below(number, gathered.count, gathered.units) for number in numbers]
        flags, begins = Int32(0), []
        for number in range(self.share // ROWS_AT_ONCE):
            first = number * ROWS_AT_ONCE
            begin = cute.arch.shuffle_sync(units[first // WARP], first % WARP + (lane >> 3))
            flags = ptx.flag_none(flags, number, begin)
            begins.append(begin)
        return (flags, *begins)

    def addressed(self, gathered, rows, column) -> tuple:
        """`rows` of `lane_rows` with their addresses instead of units. They have to be there before the first copy, in
        registers of their own: a copy reads its address late, and the next one would wait for the register.
        """
        source = gathered.rows.toint() + Int64(column) * 2
        return (rows[0], *(ptx.unit_address(source, units) for units in rows[1:]))

    def begin_tile(self, gathered, numbers, column, lane) -> tuple:
        """What goes from stage to stage: what a lane brings; before it a weight gradient's next numbers."""
        if self.wgrad:
            return (numbers[1], *self.lane_rows(gathered, numbers[:1], lane))
        return self.addressed(gathered, self.lane_rows(gathered, numbers, lane), column)

    # -- stages -------------------------------------------------------------------------------------------------------

    def steps(self, row, end, extents: Extents):
        """Stages of a tile."""
        return ptx.divide((end - row if self.wgrad else extents.k) + (self.plan.tile_k - 1), self.plan.tile_k)

    def first_column(self, n_tile, m_tile, lane):
        """First column of a lane in a tile."""
        start = (lane & (UNITS - 1)) * UNIT
        if not self.wgrad:
            return start
        return start + (
            self.kit.column_of(n_tile) * self.plan.tile[1] if self.plan.gathered_side else m_tile * self.plan.tile[0]
        )

    def columns(self, extents: Extents):
        """Columns of the tensor; dw has as many rows as dy has columns, and as many columns as x."""
        return extents.n if self.plan.gathered_side else extents.k

    @cute.jit
    def copy_stages(self, gathered, state, first, last, shared, stage, phase, place):
        """Start the copies of a tile's stages [first, last)."""
        row, end, column, left, warp, lane, landed = place
        for step in cutlass.range(first, last, unroll=1):
            if cutlass.const_expr(self.wgrad):
                later = self.numbers(gathered, row + (step + AHEAD) * self.height, end, warp, lane)
                rows = self.addressed(gathered, state[1:], column)
                cute.arch.mbarrier_wait(shared.stages_empty + stage, phase)
                self.copy(rows, left, shared, stage, warp, lane)
                cute.arch.cp_async_mbarrier_arrive_noinc(landed + stage)
                state = (*later, *self.lane_rows(gathered, state[:1], lane))
            else:
                cute.arch.mbarrier_wait(shared.stages_empty + stage, phase)
                self.copy(state, left - step * self.plan.tile_k, shared, stage, warp, lane)
                cute.arch.cp_async_mbarrier_arrive_noinc(landed + stage)
                state = (state[0], *(ptx.advance(address, self.boxes * ROW_BYTES) for address in state[1:]))
            stage += 1
            if stage == self.plan.stages:
                stage = Int32(0)
                phase ^= 1
        return state, stage, phase

    def copy(self, rows, left, shared, stage, warp, lane) -> None:
        """Start the warp's copies of a stage; left: columns of the tensor from the lane's first on."""
        unit, group = lane & (UNITS - 1), lane >> 3
        destination = (shared.w if self.plan.gathered_side else shared.x).toint() + stage * self.stage_bytes
        first = (
            group if self.share % UNITS == 0 else group + (warp & 1) * ROWS_AT_ONCE
        )  # the lane's first row, modulo 8
        even = destination + warp * (self.share * ROW_BYTES) + group * ROW_BYTES + (unit ^ first) * 16
        odd = even ^ 64
        flags = [ptx.all_unless_above(rows[0], left, box * self.plan.arch.box) for box in range(self.boxes)]
        for number, source in enumerate(rows[1:]):
            for box in range(self.boxes):
                place = (number * ROWS_AT_ONCE + box * self.height) * ROW_BYTES
                ptx.copy_async(odd if number % 2 else even, place, source, box * ROW_BYTES, flags[box], number)

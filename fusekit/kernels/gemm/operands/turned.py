"""FP8 values of the transpose of y: consumer warps leave a tile in shared memory, an idle warp quantises its columns.

Column c of the tile has 256 bytes there, 128 tokens of bf16, in units of eight that are exchanged by c: neither a
consumer's stmatrix nor the idle warp, whose lanes read a unit of neighbouring columns, meets itself in a bank.

Backward (DzTurned) a fourth warpgroup does it, each of its warps 32 columns at a time. A consumer warp's 16 tokens of
all columns of dz lie where its boxes of z were, those of y after them: 32 bytes of each column, in whose place then
lie the FP8 values of 32 tokens. When those have left, the warpgroup sends for z of its next tile. Where 128 columns
have one scale, its warps exchange the largest of their numbers.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.columns import SLAB_TOKENS, SLABS, Columns, Place, Turned
from fusekit.kernels.gemm.operands.base import STREAMED, Idle
from fusekit.kernels.gemm.operands.fp8_output import in_order
from fusekit.kernels.quantise import fp8
from fusekit.plan.gemm import FOURTH, WARP
from fusekit.plan.operands.turned import TURNERS
from fusekit.plan.quant import SIDE

UNIT = 8  # tokens in 16 bytes
LINE = SIDE * 2  # bytes of a column
SLAB = SLAB_TOKENS * 2  # bytes of a column of a warp's 16 tokens
TURNED_TOKENS = 2 * SLAB_TOKENS  # of a column, whose FP8 values take the place of 16 tokens


class YTurned(Columns):
    """Forward. Backward it is a parameter of dz_turned, and packs y where it is not stored."""

    def parameter(self, given):
        box = (TURNED_TOKENS, WARP) if self.plan.backward else (SIDE, SIDE)
        return Turned(turned_map(self.kit, self.plan, given.y_t, box), given.y_ts.iterator)

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def start(self, tile, work, warp_state) -> None:
        if not self.plan.backward:
            self.wait(tile, work)

    def outputs(self, words, rows, work, state) -> None:
        """16 rows of the tile, as columns; those after the group's end are zeros."""
        lane = cute.arch.lane_idx()
        column = (lane >> 4) * 8 + (lane & 7)
        unit = work.warp_of_cta * (SLAB_TOKENS // UNIT) + ((lane >> 3) & 1)
        at = work.shared.turned.toint() + place(column, unit)
        words = without_others(words, rows, 1)
        for pair in range(self.plan.out_tile_n // 16):
            ptx.store_matrix_x4(at + pair * (16 * LINE), words[4 * pair : 4 * pair + 4], turned=True)

    def finish_tile(self, state, work) -> None:
        if not self.plan.backward:
            self.written(work)

    def pack(self, values):
        if self.plan.backward and not self.plan.has("recompute"):
            return ptx.pack_pair(*values, self.out_dtype)
        return None

    # -- the idle warp ------------------------------------------------------------------------------------------------

    @cute.jit
    def assist(self, idle: Idle):
        """All warps of the load warpgroup."""
        if cutlass.const_expr(not self.plan.backward):
            self.turn(idle)

    @cute.jit
    def turn(self, idle: Idle):
        """All warps of the load warpgroup."""
        if idle.warp == self.operand.warps(self.plan)[0]:
            self.follow(idle)

    def tile(self, idle: Idle, where: Place, n_tile: Int32, lane: Int32) -> None:
        """Quantises the columns of a tile."""
        for part in range(self.plan.out_tile_n // SIDE):
            column = n_tile * self.plan.out_tile_n + part * SIDE
            self.columns(idle, part * (SIDE * LINE), column, where, lane)

    @cute.jit
    def columns(self, idle: Idle, offset: Int32, column: Int32, where: Place, lane: Int32):
        """Quantises 128 columns from `column` on."""
        target, boxes = idle.operands.y_turned, idle.shared.turned_values
        width = idle.extents.half_n if cutlass.const_expr(self.plan.halved) else idle.extents.n
        square = self.plan.quant.turned_square("y")
        scale, inverse = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(square):
            a = Float32(0.0)
            for turn in cutlass.range(SIDE // WARP, unroll=1):
                lines = idle.shared.turned.toint() + offset + turn * (WARP * LINE)
                a = fp8.larger(a, self.largest_of(lines, where.slabs, lane))
            scale, inverse = self.scale_of(self.largest_of_lanes(a))
            self.store_square(target, scale, where.block, column, width, lane)
        self.sent(lane)
        for turn in cutlass.range(SIDE // WARP, unroll=1):
            first = turn * WARP
            lines = idle.shared.turned.toint() + offset + first * LINE
            if cutlass.const_expr(not square):
                scale, inverse = self.scale_of(self.largest_of(lines, where.slabs, lane))
                self.store_number(target.scales, scale, where.block, column + first + lane, width)
            self.values_of(lines, boxes.toint() + first * SIDE, where.slabs, inverse, lane)
        self.send_values(target, [boxes], where.block, column, lane)

    def load(self, lines: Int32, unit: Int32, lane: Int32) -> list:
        """Eight tokens of column `lane`."""
        return [Uint32(word) for word in ptx.load_shared_v4(lines + place(lane, unit))]

    def place_of_values(self, column, slab):
        """Where 16 FP8 values of a column are, in bytes: exchanged by the column, as the tensor map has it."""
        return column * SIDE + (slab ^ (column & 7)) * 16


class DzTurned(Columns):
    """The fourth warpgroup of a backward kernel."""

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.staging = kit.StagingBoxes(plan)
        self.meeting = plan.named_barrier(FOURTH)

    def bind(self, halves) -> None:
        self.z = next(half for half in halves.values() if half.role == STREAMED)

    def parameter(self, given):
        return Turned(turned_map(self.kit, self.plan, given.dz_t, (TURNED_TOKENS, WARP)), given.dz_ts.iterator)

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def start(self, tile, work, warp_state) -> None:
        self.wait(tile, work)

    def gradients(self, packed, rows, work) -> None:
        """16 rows of dz and y, as columns, where z and staged boxes were."""
        steps, values = packed
        layout = self.plan.glu_layout
        dz = work.staging.toint()
        words = without_others(in_order(steps, layout), rows, 2 if layout == "interleaved" else 1)
        store_slab(words, dz, side_by_side=layout == "interleaved")
        if self.plan.has("y_turned"):
            self.staging.acquire_all()  # the FP8 values of rows have left
            store_slab(without_others(values, rows, 1), dz + self.plan.z_bytes)

    def finish_tile(self, state, work) -> None:
        self.written(work)

    # -- the fourth warpgroup -----------------------------------------------------------------------------------------

    def fourth(self, idle: Idle) -> None:
        self.follow(idle)

    @cute.jit
    def before_tile(self, idle: Idle, row: Int32, end: Int32, n_tile: Int32, lane: Int32):
        """Sends for z of a tile: each warp for that of two consumer warps."""
        for turn in cutlass.range_constexpr(self.plan.consumer_warps // TURNERS):
            warp = idle.warp * (self.plan.consumer_warps // TURNERS) + turn
            first = row + warp * SLAB_TOKENS
            if lane == 0 and first < end:
                for unit in cutlass.range_constexpr(self.plan.z_boxes):
                    barrier = self.z.barrier(idle.shared, warp, unit)
                    box = idle.shared.staging + (warp * self.plan.warp_bytes + unit * self.plan.z_box_bytes)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.plan.z_box_bytes)
                    where = self.kit.z_place(self.plan, end - first, end, n_tile, unit)
                    z = descriptor_address(idle.operands.saved_preactivation)
                    ptx.tma_load(z, box, barrier, where)
        cute.arch.sync_warp()

    def after_tile(self, idle: Idle) -> None:
        """Until the others have read the tile, too: z of the next one takes its place."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.together()

    def tile(self, idle: Idle, where: Place, n_tile: Int32, lane: Int32) -> None:
        """Quantises this warp's columns of a tile."""
        tile_n, n, first = self.plan.tile[1], idle.extents.n, idle.warp * WARP
        sides = self.plan.sides
        for side in range(sides):
            column = n_tile * (sides * tile_n) + side * SIDE
            if self.plan.glu_layout == "concat":
                column = n_tile * tile_n + side * n
            lines = (side * SIDE + first) * SLAB
            sums = idle.operands.block_sums if self.plan.has("block_sums") else None
            square = side if self.plan.quant.turned_square("dz") else None
            self.columns(idle, idle.operands.dz_turned, lines, (column, n * sides), where, lane, square, sums)
        if self.plan.has("y_turned"):
            lines = self.plan.z_bytes + first * SLAB
            square = sides if self.plan.quant.turned_square("y") else None
            self.columns(idle, idle.operands.y_turned, lines, (n_tile * tile_n, n), where, lane, square)
        self.sent(lane)

    @cute.jit
    def columns(self, idle: Idle, target, offset: Int32, extent, where: Place, lane: Int32, square=None, sums=None):
        """Quantises this warp's 32 of 128 columns; offset: of its first in each warp's slab. extent: (first of the 128,
        columns of the result). square: their number in the tile, where they have one scale. sums: [blocks, columns],
        which gets theirs.
        """
        first, width = extent
        column = first + idle.warp * WARP
        slabs = idle.shared.staging + offset
        total = self.sum_of_column(sums)
        a = self.largest_of(slabs.toint(), where.slabs, lane, total)
        if cutlass.const_expr(square is not None):
            a = self.largest_of_warps(idle, self.largest_of_lanes(a), square, lane)
        scale, inverse = self.scale_of(a)
        if cutlass.const_expr(square is not None):
            self.store_square(target, scale, where.block, first, width, idle.warp * WARP + lane)
        else:
            self.store_number(target.scales, scale, where.block, column + lane, width)
        if cutlass.const_expr(sums is not None):
            self.store_number(sums, total[0], where.block, column + lane, width)
        self.values_of(slabs.toint(), slabs.toint(), where.slabs, inverse, lane)
        boxes = [slabs + slab * self.plan.warp_bytes for slab in range(0, SLABS, 2)]
        self.send_values(target, boxes, where.block, column, lane)

    def together(self) -> None:
        """The fourth warpgroup's warps wait for each other."""
        cute.arch.barrier(barrier_id=self.meeting, number_of_threads=TURNERS * WARP)

    def sum_of_column(self, sums):
        """A zero to add columns to, where there are `sums`."""
        if sums is None:
            return None
        total = cute.make_rmem_tensor((1,), Float32)
        total.fill(0.0)
        return total

    def largest_of_warps(self, idle: Idle, a: Float32, square: int, lane: Int32):
        """The maximum of the columns of all warps. Each of the tile's squares has a place, which the next tile takes
        again.
        """
        at = idle.shared.largest.toint() + square * (4 * TURNERS)
        lanes.shared_store_u32_if(at + idle.warp * 4, lanes.bits_of(a), lane == 0)
        self.together()
        for word in ptx.load_shared_v4(at):
            a = fp8.larger(a, lanes.float_of(Uint32(word)))
        return a

    def load(self, lines: Int32, unit: Int32, lane: Int32) -> list:
        """Eight tokens of column `lane`."""
        at = lines + (unit >> 1) * self.plan.warp_bytes + slab_place(lane, unit & 1)
        return [Uint32(word) for word in ptx.load_shared_v4(at)]

    def place_of_values(self, column, slab):
        """Where 16 FP8 values of a column are, in bytes: where the lane has read two slabs, in the first of them."""
        return (slab >> 1) * (2 * self.plan.warp_bytes) + slab_place(column, slab & 1)


def turned_map(kit, plan, tensor, box):
    """Tensor map of FP8 values [N, P], or of mxfp8 [M, N]; box: (tokens, columns)."""
    if plan.quant.mx and not plan.skip_if_zero:
        tensor = kit.not_empty(tensor)
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))
    return kit.box_map(kit.store_op(), view, box)


def place(column, unit):
    """Where eight tokens of a column are, in bytes after the first of all."""
    return column * LINE + (unit ^ (column & 7)) * 16


def slab_place(column, half):
    """Where eight of a warp's 16 tokens of a column are, in bytes."""
    return column * SLAB + (half ^ (column >> 2 & 1)) * 16


def without_others(words, rows, per_row: int) -> list:
    """Zeros in the place of rows after the group's end; `per_row` words in a row before the other row's."""
    first = rows.row + (cute.arch.lane_idx() >> 2)
    there = [ptx.flag(first + r * 8 < rows.end) for r in range(2)]
    return [ptx.word_where(there[number // per_row % 2], word) for number, word in enumerate(words)]


def store_slab(words, slab: Int32, side_by_side: bool = False) -> None:
    """Packed words of 16 rows as columns of 16 tokens; (chunk, r) in order, or (chunk of 16, r, c) side by side."""
    lane = cute.arch.lane_idx()
    number, column = lane >> 3, lane & 7
    half = number & 1
    if side_by_side:
        half, column = number >> 1, (column >> 1) * 4 + (number & 1) * 2 + (column & 1)
    else:
        column = (number >> 1) * 8 + column
    at = slab + slab_place(column, half)
    for pair in range(len(words) // 4):
        ptx.store_matrix_x4(at + pair * (16 * SLAB), words[4 * pair : 4 * pair + 4], turned=True)

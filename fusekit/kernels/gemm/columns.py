"""Columns of a tile, read and quantised by idle warps: what FP8 values of y's and of dz's transpose share (turned.py).

Two barriers hand a tile over: all consumer warps have written it; the idle warps have read it. An idle warp gets the
tiles from the ring as the consumers do, one after the other. It counts the blocks of tokens of the groups before, so
that it knows where the transpose of its tile begins.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import DeviceOperand, Idle
from fusekit.kernels.quantise import fp8
from fusekit.plan.quant import SIDE

SLAB_TOKENS = 16  # the rows of a consumer warp, as two 8x8 matrices hold them
SLABS = SIDE // SLAB_TOKENS


class Turned(NamedTuple):
    """Tensor map of FP8 values [N, P], tokens contiguous; scales [P / 128, N], or of squares."""

    fp8: Any
    scales: cute.Pointer


class Place(NamedTuple):
    """A tile as idle warps have it: its block of tokens, and how many of its slabs of 16 tokens have rows."""

    block: Int32
    slabs: Int32


class Columns(DeviceOperand):
    """What idle warps make of the columns of a tile."""

    step = 8

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.barrier = plan.first_barrier(operand.name)

    def view(self, parameter):
        return None

    @cute.jit
    def wait(self, tile, work):
        """Consumer warps: until the tile before has been read."""
        cute.arch.mbarrier_wait(work.shared.barriers + (self.barrier + 1), (tile.count & 1) ^ 1)

    @cute.jit
    def written(self, work):
        """A consumer warp has written its part, or has no rows."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(work.shared.barriers + self.barrier)

    @cute.jit
    def follow(self, idle: Idle):
        """Tile after tile; all lanes of an idle warp."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        counted = Int32(0)  # groups, whose blocks are
        blocks = Int32(0)
        row, end, n_tile, group = idle.ring.get(count)
        cute.arch.sync_warp()
        if lane == 0:
            idle.ring.free(count)
        while group >= 0:
            self.before_tile(idle, row, end, self.kit.column_of(n_tile), lane)
            begin = Int32(0)
            if cutlass.const_expr(self.plan.grouped):
                offsets = idle.operands.offsets
                blocks += self.kit.blocks_between(offsets, idle.extents.rows, counted, group, lane)
                counted = group
                if group > 0:
                    begin = cutlass.max(offsets[group - 1], 0)
            block = blocks + ptx.divide(row - begin, SIDE)
            slabs = ptx.divide(cutlass.min(end - row, SIDE) + (SLAB_TOKENS - 1), SLAB_TOKENS)
            cute.arch.mbarrier_wait(idle.shared.barriers + self.barrier, count & 1)
            if row < end:  # else the CTA only helped to load
                self.tile(idle, Place(block, slabs), self.kit.column_of(n_tile), lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(idle.shared.barriers + (self.barrier + 1))
            self.after_tile(idle)
            count += 1
            row, end, n_tile, group = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    def before_tile(self, idle: Idle, row: Int32, end: Int32, n_tile: Int32, lane: Int32) -> None:
        """Runs before a tile."""

    def after_tile(self, idle: Idle) -> None:
        """Runs after a tile that this warp has read."""

    @cute.jit
    def largest_of(self, lines: Int32, slabs: Int32, lane: Int32, sums=None):
        """Maximum of the lane's column of a tile at `lines`. sums: the column's sum, or None."""
        most = Uint32(0)
        for unit in cutlass.range(slabs * 2, unroll=2):
            words = self.load(lines, unit, lane)
            most = fp8.larger_pairs(most, fp8.largest(words))
            self.add_up(sums, words)
        return fp8.larger(*fp8.numbers(most))

    def add_up(self, sums, words) -> None:
        """Adds tokens of a column to its sum, where there is one."""
        if sums is not None:
            for word in words:
                low, high = fp8.halves(word)
                sums[0] = sums[0] + (low + high)

    def largest_of_lanes(self, a: Float32):
        """Maximum of the columns of all lanes."""
        for distance in range(5):
            a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
        return a

    def scale_of(self, a: Float32):
        """The scale of numbers whose maximum is `a`, and its reciprocal."""
        return fp8.scale_of(a, self.plan.quant.scales)

    @cute.jit
    def values_of(self, lines: Int32, target: Int32, slabs: Int32, inverse, lane: Int32):
        """Quantises the lane's column, 16 tokens at a time."""
        for slab in cutlass.range(slabs, unroll=1):
            words = [*self.load(lines, slab * 2, lane), *self.load(lines, slab * 2 + 1, lane)]
            numbers = [half for word in words for half in fp8.halves(word)]
            packed = [fp8.four_values(numbers[four : four + 4], inverse) for four in range(0, 16, 4)]
            ptx.store_shared_v4(target + self.place_of_values(lane, slab), packed)
        for slab in cutlass.range(slabs, SLABS, unroll=1):
            ptx.store_shared_v4(target + self.place_of_values(lane, slab), [Uint32(0)] * 4)

    @cute.jit
    def send_values(self, target, boxes, block: Int32, column: Int32, lane: Int32):
        """Starts the stores of boxes of FP8 values, one after the other along the tokens, from `column` on."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            for number, box in enumerate(boxes):
                token = block * SIDE + number * (SIDE // len(boxes))
                ptx.tma_store(descriptor_address(target.fp8), box, self.coordinates(token, column))
            cute.arch.cp_async_bulk_commit_group()

    def coordinates(self, token, column) -> tuple:
        """Coordinates of a box of FP8 values."""
        return token, column

    @cute.jit
    def sent(self, lane: Int32):
        """Waits until earlier FP8 values have left shared memory."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def store_number(self, to, number, block: Int32, column: Int32, width: Int32) -> None:
        """The scale or the sum of column `column` in `block`, to [blocks, width]."""
        at = to.toint() + (Int64(block) * Int64(width) + Int64(column)) * 4
        lanes.store(at, [lanes.bits_of(number)], 4, column < width)

    def store_square(self, target, scale, block: Int32, column: Int32, width: Int32, lane) -> None:
        """The scale of the square that begins with `column`, by lane 0. width: columns of the result."""
        squares, square = ptx.divide(width + (SIDE - 1), SIDE), ptx.divide(column, SIDE)
        at = target.scales.toint() + (Int64(block) * Int64(squares) + Int64(square)) * 4
        lanes.store(at, [lanes.bits_of(scale)], 4, (lane == 0) & (column < width))

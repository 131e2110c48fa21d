"""Codes of the transpose of y: consumer warps leave a tile in shared memory, an idle warp quantises its columns.

Column c of the tile has 256 bytes there, 128 tokens of bf16, in units of eight that are exchanged by c: neither a
consumer's stmatrix nor the idle warp, whose lanes read a unit of neighbouring columns, meets itself in a bank. Two
barriers hand the tile over: all consumer warps have written it; the idle warp has read it.

The idle warp gets the tiles from the ring as the consumers do, one after the other. It counts the blocks of tokens of
the groups before, so that it knows where the transpose of its tile begins.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.operands.base import Idle, Operand
from fusekit.kernels.gemm.sm90.maps import box_map, store_op
from fusekit.kernels.gemm.sm90.scheduler import blocks_between, column_of
from fusekit.kernels.quantise import codes
from fusekit.plan.gemm import WARP, WARP_ROWS
from fusekit.plan.quant import SIDE

TURNER = 3  # warp of the load warpgroup
UNIT = 8  # tokens in 16 bytes
LINE = SIDE * 2  # bytes of a column


class Turned(NamedTuple):
    """Tensor map of codes [N, P], tokens contiguous; scales [P / 128, N]."""

    codes: Any
    scales: cute.Pointer


class YTurned(Operand):
    step = 8

    def __init__(self, plan, told) -> None:
        super().__init__(plan, told)
        self.barrier = plan.first_barrier(told.name)

    def parameter(self, given):
        return Turned(turned_map(given.y_t), given.y_ts.iterator)

    def view(self, parameter):
        return None

    # -- consumer warps -----------------------------------------------------------------------------------------------

    def start(self, tile, work, own):
        """Waits until the tile before has been read."""
        cute.arch.mbarrier_wait(work.shared.barriers + (self.barrier + 1), (tile.count & 1) ^ 1)

    def outputs(self, words, rows, work, state) -> None:
        """16 rows of the tile, as columns; those behind the group's end are zeros."""
        lane = cute.arch.lane_idx()
        first = rows.row + (lane >> 2)
        there = [ptx.flag(first + r * 8 < rows.end) for r in range(2)]
        column = (lane >> 4) * 8 + (lane & 7)
        unit = work.warp_of_cta * (WARP_ROWS // UNIT) + ((lane >> 3) & 1)
        at = work.shared.turned.toint() + place(column, unit)
        words = [ptx.word_where(there[number % 2], word) for number, word in enumerate(words)]
        for pair in range(self.plan.out_tile_n // 16):
            ptx.store_matrix_x4(at + pair * (16 * LINE), words[4 * pair : 4 * pair + 4], turned=True)

    @cute.jit
    def finish_tile(self, state, work):
        """The warp has written its part, or has no rows."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(work.shared.barriers + self.barrier)

    # -- the idle warp ------------------------------------------------------------------------------------------------

    @cute.jit
    def assist(self, idle: Idle):
        """All warps of the load warpgroup."""
        if idle.warp == TURNER:
            self.follow(idle)

    @cute.jit
    def follow(self, idle: Idle):
        """Tile after tile; all lanes of the warp."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        counted = Int32(0)  # groups, whose blocks are
        blocks = Int32(0)
        row, end, n_tile, group = idle.ring.get(count)
        cute.arch.sync_warp()
        if lane == 0:
            idle.ring.free(count)
        while group >= 0:
            begin = Int32(0)
            if cutlass.const_expr(self.plan.grouped):
                offsets = idle.operands.offsets
                blocks += blocks_between(offsets, idle.extents.rows, counted, group, lane)
                counted = group
                if group > 0:
                    begin = cutlass.max(offsets[group - 1], 0)
            block = blocks + ptx.divide(row - begin, SIDE)
            slabs = ptx.divide(cutlass.min(end - row, SIDE) + (WARP_ROWS - 1), WARP_ROWS)
            cute.arch.mbarrier_wait(idle.shared.barriers + self.barrier, count & 1)
            if row < end:  # else the CTA only helped to load
                for part in cutlass.range_constexpr(self.plan.out_tile_n // SIDE):
                    column = column_of(n_tile) * self.plan.out_tile_n + part * SIDE
                    self.columns(idle, part * (SIDE * LINE), column, block, slabs, lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(idle.shared.barriers + (self.barrier + 1))
            count += 1
            row, end, n_tile, group = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def columns(self, idle: Idle, offset: Int32, column: Int32, block: Int32, slabs: Int32, lane: Int32):
        """128 columns from `column` on, of a block of tokens of which `slabs` times 16 may have rows."""
        target = idle.operands.y_turned
        width = idle.extents.half_n if cutlass.const_expr(self.plan.halved) else idle.extents.n
        made = idle.shared.turned_codes
        if lane == 0:  # the codes before have left
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for turn in cutlass.range(SIDE // WARP, unroll=1):
            own = turn * WARP + lane
            lines = idle.shared.turned.toint() + offset + turn * (WARP * LINE)
            scale, inverse = self.scale_of(lines, slabs, lane)
            at = target.scales.toint() + (Int64(block) * Int64(width) + Int64(column + own)) * 4
            lanes.store(at, [lanes.bits_of(scale)], 4, column + own < width)
            self.codes_of(lines, made.toint() + own * SIDE, slabs, inverse, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            ptx.tma_store(ptx.descriptor_address(target.codes), made, (block * SIDE, column))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def scale_of(self, lines: Int32, slabs: Int32, lane: Int32):
        """Of the lane's column among those from `lines` on; and the scale's reciprocal."""
        most = Uint32(0)
        for unit in cutlass.range(slabs * 2, unroll=2):
            most = codes.larger_pairs(most, codes.largest(load_unit(lines, unit, lane)))
        return codes.scale_of(codes.larger(*codes.numbers(most)), self.plan.quant.scales)

    @cute.jit
    def codes_of(self, lines: Int32, target: Int32, slabs: Int32, inverse, lane: Int32):
        """The lane's column as codes, 16 tokens at a time."""
        for slab in cutlass.range(slabs, unroll=1):
            words = [*load_unit(lines, slab * 2, lane), *load_unit(lines, slab * 2 + 1, lane)]
            numbers = [half for word in words for half in codes.halves(word)]
            packed = [codes.four_codes(numbers[four : four + 4], inverse) for four in range(0, 16, 4)]
            ptx.store_shared_v4(target + (slab ^ (lane & 7)) * 16, packed)
        for slab in cutlass.range(slabs, SIDE // WARP_ROWS, unroll=1):
            ptx.store_shared_v4(target + (slab ^ (lane & 7)) * 16, [Uint32(0)] * 4)


def turned_map(tensor):
    """Tensor map of codes [N, P]: a box is 128 columns of 128 tokens."""
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))
    return box_map(store_op(), view, (SIDE, SIDE))


def place(column, unit):
    """Where eight tokens of a column are, in bytes behind the first of all."""
    return column * LINE + (unit ^ (column & 7)) * 16


def load_unit(lines: Int32, unit: Int32, lane: Int32) -> list:
    """Eight tokens of column `lane`."""
    return [Uint32(word) for word in ptx.load_shared_v4(lines + place(lane, unit))]

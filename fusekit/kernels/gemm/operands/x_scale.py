"""Accumulators times the scale of their row of x; scales of blocks, on their way to the stages.

A scale of all of x is a factor of w's (w_scale.py). Those of blocks are used where sums are promoted (promoted.py).
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, Idle, row_pair
from fusekit.plan.gemm import SEGMENT, WARP
from fusekit.plan.operands.x_scale import stage_bytes, w_scales
from fusekit.plan.quant import ROW, SIDE


class BlockScales(NamedTuple):
    """Scales [ceil(K / 128), M], `stride` elements from row to row."""

    pointer: cute.Pointer
    stride: Int64


class XScale(DeviceOperand):
    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.by_row, self.by_block = plan.quant.inputs == ROW, plan.quant.by_block
        self.concat = plan.halved and plan.glu_layout == "concat"

    def parameter(self, given):
        return BlockScales(given.x_s.iterator, Int64(given.x_s.stride[0])) if self.by_block else given.x_s.iterator

    def rows(self, rows, work, state, acc):
        return row_pair(work.operands.x_scale, rows) if self.by_row else None

    def scale(self, value, row_state, r: int):
        return value * row_state[r] if self.by_row else value

    # -- blocks -------------------------------------------------------------------------------------------------------

    @cute.jit
    def assist(self, idle: Idle):
        """One warp fetches the scales of each stage, as the load thread fetches the factors."""
        if cutlass.const_expr(self.by_block):
            self.fetch(idle)

    @cute.jit
    def fetch(self, idle: Idle):
        """All warps of the load warpgroup."""
        if idle.warp == self.operand.warps(self.plan)[0]:
            self.fetch_tiles(idle)

    @cute.jit
    def fetch_tiles(self, idle: Idle):
        """All lanes of the warp: stage after stage, tile after tile."""
        plan, lane = self.plan, cute.arch.lane_idx()
        blocks = ptx.divide(idle.extents.k + (SIDE - 1), SIDE)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        row, end, n_tile, group = idle.ring.get(count)
        cute.arch.sync_warp()
        if lane == 0:
            idle.ring.free(count)
        while group >= 0:
            x, there = self.rows_from(idle, row + lane, end)
            w = self.columns_from(idle, n_tile, group, blocks, lane)
            for _ in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(idle.shared.stages_empty + stage, phase)
                target = idle.shared.scales.toint() + stage * stage_bytes(plan)
                if lane < plan.tile[1] // SEGMENT:
                    copy_async(target + lane * 4, w, Int32(1))
                for part in cutlass.range_constexpr(plan.tile[0] // WARP):
                    at = target + (w_scales(plan) + part * WARP + lane) * 4
                    copy_async(at, x + part * (WARP * 4), ptx.flag(there > part * WARP))
                arrive_when_copied(idle.shared.stages_full + stage)
                x += idle.operands.x_scale.stride * 4
                w += 4
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, end, n_tile, group = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)

    def rows_from(self, idle: Idle, row: Int32, end: Int32):
        """Address of the first scale of row `row`, and how many rows its group has from there on."""
        return idle.operands.x_scale.pointer.toint() + Int64(row) * 4, end - row

    def columns_from(self, idle: Idle, n_tile: Int32, group: Int32, blocks: Int32, lane: Int32):
        """Address of the first scale of w of the tile's segment `lane`."""
        tile_n, n = self.plan.tile[1], idle.extents.n
        column = self.kit.column_of(n_tile) * tile_n + lane * SEGMENT
        if self.concat:
            half = tile_n // 2
            side = ptx.divide(lane * SEGMENT, half)
            column = self.kit.column_of(n_tile) * half + lane * SEGMENT - side * half + side * idle.extents.half_n
        down = ptx.divide(n + (SIDE - 1), SIDE)
        block = ptx.minimum_of(ptx.divide(column, SIDE), down - 1)
        return idle.operands.w_scale.toint() + (Int64(group) * Int64(down) + Int64(block)) * Int64(blocks) * 4


def copy_async(destination: Int32, source: Int64, there: Int32, size: int = 4) -> None:
    """4, 8 or 16 bytes from global to shared memory; zeros unless they are there."""
    cute.arch.inline_ptx(
        f"{{ .reg .b32 size_; mul.lo.u32 size_, {{$r2}}, {size};"
        f" cp.async.{'ca' if size < 16 else 'cg'}.shared.global [{{$r0}}], [{{$r1}}], {size}, size_; }}",
        read_only_args=[destination, source, there],
    )


def arrive_when_copied(barrier) -> None:
    """Arrive at a barrier of the CTA once all that this thread has started to copy is there."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[barrier.toint()])

"""Scales of dy and x by blocks of 128 tokens, on their way to the stages."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, Idle
from fusekit.kernels.gemm.operands.x_scale import arrive_when_copied, copy_async
from fusekit.plan.gemm import SEGMENT, WARP
from fusekit.plan.operands.token_scales import stage_bytes
from fusekit.plan.operands.x_scale import w_scales
from fusekit.plan.quant import SIDE

FOUR = 4  # scales of dy that a lane copies at once
PAIR = 2  # of x


class Scales(NamedTuple):
    """Pointers to [P / 128, columns]."""

    dy: cute.Pointer
    x: cute.Pointer


class TokenScales(DeviceOperand):
    def parameter(self, given):
        return Scales(given.dy_ts.iterator, given.x_ts.iterator)

    @cute.jit
    def assist(self, idle: Idle):
        """One warp fetches the scales of each stage, as the load thread fetches the factors."""
        plan, lane = self.plan, cute.arch.lane_idx()
        if idle.warp == self.operand.warps(plan)[0]:
            count = Int32(0)
            stage = Int32(0)
            phase = Int32(1)
            row, end, n_tile, group, m_tile, _, first, _ = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)
            while group >= 0:
                columns = (m_tile * plan.tile[0] + lane * FOUR, self.kit.column_of(n_tile) * plan.tile[1] + lane * PAIR)
                for step in cutlass.range(ptx.divide(end - row + (plan.tile_k - 1), plan.tile_k), unroll=1):
                    cute.arch.mbarrier_wait(idle.shared.stages_empty + stage, phase)
                    self.fetch(idle, first + step, columns, idle.shared.scales.toint() + stage * stage_bytes(plan))
                    arrive_when_copied(idle.shared.stages_full + stage)
                    stage += 1
                    if stage == plan.stages:
                        stage = Int32(0)
                        phase ^= 1
                count += 1
                row, end, n_tile, group, m_tile, _, first, _ = idle.ring.get(count)
                cute.arch.sync_warp()
                if lane == 0:
                    idle.ring.free(count)

    @cute.jit
    def fetch(self, idle: Idle, block: Int32, columns, target: Int32):
        """The scales of token block `block`; columns: of dy and of x, the first that this lane copies."""
        plan, lane, extents = self.plan, cute.arch.lane_idx(), idle.extents
        tile_m = plan.tile[0]
        to_dy = target + w_scales(plan) * 4 if cutlass.const_expr(plan.quant.square) else target
        dy = row_of(idle.operands.token_scales.dy, block, extents.k, columns[0])
        for part in cutlass.range_constexpr(0, tile_m, WARP * FOUR):
            if part + lane * FOUR < tile_m:
                there = ptx.flag(columns[0] + part < extents.k)
                copy_async(to_dy + (part + lane * FOUR) * 4, dy + part * 4, there, FOUR * 4)
        if cutlass.const_expr(plan.quant.square):
            self.fetch_blocks(idle, block, columns[1] - lane * PAIR, target)
        else:
            self.fetch_columns(idle, block, columns[1], target + tile_m * 4)

    @cute.jit
    def fetch_columns(self, idle: Idle, block: Int32, column: Int32, target: Int32):
        """The scales of x in the order in which a lane of the accumulators reads them, four at once: of each 16 columns
        those of columns 0, 1, 8, 9, then 2, 3, 10, 11, and so on.
        """
        plan, lane, extents = self.plan, cute.arch.lane_idx(), idle.extents
        tile_n = plan.tile[1]
        x = row_of(idle.operands.token_scales.x, block, extents.n, column)
        to_x = target + (lane >> 3) * 64 + (lane & 3) * 16 + (lane >> 2 & 1) * 8
        for part in cutlass.range_constexpr(0, tile_n, WARP * PAIR):
            if part + lane * PAIR < tile_n:
                there = ptx.flag(column + part < extents.n)
                copy_async(to_x + part * 4, x + part * 4, there, PAIR * 4)

    @cute.jit
    def fetch_blocks(self, idle: Idle, block: Int32, column: Int32, target: Int32):
        """The scale of x for each segment of the tile's columns, from `column` on."""
        lane, extents = cute.arch.lane_idx(), idle.extents
        if lane < self.plan.tile[1] // SEGMENT:
            lane_column = column + lane * SEGMENT
            blocks = ptx.divide(extents.n + (SIDE - 1), SIDE)
            x = row_of(idle.operands.token_scales.x, block, blocks, ptx.divide(lane_column, SIDE))
            copy_async(target + lane * 4, x, ptx.flag(lane_column < extents.n))


def row_of(scales: cute.Pointer, block: Int32, extent: Int32, column: Int32) -> Int64:
    """Address of the scale of `column` in token block `block`."""
    return scales.toint() + (Int64(block) * Int64(extent) + Int64(column)) * 4

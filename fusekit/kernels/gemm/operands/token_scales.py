"""Scales of dy and x by blocks of 128 tokens, on their way to the stages."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Idle, Operand
from fusekit.kernels.gemm.operands.x_scale import arrive_when_copied, copy_async
from fusekit.kernels.gemm.sm90.scheduler import column_of
from fusekit.plan.gemm import WARP
from fusekit.plan.operands.token_scales import stage_bytes

FOUR = 4  # scales that a lane copies at once


class Scales(NamedTuple):
    """Pointers to [P / 128, columns]."""

    dy: cute.Pointer
    x: cute.Pointer


class TokenScales(Operand):
    def parameter(self, given):
        return Scales(given.dy_ts.iterator, given.x_ts.iterator)

    @cute.jit
    def assist(self, idle: Idle):
        """One warp fetches the scales of each stage, as the load thread fetches the factors."""
        plan, lane = self.plan, cute.arch.lane_idx()
        if idle.warp == self.told.warps(plan)[0]:
            count = Int32(0)
            stage = Int32(0)
            phase = Int32(1)
            row, end, n_tile, group, m_tile, _, first, _ = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)
            while group >= 0:
                columns = (m_tile * plan.tile[0] + lane * FOUR, column_of(n_tile) * plan.tile[1] + lane * FOUR)
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
        lane = cute.arch.lane_idx()
        sides = ((idle.operands.token_scales.dy, idle.extents.k, 0), (idle.operands.token_scales.x, idle.extents.n, 1))
        for pointer, extent, side in sides:
            source = pointer.toint() + (Int64(block) * Int64(extent) + Int64(columns[side])) * 4
            base = target + (side * self.plan.tile[0] + lane * FOUR) * 4
            for part in cutlass.range_constexpr(0, self.plan.tile[side], WARP * FOUR):
                if part + lane * FOUR < self.plan.tile[side]:
                    there = ptx.flag(columns[side] + part < extent)
                    copy_async(base + part * 4, source + part * 4, there, 16)

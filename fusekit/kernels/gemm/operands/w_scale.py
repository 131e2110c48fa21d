"""Accumulators times the scale of their column of w, or times that of their group and of x; scales of MXFP4, on their
way to the stages.
"""

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import SCALES, Idle
from fusekit.kernels.gemm.operands.bias import Columns
from fusekit.kernels.gemm.operands.x_scale import arrive_when_copied, copy_async
from fusekit.plan.gemm import WARP
from fusekit.plan.operands.w_scale import SCALE_BYTES
from fusekit.plan.quant import MX_SIDE, ROW, SIDE

STAGE_SCALES = 4  # of a row of MXFP4


class WScale(Columns):
    name, role = "w_scale", SCALES

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.by_column, self.by_block = plan.quant.inputs == ROW, plan.quant.by_block or plan.quant.weights_alone
        self.packed, self.concat = plan.quant.mx_weights, plan.halved and plan.glu_layout == "concat"

    def parameter(self, given):
        return given.w_s.iterator

    def begin(self, shared, warpgroup):
        return super().begin(shared, warpgroup) if self.by_column else None

    def prepare(self, tile, work, warp_state) -> None:
        if self.by_column:
            self.fetch(tile, work, warp_state)

    def start(self, tile, work, warp_state):
        return warp_state if self.by_column or self.by_block else self.factor(tile, work)

    def factor(self, tile, work):
        """The scale of x and of the group's w."""
        operands = work.operands
        return operands.x_scale[0] * operands.w_scale[tile.group if self.plan.grouped else 0]

    def begin_of(self, tile, work, column: Int32):
        """Address of the first scale of blocks of w, along K, of the product's column `column`."""
        down, blocks = (ptx.divide(extent + (SIDE - 1), SIDE) for extent in (work.extents.n, work.extents.k))
        side = ptx.minimum_of(ptx.divide(column, SIDE), down - 1)
        place = (Int64(tile.group) * Int64(down) + Int64(side)) * Int64(blocks)
        return work.operands.w_scale.toint() + place * 4

    def chunk(self, chunk: int, state):
        return super().chunk(chunk, state) if self.by_column else None

    def accumulate(self, value, state, chunk, c: int):
        return value if self.by_block else value * (chunk[c] if self.by_column else state)

    # -- MXFP4 --------------------------------------------------------------------------------------------------------

    @cute.jit
    def assist(self, idle: Idle):
        """One warp fetches the scales of each stage, as the load thread fetches the factors."""
        if cutlass.const_expr(self.packed):
            self.fetch_stages(idle)

    @cute.jit
    def fetch_stages(self, idle: Idle):
        """All warps of the load warpgroup."""
        if idle.warp == self.operand.warps(self.plan)[0]:
            self.fetch_tiles(idle)

    @cute.jit
    def fetch_tiles(self, idle: Idle):
        """All lanes of the warp: stage after stage, tile after tile."""
        plan, lane = self.plan, cute.arch.lane_idx()
        blocks, rows = ptx.divide(idle.extents.k, MX_SIDE), plan.tile[1]
        first = idle.operands.w_scale.toint()
        end = first + Int64(idle.extents.groups) * Int64(idle.extents.n) * Int64(blocks)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        _, _, n_tile, group = idle.ring.get(count)
        cute.arch.sync_warp()
        if lane == 0:
            idle.ring.free(count)
        while group >= 0:
            places = self.rows_from(idle, first, n_tile, group, blocks, lane)
            for _ in cutlass.range(ptx.divide(blocks + (STAGE_SCALES - 1), STAGE_SCALES), unroll=1):
                cute.arch.mbarrier_wait(idle.shared.stages_empty + stage, phase)
                target = idle.shared.scales.toint() + stage * (rows * SCALE_BYTES) + lane * SCALE_BYTES
                for part in cutlass.range_constexpr(rows // WARP):
                    for word in cutlass.range_constexpr(SCALE_BYTES // 4):
                        at, source = target + (part * WARP * SCALE_BYTES + word * 4), places[part] + word * 4
                        copy_async(at, source, ptx.flag(source < end))
                arrive_when_copied(idle.shared.stages_full + stage)
                places = tuple(place + STAGE_SCALES for place in places)
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            _, _, n_tile, group = idle.ring.get(count)
            cute.arch.sync_warp()
            if lane == 0:
                idle.ring.free(count)

    def rows_from(self, idle: Idle, first: Int64, n_tile: Int32, group: Int32, blocks: Int32, lane: Int32) -> tuple:
        """Addresses of the words in which the first scales of the lane's rows begin; every 32nd row of a tile."""
        tile_n, n, places = self.plan.tile[1], idle.extents.n, []
        for part in range(tile_n // WARP):
            row = lane + part * WARP
            column = self.kit.column_of(n_tile) * tile_n + row
            if self.concat:
                half = tile_n // 2
                side = ptx.divide(row, half)
                column = self.kit.column_of(n_tile) * half + row - side * half + side * idle.extents.half_n
            at = Int64(group) * Int64(n) + Int64(ptx.minimum_of(column, n - 1))
            places.append((first + at * Int64(blocks)) & Int64(-4))
        return tuple(places)

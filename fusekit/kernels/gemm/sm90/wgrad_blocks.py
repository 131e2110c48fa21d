"""Weight gradients with FP8 operands on Hopper: dw[e] = sum over blocks b of 128 tokens of P_b dy_ts[b, n] x_ts[b, k].

What differs from wgrad.py: both factors have a column for each token, [N, P] and [K, P], as FP8's wgmma wants them; a
stage is a block of tokens, in which each group begins, so nothing is clipped; sums are promoted (promoted.py), and both
factors have a scale for each of their columns in each block. Or x has one for 128 columns, as w has in a product, and
the sums are those of promoted.py.
"""

import cutlass
from cutlass import Int32, cute

from fusekit.kernels import ptx
from fusekit.kernels.floats import fma, multiply
from fusekit.kernels.gemm.operands.base import Extents
from fusekit.kernels.gemm.sm90.boxes import load_share
from fusekit.kernels.gemm.sm90.kernel import Gemm
from fusekit.kernels.gemm.sm90.main_loop import Stages
from fusekit.kernels.gemm.sm90.promoted import PromotedLoop
from fusekit.kernels.gemm.sm90.scheduler import GroupScheduler, TileRing, column_of
from fusekit.kernels.gemm.sm90.wgrad import GradEpilogue, Wgrad, WgradLoop
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.token_scales import stage_bytes

EARLY = 2  # loads of column scales ahead of adding up: more would take registers that there are not


def kernel(plan: GemmPlan, halves) -> Gemm:
    """The kernel of `plan`; halves: the device halves of its operands, by name."""
    loop = SquareLoop if plan.quant.square else BlockLoop
    return Wgrad(plan, halves, loop(plan, halves), GradEpilogue(plan, halves), GroupScheduler(plan))


class SquareLoop(PromotedLoop, WgradLoop):
    """Load role. x has one scale for 128 columns, as the w of a product has."""

    @cute.jit
    def load(self, operands, stages: Stages, ring: TileRing, extents: Extents, rank: Int32):
        """The load thread."""
        plan = self.plan
        tile_m, tile_n = plan.tile
        dy_map, x_map = self.both.descriptors(operands)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        row, end, n_tile, group, m_tile, _, first, _ = ring.get(count)
        ring.free(count)
        while group >= 0:
            for step in cutlass.range(ptx.divide(end - row + (plan.tile_k - 1), plan.tile_k), unroll=1):
                cute.arch.mbarrier_wait(stages.empty + stage, phase)
                cute.arch.mbarrier_arrive_and_expect_tx(stages.full + stage, plan.stage_bytes)
                token = (first + step) * plan.tile_k
                to_dy, to_x = stages.x + stage * (tile_m * plan.tile_k), stages.w + stage * (tile_n * plan.tile_k)
                dy = self.both.blocks(dy_map, to_dy, stages.full + stage, m_tile * tile_m, tile_m, token)
                x = self.both.blocks(x_map, to_x, stages.full + stage, column_of(n_tile) * tile_n, tile_n, token)
                load_share(dy, x, n_tile, rank, stage, plan.cluster_size > 1)
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, end, n_tile, group, m_tile, _, first, _ = ring.get(count)
            ring.free(count)


class BlockLoop(SquareLoop):
    """Scales of each column of both factors."""

    reads_scales_late = True

    def scales(self, stages: Stages, stage: Int32, row: Int32, lane: Int32):
        """A stage's scales of a lane's two rows from row `row` of the tile on; where those of its columns are, and the
        first of them, which are on their way while wgmma run.
        """
        address = stages.scales.toint() + stage * stage_bytes(self.plan)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        at = address + (row + warp * WARP_ROWS + (lane >> 2)) * 4
        columns = address + (self.plan.tile[0] + (lane & 3) * 4) * 4
        early = [self.columns(columns, chunk) for chunk in range(EARLY)]
        return ptx.load_shared_f32(at), ptx.load_shared_f32(at + 8 * 4), columns, early

    def columns(self, address: Int32, chunk: int):
        """A lane's scales of 16 columns, as token_scales.py lays them."""
        return ptx.load_shared_f32x4(address + chunk * 16 * 4)

    def promote(self, sums, first: int, column: int, accumulator, scales) -> None:
        """As the parent's."""
        *rows, columns, early = scales
        for chunk in range(cute.size(accumulator) // 8):
            of_columns = early[chunk] if chunk < len(early) else self.columns(columns, chunk)
            for number in range(8):
                scale = multiply(rows[number // 2 % 2], of_columns[number // 4 * 2 + number % 2])
                at = first + chunk * 8 + number
                sums[at] = fma(accumulator[chunk * 8 + number], scale, sums[at])

"""Weight gradients on Hopper: dw[e] = dy[rows of e]^T . x[rows of e], the reduction being the ragged dimension.

A dense one has one group, of all rows.

Warp roles, pipeline and barriers are those of kernel.py. What differs: both operands are token-major, so a stage
holds 64 tokens of dy's columns and of x's, in boxes of 64 columns, and both are M-major to wgmma; the tensor maps clip
at a group's end and fill with zeros, so that the neighbour's rows (even NaN) never enter the sum; a tile has as many
stages as its group has rows, and the scheduler passes how many came before; the epilogue stores or adds boxes of dw.
"""

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Extents, Work
from fusekit.kernels.gemm.sm90.boxes import load_alone, load_share
from fusekit.kernels.gemm.sm90.hooks import Operands
from fusekit.kernels.gemm.sm90.kernel import Gemm
from fusekit.kernels.gemm.sm90.main_loop import MainLoop, Run, Stages
from fusekit.kernels.gemm.sm90.scheduler import GroupScheduler, TileRing, column_of
from fusekit.kernels.gemm.sm90.staging import StagingBoxes
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import BIG, GemmPlan


def kernel(plan: GemmPlan, halves) -> Gemm:
    """The kernel of `plan`; halves: the device halves of its operands, by name."""
    return Wgrad(plan, halves, WgradLoop(plan, halves), GradEpilogue(plan, halves), GroupScheduler(plan))


class WgradLoop(MainLoop):
    """Load role of a weight gradient; accumulation is the parent's. Tile and cluster are over dw's rows and columns."""

    def extents(self, given):
        """Rows of tokens, columns and rows of dw."""
        return self.both.extents(given)

    def most_tiles(self, extents: Extents) -> Int64:
        """Cluster tiles of all groups."""
        cluster_m, cluster_n = (tile * cluster for tile, cluster in zip(self.plan.tile, self.plan.cluster, strict=True))
        m_clusters = Int64((extents.k + (cluster_m - 1)) // cluster_m)
        clusters = m_clusters * Int64((extents.n + (cluster_n - 1)) // cluster_n)
        return clusters if extents.groups is None else clusters * extents.groups

    @cute.jit
    def load(self, operands, stages: Stages, ring: TileRing, extents: Extents, rank: Int32):
        """The load thread."""
        plan = self.plan
        tile_m, tile_n = plan.tile
        dy_map, x_map = self.both.descriptors(operands)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)
        ring.free(count)
        while group >= 0:
            left = end - row
            while left > 0:
                cute.arch.mbarrier_wait(stages.empty + stage, phase)
                cute.arch.mbarrier_arrive_and_expect_tx(stages.full + stage, plan.tma_bytes)
                rows = (BIG - left, BIG, end)
                to_dy, to_x = stages.x + stage * (tile_m * plan.tile_k), stages.w + stage * (tile_n * plan.tile_k)
                dy = self.both.boxes(dy_map, to_dy, stages.full + stage, m_tile * tile_m, tile_m, rows)
                x = self.both.boxes(x_map, to_x, stages.full + stage, column_of(n_tile) * tile_n, tile_n, rows)
                if cutlass.const_expr(plan.gathers):
                    other = x if cutlass.const_expr(plan.gather == "dy") else dy
                    load_alone(other, plan.gather == "dy", n_tile, rank, stage, plan.cluster_size > 1)
                else:
                    load_share(dy, x, n_tile, rank, stage, plan.cluster_size > 1)
                left -= plan.tile_k
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)
            ring.free(count)


class GradEpilogue:
    """Accumulators to boxes of dw, a warp's 16 rows at a time."""

    def __init__(self, plan: GemmPlan, halves) -> None:
        self.plan = plan
        self.operands = Operands(halves)
        self.columns = plan.result_box(plan.tile[1])
        self.boxes = StagingBoxes(plan)

    @cute.jit
    def run(self, acc, row: Int32, rows: Int32, n_tile: Int32, group: Int32, work: Work):
        """Store a tile whose warpgroup begins at row `row` of dw[group], which has `rows`; all four warps."""
        plan, width = self.plan, self.columns
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        for block in cutlass.range_constexpr(plan.warpgroup_rows // 64):
            first = row + block * 64 + (work.warp_of_cta & 3) * WARP_ROWS
            if first < rows:
                for box in cutlass.range_constexpr(plan.tile[1] // width):
                    base = block * (plan.tile[1] // 2) + box * (width // 2)
                    number = block * (plan.tile[1] // width) + box
                    column = n_tile * plan.tile[1] + box * width
                    values = [acc[base + index] for index in range(width // 2)]
                    self.operands.result(values, box, number, (column, first, group), work, self.boxes)


class Wgrad(Gemm):
    """A kernel of weight gradients."""

    @cute.jit
    def consume(self, operands, shared, stages: Stages, ring: TileRing, extents: Extents):
        """A consumer warpgroup: its tiles' main loops and epilogues; `extents.k` rows of dw."""
        plan, m = self.plan, extents.k
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        consumer = cute.arch.make_warp_uniform(ptx.divide(thread, plan.arch.warpgroup)) - 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row_offset = 0 if cutlass.const_expr(plan.pingpong) else consumer * plan.warpgroup_rows
        most, fragments = self.main_loop.fragments(stages.x + row_offset * plan.tile_k, stages.w)
        acc = cute.make_tensor(most.iterator, cute.make_layout(cute.size(most)))
        work = self.work(operands, shared, extents, consumer, warp, thread)

        count = Int32(0)
        step = 1
        if cutlass.const_expr(plan.pingpong):
            step = 2
            count = consumer
            if consumer == 1:  # warpgroup 0 goes first
                self.main_loop.turns.pass_on(1)
        row, end, n_tile, group, m_tile, position, _, _ = ring.get(count)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            self.main_loop.turns.take(consumer)
            n_tile = column_of(n_tile)
            k_tiles = ptx.divide(end - row + (plan.tile_k - 1), plan.tile_k)
            first = m_tile * plan.tile[0] + row_offset
            if k_tiles > 0:
                run = Run(position, k_tiles)
                self.main_loop.run_tile(most, fragments, stages, run, m - first, consumer, lane)
                self.epilogue.run(acc, first, m, n_tile, group, work)
            else:
                self.main_loop.turns.pass_on(consumer)
                if cutlass.const_expr(not plan.adds):  # an empty group's gradient is zero
                    acc.fill(0.0)
                    self.epilogue.run(acc, first, m, n_tile, group, work)
            count += step
            row, end, n_tile, group, m_tile, position, _, _ = ring.get(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)

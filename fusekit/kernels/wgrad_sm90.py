"""Weight gradients on Hopper: dw[e] = dy[rows of e]^T . x[rows of e], the reduction being the ragged dimension.

Warp roles, pipeline and barriers are those of gemm_sm90.py. What differs: both operands are token-major, so a stage
holds 64 tokens of dy's columns and of x's, in boxes of 64 columns, and both are M-major to wgmma; the tensor maps clip
at a group's end and fill with zeros, so that the neighbour's rows (even NaN) never enter the sum; a tile has as many
stages as its group has rows, and the scheduler says how many came before; the epilogue stores or adds boxes of dw.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from fusekit.kernels import ptx
from fusekit.kernels.column_sums import ColumnSums
from fusekit.kernels.config import CONSUMER_WARPGROUPS, THREADS, TILE_K, WARPGROUP, GemmConfig, dtype_of
from fusekit.kernels.epilogue import BIG, BOXES, WARP_ROWS, StagingBoxes, box_columns
from fusekit.kernels.gemm_sm90 import GemmSm90, box_map
from fusekit.kernels.mainloop_sm90 import N_BOX, Boxes, MainLoop
from fusekit.kernels.scheduler import GroupScheduler, column_of


class WgradLoop(MainLoop):
    """Load role of a weight gradient; accumulation is the parent's."""

    def __init__(self, config: GemmConfig) -> None:
        super().__init__(config)
        self.m_major = self.n_major = True
        self.w_box = N_BOX

    @cute.jit
    def load(self, maps, smem, barriers, ring, k: Int32, half_n: Int32, rank: Int32):
        """The load thread. maps, smem: (dy, x); the other arguments are the parent's."""
        config = self.config
        (map_dy, map_x), (smem_dy, smem_x), (full, empty) = maps, smem, barriers
        tile_m, tile_n = config.tile
        dy_map, x_map = ptx.descriptor_address(map_dy), ptx.descriptor_address(map_x)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)
        row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)
        ring.free(count)
        while group >= 0:
            left = end - row
            while left > 0:
                cute.arch.mbarrier_wait(empty + stage, phase)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                rows = (BIG - left, BIG, end)
                to_dy, to_x = smem_dy + stage * (tile_m * TILE_K), smem_x + stage * (tile_n * TILE_K)
                dy = self.boxes(dy_map, to_dy, full + stage, m_tile * tile_m, tile_m, rows)
                x = self.boxes(x_map, to_x, full + stage, column_of(n_tile) * tile_n, tile_n, rows)
                self.load_pair(dy, x, n_tile, rank, stage)
                left -= TILE_K
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, end, n_tile, group, m_tile, _, _, _ = ring.get(count)
            ring.free(count)

    def boxes(self, descriptor, destination, barrier, column, width: int, rows) -> Boxes:
        """A stage of `width` columns from `column` on; rows: coordinates behind that of the column."""
        starts = [column + first for first in range(0, width, N_BOX)]
        return Boxes(descriptor, destination, barrier, starts, N_BOX, lambda start: (start, *rows))


class GradEpilogue:
    """Accumulators to boxes of dw, a warp's 16 rows at a time."""

    barriers = ()

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.out_dtype = dtype_of(config.out_dtype)
        self.single = config.out_dtype == "f32"
        limit = config.epilogue_box // 2 if self.single else config.epilogue_box
        self.box = box_columns(config.tile[1], limit)
        self.boxes = StagingBoxes(config.epilogue_box * WARP_ROWS * 2)
        self.warp_bytes = BOXES * self.boxes.bytes
        self.staging_bytes = CONSUMER_WARPGROUPS * 4 * self.warp_bytes

    @cute.jit
    def run(
        self, acc, row: Int32, rows: Int32, n_tile: Int32, group: Int32, descriptor, staging, warp: Int32, lane: Int32
    ):
        """Store a tile whose warpgroup begins at row `row` of dw[group], which has `rows`; all four warps."""
        config = self.config
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        for block in cutlass.range_constexpr(config.warpgroup_rows // 64):
            first = row + block * 64 + warp * WARP_ROWS
            if first < rows:
                for box in cutlass.range_constexpr(config.tile[1] // self.box):
                    base = block * (config.tile[1] // 2) + box * (self.box // 2)
                    number = block * (config.tile[1] // self.box) + box
                    where = (n_tile * config.tile[1] + box * self.box, first, group)
                    if cutlass.const_expr(self.single):
                        values = [acc[base + index] for index in range(self.box // 2)]
                        self.boxes.store_single(
                            number, self.box, values, descriptor, where, staging, lane, config.accumulate
                        )
                    else:
                        pairs = [
                            ptx.pack_pair(acc[base + index], acc[base + index + 1], self.out_dtype)
                            for index in range(0, self.box // 2, 2)
                        ]
                        self.boxes.store(number, self.box, pairs, descriptor, where, staging, lane)


class WgradSm90(GemmSm90):
    """One configuration of the weight gradient; tile and cluster are over dw's (rows, columns)."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.main_loop = WgradLoop(config)
        self.epilogue = GradEpilogue(config)
        self.scheduler = GroupScheduler(config)
        self.column_sums = ColumnSums(config, self.main_loop) if config.column_warps else None

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        dw: cute.Tensor,
        offsets: cute.Tensor,
        dbias,
        counters,
        sm_count: Int32,
        cluster_margin: Int32,
        stream: CUstream,
    ):
        """Make the tensor maps and the grid, launch. dy [M, N], x [M, K], dw [E, N, K], dbias [E, N]."""
        config = self.config
        load = cpasync.CopyBulkTensorTileG2SOp()
        map_dy = self.ragged_map(load, dy, (N_BOX, TILE_K))
        map_x = self.ragged_map(load, x, (N_BOX, TILE_K))
        view = cute.make_tensor(dw.iterator, cute.select(dw.layout, [2, 1, 0]))
        map_dw = box_map(cpasync.CopyBulkTensorTileS2GOp(), view, (self.epilogue.box, WARP_ROWS))
        groups, m, n = offsets.shape[0], dy.shape[1], x.shape[1]
        cluster_m, cluster_n = config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1]
        tiles = Int64((m + (cluster_m - 1)) // cluster_m) * Int64((n + (cluster_n - 1)) // cluster_n) * groups
        resident = Int64(sm_count // config.cluster_size - cluster_margin)
        clusters = Int32(cutlass.max(cutlass.min(resident, tiles), 1))
        self.kernel(
            map_dy,
            map_x,
            map_dw,
            None,
            None,
            offsets.iterator,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            dbias.iterator if cutlass.const_expr(config.dbias) else None,
            counters.iterator if cutlass.const_expr(config.dynamic) else None,
            None,
            groups,
            dy.shape[0],
            n,
            m,
        ).launch(
            grid=[clusters * config.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[config.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def consume(self, pipeline, outputs, biases, operands, gradients, n: Int32, half_n: Int32, m: Int32):
        """A consumer warpgroup: its tiles' main loops and epilogues; `m` rows of dw."""
        config = self.config
        smem_dy, smem_x, full, empty, ring = pipeline
        (map_dw, _, _), staging, *_ = outputs
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        consumer = cute.arch.make_warp_uniform(ptx.divide(thread, WARPGROUP)) - 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row_offset = 0 if cutlass.const_expr(config.pingpong) else consumer * config.warpgroup_rows
        most, fragments = self.main_loop.fragments(smem_dy + row_offset * TILE_K, smem_x)
        acc = cute.make_tensor(most.iterator, cute.make_layout(cute.size(most)))
        staging_warp = staging + (consumer * 4 + warp) * self.epilogue.warp_bytes
        map_dw = ptx.descriptor_address(map_dw)

        count = Int32(0)
        step = 1
        if cutlass.const_expr(config.pingpong):
            step = 2
            count = consumer
            if consumer == 1:  # warpgroup 0 goes first
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
        row, end, n_tile, group, m_tile, position, _, _ = ring.get(count)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            if cutlass.const_expr(config.pingpong):
                cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=2 * WARPGROUP)
            n_tile = column_of(n_tile)
            k_tiles = ptx.divide(end - row + (TILE_K - 1), TILE_K)
            first = m_tile * config.tile[0] + row_offset
            if k_tiles > 0:
                stages = (full, empty, position, k_tiles)
                self.main_loop.run_tile(most, fragments, stages, m - first, consumer, lane)
                self.epilogue.run(acc, first, m, n_tile, group, map_dw, staging_warp, warp, lane)
            else:
                if cutlass.const_expr(config.pingpong):
                    cute.arch.barrier_arrive(barrier_id=2 - consumer, number_of_threads=2 * WARPGROUP)
                if cutlass.const_expr(not config.accumulate):  # an empty group's gradient is zero
                    acc.fill(0.0)
                    self.epilogue.run(acc, first, m, n_tile, group, map_dw, staging_warp, warp, lane)
            count += step
            row, end, n_tile, group, m_tile, position, _, _ = ring.get(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)

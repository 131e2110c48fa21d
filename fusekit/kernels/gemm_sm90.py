"""The Hopper main loop: dense and grouped GEMM with a composed epilogue, persistent and warp-specialised.

    y[rows of e] = epilogue(x[rows of e] . w[e]),   16-bit operands, float32 accumulation (wgmma m64nNk16)

Warps of a CTA (384 threads, one CTA an SM):

    warp 0       load       one thread: TMA boxes of x and w into the operand pipeline, multicast over the cluster
    warp 1       schedule   turns tile numbers into (group, m, n), fills the tile ring (scheduler.py)
    warps 2-3    idle
    warps 4-7    consumer warpgroup 0: wgmma, then the epilogue (epilogue.py)
    warps 8-11   consumer warpgroup 1

Ping-pong: a warpgroup owns whole tiles, 0 the even and 1 the odd ones of the CTA; while one runs its epilogue, the other
holds the tensor cores, and named barriers hand them over. Cooperative: both share a tile, each half of its rows.

Operand pipeline, `stages` deep; a stage is x [tile_m, 64] and w [tile_n, 64], 128-byte swizzled:

    full[s]    1 arrival (the load thread, which announces the stage's bytes) + those bytes
    empty[s]   4 arrivals (one a warp) of each warpgroup that reads the stage, from every CTA of the cluster

    time ->      load   | k0 k1 k2 ...            | next tile's k0 k1 ...
    ping-pong    wg 0   |    mma(tile 0)          | epilogue(tile 0)     | mma(tile 2)
                 wg 1   |    (waits its turn)     | mma(tile 1)          | epilogue(tile 1)

Cluster (2,1): the CTAs share w, each loads half of the box and multicasts it. Cluster (1,2): likewise x.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.activations import GluScalars
from fusekit.kernels.config import THREADS, TILE_K, WARPGROUP, GemmConfig
from fusekit.kernels.epilogue import BIG, BOX_BYTES, BOXES, LARGEST, STAGING_BYTES, WARP_ROWS, WRAP, Epilogue, dtype_of
from fusekit.kernels.scheduler import RING_SLOTS, SLOT_BYTES, StaticScheduler, TileRing

LOAD_REGISTERS = 24
CONSUMER_REGISTERS = 240
N_BOX = 64  # columns of an n-major box: 128 bytes


class Operands:
    """What the epilogue reads besides the accumulators."""

    def __init__(self, alpha, row_scale, scalars: GluScalars) -> None:
        self.alpha, self.row_scale, self.scalars = alpha, row_scale, scalars


class GemmSm90:
    """One configuration of the kernel; calling it (through cute.compile) traces host function and kernel."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.out_dtype = dtype_of(config.out_dtype)
        self.epilogue = Epilogue(config)
        self.scheduler = StaticScheduler(config)
        self.n_major = config.b_major == "n"
        tile_m, tile_n = config.tile
        self.x_box = tile_m // config.cluster[1]
        halves = config.cluster[0] > 1 or config.glu_layout == "concat"
        self.w_box = N_BOX if self.n_major else (tile_n // 2 if halves else tile_n)
        self.block_counts = sorted({1, config.warpgroup_rows // 64})  # 64-row blocks that a main loop may run on
        self.stage_bytes = (tile_m + tile_n) * TILE_K * 2

    # -- host ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        preactivation,
        offsets,
        bias,
        row_scale,
        alpha,
        act_alpha,
        act_limit,
        act_up_offset,
        sm_count: Int32,
        cluster_margin: Int32,
        stream: CUstream,
    ):
        """Make the tensor maps and the grid, launch. Absent operands are None; w is [E, N, K] or [E, K, N] ([N, K] dense)."""
        config = self.config
        tile_m, tile_n = config.tile
        rows = x.shape[0]
        map_x = self.load_map(x, (self.x_box, TILE_K), swizzled(self.dtype, 64))
        w_nk, n = self.weights_as_nke(w)
        map_w = self.load_map(w_nk, (self.w_box, TILE_K, 1), swizzled(self.dtype, 64, n_major=self.n_major))
        map_y = self.store_map(y, self.epilogue.y_box, self.out_dtype)
        map_z = None
        if cutlass.const_expr(config.save_preactivation):
            map_z = self.store_map(preactivation, self.epilogue.z_box, self.dtype, split=config.glu_layout == "concat")
        groups = offsets.shape[0] if cutlass.const_expr(config.grouped) else None
        cluster_n = tile_n * config.cluster[1]
        m_clusters = (rows + (self.scheduler.cluster_rows - 1)) // self.scheduler.cluster_rows
        if cutlass.const_expr(config.grouped):
            m_clusters += groups  # every group may begin a tile of its own
        most_tiles = Int64((n + (cluster_n - 1)) // cluster_n) * m_clusters
        resident = Int64(sm_count // config.cluster_size - cluster_margin)
        clusters = Int32(cutlass.max(cutlass.min(resident, most_tiles), 1))
        self.kernel(
            map_x,
            map_w,
            map_y,
            map_z,
            offsets.iterator if cutlass.const_expr(config.grouped) else None,
            bias.iterator if cutlass.const_expr(config.bias) else None,
            row_scale.iterator if cutlass.const_expr(config.row_scale) else None,
            alpha.iterator if cutlass.const_expr(config.alpha == "group") else alpha,
            act_alpha,
            act_limit,
            act_up_offset,
            groups,
            rows,
            n,
            x.shape[1],
        ).launch(
            grid=[clusters * config.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[config.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def weights_as_nke(self, w):
        """w viewed as [N, K, E] whatever its layout in memory, and N."""
        grouped = self.config.grouped
        modes = ([2, 1, 0] if self.n_major else [1, 2, 0]) if grouped else ([1, 0] if self.n_major else [0, 1])
        layout = cute.select(w.layout, modes)
        if not grouped:
            layout = cute.append(layout, cute.make_layout(1, stride=0))
        return cute.make_tensor(w.iterator, layout), layout.shape[0]

    def load_map(self, tensor, box, atom):
        """Tensor map for boxes of `tensor`."""
        layout = cute.tile_to_shape(atom, box, order=tuple(range(len(box))))
        copy, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
        return copy

    def store_map(self, tensor, columns: int, dtype, split: bool = False):
        """Tensor map of a row-major [M, N] output that clips rows at a group's end (see epilogue.py).

        With `split` the columns are two halves with a bound each, so that a box of gates never runs into the ups.
        """
        ld = tensor.stride[0]
        if split:
            half = tensor.shape[1] // 2
            shape, stride = (half, BIG, 2, LARGEST, LARGEST), (1, ld, half, WRAP - ld, ld)
            box, box_stride = (columns, WARP_ROWS, 1, 1, 1), (1, columns, 0, 0, 0)
        else:
            shape, stride = (tensor.shape[1], BIG, LARGEST, LARGEST), (1, ld, WRAP - ld, ld)
            box, box_stride = (columns, WARP_ROWS, 1, 1), (1, columns, 0, 0)
        view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        atom = swizzled(dtype, columns, n_major=True)
        layout = cute.make_composed_layout(atom.inner, atom.offset, cute.make_layout(box, stride=box_stride))
        copy, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, layout, box)
        return copy

    # -- device -------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        map_x: cute.CopyAtom,
        map_w: cute.CopyAtom,
        map_y: cute.CopyAtom,
        map_z,
        offsets,
        bias,
        row_scale,
        alpha,
        act_alpha,
        act_limit,
        act_up_offset,
        groups,
        rows: Int32,
        n: Int32,
        k: Int32,
    ):
        """All roles; see the module's docstring."""
        config = self.config
        tile_m, tile_n = config.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % config.cluster[0], rank // config.cluster[0]

        allocator = cutlass.memory.SmemAllocator()
        smem_x = cute.recast_ptr(allocator.allocate(config.stages * tile_m * TILE_K * 2, 1024), dtype=self.dtype)
        smem_w = cute.recast_ptr(allocator.allocate(config.stages * tile_n * TILE_K * 2, 1024), dtype=self.dtype)
        staging = allocator.allocate(STAGING_BYTES, 1024)
        full = allocator.allocate_array(Int64, config.stages)
        empty = allocator.allocate_array(Int64, config.stages)
        ring = TileRing(
            allocator.allocate(RING_SLOTS * SLOT_BYTES, 16).toint(),
            allocator.allocate_array(Int64, RING_SLOTS),
            allocator.allocate_array(Int64, RING_SLOTS),
        )
        shared_bias = None
        if cutlass.const_expr(config.bias):
            shared_bias = allocator.allocate_array(Float32, 2 * tile_n)

        if warp == 0:
            if lane == 0:
                for stage in range(config.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 4 * (1 if config.pingpong else 2) * config.cluster_size)
                ring.initialise(config)
                cute.arch.mbarrier_init_fence()
                for copy in (map_x, map_w, map_y, map_z):
                    if cutlass.const_expr(copy is not None):
                        cpasync.prefetch_descriptor(copy)
        if cutlass.const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        k_tiles = (k + (TILE_K - 1)) // TILE_K
        half_n = n // 2
        if warp < 4:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                if lane == 0:
                    self.load(map_x, map_w, smem_x, smem_w, full, empty, ring, k_tiles, half_n, rank_m, rank_n)
            if warp == 1:
                n_clusters = (n + (tile_n * config.cluster[1] - 1)) // (tile_n * config.cluster[1])
                self.scheduler.run(
                    ring,
                    offsets,
                    groups if cutlass.const_expr(config.grouped) else Int32(1),
                    rows,
                    n_clusters,
                    rank_m,
                    rank_n,
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            operands = (alpha, row_scale, act_alpha, act_limit, act_up_offset)
            self.consume(
                smem_x,
                smem_w,
                staging,
                full,
                empty,
                ring,
                map_y,
                map_z,
                bias,
                shared_bias,
                operands,
                n,
                half_n,
                k_tiles,
            )
        if cutlass.const_expr(config.cluster_size > 1):  # nobody leaves while a peer may still arrive on its barriers
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load(
        self,
        map_x,
        map_w,
        smem_x,
        smem_w,
        full,
        empty,
        ring,
        k_tiles: Int32,
        half_n: Int32,
        rank_m: Int32,
        rank_n: Int32,
    ):
        """The load thread: fill stage after stage, tile after tile."""
        config = self.config
        tile_m, tile_n = config.tile
        x_map, w_map = ptx.descriptor_address(map_x), ptx.descriptor_address(map_w)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # a fresh barrier counts as passed in the opposite phase
        row, _, n_tile, group = ring.get(count, Int32(0))
        ring.free(count)
        while group >= 0:
            for k_tile in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                k = k_tile * TILE_K
                self.load_x(x_map, smem_x + stage * (tile_m * TILE_K), full + stage, k, row, rank_n)
                self.load_w(w_map, smem_w + stage * (tile_n * TILE_K), full + stage, k, n_tile, group, half_n, rank_m)
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, _, n_tile, group = ring.get(count, Int32(0))
            ring.free(count)

    def load_x(self, x_map, destination, barrier, k, row, rank_n) -> None:
        """This CTA's share of the stage's x: all rows, or with cluster (1,2) one half for both CTAs."""
        if self.config.cluster[1] > 1:
            offset = rank_n * self.x_box
            ptx.tma_load(x_map, destination + offset * TILE_K, barrier, (k, row + offset), multicast_mask=3)
        else:
            ptx.tma_load(x_map, destination, barrier, (k, row))

    @cute.jit
    def load_w(self, w_map, destination, barrier, k: Int32, n_tile: Int32, group: Int32, half_n: Int32, rank_m: Int32):
        """This CTA's share of the stage's w: both halves, or with cluster (2,1) one half for both CTAs."""
        config = self.config
        half = config.tile[1] // 2
        if cutlass.const_expr(config.glu_layout == "concat"):
            columns = (n_tile * half, half_n + n_tile * half)
        else:
            columns = (n_tile * config.tile[1], n_tile * config.tile[1] + half)
        if cutlass.const_expr(config.cluster[0] > 1):
            column = columns[0]
            if rank_m > 0:
                column = columns[1]
            self.load_w_columns(w_map, destination + rank_m * (half * TILE_K), barrier, k, column, half, group, 3)
        elif cutlass.const_expr(config.glu_layout == "concat"):
            self.load_w_columns(w_map, destination, barrier, k, columns[0], half, group, None)
            self.load_w_columns(w_map, destination + half * TILE_K, barrier, k, columns[1], half, group, None)
        else:
            self.load_w_columns(w_map, destination, barrier, k, columns[0], config.tile[1], group, None)

    def load_w_columns(self, w_map, destination, barrier, k, column, width, group, mask) -> None:
        """`width` columns of w from `column` on, in as many boxes as it takes."""
        for first in range(0, width, self.w_box):
            where = (column + first, k, group) if self.n_major else (k, column + first, group)
            ptx.tma_load(w_map, destination + first * TILE_K, barrier, where, multicast_mask=mask)

    @cute.jit
    def consume(
        self,
        smem_x,
        smem_w,
        staging,
        full,
        empty,
        ring,
        map_y,
        map_z,
        bias,
        shared_bias,
        operands,
        n: Int32,
        half_n: Int32,
        k_tiles: Int32,
    ):
        """A consumer warpgroup: its tiles' main loops and epilogues."""
        config = self.config
        tile_m, tile_n = config.tile
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        row_offset = 0 if cutlass.const_expr(config.pingpong) else consumer * config.warpgroup_rows

        mma = self.tiled_mma()
        w_layout = staged(
            swizzled(self.dtype, 64, n_major=self.n_major),
            (tile_n, TILE_K),
            config.stages,
            tile_n * TILE_K,
            k_first=self.n_major,
        )
        w_tensor = cute.make_tensor(cute.recast_ptr(smem_w, w_layout.inner, dtype=self.dtype), w_layout.outer)
        w_fragment = mma.make_fragment_B(mma.get_slice(0).partition_B(w_tensor))
        x_fragments = [self.x_fragment(mma, smem_x + row_offset * TILE_K, blocks) for blocks in self.block_counts]
        most = mma.make_fragment_C(mma.partition_shape_C((config.warpgroup_rows, tile_n)))
        acc = cute.make_tensor(most.iterator, cute.make_layout(cute.size(most)))

        alpha, row_scale, act_alpha, act_limit, act_up_offset = operands
        staging_warp = staging + (consumer * 4 + warp) * (BOXES * BOX_BYTES)
        map_y = ptx.descriptor_address(map_y)
        if cutlass.const_expr(config.save_preactivation):
            map_z = ptx.descriptor_address(map_z)
        if cutlass.const_expr(config.bias):
            shared_bias = cute.make_tensor(shared_bias + consumer * tile_n, cute.make_layout(tile_n))

        count = Int32(0)
        step = 1
        position = Int32(0)  # of the operand pipeline: stages consumed by the CTA before this tile
        if cutlass.const_expr(config.pingpong):
            step = 2
            count = consumer
            position = consumer * k_tiles
            if consumer == 1:  # warpgroup 0 goes first
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
        row, end, n_tile, group = ring.get(count, lane)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            if cutlass.const_expr(config.bias):
                self.epilogue.load_bias(bias, shared_bias, group, n_tile, n, half_n, thread % WARPGROUP, consumer)
            scale = alpha
            if cutlass.const_expr(config.alpha == "group"):
                scale = alpha[group]
            if cutlass.const_expr(config.pingpong):
                cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=2 * WARPGROUP)
            rows_left = end - row - row_offset
            pipeline = (full, empty, position, k_tiles)
            if rows_left > 64 and cutlass.const_expr(config.warpgroup_rows > 64):
                self.main_loop(most, (x_fragments[-1], w_fragment), pipeline, consumer, lane)
            elif rows_left > 0:
                self.main_loop(self.first_block(most), (x_fragments[0], w_fragment), pipeline, consumer, lane)
            else:
                self.main_loop(None, None, pipeline, consumer, lane)
            scalars = GluScalars(act_alpha, act_limit, act_up_offset)
            self.epilogue.run(
                acc,
                row + row_offset,
                end,
                n_tile,
                (map_y, map_z),
                Operands(scale, row_scale, scalars),
                shared_bias,
                staging_warp,
                warp,
                lane,
            )
            count += step
            position += step * k_tiles
            row, end, n_tile, group = ring.get(count, lane)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def main_loop(self, accumulators, fragments, pipeline, consumer: Int32, lane: Int32):
        """Accumulate one tile, or its first 64 rows, or (None) nothing but keep the pipeline going; rows beyond the group cost no tensor work.

        A stage is released when the next one's wgmma are in flight. In ping-pong the other warpgroup takes over as soon as
        the last wgmma is issued.
        """
        stages = self.config.stages
        full, empty, position, k_tiles = pipeline
        stage = position % stages
        phase = (position // stages) & 1
        released = stage
        cute.arch.mbarrier_wait(full + stage, phase)
        start, add = self.tiled_mma(), self.tiled_mma()
        start.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        self.multiply(start, add, accumulators, fragments, stage)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            stage += 1
            if stage == stages:
                stage = Int32(0)
                phase ^= 1
            cute.arch.mbarrier_wait(full + stage, phase)
            self.multiply(add, add, accumulators, fragments, stage)
            if cutlass.const_expr(accumulators is not None):
                warpgroup.wait_group(1)
            self.release(empty + released, lane)
            released = stage
        if cutlass.const_expr(self.config.pingpong):
            cute.arch.barrier_arrive(barrier_id=2 - consumer, number_of_threads=2 * WARPGROUP)
        if cutlass.const_expr(accumulators is not None):
            warpgroup.wait_group(0)
        self.release(empty + released, lane)

    def multiply(self, first, mma, accumulators, fragments, stage) -> None:
        """Start one stage's wgmma, as one group; `first` is the MMA of its first 16 of K."""
        if accumulators is not None:
            warpgroup.fence()
            x, w = fragments
            for k_block in range(TILE_K // 16):
                where = (None, None, k_block, stage)
                cute.gemm(mma if k_block else first, accumulators, x[where], w[where], accumulators)
            warpgroup.commit_group()

    @cute.jit
    def release(self, barrier, lane: Int32):
        """Tell every load thread of the cluster that this warp has read the stage."""
        if cutlass.const_expr(self.config.cluster_size > 1):
            if lane < self.config.cluster_size:
                cute.arch.mbarrier_arrive(barrier, lane)
        else:
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)

    def x_fragment(self, mma, pointer, blocks: int):
        """wgmma descriptors of the first `blocks` 64-row blocks of x at `pointer`, for every stage."""
        layout = staged(
            swizzled(self.dtype, 64), (blocks * 64, TILE_K), self.config.stages, self.config.tile[0] * TILE_K
        )
        tensor = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tensor))

    def first_block(self, accumulators):
        """The accumulators of the first 64 rows."""
        shape = (accumulators.shape[0], 1, 1)
        return cute.make_tensor(accumulators.iterator, cute.make_layout(shape))

    def tiled_mma(self):
        """wgmma of one warpgroup over all columns of the tile."""
        major = OperandMajorMode.MN if self.n_major else OperandMajorMode.K
        return make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, self.config.tile[1])
        )


def swizzled(dtype, columns: int, n_major: bool = False):
    """Shared-memory layout atom whose contiguous side is `columns` elements: 64, 32 or 16."""
    kind = {64: "SW128", 32: "SW64", 16: "SW32"}[columns]
    name = f"{'MN' if n_major else 'K'}_{kind}"
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind[name], dtype)


def staged(atom, shape: tuple[int, int], stages: int, stage_elements: int, k_first: bool = False):
    """`stages` tiles of `shape` at a distance of `stage_elements`; `k_first` lays atoms along K before the other side."""
    tile = cute.tile_to_shape(atom, shape, order=(1, 0) if k_first else (0, 1))
    return cute.make_composed_layout(
        tile.inner, tile.offset, cute.append(tile.outer, cute.make_layout(stages, stride=stage_elements))
    )

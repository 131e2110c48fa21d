"""The Hopper main loop: dense and grouped GEMM with a composed epilogue, persistent and warp-specialised.

    y[rows of e] = epilogue(x[rows of e] . w[e]),   16-bit operands, float32 accumulation (wgmma m64nNk16)

Warps of a CTA (384 threads, one CTA an SM):

    warp 0       load       one thread: TMA boxes of x and w into the operand pipeline, multicast over the cluster
    warp 1       schedule   turns tile numbers into (group, m, n), fills the tile ring (scheduler.py)
    warps 2-3    idle, or at work for sums of gradients (collect.py, column_sums.py)
    warps 4-7    consumer warpgroup 0: wgmma, then the epilogue (epilogue.py)
    warps 8-11   consumer warpgroup 1

Ping-pong: a warpgroup owns whole tiles, 0 the even and 1 the odd ones of the CTA; while one runs its epilogue, the
other holds the tensor cores, and named barriers hand them over. Cooperative: both share a tile, each half of its rows.

Operand pipeline, `stages` deep; a stage is x [tile_m, 64] and w [tile_n, 64], 128-byte swizzled:

    full[s]    1 arrival (the load thread, which announces the stage's bytes) + those bytes
    empty[s]   4 arrivals (one a warp) of each warpgroup that reads the stage, from every CTA of the cluster; and one of
               each warp that sums dy (column_sums.py)

    time ->      load   | k0 k1 k2 ...            | next tile's k0 k1 ...
    ping-pong    wg 0   |    mma(tile 0)          | epilogue(tile 0)     | mma(tile 2)
                 wg 1   |    (waits its turn)     | mma(tile 1)          | epilogue(tile 1)

The two CTAs of a cluster share w or x, as the tile says (raster.py): each loads half of it and multicasts that.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from fusekit.kernels import ptx
from fusekit.kernels.column_sums import ColumnSums
from fusekit.kernels.config import THREADS, TILE_K, WARPGROUP, GemmConfig, dtype_of
from fusekit.kernels.epilogue import BIG, LARGEST, WARP_ROWS, WRAP, Epilogue
from fusekit.kernels.mainloop_sm90 import MainLoop, swizzled
from fusekit.kernels.scheduler import Scheduler, TileRing, column_of


class GemmSm90:
    """One configuration of the kernel; calling it (through cute.compile) traces host function and kernel."""

    column_sums: ColumnSums | None = None  # of a weight gradient

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.out_dtype = dtype_of(config.out_dtype)
        self.main_loop = MainLoop(config)
        self.epilogue = Epilogue(config)
        self.scheduler = Scheduler(config)

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
        counters,
        sm_count: Int32,
        cluster_margin: Int32,
        stream: CUstream,
    ):
        """Make the tensor maps and the grid, launch. Absent operands are None; a dense w has no E."""
        config = self.config
        rows = x.shape[0]
        map_x = self.load_map(x, (self.main_loop.x_box, TILE_K), swizzled(self.dtype, 64))
        w_nk, n = self.weights_as_nke(w)
        w_box = (self.main_loop.w_box, TILE_K, *([1] if config.grouped else []))
        map_w = self.load_map(w_nk, w_box, swizzled(self.dtype, 64, n_major=self.main_loop.n_major))
        store = cpasync.CopyBulkTensorTileS2GOp()
        map_y = self.ragged_map(store, y, (self.epilogue.y_box, WARP_ROWS))
        map_z = None
        if cutlass.const_expr(config.save_preactivation):
            split = config.glu_layout == "concat"
            map_z = self.ragged_map(store, preactivation, (self.epilogue.z_box, WARP_ROWS), split)
        groups = offsets.shape[0] if cutlass.const_expr(config.grouped) else None
        self.kernel(
            map_x,
            map_w,
            map_y,
            map_z,
            None,
            offsets.iterator if cutlass.const_expr(config.grouped) else None,
            bias.iterator if cutlass.const_expr(config.bias) else None,
            row_scale.iterator if cutlass.const_expr(config.row_scale) else None,
            alpha.iterator if cutlass.const_expr(config.alpha == "group") else alpha,
            act_alpha,
            act_limit,
            act_up_offset,
            None,
            None,
            counters.iterator if cutlass.const_expr(config.dynamic) else None,
            None,
            groups,
            rows,
            n,
            x.shape[1],
        ).launch(
            grid=[self.clusters(rows, n, groups, sm_count, cluster_margin) * config.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[config.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def clusters(self, rows: Int32, n: Int32, groups, sm_count: Int32, cluster_margin: Int32) -> Int32:
        """Clusters to launch: one for each cluster tile there can be at most, or as many as fit less the margin."""
        config = self.config
        cluster_n = config.tile[1] * config.cluster[1]
        cluster_rows = config.tile[0] * config.cluster[0]
        m_clusters = (rows + (cluster_rows - 1)) // cluster_rows
        if groups is not None:
            m_clusters = m_clusters + groups  # every group may begin a tile of its own
        most_tiles = Int64((n + (cluster_n - 1)) // cluster_n) * m_clusters
        resident = Int64(sm_count // config.cluster_size - cluster_margin)
        return Int32(cutlass.max(cutlass.min(resident, most_tiles), 1))

    def weights_as_nke(self, w):
        """w viewed as [N, K, E], [N, K] when dense, whatever its layout in memory; and N."""
        n_major = self.main_loop.n_major
        if self.config.grouped:
            layout = cute.select(w.layout, [2, 1, 0] if n_major else [1, 2, 0])
        else:
            layout = cute.select(w.layout, [1, 0] if n_major else [0, 1])
        return cute.make_tensor(w.iterator, layout), layout.shape[0]

    def load_map(self, tensor, box, atom):
        """Tensor map for boxes of `tensor`."""
        layout = cute.tile_to_shape(atom, box, order=tuple(range(len(box))))
        copy, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
        return copy

    def ragged_map(self, op, tensor, box: tuple[int, int], split: bool = False, both: bool = False):
        """Tensor map of a row-major [M, N] tensor that clips rows at a group's end (see epilogue.py).

        box: (columns, rows). With `split` the columns are two halves with a bound each, so that a box of gates never
        runs into the ups; with `both` a box is one of gates and, behind it, one of ups.
        """
        ld = tensor.stride[0]
        if split:
            half = tensor.shape[1] // 2
            shape, stride = (half, BIG, 2, LARGEST, LARGEST), (1, ld, half, WRAP - ld, ld)
        else:
            shape, stride = (tensor.shape[1], BIG, LARGEST, LARGEST), (1, ld, WRAP - ld, ld)
        view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        return box_map(op, view, (*box, 2) if split and both else box)

    # -- device -------------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        map_x: cute.CopyAtom,
        map_w: cute.CopyAtom,
        map_y,
        map_z,
        map_dz,
        offsets,
        bias,
        row_scale,
        alpha,
        act_alpha,
        act_limit,
        act_up_offset,
        dprob,
        dbias,
        counters,
        scratch,
        groups,
        rows: Int32,
        n: Int32,
        k: Int32,
    ):
        """All roles; see the module's docstring."""
        config = self.config
        tile_m, tile_n = config.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        allocator = cutlass.memory.SmemAllocator()
        smem_x = cute.recast_ptr(allocator.allocate(config.stages * tile_m * TILE_K * 2, 1024), dtype=self.dtype)
        smem_w = cute.recast_ptr(allocator.allocate(config.stages * tile_n * TILE_K * 2, 1024), dtype=self.dtype)
        staging = allocator.allocate(self.epilogue.staging_bytes, 1024)
        full = allocator.allocate_array(Int64, config.stages)
        empty = allocator.allocate_array(Int64, config.stages)
        ring = TileRing(
            config,
            allocator.allocate(config.ring_slots * config.slot_bytes, 16).toint(),
            allocator.allocate_array(Int64, config.ring_slots),
            allocator.allocate_array(Int64, config.ring_slots),
        )
        arrivals = None
        if cutlass.const_expr(len(self.epilogue.barriers) > 0):
            arrivals = allocator.allocate_array(Int64, len(self.epilogue.barriers))
        sum_boxes = None
        if cutlass.const_expr(config.sums):
            sum_boxes = allocator.allocate(self.epilogue.sums.bytes, 16)
        shared_bias = None
        if cutlass.const_expr(config.bias):
            shared_bias = allocator.allocate_array(Float32, 2 * tile_n)

        if warp == 0 and lane == 0:
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, config.reading_warps * config.cluster_size)
            ring.initialise()
            for barrier in cutlass.range_constexpr(len(self.epilogue.barriers)):
                cute.arch.mbarrier_init(arrivals + barrier, self.epilogue.barriers[barrier])
            cute.arch.mbarrier_init_fence()
            for copy in (map_x, map_w, map_y, map_z, map_dz):
                if cutlass.const_expr(copy is not None):
                    cpasync.prefetch_descriptor(copy)
        if cutlass.const_expr(config.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        half_n = ptx.divide(n, 2)
        groups_ = groups if cutlass.const_expr(config.grouped) else Int32(1)
        gradients = (dprob, dbias, scratch, counters, offsets, groups_, rows, n)
        if warp < 4:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp == 0 and lane == 0:
                maps, smem = (map_x, map_w), (smem_x, smem_w)
                self.main_loop.load(maps, smem, (full, empty), ring, k, half_n, rank)
            if warp == 1:
                self.scheduler.run(ring, (offsets, groups_, rows, k, n), counters, rank)
            if cutlass.const_expr(config.sums):
                self.epilogue.assist(gradients, (arrivals, sum_boxes, staging), warp)
            if cutlass.const_expr(config.column_warps > 0):
                self.column_sums.assist(smem_x, (full, empty), ring, dbias, warp, k, n)
        else:
            cute.arch.setmaxregister_increase(config.registers[1])
            operands = (alpha, row_scale, act_alpha, act_limit, act_up_offset)
            pipeline = (smem_x, smem_w, full, empty, ring)
            outputs = ((map_y, map_z, map_dz), staging, arrivals, sum_boxes)
            self.consume(pipeline, outputs, (bias, shared_bias), operands, gradients, n, half_n, k)
        if cutlass.const_expr(config.cluster_size > 1):  # nobody leaves while a peer may still arrive on its barriers
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def consume(self, pipeline, outputs, biases, operands, gradients, n: Int32, half_n: Int32, k: Int32):
        """A consumer warpgroup: its tiles' main loops and epilogues."""
        config = self.config
        smem_x, smem_w, full, empty, ring = pipeline
        maps, staging, arrivals, sum_boxes = outputs
        bias, shared_bias = biases
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        consumer = cute.arch.make_warp_uniform(ptx.divide(thread, WARPGROUP)) - 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row_offset = 0 if cutlass.const_expr(config.pingpong) else consumer * config.warpgroup_rows
        k_tiles = ptx.divide(k + (TILE_K - 1), TILE_K)
        most, fragments = self.main_loop.fragments(smem_x + row_offset * TILE_K, smem_w)
        acc = cute.make_tensor(most.iterator, cute.make_layout(cute.size(most)))

        if cutlass.const_expr(config.bias):
            shared_bias = cute.make_tensor(shared_bias + consumer * config.tile[1], cute.make_layout(config.tile[1]))
        maps = tuple(ptx.descriptor_address(copy) if copy is not None else None for copy in maps)
        warp_of_cta = consumer * 4 + warp
        memory = (staging + warp_of_cta * self.epilogue.warp_bytes, arrivals, sum_boxes, warp_of_cta)
        biases, threads = (bias, shared_bias, n, half_n), (ptx.modulo(thread, WARPGROUP), consumer)
        context = (maps, memory, biases, operands, threads, gradients)

        count = Int32(0)
        step = 1
        position = Int32(0)  # of the operand pipeline: stages consumed by the CTA before this tile
        seen = Int32(0)  # whatever the epilogue counts from tile to tile
        if cutlass.const_expr(config.pingpong):
            step = 2
            count = consumer
            position = consumer * k_tiles
            if consumer == 1:  # warpgroup 0 goes first
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
        row, end, n_tile, group = ring.get(count)
        while group >= 0:
            cute.arch.sync_warp()
            if lane == 0:
                ring.free(count)
            n_tile = column_of(n_tile)
            tile = (row + row_offset, end, n_tile, group, count)
            self.epilogue.prepare(tile, context, seen)
            if cutlass.const_expr(config.pingpong):
                cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=2 * WARPGROUP)
            stages = (full, empty, position, k_tiles)
            self.main_loop.run_tile(most, fragments, stages, end - row - row_offset, consumer, lane)
            seen = self.epilogue.run(acc, tile, context, seen)
            count += step
            position += step * k_tiles
            row, end, n_tile, group = ring.get(count)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)
        if cutlass.const_expr(config.sums):
            self.epilogue.finish(context, count)


def box_map(op, tensor, box: tuple[int, ...]):
    """Tensor map of boxes of box[0] elements of mode 0, contiguous, by box[1] of mode 1 and so on; swizzled."""
    shape = (*box, *(1 for _ in range(cute.rank(tensor) - len(box))))
    stride = (1, box[0], box[0] * box[1] if len(box) > 2 else 0, *(0 for _ in shape[3:]))
    atom = swizzled(tensor.element_type, box[0], n_major=True)
    layout = cute.make_composed_layout(atom.inner, atom.offset, cute.make_layout(shape, stride=stride))
    copy, _ = cpasync.make_tiled_tma_atom(op, tensor, layout, shape)
    return copy

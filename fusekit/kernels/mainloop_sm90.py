"""The operand pipeline of a Hopper GEMM: the thread that fills it by TMA and the warpgroups that empty it by wgmma.

Barriers and timeline: see gemm_sm90.py. The position in the pipeline is a count of stages since the kernel began, so
that ping-pong warpgroups can skip each other's tiles without talking.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.config import TILE_K, WARPGROUP, GemmConfig, dtype_of

N_BOX = 64  # columns of an n-major box: 128 bytes


class MainLoop:
    """Load role and accumulation of one configuration."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.m_major, self.n_major = False, config.b_major == "n"
        tile_m, tile_n = config.tile
        self.x_box = tile_m // config.cluster[1]
        halves = config.cluster[0] > 1 or config.glu_layout == "concat"
        self.w_box = N_BOX if self.n_major else (tile_n // 2 if halves else tile_n)
        self.block_counts = sorted({1, config.warpgroup_rows // 64})  # 64-row blocks that a tile may be worked on
        self.stage_bytes = (tile_m + tile_n) * TILE_K * 2

    # -- load ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, maps, smem, barriers, ring, k: Int32, half_n: Int32, rank_m: Int32, rank_n: Int32):
        """The load thread: fill stage after stage, tile after tile. maps, smem: (x, w); barriers: (full, empty)."""
        config = self.config
        (map_x, map_w), (smem_x, smem_w), (full, empty) = maps, smem, barriers
        tile_m, tile_n = config.tile
        x_map, w_map = ptx.descriptor_address(map_x), ptx.descriptor_address(map_w)
        k_tiles = ptx.divide(k + (TILE_K - 1), TILE_K)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # a fresh barrier counts as passed in the opposite phase
        row, _, n_tile, group = ring.get(count)
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
            row, _, n_tile, group = ring.get(count)
            ring.free(count)

    def load_x(self, x_map, destination, barrier, k, row, rank_n) -> None:
        """This CTA's share of the stage's x: all rows, or with cluster (1,2) one half for both CTAs."""
        if self.config.cluster[1] > 1:
            offset = rank_n * self.x_box
            ptx.tma_load(x_map, destination + offset * TILE_K, barrier, (k, row + offset), 3)
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
            where = (column + first, k) if self.n_major else (k, column + first)
            if self.config.grouped:
                where = (*where, group)
            ptx.tma_load(w_map, destination + first * TILE_K, barrier, where, mask)

    # -- accumulate ---------------------------------------------------------------------------------------------------

    @cute.jit
    def run_tile(self, most, fragments, pipeline, rows_left: Int32, consumer: Int32, lane: Int32):
        """Accumulate a tile of which `rows_left` rows exist; a block of 64 rows without any costs no tensor work."""
        x_fragments, w_fragment = fragments
        if cutlass.const_expr(self.config.sums):
            # What a block without rows would keep from tile to tile cannot be used by the epilogue in between.
            most.fill(0.0)
        if rows_left > 64 and cutlass.const_expr(self.config.warpgroup_rows > 64):
            self.accumulate(most, (x_fragments[-1], w_fragment), pipeline, consumer, lane)
        elif rows_left > 0:
            self.accumulate(self.first_block(most), (x_fragments[0], w_fragment), pipeline, consumer, lane)
        else:
            self.accumulate(None, None, pipeline, consumer, lane)

    @cute.jit
    def accumulate(self, accumulators, fragments, pipeline, consumer: Int32, lane: Int32):
        """Accumulate one tile, or its first 64 rows, or (None) nothing, only keeping the pipeline going.

        A stage is released when the next one's wgmma are in flight. In ping-pong the other warpgroup takes over as soon
        as the last wgmma is issued.
        """
        stages = self.config.stages
        full, empty, position, k_tiles = pipeline
        stage = ptx.modulo(position, stages)
        phase = ptx.divide(position, stages) & 1
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

    def fragments(self, smem_x, smem_w):
        """A warpgroup's accumulators; wgmma descriptors of x (for each of `block_counts`) and w, for every stage."""
        mma = self.tiled_mma()
        rows, tile_n, stages = self.config.warpgroup_rows, self.config.tile[1], self.config.stages
        atom = swizzled(self.dtype, 64, n_major=self.n_major)
        layout = staged(atom, (tile_n, TILE_K), stages, tile_n * TILE_K, k_first=self.n_major)
        w = cute.make_tensor(cute.recast_ptr(smem_w, layout.inner, dtype=self.dtype), layout.outer)
        accumulators = mma.make_fragment_C(mma.partition_shape_C((rows, tile_n)))
        x = [self.x_fragment(mma, smem_x, blocks) for blocks in self.block_counts]
        return accumulators, (x, mma.make_fragment_B(mma.get_slice(0).partition_B(w)))

    def x_fragment(self, mma, pointer, blocks: int):
        """wgmma descriptors of the first `blocks` 64-row blocks of x at `pointer`, for every stage."""
        atom = swizzled(self.dtype, 64, n_major=self.m_major)
        elements = self.config.tile[0] * TILE_K
        layout = staged(atom, (blocks * 64, TILE_K), self.config.stages, elements, k_first=self.m_major)
        tensor = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tensor))

    def first_block(self, accumulators):
        """The accumulators of the first 64 rows."""
        shape = (accumulators.shape[0], 1, 1)
        return cute.make_tensor(accumulators.iterator, cute.make_layout(shape))

    def tiled_mma(self):
        """wgmma of one warpgroup over all columns of the tile."""
        x_major, w_major = (
            OperandMajorMode.MN if other else OperandMajorMode.K for other in (self.m_major, self.n_major)
        )
        return make_trivial_tiled_mma(
            self.dtype, self.dtype, x_major, w_major, Float32, (1, 1, 1), (64, self.config.tile[1])
        )


def swizzled(dtype, columns: int, n_major: bool = False):
    """Shared-memory layout atom whose contiguous side is `columns` elements: 128, 64 or 32 bytes."""
    kind = {128: "SW128", 64: "SW64", 32: "SW32"}[columns * dtype.width // 8]
    name = f"{'MN' if n_major else 'K'}_{kind}"
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind[name], dtype)


def staged(atom, shape: tuple[int, int], stages: int, stage_elements: int, k_first: bool = False):
    """`stages` tiles of `shape`, `stage_elements` apart; `k_first` lays atoms along K before the other side."""
    tile = cute.tile_to_shape(atom, shape, order=(1, 0) if k_first else (0, 1))
    return cute.make_composed_layout(
        tile.inner, tile.offset, cute.append(tile.outer, cute.make_layout(stages, stride=stage_elements))
    )

"""The operand pipeline of a Hopper GEMM: the thread that fills it by TMA and the warpgroups that empty it by wgmma.

Barriers and timeline: see gemm_sm90.py. The position in the pipeline is a count of stages since the kernel began, so
that ping-pong warpgroups can skip each other's tiles without talking.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.config import TILE_K, WARPGROUP, GemmConfig, dtype_of
from fusekit.kernels.raster import ALONG_M
from fusekit.kernels.scheduler import column_of

N_BOX = 64  # columns of an n-major box: 128 bytes
BOTH = 3  # multicast mask of a cluster of two


class MainLoop:
    """Load role and accumulation of one configuration."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.m_major, self.n_major = False, config.b_major == "n"
        tile_m, tile_n = config.tile
        self.pair = config.cluster_size > 1
        self.x_box = tile_m // config.cluster_size
        halves = self.pair or config.glu_layout == "concat"
        self.w_box = N_BOX if self.n_major else (tile_n // 2 if halves else tile_n)
        self.block_counts = sorted({1, config.warpgroup_rows // 64})  # 64-row blocks that a tile may be worked on
        self.stage_bytes = (tile_m + tile_n) * TILE_K * 2

    # -- load ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, maps, smem, barriers, ring, k: Int32, half_n: Int32, rank: Int32):
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
                x = self.x_boxes(x_map, smem_x + stage * (tile_m * TILE_K), full + stage, k_tile * TILE_K, row)
                columns = (column_of(n_tile), half_n, group)
                w = self.w_boxes(w_map, smem_w + stage * (tile_n * TILE_K), full + stage, k_tile * TILE_K, columns)
                self.load_pair(x, w, n_tile, rank, stage)
                stage += 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, _, n_tile, group = ring.get(count)
            ring.free(count)

    def x_boxes(self, descriptor, destination, barrier, k, row) -> "Boxes":
        """A stage of x from row `row` on."""
        starts = [row + first for first in range(0, self.config.tile[0], self.x_box)]
        return Boxes(descriptor, destination, barrier, starts, self.x_box, lambda start: (k, start))

    def w_boxes(self, descriptor, destination, barrier, k, columns) -> "Boxes":
        """A stage of w; columns: (tile along N, half of N, group)."""
        n_tile, half_n, group = columns
        tile_n = self.config.tile[1]
        if self.config.glu_layout == "concat":
            half = tile_n // 2
            firsts = range(0, half, self.w_box)
            starts = [side + n_tile * half + first for side in (0, half_n) for first in firsts]
        else:
            starts = [n_tile * tile_n + first for first in range(0, tile_n, self.w_box)]
        behind = (group,) if self.config.grouped else ()
        if self.n_major:
            return Boxes(descriptor, destination, barrier, starts, self.w_box, lambda start: (start, k, *behind))
        return Boxes(descriptor, destination, barrier, starts, self.w_box, lambda start: (k, start, *behind))

    @cute.jit
    def load_pair(self, x, w, n_tile: Int32, rank: Int32, stage: Int32):
        """This CTA's share of both operands: both whole, or one whole and half of the one that the cluster shares."""
        if cutlass.const_expr(not self.pair):
            self.load_own(x)
            self.load_own(w)
        elif n_tile >= ALONG_M:
            self.load_own(x)
            self.load_shared(w, rank, stage)
        else:
            self.load_shared(x, rank, stage)
            self.load_own(w)

    def load_own(self, boxes) -> None:
        """All boxes, for this CTA alone."""
        for number in range(len(boxes.starts)):
            self.load_box(boxes, number)

    def load_box(self, boxes, number: int, mask: int | None = None) -> None:
        """One box."""
        destination = boxes.destination + number * boxes.width * TILE_K
        ptx.tma_load(boxes.descriptor, destination, boxes.barrier, boxes.place(boxes.starts[number]), mask)

    @cute.jit
    def load_shared(self, boxes, rank: Int32, stage: Int32):
        """Half of the boxes, for both CTAs; of an odd number, who loads more alternates."""
        half = len(boxes.starts) // 2
        if cutlass.const_expr(len(boxes.starts) % 2 == 0):
            for number in cutlass.range_constexpr(half):
                first, second = boxes.starts[number], boxes.starts[number + half]
                destination = boxes.destination + (rank * half + number) * (boxes.width * TILE_K)
                where = boxes.place(first + rank * (second - first))
                ptx.tma_load(boxes.descriptor, destination, boxes.barrier, where, BOTH)
        else:
            for number in cutlass.range_constexpr(len(boxes.starts)):
                if (stage + number) & 1 == rank:
                    self.load_box(boxes, number, BOTH)

    # -- accumulate ---------------------------------------------------------------------------------------------------

    @cute.jit
    def run_tile(self, most, fragments, pipeline, rows_left: Int32, consumer: Int32, lane: Int32):
        """Accumulate a tile of which `rows_left` rows exist; a block of 64 rows without any costs no tensor work."""
        x_fragments, w_fragment = fragments
        if rows_left > 64 and cutlass.const_expr(self.config.warpgroup_rows > 64):
            self.accumulate(most, (x_fragments[-1], w_fragment), pipeline, consumer, lane)
        elif rows_left > 0:
            self.accumulate(self.first_block(most), (x_fragments[0], w_fragment), pipeline, consumer, lane)
            self.clear(most, self.config.tile[1] // 2)
        else:
            self.accumulate(None, None, pipeline, consumer, lane)
            self.clear(most, 0)

    def clear(self, accumulators, first: int) -> None:
        """Zero the accumulators from number `first` on, which no wgmma has written.

        What they would keep from tile to tile could not be used by the epilogue in between. (Zeroed before the main
        loop, they would make ptxas wait behind every wgmma.)
        """
        if self.config.dbias and not self.config.wgrad:
            flat = cute.make_tensor(accumulators.iterator, cute.make_layout(cute.size(accumulators)))
            for number in range(first, cute.size(accumulators)):
                flat[number] = Float32(0.0)

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


class Boxes(NamedTuple):
    """An operand's boxes of one stage: consecutive in shared memory, each with a start of its own in the tensor.

    descriptor: its tensor map. starts: rows or columns at which the boxes begin; width: how many of them each has;
    place: gives a box's coordinates from its start.
    """

    descriptor: Any
    destination: Any
    barrier: Any
    starts: list
    width: int
    place: Callable


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

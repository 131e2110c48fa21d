"""The operand pipeline of a Hopper GEMM: the thread that fills it by TMA and the warpgroups that empty it by wgmma.

Barriers and timeline: see kernel.py. The position in the pipeline is a count of stages since the kernel began, so that
ping-pong warpgroups can skip each other's tiles without talking.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import BOTH, LEFT, RIGHT, Extents, Tile, Work, dtype_of
from fusekit.kernels.gemm.sm90.boxes import load_alone, load_share
from fusekit.kernels.gemm.sm90.hooks import Operands
from fusekit.kernels.gemm.sm90.maps import swizzled
from fusekit.kernels.gemm.sm90.scheduler import column_of
from fusekit.plan.gemm import TURNS, GemmPlan

MMA_BYTES = 32  # of K, that one wgmma multiplies


class Stages(NamedTuple):
    """The pipeline in shared memory: tiles of both factors, and two barriers a stage."""

    x: object
    w: object
    full: object
    empty: object
    scales: object = None  # of blocks, stage by stage
    exchange: object = None  # products of swapped tiles, a region for each warpgroup


class Run(NamedTuple):
    """A tile's stages: how many the pipeline has seen before, and how many there are."""

    position: Int32
    count: Int32


class Turns:
    """The consumer warpgroups of a ping-pong kernel, of which one at a time has the tensor cores."""

    def __init__(self, plan: GemmPlan) -> None:
        self.there, self.first, self.threads = plan.pingpong, plan.named_barrier(TURNS), 2 * plan.arch.warpgroup

    def take(self, consumer) -> None:
        """Wait until it is this warpgroup's turn."""
        if self.there:
            cute.arch.barrier(barrier_id=self.first + consumer, number_of_threads=self.threads)

    def pass_on(self, consumer) -> None:
        """This warpgroup's turn ends."""
        if self.there:
            cute.arch.barrier_arrive(barrier_id=self.first + 1 - consumer, number_of_threads=self.threads)


class MainLoop:
    """Load role and accumulation of one kernel; the factors are those of a GEMM."""

    def __init__(self, plan: GemmPlan, halves) -> None:
        self.plan = plan
        self.x_dtype, self.w_dtype = map(dtype_of, plan.factors)
        self.m_major, self.n_major = plan.wgrad and not plan.quant.coded_inputs, plan.b_major == "n"
        operands = Operands(halves)
        self.left, self.right, self.both = (operands.role(role) for role in (LEFT, RIGHT, BOTH))
        self.turns = Turns(plan)
        self.block_counts = sorted({1, plan.warpgroup_rows // 64})  # 64-row blocks that a tile may be worked on
        self.wave = plan.tile[1] // plan.waves  # columns of one wgmma

    # -- host ---------------------------------------------------------------------------------------------------------

    def extents(self, given):
        """Rows, columns of the product, elements of a row of x."""
        rows, k = self.left.extents(given)
        return rows, self.right.columns(given), k

    def most_tiles(self, extents: Extents) -> Int64:
        """Cluster tiles that there can be at most."""
        cluster_m, cluster_n = (tile * cluster for tile, cluster in zip(self.plan.tile, self.plan.cluster, strict=True))
        m_clusters = (extents.rows + (cluster_m - 1)) // cluster_m
        if extents.groups is not None:
            m_clusters = m_clusters + extents.groups  # every group may begin a tile of its own
        return Int64((extents.n + (cluster_n - 1)) // cluster_n) * m_clusters

    # -- load ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands, stages: Stages, ring, extents: Extents, rank: Int32):
        """The load thread: fill stage after stage, tile after tile."""
        plan = self.plan
        x_map, w_map = self.left.descriptor(operands), self.right.descriptor(operands)
        k_tiles = ptx.divide(extents.k + (plan.tile_k - 1), plan.tile_k)
        count = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # a fresh barrier counts as passed in the opposite phase
        row, _, n_tile, group = ring.get(count)
        ring.free(count)
        while group >= 0:
            for k_tile in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(stages.empty + stage, phase)
                cute.arch.mbarrier_arrive_and_expect_tx(stages.full + stage, plan.tma_bytes)
                x = self.left.boxes(x_map, stages, stage, k_tile, row)
                w = self.right.boxes(w_map, stages, stage, k_tile, (column_of(n_tile), extents.half_n, group))
                if cutlass.const_expr(plan.gathers):
                    load_alone(w, True, n_tile, rank, stage, plan.cluster_size > 1)
                else:
                    load_share(x, w, n_tile, rank, stage, plan.cluster_size > 1)
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    phase ^= 1
            count += 1
            row, _, n_tile, group = ring.get(count)
            ring.free(count)

    def of_tile(self, run: Run, tile: Tile, work: Work):
        """What `run_tile` is given of a tile's stages."""
        return run

    # -- accumulate ---------------------------------------------------------------------------------------------------

    @cute.jit
    def run_tile(self, most, fragments, stages: Stages, run: Run, rows_left: Int32, consumer: Int32, lane: Int32):
        """Accumulate a tile of which `rows_left` rows exist; a block of 64 rows without any costs no tensor work."""
        x_fragments, w_fragment = fragments
        if rows_left > 64 and cutlass.const_expr(self.plan.warpgroup_rows > 64):
            self.accumulate(most, (x_fragments[-1], w_fragment), stages, run, consumer, lane)
        elif rows_left > 0:
            self.accumulate(self.first_block(most), (x_fragments[0], w_fragment), stages, run, consumer, lane)
            self.clear(most, self.plan.tile[1] // 2)
        else:
            self.accumulate(None, None, stages, run, consumer, lane)
            self.clear(most, 0)

    def clear(self, accumulators, first: int) -> None:
        """Zero the accumulators from number `first` on, which no wgmma has written.

        What they would keep from tile to tile could not be used by the epilogue in between: a backward one needs it,
        and in a forward one ptxas would use it for more at once than there is room for. (Zeroed before the main loop,
        they would make ptxas wait behind every wgmma.)
        """
        if self.plan.backward:
            flat = cute.make_tensor(accumulators.iterator, cute.make_layout(cute.size(accumulators)))
            for number in range(first, cute.size(accumulators)):
                flat[number] = Float32(0.0)

    @cute.jit
    def accumulate(self, accumulators, fragments, stages: Stages, run: Run, consumer: Int32, lane: Int32):
        """Accumulate one tile, or its first 64 rows, or (None) nothing, only keeping the pipeline going.

        A stage is released when the next one's wgmma are in flight. In ping-pong the other warpgroup takes over as soon
        as the last wgmma is issued.
        """
        depth = self.plan.stages
        stage = ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        released = stage
        self.await_stage(stages.full + stage, phase)
        start, add = self.tiled_mma(), self.tiled_mma()
        start.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        self.multiply(start, add, accumulators, fragments, stage)
        for _ in cutlass.range(run.count - 1, unroll=1):
            stage += 1
            if stage == depth:
                stage = Int32(0)
                phase ^= 1
            self.await_stage(stages.full + stage, phase)
            self.multiply(add, add, accumulators, fragments, stage)
            if cutlass.const_expr(accumulators is not None):
                warpgroup.wait_group(1)
            self.give_back(accumulators, stages.empty + released, lane)
            released = stage
        self.turns.pass_on(consumer)
        if cutlass.const_expr(accumulators is not None):
            warpgroup.wait_group(0)
        self.give_back(accumulators, stages.empty + released, lane)

    def give_back(self, accumulators, barrier, lane) -> None:
        """Release a stage. wgmma keeps a warp's lanes together; without it, and with nothing that a cluster shares, the
        CTA's next stages would come while a lane that releases for the other CTA still waits for an earlier one.
        """
        if accumulators is None and self.plan.gathers:
            cute.arch.sync_warp()
        release(self.plan, barrier, lane)

    def await_stage(self, barrier, phase) -> None:
        """Until a stage is there, and wgmma sees what threads have copied into it."""
        cute.arch.mbarrier_wait(barrier, phase)
        if self.plan.gathers and not self.plan.relays:
            cute.arch.fence_proxy("async.shared", space="cta")

    def multiply(self, first, mma, accumulators, fragments, stage) -> None:
        """Start one stage's wgmma, as one group; `first` is the MMA of its first 32 bytes of K."""
        if accumulators is not None:
            warpgroup.fence()
            x, w = fragments
            for k_block in range(self.plan.arch.swizzle_bytes // MMA_BYTES):
                where = (None, None, k_block, stage)
                cute.gemm(mma if k_block else first, accumulators, x[where], w[where], accumulators)
            warpgroup.commit_group()

    def fragments(self, smem_x, smem_w):
        """A warpgroup's accumulators; wgmma descriptors of x (for each of `block_counts`) and w, for every stage."""
        mma = self.tiled_mma()
        w = self.w_tensor(smem_w, self.plan.tile[1])
        accumulators = mma.make_fragment_C(mma.partition_shape_C((self.plan.warpgroup_rows, self.plan.tile[1])))
        x = [self.x_fragment(mma, smem_x, blocks) for blocks in self.block_counts]
        return accumulators, (x, mma.make_fragment_B(mma.get_slice(0).partition_B(w)))

    def w_tensor(self, pointer, columns: int):
        """`columns` of w at `pointer`, every stage."""
        tile_n, tile_k = self.plan.tile[1], self.plan.tile_k
        atom = swizzled(self.w_dtype, tile_k, n_major=self.n_major)
        layout = staged(atom, (columns, tile_k), self.plan.stages, tile_n * tile_k, k_first=self.n_major)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.w_dtype), layout.outer)

    def x_fragment(self, mma, pointer, blocks: int):
        """wgmma descriptors of the first `blocks` 64-row blocks of x at `pointer`, for every stage."""
        atom = swizzled(self.x_dtype, self.plan.tile_k, n_major=self.m_major)
        elements = self.plan.tile[0] * self.plan.tile_k
        layout = staged(atom, (blocks * 64, self.plan.tile_k), self.plan.stages, elements, k_first=self.m_major)
        tensor = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.x_dtype), layout.outer)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tensor))

    def first_block(self, accumulators):
        """The accumulators of the first 64 rows."""
        shape = (accumulators.shape[0], 1, accumulators.shape[2])
        return cute.make_tensor(accumulators.iterator, cute.make_layout(shape))

    def tiled_mma(self):
        """wgmma of one warpgroup."""
        x_major, w_major = (
            OperandMajorMode.MN if other else OperandMajorMode.K for other in (self.m_major, self.n_major)
        )
        return make_trivial_tiled_mma(self.x_dtype, self.w_dtype, x_major, w_major, Float32, (1, 1, 1), (64, self.wave))


def staged(atom, shape: tuple[int, int], stages: int, stage_elements: int, k_first: bool = False):
    """`stages` tiles of `shape`, `stage_elements` apart; `k_first` lays atoms along K before the other side."""
    tile = cute.tile_to_shape(atom, shape, order=(1, 0) if k_first else (0, 1))
    return cute.make_composed_layout(
        tile.inner, tile.offset, cute.append(tile.outer, cute.make_layout(stages, stride=stage_elements))
    )


@cute.jit
def release(plan: cutlass.Constexpr, barrier, lane: Int32):
    """Tell every load thread of the cluster that this warp has read the stage."""
    if cutlass.const_expr(plan.cluster_size > 1):
        if lane < plan.cluster_size:
            cute.arch.mbarrier_arrive(barrier, lane)
    else:
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

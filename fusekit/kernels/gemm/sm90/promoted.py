"""Accumulation of 8-bit factors in float32: registers take over what a wgmma accumulator has behind every 128 of K.

A wgmma keeps about 13 bits of a sum of products of codes. So a stage, 128 of K, begins with an empty accumulator, and
what it holds in the end is added to float32 registers, times the scales of the stage where those change along K:

    sum[m, n] += P_b[m, n] (x_s[b, m] w_s[b, n / 128])

Both consumer warpgroups share a tile. Adding up hides behind the wgmma of the other. (In two halves of the columns,
with an accumulator each, it would hide behind a warpgroup's own; but rows would be read twice from shared memory, whose
128 bytes a clock are what binds.)
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fusekit.kernels import ptx
from fusekit.kernels.floats import fma
from fusekit.kernels.gemm.sm90.main_loop import MainLoop, Run, Stages, release
from fusekit.plan.gemm import SEGMENT, WARP_ROWS, GemmPlan
from fusekit.plan.operands.x_scale import W_SCALES, stage_bytes


def main_loop(plan: GemmPlan, halves) -> MainLoop:
    """The main loop of a kernel whose factors are x and w."""
    return (PromotedLoop if plan.quant.promoted else MainLoop)(plan, halves)


class PromotedLoop(MainLoop):
    """Load role and accumulation; `most` of the parent are the float32 registers."""

    reads_scales_late = False  # whether adding up still reads scales from the stage

    def __init__(self, plan: GemmPlan, halves) -> None:
        super().__init__(plan, halves)
        self.blocks = plan.warpgroup_rows // plan.arch.mma_rows
        self.wave = plan.tile[1] // plan.waves  # columns

    def fragments(self, smem_x, smem_w):
        """The sums; accumulators of 64 rows; wgmma descriptors of each 64 rows of x and each wave of w, by stage."""
        mma = self.tiled_mma()
        rows, (_, tile_n), tile_k = self.plan.arch.mma_rows, self.plan.tile, self.plan.tile_k
        x = [self.x_fragment(mma, smem_x + block * rows * tile_k, 1) for block in range(self.blocks)]
        sums = cute.make_rmem_tensor((self.plan.warpgroup_rows * tile_n // self.plan.arch.warpgroup,), Float32)
        columns = [self.w_tensor(smem_w + first * tile_k, self.wave) for first in range(0, tile_n, self.wave)]
        w = [mma.make_fragment_B(mma.get_slice(0).partition_B(each)) for each in columns]
        shape = mma.partition_shape_C((rows, self.wave))
        return sums, (mma.make_fragment_C(shape), x, w)

    @cute.jit
    def run_tile(self, sums, fragments, stages: Stages, run: Run, rows_left: Int32, consumer: Int32, lane: Int32):
        """As the parent's."""
        if rows_left > 64 and cutlass.const_expr(self.blocks > 1):
            self.add_up(sums, fragments, stages, run, self.blocks, consumer, lane)
        elif rows_left > 0:
            self.add_up(sums, fragments, stages, run, 1, consumer, lane)
            self.clear(sums, cute.size(sums) // self.blocks)
        else:
            self.add_up(sums, fragments, stages, run, 0, consumer, lane)
            self.clear(sums, 0)

    @cute.jit
    def add_up(
        self, sums, fragments, stages: Stages, run: Run, blocks: cutlass.Constexpr, consumer: Int32, lane: Int32
    ):
        """A tile's sums of its first `blocks` 64 rows; with 0 blocks, only keep the pipeline going.

        Whether the next stage is there is asked before the last adding up, which hides the answer.
        """
        depth = self.plan.stages
        accumulator, x, w = fragments
        stage = ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        size = cute.size(accumulator)
        waves = len(w)
        for number in cutlass.range_constexpr(size * waves * blocks):
            sums[number] = Float32(0.0)
        there = Boolean(False)
        for step in cutlass.range(run.count, unroll=1):
            if not there:
                cute.arch.mbarrier_wait(stages.full + stage, phase)
            read = stage
            for part in cutlass.range_constexpr(blocks * waves):
                block, wave = part // waves, part % waves
                scales = self.scales(stages, read, consumer * self.plan.warpgroup_rows + block * 64, lane)
                self.start(accumulator, (x[block], w[wave]), read)
                warpgroup.wait_group(0)
                last = part == blocks * waves - 1
                if cutlass.const_expr(last):
                    if cutlass.const_expr(not self.reads_scales_late):
                        release(self.plan, stages.empty + read, lane)
                    stage, phase = self.next(stage, phase)
                    there = cute.arch.mbarrier_try_wait(stages.full + stage, phase)
                self.promote(sums, part * size, wave * self.wave, accumulator, scales)
                if cutlass.const_expr(last and self.reads_scales_late):
                    release(self.plan, stages.empty + read, lane)
            if cutlass.const_expr(blocks == 0):
                release(self.plan, stages.empty + read, lane)
                stage, phase = self.next(stage, phase)
            self.lead(step, run, consumer)

    def next(self, stage: Int32, phase: Int32):
        """The stage behind this one, and its phase."""
        wraps = ptx.flag(stage == self.plan.stages - 1)
        return (stage + 1) * (1 - wraps), phase ^ wraps

    def start(self, accumulator, factors, stage) -> None:
        """A stage's wgmma of one wave, from an empty accumulator."""
        first, add = self.tiled_mma(), self.tiled_mma()
        first.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        self.multiply(first, add, accumulator, factors, stage)

    def scales(self, stages: Stages, stage: Int32, row: Int32, lane: Int32):
        """A stage's scales of a lane's two rows from row `row` of the tile on, and of each segment of columns."""
        if not self.plan.quant.by_block:
            return ()
        segments = self.plan.tile[1] // SEGMENT
        address = stages.scales.toint() + stage * stage_bytes(self.plan)
        load = ptx.load_shared_f32x4 if segments > 2 else ptx.load_shared_f32x2
        columns = load(address)[:segments]
        warp = cute.arch.warp_idx() & 3
        at = address + (W_SCALES + row + warp * WARP_ROWS + (lane >> 2)) * 4
        return (ptx.load_shared_f32(at), ptx.load_shared_f32(at + 8 * 4), *columns)

    def promote(self, sums, first: int, column: int, accumulator, scales) -> None:
        """Adds an accumulator, whose columns begin at `column` of the tile, to the sums from number `first` on."""
        rows, columns = scales[:2], scales[2:]
        products = {}
        for number in range(cute.size(accumulator)):
            if not scales:
                sums[first + number] = sums[first + number] + accumulator[number]
                continue
            place = (column + number // 4 * 8) // SEGMENT, number // 2 % 2
            if place not in products:
                products[place] = rows[place[1]] * columns[place[0]]
            sums[first + number] = fma(accumulator[number], products[place], sums[first + number])

"""Accumulation of FP8 operands in float32: registers take over what a wgmma accumulator has after every 128 of K.

A wgmma keeps about 13 bits of a sum of products of FP8 values. So a stage, 128 of K, begins with an empty accumulator,
and what it holds in the end is added to float32 registers, times the scales of the stage where those change along K:

    sum[m, n] += P_b[m, n] (x_s[b, m] w_s[b, n / 128])

Both consumer warpgroups share a tile. Adding up hides behind the wgmma of the other. (In two halves of the columns,
with an accumulator each, it would hide behind a warpgroup's own; but rows would be read twice from shared memory, whose
128 bytes a clock are what binds. With rows in registers that is slower still.)
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from fusekit.kernels import ptx
from fusekit.kernels.floats import fma
from fusekit.kernels.gemm.sm90.dequantised import DequantisedLoop
from fusekit.kernels.gemm.sm90.main_loop import MainLoop, Run, Stages, release
from fusekit.kernels.gemm.sm90.packed import PackedLoop
from fusekit.kernels.gemm.sm90.swapped import SwappedLoop
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import SEGMENT, GemmPlan
from fusekit.plan.operands.x_scale import stage_bytes, w_scales


def main_loop(plan: GemmPlan, halves) -> MainLoop:
    """The main loop of a kernel whose factors are x and w."""
    if plan.quant.weights_alone:
        return (PackedLoop if plan.quant.mx_weights else DequantisedLoop)(plan, halves)
    return (SwappedLoop if plan.swapped else PromotedLoop if plan.quant.promoted else MainLoop)(plan, halves)


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
        w = [mma.make_fragment_B(mma.get_slice(0).partition_B(half)) for half in columns]
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

        Unrolled by the pipeline's depth, addresses of a stage are constants, and wgmma takes them from uniform
        registers.
        """
        depth = self.plan.stages
        accumulator, _, w = fragments
        if cutlass.const_expr(self.plan.sums):  # whose epilogue has no register left for what follows from it
            lane = ptx.fresh(lane)
        step = 0 - ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        for number in cutlass.range_constexpr(cute.size(accumulator) * len(w) * blocks):
            sums[number] = Float32(0.0)
        there = Boolean(False)
        while step < run.count:
            for stage in cutlass.range_constexpr(depth):
                if (step >= 0) & (step < run.count):
                    there = self.add_stage(sums, fragments, stages, stage, phase, there, blocks, consumer, lane)
                step += 1
            phase ^= 1

    @cute.jit
    def add_stage(
        self, sums, fragments, stages: Stages, stage: cutlass.Constexpr, phase: Int32, there: Boolean,
        blocks: cutlass.Constexpr, consumer: Int32, lane: Int32,
    ):  # fmt: skip
        """Adds up one stage; `there`: whether it is known to be. Returns whether the next one is.

        That is asked before the last adding up, which hides the answer.
        """
        accumulator, x, w = fragments
        parts = blocks * len(w)
        last = stage == self.plan.stages - 1
        following, after = (0, phase ^ 1) if last else (stage + 1, phase)
        if not there:
            cute.arch.mbarrier_wait(stages.full + stage, phase)
        for part in cutlass.range_constexpr(parts):
            block, wave = part // len(w), part % len(w)
            scales = self.scales(stages, stage, consumer * self.plan.warpgroup_rows + block * 64, lane)
            self.start(accumulator, (x[block], w[wave]), stage)
            warpgroup.wait_group(0)
            if cutlass.const_expr(part == parts - 1):
                if cutlass.const_expr(not self.reads_scales_late):
                    release(self.plan, stages.empty + stage, lane)
                there = cute.arch.mbarrier_try_wait(stages.full + following, after)
            self.promote(sums, part * cute.size(accumulator), wave * self.wave, accumulator, scales)
        if cutlass.const_expr(self.reads_scales_late or not parts):
            release(self.plan, stages.empty + stage, lane)
        if cutlass.const_expr(not parts):
            there = cute.arch.mbarrier_try_wait(stages.full + following, after)
        return there

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
        address, of_w = stages.scales.toint() + stage * stage_bytes(self.plan), w_scales(self.plan)
        load = ptx.load_shared_f32x4 if of_w > 2 else ptx.load_shared_f32x2
        columns = load(address)[: self.plan.tile[1] // SEGMENT]
        warp = cute.arch.warp_idx() & 3
        at = address + (of_w + row + warp * WARP_ROWS + (lane >> 2)) * 4
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

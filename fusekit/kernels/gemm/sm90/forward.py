"""From accumulators to stored rows, one warp at a time.

A consumer warp owns 16 rows of each 64-row block of its warpgroup's accumulators. It finishes them by itself: operands
scale and shift the accumulators in place, the activated values are rounded into a staging box of the warp's own, stored
by TMA. No barrier joins the warps, so a warp's stores overlap its neighbours' arithmetic.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm import maths
from fusekit.kernels.gemm.operands.base import Rows, Tile, Work, dtype_of
from fusekit.kernels.gemm.sm90.hooks import Operands
from fusekit.kernels.gemm.sm90.kernel import Gemm
from fusekit.kernels.gemm.sm90.promoted import main_loop
from fusekit.kernels.gemm.sm90.scheduler import scheduler
from fusekit.kernels.gemm.sm90.staging import StagingBoxes
from fusekit.plan.activations import forms
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import GemmPlan


def kernel(plan: GemmPlan, halves) -> Gemm:
    """The kernel of `plan`; halves: the device halves of its operands, by name."""
    return Gemm(plan, halves, main_loop(plan, halves), Epilogue(plan, halves), scheduler(plan))


class Epilogue:
    """What a forward kernel does with its accumulators."""

    def __init__(self, plan: GemmPlan, halves) -> None:
        self.plan = plan
        self.operands = Operands(halves)
        self.single = plan.out_dtype == "f32"
        self.columns = plan.result_box(plan.out_tile_n)
        self.out_dtype = dtype_of(plan.out_dtype)
        self.boxes = StagingBoxes(plan)
        self.box_count = sum(half.stored_boxes() for half in self.operands)  # of one 64-row block
        self.activation, _ = forms(plan.kind.function)[plan.approximate]

    def prepare(self, tile: Tile, work: Work, warp_state, seen: Int32) -> None:
        """Before a tile's main loop; a warpgroup's threads."""
        self.operands.prepare(tile, work, warp_state)

    # -- values -------------------------------------------------------------------------------------------------------

    def partners(self, chunk: int) -> tuple[int, int]:
        """Accumulator chunks (8 columns each) of gate and up for output chunk `chunk`."""
        if self.plan.glu_layout == "concat":
            return chunk, chunk + self.plan.tile[1] // 16
        return chunk // 4 * 8 + chunk % 4, chunk // 4 * 8 + chunk % 4 + 4

    def sources(self, chunks) -> list[int]:
        """Accumulator chunks that these output chunks are made of."""
        if self.plan.glu_layout == "interleaved":
            return [2 * chunk + side for chunk in chunks for side in range(2)]
        if self.plan.halved:
            return [partner for chunk in chunks for partner in self.partners(chunk)]
        return list(chunks)

    def activate(self, acc, base: int, chunk: int, r: int, c: int, scalars, row_state):
        """Output (chunk, r, c) of the 64-row block whose accumulators start at `base`."""
        if self.plan.halved:
            gate, up = self.partners(chunk)
            places = base + gate * 4 + r * 2 + c, base + up * 4 + r * 2 + c
            value = self.activation(maths, acc[places[0]], acc[places[1]], *scalars)
        else:
            value = self.activation(maths, acc[base + chunk * 4 + r * 2 + c], *scalars)
        return self.operands.output(value, row_state, r)

    def adjacent(self, acc, base: int, chunk: int, r: int, scalars, row_state):
        """Outputs `lane % 4` of accumulator chunk `chunk`, whose gate and up lie side by side."""
        index = base + chunk * 4 + r * 2
        value = self.activation(maths, acc[index], acc[index + 1], *scalars)
        return self.operands.output(value, row_state, r)

    def registers(self, acc, base: int, chunks, scalars, row_state):
        """Outputs of these chunks, (chunk, r) in order: packed as `StagingBoxes.store` wants them, or two float32."""
        words = []
        for chunk in chunks:
            for r in range(2):
                if self.plan.glu_layout == "interleaved":
                    low = self.adjacent(acc, base, 2 * chunk, r, scalars, row_state)
                    high = self.adjacent(acc, base, 2 * chunk + 1, r, scalars, row_state)
                    if self.single:
                        words += gather_singles(low, high, cute.arch.lane_idx())
                    else:
                        pair = ptx.pack_pair(low, high, self.out_dtype)
                        words.append(gather_pairs(pair, cute.arch.lane_idx()))
                else:
                    low, high = (self.activate(acc, base, chunk, r, c, scalars, row_state) for c in range(2))
                    words += [low, high] if self.single else [ptx.pack_pair(low, high, self.out_dtype)]
        return words

    # -- a tile -------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, acc, tile: Tile, work: Work, warp_state, seen: Int32):
        """Finish the accumulators of one tile; all four warps of a warpgroup, each for itself.

        acc: warpgroup_rows / 64 blocks one after the other. warp_state: what the operands' `begin` returned. seen:
        carried from tile to tile, not used here.
        """
        plan = self.plan
        scalars = self.operands.scalars(work.operands)
        states = self.operands.start(tile, work, warp_state)
        if cute.arch.lane_idx() == 0:  # the boxes of the last tile have left; the numbering starts again
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        for block in cutlass.range_constexpr(plan.warpgroup_rows // 64):
            row = tile.row + block * 64 + (work.warp_of_cta & 3) * WARP_ROWS
            if row < tile.end:
                rows = Rows(row, tile.end, tile.n_tile, block)
                self.finish_rows(acc, block * (plan.tile[1] // 2), rows, work, scalars, states)
        self.operands.finish_tile(states, work)
        return seen

    def finish_rows(self, acc, base: int, rows: Rows, work: Work, scalars, states) -> None:
        """Finish the warp's 16 rows of a 64-row block, whose accumulators start at `base`."""
        row_state = self.operands.rows(rows, work, states)
        number, width, outputs = rows.block * self.box_count, self.columns, []
        if rows.block and self.box_count and self.plan.quant.coded:
            self.boxes.acquire_all()  # FP8 values of the block before take the place of all boxes
        for box in range(self.plan.out_tile_n // width):
            chunks = range(box * width // 8, (box + 1) * width // 8)
            sources = self.sources(chunks)
            self.operands.accumulate(acc, base, sources, states, row_state)
            for half in self.operands:
                number += half.box(acc, base, sources, number, rows, work, self.boxes)
            values = self.registers(acc, base, chunks, scalars, row_state)
            outputs += values
            number += self.operands.result(values, box, number, rows, work, self.boxes)
        self.operands.outputs(outputs, rows, work, states)

    def finish(self, count: Int32, work: Work) -> None:
        """After the last tile."""
        self.operands.finish(count, work)


def gather_pairs(packed: Uint32, lane: Int32) -> Uint32:
    """Give each lane of a quad two neighbouring columns.

    In: lane t holds column t (low half) and column 4 + t (high half) of eight. Out: columns 2t and 2t + 1.
    """
    quad = lane & 28
    source = quad + (lane * 2 & 2)
    first = cute.arch.shuffle_sync(packed, source)
    second = cute.arch.shuffle_sync(packed, source + 1)
    upper = cutlass.Uint32((lane >> 1) & 1)
    return ptx.permute_bytes(first, second, cutlass.Uint32(0x5410) + upper * cutlass.Uint32(0x2222))


def gather_singles(low: Float32, high: Float32, lane: Int32) -> list[Float32]:
    """`gather_pairs` of two float32."""
    source = (lane & 28) + (lane * 2 & 2)
    sides = [[cute.arch.shuffle_sync(side, source + c) for side in (low, high)] for c in range(2)]
    return [ptx.choose(lane & 2, above, below) for below, above in sides]

"""Products of rows of x in bf16 and of w in MXFP4, with a scale of a byte for 32 of a row: w is read as it is.

Rows of w take the side of wgmma that has 64 of them, from registers, as in dequantised.py; a scale is a power of two of
one row alone, so it is a factor of what is made of the values, and bf16 holds that exactly:

    (w . x^T)[n, m], wgmma m64nTILE_Mk16 of 2^(s - 127) e2m1 and x

which has the bits of a kernel whose weights are dequantised to bf16: sums are of the same 16 of K, in the same order.
Both consumer warpgroups share a tile, each half of its columns, and take turns in finishing tiles of few rows.

A stage has 128 of K. Of each 8 bytes a lane has number `lane % 4` and the fourth after it: a quad's four lanes read the
same units of 16 bytes, and each picks its own. Of its two bytes, four values, table look-ups (prmt) make a byte each,
64 + 4 e2m1: one look-up of values without a sign, which gives 0 for the others, and one of the others. With 0x42 before
it such a byte is the bf16 number 48 + e2m1, and

    fma(48 + e2m1, 2^(s - 127), -48 x 2^(s - 127))

is exact. Scales of 1 to 249 are 2^(s - 127), 0 is 0; from 250 on, and so for NaN, 255, no product is finite.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Tile, Work
from fusekit.kernels.gemm.sm90.dequantised import SETS, DequantisedLoop
from fusekit.kernels.gemm.sm90.main_loop import Run, Stages, release
from fusekit.kernels.inline import inline
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import COLUMNS, TURNS
from fusekit.plan.operands.w_scale import EXCHANGE, SCALE_BYTES
from fusekit.plan.quant import MX_SIDE

PARTS = 4  # sets of a stage's 128 of K, two wgmma and one scale each
UNIT = 16  # bytes of w in a set
PLUS = 0x46444240, 0x58504C48  # 64 + 4 e2m1 of its three bits without the sign
MINUS = 0x3A3C3E40, 0x28303438
AWAITED = 2  # the set of a stage before which all wgmma of the stage before have ended


class PackedRun(NamedTuple):
    """A tile's stages, as `Run`. pick: which of two words' bytes are a lane's; shift: which of two words' bytes the
    scales of its rows are; last: the bits that are scales of the last stage's. number: of the tile.
    """

    position: Int32
    count: Int32
    pick: Uint32
    shift: Uint32
    last: Uint32
    number: Int32


class PackedLoop(DequantisedLoop):
    """Load role and accumulation; `most` of the parents are the products in the epilogue's order."""

    def fragments(self, smem_x, smem_w):
        """As the parent's, without sums; tiles have 64 columns for each warpgroup."""
        most, (_, (product,), sets, x) = super().fragments(smem_x, smem_w)
        return most, (product, sets, x)

    def of_tile(self, run: Run, tile: Tile, work: Work):
        """As the parent's, with what the lane picks."""
        lane = cute.arch.lane_idx()
        blocks = ptx.divide(work.extents.k, MX_SIDE)
        # What begins a tile, a warp's rows and a group is a multiple of 8 rows: where a row's scales begin in a word
        # depends on its number among 8 alone.
        shift = ((lane >> 2) * blocks) & 3
        left = blocks - (run.count - 1) * PARTS
        last = Uint32(0xFFFFFFFF) >> Uint32((PARTS - left) * 8)
        pick = Uint32((lane & 3) * 0x11 + 0x40)
        return PackedRun(run.position, run.count, pick, Uint32(shift * 0x1111 + 0x3210), last, tile.count)

    @cute.jit
    def run_tile(self, most, fragments, stages: Stages, run: PackedRun, rows_left: Int32, consumer: Int32, lane: Int32):
        """As the parent's."""
        product, _, _ = fragments
        depth = self.plan.stages
        stage = ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        row = self.row(consumer, lane)
        base = stages.w.toint() + row * self.plan.w_row_bytes
        places = base, stages.scales.toint() + row * SCALE_BYTES, held(PLUS[0], base), held(MINUS[0], base)
        released = stage
        self.await_stage(stages.full + stage, phase)
        self.add_stage(fragments, places, stage, run, Int32(0), lane, None)
        for number in cutlass.range(1, run.count, unroll=1):
            stage, phase = self.next(stage, phase)
            self.await_stage(stages.full + stage, phase)
            self.add_stage(fragments, places, stage, run, number, lane, stages.empty + released)
            released = stage
        warpgroup.wait_group(0)
        release(self.plan, stages.empty + released, lane)
        if cutlass.const_expr(self.plan.alternates):
            self.hand_over(product, most, stages.exchange, run.number, consumer, lane)
        else:
            self.exchange(product, most, stages.exchange, consumer, lane)

    @cute.jit
    def hand_over(self, product, most, memory, number: Int32, consumer: Int32, lane: Int32):
        """Turn a tile's products for the warpgroup that finishes it. The other goes on at once, and waits one tile
        later, or two, until what it put there has been read.
        """
        (tile_m, _), pitch, finisher = self.plan.tile, self.plan.exchange_pitch, number & 1
        full, read = self.plan.named_barrier(TURNS) + finisher, self.plan.named_barrier(EXCHANGE) + finisher
        group, both = self.plan.arch.warpgroup, 2 * self.plan.arch.warpgroup
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        base = memory.toint() + finisher * (4 * tile_m * pitch)
        column = consumer * self.share + warp * WARP_ROWS + (lane >> 2)
        to = base + ((lane & 3) * 2 * pitch + column) * 4
        if consumer == finisher:
            cute.arch.barrier(barrier_id=self.plan.named_barrier(COLUMNS) + consumer, number_of_threads=group)
            self.put(product, to, 1)
            cute.arch.barrier(barrier_id=full, number_of_threads=both)
            line = (warp & (tile_m // WARP_ROWS - 1)) * WARP_ROWS + (lane >> 2)
            self.take(most, base + (line * pitch + (lane & 3) * 2) * 4)
            cute.arch.barrier_arrive(barrier_id=read, number_of_threads=both)
        else:
            if number > 1:
                cute.arch.barrier(barrier_id=read, number_of_threads=both)
            self.put(product, to, 1)
            cute.arch.barrier_arrive(barrier_id=full, number_of_threads=both)

    def row(self, consumer: Int32, lane: Int32):
        """A lane's first row of w in a stage."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        return warp * WARP_ROWS + (lane >> 2) + consumer * self.share

    def add_stage(self, fragments, places, stage, run, number, lane, before) -> None:
        """Convert a stage's factors and start its wgmma; number: of the tile's. before: the barrier that releases the
        stage before; None of the first.
        """
        product, sets, x = fragments
        start, add = self.tiled_mma(), self.tiled_mma()
        start.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        row_bytes, rows = self.plan.w_row_bytes, self.plan.tile[1]
        address = places[0] + stage * (rows * row_bytes)
        scales = places[1] + stage * (rows * SCALE_BYTES)
        swizzle = ((lane >> 3) & 3) * UNIT  # the row's: units of 16 bytes, two rows after two
        # All of the stage at once: each set would wait for what it reads of shared memory.
        valid = where_last(number, run.count - 1, run.last)
        units = (address + (part * UNIT ^ swizzle) for part in range(PARTS))
        given = [[loaded(unit, r * 8 * row_bytes) for r in range(2)] for unit in units]
        exponents = [exponent_bytes(scales, r * 8 * SCALE_BYTES, run.shift, valid) for r in range(2)]
        for part in range(PARTS):
            factors = sets[part % SETS]
            words = cute.recast_tensor(factors, Uint32)
            warpgroup.wait_group(SETS - 2)  # what reads this set has ended
            if part == AWAITED and before is not None:
                release(self.plan, before, lane)
            for r in range(2):
                scale, offset = scale_of(*exponents[r], part)
                for step in range(2):
                    first, second = given[part][r][2 * step : 2 * step + 2]
                    low, high = converted(first, second, run.pick, places[2:], scale, offset)
                    words[step * 4 + r], words[step * 4 + 2 + r] = low, high
            warpgroup.fence()
            for step in range(2):
                mma = start if before is None and part == 0 and step == 0 else add
                cute.gemm(mma, product, factors[None, None, step], x[None, None, part * 2 + step, stage], product)
            warpgroup.commit_group()


def loaded(address: Int32, place: int) -> tuple:
    """16 bytes of shared memory as four words: 8 e2m1 values each, the lowest first."""
    text = f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{place}];"
    return tuple(inline([Uint32] * 4, text, address))


def where_last(number: Int32, last: Int32, bits: Uint32) -> Uint32:
    """`bits` where the number is the last, else all."""
    text = "{ .reg .pred p_; setp.eq.s32 p_, {$r0}, {$r1}; selp.b32 {$w0}, {$r2}, 0xFFFFFFFF, p_; }"
    return inline(Uint32, text, number, last, bits)


def exponent_bytes(address: Int32, place: int, shift: Uint32, valid: Uint32) -> tuple:
    """Low and high bytes of the bf16 numbers 2^(s - 127) of a row's four scales; 0 for those that are not valid."""
    text = (
        "{ .reg .b32 first_, second_;"
        f" ld.shared.v2.b32 {{first_, second_}}, [{{$r0}}+{place}];"
        " prmt.b32 first_, first_, second_, {$r1}; and.b32 first_, first_, {$r2};"
        " shl.b32 second_, first_, 7; and.b32 {$w0}, second_, 0x80808080;"
        " shr.u32 second_, first_, 1; and.b32 {$w1}, second_, 0x7F7F7F7F; }"
    )
    return tuple(inline([Uint32] * 2, text, address, shift, valid))


def scale_of(low: Uint32, high: Uint32, part: int) -> tuple:
    """2^(s - 127) of scale `part` and -48 of it, twice each."""
    text = (
        f"{{ .reg .b32 scale_, by_; prmt.b32 scale_, {{$r0}}, {{$r1}}, {0x4040 + 0x1111 * part:#x};"
        " mov.b32 by_, 0xC240C240; mul.rn.bf16x2 {$w1}, scale_, by_; mov.b32 {$w0}, scale_; }"
    )
    return tuple(inline([Uint32] * 2, text, low, high))


def held(word: int, address: Int32) -> Uint32:
    """A constant that stays in a register of the lane: ptxas would fetch it again each time. No address is negative,
    which ptxas cannot know.
    """
    return inline(Uint32, f"{{ .reg .b32 a_; shr.s32 a_, {{$r0}}, 31; add.u32 {{$w0}}, a_, {word:#x}; }}", address)


def converted(first: Uint32, second: Uint32, pick: Uint32, tables: tuple, scale: Uint32, offset: Uint32) -> tuple:
    """bf16 of the lane's two values of each word, times their scale; exact."""
    text = (
        "{ .reg .b32 four_, plus_, minus_, pair_;"
        " prmt.b32 four_, {$r0}, {$r1}, {$r2};"
        f" prmt.b32 plus_, {{$r5}}, {PLUS[1]:#x}, four_; xor.b32 four_, four_, 0x8888;"
        f" prmt.b32 minus_, {{$r6}}, {MINUS[1]:#x}, four_; add.u32 four_, plus_, minus_;"
        " prmt.b32 pair_, four_, 0x42424242, 0x4140; fma.rn.bf16x2 {$w0}, pair_, {$r3}, {$r4};"
        " prmt.b32 pair_, four_, 0x42424242, 0x4342; fma.rn.bf16x2 {$w1}, pair_, {$r3}, {$r4}; }"
    )
    return tuple(inline([Uint32] * 2, text, first, second, pick, scale, offset, *tables))

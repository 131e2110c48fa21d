"""Products of rows of x in bf16 and of w in MXFP4, with a scale of a byte for 32 of a row: w is read as it is.

Rows of w take the side of wgmma that has 64 of them, from registers, as in dequantised.py; a scale is a power of two of
one row alone, so it is a factor of what is made of the values, and bf16 holds that exactly:

    (w . x^T)[n, m], wgmma m64nTILE_Mk16 of 2^(s - 127) e2m1 and x

which has the bits of a kernel whose weights are dequantised to bf16: sums are of the same 16 of K, in the same order.
A stage has 128 of K. Of each 8 bytes a lane has number `lane % 4` and the fourth after it: a quad's four lanes read the
same units of 16 bytes, and each picks its own. Of its two bytes, four values, table look-ups (prmt) make a byte each,
64 + 4 e2m1: one look-up of values without a sign, which gives 0 for the others, and one of the others. With 0x42 before
it such a byte is the bf16 number 48 + e2m1, and

    fma(48 + e2m1, 2^(s - 127), -48 x 2^(s - 127))

is exact. Scales of 1 to 249 are 2^(s - 127), 0 is 0; from 250 on, and so for NaN, 255, no product is finite.
"""

from typing import NamedTuple

from cutlass import Int32, Uint32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Tile, Work
from fusekit.kernels.gemm.sm90.dequantised import PARTS, DequantisedLoop
from fusekit.kernels.gemm.sm90.main_loop import Run, Stages, release
from fusekit.kernels.inline import inline
from fusekit.plan.operands.w_scale import SCALE_BYTES
from fusekit.plan.quant import MX_SIDE

WORDS = 8  # of w, that a lane reads for a set, which has one scale for each row
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

    anew = False
    early = True

    def read_registers(self, rows: int) -> tuple:
        """As the parent's; low and high bytes of the scales of a lane's two rows, and no sums."""
        return cute.make_rmem_tensor((PARTS * WORDS,), Uint32), cute.make_rmem_tensor((4,), Uint32), None

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

    def places(self, stages: Stages, row: Int32, lane: Int32) -> tuple:
        """As the parent's of a row's first value; where its scales begin in a stage; tables."""
        base = stages.w.toint() + row * self.plan.w_row_bytes
        swizzle = ((lane >> 3) & 3) * UNIT  # two rows after two
        return base, swizzle, stages.scales.toint() + row * SCALE_BYTES, held(PLUS[0], base), held(MINUS[0], base)

    def begin(self, fragments, places, run, stage: Int32) -> None:
        """As the parent's."""
        for index in range(PARTS):
            self.read(fragments, places, stage, index)
        self.read_scales(fragments, places, run, stage, Int32(0))

    def read(self, fragments, places, stage: Int32, index: int) -> None:
        """As the parent's."""
        row_bytes, (base, swizzle, *_) = self.plan.w_row_bytes, places
        unit = base + stage * (self.plan.tile[1] * row_bytes) + (index * UNIT ^ swizzle)
        for r in range(2):
            for number, word in enumerate(loaded(unit, r * 8 * row_bytes)):
                fragments.raw[index * WORDS + r * 4 + number] = word

    def read_scales(self, fragments, places, run: PackedRun, stage: Int32, number: Int32) -> None:
        """Read those of a stage, which is number `number` of the tile's."""
        scales = places[2] + stage * (self.plan.tile[1] * SCALE_BYTES)
        valid = where_last(number, run.count - 1, run.last)
        for r in range(2):
            low, high = exponent_bytes(scales, r * 8 * SCALE_BYTES, run.shift, valid)
            fragments.scales[2 * r], fragments.scales[2 * r + 1] = low, high

    def convert(self, fragments, places, run: PackedRun, index: int, words) -> None:
        """As the parent's."""
        for r in range(2):
            scale, offset = scale_of(fragments.scales[2 * r], fragments.scales[2 * r + 1], index)
            for step in range(2):
                first, second = (fragments.raw[index * WORDS + r * 4 + 2 * step + word] for word in range(2))
                low, high = converted(first, second, run.pick, places[3:], scale, offset)
                words[step * 4 + r], words[step * 4 + 2 + r] = low, high

    def meanwhile(self, fragments, places, run, index: int, after: Int32, number: Int32, before, lane) -> None:
        """As the parent's."""
        if index == AWAITED and before is not None:
            release(self.plan, before, lane)
        if index == PARTS - 1:
            self.read_scales(fragments, places, run, after, number + 1)

    def total(self, fragments):
        """As the parent's."""
        return fragments.products[0]


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

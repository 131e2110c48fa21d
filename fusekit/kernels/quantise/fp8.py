"""Scales of blocks and their FP8 values, with every rounding pinned. Source: PTX ISA, "cvt", "max.bf16x2"."""

import cutlass
from cutlass import Float32, Uint32, cute

from fusekit.kernels.floats import multiply
from fusekit.kernels.lanes import bits_of, extreme, float_of
from fusekit.kernels.ptx import unpack_pair
from fusekit.plan.quantise import LARGEST, LEAST, MX_LARGEST, POW2

INFINITE = 0x7F800000
BIAS = 127  # of a float's exponent


def magnitudes(word: Uint32) -> Uint32:
    """|low|, |high| of a bf16x2."""
    return word & Uint32(0x7FFF7FFF)


def larger_pairs(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two bf16x2, half by half; a NaN loses."""
    return cute.arch.inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def larger(a: Float32, b: Float32) -> Float32:
    """The larger of two floats; a NaN loses."""
    return cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def largest(words: list) -> Uint32:
    """Maxima of |low| and of |high| over several bf16x2; NaN where all are."""
    most = magnitudes(words[0])
    for word in words[1:]:
        most = larger_pairs(most, magnitudes(word))
    return most


def halves(word: Uint32) -> tuple:
    """A bf16x2 as two floats: unpacked where it is used, so that they are not kept from one use to the next."""
    return tuple(unpack_pair(word, cutlass.BFloat16))


def numbers(word: Uint32) -> tuple:
    """Two magnitudes as floats, 0 for a NaN."""
    return tuple(
        cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[number])
        for number in halves(word)
    )


def quotient(a: Float32, b: Float32) -> Float32:
    """a / b, rounded."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def scale_of(a: Float32, rule: str) -> tuple:
    """(scale, its reciprocal) of a block whose largest |v| is `a`; see fusekit/plan/quantise.py."""
    bits = bits_of(a)
    if rule == POW2:
        biased = (bits_of(multiply(a, Float32(1.0 / LARGEST))) + Uint32(0x7FFFFF)) >> 23
        biased = extreme("min", extreme("max", biased, Uint32(BIAS - 126)), Uint32(BIAS + 126))
        usual = (bits - Uint32(1)) < Uint32(INFINITE - 1)  # neither 0 nor infinite
        biased = cutlass.select_(usual, biased, Uint32(BIAS))
        return float_of(biased << 23), float_of((Uint32(2 * BIAS) - biased) << 23)
    scale = quotient(larger(a, Float32(LEAST)), Float32(LARGEST))
    scale = cutlass.select_(bits < Uint32(INFINITE), scale, Float32(1.0))
    return scale, quotient(Float32(1.0), scale)


def mx_scale_of(a: Float32) -> tuple:
    """(e8m0 byte, its reciprocal) of 32 numbers whose largest |v| is `a`: MXFP8's rule."""
    byte = (bits_of(multiply(a, Float32(1.0 / LARGEST))) + Uint32(0x7FFFFF)) >> 23
    byte = extreme("min", byte, Uint32(MX_LARGEST))
    half = cutlass.select_(byte == Uint32(MX_LARGEST), Uint32(1 << 22), (Uint32(MX_LARGEST) - byte) << 23)
    return byte, float_of(half)


def magnitude(value: Float32) -> Float32:
    """|value|."""
    return float_of(bits_of(value) & Uint32(0x7FFFFFFF))


def rounded(value: Float32) -> Float32:
    """To bf16, to nearest even."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[value]
    )


def two_values(low: Float32, high: Float32) -> Uint32:
    """Two numbers as e4m3 values, `low` in the low byte; to nearest even, too large ones saturate."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, {$r1}, {$r0}; cvt.u32.u16 {$w0}, two; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def four_values(numbers: list, inverse) -> Uint32:
    """Four numbers times the reciprocal of their scale (or of one each), as FP8 values; the first: the lowest byte."""
    factors = inverse if isinstance(inverse, list) else [inverse] * 4
    scaled = [multiply(number, factor) for number, factor in zip(numbers, factors, strict=True)]
    return two_values(scaled[0], scaled[1]) | (two_values(scaled[2], scaled[3]) << 16)

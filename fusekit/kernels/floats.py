"""Arithmetic of float32 with its rounding pinned. Source: PTX ISA, "Floating Point Instructions"."""

from cutlass import Float32, Int32, cute


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def multiply(a: Float32, b: Float32) -> Float32:
    """a * b, rounded, and never contracted with an addition."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add(a: Float32, b: Float32) -> Float32:
    """a + b, rounded, subnormals kept."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def absolute(x: Float32) -> Float32:
    """|x|."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def square_root(x: Float32) -> Float32:
    """sqrt(x), rounded."""
    return cute.arch.inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def choose(condition, yes: Float32, no: Float32) -> Float32:
    """`yes` where the condition holds, else `no`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p_; setp.ne.b32 p_, {$r2}, 0; selp.f32 {$w0}, {$r0}, {$r1}, p_; }",
        write_only_types=[Float32],
        read_only_args=[yes, no, Int32(condition)],
    )

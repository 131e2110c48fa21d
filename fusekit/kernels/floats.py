"""Arithmetic of float32 with its rounding pinned. Source: PTX ISA, "Floating Point Instructions"."""

from cutlass import Float32, Int32

from fusekit.kernels.inline import inline


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return inline(Float32, "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def multiply(a: Float32, b: Float32) -> Float32:
    """a * b, rounded, and never contracted with an addition."""
    return inline(Float32, "mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def add(a: Float32, b: Float32) -> Float32:
    """a + b, rounded, subnormals kept."""
    return inline(Float32, "add.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def absolute(x: Float32) -> Float32:
    """|x|."""
    return inline(Float32, "abs.f32 {$w0}, {$r0};", x)


def square_root(x: Float32) -> Float32:
    """sqrt(x), rounded."""
    return inline(Float32, "sqrt.rn.f32 {$w0}, {$r0};", x)


def choose(condition, yes: Float32, no: Float32) -> Float32:
    """`yes` where the condition holds, else `no`."""
    text = "{ .reg .pred p_; setp.ne.b32 p_, {$r2}, 0; selp.f32 {$w0}, {$r0}, {$r1}, p_; }"
    return inline(Float32, text, yes, no, Int32(condition))

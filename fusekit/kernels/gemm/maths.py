"""The arithmetic that activations are written in (fusekit/plan/activations): float32 accumulators, in registers.

An activation is handed this module. Scalars arrive at launch time, so one cubin serves every value of them.
"""

import math

from cutlass import Float32

from fusekit.kernels.ptx import exp2_approx, maximum, minimum, reciprocal_approx, where_at_most, where_within

__all__ = [
    "LOG2_E", "MIN_POSITIVE", "Float32", "GluScalars", "clamp", "exp2_approx", "gated_derivative", "maximum", "minimum",
    "reciprocal_approx", "sigmoid", "unclamped", "where_at_most", "where_within",
]  # fmt: skip

LOG2_E = math.log2(math.e)
MIN_POSITIVE = 2.0**-126  # the smallest normal float32; anything below flushes to zero


class GluScalars:
    """Run-time scalars of a gated activation: slope of the gate's sigmoid, clamp limit (inf for none), offset of up."""

    def __init__(self, alpha: Float32, limit: Float32, up_offset: Float32) -> None:
        self.alpha, self.limit, self.up_offset = alpha, limit, up_offset
        self.exponent = alpha * Float32(-LOG2_E)  # once a tile, not once an element


def sigmoid(x: Float32, exponent: Float32 | None = None) -> Float32:
    """1 / (1 + 2^(x exponent)), by default 1 / (1 + e^-x); exact limits at both infinities."""
    return reciprocal_approx(Float32(1.0) + exp2_approx(x * (Float32(-LOG2_E) if exponent is None else exponent)))


def clamp(gate: Float32, up: Float32, scalars: GluScalars):
    """Gate clamped from above, up from both sides."""
    return minimum(gate, scalars.limit), maximum(minimum(up, scalars.limit), -scalars.limit)


def gated_derivative(plain, gate: Float32, up: Float32, scalars: GluScalars):
    """Partial derivatives of f(g) (u + up_offset), zero where the clamp holds; plain: f and its derivative."""
    g, u = clamp(gate, up, scalars)
    value, slope = plain(g)
    shifted = u + scalars.up_offset
    return value * shifted, *unclamped(gate, up, slope * shifted, value, scalars)


def unclamped(gate: Float32, up: Float32, by_gate: Float32, by_up: Float32, scalars: GluScalars):
    """The two partial derivatives, zero where the clamp holds."""
    return where_at_most(gate, scalars.limit, by_gate), where_within(up, scalars.limit, by_up)

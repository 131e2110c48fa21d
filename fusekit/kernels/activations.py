"""Activation functions on float32 accumulators, in registers.

A plain activation maps z; a gated one maps (gate, up). Its derivative gives the value again and the partial
derivatives. To add one, write its function and its derivative here, its NumPy twin in `fusekit.reference.activations`,
and give each its row in the table. Scalars arrive at launch time, so one cubin serves
every value of them.
"""

import math

from cutlass import Float32

from fusekit.kernels.ptx import exp2_approx, maximum, minimum, reciprocal_approx, where_at_most, where_within

LOG2_E = math.log2(math.e)
MIN_POSITIVE = 2.0**-126  # the smallest normal float32; anything below flushes to zero


class GluScalars:
    """Run-time scalars of a gated activation: slope of the gate's sigmoid, clamp limit (inf for none), offset of up."""

    def __init__(self, alpha: Float32, limit: Float32, up_offset: Float32) -> None:
        self.alpha, self.limit, self.up_offset = alpha, limit, up_offset
        self.exponent = None if alpha is None else alpha * Float32(-LOG2_E)  # once a tile, not once an element


def sigmoid(x: Float32, exponent: Float32 | None = None) -> Float32:
    """1 / (1 + 2^(x exponent)), by default 1 / (1 + e^-x); exact limits at both infinities."""
    return reciprocal_approx(Float32(1.0) + exp2_approx(x * (Float32(-LOG2_E) if exponent is None else exponent)))


def identity(z: Float32) -> Float32:
    """z."""
    return z


def relu(z: Float32) -> Float32:
    """max(z, 0)."""
    return maximum(z, Float32(0.0))


def srelu(z: Float32) -> Float32:
    """max(z, 0)^2."""
    positive = relu(z)
    return positive * positive


def silu(z: Float32) -> Float32:
    """z * sigmoid(z)."""
    return z * sigmoid(z)


def gelu_tanh(z: Float32) -> Float32:
    """z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), written as z * sigmoid of twice that argument."""
    twice = Float32(2.0 * math.sqrt(2.0 / math.pi)) * z * (Float32(1.0) + Float32(0.044715) * z * z)
    return z * sigmoid(twice)


# erfc(x) = t exp(-x^2 + ERFC(t)), t = 1 / (1 + x/2), for x >= 0; Chebyshev fit of Press et al., "Numerical Recipes",
# section 6.2, fractional error under 1.2e-7. Two special-function operations and few registers.
ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def normal_tail(z: Float32) -> Float32:
    """1 - Phi(|z|), from erfc so that a small tail keeps its digits."""
    x = minimum(maximum(z, -z) * Float32(math.sqrt(0.5)), Float32(20.0))  # beyond, the tail is zero; keeps inf * 0 out
    t = reciprocal_approx(Float32(1.0) + Float32(0.5) * x)
    polynomial = Float32(ERFC[0])
    for coefficient in ERFC[1:]:
        polynomial = polynomial * t + Float32(coefficient)
    return Float32(0.5) * t * exp2_approx((polynomial - x * x) * Float32(LOG2_E))


def gelu_erf(z: Float32) -> Float32:
    """z/2 (1 + erf(z / sqrt 2)) = z Phi(z)."""
    magnitude = minimum(maximum(z, -z), Float32(20.0 * math.sqrt(2.0)))
    return maximum(z, Float32(0.0)) - magnitude * normal_tail(z)


def clamp(gate: Float32, up: Float32, scalars: GluScalars):
    """Gate clamped from above, up from both sides."""
    return minimum(gate, scalars.limit), maximum(minimum(up, scalars.limit), -scalars.limit)


def swiglu(gate: Float32, up: Float32, scalars: GluScalars) -> Float32:
    """g * sigmoid(alpha g) * (u + up_offset)."""
    gate, up = clamp(gate, up, scalars)
    return gate * sigmoid(gate, scalars.exponent) * (up + scalars.up_offset)


def geglu_tanh(gate: Float32, up: Float32, scalars: GluScalars) -> Float32:
    """gelu(g), tanh form, times (u + up_offset)."""
    gate, up = clamp(gate, up, scalars)
    return gelu_tanh(gate) * (up + scalars.up_offset)


def geglu_erf(gate: Float32, up: Float32, scalars: GluScalars) -> Float32:
    """gelu(g), erf form, times (u + up_offset)."""
    gate, up = clamp(gate, up, scalars)
    return gelu_erf(gate) * (up + scalars.up_offset)


def reglu(gate: Float32, up: Float32, scalars: GluScalars) -> Float32:
    """max(g, 0) * (u + up_offset)."""
    gate, up = clamp(gate, up, scalars)
    return relu(gate) * (up + scalars.up_offset)


# (kind, approximate) -> function; kinds without an approximate form have "none" only
PLAIN = {
    ("identity", "none"): identity,
    ("relu", "none"): relu,
    ("srelu", "none"): srelu,
    ("silu", "none"): silu,
    ("gelu", "none"): gelu_erf,
    ("gelu", "tanh"): gelu_tanh,
}
GATED = {
    ("swiglu", "none"): swiglu,
    ("geglu", "none"): geglu_erf,
    ("geglu", "tanh"): geglu_tanh,
    ("reglu", "none"): reglu,
}


# -- derivatives: (value, d/dz), or (value, d/dgate, d/dup); zero for a clamped element ------------------------------


def relu_derivative(z: Float32):
    """0 at 0 and below."""
    return relu(z), where_at_most(-z, Float32(-MIN_POSITIVE), Float32(1.0))


def srelu_derivative(z: Float32):
    """2 max(z, 0)."""
    positive = relu(z)
    return positive * positive, Float32(2.0) * positive


def silu_derivative(z: Float32):
    """s + z s (1 - s), s the sigmoid."""
    s = sigmoid(z)
    value = z * s
    return value, s + value * (Float32(1.0) - s)


def gelu_tanh_derivative(z: Float32):
    """s + z s (1 - s) t', s the sigmoid of t = 2 sqrt(2/pi) (z + 0.044715 z^3)."""
    scale, square = Float32(2.0 * math.sqrt(2.0 / math.pi)), z * z
    s = sigmoid(scale * z * (Float32(1.0) + Float32(0.044715) * square))
    value = z * s
    return value, s + value * (Float32(1.0) - s) * scale * (Float32(1.0) + Float32(3 * 0.044715) * square)


def gelu_erf_derivative(z: Float32):
    """Phi(z) + z phi(z)."""
    tail = normal_tail(z)
    magnitude = maximum(z, -z)
    density = Float32(1.0 / math.sqrt(2.0 * math.pi)) * exp2_approx(z * z * Float32(-0.5 * LOG2_E))
    above = where_at_most(-z, Float32(0.0), Float32(1.0) - tail)  # Phi of a z that is not negative
    below = where_at_most(z, Float32(-MIN_POSITIVE), tail)
    return maximum(z, Float32(0.0)) - magnitude * tail, above + below + z * density


def swiglu_derivative(gate: Float32, up: Float32, scalars: GluScalars):
    """Of g s(alpha g) (u + up_offset)."""
    g, u = clamp(gate, up, scalars)
    s = sigmoid(g, scalars.exponent)
    value, shifted = g * s, u + scalars.up_offset
    by_gate = shifted * (s + scalars.alpha * value * (Float32(1.0) - s))
    return value * shifted, *unclamped(gate, up, by_gate, value, scalars)


def geglu_tanh_derivative(gate: Float32, up: Float32, scalars: GluScalars):
    """Of gelu(g), tanh form, times (u + up_offset)."""
    return _gated_derivative(gelu_tanh_derivative, gate, up, scalars)


def geglu_erf_derivative(gate: Float32, up: Float32, scalars: GluScalars):
    """Of gelu(g), erf form, times (u + up_offset)."""
    return _gated_derivative(gelu_erf_derivative, gate, up, scalars)


def reglu_derivative(gate: Float32, up: Float32, scalars: GluScalars):
    """Of max(g, 0) (u + up_offset)."""
    return _gated_derivative(relu_derivative, gate, up, scalars)


def _gated_derivative(plain, gate: Float32, up: Float32, scalars: GluScalars):
    g, u = clamp(gate, up, scalars)
    value, slope = plain(g)
    shifted = u + scalars.up_offset
    return value * shifted, *unclamped(gate, up, slope * shifted, value, scalars)


def unclamped(gate: Float32, up: Float32, by_gate: Float32, by_up: Float32, scalars: GluScalars):
    """The two partial derivatives, zero where the clamp holds."""
    return where_at_most(gate, scalars.limit, by_gate), where_within(up, scalars.limit, by_up)


PLAIN_DERIVATIVES = {
    ("drelu", "none"): relu_derivative,
    ("dsrelu", "none"): srelu_derivative,
    ("dsilu", "none"): silu_derivative,
    ("dgelu", "none"): gelu_erf_derivative,
    ("dgelu", "tanh"): gelu_tanh_derivative,
}
GATED_DERIVATIVES = {
    ("dswiglu", "none"): swiglu_derivative,
    ("dgeglu", "none"): geglu_erf_derivative,
    ("dgeglu", "tanh"): geglu_tanh_derivative,
    ("dreglu", "none"): reglu_derivative,
}

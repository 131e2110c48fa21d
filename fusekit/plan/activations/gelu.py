"""z Phi(z), Phi the normal distribution; or its tanh form."""

import math


def tanh(m, z):
    """z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), written as z * sigmoid of twice that argument."""
    twice = m.Float32(2.0 * math.sqrt(2.0 / math.pi)) * z * (m.Float32(1.0) + m.Float32(0.044715) * z * z)
    return z * m.sigmoid(twice)


def tanh_derivative(m, z):
    """s + z s (1 - s) t', s the sigmoid of t = 2 sqrt(2/pi) (z + 0.044715 z^3)."""
    scale, square = m.Float32(2.0 * math.sqrt(2.0 / math.pi)), z * z
    s = m.sigmoid(scale * z * (m.Float32(1.0) + m.Float32(0.044715) * square))
    value = z * s
    return value, s + value * (m.Float32(1.0) - s) * scale * (m.Float32(1.0) + m.Float32(3 * 0.044715) * square)


# erfc(x) = t exp(-x^2 + ERFC(t)), t = 1 / (1 + x/2), for x >= 0; Chebyshev fit of Press et al., "Numerical Recipes",
# section 6.2, fractional error under 1.2e-7. Two special-function operations and few registers.
ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def normal_tail(m, z):
    """1 - Phi(|z|), from erfc so that a small tail keeps its digits."""
    # Beyond 20 the tail is zero; the minimum keeps inf * 0 out.
    x = m.minimum(m.maximum(z, -z) * m.Float32(math.sqrt(0.5)), m.Float32(20.0))
    t = m.reciprocal_approx(m.Float32(1.0) + m.Float32(0.5) * x)
    polynomial = m.Float32(ERFC[0])
    for coefficient in ERFC[1:]:
        polynomial = polynomial * t + m.Float32(coefficient)
    return m.Float32(0.5) * t * m.exp2_approx((polynomial - x * x) * m.Float32(m.LOG2_E))


def erf(m, z):
    """z/2 (1 + erf(z / sqrt 2)) = z Phi(z)."""
    magnitude = m.minimum(m.maximum(z, -z), m.Float32(20.0 * math.sqrt(2.0)))
    return m.maximum(z, m.Float32(0.0)) - magnitude * normal_tail(m, z)


def erf_derivative(m, z):
    """Phi(z) + z phi(z)."""
    tail = normal_tail(m, z)
    magnitude = m.maximum(z, -z)
    density = m.Float32(1.0 / math.sqrt(2.0 * math.pi)) * m.exp2_approx(z * z * m.Float32(-0.5 * m.LOG2_E))
    above = m.where_at_most(-z, m.Float32(0.0), m.Float32(1.0) - tail)  # Phi of a z that is not negative
    below = m.where_at_most(z, m.Float32(-m.MIN_POSITIVE), tail)
    return m.maximum(z, m.Float32(0.0)) - magnitude * tail, above + below + z * density


approximations = {"none": (erf, erf_derivative), "tanh": (tanh, tanh_derivative)}

"""The router's float32 mathematics: score functions and their derivatives, to a few units in the last place.

Exponentials take only arguments up to 0, so that nothing overflows: e^-|x| gives both tails of a sigmoid. ex2.approx
alone would lose the bits of x * log2(e) that do not fit into a float32; they are put back by a correction.
"""

import math

from cutlass import Float32

from fusekit.kernels.floats import absolute, choose, fma, multiply, square_root
from fusekit.kernels.ptx import exp2_approx, maximum, reciprocal_approx

EPSILON = 1e-20  # added to the sum that chosen scores are divided by
LOG2_E = 1.4426950216293335  # the nearest float32, and what is left of log2(e)
LOG2_E_LOW = math.log2(math.e) - LOG2_E


def exp_nonpositive(x: Float32) -> Float32:
    """e^x for x <= 0; results below 2^-126 are 0; NaN for NaN."""
    x = maximum(x, Float32(-150.0))
    high = multiply(x, Float32(LOG2_E))
    low = fma(x, Float32(LOG2_E_LOW), fma(x, Float32(LOG2_E), multiply(high, Float32(-1.0))))
    power = exp2_approx(high)
    return fma(multiply(power, low), Float32(math.log(2.0)), power)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x)."""
    tail = exp_nonpositive(absolute(x) * Float32(-1.0))
    numerator = choose(x < Float32(0.0), tail, Float32(1.0))
    return numerator * reciprocal_approx(Float32(1.0) + tail)


def sigmoid_slope(x: Float32) -> Float32:
    """sigmoid(x) (1 - sigmoid(x)), without cancellation at either end."""
    tail = exp_nonpositive(absolute(x) * Float32(-1.0))
    inverse = reciprocal_approx(Float32(1.0) + tail)
    return tail * inverse * inverse


def _log1p_over(u: Float32) -> Float32:
    """log(1 + u) / u for 0 <= u <= 1: 2 atanh(z) = log(1 + u) with z = u / (2 + u)."""
    inverse = reciprocal_approx(u + Float32(2.0))
    square = (u * inverse) * (u * inverse)
    series = Float32(1.0 / 15.0)
    for power in (13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, Float32(1.0 / power))
    return Float32(2.0) * inverse * series


def sqrtsoftplus(x: Float32) -> Float32:
    """sqrt(log(1 + e^x)). Below 0 it is e^(x/2) sqrt(log(1 + u) / u), which does not underflow with u = e^x."""
    tail = exp_nonpositive(absolute(x) * Float32(-1.0))
    ratio = _log1p_over(tail)
    negative = exp_nonpositive(choose(x < Float32(0.0), x, Float32(0.0)) * Float32(0.5)) * square_root(ratio)
    return choose(x < Float32(0.0), negative, square_root(fma(tail, ratio, x)))


def sqrtsoftplus_slope(y: Float32) -> Float32:
    """The derivative of sqrtsoftplus from its value y: sigmoid(x) / (2 y), where sigmoid(x) = 1 - e^(-y^2)."""
    square = y * y
    series = Float32(-1.0 / math.factorial(8))
    for power in range(6, -1, -1):  # (1 - e^-q) / q = 1 - q/2! + q^2/3! - ...
        series = fma(series, square, Float32((-1.0) ** power / math.factorial(power + 1)))
    small = Float32(0.5) * y * series
    large = (Float32(1.0) - exp_nonpositive(square * Float32(-1.0))) * reciprocal_approx(Float32(2.0) * y)
    return choose(square < Float32(0.5), small, large)


def score(x: Float32, function: str) -> Float32:
    """A score function that needs no other expert."""
    return sigmoid(x) if function == "sigmoid" else sqrtsoftplus(x)

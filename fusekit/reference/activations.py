"""The activations of the epilogue, in float64. A new one is a function, its slope and a row of ``KINDS``.

Plain kinds map z [..., N] to [..., N]; gated kinds split z [..., 2I] by ``glu_layout`` into g and u and give
``gate(g) * (u + up_offset)`` [..., I], after clamping g from above and u from both sides when there is a ``limit``.
The derivative of a clamped element is zero; one that equals the limit is not clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fusekit.reference import layouts
from fusekit.reference.formats import Array
from fusekit.spec import Activation


@dataclass(frozen=True, slots=True)
class Kind:
    """One activation. ``function`` gets z and the spec's parameters; of a gated kind it is the gate, and gets g.

    ``slope`` is its derivative.
    """

    function: Callable[[Array, Activation], Array]
    slope: Callable[[Array, Activation], Array]
    gated: bool = False


def identity(z: Array, activation: Activation) -> Array:
    return z


def relu(z: Array, activation: Activation) -> Array:
    return np.maximum(z, 0.0)


def srelu(z: Array, activation: Activation) -> Array:
    return np.maximum(z, 0.0) ** 2


def silu(z: Array, activation: Activation) -> Array:
    return z * _sigmoid(z)


def swish(g: Array, activation: Activation) -> Array:
    return g * _sigmoid(activation.alpha * g)


def gelu(z: Array, activation: Activation) -> Array:
    if activation.approximate == "tanh":
        # 0.5 (1 + tanh t) = sigmoid(2t), which keeps its digits where tanh is near -1.
        return z * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))
    return 0.5 * z * _erfc(-z * math.sqrt(0.5))


def identity_slope(z: Array, activation: Activation) -> Array:
    return np.ones_like(z)


def relu_slope(z: Array, activation: Activation) -> Array:
    """0 at 0."""
    return np.where(np.isnan(z), z, np.heaviside(z, 0.0))


def srelu_slope(z: Array, activation: Activation) -> Array:
    return 2.0 * np.maximum(z, 0.0)


def silu_slope(z: Array, activation: Activation) -> Array:
    return swish_slope(z, Activation())


def swish_slope(g: Array, activation: Activation) -> Array:
    t = activation.alpha * g
    slope: Array = _sigmoid(t) * (1.0 + t * _sigmoid(-t))
    return slope


def gelu_slope(z: Array, activation: Activation) -> Array:
    if activation.approximate == "tanh":
        scale = 2.0 * math.sqrt(2.0 / math.pi)
        t = scale * (z + 0.044715 * z**3)
        s = _sigmoid(t)
        return s + z * s * _sigmoid(-t) * scale * (1.0 + 3 * 0.044715 * z**2)
    return 0.5 * _erfc(-z * math.sqrt(0.5)) + z * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)


KINDS: dict[str, Kind] = {
    "identity": Kind(identity, identity_slope),
    "relu": Kind(relu, relu_slope),
    "srelu": Kind(srelu, srelu_slope),
    "silu": Kind(silu, silu_slope),
    "gelu": Kind(gelu, gelu_slope),
    "swiglu": Kind(swish, swish_slope, gated=True),
    "geglu": Kind(gelu, gelu_slope, gated=True),
    "reglu": Kind(relu, relu_slope, gated=True),
}

# What float32 and its approximate exponentials and reciprocals make of an activation, as a share of its argument, and
# of a slope, as a share of it or of 1, whichever is larger: 1 - sigmoid has no more digits than 1.
EVALUATION = 2.0**-18
SLOPE = 2.0**-16


def activate(activation: Activation, layout: str, z: Array) -> Array:
    """The activation of z [rows, N], in float64: [rows, N] if it is plain, [rows, N/2] if it is gated."""
    kind = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not kind.gated:
        return kind.function(z, activation)
    g, u = _clamped(activation, layout, z)
    return kind.function(g, activation) * (u + activation.up_offset)


def derivative(activation: Activation, layout: str, z: Array) -> tuple[Array, tuple[Array, ...]]:
    """(activate(z), its derivatives) in float64: by z, or by g and by u, each shaped as the activation."""
    kind = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not kind.gated:
        return kind.function(z, activation), (kind.slope(z, activation),)
    g, u = _clamped(activation, layout, z)
    gate, up = kind.function(g, activation), u + activation.up_offset
    by_gate, by_up = kind.slope(g, activation) * up, gate
    if activation.limit is not None:
        free_g, free_u = layouts.split(z, layout)
        by_gate = np.where(free_g > activation.limit, 0.0, by_gate)
        by_up = np.where(np.abs(free_u) > activation.limit, 0.0, by_up)
    return gate * up, (by_gate, by_up)


def slope_error(activation: Activation, layout: str, z: Array) -> tuple[Array, ...]:
    """How far float32 may be from each of the derivatives that ``derivative`` gives."""
    kind = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not kind.gated:
        return (SLOPE * np.maximum(np.abs(kind.slope(z, activation)), 1.0),)
    g, u = _clamped(activation, layout, z)
    up = np.abs(u + activation.up_offset)
    return SLOPE * np.maximum(np.abs(kind.slope(g, activation)), 1.0) * up, SLOPE * np.abs(g)


def error_bound(activation: Activation, layout: str, z: Array, error: Array) -> Array:
    """How far off the activation may be when z [rows, N] is off by ``error`` [rows, N]; shaped as the result.

    The error is carried through by moving z both ways. It is not allowed to shrink where the function is flat: what
    float32 arithmetic makes of a gelu near its tail is good to a share of the argument, not of the result.
    """
    kind = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    error = np.asarray(error, dtype=np.float64)
    if not kind.gated:
        return _spread(kind, activation, z, error)
    g, u = _clamped(activation, layout, z)
    gate_error, up_error = layouts.split(error, layout)
    up = np.abs(u + activation.up_offset)
    gate = np.abs(kind.function(g, activation))
    bound: Array = _spread(kind, activation, g, gate_error) * (up + up_error) + gate * up_error
    return bound


def _kind(activation: Activation) -> Kind:
    try:
        return KINDS[activation.kind]
    except KeyError:
        raise ValueError(f"activation {activation.kind!r}; it is one of {', '.join(KINDS)}") from None


def _clamped(activation: Activation, layout: str, z: Array) -> tuple[Array, Array]:
    g, u = layouts.split(z, layout)
    if activation.limit is None or activation.limit == math.inf:
        return g, u
    return np.minimum(g, activation.limit), np.clip(u, -activation.limit, activation.limit)


def _spread(kind: Kind, activation: Activation, z: Array, error: Array) -> Array:
    here = kind.function(z, activation)
    above = np.abs(kind.function(z + error, activation) - here)
    below = np.abs(kind.function(z - error, activation) - here)
    return np.asarray(np.maximum(np.maximum(above, below), error))


def _sigmoid(t: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a NaN stays one
        return np.asarray(np.exp(-np.logaddexp(0.0, -t)))


def _erfc(t: Array) -> Array:
    flat = np.fromiter(map(math.erfc, t.ravel().tolist()), dtype=np.float64, count=t.size)
    return flat.reshape(t.shape)

"""The activations of the epilogue, in float64, one file each: a function and its slope.

Plain kinds map z [..., N] to [..., N]; gated kinds split z [..., 2I] by ``glu_layout`` into g and u and give
``gate(g) * (u + up_offset)`` [..., I], after clamping g from above and u from both sides when there is a ``limit``.
The derivative of a clamped element is zero; one that equals the limit is not clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np

from fusekit.errors import UsageError
from fusekit.plan.activations import functions, kind, module
from fusekit.plan.packages import ACTIVATIONS, package
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


@cache
def load(name: str) -> Kind:
    """The forward activation `name`. Raises UsageError for one of a package that does not define it in NumPy."""
    file = module(name)
    is_ours = file.__name__.startswith("fusekit.")
    reference = f"{__name__}.{name}" if is_ours else getattr(file, "REFERENCE", "")
    if not reference:
        raise UsageError(
            f"activation {name}: the package {package(ACTIVATIONS, name)} gives no REFERENCE in {file.__name__}, which "
            "says what its results must be; run it without --check"
        )
    twin = import_module(reference)
    return Kind(twin.function, twin.slope, kind(name).gated)


# What float32 and its approximate exponentials and reciprocals make of an activation, as a share of its argument, and
# of a slope, as a share of it or of 1, whichever is larger: 1 - sigmoid has no more digits than 1.
EVALUATION = 2.0**-18
SLOPE = 2.0**-16


def activate(activation: Activation, layout: str, z: Array) -> Array:
    """The activation of z [rows, N], in float64: [rows, N] if it is plain, [rows, N/2] if it is gated."""
    here = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not here.gated:
        return here.function(z, activation)
    g, u = _clamped(activation, layout, z)
    return here.function(g, activation) * (u + activation.up_offset)


def derivative(activation: Activation, layout: str, z: Array) -> tuple[Array, tuple[Array, ...]]:
    """(activate(z), its derivatives) in float64: by z, or by g and by u, each shaped as the activation."""
    here = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not here.gated:
        return here.function(z, activation), (here.slope(z, activation),)
    g, u = _clamped(activation, layout, z)
    gate, up = here.function(g, activation), u + activation.up_offset
    by_gate, by_up = here.slope(g, activation) * up, gate
    if activation.limit is not None:
        free_g, free_u = layouts.split(z, layout)
        by_gate = np.where(free_g > activation.limit, 0.0, by_gate)
        by_up = np.where(np.abs(free_u) > activation.limit, 0.0, by_up)
    return gate * up, (by_gate, by_up)


def slope_error(activation: Activation, layout: str, z: Array) -> tuple[Array, ...]:
    """How far float32 may be from each of the derivatives that ``derivative`` gives."""
    here = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    if not here.gated:
        return (SLOPE * np.maximum(np.abs(here.slope(z, activation)), 1.0),)
    g, u = _clamped(activation, layout, z)
    up = np.abs(u + activation.up_offset)
    return SLOPE * np.maximum(np.abs(here.slope(g, activation)), 1.0) * up, SLOPE * np.abs(g)


def error_bound(activation: Activation, layout: str, z: Array, error: Array) -> Array:
    """How far off the activation may be when z [rows, N] is off by ``error`` [rows, N]; shaped as the result.

    The error is carried through by moving z both ways. It is not allowed to shrink where the function is flat: what
    float32 arithmetic makes of a gelu near its tail is good to a share of the argument, not of the result.
    """
    here = _kind(activation)
    z = np.asarray(z, dtype=np.float64)
    error = np.asarray(error, dtype=np.float64)
    if not here.gated:
        return _spread(here, activation, z, error)
    g, u = _clamped(activation, layout, z)
    gate_error, up_error = layouts.split(error, layout)
    up = np.abs(u + activation.up_offset)
    gate = np.abs(here.function(g, activation))
    bound: Array = _spread(here, activation, g, gate_error) * (up + up_error) + gate * up_error
    return bound


def _kind(activation: Activation) -> Kind:
    if activation.kind not in functions():
        raise ValueError(f"activation {activation.kind!r}; it is one of {', '.join(functions())}")
    return load(activation.kind)


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

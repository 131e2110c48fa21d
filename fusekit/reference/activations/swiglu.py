"""g sigmoid(alpha g), the gate of swiglu."""

from __future__ import annotations

from fusekit.reference.formats import Array
from fusekit.reference.mathematics import sigmoid
from fusekit.spec import Activation


def function(g: Array, activation: Activation) -> Array:
    return g * sigmoid(activation.alpha * g)


def slope(g: Array, activation: Activation) -> Array:
    t = activation.alpha * g
    slope: Array = sigmoid(t) * (1.0 + t * sigmoid(-t))
    return slope

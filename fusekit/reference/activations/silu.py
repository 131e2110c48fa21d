"""z sigmoid(z)."""

from __future__ import annotations

from fusekit.reference.formats import Array
from fusekit.reference.mathematics import sigmoid
from fusekit.spec import Activation


def function(z: Array, activation: Activation) -> Array:
    return z * sigmoid(z)


def slope(z: Array, activation: Activation) -> Array:
    slope: Array = sigmoid(z) * (1.0 + z * sigmoid(-z))
    return slope

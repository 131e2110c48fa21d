"""z."""

from __future__ import annotations

import numpy as np

from fusekit.reference.formats import Array
from fusekit.spec import Activation


def function(z: Array, activation: Activation) -> Array:
    return z


def slope(z: Array, activation: Activation) -> Array:
    return np.ones_like(z)

"""max(z, 0)^2."""

from __future__ import annotations

import numpy as np

from fusekit.reference.formats import Array
from fusekit.spec import Activation


def function(z: Array, activation: Activation) -> Array:
    return np.maximum(z, 0.0) ** 2


def slope(z: Array, activation: Activation) -> Array:
    return 2.0 * np.maximum(z, 0.0)

"""max(z, 0)."""

from __future__ import annotations

import numpy as np

from fusekit.reference.formats import Array
from fusekit.spec import Activation


def function(z: Array, activation: Activation) -> Array:
    return np.maximum(z, 0.0)


def slope(z: Array, activation: Activation) -> Array:
    """0 at 0."""
    return np.where(np.isnan(z), z, np.heaviside(z, 0.0))

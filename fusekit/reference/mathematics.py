"""Functions that NumPy lacks, or that lose digits as they are usually written."""

from __future__ import annotations

import math

import numpy as np

from fusekit.reference.formats import Array


def sigmoid(t: Array) -> Array:
    small = np.exp(-np.abs(t))  # so that nothing overflows
    return np.asarray(np.where(t < 0, small, 1.0) / (1.0 + small))


def erfc(t: Array) -> Array:
    flat = np.fromiter(map(math.erfc, t.ravel().tolist()), dtype=np.float64, count=t.size)
    return flat.reshape(t.shape)

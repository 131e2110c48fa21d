"""Functions that NumPy lacks, or that lose digits as they are usually written."""

from __future__ import annotations

import math

import numpy as np

from fusekit.reference.formats import Array


def sigmoid(t: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a NaN stays one
        return np.asarray(np.exp(-np.logaddexp(0.0, -t)))


def erfc(t: Array) -> Array:
    flat = np.fromiter(map(math.erfc, t.ravel().tolist()), dtype=np.float64, count=t.size)
    return flat.reshape(t.shape)

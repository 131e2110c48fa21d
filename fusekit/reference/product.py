"""x . w row by row, each row with the weights of the group that owns it, and how far float32 may be from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.factors import ACCUMULATION as OF_FP8
from fusekit.reference.factors import w_values, x_values
from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning, need
from fusekit.reference.operands import twins

# Float32 accumulation of K products is off by at most this share of the sum of their absolute values. Tensor cores
# truncate: one step of 16 products costs up to 2**-23 of the running sum, which is far below the sum of the absolute
# values unless all products have one sign, and then the result is large and the relative bound governs.
ACCUMULATION = 2.0**-16

# Columns of w held in float64 at a time, so that a large weight is never there whole in double precision.
COLUMNS = 4096


def weights(means: Meaning, inputs: Mapping[str, Any]) -> Array:
    """w as [E, N, K], whatever its order in memory; E is 1 for a dense-gemm. Of MXFP4, [E, N, K / 2] bytes."""
    w = need(inputs, "w", (3 if means.grouped else 2) + means.quant.mx_weights)
    w = w.reshape(*w.shape[:-2], -1) if means.quant.mx_weights else w
    w = w if means.grouped else w[None]
    return w.transpose(0, 2, 1) if means.b_major == "n" else w


def product(
    means: Meaning,
    inputs: Mapping[str, Any],
    rows: NDArray[np.int64],
    owner: NDArray[np.int64],
    columns: NDArray[np.int64] | None = None,
) -> tuple[Array, Array]:
    """x.w as the operands leave it, with its error: of ``rows`` of x, whose groups are ``owner``, and ``columns`` of w.

    Both float64 [rows, columns]; the error is what float32 may make of it.
    """
    x, w = need(inputs, "x", 2), weights(means, inputs)
    depth = w.shape[2] * (2 if means.quant.mx_weights else 1)
    if depth != x.shape[1]:
        raise ValueError(f"x has K = {x.shape[1]} and w has K = {depth}; they must be equal")
    count = w.shape[1] if columns is None else columns.size
    value = np.empty((rows.size, count))
    error = np.empty_like(value)
    for group in np.unique(owner):
        here = owner == group
        left = x_values(means, inputs, rows[here])
        left_magnitude = np.abs(left).astype(np.float32)
        for start in range(0, count, COLUMNS):
            part = slice(start, start + COLUMNS)
            right = w_values(means, inputs, w, group, part if columns is None else columns[part])
            value[here, part] = left @ right.astype(np.float64).T
            error[here, part] = left_magnitude @ np.abs(right).astype(np.float32).T
    for twin in twins(means):
        if hasattr(twin, "product"):
            twin.product(means, inputs, value, error, owner, columns)
    error *= OF_FP8 if means.quant.coded_inputs else ACCUMULATION
    return value, error

"""Operands x and w as numbers: 16 bits as they are, FP8 values times their scales.

With ``in = "fp8-weights"`` x has 16 bits, and w is FP8 values with a float32 scale for each square of 128 x 128, as
checkpoints have them:

    z[m, n] = sum over blocks b of 128 of K:  w_s[n / 128, b] * sum over k in b:  x[m, k] w[n, k]

A kernel makes bf16 of w, which is exact, and multiplies in float32; a product takes the blocks in the order of K, each
sum from zero, in instructions of 16 of K each, and is its result times the scale, added with one rounding (fma). That
order is the same in every kernel, so z[m] has the same bits whatever the other rows are. NaN is no value of a weight:
kernels read its code as 480.

With ``in = "mxfp4-weights"`` w is MXFP4 (mxfp4.py). A kernel makes bf16 of the values times their scales, which is
exact, and z has the bits of the kernel whose w is those numbers in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.quant import SIDE, TENSOR
from fusekit.reference import mxfp4
from fusekit.reference.formats import Array, values
from fusekit.reference.fp8 import decode
from fusekit.reference.meaning import Meaning, need

# Sums of FP8 products keep about 13 bits in a wgmma accumulator. In relative Frobenius norm that is 1.3e-4 where
# float32 takes over after every 128 of K, and up to 1.9e-3 in one accumulator, K being 7168.
ACCUMULATION = 2.0**-11
FAST, FAST_SINGLE, PROMOTED_SINGLE = 4.0e-3, 3.0e-3, 4.0e-4


def limit(means: Meaning, single: bool = False) -> float | None:
    """The Frobenius bound of a result that is made of the product, where it is another than its format's."""
    if not means.quant.coded_inputs:
        return None
    if means.quant.promoted:
        return PROMOTED_SINGLE if single else None
    return FAST_SINGLE if single else FAST


def x_values(means: Meaning, inputs: Mapping[str, Any], rows: NDArray[np.int64]) -> Array:
    """``rows`` of x, float64 [rows, K]."""
    x = need(inputs, "x", 2)[rows]
    if not means.quant.coded_inputs:
        return values(x, means.dtype).astype(np.float64)
    scale = need(inputs, "x_s", None).astype(np.float64)
    if means.quant.by_block:
        scales = np.repeat(scale[:, rows].T, SIDE, axis=1)[:, : x.shape[1]]
    else:
        scales = scale if means.quant.inputs == TENSOR else scale[rows, None]
    return decode(x, means.factors[0]) * scales


def w_values(means: Meaning, inputs: Mapping[str, Any], w: Array, group: int, columns: Any) -> Array:
    """``columns`` of w[group] of w [E, N, K], float32 or (for FP8 and MXFP4) float64 [columns, K]."""
    if not (means.quant.coded_inputs or means.quant.weights_alone):
        return values(w[group, columns], means.dtype)
    if means.quant.mx_weights:
        exponents = need(inputs, "w_s", None).reshape(*w.shape[:2], -1)[group, columns]
        return mxfp4.decode(w[group, columns].reshape(*exponents.shape, -1), exponents)
    scale = need(inputs, "w_s", None).astype(np.float64)
    if means.quant.by_block or means.quant.weights_alone:
        blocks = scale.reshape(w.shape[0], *scale.shape[-2:])[group]
        scales = np.repeat(blocks[np.arange(w.shape[1])[columns] // SIDE], SIDE, axis=1)[:, : w.shape[2]]
    else:
        scale = scale.reshape(w.shape[0], -1)[group]
        scales = scale if scale.size == 1 else scale[columns, None]
    value: Array = decode(w[group, columns], means.factors[1]) * scales
    return value

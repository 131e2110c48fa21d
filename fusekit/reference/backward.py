"""What a GEMM with a backward activation means, in float64.

da = x . w, where x is the gradient of the layer above and w that layer's weights; z is what the forward pass saved.

- dz = row_scale * da * d activation / dz, in the layout of z; zero for a clamped element;
- ``recompute``: y = row_scale * activation(z);
- ``dprob``: the gradient of row_scale, each row's sum of da * activation(z);
- ``dbias``: each group's sum of the rows of dz, before dz is rounded.

z is exact, so float32 is off by what it makes of da, and of the activation and its slope (``activations``). Errors of
one sum are of either sign: four times the root of their squares, and the sum's own error as ``wgrad`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference import activations, layouts
from fusekit.reference.factors import limit as limit_of
from fusekit.reference.formats import Array, values
from fusekit.reference.meaning import Meaning, need
from fusekit.reference.measure import Expected
from fusekit.reference.product import product, weights
from fusekit.reference.wgrad import STEP, UNIT
from fusekit.spec import Activation


def expected(
    means: Meaning,
    activation: Activation,
    inputs: Mapping[str, Any],
    ends: NDArray[np.int64],
    owner: NDArray[np.int64],
    rows: NDArray[np.int64] | None,
    columns: NDArray[np.int64] | None,
) -> dict[str, Expected]:
    """dz, and y, dprob and dbias where the spec has them, for ``rows`` and ``columns`` of da; None: all.

    ``activation`` is the forward one with its run-time scalars. ``ends`` int64[E] and ``owner`` int64[owned rows] say
    which rows a group has. A sum over all columns (dprob) or rows (dbias) is there only where all are.
    """
    n, k = weights(means, inputs).shape[1:]
    saved = need(inputs, "preactivation", 2)
    whole = (need(inputs, "x", 2).shape[0], 2 * n if activation.gated else n)
    if saved.shape != whole:
        raise ValueError(f"preactivation has shape {saved.shape}; x and w make it {whole}")
    chosen = np.arange(owner.size) if rows is None else rows
    z_columns, layout = layouts.columns_of(means.glu_layout, n, columns)
    z = values(saved[chosen] if z_columns is None else saved[chosen][:, z_columns], means.dtype)
    da, da_error = product(means, inputs, chosen, owner[chosen], columns)
    value, slopes = activations.derivative(activation, layout, z)
    slope_errors = activations.slope_error(activation, layout, z)
    y_error = activations.error_bound(activation, layout, z, np.abs(z.astype(np.float64)) * activations.EVALUATION)
    terms, term_errors = da * value, da_error * np.abs(value) + (np.abs(da) + da_error) * y_error
    if means.row_scale:
        scale = need(inputs, "row_scale", 1)[chosen].astype(np.float64)[:, None]
        da, da_error, value, y_error = da * scale, da_error * np.abs(scale), value * scale, y_error * np.abs(scale)
    parts = [da * slope for slope in slopes]
    errors = [
        da_error * np.abs(slope) + (np.abs(da) + da_error) * error
        for slope, error in zip(slopes, slope_errors, strict=True)
    ]
    dz, dz_error = (layouts.join(each[0], each[1], layout) if activation.gated else each[0] for each in (parts, errors))
    outputs = {"dz": Expected(means.dtype, chosen, dz, dz_error, z_columns, whole, limit_of(means))}
    if means.recompute:
        outputs["y"] = Expected(means.out_dtype, chosen, value, y_error, columns, shape=(whole[0], n))
    if means.dprob and columns is None:
        outputs["dprob"] = _sums(means, chosen, terms.T, term_errors.T, [slice(None)], k, (whole[0],), transpose=True)
    if means.dbias and rows is None:
        shape = (ends.size, whole[1]) if means.grouped else (whole[1],)
        groups = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        outputs["dbias"] = _sums(means, np.arange(ends.size), dz, dz_error, groups, k, shape, columns=z_columns)
    return outputs


def _sums(
    means: Meaning,
    rows: NDArray[np.int64],
    terms: Array,
    errors: Array,
    groups: list[slice],
    k: int,
    shape: tuple[int, ...],
    *,
    transpose: bool = False,
    columns: NDArray[np.int64] | None = None,
) -> Expected:
    """The float32 output that sums ``terms`` over each group of its rows; every term came of ``k`` products."""
    value = np.zeros((len(groups), terms.shape[1]))
    slack = np.zeros_like(value)
    most = 0
    for index, group in enumerate(groups):
        part, error = terms[group], errors[group]
        steps = math.ceil(part.shape[0] / STEP) + math.ceil(k / STEP)
        most = max(most, steps)
        value[index] = part.sum(axis=0)
        own = UNIT * ((8 + 2 * math.sqrt(steps)) * np.abs(part).sum(axis=0) + steps * np.abs(value[index]))
        slack[index] = 4 * np.sqrt((error**2).sum(axis=0)) + own
    if transpose:
        value, slack = value.T, slack.T
    limit = limit_of(means, single=True) or UNIT * (32 + most)
    return Expected("f32", rows, value, slack, columns, shape=shape, limit=limit)

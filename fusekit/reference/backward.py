"""The definition of a GEMM with a backward activation, in float64.

da = x . w, where x is the gradient of the layer above and w that layer's weights; z is what the forward pass saved.

dz = row_scale * da * d activation / dz, in the layout of z; zero for a clamped element. Other outputs are of operands.
z is exact, so float32 is off by what it makes of da, and of the activation and its slope (``activations``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference import activations, layouts
from fusekit.reference.factors import limit as limit_of
from fusekit.reference.formats import values
from fusekit.reference.gradients import Gradients
from fusekit.reference.meaning import Meaning, need
from fusekit.reference.measure import Expected
from fusekit.reference.operands import twins
from fusekit.reference.product import product, weights
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
    """dz, and the outputs of operands, for ``rows`` and ``columns`` of da; None: all.

    ``activation`` is the forward one with its run-time scalars. ``ends`` int64[E] and ``owner`` int64[owned rows] say
    which rows a group has. A sum is there only where all that it sums is.
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
    terms = da * value, da_error * np.abs(value) + (np.abs(da) + da_error) * y_error
    for twin in twins(means):
        if hasattr(twin, "output"):
            da, da_error = twin.output(means, inputs, da, da_error, chosen)
            value, y_error = twin.output(means, inputs, value, y_error, chosen)
    parts = [da * slope for slope in slopes]
    errors = [
        da_error * np.abs(slope) + (np.abs(da) + da_error) * error
        for slope, error in zip(slopes, slope_errors, strict=True)
    ]
    dz, dz_error = (
        layouts.join(halves[0], halves[1], layout) if activation.gated else halves[0] for halves in (parts, errors)
    )
    sums = limit_of(means, single=True)
    gradients = Gradients(
        rows, columns, z_columns, chosen, whole, ends, k, terms, (value, y_error), (dz, dz_error), sums
    )  # fmt: skip
    outputs = {"dz": Expected(means.dtype, chosen, dz, dz_error, z_columns, whole, limit_of(means))}
    for twin in twins(means):
        if hasattr(twin, "gradient"):
            outputs |= twin.gradient(means, gradients)
    return outputs

"""bias[e, n]: added to every row of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array, bits, values
from fusekit.reference.meaning import Meaning, need

step = 2


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    groups = (dims["E"],) if means.grouped else ()
    return {"bias": bits((*groups, dims["N"]), means.dtype, seed + 3, -1)}


def product(
    means: Meaning,
    inputs: Mapping[str, Any],
    value: Array,
    error: Array,
    owner: NDArray[np.int64],
    columns: NDArray[np.int64] | None,
) -> None:
    bias = values(need(inputs, "bias", 2 if means.grouped else 1), means.dtype).astype(np.float64)
    bias = bias if columns is None else bias[..., columns]
    bias = bias[owner] if means.grouped else bias
    value += bias
    error += np.abs(bias)

"""alpha: the product times a number, or times alpha[e]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning, need

step = 1


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    if means.operands["alpha"] == "scalar":
        return {"alpha": 0.75}
    return {"alpha": rng.uniform(0.5, 1.5, dims["E"]).astype(np.float32)}


def product(
    means: Meaning,
    inputs: Mapping[str, Any],
    value: Array,
    error: Array,
    owner: NDArray[np.int64],
    columns: NDArray[np.int64] | None,
) -> None:
    alpha = np.asarray(need(inputs, "alpha", None), dtype=np.float64).reshape(-1)
    factor = alpha[owner][:, None] if means.operands["alpha"] == "group" else alpha[0]
    value *= factor
    error *= np.abs(factor)

"""row_scale[m]: the output of row m times its router weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning, need

step = 5


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    return {"row_scale": rng.uniform(0.25, 1.0, dims["M"]).astype(np.float32)}


def output(
    means: Meaning, inputs: Mapping[str, Any], value: Array, error: Array, rows: NDArray[np.int64]
) -> tuple[Array, Array]:
    scale = need(inputs, "row_scale", 1)[rows].astype(np.float64)[:, None]
    return value * scale, error * np.abs(scale)

"""Scales of x: one, one for each row, or for 128 columns of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.plan.quant import ROW, SIDE
from fusekit.reference.meaning import Meaning

step = 0


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    shape: tuple[int, ...] = (dims["M"] if means.quant.inputs == ROW else 1,)
    if means.quant.by_block:
        shape = -(-dims["K"] // SIDE), dims["M"]
    return {"x_s": rng.uniform(0.5, 1.5, shape).astype(np.float32)}

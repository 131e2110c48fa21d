"""Scales of w: one for each group, or for each column. They bring the product down to a spread of about 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.plan.quant import MX_SIDE, ROW, SIDE
from fusekit.reference import mxfp4
from fusekit.reference.formats import RMS
from fusekit.reference.meaning import Meaning

step = 0


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    shape: tuple[int, ...] = (dims["N"],) if means.quant.inputs == ROW else ()
    if means.quant.mx_weights:
        shape = (*((dims["E"],) if means.grouped else ()), dims["N"], dims["K"] // MX_SIDE)
        return {"w_s": mxfp4.random_scales(shape, dims["K"], rng)}
    if means.quant.by_block or means.quant.weights_alone:
        shape = -(-dims["N"] // SIDE), -(-dims["K"] // SIDE)
    shape = (dims["E"], *shape) if means.grouped else shape or (1,)
    spread = 2.0 ** -round(0.5 * np.log2(max(dims["K"], 1) * RMS**4))
    return {"w_s": (rng.uniform(0.5, 1.5, shape) * spread).astype(np.float32)}

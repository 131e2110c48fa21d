"""The largest numbers of groups that a GEMM stores with its result (``out = "amax"``), bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.quantise import AMAX
from fusekit.reference import layouts
from fusekit.reference.formats import Array
from fusekit.reference.fp8 import largest_shapes
from fusekit.reference.meaning import Meaning
from fusekit.reference.quantise import quantise


def largest(means: Meaning, results: Mapping[str, Array], ends: NDArray[np.int64]) -> dict[str, Array]:
    """The largest numbers by output name, from bf16 ``results`` by name."""
    wanted: dict[str, Array] = {}
    for name, (shape, _) in largest_shapes(means, ends.size).items():
        result, _, end = name.partition("_")
        sides = [results[result]]
        if result == "dz" and means.glu_layout != "none":
            sides = list(layouts.split(results[result], means.glu_layout))
        keys = {"out": AMAX, "blocks": "1x128", "scales": "", "transpose": False, "rht_amax": means.quant.rht_amax}
        halves = [quantise(keys, {"x": np.ascontiguousarray(side), "offsets": ends})[f"x_{end}"] for side in sides]
        wanted[name] = np.stack(halves, axis=-1).reshape(shape)
    return wanted

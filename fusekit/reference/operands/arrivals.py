"""arrivals: a window that says which rows have come; to wait for them changes no value. In random inputs all have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.plan.exchange import CHUNK, words
from fusekit.reference.meaning import Meaning
from fusekit.reference.operands.gather import tokens_of

step = 0


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    return {"arrivals": np.zeros(words(tokens_of(dims["M"]) + CHUNK - 1), np.int32)}

"""index[m]: row m of the gathered factor is that row of a tensor with a row for each token; outside [0, T) zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning, need

step = 0

CHOICES = 4  # rows of a token in random problems


def tokens_of(rows: int) -> int:
    """T of a random problem of ``rows`` rows."""
    return max(rows // CHOICES, 1)


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    """One in 16 rows is of no token. Nothing where the launch itself makes the index."""
    if means.operands["choices"]:
        return {}
    # Its own generator: the other inputs are the same with and without a gather.
    index_rng, rows = np.random.default_rng(seed), dims["M"]
    index = index_rng.integers(0, tokens_of(rows), rows)
    return {"index": np.where(index_rng.random(rows) < 1 / 16, -1, index).astype(np.int32)}


def factors(means: Meaning, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """``inputs`` with the rows [M, K] that the index chooses from the tensor [T, K]."""
    tensor: Array = need(inputs, means.operands["gather"], 2)
    index = need(inputs, "index", 1).astype(np.int64)
    there = (index >= 0) & (index < len(tensor))
    rows = np.zeros((len(index), tensor.shape[1]), tensor.dtype)
    rows[there] = tensor[index[there]]
    return {**inputs, means.operands["gather"]: rows}

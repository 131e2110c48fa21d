"""indices [T, K]: the experts that tokens chose, from which the launch makes offsets, index and inverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.plan.operands.choices import MOST
from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning, need
from fusekit.reference.permutation import index

step = -1  # before rows are gathered


def tokens_of(means: Meaning, rows: int) -> int:
    """T of a problem of ``rows`` rows."""
    topk = means.operands["choices"]
    return int(max(min(rows, MOST) // topk, 1))


def inputs(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    """Different experts for a token; one in 16 choices is none."""
    index_rng, topk = np.random.default_rng(seed), means.operands["choices"]
    shape = tokens_of(means, dims["M"]), dims["E"]
    chosen = np.argsort(index_rng.random(shape), axis=1)[:, np.arange(topk) % dims["E"]]
    return {"indices": np.where(index_rng.random(chosen.shape) < 1 / 16, -1, chosen).astype(np.int32)}


def row_order(means: Meaning, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs that are not results of products, exactly."""
    order = index(need(inputs, "indices", 2), len(inputs["w"]))
    return {"offsets": order["offsets"], "index": order["token"], "inverse": order["inverse"]}


def factors(means: Meaning, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """``inputs`` with the order of rows."""
    return {**inputs, **row_order(means, inputs)}

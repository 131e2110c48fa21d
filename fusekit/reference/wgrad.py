"""The definition of weight gradients, in float64: dw[e] = dy[rows of e]^T . x[rows of e], plus what dw holds before.

``grouped-wgrad`` has E groups of rows; ``dense-wgrad`` has one, and its dw and dbias have no E.

``dbias`` is the float32 dbias[e] = sum of dy[rows of e], plus what it holds before where dw is added to. It is as if x
had a column of ones more, and as far off.

Float32 is off from it by less than c + s u |ref|, with u = 2**-23, s the steps of 16 rows that a group has, and

    c = u (8 + 2 sqrt(s)) sum |dy| |x|

Tensor cores truncate: a step costs up to u of the running sum, and one step's products up to u of the largest of them
each. Of numbers with random signs the running sum after j steps is about sqrt(j) times a step's, so that all s of them
cost a share of sum |dy| |x| that grows like sqrt(s). Where all products have one sign the running sums lie below the
result, and s u |ref| covers them. In the Frobenius norm truncation, which is always towards zero, adds up over the
steps: u (4 + s) of the result at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.quant import SIDE
from fusekit.reference.factors import ACCUMULATION as OF_FP8
from fusekit.reference.factors import limit as limit_of
from fusekit.reference.formats import Array, values
from fusekit.reference.fp8 import decode, padded_starts
from fusekit.reference.meaning import Meaning, group_ends, indices, need
from fusekit.reference.measure import Expected

STEP = 16  # rows that one step of the tensor cores sums
UNIT = 2.0**-23

# Token rows held in float64 at a time.
ROWS = 8192


def expected(
    means: Meaning,
    inputs: Mapping[str, Any],
    rows: Sequence[int] | Array | None = None,
    columns: Sequence[int] | Array | None = None,
) -> dict[str, Expected]:
    """dw [E, N, K] for ``rows`` (e N + n) and ``columns`` (k) of it; every one of either by default.

    And dbias [E, N] where the spec has it, for the same ``rows``.
    """
    dy, x = _factors(means, inputs)
    if dy.shape[0] != x.shape[0]:
        raise ValueError(f"dy has {dy.shape[0]} rows and x has {x.shape[0]}; they must be equal")
    ends = group_ends(inputs, x.shape[0], means)
    starts = padded_starts(ends)[:-1] if means.quant.coded_inputs else np.concatenate([[0], ends[:-1]])
    shape = (ends.size, dy.shape[1], x.shape[1])
    whole = shape if means.grouped else shape[1:]
    chosen = _chosen("rows", rows, shape[0] * shape[1])
    across = _chosen("columns", columns, shape[2])
    value = np.zeros((chosen.size, across.size))
    bias = np.zeros((chosen.size, 1))
    if means.operands["accumulate"]:
        value += _before(inputs, "dw", whole).reshape(-1, shape[2])[chosen][:, across]
        if means.operands["dbias"]:
            bias += _before(inputs, "dbias", whole[:-1]).reshape(-1, 1)[chosen]
    magnitude, bias_magnitude = np.abs(value), np.abs(bias)
    owner, down = np.divmod(chosen, max(shape[1], 1))
    steps = np.zeros(chosen.size)
    with np.errstate(all="ignore"):  # infinities and NaNs in the inputs are carried through, not reported
        for group in np.unique(owner):
            here = owner == group
            start = starts[group]
            end = start + ends[group] - (ends[group - 1] if group else 0)
            steps[here] = math.ceil((end - start) / STEP)
            for first in range(start, end, ROWS):
                part = slice(first, min(first + ROWS, end))
                left = values(dy[part][:, down[here]], means.dtype).T
                right = values(x[part][:, across], means.dtype)
                value[here] += left.astype(np.float64) @ right.astype(np.float64)
                magnitude[here] += np.abs(left).astype(np.float32) @ np.abs(right).astype(np.float32)
                if means.operands["dbias"]:
                    bias[here] += left.sum(axis=1, keepdims=True, dtype=np.float64)
                    bias_magnitude[here] += np.abs(left).sum(axis=1, keepdims=True, dtype=np.float64)
        steps = steps[:, None]
        unit = OF_FP8 / 8 if means.quant.coded_inputs else UNIT
        slack, bias_slack = (
            (unit * 8 + UNIT * 2 * np.sqrt(steps)) * sizes + UNIT * steps * np.abs(sums)
            for sizes, sums in ((magnitude, value), (bias_magnitude, bias))
        )
    limit = limit_of(means, single=True) or UNIT * (4 + int(steps.max(initial=0)))
    columns_, bound = None if columns is None else across, limit if means.out_dtype == "f32" else None
    outputs = {"dw": Expected(means.out_dtype, chosen, value, slack, columns=columns_, shape=whole, limit=bound)}
    if means.operands["dbias"]:
        outputs["dbias"] = Expected("f32", chosen, bias, bias_slack, shape=whole[:-1], limit=limit)
    return outputs


def _factors(means: Meaning, inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """dy and x, a row for each token; with FP8 the tokens are padded, and the values float64."""
    if not means.quant.coded_inputs:
        return need(inputs, "dy", 2), need(inputs, "x", 2)
    values_ = []
    for name, dtype in zip(("dy", "x"), means.factors, strict=True):
        scale = np.repeat(need(inputs, f"{name}_ts", 2).astype(np.float64), SIDE, axis=0)
        fp8 = decode(need(inputs, f"{name}_t", 2), dtype).T
        if name == "x" and means.quant.square:
            scale = np.repeat(scale, SIDE, axis=1)[:, : fp8.shape[1]]
        with np.errstate(invalid="ignore"):
            values_.append(fp8 * scale)
    return values_[0], values_[1]


def _before(inputs: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    before = need(inputs, name, len(shape))
    if before.shape != shape:
        raise ValueError(f"{name} has shape {before.shape}; dy and x make it {shape}")
    return before


def _chosen(what: str, chosen: Sequence[int] | Array | None, count: int) -> NDArray[np.int64]:
    numbers = indices(what, chosen, count, "dw has")
    return np.arange(count) if numbers is None else numbers

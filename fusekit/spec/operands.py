"""Descriptions of a launch's arguments, by operation. docs/operations.md has the same sentences."""

from collections.abc import Mapping
from typing import Any

from fusekit.plan.activations import is_backward
from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD
from fusekit.plan.operands import words as words_of
from fusekit.plan.operations import OPERATIONS, operation
from fusekit.plan.tokens import TOKENS

_OF_GROUPS = ("offsets", "arrivals")


def operands(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """The description of each argument of the kernel by name. spec: canonical. An unknown operation has none."""
    row = operation(spec.get("op"))
    if row is None or not row.words:
        return {}
    words = row.load("words")
    words_: Mapping[str, str] = words(spec) if callable(words) else words
    return words_


def gemm(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """The descriptions for a GEMM, without those of groups if it has none."""
    activation, row = spec.get("activation"), OPERATIONS[spec["op"]]
    kind = activation.get("kind", "") if isinstance(activation, Mapping) else ""
    words_ = words_of(WGRAD if row.reduces_rows else BACKWARD if is_backward(kind) else FORWARD)
    return words_ if row.ragged else {name: what for name, what in words_.items() if name not in _OF_GROUPS}


def token(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """The descriptions for an operation that works token by token."""
    return {operand.name: operand.words for operand in TOKENS[spec["op"]].operands}


def extern(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """The descriptions in the spec of a foreign kernel."""
    tables = spec.get("arguments", {})
    return {table.get("rename", name): table.get("doc", "") for name, table in tables.items()}


QUANTISE: Mapping[str, str] = {
    "x": "The rows to quantise.",
    "w": "The weights to quantise.",
    "index": "Which row of x each row is; outside [0, T): a row of zeros.",
    "inverse": "Which rows of x_q each row of x becomes; outside [0, M): none.",
    "offsets": words_of(FORWARD)["offsets"],
    "x_q": "FP8 values of x, along its rows.",
    "x_s": "Scales of those FP8 values: of a row; of 128 columns of a row, the rows side by side; or of 32 columns.",
    "x_t": "FP8 values along the tokens: of the transpose, each group from a multiple of 128 on; mxfp8: as x lies.",
    "x_ts": "Scales of those FP8 values: of 128 tokens of a column, or of 128 columns; mxfp8: of 32.",
    "x_amax": "The largest abs(x) of each group; NaN does not count.",
    "x_rht_amax": "The same of x after the rotation of 16 tokens, rounded to bf16.",
    "w_q": "FP8 values of w.",
    "w_s": "Scales of squares of 128 x 128.",
    "w_t": "The same FP8 values, each matrix transposed.",
    "w_ts": "The same scales, each matrix transposed.",
}

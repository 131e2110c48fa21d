"""What the arguments of a launch are, in words, by operation. docs/operations.md has the same sentences."""

from collections.abc import Mapping
from typing import Any

from fusekit.plan.activations import is_backward
from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD, words
from fusekit.plan.tokens import TOKENS

_OF_GROUPS = ("offsets", "arrivals")


def _dense(epilogue: str) -> Mapping[str, str]:
    return {name: what for name, what in words(epilogue).items() if name not in _OF_GROUPS}


OPERANDS: Mapping[str, Mapping[str, str]] = {
    "dense-gemm": _dense(FORWARD),
    "grouped-gemm": words(FORWARD),
    BACKWARD: words(BACKWARD),
    "dense-wgrad": _dense(WGRAD),
    "grouped-wgrad": words(WGRAD),
    **{name: {each.name: each.words for each in row.operands} for name, row in TOKENS.items()},
    "quantise": {
        "x": "The rows to quantise.",
        "w": "The weights to quantise.",
        "index": "Which row of x each row is; outside [0, T): a row of zeros.",
        "inverse": "Which rows of x_q each row of x becomes; outside [0, M): none.",
        "offsets": words(FORWARD)["offsets"],
        "x_q": "Codes of x, along its rows.",
        "x_s": "Scales of those codes: of a row; of 128 columns of a row, the rows side by side; or of 32 columns.",
        "x_t": "Codes along the tokens: of the transpose, each group from a multiple of 128 on; mxfp8: as x lies.",
        "x_ts": "Scales of those codes: of 128 tokens of a column, or of 128 columns; mxfp8: of 32.",
        "x_amax": "The largest abs(x) of each group; NaN does not count.",
        "x_rht_amax": "The same of x behind the rotation of 16 tokens, rounded to bf16.",
        "w_q": "Codes of w.",
        "w_s": "Scales of squares of 128 x 128.",
        "w_t": "The same codes, each matrix transposed.",
        "w_ts": "The same scales, each matrix transposed.",
    },
}


def operands(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """What each argument of the kernel is, by its name. spec: the canonical form; an operation not known has none."""
    if spec.get("op") == "extern":
        told = spec.get("arguments", {})
        return {table.get("rename", name): table.get("doc", "") for name, table in told.items()}
    activation = spec.get("activation")
    kind = activation.get("kind", "") if isinstance(activation, Mapping) else ""
    op = BACKWARD if is_backward(kind) else spec.get("op")
    return OPERANDS.get(op, {}) if isinstance(op, str) else {}

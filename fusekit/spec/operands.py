"""What the arguments of a launch are, in words, by operation. The page operations.md has the same sentences."""

from collections.abc import Mapping
from typing import Any

from fusekit.plan.activations import is_backward
from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD, words
from fusekit.plan.tokens import TOKENS


def _dense(epilogue: str) -> Mapping[str, str]:
    return {name: what for name, what in words(epilogue).items() if name != "offsets"}


OPERANDS: Mapping[str, Mapping[str, str]] = {
    "dense-gemm": _dense(FORWARD),
    "grouped-gemm": words(FORWARD),
    BACKWARD: words(BACKWARD),
    "dense-wgrad": _dense(WGRAD),
    "grouped-wgrad": words(WGRAD),
    **{name: {each.name: each.words for each in row.operands} for name, row in TOKENS.items()},
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

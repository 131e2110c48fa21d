"""What the arguments of a launch are, in words, by operation. The page operations.md has the same sentences."""

from collections.abc import Mapping
from typing import Any

from fusekit.plan.activations import is_backward
from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD, words

_LOGITS = "The router's logits of each token, x . Wr^T."
_MAP = "Which experts each token chose: a byte an expert, or a bit in i32 words, the lowest expert lowest."
_INDICES = "The experts of each token, best first; outside [0, X): no expert."
_INVERSE = "The row of each choice in expert order; -1: it has none."
_TOTAL = "Tokens that the counts count."
_SUM = "Sum of each token's scores before they were divided by it."

OPERANDS: Mapping[str, Mapping[str, str]] = {
    "dense-gemm": {name: what for name, what in words(FORWARD).items() if name != "offsets"},
    "grouped-gemm": words(FORWARD),
    BACKWARD: words(BACKWARD),
    "grouped-wgrad": words(WGRAD),
    "router-topk": {
        "logits": _LOGITS,
        "expert_bias": "Added to the scores for the selection alone.",
        "probs": "The weight of each expert for each token; 0 where it was not chosen.",
        "routing_map": _MAP,
        "indices": _INDICES,
        "weights": "The weights of the chosen experts, in the order of indices.",
        "scaling_factor": "Factor of the weights; left out: the spec's.",
    },
    "router-topk-bwd": {
        "logits": _LOGITS,
        "routing_map": _MAP,
        "grad_probs": "The gradient of probs.",
        "indices": _INDICES,
        "grad_weights": "The gradient of weights.",
        "grad_logits": "The gradient of logits.",
        "scaling_factor": "That of the forward pass; left out: the spec's.",
    },
    "router-aux-score": {
        "logits": _LOGITS,
        "scores": "The scores of all experts, which add up to 1 for each token.",
        "score_sum": _SUM,
        "routing_map": _MAP,
    },
    "router-aux-score-bwd": {
        "scores": "As router-aux-score stored them.",
        "score_sum": _SUM,
        "grad_scores": "The gradient of scores.",
        "grad_logits": "The gradient of logits.",
    },
    "moe-aux-loss": {
        "scores": "As router-aux-score stored them.",
        "counts": "How many tokens chose each expert.",
        "loss": "The load-balancing loss.",
        "coefficient": "Factor of the loss; left out: the spec's.",
        "total_tokens": _TOTAL,
    },
    "moe-aux-loss-bwd": {
        "counts": "How many tokens chose each expert.",
        "grad_loss": "The gradient of the loss.",
        "grad_scores": "The gradient of scores.",
        "coefficient": "That of the forward pass; left out: the spec's.",
        "total_tokens": _TOTAL,
    },
    "moe-index": {
        "indices": _INDICES,
        "offsets": words(FORWARD)["offsets"],
        "order": "Which choice t K + k each row is.",
        "inverse": _INVERSE,
        "token": "Which token each row is of; -1 beyond the last one.",
    },
    "moe-permute": {
        "x": "The rows of tokens.",
        "inverse": _INVERSE,
        "weights": "The router's weights.",
        "y": "The rows in expert order, scaled times their weights; one that no choice has is left as it was.",
        "row_scale": "The weight of each row, which the second projection takes as row_scale.",
    },
    "moe-permute-bwd": {
        "x": "The rows of tokens that a scaled moe-permute read.",
        "grad_y": "The gradient of what it gave.",
        "inverse": _INVERSE,
        "weights": "The router's weights.",
        "grad_x": "The gradient of x.",
        "grad_weights": "The gradient of weights.",
    },
    "moe-unpermute": {
        "x": "The rows in expert order.",
        "inverse": _INVERSE,
        "weights": "The router's weights.",
        "y": "The sum of each token's rows, times their weights.",
    },
    "moe-unpermute-bwd": {
        "grad_y": "The gradient of what moe-unpermute gave.",
        "x": "The rows that moe-unpermute read.",
        "inverse": _INVERSE,
        "weights": "The router's weights.",
        "grad_x": "The gradient of x.",
        "grad_weights": "The gradient of weights.",
    },
    "moe-check": {
        "offsets": "The group ends to look at.",
        "report": "Told of a wrong group: launches that told, group, begin, end, rows, launches that began to.",
        "rows": "How many rows there are.",
    },
}  # fmt: skip


def operands(spec: Mapping[str, Any]) -> Mapping[str, str]:
    """What each argument of the kernel is, by its name. spec: the canonical form; an operation not known has none."""
    if spec.get("op") == "extern":
        told = spec.get("arguments", {})
        return {table.get("rename", name): table.get("doc", "") for name, table in told.items()}
    activation = spec.get("activation")
    kind = activation.get("kind", "") if isinstance(activation, Mapping) else ""
    op = BACKWARD if is_backward(kind) else spec.get("op")
    return OPERANDS.get(op, {}) if isinstance(op, str) else {}

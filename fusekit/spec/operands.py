"""What the arguments of a launch are, in words, by operation. The page operations.md has the same sentences."""

from collections.abc import Mapping
from typing import Any

BACKWARD = "backward"  # a GEMM whose activation is a derivative

_OFFSETS = "End row of each group, cumulative, without a leading 0; rows from the last end on are spare."
_GLU = {
    "act_alpha": "alpha of the activation; left out: the spec's.",
    "act_limit": "limit of the activation, infinity for no clamp; left out: the spec's.",
    "act_up_offset": "up_offset of the activation; left out: the spec's.",
}
_FORWARD = {
    "x": "The rows to multiply. In a gradient through a layer, dY: the gradient of what the layer gave.",
    "w": "The weights; b_major says which of N and K is contiguous.",
    "y": "The result: the activation of z, times row_scale. In a gradient through a layer, dX.",
    "preactivation": "z, the activation's input, which the backward pass reads; N columns.",
    "bias": "Added to every row of a group before the activation.",
    "row_scale": "Factor of each row of y, such as its router weight.",
    "alpha": "Factor of the product before the bias: one number, or one for each group.",
    **_GLU,
}
_LOGITS = "The router's logits of each token, x . Wr^T."
_MAP = "Which experts each token chose: a byte an expert, or a bit in i32 words, the lowest expert lowest."
_INDICES = "The experts of each token, best first; outside [0, X): no expert."
_INVERSE = "The row of each choice in expert order; -1: it has none."
_TOTAL = "Tokens that the counts count."
_SUM = "Sum of each token's scores before they were divided by it."

OPERANDS: Mapping[str, Mapping[str, str]] = {
    "dense-gemm": _FORWARD,
    "grouped-gemm": _FORWARD | {"offsets": _OFFSETS},
    BACKWARD: {
        "x": "dY, the gradient of what the second projection gave.",
        "w": "The second projection's weights, those of the forward pass.",
        "preactivation": "z, as the forward pass stored it.",
        "dz": "The gradient of z, in the layout of z.",
        "y": "The activation of z once more, times row_scale: what the second weight gradient takes as x.",
        "offsets": _OFFSETS,
        "row_scale": "Factor of each row in the forward pass, such as its router weight.",
        "dprob": "The gradient of row_scale.",
        "dbias": "The gradient of the first projection's bias: dz summed over the rows of a group.",
        **_GLU,
    },
    "grouped-wgrad": {
        "dy": "The gradient of what the layer gave.",
        "x": "What the layer was given in the forward pass.",
        "dw": "The gradient of the weights, dy^T . x of each group; with accumulate it is added to what is there.",
        "offsets": _OFFSETS,
        "dbias": "The gradient of the bias: dy summed over the rows of a group.",
    },
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
        "offsets": _OFFSETS,
        "order": "Which choice t K + k each row is.",
        "inverse": _INVERSE,
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
    op = BACKWARD if isinstance(kind, str) and kind.startswith("d") else spec.get("op")
    return OPERANDS.get(op, {}) if isinstance(op, str) else {}

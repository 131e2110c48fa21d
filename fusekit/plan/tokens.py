"""The operations that work token by token: a kernel's class, and what a launch passes for it.

From an operand's row come its words, its place in the launch record, the outputs of a trial, and the bytes that a
launch moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fusekit.plan.exchange import ALL, CHOICES, GRAIN, NOTHING, coded, wide, window_bytes
from fusekit.plan.token_operation import (
    CHECK,
    EXCHANGE,
    INOUT,
    INPUT,
    NORM_TOKENS,
    OUTPUT,
    PEERS,
    PERMUTATION,
    ROUTER,
    SCALAR,
    Keys,
    Rule,
    TokenOperand,
    TokenOperation,
)


def _where(key: str, *values: Any) -> Callable[[Keys], bool]:
    """A condition: the kernel's `key` has one of these values."""
    return lambda keys: keys[key] in values


def _key(name: str) -> Callable[[Keys], Any]:
    """A condition: the kernel has this option."""
    return lambda keys: keys[name]


_COMPACT, _DENSE = _where("outputs", "compact"), _where("outputs", "dense")
_LOGITS = TokenOperand("logits", INPUT, "dtype", "T X", "The router's logits of each token, x . Wr^T.")
_GRAD_LOGITS = TokenOperand("grad_logits", OUTPUT, "dtype", "T X", "The gradient of logits.")
_CHOSEN = "The experts of each token, best first; outside [0, X): no expert."
_INDICES = TokenOperand("indices", INPUT, "i32", "T K", _CHOSEN)
_COUNTS = TokenOperand("counts", INPUT, "i32", "X", "How many tokens chose each expert.")
_SCORES = TokenOperand("scores", INPUT, "out_dtype", "T X", "As router-aux-score stored them.")
_SUM = "Sum of each token's scores before they were divided by it."
_ROW = "The row of each choice in expert order; -1: it has none."
_INVERSE = TokenOperand("inverse", INPUT, "i32", "T K", _ROW)
_WEIGHTS = TokenOperand("weights", INPUT, "f32", "T K", "The router's weights.",
                   lambda keys: keys["weighted"] or keys["scaled"])  # fmt: skip
_SCALES = TokenOperand("x_s", INPUT, "f32", "B T", "For FP8 values: the scale of each 128 elements of a row.", coded)
_ROW_SCALE = "The weight of each row, which the second projection takes as row_scale."
_GRAD_WEIGHTS = TokenOperand("grad_weights", OUTPUT, "f32", "T K", "The gradient of weights.")

_NORM_WEIGHTS = TokenOperand("w", INPUT, "dtype", "1 H", "The norm's weights.")


def _rstd(role: str) -> TokenOperand:
    return TokenOperand("rstd", role, "f32", "T", "1 / sqrt(mean of the squares + eps) of each token.")


_ADDENDS = (
    TokenOperand("addend0", INPUT, "dtype", "T H", "Added to the sum, before it is rounded.",
            lambda keys: keys["addends"] > 0),
    TokenOperand("addend1", INPUT, "dtype", "T H", "Added after addend0.", lambda keys: keys["addends"] > 1),
)  # fmt: skip
_WINDOW = TokenOperand("window", PEERS, "u8", "", "The window of each rank, in the order of ranks.", size=window_bytes)
_RANK = TokenOperand(
    "rank", SCALAR, "i32", "", "Which rank this is, from 0.", bounds=lambda keys: (0, keys["ranks"] - 1, 1)
)
_EXCHANGED = (
    _WINDOW,
    _RANK,
    TokenOperand("capacity", SCALAR, "i32", "", f"Tokens that a rank may have; a multiple of {GRAIN}, the same on all.",
            bounds=lambda keys: (GRAIN, 2**31 // (keys["ranks"] * keys["topk"]) // GRAIN * GRAIN - GRAIN, GRAIN)),
    TokenOperand("timeout", SCALAR, "i32", "", "Milliseconds that a launch waits for other ranks; left out: a minute.",
            bounds=lambda keys: (1, 2**31 - 1, 1)),
)  # fmt: skip
_FITS: Rule = (("max", 0, ("sub", "T", "capacity")), "T must be at most capacity")


def _room(keys: Keys) -> tuple[Rule, ...]:
    slots = ("mul", keys["ranks"], "capacity")
    rule = f"S must be at least {keys['ranks']} times capacity: a place for each token of each rank"
    return _FITS, (("max", 0, ("sub", slots, "S")), rule)


def _map(role: str) -> tuple[TokenOperand, ...]:
    words = "Which experts each token chose: a byte an expert, or a bit in i32 words, the lowest expert lowest."
    return (
        TokenOperand("routing_map", role, "u8", "T X", words, _where("routing_map", "bytes")),
        TokenOperand("routing_map", role, "i32", "T W", words, _where("routing_map", "bits")),
    )


def _of_rows(operand: TokenOperand) -> tuple[TokenOperand, ...]:
    """As many elements as choices, or as rows where these are bounded."""
    return (
        replace(operand, shape="TK", when=lambda keys: operand.when(keys) and not keys["bounded"]),
        replace(operand, shape="M", when=lambda keys: operand.when(keys) and keys["bounded"]),
    )


def _loss_scalars(coefficient: str) -> tuple[TokenOperand, ...]:
    both = (
        TokenOperand("coefficient", SCALAR, "f32", "", coefficient, _where("scalars", "launch")),
        TokenOperand("total_tokens", SCALAR, "i32", "", "Tokens that the counts count.", _where("scalars", "launch")),
    )
    there = [replace(operand, role=INPUT, shape="1", when=_where("scalars", "device")) for operand in both]
    return (*both, *there)


_ROWS = (
    TokenOperation(
        "router-topk",
        ROUTER,
        "fusekit.kernels.router.topk:RouterTopK",
        (
            _LOGITS,
            TokenOperand("expert_bias", INPUT, "f32", "X", "Added to the scores for the selection alone.",
                    lambda keys: keys["expert_bias"]),
            TokenOperand("probs", OUTPUT, "out_dtype", "T X",
                    "The weight of each expert for each token; 0 where it was not chosen.", _DENSE),
            *_map(OUTPUT),
            TokenOperand("indices", OUTPUT, "i32", "T K", _CHOSEN, _COMPACT),
            TokenOperand("weights", OUTPUT, "f32", "T K", "The weights of the chosen experts, in the order of indices.",
                    _COMPACT),
            TokenOperand("scaling_factor", SCALAR, "f32", "", "Factor of the weights; left out: the spec's."),
        ),
        1024,
    ),
    TokenOperation(
        "router-topk-bwd",
        ROUTER,
        "fusekit.kernels.router.topk_bwd:RouterTopKBackward",
        (
            replace(_LOGITS, when=lambda keys: keys["pre_softmax"]),
            replace(_LOGITS, when=lambda keys: not keys["pre_softmax"], sparse=True),
            *_map(INPUT),
            TokenOperand("grad_probs", INPUT, "out_dtype", "T X", "The gradient of probs.", _DENSE, sparse=True),
            TokenOperand("indices", INPUT, "i32", "T K", _CHOSEN, _COMPACT),
            TokenOperand("grad_weights", INPUT, "f32", "T K", "The gradient of weights.", _COMPACT),
            TokenOperand("addend", INPUT, "f32", "T X", "Added to the gradient, before it is rounded.",
                    lambda keys: keys["addend"]),
            replace(_GRAD_LOGITS, dtype="grad_dtype"),
            TokenOperand("scaling_factor", SCALAR, "f32", "", "That of the forward pass; left out: the spec's."),
        ),
        1024,
    ),
    TokenOperation(
        "router-aux-score",
        ROUTER,
        "fusekit.kernels.router.aux_score:RouterAuxScore",
        (
            _LOGITS,
            TokenOperand("scores", OUTPUT, "out_dtype", "T X",
                    "The scores of all experts, which add up to 1 for each token."),
            TokenOperand("score_sum", OUTPUT, "f32", "T", _SUM, lambda keys: keys["score_function"] != "softmax"),
            *_map(OUTPUT),
        ),
        1024,
    ),
    TokenOperation(
        "router-aux-score-bwd",
        ROUTER,
        "fusekit.kernels.router.aux_score:RouterAuxScoreBackward",
        (
            _SCORES,
            TokenOperand("score_sum", INPUT, "f32", "T", _SUM, lambda keys: keys["score_function"] != "softmax"),
            TokenOperand("grad_scores", INPUT, "out_dtype", "T X", "The gradient of scores."),
            _GRAD_LOGITS,
        ),
        1024,
    ),
    TokenOperation(
        "moe-aux-loss",
        ROUTER,
        "fusekit.kernels.router.aux_loss:MoeAuxLoss",
        (
            _SCORES,
            _COUNTS,
            TokenOperand("loss", OUTPUT, "f32", "1", "The load-balancing loss."),
            *_loss_scalars("Factor of the loss; left out: the spec's."),
        ),
    ),
    TokenOperation(
        "moe-aux-loss-bwd",
        ROUTER,
        "fusekit.kernels.router.aux_loss:MoeAuxLossBackward",
        (
            _COUNTS,
            TokenOperand("grad_loss", INPUT, "f32", "1", "The gradient of the loss."),
            TokenOperand("grad_scores", OUTPUT, "out_dtype", "T X", "The gradient of scores."),
            *_loss_scalars("That of the forward pass; left out: the spec's."),
        ),
    ),
    TokenOperation(
        "moe-index",
        PERMUTATION,
        "fusekit.kernels.permutation.index:MoeIndex",
        (
            _INDICES,
            _WEIGHTS,
            TokenOperand("offsets", OUTPUT, "i32", "X", "End row of each group, cumulative, without a leading 0;"
                    " rows from the last end on are spare."),
            *_of_rows(TokenOperand("order", OUTPUT, "i32", "", "Which choice t K + k each row is.")),
            TokenOperand("inverse", OUTPUT, "i32", "T K", _ROW),
            TokenOperand("counts", OUTPUT, "i32", "X", "How many choices each expert has.",
                         lambda keys: keys["counts"]),
            *_of_rows(
                TokenOperand("token", OUTPUT, "i32", "",
                             "Which token each row is of, for a GEMM that gathers; -1: no row.",
                        lambda keys: keys["tokens"]),
            ),
            *_of_rows(TokenOperand("row_scale", OUTPUT, "f32", "", _ROW_SCALE, lambda keys: keys["weighted"])),
            TokenOperand("wanted", OUTPUT, "i32", "1", "The rows that the choices would have without a bound.",
                    lambda keys: keys["bounded"]),
        ),
    ),
    TokenOperation(
        "moe-permute",
        PERMUTATION,
        "fusekit.kernels.permutation.permute:MoePermute",
        (
            TokenOperand("x", INPUT, "dtype", "T H", "The rows of tokens."),
            _SCALES,
            _INVERSE,
            _WEIGHTS,
            TokenOperand("y", OUTPUT, "dtype", "M H",
                    "The rows in expert order, scaled times their weights; one that no choice has is left as it was."),
            TokenOperand("y_s", OUTPUT, "f32", "B M", "The scales of the rows of y.", coded),
            TokenOperand("row_scale", OUTPUT, "f32", "M", _ROW_SCALE, lambda keys: keys["weighted"]),
        ),
    ),
    TokenOperation(
        "moe-permute-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.permute:MoeUnpermuteBackward",
        (
            TokenOperand("x", INPUT, "dtype", "T H", "The rows of tokens that a scaled moe-permute read."),
            TokenOperand("grad_y", INPUT, "dtype", "M H", "The gradient of what it gave."),
            _INVERSE,
            _WEIGHTS,
            TokenOperand("grad_x", OUTPUT, "dtype", "T H", "The gradient of x."),
            _GRAD_WEIGHTS,
        ),
    ),
    TokenOperation(
        "moe-unpermute",
        PERMUTATION,
        "fusekit.kernels.permutation.permute:MoeUnpermute",
        (
            TokenOperand("x", INPUT, "dtype", "M H", "The rows in expert order."),
            _INVERSE,
            _WEIGHTS,
            *_ADDENDS,
            TokenOperand("y", OUTPUT, "dtype", "T H", "The sum of each token's rows, times their weights."),
        ),
    ),
    TokenOperation(
        "moe-unpermute-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.permute:MoeUnpermuteBackward",
        (
            TokenOperand("grad_y", INPUT, "dtype", "T H", "The gradient of what moe-unpermute gave."),
            TokenOperand("x", INPUT, "dtype", "M H", "The rows that moe-unpermute read."),
            _INVERSE,
            _WEIGHTS,
            TokenOperand("grad_x", OUTPUT, "dtype", "M H", "The gradient of x."),
            _GRAD_WEIGHTS,
        ),
    ),
    TokenOperation(
        "moe-weights-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.weights:MoeWeightsBackward",
        (
            TokenOperand("dprob", INPUT, "f32", "M", "The gradient of each row's weight."),
            _INVERSE,
            replace(_INDICES, when=lambda keys: keys["addend"]),
            TokenOperand("addend", INPUT, "f32", "T X",
                         "Added for the chosen experts, such as dO . b2^T for a bias of fc2.",
                    lambda keys: keys["addend"], sparse=True),
            _GRAD_WEIGHTS,
        ),
    ),
    TokenOperation(
        "moe-bias-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.bias:MoeBiasBackward",
        (
            TokenOperand("grad_y", INPUT, "dtype", "T H", "The gradient of what a weighted moe-unpermute gave."),
            TokenOperand("token", INPUT, "i32", "M", "Which token each row is of; -1: no row."),
            TokenOperand("row_scale", INPUT, "f32", "M", "The weight of each row."),
            TokenOperand("offsets", INPUT, "i32", "X", "End row of each group, cumulative, without a leading 0."),
            TokenOperand("grad_bias", OUTPUT, "f32", "X H", "The gradient of the bias."),
        ),
    ),
    TokenOperation(
        "moe-gate",
        PERMUTATION,
        "fusekit.kernels.permutation.gate:MoeGate",
        (
            TokenOperand("x", INPUT, "dtype", "T H", "The tokens."),
            TokenOperand("w", INPUT, "dtype", "1 H", "The gate's weights."),
            TokenOperand("y", OUTPUT, "f32", "T", "The factor of each token, sigmoid(x . w)."),
        ),
    ),
    TokenOperation(
        "moe-gate-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.gate:MoeGateBackward",
        (
            TokenOperand("grad_y", INPUT, "f32", "T", "The gradient of the factors."),
            TokenOperand("scale", INPUT, "f32", "T", "The factors, as moe-gate gave them."),
            TokenOperand("w", INPUT, "dtype", "1 H", "The gate's weights."),
            TokenOperand("addend", INPUT, "dtype", "T H", "Added to the gradient of x, before it is rounded."),
            TokenOperand("grad_logits", OUTPUT, "f32", "T", "The gradient of x . w, for moe-bias-bwd as row_scale."),
            TokenOperand("token", OUTPUT, "i32", "T", "0, 1, 2, ..., for moe-bias-bwd."),
            TokenOperand("offsets", OUTPUT, "i32", "1", "T, for moe-bias-bwd."),
            TokenOperand("dx", OUTPUT, "dtype", "T H", "The gradient of x, and the addend."),
        ),
    ),
    TokenOperation(
        "moe-zero",
        PERMUTATION,
        "fusekit.kernels.permutation.zero:MoeZero",
        (
            TokenOperand("offsets", INPUT, "i32", "E", "End row of each group, cumulative, without a leading 0."),
            TokenOperand("y", OUTPUT, "dtype", "T H", "The rows; those of groups are left as they are."),
        ),
    ),
    TokenOperation(
        "router-split",
        PERMUTATION,
        "fusekit.kernels.router.terms:RouterSplit",
        (
            TokenOperand("w", INPUT, "f32", "T H", "Float32 numbers, such as a router's weights: T experts."),
            TokenOperand("terms", OUTPUT, "dtype", "M H",
                    "The numbers rounded; after these T rows, what was left of each, rounded; and so on."),
        ),
    ),
    TokenOperation(
        "router-sum",
        PERMUTATION,
        "fusekit.kernels.router.terms:RouterSum",
        (
            TokenOperand("x", INPUT, "f32", "T NX",
                         "Each token's products with the first terms, then with the second."),
            TokenOperand("bias", INPUT, "f32", "X", "Added to the sums.", lambda keys: keys["bias"]),
            TokenOperand("y", OUTPUT, "f32", "T X", "The sums of the terms' products: the logits."),
        ),
    ),
    TokenOperation(
        "rms-norm",
        PERMUTATION,
        "fusekit.kernels.permutation.norm:RmsNorm",
        (
            TokenOperand("x", INPUT, "dtype", "T H", "The tokens."),
            TokenOperand("residual", INPUT, "dtype", "T H", "Added to x, before the norm.", _key("residual")),
            _NORM_WEIGHTS,
            TokenOperand("y", OUTPUT, "dtype", "T H", "The normalised tokens, times w."),
            TokenOperand("sum", OUTPUT, "dtype", "T H", "x + residual: the next residual, and x of the backward pass.",
                    _key("residual")),
            _rstd(OUTPUT),
            TokenOperand("eps", SCALAR, "f32", "", "Added to the mean of the squares; left out: the spec's."),
        ),
    ),
    TokenOperation(
        "rms-norm-bwd",
        PERMUTATION,
        "fusekit.kernels.permutation.norm:RmsNormBackward",
        (
            TokenOperand("dy", INPUT, "dtype", "T H", "The gradient of y."),
            TokenOperand("x", INPUT, "dtype", "T H", "What the norm was of: x, or sum with a residual."),
            _NORM_WEIGHTS,
            _rstd(INPUT),
            TokenOperand("addend", INPUT, "dtype", "T H", "Added to the gradient: that of sum, by another way.",
                    _key("addend")),
            TokenOperand("dx", OUTPUT, "dtype", "T H", "The gradient of x, and of the residual."),
            TokenOperand("partial", OUTPUT, "f32", "P H", f"What {NORM_TOKENS} tokens each add to the gradient of w."),
        ),
    ),
    TokenOperation(
        "rms-norm-wgrad",
        PERMUTATION,
        "fusekit.kernels.permutation.norm:RmsNormWeights",
        (
            TokenOperand("partial", INPUT, "f32", "T H", "As rms-norm-bwd stored it."),
            TokenOperand("dw", OUTPUT, "dtype", "1 H", "The gradient of w: the sum of the rows."),
        ),
    ),
    TokenOperation(
        "moe-dispatch",
        EXCHANGE,
        "fusekit.kernels.exchange.dispatch:MoeDispatch",
        (
            TokenOperand("x", INPUT, "dtype", "T H", "The rows of tokens.", wide),
            _SCALES,
            replace(_INDICES, when=lambda keys: keys["sends"] != NOTHING),
            replace(_WEIGHTS, when=lambda keys: keys["weighted"] and keys["sends"] in (ALL, CHOICES)),
            *_EXCHANGED,
        ),
        constraints=lambda keys: () if keys["sends"] == NOTHING else (_FITS,),
    ),
    TokenOperation(
        "moe-combine",
        EXCHANGE,
        "fusekit.kernels.exchange.combine:MoeCombine",
        (
            TokenOperand("x", INPUT, "dtype", "M H", "The rows in expert order.", wide),
            TokenOperand("inverse", INPUT, "i32", "S K", _ROW, wide),
            TokenOperand("weights", INPUT, "f32", "S K", "The router's weights.", lambda keys: keys["weighted"]),
            TokenOperand("grad_weights", INPUT, "f32", "S K", "The gradient of weights.",
                         lambda keys: keys["gradients"]),
            _INDICES,
            *_ADDENDS,
            TokenOperand("wanted", INPUT, "i32", "1", "The rows that this rank's choices want; above M is an overflow.",
                    lambda keys: keys["overflow"]),
            TokenOperand("overflow", INOUT, "i32", "4", "Of launches in which a rank had one: how many; of the last,"
                    " the rank with the most rows, and these; and the most rows of all.",
                    lambda keys: keys["overflow"]),
            TokenOperand("y", OUTPUT, "dtype", "T H", "The sum of what the ranks made of each token.", wide),
            TokenOperand("returned", OUTPUT, "f32", "T K", "grad_weights, from the rank of each choice's expert.",
                    lambda keys: keys["gradients"]),
            *_EXCHANGED,
        ),
        constraints=_room,
    ),
    TokenOperation(
        "moe-check",
        CHECK,
        "fusekit.kernels.check.offsets:MoeCheck",
        (
            TokenOperand("offsets", INPUT, "i32", "E", "The group ends to look at."),
            TokenOperand("report", INOUT, "i32", "8",
                    "What is wrong: launches that finished a report, the group, its begin, its end, the rows, launches "
                    "that began one; two words are unused."),
            TokenOperand("rows", SCALAR, "i32", "", "How many rows there are."),
        ),
    ),
)  # fmt: skip
TOKENS = {row.name: row for row in _ROWS}

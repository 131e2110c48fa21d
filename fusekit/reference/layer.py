"""The definition of a mixture-of-experts layer, forward and backward, in float64.

    logits = x . router^T + router_bias                       [T, X]
    indices, weights = the router's top K                     [T, K]; rows m: the choices, sorted by expert
    z[m] = s[m] x[token[m]] . w1[e]^T + b1[e]                 s: the choice's weight with `scale = "input"`, else 1
    a[m] = activation(z[m])
    o[m] = a[m] . w2[e]^T + b2[e]
    y[t] = sum over the choices of t of r[m] o[m]             r: the choice's weight with `scale = "output"`, else 1
           + g[t] activation(x[t] . shared_w1^T) . shared_w2^T     the shared expert, which sees every token
           + residual[t]                                           if there is one; its gradient is that of y
    g[t] = sigmoid(x[t] . shared_gate), or 1 without it

No row is dropped. The choice itself has no gradient; the weights have one, through the logits. With `aux`, the logits
have a second: that of the load-balancing loss, coefficient X / (K T^2) sum over t and e of counts[e] scores[t, e], in
which the counts are constants.

Nothing here is rounded, and nothing is a kernel: the steps are those of the formulas above. With `recipe = "fp8-block"`
each operand of a projection's GEMM, forward and backward, is rounded to bf16 and then quantised and dequantised:
rows in blocks of 128 columns, weights in squares of 128, factors of a weight gradient in blocks of 128 rows of an
expert (of a shared expert: of tokens). The derivative of that rounding counts as 1. With `weights = "fp8-block"` a
weight is its FP8 value times the scale of its square of 128 x 128.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.layer.options import CHOICES, Options
from fusekit.plan.quant import NONE, SIDE
from fusekit.plan.quantise import POW2
from fusekit.reference import activations, layouts, permutation, router
from fusekit.reference.formats import Array
from fusekit.reference.formats import decode as numbers
from fusekit.reference.formats import encode as bits
from fusekit.reference.fp8 import decode
from fusekit.reference.quantise import blocks
from fusekit.spec import Activation

SCALES = ("output", "input")
WORKERS = 8  # experts whose weights are read at a time; each takes up to a gigabyte
FEW = 1 << 18  # elements of a product that one thread makes sooner than several
Tensors = Mapping[str, Array]
Sums = Callable[[Array, Array, "Kept"], Any]


class Factors:
    """The values that GEMMs of projections read: unchanged here, quantised in `Blocks`."""

    def rows(self, v: Array) -> Array:
        """Rows [M, K] as they are multiplied by weights."""
        return v

    def weights(self, w: Array) -> Array:
        """One expert's weights [N, K]."""
        return w

    def tokens(self, v: Array, owners: list[slice], squares: bool = False) -> Array:
        """Rows [M, N] that a weight gradient sums over, quantised for each of `owners`; squares: 128 x 128 blocks."""
        return v


class Blocks(Factors):
    """The values after a quantisation by "fp8-block"."""

    def rows(self, v: Array) -> Array:
        return worth(v, 1, SIDE)

    def weights(self, w: Array) -> Array:
        return worth(w, SIDE, SIDE)

    def tokens(self, v: Array, owners: list[slice], squares: bool = False) -> Array:
        result = np.zeros(v.shape)
        for group in owners:
            result[group] = worth(v[group], SIDE, SIDE if squares else 1)
        return result


def worth(v: Array, down: int, across: int) -> Array:
    """v [R, C] rounded to bf16, quantised and dequantised, with a scale for each block of `down` by `across`."""
    fp8, scale = blocks(numbers(bits(v, "bf16"), "bf16"), down, across, POW2)
    each = np.repeat(np.repeat(scale.astype(np.float64), down, axis=0), across, axis=1)
    value: Array = decode(fp8, "e4m3") * each[: v.shape[0], : v.shape[1]]
    return value


@dataclass(frozen=True, slots=True)
class Layer:
    """The options of a layer; biases and the shared expert are there where the parameters have them.

    router: keys of a compact router-topk in canonical form. scale: what the weights multiply. aux: the coefficient of
    the load-balancing loss, or None. recipe: "none" or "fp8-block". squares: "rows", their "gradients" or "",
    what has one scale for 128 tokens of 128 columns where the experts' weight gradients read it; unless "", those of a
    shared expert have it of rows. rounded: whether rows that weights have multiplied are rounded to bf16, as in memory.
    """

    router: Mapping[str, Any]
    activation: Activation
    glu_layout: str = "none"
    scale: str = "output"
    aux: float | None = None
    recipe: str = NONE
    squares: str = ""
    rounded: bool = False

    @classmethod
    def of(cls, options: Options, aux: float | None = None, rounded: bool = False) -> Layer:
        """The layer of a spec's table."""
        return cls(
            _router_keys(options), Activation(**options.activation), options.glu_layout,
            options.router.get("scale", "output"), aux, options.recipe, options.squared(options.b_major), rounded,
        )  # fmt: skip

    @property
    def factors(self) -> Factors:
        """The values that GEMMs read of their operands."""
        return Factors() if self.recipe == NONE else Blocks()


def _router_keys(o: Options) -> dict[str, Any]:
    """The keys of the compact router-topk that the definition asks for."""
    keys = {
        "op": "router-topk", "experts": max(o.experts, 1), "topk": max(o.topk, 1), "score_function": "softmax",
        "dtype": "f32", "out_dtype": "f32", "outputs": "compact", "routing_map": "none", "pre_softmax": False,
        "expert_bias": False, "num_groups": 0, "group_topk": 0, "scaling_factor": 1.0,
    }  # fmt: skip
    given_choices = o.router.get("input") == CHOICES
    return keys | ({} if given_choices else {name: o.router[name] for name in keys if name in o.router})


@dataclass(frozen=True, slots=True)
class Kept:
    """The inputs of the backward pass: x and z are the only ones of a row's size.

    x [T, H]; logits [T, X]; indices, weights [T, K]; offsets [X], token [M] and inverse [T, K] of the rows; z [M, N].
    """

    x: Array
    logits: Array
    indices: NDArray[np.int64]
    weights: Array
    offsets: Array
    token: NDArray[np.int64]
    inverse: Array
    z: Array


def forward(
    layer: Layer, x: Array, tensors: Tensors, choices: tuple[NDArray[np.int64], Array] | None = None
) -> tuple[Array, float, Kept]:
    """y [T, H], the load-balancing loss (0 without `aux`), and what `backward` takes.

    x [T, H]. tensors, by name: router [X, H]; w1 [X, N, H], N = 2I for a gated activation; w2 [X, H, I]; and, each
    optional: router_bias [X], expert_bias [X] (of the choice alone), b1 [X, N], b2 [X, H], shared_w1 [S, H],
    shared_w2 [H, J], shared_gate [1, H], residual [T, H]. choices: indices and weights [T, K] instead of the router's.
    """
    logits = x @ tensors["router"].T + tensors.get("router_bias", 0.0)
    given = {"logits": logits, "expert_bias": tensors.get("expert_bias")}
    indices = router.select(layer.router, given) if choices is None else choices[0]
    weights = router.weights(layer.router, given, indices) if choices is None else choices[1]
    rows = permutation.index(indices, layer.router["experts"])
    token = rows["order"].astype(np.int64) // layer.router["topk"]
    kept = Kept(x, logits, indices, weights, rows["offsets"], token, rows["inverse"], np.empty(0))
    into, out_of = _scales(layer, kept)
    f = layer.factors
    read = into * x[token]
    read = numbers(bits(read, "bf16"), "bf16") if layer.rounded and layer.scale == "input" else read
    z = _products(f, read, tensors["w1"], tensors.get("b1"), kept)
    a = _activated(layer, z)
    o = _products(f, a, tensors["w2"], tensors.get("b2"), kept)
    y = _by_token(out_of * o, kept)
    if "shared_w1" in tensors:
        w1, w2 = (f.weights(tensors[name]) for name in ("shared_w1", "shared_w2"))
        y += _gate(tensors, x) * (f.rows(_activated(layer, f.rows(x) @ w1.T)) @ w2.T)
    y += tensors.get("residual", 0.0)
    return y, _aux_loss(layer, kept), Kept(x, logits, indices, weights, kept.offsets, token, kept.inverse, z)


def backward(
    layer: Layer, tensors: Tensors, kept: Kept, grad_y: Array, grad_loss: float = 0.0, sums: Sums | None = None
) -> dict[str, Any]:
    """The gradient of x and of every tensor but expert_bias, by name, of the logits ("logits") and of the weights
    ("weights" [T, K]).

    grad_y [T, H]; grad_loss: of the load-balancing loss. sums: makes the gradients of w1 and w2, where those would not
    fit into memory.
    """
    into, out_of = _scales(layer, kept)
    f, owners = layer.factors, groups(kept)
    of_rows, of_gradients = (layer.squares == each for each in ("rows", "gradients"))
    a, slopes = activations.derivative(layer.activation, layer.glu_layout, kept.z)
    rows = kept.x[kept.token]
    grad_rows = grad_y[kept.token]  # of r o
    grad_a = _products(f, grad_rows, tensors["w2"].transpose(0, 2, 1), None, kept)  # of r a
    grad_z = _by_slopes(layer, out_of * grad_a, slopes)
    grad_in = _products(f, grad_z, tensors["w1"].transpose(0, 2, 1), None, kept)  # of s x
    gradients: dict[str, Any] = {
        "w1": (sums or _sums)(f.tokens(grad_z, owners, of_gradients), f.tokens(into * rows, owners, of_rows), kept),
        "w2": (sums or _sums)(f.tokens(grad_rows, owners, of_gradients), f.tokens(out_of * a, owners, of_rows), kept),
        "b1": _sums(grad_z, np.ones((len(rows), 1)), kept)[..., 0],
        "b2": _sums(out_of * grad_rows, np.ones((len(rows), 1)), kept)[..., 0],
    }
    by_row = (grad_a * a if layer.scale == "output" else grad_in * rows).sum(axis=1)
    if layer.scale == "output" and "b2" in tensors:
        by_row += (grad_rows * tensors["b2"][_owner(kept)]).sum(axis=1)
    grad_x = _by_token(into * grad_in, kept)
    if "shared_w1" in tensors:
        grad_x += _shared_gradient(layer, tensors, kept.x, grad_y, gradients)
    given = {"logits": kept.logits, "indices": kept.indices, "grad_weights": by_row[kept.inverse]}
    grad_logits = router.topk_gradient(layer.router, given)[0] + grad_loss * _aux_gradient(layer, kept)
    gradients |= {"logits": grad_logits, "router": grad_logits.T @ kept.x, "router_bias": grad_logits.sum(axis=0)}
    gradients["residual"] = grad_y
    gradients = {name: gradient for name, gradient in gradients.items() if name in tensors or name == "logits"}
    gradients["weights"] = by_row[kept.inverse]
    return gradients | {"x": grad_x + grad_logits @ tensors["router"]}


def _scales(layer: Layer, kept: Kept) -> tuple[Array, Array]:
    """The factors of each row before fc1 and after fc2, [M, 1] both."""
    by_row = np.empty((kept.token.size, 1))
    by_row[kept.inverse.reshape(-1), 0] = kept.weights.reshape(-1)
    ones = np.ones_like(by_row)
    return (by_row, ones) if layer.scale == "input" else (ones, by_row)


def groups(kept: Kept) -> list[slice]:
    """Each expert's rows."""
    return [slice(start, end) for start, end in zip([0, *kept.offsets[:-1]], kept.offsets, strict=True)]


def _owner(kept: Kept) -> NDArray[np.int64]:
    """[M]: the expert of each row."""
    return np.repeat(np.arange(len(kept.offsets)), np.diff(kept.offsets, prepend=0))


def _products(f: Factors, rows: Array, w: Array, bias: Array | None, kept: Kept) -> Array:
    """rows [M, K] by their experts' w [X, N, K], plus bias [X, N]."""
    product, rows = np.empty((len(rows), w.shape[1])), f.rows(rows)

    def multiply(expert: int, group: slice) -> None:
        product[group] = rows[group] @ f.weights(w[expert]).T + (0.0 if bias is None else bias[expert])

    # w may be read expert by expert, at a cost: only where an expert has rows
    wanted = [each for each in enumerate(groups(kept)) if each[1].start < each[1].stop]
    if product.size < FEW:
        for each in wanted:
            multiply(*each)
        return product
    with ThreadPoolExecutor(min(os.cpu_count() or 1, WORKERS)) as pool:
        for waiting in [pool.submit(multiply, *each) for each in wanted]:
            waiting.result()
    return product


def _sums(left: Array, right: Array, kept: Kept) -> Array:
    """[X, N, K]: left [M, N] transposed by right [M, K], over each expert's rows."""
    return np.stack([left[group].T @ right[group] for group in groups(kept)])


def _by_token(rows: Array, kept: Kept) -> Array:
    """[T, H]: the sum of each token's rows."""
    result: Array = rows[kept.inverse].sum(axis=1)
    return result


def _activated(layer: Layer, z: Array) -> Array:
    return activations.activate(layer.activation, layer.glu_layout, z)


def _by_slopes(layer: Layer, grad_a: Array, slopes: tuple[Array, ...]) -> Array:
    """The gradient of z from that of the activation."""
    parts = [grad_a * slope for slope in slopes]
    return parts[0] if len(parts) == 1 else layouts.join(parts[0], parts[1], layer.glu_layout)


def _shared_gradient(layer: Layer, tensors: Tensors, x: Array, grad_y: Array, gradients: dict[str, Array]) -> Array:
    """The shared expert's part of the gradient of x; those of its weights go into `gradients`."""
    f, every = layer.factors, [slice(0, len(x))]
    w1, w2 = (f.weights(tensors[name]) for name in ("shared_w1", "shared_w2"))
    a, slopes = activations.derivative(layer.activation, layer.glu_layout, f.rows(x) @ w1.T)
    grad_a, gate = f.rows(grad_y) @ w2, _gate(tensors, x)
    grad_z = _by_slopes(layer, gate * grad_a, slopes)
    gradients |= {
        "shared_w1": f.tokens(grad_z, every).T @ f.tokens(x, every, bool(layer.squares)),
        "shared_w2": f.tokens(grad_y, every).T @ f.tokens(gate * a, every, bool(layer.squares)),
    }
    result: Array = f.rows(grad_z) @ w1
    if "shared_gate" in tensors:
        grad_logit = (grad_a * a).sum(axis=1, keepdims=True) * gate * (1 - gate)
        gradients["shared_gate"] = grad_logit.T @ x
        result += grad_logit * tensors["shared_gate"]
    return result


def _gate(tensors: Tensors, x: Array) -> Any:
    """[T, 1]: the factor of the shared expert's rows, 1 without a gate."""
    if "shared_gate" not in tensors:
        return 1.0
    return permutation.gate(x, tensors["shared_gate"])[:, None]


def _loss_factor(layer: Layer, kept: Kept) -> Array:
    """[X]: what the loss multiplies an expert's scores by."""
    counts = np.diff(kept.offsets, prepend=0)
    given = {"coefficient": layer.aux, "total_tokens": max(len(kept.x), 1)}
    factor: Array = router.loss_factor({**layer.router, "coefficient": layer.aux}, given) * counts
    return factor


def _aux_loss(layer: Layer, kept: Kept) -> float:
    if layer.aux is None:
        return 0.0
    scores, _ = router.aux_scores(layer.router, {"logits": kept.logits})
    return float((scores @ _loss_factor(layer, kept)).sum())


def _aux_gradient(layer: Layer, kept: Kept) -> Array:
    """[T, X]: the gradient of the loss by the logits."""
    if layer.aux is None:
        return np.zeros_like(kept.logits)
    scores, total = router.aux_scores(layer.router, {"logits": kept.logits})
    given = {"scores": scores, "grad_scores": np.tile(_loss_factor(layer, kept), (len(scores), 1))}
    if total is not None:
        given["score_sum"] = total[:, 0]
    return router.aux_gradient({**layer.router, "out_dtype": "f32"}, given)[0]

"""The definitions of the router's operations, in float64.

Selection compares logits where the score function rises with them and nothing is added: there the choice is exact, and
a kernel's must be the same. Ties go to the lower expert; -0 equals 0; a NaN ranks above everything, so that it shows in
the weights. With an expert bias or with groups, scores are compared that a kernel computes in float32: a choice is
right if none left out beats one taken by more than rounding.

NaN and infinity then follow arithmetic: a NaN among the logits that a sum runs over makes all its weights NaN; so does
+infinity in a softmax, and a softmax of minus infinities alone. sigmoid is 0 and 1 at the infinities, sqrtsoftplus 0
and infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array, values
from fusekit.reference.tokens import canonical

if TYPE_CHECKING:
    from fusekit.spec import RouterSpec

EPSILON = 1e-20  # added to the sum that scores are divided by

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def route(spec: RouterSpec | Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs of a router operation, unrounded float64 except `routing_map` and `indices`.

    ``inputs`` by argument name: logits, scores, probs' and scores' gradients [T, X] as float32 or uint16 bf16 bits;
    expert_bias, score_sum, grad_weights, addend, grad_loss [1] float32; counts int32 [X]; coefficient, total_tokens
    and, for moe-aux-loss-bwd, tokens (T) are numbers, the first two arrays of one from the device; routing_map
    uint8 [T, X] or int32 [T, ceil(X / 32)]; indices int32.
    """
    keys = canonical(spec)
    with np.errstate(all="ignore"):  # NaN and infinity are carried through, not reported
        match keys["op"]:
            case "router-topk":
                chosen = select(keys, inputs)
                return choice_outputs(keys, chosen, weights(keys, inputs, chosen))
            case "router-aux-score":
                scores, total = aux_scores(keys, inputs)
                outputs: dict[str, Array] = {"scores": scores}
                if total is not None:
                    outputs["score_sum"] = total[:, 0]
                return outputs | {"routing_map": pack_map(keys, select(keys, inputs))}
            case "router-topk-bwd":
                return {"grad_logits": topk_gradient(keys, inputs)[0] + addend(keys, inputs)}
            case "router-aux-score-bwd":
                return {"grad_logits": aux_gradient(keys, inputs)[0]}
            case "moe-aux-loss":
                scores = values(inputs["scores"], keys["out_dtype"]).astype(np.float64)
                return {"loss": loss_factor(keys, inputs) * (scores @ inputs["counts"]).sum(keepdims=True)}
            case "moe-aux-loss-bwd":
                gradient = loss_factor(keys, inputs) * float(inputs["grad_loss"][0]) * inputs["counts"]
                return {"grad_scores": np.tile(gradient, (inputs["tokens"], 1))}
            case op:
                raise ValueError(f"op {op!r}; this is the reference of the router's operations")


def score(function: str, x: Array) -> Floats:
    """sigmoid or sqrtsoftplus of float64 logits."""
    tail = np.exp(-np.abs(x))
    if function == "sigmoid":
        return np.where(x < 0, tail, 1.0) / (1.0 + tail)
    result: Floats = np.sqrt(np.maximum(x, 0.0) + np.log1p(tail))
    return result


def slope(function: str, x: Array) -> Floats:
    """The derivative of `score`."""
    tail = np.exp(-np.abs(x))
    if function == "sigmoid":
        result: Floats = tail / (1.0 + tail) ** 2
        return result
    y = score(function, x)
    return np.where(y == 0.0, 0.0, score("sigmoid", x) / np.where(y == 0.0, 1.0, 2.0 * y))  # 0 far below, as e^(x/2)


def spread(x: Array) -> Floats:
    """How far values lie below their row's maximum, 150 at most: beyond that a float32 exponential is 0 anyway."""
    below: Floats = np.minimum(x.max(axis=-1, keepdims=True) - x, 150.0)
    return np.where(np.isnan(below), 0.0, below)


def softmax(x: Array) -> Floats:
    """Along the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return result


def best(x: Array, count: int) -> Indices:
    """[..., count]: the columns of the largest values, best first."""
    return np.argsort(~order_of(x), axis=-1, kind="stable")[..., :count]


def order_of(x: Array) -> Array:
    """Unsigned numbers in the order of the values; equal for equal values, NaN the largest."""
    kind, unsigned, top = (
        (np.int32, np.uint32, np.uint32(1 << 31))
        if x.dtype == np.float32
        else (np.int64, np.uint64, np.uint64(1 << 63))
    )
    bits: Any = np.where(np.isnan(x), np.abs(np.asarray(np.nan, x.dtype)), x + x.dtype.type(0)).view(kind)
    return np.asarray(np.where(bits < 0, ~bits.view(unsigned), bits.view(unsigned) | top))


def exact(spec: RouterSpec | Mapping[str, Any]) -> bool:
    """Whether the choice is the same in any precision."""
    keys = canonical(spec)
    return not keys["expert_bias"] and not keys["num_groups"]


def selection_scores(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """[T, X] what experts are selected by, and what group scores are sums of; float32 logits or float64 scores."""
    logits = values(inputs["logits"], keys["dtype"]) if keys["dtype"] == "bf16" else np.asarray(inputs["logits"])
    if exact(keys):
        return logits, logits
    x = logits.astype(np.float64)
    if keys["score_function"] == "softmax":
        return x, softmax(x) if keys["pre_softmax"] else x
    scores = score(keys["score_function"], x)
    if keys["expert_bias"]:
        scores = scores + np.asarray(inputs["expert_bias"], dtype=np.float64)
    return scores, scores


def select(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> Indices:
    """int64[T, K]: the chosen experts, best first."""
    by, summed = selection_scores(keys, inputs)
    if not keys["num_groups"]:
        return best(by, keys["topk"])
    sums = group_scores(keys, summed)
    kept = best(sums, keys["group_topk"])
    allowed = np.zeros(sums.shape, dtype=bool)
    np.put_along_axis(allowed, kept, True, axis=-1)
    allowed = np.repeat(allowed, keys["experts"] // keys["num_groups"], axis=-1)
    order = np.where(allowed, order_of(by), 0)
    return np.argsort(~order, axis=-1, kind="stable")[..., : keys["topk"]]


def group_scores(keys: Mapping[str, Any], summed: Array) -> Floats:
    """float64[T, groups]: the sum of each group's best topk / group_topk scores."""
    grouped = summed.reshape(len(summed), keys["num_groups"], keys["experts"] // keys["num_groups"]).astype(np.float64)
    members = best(grouped, keys["topk"] // keys["group_topk"])
    sums: Floats = np.take_along_axis(grouped, members, axis=-1).sum(axis=-1)
    return sums


def logits_of(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> Floats:
    """The logits in float64."""
    return values(inputs["logits"], keys["dtype"]).astype(np.float64)


def normalised(keys: Mapping[str, Any]) -> bool:
    """Whether the scores of chosen experts are divided by their sum."""
    return bool(keys["score_function"] != "softmax" and keys["topk"] > 1)


def factor(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> float:
    """The scaling factor: the launch's, else the spec's."""
    return float(np.float32(inputs.get("scaling_factor", keys["scaling_factor"])))


def weights(keys: Mapping[str, Any], inputs: Mapping[str, Any], chosen: Indices) -> Floats:
    """float64[T, K]: the weights of the chosen experts."""
    x = logits_of(keys, inputs)
    picked = np.take_along_axis(x, chosen, axis=1)
    if keys["score_function"] == "softmax":
        weights = np.take_along_axis(softmax(x), chosen, axis=1) if keys["pre_softmax"] else softmax(picked)
    else:
        weights = score(keys["score_function"], picked)
        if normalised(keys):
            weights = weights / (weights.sum(axis=1, keepdims=True) + EPSILON)
    return weights * factor(keys, inputs)


def weight_spread(keys: Mapping[str, Any], inputs: Mapping[str, Any], chosen: Indices) -> Floats:
    """float64[T, K]: `spread` of the chosen experts among those that the softmax runs over; 0 without a softmax."""
    if keys["score_function"] != "softmax":
        return np.zeros(chosen.shape)
    x = logits_of(keys, inputs)
    if keys["pre_softmax"]:
        return np.take_along_axis(spread(x), chosen, axis=1)
    return spread(np.take_along_axis(x, chosen, axis=1))


def choice_outputs(keys: Mapping[str, Any], chosen: Indices, weights: Floats) -> dict[str, Array]:
    """Choices and their weights as the outputs of router-topk."""
    if keys["outputs"] == "compact":
        return {"indices": chosen.astype(np.int32), "weights": weights}
    probs = np.zeros((chosen.shape[0], keys["experts"]))
    np.put_along_axis(probs, chosen, weights, axis=1)
    return {"probs": probs, "routing_map": pack_map(keys, chosen)}


def pack_map(keys: Mapping[str, Any], chosen: Indices) -> Array:
    """The routing map of choices: uint8 [T, X], or int32 [T, ceil(X / 32)] with the lowest expert in the lowest bit."""
    flags = np.zeros((chosen.shape[0], keys["experts"]), dtype=bool)
    np.put_along_axis(flags, chosen, True, axis=1)
    return pack_flags(keys, flags)


def pack_flags(keys: Mapping[str, Any], flags: NDArray[np.bool_]) -> Array:
    """The routing map of bool[T, X]; see `pack_map`."""
    if keys["routing_map"] != "bits":
        return flags.astype(np.uint8)
    padded = np.zeros((len(flags), -(-keys["experts"] // 32) * 32), dtype=bool)
    padded[:, : keys["experts"]] = flags
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def unpack_map(keys: Mapping[str, Any], routing_map: Array) -> NDArray[np.bool_]:
    """bool[T, X]: which experts a map chooses."""
    if keys["routing_map"] != "bits":
        return np.asarray(np.asarray(routing_map) != 0)
    rows = np.ascontiguousarray(routing_map).view(np.uint8)
    return np.unpackbits(rows, axis=1, bitorder="little", count=keys["experts"]).astype(bool)


def aux_scores(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Floats, Floats | None]:
    """float64[T, X] scores over all experts, and what they were divided by [T, 1], if that is an output."""
    x = logits_of(keys, inputs)
    if keys["score_function"] == "softmax":
        return softmax(x), None
    scores = score(keys["score_function"], x)
    total = scores.sum(axis=1, keepdims=True) + EPSILON
    return scores / total, total


def topk_gradient(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """float64[T, X]: the gradient of the logits, and the sum of the magnitudes that it is a difference of.

    An addend is not part of it.
    """
    x = logits_of(keys, inputs)
    if keys["outputs"] == "compact":
        chosen = np.zeros(x.shape, dtype=bool)
        gradient = np.zeros(x.shape)
        indices = np.asarray(inputs["indices"], dtype=np.int64)
        token, choice = np.nonzero((indices >= 0) & (indices < keys["experts"]))
        expert = indices[token, choice]
        chosen[token, expert], gradient[token, expert] = True, inputs["grad_weights"][token, choice]
    else:
        chosen = unpack_map(keys, inputs["routing_map"])
        gradient = np.where(chosen, values(inputs["grad_probs"], keys["out_dtype"]).astype(np.float64), 0.0)
    gradient = np.where(chosen, gradient * factor(keys, inputs), 0.0)
    if keys["score_function"] == "softmax":
        scores = softmax(x) if keys["pre_softmax"] else softmax(np.where(chosen, x, -np.inf))
        return _softmax_gradient(np.where(chosen | keys["pre_softmax"], scores, 0.0), gradient)
    scores = np.where(chosen, score(keys["score_function"], x), 0.0)
    slopes = np.where(chosen, slope(keys["score_function"], x), 0.0)
    total = scores.sum(axis=1, keepdims=True) + EPSILON if normalised(keys) else None
    return _score_gradient(scores, slopes, gradient, total, chosen)


def addend(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> Array:
    """The term that router-topk-bwd adds to the gradient: [T, X], or 0."""
    return np.asarray(inputs["addend"] if keys.get("addend") else 0.0, dtype=np.float64)


def aux_gradient(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """As `topk_gradient`, of router-aux-score: from its own scores and score_sum."""
    y = values(inputs["scores"], keys["out_dtype"]).astype(np.float64)
    gradient = values(inputs["grad_scores"], keys["out_dtype"]).astype(np.float64)
    if keys["score_function"] == "softmax":
        return _softmax_gradient(y, gradient)
    total = inputs["score_sum"].astype(np.float64)[:, None]
    scores = y * total
    if keys["score_function"] == "sigmoid":
        slopes = scores * (1.0 - scores)
    else:
        # sigmoid(x) / (2 s) with sigmoid(x) = 1 - e^(-s^2)
        slopes = np.where(scores == 0.0, 0.0, -np.expm1(-(scores**2)) / np.where(scores == 0.0, 1.0, 2.0 * scores))
    result, size = _score_gradient(scores, slopes, gradient, total, np.ones(y.shape, dtype=bool))
    if keys["score_function"] == "sigmoid":
        # y S is rounded before it is taken from 1: near 1 that is a fixed error of the slope, a sixteenth of what is
        # allowed in proportion.
        size += _score_gradient(scores, scores / 16, gradient, total, np.ones(y.shape, dtype=bool))[1]
    return result, size


def loss_factor(keys: Mapping[str, Any], inputs: Mapping[str, Any]) -> float:
    """The factor of the sum of counts and scores: coefficient * experts / (topk * total_tokens^2).

    From the device, less than 1 token counts as 1.
    """
    coefficient = np.asarray(inputs.get("coefficient", keys["coefficient"]), np.float32).item()
    total = int(np.asarray(inputs["total_tokens"]).item())
    if keys.get("scalars") == "device":
        total = max(total, 1)
    return float(coefficient) * float(keys["experts"]) / float(keys["topk"]) / float(total) ** 2


def _softmax_gradient(probs: Floats, gradient: Floats) -> tuple[Floats, Floats]:
    terms = probs * gradient
    result = probs * (gradient - terms.sum(axis=1, keepdims=True))
    return result, np.abs(probs) * (np.abs(gradient) + np.abs(terms).sum(axis=1, keepdims=True))


def _score_gradient(
    scores: Floats, slopes: Floats, gradient: Floats, total: Floats | None, where: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    if total is None:
        return gradient * slopes, np.abs(gradient * slopes)
    terms = scores / total * gradient
    result = (gradient - terms.sum(axis=1, keepdims=True)) / total * slopes
    size = (np.abs(gradient) + np.abs(terms).sum(axis=1, keepdims=True)) / np.abs(total) * np.abs(slopes)
    return np.where(where, result, 0.0), np.where(where, size, 0.0)

"""The definitions of the operations between router and GEMM, their random inputs, and checks of a kernel's outputs.

Rows are choices sorted by expert, those of one expert in the order of t * K + k. ``inverse`` says which row a choice
is, -1 for a choice of no expert of [0, experts); ``order`` says which choice a row is, for the rows that there are;
``token`` says which token a row is of, and -1 for rows that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fusekit.plan.quantise import SIDE
from fusekit.plan.token_operation import NORM_TOKENS
from fusekit.reference.formats import Array, decode, encode, poisoned, values
from fusekit.reference.inputs import bits
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.reference.tokens import GROUPS, canonical

if TYPE_CHECKING:
    from fusekit.spec import PermutationSpec

# Float32 sums of K products, or of H for a weight's gradient, against the sum of magnitudes.
ARITHMETIC = 2.0**-20
MADE_UP_EXPERTS = 61
DROPPED = 0.02  # share of random choices
CHUNK = 4 * 10**6  # elements that are widened to float64 at a time
SAMPLED = 10**8  # elements of a large problem that sums are compared for, in about a second

# Which input has a row for each token, and which has one for each row of an expert.
BY_TOKEN = {"moe-permute": "x", "moe-permute-bwd": "x", "moe-unpermute-bwd": "grad_y"}
NORMS = ("rms-norm", "rms-norm-bwd", "rms-norm-wgrad")
BY_EXPERT = {"moe-permute-bwd": "grad_y", "moe-unpermute": "x", "moe-unpermute-bwd": "x"}


def index(indices: Array, experts: int, bound: int | None = None) -> dict[str, Array]:
    """Sorts the choices [T, K] by expert: offsets int32[experts], order int32[rows], inverse int32[T, K], token
    int32[T K], and wanted int32[1], the rows without `bound`. bound: the most rows; token then has as many elements.
    """
    flat = np.asarray(indices).reshape(-1).astype(np.int64)
    owned = (flat >= 0) & (flat < experts)
    order = np.argsort(np.where(owned, flat, experts), kind="stable")[: int(owned.sum())]
    wanted, order = order.size, order[:bound]
    inverse = np.full(flat.size, -1, dtype=np.int32)
    inverse[order] = np.arange(order.size, dtype=np.int32)
    token = np.full(flat.size if bound is None else bound, -1, dtype=np.int32)
    token[: order.size] = order // max(np.shape(indices)[1], 1)
    offsets = np.minimum(np.cumsum(np.bincount(flat[owned], minlength=experts)[:experts]), order.size)
    return {
        "wanted": np.array([wanted], np.int32),
        "offsets": offsets.astype(np.int32),
        "order": order.astype(np.int32),
        "inverse": inverse.reshape(np.shape(indices)),
        "token": token,
    }


def unpermute(x: Array, inverse: Array, weights: Array | None) -> tuple[Array, Array]:
    """float64[T, H]: the weighted sum of each token's rows of x (float64 [M, H]), and the sum of magnitudes."""
    there = inverse >= 0
    factor = np.where(there, 1.0 if weights is None else weights.astype(np.float64), 0.0)
    total = np.zeros((len(inverse), x.shape[1]))
    size = np.zeros_like(total)
    for k in range(inverse.shape[1]):
        rows = rows_of(x, inverse[:, k]) * factor[:, k, None]
        total += rows
        size += np.abs(rows)
    return total, size


def rows_of(x: Array, inverse: Array) -> Array:
    """The rows of x [M, H] that an index names, zeros where it is -1, also where there are none."""
    there = inverse >= 0
    result: Array = np.zeros((*inverse.shape, x.shape[1]))
    result[there] = x[inverse[there]]
    return result


def spread(x: Array, weights: Array) -> Array:
    """float64[T, K, H]: each token's row of x (float64 [T, H]) times the weight of each of its choices."""
    products: Array = weights.astype(np.float64)[..., None] * x[:, None, :]
    return products


def weight_gradient(by_token: Array, by_expert: Array, inverse: Array) -> tuple[Array, Array]:
    """float64[T, K]: products of a token's row ([T, H]) and its choices' rows ([M, H]), and the magnitudes summed."""
    there = (inverse >= 0)[..., None]
    products = np.where(there, rows_of(by_expert, inverse) * np.where(there, by_token[:, None, :], 0.0), 0.0)
    return products.sum(axis=-1), np.abs(products).sum(axis=-1)


def by_choice(inputs: Mapping[str, Any]) -> Array:
    """[T, K]: dprob [M] of each choice's row, and addend [T, X] of its expert if there is one; 0 without a row."""
    there = inputs["inverse"] >= 0
    gradient = inputs["dprob"][np.where(there, inputs["inverse"], 0)] if inputs["dprob"].size else np.zeros(there.shape)
    if "addend" in inputs:
        experts = inputs["addend"].shape[1]
        known = there & (inputs["indices"] >= 0) & (inputs["indices"] < experts)
        more = np.take_along_axis(inputs["addend"], np.where(known, inputs["indices"], 0).astype(np.int64), axis=1)
        gradient = gradient + np.where(known, more, 0)
    return np.where(there, gradient, 0)


def bias_gradient(grad_y: Array, token: Array, row_scale: Array, offsets: Array) -> tuple[Array, Array]:
    """float64[X, H]: of each expert the sum of its rows' grad_y ([T, H]) times row_scale, and the magnitudes summed."""
    total = np.zeros((offsets.size, grad_y.shape[1]))
    size = np.zeros_like(total)
    for expert, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        rows = row_scale[start:end, None].astype(np.float64) * grad_y[token[start:end]]
        total[expert], size[expert] = rows.sum(axis=0), np.abs(rows).sum(axis=0)
    return total, size


def gate(x: Array, w: Array) -> Array:
    """[T]: sigmoid(x . w) of each token of x [T, H]; w [1, H]."""
    with np.errstate(over="ignore"):
        factors: Array = 1 / (1 + np.exp(-(x @ w[0])))
    return factors


def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """y [T, H] and rstd [T]: the norm of x [T, H] by its root mean square, times w [1, H]."""
    rstd: Array = 1 / np.sqrt(np.square(x).mean(axis=1) + eps)
    return x * rstd[:, None] * w, rstd


def rms_norm_gradient(dy: Array, x: Array, w: Array, rstd: Array) -> tuple[Array, Array]:
    """The gradient of x [T, H], and [T, H] what each token adds to that of w."""
    normal, gradient = x * rstd[:, None], dy * w
    return rstd[:, None] * (gradient - normal * (gradient * normal).mean(axis=1)[:, None]), dy * normal


def split(w: Array, terms: int) -> Array:
    """uint16[terms * T, H]: bf16 terms of float32 numbers [T, H], each of what the ones before have left."""
    parts, rest = [], np.asarray(w, np.float32)
    with np.errstate(invalid="ignore"):
        for _ in range(terms):
            parts.append(encode(rest, "bf16"))
            rest = rest - decode(parts[-1], "bf16")
            rest = np.where(np.isnan(rest), np.float32(0), rest)
    return np.concatenate(parts)


def summed(x: Array, terms: int, bias: Array | None) -> Array:
    """float32[T, X]: the sum of the terms of x [T, terms * X], the last first, and then the bias [X]."""
    parts = x.reshape(len(x), terms, x.shape[1] // terms)
    with np.errstate(all="ignore"):
        sums: Array = parts[:, -1]
        for term in reversed(range(terms - 1)):
            sums = sums + parts[:, term]
        return sums if bias is None else sums + bias


def permutation_inputs(
    spec: PermutationSpec | Mapping[str, Any], *, T: int, H: int, seed: int = 0, indices: Array | None = None
) -> dict[str, Any]:
    """Every input of a permutation operation by its argument name. indices: instead of uneven random ones."""
    keys = canonical(spec)
    rng = np.random.default_rng(seed)
    inputs: dict[str, Any]
    topk = keys["topk"]
    experts = keys["experts"] or MADE_UP_EXPERTS
    if keys["op"] == "router-split":
        return {"w": rng.standard_normal((T, H), np.float32)}
    if keys["op"] == "router-sum":
        inputs = {"x": rng.standard_normal((T, keys["terms"] * keys["experts"]), np.float32)}
        return inputs | ({"bias": rng.standard_normal(experts, np.float32)} if keys["bias"] else {})
    if keys["op"] in ("moe-gate", "moe-gate-bwd"):
        return _gate_inputs(keys, T, H, seed)
    if keys["op"] in NORMS:
        return _norm_inputs(keys, T, H, seed)
    if keys["op"] == "moe-zero":
        ends = np.sort(rng.integers(0, T - T // 4 + 1, GROUPS))
        return {"offsets": ends.astype(np.int32)}
    if indices is None:
        weights = rng.uniform(0.5, 1.5, experts)
        indices = rng.choice(experts, (T, topk), p=weights / weights.sum()).astype(np.int32)
        indices[rng.random((T, topk)) < DROPPED] = -1
    if keys["op"] == "moe-index":
        more = {"weights": rng.standard_normal((T, topk), np.float32)} if keys["weighted"] else {}
        return {"indices": indices, **more}
    if keys["op"] == "moe-weights-bwd":
        inputs = {"inverse": index(indices, experts)["inverse"], "dprob": rng.standard_normal(T * topk, np.float32)}
        if keys["addend"]:
            inputs |= {"indices": indices, "addend": rng.standard_normal((T, experts), np.float32)}
        return inputs

    def matrix(rows: int, number: int) -> Array:
        if keys["dtype"] == "bf16":
            return bits((rows, H), "bf16", seed + number)
        if keys["dtype"] == "e4m3":
            return rng.integers(0, 256, (rows, H), np.uint8)
        return rng.standard_normal((rows, H), dtype=np.float32)

    if keys["op"] == "moe-bias-bwd":
        order = index(indices, experts)
        scales = rng.standard_normal(T * topk, np.float32)
        return {"grad_y": matrix(T, 1), "token": order["token"], "row_scale": scales, "offsets": order["offsets"]}
    inputs = {}
    if keys["op"] in BY_TOKEN:
        inputs[BY_TOKEN[keys["op"]]] = matrix(T, 1)
        if keys["dtype"] == "e4m3":
            inputs["x_s"] = rng.standard_normal((-(-H // SIDE), T), np.float32)
    if keys["op"] in BY_EXPERT:
        inputs[BY_EXPERT[keys["op"]]] = matrix(T * topk, 2)
    for number in range(keys["addends"]):
        inputs[f"addend{number}"] = matrix(T, 3 + number)
    inputs["inverse"] = index(indices, experts)["inverse"]
    if keys["weighted"] or keys["scaled"]:
        inputs["weights"] = rng.standard_normal((T, topk), dtype=np.float32)
    return inputs


def permutation_check(
    spec: PermutationSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> tuple[list[Measurement], list[str]]:
    """Measures sums, compares what is moved bit for bit, and looks for writes to rows that no choice has."""
    keys = canonical(spec)
    if keys["op"] == "moe-index":
        return [], _check_index(index(inputs["indices"], keys["experts"]), inputs, outputs)
    if keys["op"] == "moe-weights-bwd":
        return [], _differ("grad_weights", outputs["grad_weights"], by_choice(inputs))
    if keys["op"] == "moe-bias-bwd":
        grad_y = _wide(keys, inputs["grad_y"])
        with np.errstate(invalid="ignore"):  # of a NaN
            sums = bias_gradient(grad_y, inputs["token"], inputs["row_scale"], inputs["offsets"])
        longest = np.diff(inputs["offsets"], prepend=0).max()
        # Of n terms of either sign, one after the other, rounding leaves 2**-24 sqrt(n) of the sum.
        return [_measure("grad_bias", outputs["grad_bias"], "f32", *sums, 2.0**-24 * float(np.sqrt(longest)))], []
    if keys["op"] in ("moe-gate", "moe-gate-bwd"):
        return _check_gate(keys, inputs, outputs)
    if keys["op"] in NORMS:
        return _check_norm(keys, inputs, outputs), []
    if keys["op"] == "moe-zero":
        return [], _check_zero(inputs["offsets"], outputs["y"])
    if keys["op"] == "router-split":
        want = decode(split(inputs["w"], keys["terms"]), "bf16")
        return [], _differ("terms", values(outputs["terms"], "bf16"), want)
    if keys["op"] == "router-sum":
        return [], _differ("y", outputs["y"], summed(inputs["x"], keys["terms"], inputs.get("bias")))
    inverse = inputs["inverse"]
    measured: list[Measurement] = []
    by_row = {"moe-permute": ("y", "row_scale"), "moe-unpermute-bwd": ("grad_x",)}.get(keys["op"], ())
    problems = _strays(inverse, {name: outputs[name] for name in by_row if name in outputs})
    problems += _strays(inverse, {"y_s": outputs["y_s"].T} if "y_s" in outputs else {})
    if keys["op"] == "moe-permute" and not keys["scaled"]:
        return measured, problems + _check_permute(inputs, outputs)
    width = next(array.shape[1] for name, array in outputs.items() if name in ("y", "grad_x"))
    step = max(1, CHUNK // (width * (keys["topk"] + 1)))
    chosen = _sample(len(inverse), max(step, SAMPLED // (width * (keys["topk"] + 1))))
    for start in range(0, len(chosen), step):
        measured += _check_tokens(keys, inputs, outputs, chosen[start : start + step])
    return measured, problems


def _sample(tokens: int, most: int) -> Array:
    """All tokens, or `most` of them at even distances, the first and the last among them."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, most)).astype(np.int64))


def _wide(keys: Mapping[str, Any], array: Array) -> Array:
    return values(array, keys["dtype"]).astype(np.float64)


def _measure(name: str, got: Array, dtype: str, want: Array, size: Array, least: float = 0.0) -> Measurement:
    limit = 2.0**-8 if dtype == "bf16" else max(ARITHMETIC, least)
    return measure(name, got, Expected(dtype, np.arange(len(got)), want, size * ARITHMETIC, limit=limit))


def _gate_inputs(keys: Mapping[str, Any], tokens: int, hidden: int, seed: int) -> dict[str, Array]:
    """Products have a spread of about 1."""
    rng = np.random.default_rng(seed)

    def numbers(rows: int, spread: float = 1.0) -> Array:
        array = (spread * rng.standard_normal((rows, hidden))).astype(np.float32)
        return encode(array, "bf16") if keys["dtype"] == "bf16" else array

    w = numbers(1, hidden**-0.5)
    if keys["op"] == "moe-gate":
        return {"x": numbers(tokens), "w": w}
    factors = {"grad_y": rng.standard_normal(tokens, np.float32), "scale": rng.random(tokens, np.float32)}
    return {**factors, "w": w, "addend": numbers(tokens)}


def _check_gate(
    keys: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> tuple[list[Measurement], list[str]]:
    w = _wide(keys, inputs["w"])
    if keys["op"] == "moe-gate":
        x = _wide(keys, inputs["x"])
        with np.errstate(invalid="ignore"):
            size = (np.abs(x) @ np.abs(w[0]) + 1)[:, None]  # of what rounding moves the factor by, at most
            return [_measure("y", outputs["y"][:, None], "f32", gate(x, w)[:, None], size)], []
    scale = inputs["scale"].astype(np.float64)
    gradient = inputs["grad_y"] * scale * (1 - scale)
    addend = _wide(keys, inputs["addend"])
    dx = addend + gradient[:, None] * w
    size = np.abs(addend) + np.abs(gradient[:, None] * w)
    measured = [
        _measure(
            "grad_logits", outputs["grad_logits"][:, None], "f32", gradient[:, None], np.abs(inputs["grad_y"])[:, None]
        ),
        _measure("dx", outputs["dx"], keys["dtype"], dx, size),
    ]  # fmt: skip
    rows = np.arange(len(scale), dtype=np.int32)
    problems = [] if np.array_equal(outputs["token"], rows) else ["token: it does not count the rows"]
    return measured, problems + ([] if outputs["offsets"].tolist() == [len(rows)] else ["offsets: it is not T"])


def _norm_inputs(keys: Mapping[str, Any], tokens: int, hidden: int, seed: int) -> dict[str, Array]:
    """Tokens of different sizes; rstd is theirs."""
    rng = np.random.default_rng(seed)

    def numbers(rows: int, mean: float = 0.0) -> Array:
        array = (mean + rng.standard_normal((rows, hidden)) * np.exp2(rng.integers(-3, 4, (rows, 1)))).astype(
            np.float32
        )
        return encode(array, "bf16") if keys["dtype"] == "bf16" else array

    if keys["op"] == "rms-norm-wgrad":
        return {"partial": rng.standard_normal((tokens, hidden), np.float32)}
    x, w = numbers(tokens), numbers(1, 1.0)
    if keys["op"] == "rms-norm":
        return {"x": x, **({"residual": numbers(tokens)} if keys["residual"] else {}), "w": w}
    rstd = rms_norm(_wide(keys, x), _wide(keys, w), 1e-6)[1].astype(np.float32)
    inputs = {"dy": numbers(tokens), "x": x, "w": w, "rstd": rstd}
    return inputs | ({"addend": numbers(tokens)} if keys["addend"] else {})


def _check_norm(keys: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]) -> list[Measurement]:
    dtype = keys["dtype"]
    if keys["op"] == "rms-norm-wgrad":
        partial = inputs["partial"].astype(np.float64)
        size = np.abs(partial).sum(axis=0, keepdims=True)
        return [_measure("dw", outputs["dw"], dtype, partial.sum(axis=0, keepdims=True), size)]
    w = _wide(keys, inputs["w"])
    if keys["op"] == "rms-norm":
        x, measured = _wide(keys, inputs["x"]), []
        if keys["residual"]:
            added = x + _wide(keys, inputs["residual"])
            measured.append(_measure("sum", outputs["sum"], dtype, added, np.abs(added)))
            x = _wide(keys, outputs["sum"])  # rounded, as the norm reads it
        y, rstd = rms_norm(x, w, float(inputs.get("eps", keys["eps"])))
        size = np.abs(y) * (2.0 ** (12 if keys["rounded"] and dtype == "bf16" else 2))  # of a first rounding to bf16
        measured.append(_measure("rstd", outputs["rstd"][:, None], "f32", rstd[:, None], rstd[:, None]))
        return [*measured, _measure("y", outputs["y"], dtype, y, size)]
    x, dy, rstd = _wide(keys, inputs["x"]), _wide(keys, inputs["dy"]), inputs["rstd"].astype(np.float64)
    dx, each = rms_norm_gradient(dy, x, w, rstd)
    mean = np.abs(dy * w * x).mean(axis=1) * rstd * rstd
    size = rstd[:, None] * (np.abs(dy * w) + np.abs(x) * mean[:, None]) * 4
    if keys["addend"]:
        addend = _wide(keys, inputs["addend"])
        dx, size = dx + addend, size + np.abs(addend)
    starts = np.arange(0, len(x), NORM_TOKENS)
    sums = np.add.reduceat(each, starts) if len(x) else each
    sizes = np.add.reduceat(np.abs(each), starts) if len(x) else each
    return [
        _measure("dx", outputs["dx"], dtype, dx, size),
        _measure("partial", outputs["partial"], "f32", sums, 4 * sizes),
    ]


def _check_zero(offsets: Array, y: Array) -> list[str]:
    end = max(0, int(offsets[-1]))
    wrong = int(np.count_nonzero(y[end:].view(np.uint8)))
    problems = [f"y: {wrong} bytes of spare rows are not 0"] if wrong else []
    return problems + ([] if poisoned(y[:end]).all() else ["y: rows of groups were written to"])


def _check_index(want: dict[str, Array], inputs: Mapping[str, Any], outputs: Mapping[str, Array]) -> list[str]:
    want = want | {"counts": np.diff(want["offsets"], prepend=0)}
    problems = [
        f"{name}: {int((outputs[name] != want[name]).sum())} of {want[name].size} elements are wrong"
        for name in ("offsets", "inverse", "counts", "token", "wanted")
        if name in outputs and not np.array_equal(outputs[name], want[name])
    ]
    rows = want["order"].size
    if not np.array_equal(outputs["order"][:rows], want["order"]):
        problems.append(f"order: {int((outputs['order'][:rows] != want['order']).sum())} of {rows} rows are wrong")
    if (outputs["order"][rows:] != -1).any():
        problems.append("order: rows that no choice has were written to")
    if "row_scale" in outputs:
        scales = inputs["weights"].reshape(-1)[want["order"]]
        problems += _differ("row_scale", outputs["row_scale"][:rows], scales)
        problems += _strays(want["inverse"], {"row_scale": outputs["row_scale"]})
    return problems


def _differ(name: str, got: Array, want: Array) -> list[str]:
    """Where the two differ; a NaN is equal to any other."""
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    return [f"{name}: {int(wrong.sum())} of {want.size} elements are wrong"] if wrong.any() else []


def _strays(inverse: Array, outputs: Mapping[str, Array]) -> list[str]:
    problems = []
    for name, array in outputs.items():
        free = np.ones(len(array), dtype=bool)
        free[inverse[inverse >= 0]] = False
        if not poisoned(array[free]).all():
            problems.append(f"{name}: rows that no choice has were written to")
    return problems


def _check_permute(inputs: Mapping[str, Any], outputs: Mapping[str, Array]) -> list[str]:
    tokens, places = np.nonzero(inputs["inverse"] >= 0)
    rows = inputs["inverse"][tokens, places]
    problems = []
    differ = (outputs["y"][rows] != inputs["x"][tokens]).any(axis=1)
    if differ.any():
        problems.append(f"y: {int(differ.sum())} rows differ from x, the first row {rows[int(np.argmax(differ))]}")
    if "x_s" in inputs and outputs["y_s"][:, rows].tobytes() != inputs["x_s"][:, tokens].tobytes():
        problems.append("y_s: scales differ from those of x")
    if "weights" in inputs and outputs["row_scale"][rows].tobytes() != inputs["weights"][tokens, places].tobytes():
        problems.append("row_scale: rows differ from the weights")
    return problems


def _check_tokens(
    keys: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array], tokens: Array
) -> list[Measurement]:
    op, dtype, inverse = keys["op"], keys["dtype"], inputs["inverse"][tokens]
    there = inverse >= 0
    weights = inputs["weights"][tokens] if "weights" in inputs else None
    name = "y" if "y" in outputs else "grad_x"
    if op in BY_TOKEN:
        by_token = _wide(keys, inputs[BY_TOKEN[op]][tokens])
    if op in BY_EXPERT:
        local = np.where(there, np.arange(inverse.size).reshape(inverse.shape), -1)
        by_expert = _wide(keys, inputs[BY_EXPERT[op]][np.where(there, inverse, 0).reshape(-1)])
    if op in ("moe-unpermute", "moe-permute-bwd"):
        want, size = unpermute(by_expert, local, weights)
        for number in range(keys["addends"]):
            more = _wide(keys, inputs[f"addend{number}"][tokens])
            want, size = want + more, size + np.abs(more)
        measured = [_measure(name, outputs[name][tokens], dtype, want, size)]
    else:
        assert weights is not None
        want = spread(by_token, weights)[there]
        measured = [_measure(name, outputs[name][inverse[there]], dtype, want, np.abs(want))]
    if "grad_weights" in outputs:
        sums = weight_gradient(by_token, by_expert, local)
        measured.append(_measure("grad_weights", outputs["grad_weights"][tokens], "f32", *sums))
    return measured

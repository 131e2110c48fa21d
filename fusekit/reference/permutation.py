"""What the operations between router and GEMM mean, their made-up inputs, and whether a kernel's outputs are right.

Rows are choices sorted by expert, those of one expert in the order of t * K + k. ``inverse`` says which row a choice
is, -1 for a choice of no expert of [0, experts); ``order`` says which choice a row is, for the rows that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fusekit.reference.formats import Array, poisoned, values
from fusekit.reference.inputs import bits
from fusekit.reference.measure import Expected, Measurement, measure

if TYPE_CHECKING:
    from fusekit.spec import PermutationSpec

# Float32 sums of K products, or of H for a weight's gradient, against the sum of magnitudes.
ARITHMETIC = 2.0**-20
MADE_UP_EXPERTS = 61
DROPPED = 0.02  # of made-up choices
CHUNK = 4 * 10**6  # elements that are widened to float64 at a time
SAMPLED = 10**8  # elements of a large problem that sums are compared for, in about a second


def index(indices: Array, experts: int) -> dict[str, Array]:
    """offsets int32[experts], order int32[rows], inverse int32[T, K] of the choices indices [T, K]."""
    flat = np.asarray(indices).reshape(-1).astype(np.int64)
    owned = (flat >= 0) & (flat < experts)
    order = np.argsort(np.where(owned, flat, experts), kind="stable")[: int(owned.sum())]
    inverse = np.full(flat.size, -1, dtype=np.int32)
    inverse[order] = np.arange(order.size, dtype=np.int32)
    offsets = np.cumsum(np.bincount(flat[owned], minlength=experts)[:experts])
    return {
        "offsets": offsets.astype(np.int32),
        "order": order.astype(np.int32),
        "inverse": inverse.reshape(np.shape(indices)),
    }


def unpermute(x: Array, inverse: Array, weights: Array | None) -> tuple[Array, Array]:
    """float64[T, H]: the weighted sum of each token's rows of x (float64 [M, H]), and the sum of magnitudes."""
    there = inverse >= 0
    factor = np.where(there, 1.0 if weights is None else weights.astype(np.float64), 0.0)
    total = np.zeros((len(inverse), x.shape[1]))
    size = np.zeros_like(total)
    for k in range(inverse.shape[1]):
        rows = np.where(there[:, k, None], x[inverse[:, k]], 0.0) * factor[:, k, None]
        total += rows
        size += np.abs(rows)
    return total, size


def unpermute_gradient(grad_y: Array, x: Array, inverse: Array, weights: Array) -> tuple[Array, Array, Array]:
    """float64: grad_x of each choice [T, K, H], grad_weights [T, K], and the magnitudes that the latter sums."""
    there = inverse >= 0
    rows = np.where(there[..., None], x[inverse], 0.0)
    grad_x = weights.astype(np.float64)[..., None] * grad_y[:, None, :]
    products = rows * grad_y[:, None, :]
    return grad_x, products.sum(axis=-1), np.abs(products).sum(axis=-1)


def _canonical(spec: PermutationSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    return spec if isinstance(spec, Mapping) else spec.canonical()


def permutation_inputs(
    spec: PermutationSpec | Mapping[str, Any],
    *,
    T: int,  # noqa: N803 - the dims' own names
    H: int,  # noqa: N803
    seed: int = 0,
    indices: Array | None = None,
) -> dict[str, Any]:
    """Every input of a permutation operation by its argument name. indices: in place of uneven random ones."""
    keys = _canonical(spec)
    rng = np.random.default_rng(seed)
    topk = keys["topk"]
    experts = keys["experts"] or MADE_UP_EXPERTS
    if indices is None:
        weights = rng.uniform(0.5, 1.5, experts)
        indices = rng.choice(experts, (T, topk), p=weights / weights.sum()).astype(np.int32)
        indices[rng.random((T, topk)) < DROPPED] = -1
    if keys["op"] == "moe-index":
        return {"indices": indices}

    def matrix(rows: int, number: int) -> Array:
        if keys["dtype"] == "bf16":
            return bits((rows, H), "bf16", seed + number)
        return rng.standard_normal((rows, H), dtype=np.float32)

    names = {"moe-permute": ("x",), "moe-unpermute": (), "moe-unpermute-bwd": ("grad_y",)}[keys["op"]]
    inputs: dict[str, Any] = {name: matrix(T, 1) for name in names}
    if keys["op"] != "moe-permute":
        inputs["x"] = matrix(T * topk, 2)
    inputs["inverse"] = index(indices, experts)["inverse"]
    if keys["weighted"]:
        inputs["weights"] = rng.standard_normal((T, topk), dtype=np.float32)
    return inputs


def permutation_output_shapes(
    spec: PermutationSpec | Mapping[str, Any],
    *,
    T: int,  # noqa: N803
    H: int,  # noqa: N803
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Each output's shape and dtype; there is a row for every choice."""
    keys = _canonical(spec)
    topk, dtype = keys["topk"], keys["dtype"]
    match keys["op"]:
        case "moe-index":
            return {
                "offsets": ((keys["experts"],), "i32"),
                "order": ((T * topk,), "i32"),
                "inverse": ((T, topk), "i32"),
            }
        case "moe-permute":
            rows: dict[str, tuple[tuple[int, ...], str]] = {"y": ((T * topk, H), dtype)}
            return rows | ({"row_scale": ((T * topk,), "f32")} if keys["weighted"] else {})
        case "moe-unpermute":
            return {"y": ((T, H), dtype)}
        case _:
            return {"grad_x": ((T * topk, H), dtype), "grad_weights": ((T, topk), "f32")}


def permutation_check(
    spec: PermutationSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> tuple[list[Measurement], list[str]]:
    """Measures sums, compares what is moved bit for bit, and looks for writes to rows that no choice has."""
    keys = _canonical(spec)
    if keys["op"] == "moe-index":
        return [], _check_index(index(inputs["indices"], keys["experts"]), outputs)
    inverse = inputs["inverse"]
    measured: list[Measurement] = []
    by_row = {"moe-permute": ("y", "row_scale"), "moe-unpermute": (), "moe-unpermute-bwd": ("grad_x",)}[keys["op"]]
    problems = _strays(inverse, {name: outputs[name] for name in by_row if name in outputs})
    if keys["op"] == "moe-permute":
        return measured, problems + _check_permute(inputs, outputs)
    width = outputs["y" if keys["op"] == "moe-unpermute" else "grad_x"].shape[1]
    step = max(1, CHUNK // (width * (keys["topk"] + 1)))
    chosen = _sample(len(inverse), max(step, SAMPLED // (width * (keys["topk"] + 1))))
    for start in range(0, len(chosen), step):
        tokens = chosen[start : start + step]
        part = {**inputs, **{name: inputs[name][tokens] for name in ("inverse", "weights", "grad_y") if name in inputs}}
        if keys["op"] == "moe-unpermute":
            there = part["inverse"] >= 0
            local = np.where(there, np.arange(there.size).reshape(there.shape), -1)
            rows = inputs["x"][np.where(there, part["inverse"], 0).reshape(-1)]
            want, size = unpermute(_wide(keys, rows), local, part.get("weights"))
            measured.append(_measure("y", outputs["y"][tokens], keys["dtype"], want, size))
        else:
            measured += _check_backward(keys, part, outputs, tokens)
    return measured, problems


def _sample(tokens: int, most: int) -> Array:
    """All tokens, or `most` of them at even distances, the first and the last among them."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, most)).astype(np.int64))


def _wide(keys: Mapping[str, Any], array: Array) -> Array:
    return values(array, keys["dtype"]).astype(np.float64)


def _measure(name: str, got: Array, dtype: str, want: Array, size: Array) -> Measurement:
    limit = 2.0**-8 if dtype == "bf16" else ARITHMETIC
    return measure(name, got, Expected(dtype, np.arange(len(got)), want, size * ARITHMETIC, limit=limit))


def _check_index(want: dict[str, Array], outputs: Mapping[str, Array]) -> list[str]:
    problems = [
        f"{name}: {int((outputs[name] != want[name]).sum())} of {want[name].size} elements are wrong"
        for name in ("offsets", "inverse")
        if not np.array_equal(outputs[name], want[name])
    ]
    rows = want["order"].size
    if not np.array_equal(outputs["order"][:rows], want["order"]):
        problems.append(f"order: {int((outputs['order'][:rows] != want['order']).sum())} of {rows} rows are wrong")
    if (outputs["order"][rows:] != -1).any():
        problems.append("order: rows that no choice has were written to")
    return problems


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
    if "weights" in inputs and outputs["row_scale"][rows].tobytes() != inputs["weights"][tokens, places].tobytes():
        problems.append("row_scale: rows differ from the weights")
    return problems


def _check_backward(
    keys: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array], tokens: Array
) -> list[Measurement]:
    inverse = inputs["inverse"]
    there = inverse >= 0
    rows = inputs["x"][np.where(there, inverse, 0)]
    local = np.arange(inverse.size).reshape(inverse.shape)
    wide = _wide(keys, rows.reshape(inverse.size, -1))
    gradient, dots, sizes = unpermute_gradient(
        _wide(keys, inputs["grad_y"]), wide, np.where(there, local, -1), inputs["weights"]
    )
    got = outputs["grad_x"][inverse[there]]
    return [
        _measure("grad_x", got, keys["dtype"], gradient[there], np.abs(gradient[there])),
        _measure("grad_weights", outputs["grad_weights"][tokens], "f32", dots, sizes),
    ]

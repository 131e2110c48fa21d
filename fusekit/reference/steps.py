"""Each launch of a layer's program as one formula in float64, so that a program runs without a device.

`OPERATIONS` has a function for each operation, which takes the kernel's table, its inputs by name and the dims of the
pass, and returns its outputs. A tensor of FP8 values holds what they are worth without their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fusekit.plan.quant import FP8_W, MX_W
from fusekit.reference import activations, fp8, layouts, mxfp4, permutation, router
from fusekit.reference.formats import Array, decode, encode, held
from fusekit.reference.quantise import blocks
from fusekit.spec import Activation

Keys = Mapping[str, Any]
Given = Mapping[str, Any]
Dims = Mapping[str, int]
Results = dict[str, Any]

# What the definitions of the router want to be told next to a table's own keys.
GRAD_BIAS = ("grad_y", "token", "row_scale", "offsets")
TYPES = {"routing_map": "bytes", "dtype": "f32", "out_dtype": "f32"}
CODED = "e4m3"


class ByGroup:
    """An array [E, ...] in float64 of which a group is computed when it is read: all may not fit into memory."""

    def __init__(self, shape: tuple[int, ...], group: Callable[[int], Array]) -> None:
        self.shape, self._group = shape, group

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, group: int) -> Array:
        if group >= len(self):
            raise IndexError(group)
        return self._group(group)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.stack([self[group] for group in range(len(self))]) if len(self) else np.zeros(self.shape)


class Wide(Mapping[str, Any]):
    """Tensors as `OPERATIONS` take them, each converted when it is first read. arrays, dtypes: by name."""

    def __init__(self, arrays: Mapping[str, Array], dtypes: Mapping[str, str]) -> None:
        self._arrays, self._dtypes = arrays, dtypes
        self._wide: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._wide:
            array, dtype = self._arrays[name], self._dtypes[name]
            by_group = name == "w" and array.ndim == 3
            self._wide[name] = (
                ByGroup(array.shape, lambda group: wide(array[group], dtype)) if by_group else wide(array, dtype)
            )
        return self._wide[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def wide(array: Array, dtype: str) -> Array:
    """float64 or int64; of FP8 values what they are worth without their scales."""
    if dtype == CODED:
        return fp8.decode(array, dtype).astype(np.float64)
    values = decode(array, dtype) if dtype in ("bf16", "fp16") else array
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float64)


def rounded(values: Array, dtype: str) -> Array:
    """float64 or int64 as a tensor of `dtype` holds them."""
    if dtype == CODED:
        return fp8.encode(values, dtype)
    return encode(values, dtype) if dtype in ("bf16", "fp16") else values.astype(held(dtype))


def compute(keys: Keys, arrays: Mapping[str, Array], dtypes: Mapping[str, str], dims: Dims) -> None:
    """Writes what the kernel with the table `keys` writes. arrays: of a launch, as `formats.held` has them."""
    given = Wide(arrays, dtypes)
    with np.errstate(all="ignore"):  # of memory that nothing has written yet
        outputs = OPERATIONS[keys["op"]](keys, given, dims)
        for name in outputs.keys() & arrays.keys():
            values, dtype = outputs[name], dtypes[name]
            added = keys.get("accumulate") and name in ("dw", "dbias")
            if isinstance(values, ByGroup):
                for group, array in enumerate(arrays[name]):
                    value = values[group]
                    if value.any():  # most experts have no rows in a small test
                        array[...] = rounded(value + wide(array, dtype) if added else value, dtype)
                    elif not added:
                        array[...] = 0
            elif values is not None:
                arrays[name][...] = rounded(values + given[name] if added else values, dtype)


def gemm(keys: Keys, given: Given, dims: Dims) -> Results:
    """All of its results, and their FP8 values where it stores any."""
    order: Results = {}
    if keys.get("choices"):
        order = index({"experts": len(given["w"])}, given, dims)
        order["index"] = order["token"]
        given = {**given, **order}
    results = product(keys, given) | order
    asked = keys.get("quant", "none")
    if asked != "none" and "out" in asked:
        for name in results.keys() & {"y", "dz"}:
            results |= fp8_rows(name, results[name])
            if asked.get("transpose"):
                columns = 128 if asked.get(f"{name}_blocks") == "128x128" else 1
                results |= fp8_turned(name, results[name], dims, given.get("offsets"), columns)
    return results


def product(keys: Keys, given: Given) -> Results:
    dense = keys["op"] == "dense-gemm"
    rows = chosen(keys, given, "x")
    if coded_factors(keys) and keys["quant"].get("in") not in (FP8_W, MX_W):
        rows = rows * spread(given["x_s"].T, 1)[:, : rows.shape[1]]
    bias = given.get("bias") if keys.get("bias") else None
    columns = given["w"].shape[-3 if packed_weights(keys) else -1 if keys.get("b_major", "k") == "n" else -2]
    z = np.zeros((len(rows), columns))
    groups = [slice(0, len(rows))] if dense else slices(given["offsets"])
    for group, own in enumerate(groups):
        if own.start < own.stop:
            z[own] = rows[own] @ weights_of(keys, given, group).T
            if bias is not None:
                z[own] += bias if dense else bias[group]
    kind = keys.get("activation", {"kind": "identity"})["kind"]
    layout = keys.get("glu_layout", "none")
    scale = given["row_scale"][:, None] if keys.get("row_scale") else np.ones((len(z), 1))
    if kind == "identity":
        return {"y": z * scale}
    if not kind.startswith("d"):
        return {"y": activations.activate(Activation(**keys["activation"]), layout, z) * scale, "preactivation": z}
    da, saved = z, given["preactivation"]
    act = Activation(**{**keys["activation"], "kind": kind[1:]})
    a, slopes = activations.derivative(act, layout, saved)
    back = da * scale
    dz = back * slopes[0] if len(slopes) == 1 else layouts.join(back * slopes[0], back * slopes[1], layout)
    result = {"dz": dz, "y": a * scale, "dprob": (da * a).sum(axis=1)}
    result["dbias"] = dz.sum(axis=0) if dense else np.stack([dz[own].sum(axis=0) for own in groups])
    return result


def weights_of(keys: Keys, given: Given, group: int) -> Array:
    """The weights [N, K] of a group."""
    dense = keys["op"] == "dense-gemm"
    w: Array = given["w"] if dense else given["w"][group]
    if packed_weights(keys):
        exponents = given["w_s"] if dense else given["w_s"][group]
        return mxfp4.decode(w.astype(np.uint8), exponents.astype(np.uint8))
    if coded_factors(keys):
        scales = given["w_s"] if dense else given["w_s"][group]
        w = w * spread(spread(scales.reshape(scales.shape[-2:]), 0), 1)[: w.shape[0], : w.shape[1]]
    return w.T if keys.get("b_major", "k") == "n" else w


def packed_weights(keys: Keys) -> bool:
    """Whether w is MXFP4."""
    return coded_factors(keys) and keys["quant"].get("in") == MX_W


def coded_factors(keys: Keys) -> bool:
    return bool(keys.get("quant", "none") != "none")


def wgrad(keys: Keys, given: Given, dims: Dims) -> Results:
    if coded_factors(keys):
        dy, x = (given[f"{name}_t"].T * token_scales(keys, given, name) for name in ("dy", "x"))
        if keys["op"] == "dense-wgrad":
            return {"dw": dy.T @ x}
        sizes, starts = np.diff(given["offsets"], prepend=0), fp8.padded_starts(given["offsets"])
        owned = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        return {"dw": by_group(dy, x, owned)}
    dy, x = chosen(keys, given, "dy"), chosen(keys, given, "x")
    if keys["op"] == "dense-wgrad":
        return {"dw": dy.T @ x, "dbias": dy.sum(axis=0)}
    return {"dw": by_group(dy, x, slices(given["offsets"]))}


def by_group(dy: Array, x: Array, owned: list[slice]) -> ByGroup:
    """The weight gradient of each group of rows."""
    return ByGroup((len(owned), dy.shape[1], x.shape[1]), lambda group: dy[owned[group]].T @ x[owned[group]])


def token_scales(keys: Keys, given: Given, name: str) -> Array:
    """The scale of each token and column of an operand."""
    result = spread(given[f"{name}_ts"], 0)
    if name == "x" and keys["quant"].get("x_blocks") == "128x128":
        result = spread(result, 1)[:, : len(given["x_t"])]
    return result


def quantise(keys: Keys, given: Given, dims: Dims) -> Results:
    if keys.get("blocks") == "128x128":
        w = given["w"] if keys["groups"] else given["w"][None]
        quantised = [coded(item, 128, 128) for item in w]
        result = {name: np.stack(item) for name, item in zip(("w_q", "w_s"), zip(*quantised, strict=True), strict=True)}
        result |= {name: result[of].transpose(0, 2, 1) for name, of in (("w_t", "w_q"), ("w_ts", "w_s"))}
        return result if keys["groups"] else {name: item[0] for name, item in result.items()}
    rows = chosen({"gather": "x" if keys["gather"] else "none"}, given, "x")
    if keys["topk"]:
        token, choice = np.nonzero(given["inverse"] >= 0)
        x, rows = rows, np.full((dims["M"], rows.shape[1]), np.nan)
        rows[given["inverse"][token, choice]] = x[token]
    result = fp8_rows("x", rows) if keys["rows"] else {}
    if keys["transpose"]:
        columns = 128 if keys.get("transpose_blocks") == "128x128" else 1
        result |= fp8_turned("x", rows, dims, given["offsets"] if keys["groups"] else None, columns)
    return result


def fp8_rows(name: str, rows: Array) -> Results:
    q, s = coded(rows, 1, 128)
    return {f"{name}_q": q, f"{name}_s": s.T}


def fp8_turned(name: str, rows: Array, dims: Dims, offsets: Any, columns: int = 1) -> Results:
    """Along the tokens, `columns` with one scale. offsets: of groups, or None."""
    grouped = offsets is not None
    ends = offsets if grouped else np.array([len(rows)])
    starts, room = fp8.padded_starts(ends), dims["M_padded" if grouped else "T_padded"]
    unwritten = np.nan if grouped else 0.0  # without rows, one group has a block of zeros
    t = np.full((rows.shape[1], room), unwritten)
    ts = np.full((room // 128, -(-rows.shape[1] // columns)), unwritten)
    for start, next_, own in zip(starts, starts[1:], slices(ends), strict=False):
        turned = np.zeros((rows.shape[1], next_ - start))
        turned[:, : own.stop - own.start] = rows[own].T
        t[:, start:next_], scale = coded(turned, columns, 128)
        ts[start // 128 : next_ // 128] = scale.T
    return {f"{name}_t": t, f"{name}_ts": ts}


def coded(values: Array, down: int, across: int) -> tuple[Array, Array]:
    """FP8 values and scales of what is left of the values in bf16."""
    with np.errstate(invalid="ignore"):
        encoded, scale = blocks(decode(encode(values, "bf16"), "bf16"), down, across, "pow2")
    return fp8.decode(encoded, CODED).astype(np.float64), scale.astype(np.float64)


def spread(scales: Array, axis: int) -> Array:
    return np.repeat(scales, 128, axis=axis)


def chosen(keys: Keys, given: Given, name: str) -> Array:
    """An operand, its rows chosen by the index where the kernel gathers it."""
    rows: Array = given[name]
    if keys.get("gather") != name:
        return rows
    index = given["index"]
    return np.where((index >= 0)[:, None], rows[index], 0.0)


def slices(offsets: Any) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *offsets[:-1]], offsets, strict=True)]


def topk(keys: Keys, given: Given, dims: Dims) -> Results:
    keys = {**TYPES, **keys}
    indices = router.select(keys, given)
    return {"indices": indices.astype(np.int64), "weights": router.weights(keys, given, indices)}


def topk_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    gradient = router.topk_gradient({**TYPES, **keys}, given)[0]
    return {"grad_logits": gradient + given.get("addend", 0.0)}


def index(keys: Keys, given: Given, dims: Dims) -> Results:
    bound = dims["M"] if keys.get("bounded") else None
    result = permutation.index(given["indices"], keys["experts"], bound)
    order = np.full(np.size(given["indices"]) if bound is None else bound, -1)
    order[: len(result["order"])] = result["order"]
    scale = np.full(len(order), np.nan)
    if keys.get("weighted"):
        scale[order >= 0] = given["weights"].reshape(-1)[order[order >= 0]]
    counts = np.diff(result["offsets"], prepend=0)
    return {**result, "order": order, "row_scale": scale, "counts": counts}


def permute(keys: Keys, given: Given, dims: Dims) -> Results:
    y = np.full((dims["M"], given["x"].shape[1]), np.nan)
    scales = np.full((-(-y.shape[1] // 128), dims["M"]), np.nan)
    for k in range(keys["topk"]):
        there = given["inverse"][:, k] >= 0
        y[given["inverse"][there, k]] = (given["x"] * (given["weights"][:, k, None] if keys.get("scaled") else 1))[
            there
        ]
        if "x_s" in given:
            scales[:, given["inverse"][there, k]] = given["x_s"][:, there]
    return {"y": y, **({"y_s": scales} if "x_s" in given else {})}


def permute_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    gradient = permutation.unpermute(given["grad_y"], given["inverse"], given["weights"])[0]
    weights = permutation.weight_gradient(given["x"], given["grad_y"], given["inverse"])[0]
    return {"grad_x": gradient, "grad_weights": weights}


def unpermute(keys: Keys, given: Given, dims: Dims) -> Results:
    y = permutation.unpermute(given["x"], given["inverse"], given.get("weights"))[0]
    return {"y": y + sum(given[f"addend{number}"] for number in range(keys.get("addends", 0)))}


def weights_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    inverse = given["inverse"]
    gradient = np.where(inverse >= 0, given["dprob"][inverse], 0.0)
    if keys.get("addend"):
        gradient = np.where(inverse >= 0, gradient + np.take_along_axis(given["addend"], given["indices"], axis=1), 0.0)
    return {"grad_weights": gradient}


def bias_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    return {"grad_bias": permutation.bias_gradient(*(given[name] for name in GRAD_BIAS))[0]}


def gate(keys: Keys, given: Given, dims: Dims) -> Results:
    return {"y": permutation.gate(given["x"], given["w"])}


def gate_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    gradient = given["grad_y"] * given["scale"] * (1 - given["scale"])
    rows = {"token": np.arange(dims["T"]), "offsets": np.array([dims["T"]])}
    return {"grad_logits": gradient, "dx": given["addend"] + gradient[:, None] * given["w"], **rows}


def split(keys: Keys, given: Given, dims: Dims) -> Results:
    """The last term is all that is left, so that their sum is exact in float64, too."""
    result, rest = [], given["w"]
    for _ in range(keys["terms"] - 1):
        result.append(decode(encode(rest, "bf16"), "bf16").astype(np.float64))
        rest = rest - result[-1]
    return {"terms": np.concatenate([*result, rest])}


def summed(keys: Keys, given: Given, dims: Dims) -> Results:
    x = given["x"]
    total = x.reshape(len(x), keys["terms"], keys["experts"]).sum(axis=1)
    return {"y": total + given["bias"] if keys["bias"] else total}


def aux_score(keys: Keys, given: Given, dims: Dims) -> Results:
    scores, total = router.aux_scores({**TYPES, **keys}, given)
    return {
        "scores": scores,
        "score_sum": None if total is None else total[:, 0],
        "routing_map": np.zeros(scores.shape, np.uint8),
    }


def aux_score_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    return {"grad_logits": router.aux_gradient({**TYPES, **keys}, given)[0]}


def aux_loss(keys: Keys, given: Given, dims: Dims) -> Results:
    return {"loss": np.array([loss_factor(keys, given) * (given["counts"] * given["scores"]).sum()])}


def aux_loss_bwd(keys: Keys, given: Given, dims: Dims) -> Results:
    each = given["grad_loss"][0] * loss_factor(keys, given) * given["counts"]
    return {"grad_scores": np.broadcast_to(each, (dims["T"], keys["experts"]))}


def loss_factor(keys: Keys, given: Given) -> float:
    tokens = max(float(given["total_tokens"][0]), 1.0)  # as on the device
    return float(given["coefficient"][0] * keys["experts"] / (keys["topk"] * tokens * tokens))


OPERATIONS = {
    "dense-gemm": gemm, "grouped-gemm": gemm, "dense-wgrad": wgrad, "grouped-wgrad": wgrad, "router-topk": topk,
    "router-topk-bwd": topk_bwd, "moe-index": index, "moe-permute": permute, "moe-permute-bwd": permute_bwd,
    "moe-unpermute": unpermute, "moe-weights-bwd": weights_bwd, "moe-bias-bwd": bias_bwd, "moe-gate": gate,
    "moe-gate-bwd": gate_bwd, "router-aux-score": aux_score,
    "router-aux-score-bwd": aux_score_bwd, "moe-aux-loss": aux_loss, "moe-aux-loss-bwd": aux_loss_bwd,
    "router-split": split, "router-sum": summed, "quantise": quantise,
}  # fmt: skip

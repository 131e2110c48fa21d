"""What ``dense-gemm`` and ``grouped-gemm`` mean, with the whole epilogue, in float64.

Stages in order, each optional: accumulate, ``alpha``, ``bias``, ``save_preactivation``, ``activation``, ``row_scale``.
Nothing is rounded here. The activation sees the value that is stored as pre-activation before it is rounded for the
store, so that storing it changes nothing in y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference import activations
from fusekit.reference.formats import Array, values
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.spec import Activation, KernelSpec

# Float32 accumulation of K products is off by at most this share of the sum of their absolute values. Tensor cores
# truncate: one step of 16 products costs up to 2**-23 of the running sum, which is far below the sum of the absolute
# values unless all products have one sign, and then the result is large and the relative bound governs.
ACCUMULATION = 2.0**-16

# Columns of w held in float64 at a time, so that a large weight is never there whole in double precision.
COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Meaning:
    """The keys of a kernel spec that decide its numbers; all else (tile, cluster, ...) must not change them."""

    grouped: bool
    dtype: str
    out_dtype: str
    b_major: str
    alpha: str
    bias: bool
    save_preactivation: bool
    activation: Activation
    glu_layout: str
    row_scale: bool


def meaning(spec: KernelSpec | Mapping[str, Any]) -> Meaning:
    """The ``Meaning`` of a ``KernelSpec``, or of its ``canonical()`` form as a store keeps it."""
    keys: Mapping[str, Any] = spec if isinstance(spec, Mapping) else spec.canonical()
    if keys["op"] not in ("dense-gemm", "grouped-gemm"):
        raise ValueError(f"op {keys['op']!r}; the reference knows dense-gemm and grouped-gemm")
    if keys["quant"] != "none":
        raise ValueError(f'quant {keys["quant"]!r}; the reference knows quant = "none" only')
    same = ("dtype", "out_dtype", "b_major", "alpha", "bias", "save_preactivation", "glu_layout", "row_scale")
    return Meaning(
        grouped=keys["op"] == "grouped-gemm",
        activation=Activation(**keys["activation"]),
        **{name: keys[name] for name in same},
    )


def gemm(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Sequence[int] | Array | None = None
) -> dict[str, Array]:
    """The outputs of ``spec`` for ``inputs``, unrounded: {"y": float64, "preactivation": float64 if it is saved}.

    ``inputs`` holds the kernel's arguments by name; bf16 and fp16 tensors as uint16 bits, or any floating-point array.
    x [M, K]; w [E, N, K] (``b_major`` "k") or [E, K, N] ("n"), without E for dense-gemm; offsets int32[E], the end row
    of each group; bias [E, N] or [N]; alpha float32, or float32[E] for ``alpha = "group"``; row_scale float32[M];
    ``act_alpha``, ``act_limit`` and ``act_up_offset`` stand in for the spec's own when given.

    y is [M, N], or [M, N/2] for a gated activation; preactivation is [M, N]. Rows that no group owns are NaN: the
    kernel leaves them alone. With ``rows`` only those are computed, and come in that order.

    ``ValueError`` says which argument is missing, has a wrong shape, or which row no group owns.
    """
    outputs = {}
    for name, want in expected(spec, inputs, rows).items():
        if rows is not None:
            outputs[name] = want.value
            continue
        outputs[name] = np.full((inputs["x"].shape[0], want.value.shape[1]), np.nan)
        outputs[name][want.rows] = want.value
    return outputs


def check(
    spec: KernelSpec | Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Array],
    rows: Sequence[int] | Array | None = None,
) -> dict[str, Measurement]:
    """Measure ``outputs`` (whole buffers [M, ...], uint16 bits or floats) against the reference, output by output."""
    return {
        name: measure(name, np.asarray(outputs[name])[want.rows], want)
        for name, want in expected(spec, inputs, rows).items()
    }


def expected(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Sequence[int] | Array | None = None
) -> dict[str, Expected]:
    """What ``gemm`` gives, for the rows that groups own, with the error that float32 arithmetic may make of it."""
    means = meaning(spec)
    x = _need(inputs, "x", 2)
    owner = row_groups(inputs, x.shape[0], means)
    chosen = np.arange(owner.size) if rows is None else np.asarray(rows, dtype=np.int64).reshape(-1)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= owner.size):
        raise ValueError(f"rows {chosen.min()}..{chosen.max()}; groups own rows 0..{owner.size - 1} only")
    with np.errstate(all="ignore"):  # infinities and NaNs in the inputs are carried through, not reported
        z, error = _preactivation(means, inputs, x, chosen, owner[chosen])
        outputs = {}
        activation = _at_run_time(means.activation, inputs)
        y = activations.activate(activation, means.glu_layout, z)
        y_error = activations.error_bound(activation, means.glu_layout, z, error)
        if means.row_scale:
            scale = _need(inputs, "row_scale", 1)[chosen].astype(np.float64)[:, None]
            y, y_error = y * scale, y_error * np.abs(scale)
        outputs["y"] = Expected(means.out_dtype, chosen, y, y_error)
        if means.save_preactivation:
            outputs["preactivation"] = Expected(means.dtype, chosen, z, error)
    return outputs


def row_groups(inputs: Mapping[str, Any], rows: int, means: Meaning) -> NDArray[np.int64]:
    """int64[owned rows]: the group that owns each row. All rows belong to group 0 of a dense-gemm."""
    if not means.grouped:
        return np.zeros(rows, dtype=np.int64)
    ends = _need(inputs, "offsets", 1).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    if (sizes < 0).any() or (ends.size and ends[-1] > rows):
        raise ValueError(f"offsets {ends.tolist()}; they must not decrease nor pass the {rows} rows of x")
    return np.repeat(np.arange(ends.size), sizes)


def _preactivation(
    means: Meaning, inputs: Mapping[str, Any], x: Array, chosen: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[Array, Array]:
    """z [rows, N] = alpha * x.w + bias, and the error that float32 may make of it."""
    w = _need(inputs, "w", 3 if means.grouped else 2)
    w = w if means.grouped else w[None]
    if means.b_major == "n":
        w = w.transpose(0, 2, 1)
    if w.shape[2] != x.shape[1]:
        raise ValueError(f"x has K = {x.shape[1]} and w has K = {w.shape[2]}; they must be equal")
    z = np.empty((chosen.size, w.shape[1]))
    error = np.empty_like(z)
    for group in np.unique(owner):
        here = owner == group
        left = values(x[chosen[here]], means.dtype).astype(np.float64)
        left_magnitude = np.abs(left).astype(np.float32)
        for start in range(0, w.shape[1], COLUMNS):
            right = values(w[group, start : start + COLUMNS], means.dtype)
            z[here, start : start + COLUMNS] = left @ right.astype(np.float64).T
            error[here, start : start + COLUMNS] = left_magnitude @ np.abs(right).astype(np.float32).T
    if means.alpha != "none":
        alpha = np.asarray(_need(inputs, "alpha", None), dtype=np.float64).reshape(-1)
        factor = alpha[owner][:, None] if means.alpha == "group" else alpha[0]
        z *= factor
        error *= np.abs(factor)
    if means.bias:
        bias = values(_need(inputs, "bias", 2 if means.grouped else 1), means.dtype).astype(np.float64)
        bias = bias[owner] if means.grouped else bias
        z += bias
        error += np.abs(bias)
    error *= ACCUMULATION
    return z, error


def _at_run_time(activation: Activation, inputs: Mapping[str, Any]) -> Activation:
    return replace(
        activation,
        alpha=float(inputs.get("act_alpha", activation.alpha)),
        limit=inputs.get("act_limit", activation.limit),
        up_offset=float(inputs.get("act_up_offset", activation.up_offset)),
    )


def _need(inputs: Mapping[str, Any], name: str, rank: int | None) -> Array:
    if inputs.get(name) is None:
        raise ValueError(f"no {name!r} among the inputs ({', '.join(inputs)}); the spec asks for it")
    array = np.asarray(inputs[name])
    if rank is not None and array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} dimensions")
    return array

"""What the GEMMs mean, in float64: the outputs of any operation, and how far float32 may be from them.

This module has ``dense-gemm`` and ``grouped-gemm`` with the whole epilogue. Stages in order, each optional: accumulate,
``alpha``, ``bias``, ``save_preactivation``, ``activation``, ``row_scale``. Nothing is rounded here. The activation sees
the value that is stored as pre-activation before it is rounded for the store, so that storing it changes nothing in y.
``grouped-wgrad`` is in ``wgrad``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference import activations, wgrad
from fusekit.reference.formats import Array, values
from fusekit.reference.meaning import Meaning, group_ends, meaning, need, row_groups
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.spec import Activation, KernelSpec

Chosen = Sequence[int] | Array | None

# Float32 accumulation of K products is off by at most this share of the sum of their absolute values. Tensor cores
# truncate: one step of 16 products costs up to 2**-23 of the running sum, which is far below the sum of the absolute
# values unless all products have one sign, and then the result is large and the relative bound governs.
ACCUMULATION = 2.0**-16

# Columns of w held in float64 at a time, so that a large weight is never there whole in double precision.
COLUMNS = 4096


def gemm(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Chosen = None, columns: Chosen = None
) -> dict[str, Array]:
    """The outputs of ``spec`` for ``inputs``, unrounded, in float64, by name.

    ``inputs`` holds the kernel's arguments by name; bf16 and fp16 tensors as uint16 bits, or any floating-point array.
    x [M, K]; w [E, N, K] (``b_major`` "k") or [E, K, N] ("n"), without E for dense-gemm; offsets int32[E], the end row
    of each group; bias [E, N] or [N]; alpha float32, or float32[E] for ``alpha = "group"``; row_scale float32[M];
    ``act_alpha``, ``act_limit`` and ``act_up_offset`` stand in for the spec's own when given. For grouped-wgrad: dy
    [M, N], x [M, K], offsets; dw float32[E, N, K], what it holds before the launch, when it accumulates.

    y is [M, N], or [M, N/2] for a gated activation; preactivation is [M, N], where it is saved. Rows that no group owns
    are NaN: the kernel leaves them alone. dw is [E, N, K].

    With ``rows`` only those are computed, and come in that order; row e N + n of dw is dw[e, n]. ``columns``, which
    only grouped-wgrad takes, does the same to the last dimension.

    ``ValueError`` says which argument is missing, has a wrong shape, or which row no group owns.
    """
    outputs = {}
    for name, want in expected(spec, inputs, rows, columns).items():
        if rows is not None or columns is not None:
            outputs[name] = want.value
            continue
        outputs[name] = np.full(want.shape, np.nan)
        table(outputs[name])[want.rows] = want.value
    return outputs


def check(
    spec: KernelSpec | Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Array],
    rows: Chosen = None,
    columns: Chosen = None,
) -> dict[str, Measurement]:
    """Measure ``outputs`` (whole buffers, uint16 bits or floats) against the reference, output by output.

    ``rows`` and ``columns`` are those of ``gemm``.
    """
    measured = {}
    for name, want in expected(spec, inputs, rows, columns).items():
        got = table(np.asarray(outputs[name]))[want.rows]
        measured[name] = measure(name, got if want.columns is None else got[:, want.columns], want)
    return measured


def table(array: Array) -> Array:
    """``array`` with its leading dimensions as one: [rows, columns]."""
    return array.reshape(-1, array.shape[-1])


def expected(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Chosen = None, columns: Chosen = None
) -> dict[str, Expected]:
    """What ``gemm`` gives, for the rows that groups own, with the error that float32 arithmetic may make of it."""
    means = meaning(spec)
    if means.op == "grouped-wgrad":
        return wgrad.expected(means, inputs, rows, columns)
    if columns is not None:
        raise ValueError(f"columns for op {means.op!r}; only grouped-wgrad computes chosen columns")
    x = need(inputs, "x", 2)
    owner = row_groups(group_ends(inputs, x.shape[0], means))
    chosen = np.arange(owner.size) if rows is None else np.asarray(rows, dtype=np.int64).reshape(-1)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= owner.size):
        raise ValueError(f"rows {chosen.min()}..{chosen.max()}; groups own rows 0..{owner.size - 1} only")

    def output(dtype: str, value: Array, slack: Array) -> Expected:
        return Expected(dtype, chosen, value, slack, shape=(x.shape[0], value.shape[1]))

    with np.errstate(all="ignore"):  # infinities and NaNs in the inputs are carried through, not reported
        z, error = _preactivation(means, inputs, x, chosen, owner[chosen])
        activation = _at_run_time(means.activation, inputs)
        y = activations.activate(activation, means.glu_layout, z)
        y_error = activations.error_bound(activation, means.glu_layout, z, error)
        if means.row_scale:
            scale = need(inputs, "row_scale", 1)[chosen].astype(np.float64)[:, None]
            y, y_error = y * scale, y_error * np.abs(scale)
        outputs = {"y": output(means.out_dtype, y, y_error)}
        if means.save_preactivation:
            outputs["preactivation"] = output(means.dtype, z, error)
    return outputs


def _preactivation(
    means: Meaning, inputs: Mapping[str, Any], x: Array, chosen: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[Array, Array]:
    """z [rows, N] = alpha * x.w + bias, and the error that float32 may make of it."""
    w = need(inputs, "w", 3 if means.grouped else 2)
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
        alpha = np.asarray(need(inputs, "alpha", None), dtype=np.float64).reshape(-1)
        factor = alpha[owner][:, None] if means.alpha == "group" else alpha[0]
        z *= factor
        error *= np.abs(factor)
    if means.bias:
        bias = values(need(inputs, "bias", 2 if means.grouped else 1), means.dtype).astype(np.float64)
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

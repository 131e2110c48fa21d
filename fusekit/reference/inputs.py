"""Random inputs: repeatable from a seed, uneven like a real router's, and made at memory speed.

Every number is nonzero and lies in +-[1/8, 2) times a power of two: random sign, exponent and mantissa bits, so that a
GPU's multipliers switch as they do on real data, and an element that was left out shows in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.operands import WGRAD
from fusekit.plan.quant import MX_SIDE, SIDE
from fusekit.reference import mxfp4
from fusekit.reference.formats import RMS, Array, bits
from fusekit.reference.fp8 import coded_shapes, largest_shapes, padded_starts
from fusekit.reference.meaning import Meaning, meaning
from fusekit.reference.operands import choices, twins
from fusekit.reference.operands.gather import tokens_of
from fusekit.spec import KernelSpec

__all__ = ["RMS", "bits", "group_sizes", "make_inputs", "offsets_of", "output_shapes"]

Sizes = Array | list[int] | tuple[int, ...]
# Outputs with a part for each group, all of which a launch writes; the others have a row for each token.
BY_GROUP = frozenset({"dw", "dbias"})


def group_sizes(rows: int, groups: int, seed: int) -> NDArray[np.int64]:
    """int64[groups]: sizes that sum to ``rows``, in proportion to weights drawn evenly from 0.5 to 1.5."""
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, groups)
    ends: NDArray[np.int64] = np.rint(np.cumsum(weights) / weights.sum() * rows).astype(np.int64)
    return np.diff(ends, prepend=0)


def offsets_of(sizes: Sizes) -> NDArray[np.int32]:
    """int32[groups]: the end row of each group, from the group sizes."""
    return np.cumsum(np.asarray(sizes, dtype=np.int64)).astype(np.int32)


def make_inputs(
    spec: KernelSpec | Mapping[str, Any], *, E: int, M: int, N: int, K: int, seed: int = 0, sizes: Sizes | None = None,
    spare: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Every input of ``spec`` by its argument name, compact arrays; see ``gemm`` for shapes and dtypes.

    N counts the columns of w, gate and up together for a gated forward activation; for a weight gradient those of dy. A
    grouped operation has E groups of ``sizes``, or uneven ones that sum to M - ``spare``. Weights are scaled so that
    x.w has a spread of about 1. A gathered factor has fewer rows than M, among which ``index`` chooses. A scalar
    ``alpha`` is a Python float; the activation's scalars are left to the spec.
    """
    means = meaning(spec)
    if sizes is None:
        sizes = group_sizes(M - spare, E, seed)
    if means.grouped and (len(sizes) != E or sum(sizes) > M):
        raise ValueError(f"{len(sizes)} groups of {sum(sizes)} rows; there must be E = {E} groups in M = {M} rows")
    if means.epilogue == WGRAD:
        return _wgrad_inputs(means, (E, N, K), M, seed, sizes)
    rng = np.random.default_rng(seed)
    groups = (E,) if means.grouped else ()
    # With FP8, the scales do it.
    fp8 = means.quant.coded_inputs or means.quant.weights_alone
    one_over_root_k = 0 if fp8 else -round(0.5 * np.log2(max(K, 1) * RMS**4))
    shape = (*groups, *((N, K) if means.b_major == "k" else (K, N)))
    inputs: dict[str, Any] = {"x": bits((_rows(means, "x", M), K), means.factors[0], seed + 1)}
    if means.quant.mx_weights:
        inputs["w"] = mxfp4.random_bytes((*groups, N, K // MX_SIDE, MX_SIDE // 2), seed + 2)
    else:
        inputs["w"] = bits(shape, means.factors[1], seed + 2, one_over_root_k)
    if means.grouped and not means.operands["choices"]:
        inputs["offsets"] = offsets_of(sizes)
    dims = {"E": E, "M": M, "N": N, "K": K}
    inputs |= _of_operands(means, dims, rng, seed)
    if means.activation.backward:
        width = N if means.glu_layout == "none" else 2 * N
        inputs["preactivation"] = bits((M, width), means.dtype, seed + 4)
    return inputs


def _of_operands(means: Meaning, dims: Mapping[str, int], rng: np.random.Generator, seed: int) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for twin in twins(means):
        if hasattr(twin, "inputs"):
            inputs |= twin.inputs(means, dims, rng, seed)
    return inputs


def _rows(means: Meaning, name: str, rows: int) -> int:
    """Rows of the factor ``name`` of a product that has ``rows``."""
    if means.operands["choices"]:
        return choices.tokens_of(means, rows)
    return tokens_of(rows) if means.operands["gather"] == name else rows


def _wgrad_inputs(means: Meaning, shape: tuple[int, int, int], rows: int, seed: int, sizes: Sizes) -> dict[str, Any]:
    """Output gradients are scaled so that dw has a spread of about 1; so have the numbers that it is added to."""
    each = rows / shape[0]
    if means.quant.coded_inputs:
        inputs = _turned(means, shape, rows, seed, sizes)
    else:
        spread = -round(0.5 * np.log2(max(each, 1) * RMS**4))
        inputs = {
            "dy": bits((_rows(means, "dy", rows), shape[1]), means.dtype, seed + 1, spread),
            "x": bits((_rows(means, "x", rows), shape[2]), means.dtype, seed + 2),
        }
    if means.grouped:
        inputs["offsets"] = offsets_of(sizes)
    inputs |= _of_operands(means, {"M": rows}, np.random.default_rng(seed), seed)
    if means.operands["accumulate"]:
        whole = shape if means.grouped else shape[1:]
        # As many bits as float32 has, of which a 16-bit format would lose most.
        rng = np.random.default_rng(seed)
        inputs["dw"] = rng.uniform(-1.7, 1.7, whole).astype(np.float32)
        if means.operands["dbias"]:
            inputs["dbias"] = rng.uniform(-1.7, 1.7, whole[:-1]).astype(np.float32)
    return inputs


def _turned(means: Meaning, shape: tuple[int, int, int], rows: int, seed: int, sizes: Sizes) -> dict[str, Any]:
    """FP8 values of both factors with a column for each token, and a scale for 128 of them."""
    starts, ends = padded_starts(offsets_of(sizes)), offsets_of(sizes)
    room = max(-(-(rows + (SIDE - 1) * shape[0] * means.grouped) // SIDE), 1) * SIDE
    owned = np.zeros(room, dtype=bool)
    for group, size in enumerate(np.diff(ends, prepend=0)):
        owned[starts[group] : starts[group] + size] = True
    rng, inputs = np.random.default_rng(seed), dict[str, Any]()
    spread = 2.0 ** -round(0.5 * float(np.log2(max(rows / shape[0], 1) * RMS**4)))
    for number, (name, dtype) in enumerate(zip(("dy", "x"), means.factors, strict=True), start=1):
        columns = shape[number]
        fp8 = bits((columns, room), dtype, seed + number)
        fp8[:, ~owned] = 0
        scaled = -(-columns // SIDE) if name == "x" and means.quant.square else columns
        scales = rng.uniform(0.5, 1.5, (room // SIDE, scaled)) * (spread if name == "dy" else 1)
        inputs |= {f"{name}_t": fp8, f"{name}_ts": scales.astype(np.float32)}
    return inputs


def output_shapes(
    spec: KernelSpec | Mapping[str, Any], *, M: int, N: int, E: int = 1, K: int = 0
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Each output's shape and dtype, by its argument name; E matters to dw and dbias alone, K to dw.

    "y": [M, N], or [M, N/2] when gated, of out_dtype, or FP8; "preactivation": [M, N] if saved. A weight gradient:
    "dw": [E, N, K] of out_dtype and, if asked for, "dbias": [E, N] of float32. A backward activation: "dz": [M, N], or
    [M, 2N] when gated, of dtype; if asked for, "y": [M, N] of out_dtype, "dprob": [M] and "dbias": [E, columns of dz],
    of float32. A dense operation has no E.
    """
    means = meaning(spec)
    gated = means.glu_layout != "none"
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    groups = (E,) if means.grouped else ()
    if means.epilogue == WGRAD:
        shapes["dw"] = ((*groups, N, K), means.out_dtype)
        if means.operands["dbias"]:
            shapes["dbias"] = ((*groups, N), "f32")
        return shapes
    if means.activation.backward:
        width = 2 * N if gated else N
        if means.quant.wide:
            shapes["dz"] = ((M, width), means.dtype)
        shapes |= coded_shapes(means, "dz", (M, width), E)
        shapes |= coded_shapes(means, "y", (M, N), E)
        if means.operands["recompute"] and (means.quant.wide or not means.quant.transpose):
            shapes["y"] = ((M, N), means.out_dtype)
        shapes |= largest_shapes(means, E)
        if means.operands["dprob"]:
            shapes["dprob"] = ((M,), "f32")
        if means.operands["dbias"]:
            shapes["dbias"] = ((*groups, width), "f32")
        return shapes
    y = M, N // 2 if gated else N
    if means.quant.wide:
        shapes["y"] = (y, means.out_dtype)
    shapes |= coded_shapes(means, "y", y, E) | largest_shapes(means, E)
    if means.operands["save_preactivation"]:
        shapes["preactivation"] = ((M, N), means.dtype)
    if means.operands["choices"]:
        chosen = choices.tokens_of(means, M), means.operands["choices"]
        shapes |= {"offsets": (groups, "i32"), "index": ((chosen[0] * chosen[1],), "i32"), "inverse": (chosen, "i32")}
    return shapes

"""Made-up inputs: repeatable from a seed, uneven like a real router's, and made at memory speed.

Every number is nonzero and lies in +-[1/8, 2) times a power of two: random sign, exponent and mantissa bits, so that a
GPU's multipliers switch as they do on real data, and an element that was left out shows in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array, format_of
from fusekit.reference.gemm import meaning
from fusekit.spec import KernelSpec

# Root mean square of the numbers below, before scaling.
RMS = 0.88


def bits(shape: tuple[int, ...], dtype: str, seed: int, exponent: int = 0) -> NDArray[np.uint16]:
    """Random numbers in +-[2**-3, 2) * 2**exponent, as uint16 bits of ``dtype``; none is zero, rms 0.88 * 2**exponent.

    ``ValueError`` when the exponent takes them out of the format's normal range.
    """
    form = format_of(dtype)
    lowest = form.bias + exponent - 3
    if not 1 <= lowest <= 2 * form.bias - 3:
        raise ValueError(f"2**{exponent} scales {dtype} numbers out of its normal range; scale less")
    # Raw bits are kept as sign, two low exponent bits and mantissa; adding the lowest exponent makes them a number.
    raw = np.random.SFC64(seed).random_raw(-(-int(np.prod(shape)) // 4)).view(np.uint16)[: int(np.prod(shape))]
    raw &= np.uint16(0x8000 | ((4 << form.fraction) - 1))
    raw += np.uint16(lowest << form.fraction)
    return raw.reshape(shape)


def group_sizes(rows: int, groups: int, seed: int) -> NDArray[np.int64]:
    """int64[groups]: sizes that sum to ``rows``, in proportion to weights drawn evenly from 0.5 to 1.5."""
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, groups)
    ends: NDArray[np.int64] = np.rint(np.cumsum(weights) / weights.sum() * rows).astype(np.int64)
    return np.diff(ends, prepend=0)


def offsets_of(sizes: Array | list[int] | tuple[int, ...]) -> NDArray[np.int32]:
    """int32[groups]: the end row of each group, from the group sizes."""
    return np.cumsum(np.asarray(sizes, dtype=np.int64)).astype(np.int32)


def make_inputs(
    spec: KernelSpec | Mapping[str, Any],
    *,
    E: int,  # noqa: N803 - the dims' own names
    M: int,  # noqa: N803
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    seed: int = 0,
    sizes: Array | list[int] | tuple[int, ...] | None = None,
    spare: int = 0,
) -> dict[str, Any]:
    """Every input of ``spec`` by its argument name, compact arrays; see ``gemm`` for shapes and dtypes.

    N counts the columns of w, gate and up together for a gated activation. A grouped-gemm has E groups of ``sizes``, or
    uneven ones that sum to M - ``spare``. Weights are scaled so that x.w has a spread of about 1. A scalar ``alpha`` is
    a Python float; the activation's scalars are left to the spec.
    """
    means = meaning(spec)
    if sizes is None:
        sizes = group_sizes(M - spare, E, seed)
    if means.grouped and (len(sizes) != E or sum(sizes) > M):
        raise ValueError(f"{len(sizes)} groups of {sum(sizes)} rows; there must be E = {E} groups in M = {M} rows")
    rng = np.random.default_rng(seed)
    groups = (E,) if means.grouped else ()
    one_over_root_k = -round(0.5 * np.log2(max(K, 1) * RMS**4))
    inputs: dict[str, Any] = {
        "x": bits((M, K), means.dtype, seed + 1),
        "w": bits((*groups, *((N, K) if means.b_major == "k" else (K, N))), means.dtype, seed + 2, one_over_root_k),
    }
    if means.grouped:
        inputs["offsets"] = offsets_of(sizes)
    if means.alpha == "scalar":
        inputs["alpha"] = 0.75
    if means.alpha == "group":
        inputs["alpha"] = rng.uniform(0.5, 1.5, E).astype(np.float32)
    if means.bias:
        inputs["bias"] = bits((*groups, N), means.dtype, seed + 3, -1)
    if means.row_scale:
        inputs["row_scale"] = rng.uniform(0.25, 1.0, M).astype(np.float32)
    return inputs


def output_shapes(spec: KernelSpec | Mapping[str, Any], *, M: int, N: int) -> dict[str, tuple[tuple[int, int], str]]:  # noqa: N803
    """Each output's shape and dtype: {"y": ((M, N or N/2), out_dtype), "preactivation": ((M, N), dtype) if saved}."""
    means = meaning(spec)
    shapes = {"y": ((M, N if means.glu_layout == "none" else N // 2), means.out_dtype)}
    if means.save_preactivation:
        shapes["preactivation"] = ((M, N), means.dtype)
    return shapes


def sample_rows(offsets: Array, count: int, seed: int = 0, groups: int = 12) -> NDArray[np.int64]:
    """About ``count`` rows worth checking when all are too many, ascending, from at most ``groups`` groups.

    Of the first, last, smallest, largest and some random nonempty groups: the first and last row and random ones.
    Few groups keep the cost down, since each one's weights are widened to float64.
    """
    ends = np.asarray(offsets, dtype=np.int64)
    sizes = np.diff(ends, prepend=0)
    rng = np.random.default_rng(seed)
    full = np.flatnonzero(sizes)
    if not full.size:
        return np.empty(0, dtype=np.int64)
    by_size = full[np.argsort(sizes[full], kind="stable")]
    first = [full[0], full[-1], by_size[0], by_size[-1]]
    chosen = list(dict.fromkeys([*first, *rng.permutation(full)]))[:groups]
    rows = []
    for group in chosen:
        start, end = ends[group] - sizes[group], ends[group]
        rows += [np.array([start, end - 1]), rng.integers(start, end, max(count // len(chosen) - 2, 0))]
    return np.unique(np.concatenate(rows))

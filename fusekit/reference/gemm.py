"""The definition of the GEMMs, in float64: the outputs of any operation, and how far float32 may be from them.

This module has ``dense-gemm`` and ``grouped-gemm`` with the forward epilogue. Stages in order, each optional:
accumulate, ``alpha``, ``bias``, ``save_preactivation``, ``activation``, ``row_scale``. Nothing is rounded here. The
activation sees the value that is stored as pre-activation before it is rounded for the store, so that storing it
changes nothing in y. A backward activation is in ``backward``, a weight gradient in ``wgrad``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.operands import WGRAD
from fusekit.reference import activations, backward, layouts, wgrad
from fusekit.reference.factors import limit as limit_of
from fusekit.reference.formats import Array, poisoned
from fusekit.reference.fp8 import coded
from fusekit.reference.fp8_output import coded_faults, token_blocks, written
from fusekit.reference.largest import largest
from fusekit.reference.meaning import Meaning, group_ends, indices, meaning, need, row_groups
from fusekit.reference.measure import Expected, Measurement, measure
from fusekit.reference.operands import choices, twins
from fusekit.reference.product import product, weights
from fusekit.spec import Activation, KernelSpec

Chosen = Sequence[int] | Array | None


def gemm(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Chosen = None, columns: Chosen = None
) -> dict[str, Array]:
    """The outputs of ``spec`` for ``inputs``, unrounded, in float64, by name.

    ``inputs`` holds the kernel's arguments by name; bf16 and fp16 tensors as uint16 bits, or any floating-point array.
    x [M, K]; w [E, N, K] (``b_major`` "k") or [E, K, N] ("n"), without E for dense-gemm; offsets int32[E], the end row
    of each group; bias [E, N] or [N]; alpha float32, or float32[E] for ``alpha = "group"``; row_scale float32[M];
    with ``quant`` FP8 x and w as uint8, and their scales x_s and w_s; ``act_alpha``, ``act_limit`` and
    ``act_up_offset`` stand in for the spec's own when given. For a weight gradient: dy [M, N], x [M, K], offsets; when
    it accumulates, what its outputs hold before the launch: dw float32[E, N, K] and dbias float32[E, N]. A dense-wgrad
    has no offsets, and its outputs have no E. An operand that is gathered has a row for each token, and index int32[M]
    chooses among them.

    y is [M, N], or [M, N/2] for a gated activation; preactivation is [M, N], where it is saved. Rows that no group owns
    are NaN: the kernel leaves them alone. A result that is FP8 alone is not there; see ``coded_check``. dw is
    [E, N, K], and dbias [E, N] where the spec has it.

    A backward activation takes preactivation [M, N], or [M, 2N] if it is gated, and gives dz of that shape; y [M, N]
    with ``recompute``; float32 dprob [M] with ``dprob``; float32 dbias, as many columns as dz, [E, ...] or [...], with
    ``dbias``.

    With ``rows`` only those are computed, and come in that order; row e N + n of dw is dw[e, n], to which dbias[e, n]
    belongs. ``columns`` chooses those of y (of da for a backward activation, of dw), and of other outputs the ones that
    belong to them, gates before ups. A sum over what is not there whole is left out: a backward activation's dbias with
    ``rows``, dprob with ``columns``.

    ``ValueError`` says which argument is missing, has a wrong shape, or which row no group owns.
    """
    outputs = {}
    for name, want in expected(spec, inputs, rows, columns).items():
        if rows is not None or columns is not None:
            outputs[name] = want.value
            continue
        outputs[name] = np.full(want.shape, np.nan)
        want.table(outputs[name])[want.rows] = want.value
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
    wanted = expected(spec, inputs, rows, columns)
    return {name: measure(name, want.of(np.asarray(outputs[name])), want) for name, want in wanted.items()}


def coded_check(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array], most: int = 2**30
) -> list[str]:
    """Errors in FP8 output, and in largest numbers of groups, one line each. ``outputs``: whole
    buffers, all ones where nothing was written.

    At most ``most`` blocks of 128 tokens are compared: with what ``outputs`` has in bf16, bit for bit, or else with the
    float64 result.
    """
    means = meaning(spec)
    results = coded(means)
    if not results and not means.quant.largest:
        return []
    ends = group_ends(inputs, len(need(inputs, "x" if means.operands["gather"] == "none" else "index", None)), means)
    problems = []
    for name, numbers in largest(means, outputs, ends).items():
        wrong = np.asarray(outputs[name]).view(np.uint32) != numbers.view(np.uint32)
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            problems.append(f"{name}: {outputs[name][place]} at {place}; the largest number is {numbers[place]}")
    for name in (name for tensor in results for name in tensor.outputs):
        mask, untouched = written(means, name, outputs[name].shape, ends), poisoned(outputs[name])
        for wrong, what in ((mask & untouched, "not written"), (~mask & ~untouched, "written, of no group's")):
            if wrong.any():
                place = tuple(map(int, np.argwhere(wrong)[0]))
                problems.append(f"{name}: {int(wrong.sum())} elements {what}, the first at {place}")
    chosen = token_blocks(ends)
    if len(chosen) > most:
        chosen = [chosen[int(number)] for number in np.unique(np.linspace(0, len(chosen) - 1, most).astype(int))]
    wanted: dict[str, Expected] = {}
    if chosen and not means.quant.wide:
        rows = np.concatenate([np.arange(block.begin, block.stop) for block in chosen])
        wanted = _results(spec, inputs, rows, None)
    return problems + coded_faults(means, outputs, chosen, wanted)


def row_ends(spec: Mapping[str, Any], inputs: Mapping[str, Any], rows: int) -> NDArray[np.int64]:
    """int64[E]: the end row of each group, given or made of choices; of a dense operation the end of its ``rows``."""
    means = meaning(spec)
    order = choices.row_order(means, inputs) if means.operands["choices"] else {}
    ends = order.get("offsets", inputs.get("offsets"))
    return np.array([rows]) if ends is None else ends.astype(np.int64)


def order_check(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Array]
) -> list[str]:
    """Errors in the order of rows that a launch with ``choices`` makes, one line each."""
    means, problems = meaning(spec), []
    for name, numbers in choices.row_order(means, inputs).items() if means.operands["choices"] else ():
        wrong = np.argwhere(np.asarray(outputs[name]) != numbers)
        if len(wrong):
            place = tuple(map(int, wrong[0]))
            problems.append(f"{name}: {outputs[name][place]} at {place}; it must be {numbers[place]}")
    return problems


def expected(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Chosen = None, columns: Chosen = None
) -> dict[str, Expected]:
    """The outputs of ``gemm`` for the rows that groups own, with the error that float32 arithmetic may make of it."""
    means = meaning(spec)
    hidden = set() if means.quant.wide else {tensor.name for tensor in coded(means)}
    return {name: want for name, want in _results(spec, inputs, rows, columns).items() if name not in hidden}


def _results(
    spec: KernelSpec | Mapping[str, Any], inputs: Mapping[str, Any], rows: Chosen, columns: Chosen
) -> dict[str, Expected]:
    """``expected``, and what is stored as FP8 values alone."""
    means = meaning(spec)
    for twin in twins(means):
        if hasattr(twin, "factors"):
            inputs = twin.factors(means, inputs)
    if means.epilogue == WGRAD:
        return wgrad.expected(means, inputs, rows, columns)
    ends = group_ends(inputs, need(inputs, "x", 2).shape[0], means)
    owner = row_groups(ends)
    chosen = indices("rows", rows, owner.size, "groups own")
    activation = _at_run_time(means.activation, inputs)
    with np.errstate(all="ignore"):  # infinities and NaNs in the inputs are carried through, not reported
        if means.activation.backward:
            across = indices("columns", columns, weights(means, inputs).shape[1], "da has")
            return backward.expected(means, activation, inputs, ends, owner, chosen, across)
        return _forward(means, activation, inputs, owner, chosen, columns)


def _forward(
    means: Meaning,
    activation: Activation,
    inputs: Mapping[str, Any],
    owner: NDArray[np.int64],
    rows: NDArray[np.int64] | None,
    columns: Chosen,
) -> dict[str, Expected]:
    n = weights(means, inputs).shape[1]
    width = n // 2 if activation.gated else n
    across = indices("columns", columns, width, "y has")
    chosen = np.arange(owner.size) if rows is None else rows
    z_columns, layout = layouts.columns_of(means.glu_layout, width, across)
    z, error = product(means, inputs, chosen, owner[chosen], z_columns)
    y = activations.activate(activation, layout, z)
    y_error = activations.error_bound(activation, layout, z, error)
    for twin in twins(means):
        if hasattr(twin, "output"):
            y, y_error = twin.output(means, inputs, y, y_error, chosen)
    total = need(inputs, "x", 2).shape[0]
    # Float32 is not rounded further: products and activation alone are off, a square by twice what z is.
    steps, single = -(-weights(means, inputs).shape[2] // wgrad.STEP), means.out_dtype == "f32"
    limit = wgrad.UNIT * (32 + 2 * steps) if single else None
    limit = limit_of(means, single) or limit
    outputs = {"y": Expected(means.out_dtype, chosen, y, y_error, across, shape=(total, width), limit=limit)}
    if means.operands["save_preactivation"]:
        shape = total, n
        outputs["preactivation"] = Expected(means.dtype, chosen, z, error, z_columns, shape, limit_of(means))
    return outputs


def _at_run_time(activation: Activation, inputs: Mapping[str, Any]) -> Activation:
    """The activation, the forward one of a backward one, with the scalars that a launch gave."""
    return replace(
        activation,
        kind=activation.function,
        alpha=float(inputs.get("act_alpha", activation.alpha)),
        limit=inputs.get("act_limit", activation.limit),
        up_offset=float(inputs.get("act_up_offset", activation.up_offset)),
    )

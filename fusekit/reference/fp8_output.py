"""FP8 output of a GEMM: its result rounded to bf16, then quantised as ``quantise`` does it, bit for bit.

A launch that also keeps the bf16 result can be held to every bit. Without it the result is known in float64 alone, with
the error that float32 may make of it: then nearly all FP8 values are equal, and each is of a number within that error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusekit.dtypes import DTYPES
from fusekit.plan.quant import E4M3, SIDE, Quant
from fusekit.plan.quantise import BLOCK, ROWS, SQUARE
from fusekit.reference import mx
from fusekit.reference.formats import Array, encode, values
from fusekit.reference.fp8 import Coded, coded, coded_shapes, decode, padded_starts
from fusekit.reference.meaning import Meaning
from fusekit.reference.measure import Expected, bound
from fusekit.reference.quantise import blocks, mx_blocks, quantise

EQUAL = 0.97  # share of FP8 values, where their scale is equal; and of scales


class Block(NamedTuple):
    """128 tokens of a group, or its last: rows [begin, stop); its number in the transpose."""

    begin: int
    stop: int
    number: int


def coded_outputs(means: Meaning, results: Mapping[str, Array], ends: NDArray[np.int64]) -> dict[str, Array]:
    """Every FP8 output, whole buffers, from bf16 ``results`` by name; unwritten bytes are all ones."""
    keys = {"out": BLOCK, "blocks": ROWS, "scales": means.quant.scales, "transpose": True}
    wanted: dict[str, Array] = {}
    for tensor in coded(means):
        result = results[tensor.name]
        if means.quant.mx:
            quantised = mx.outputs(tensor.name, result, int(ends[-1]), means.quant)
            wanted |= {name: quantised[name] for name in tensor.outputs}
            continue
        squares = {"transpose_blocks": SQUARE if tensor.columns == SIDE else ROWS}
        quantised = quantise(keys | squares, {"x": result, "offsets": ends})
        for name, (shape, _) in coded_shapes(means, tensor.name, result.shape, ends.size).items():
            wanted[name] = quantised[f"x_{name.rpartition('_')[2]}"][tuple(map(slice, shape))]
    return wanted


def token_blocks(ends: NDArray[np.int64]) -> list[Block]:
    """The blocks of tokens of all groups."""
    starts, begins = padded_starts(ends), [0, *ends[:-1]]
    return [
        Block(row, min(row + SIDE, int(end)), (int(start) + row - int(begin)) // SIDE)
        for start, begin, end in zip(starts, begins, ends, strict=False)
        for row in range(int(begin), int(end), SIDE)
    ]


def written(means: Meaning, name: str, shape: tuple[int, ...], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which elements of a coded output a launch writes."""
    if means.quant.mx:
        return mx.written(name.rpartition("_")[2], shape, int(ends[-1]), means.quant)
    mask = np.zeros(shape, dtype=bool)
    owned, tokens = int(ends[-1]) if ends.size else 0, int(padded_starts(ends)[-1])
    where: dict[str, Any] = {
        "q": slice(0, owned), "s": (slice(None), slice(0, owned)), "t": (slice(None), slice(0, tokens)),
        "ts": slice(0, tokens // SIDE),
    }  # fmt: skip
    mask[where[name.rpartition("_")[2]]] = True
    return mask


def coded_faults(
    means: Meaning, outputs: Mapping[str, Array], chosen: list[Block], wanted: Mapping[str, Expected]
) -> list[str]:
    """Errors in the ``chosen`` blocks, one line each; of results that are not kept, against ``wanted``, whose
    rows are those of the blocks, one after the other.
    """
    problems: list[str] = []
    for tensor in coded(means):
        exact, first = tensor.name in outputs, 0
        counts: dict[str, list[int]] = {}
        for block in chosen:
            room = None
            if exact:
                v = values(np.asarray(outputs[tensor.name][block.begin : block.stop]), "bf16")
            else:
                rows = slice(first, first + block.stop - block.begin)
                value, room = wanted[tensor.name].value[rows], bound(wanted[tensor.name])[rows]
                v, first = values(encode(value, "bf16"), "bf16"), rows.stop
            compared = _compared_mx if means.quant.mx else _compared
            for name, got, want in compared(tensor, means.quant, outputs, block, v.astype(np.float32), room):
                wrong = _differing(got, want, exact=exact)
                counts.setdefault(name, [0, 0])
                counts[name][0] += wrong
                counts[name][1] += got[0].size
                if exact and wrong:
                    problems.append(f"{name}: {wrong} elements of tokens {block.begin} to {block.stop - 1} differ")
        if not exact:
            problems += [
                f"{name}: {wrong} of {total} elements differ from those of the float64 result"
                for name, (wrong, total) in counts.items()
                if wrong > (1 - EQUAL) * total
            ]
    return problems


def _compared(
    tensor: Coded,
    recipe: Quant,
    outputs: Mapping[str, Array],
    block: Block,
    v: NDArray[np.float32],
    room: Array | None,
) -> list[Any]:
    """(name, written, expected) of a block: FP8 values and their scales, or scales and None. Of the expected also
    the numbers ``v`` that were quantised, with the error that the kernel's may have.
    """
    rows, tokens = slice(block.begin, block.stop), slice(block.number * SIDE, (block.number + 1) * SIDE)
    pairs = []
    if tensor.rows:
        q, s = outputs[f"{tensor.name}_q"][rows], outputs[f"{tensor.name}_s"][:, rows].T
        fp8, scales = blocks(v, 1, SIDE, recipe.scales)
        pairs += _pairs(tensor.name, "q", "s", (q, s), (fp8, scales), (v, room))
    if tensor.turned:
        padded = _turned(v)
        t, ts = outputs[f"{tensor.name}_t"][:, tokens], outputs[f"{tensor.name}_ts"][block.number][:, None]
        fp8, scales = blocks(padded, tensor.columns, SIDE, recipe.scales)
        near = padded, None if room is None else _turned(room)
        pairs += _pairs(tensor.name, "t", "ts", (t, ts), (fp8, scales), near, tensor.columns)
    return pairs


def _compared_mx(
    tensor: Coded,
    recipe: Quant,
    outputs: Mapping[str, Array],
    block: Block,
    v: NDArray[np.float32],
    room: Array | None,
) -> list[Any]:
    """The same of MXFP8."""
    rows, columns, pairs = slice(block.begin, block.stop), v.shape[1], []
    if tensor.rows:
        got = outputs[f"{tensor.name}_q"][rows], mx.of_block(outputs, tensor.name, "s", rows, columns, recipe)
        fp8, scales = mx_blocks(v)
        pairs += _pairs(tensor.name, "q", "s", got, (fp8, mx.numbers(scales)), (v, room), side=tensor.side)
    if tensor.turned:
        fp8, scales = mx_blocks(_turned(v))
        turned = outputs[f"{tensor.name}_t"][rows].T, mx.of_block(outputs, tensor.name, "ts", rows, columns, recipe)
        near = v.T, None if room is None else room.T
        want = fp8[:, : len(v)], mx.numbers(scales)
        pairs += _pairs(tensor.name, "t", "ts", turned, want, near, side=tensor.side)
    return pairs


def _turned(rows: Array) -> Array:
    """Rows of a block of tokens as columns, and zeros after them."""
    padded = np.zeros((rows.shape[1], SIDE), rows.dtype)
    padded[:, : len(rows)] = rows.T
    return padded


def _pairs(
    name: str, q: str, s: str, got: tuple[Array, Array], want: tuple[Array, Array], near: Any, rows: int = 1,
    side: int = SIDE,
) -> list[Any]:  # fmt: skip
    """rows: of FP8 values, along which a block has one scale; side: columns of them."""
    down, across = got[0].shape
    wide = [
        np.repeat(np.repeat(np.asarray(scales), rows, axis=0)[:down], side, axis=1)[:, :across]
        for scales in (got[1], want[1])
    ]
    return [
        (f"{name}_{s}", (np.asarray(got[1]), None), (want[1], None, None)),
        (f"{name}_{q}", (np.asarray(got[0]).view(np.uint8), wide[0]), (want[0], wide[1], near)),
    ]


def _differing(got: tuple[Array, Any], want: tuple[Array, Any, Any], *, exact: bool) -> int:
    """Elements that are wrong: in any bit; or else scales, and FP8 values of equal scale; all of them
    where a code is of no number that the kernel may have.
    """
    first, second = got[0], want[0]
    bits = first.view(f"u{first.itemsize}") if first.flags.c_contiguous else np.ascontiguousarray(first)
    unequal = bits.view(f"u{first.itemsize}") != np.ascontiguousarray(second).view(f"u{second.itemsize}")
    if exact or got[1] is None:
        return int(np.count_nonzero(unequal))
    form, (v, room) = DTYPES[E4M3], want[2]
    number = decode(first, E4M3).astype(np.float64)
    with np.errstate(all="ignore"):
        half = np.exp2(np.maximum(np.floor(np.log2(np.abs(number))), form.lowest) - form.significand)
        far = np.abs(number * got[1] - v) > room + half * got[1] * (1 + 1e-6)
    far &= np.isfinite(decode(second, E4M3)) & np.isfinite(v)
    return int(np.count_nonzero((got[1] == want[1]) & unequal)) + first.size * int(far.any())

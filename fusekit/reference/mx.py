"""Results of a GEMM as MXFP8: what a launch writes, and what blocks of tokens must hold.

Scales are looked at as they lie in "plain" layout; swizzled ones are put into it first. Groups begin at multiples of
128 where a kernel quantises along the tokens, or swizzled scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.quant import SIDE, Quant
from fusekit.plan.quantise import MX_SIDE, MXFP8
from fusekit.reference.formats import Array
from fusekit.reference.fp8 import mx_shapes
from fusekit.reference.quantise import quantise, swizzled

BLOCKS = SIDE // MX_SIDE


def outputs(name: str, result: Array, last: int, recipe: Quant) -> dict[str, Array]:
    """The output of a launch for ``result``, of which groups own the first ``last`` rows. Whole buffers, all ones
    where it writes nothing.
    """
    keys = {"out": MXFP8, "blocks": "1x128", "scales": recipe.scales, "transpose": recipe.transpose}
    quantised = quantise({**keys, "scale_layout": recipe.scale_layout}, {"x": result[:last]})
    arrays = {}
    for array_name, (shape, _) in mx_shapes(name, result.shape, recipe).items():
        end = array_name.rpartition("_")[2]
        whole, part = np.full(shape, 0xFF, np.uint8), in_rows(quantised[f"x_{end}"], end, recipe)
        whole[: part.shape[0], : part.shape[1]] = part
        arrays[array_name] = in_rows(whole, end, recipe, back=True)
    return arrays


def written(end: str, shape: tuple[int, ...], last: int, recipe: Quant) -> NDArray[np.bool_]:
    """Which elements of the output that ends with ``end`` a launch writes."""
    mask, tiles = np.zeros(shape, np.bool_), -(-last // SIDE)
    if end in ("q", "t"):
        mask[:last] = True
    elif end == "s":
        mask[: tiles * SIDE if recipe.swizzled else last] = True
    else:
        mask[:, : tiles * BLOCKS] |= recipe.swizzled
        mask[: tiles * BLOCKS] |= not recipe.swizzled
    return in_rows(mask, end, recipe, back=True)


def in_rows(scales: Array, end: str, recipe: Quant, *, back: bool = False) -> Array:
    """Swizzled scales, or what is said of them, as a matrix with a row for each row or column; others as they are.
    ``back``: the other way round.
    """
    if not recipe.swizzled or end not in ("s", "ts"):
        return scales
    if back:
        return swizzled(scales)
    rows, columns = scales.shape
    atoms = scales.reshape(rows // SIDE, columns // BLOCKS, 32, 4, BLOCKS).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(atoms).reshape(scales.shape)


def numbers(scales: Array) -> NDArray[np.float32]:
    """Bytes of scales as numbers."""
    return np.ldexp(np.float32(1), np.asarray(scales).view(np.uint8).astype(np.int32) - 127)


def of_block(outputs: Any, name: str, end: str, rows: slice, columns: int, recipe: Quant) -> NDArray[np.float32]:
    """The scales of ``rows``, a block of tokens: [rows, blocks of columns]; with ``end`` "ts" [columns, 4]."""
    scales = in_rows(np.asarray(outputs[f"{name}_{end}"]).view(np.uint8), end, recipe)
    if end == "s":
        return numbers(scales[rows])
    four = slice(rows.start // MX_SIDE, rows.start // MX_SIDE + BLOCKS)
    return numbers(scales[:columns, four] if recipe.swizzled else scales[four, :columns].T)

"""FP8 values, held as uint8: decoding, rounding to them, where groups of them begin, which
results of a GEMM are stored as such.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusekit.dtypes import DTYPES
from fusekit.plan.quant import E4M3, SIDE, Quant
from fusekit.plan.quantise import MX_SIDE
from fusekit.reference.formats import Array
from fusekit.reference.meaning import Meaning

SIGN, NAN = 0x80, 0x7F


@cache
def table(name: str) -> NDArray[np.float32]:
    """float32[256]: the value of each code of the format ``name``."""
    form = DTYPES[name]
    fraction = form.significand - 1
    fp8 = np.arange(SIGN)
    field, mantissa = fp8 >> fraction, (fp8 & (1 << fraction) - 1) / (1 << fraction)
    exponent = np.maximum(field, 1) + form.lowest - 1
    value = np.ldexp(np.where(field > 0, 1 + mantissa, mantissa), exponent)
    value[value > form.max] = np.nan
    if name == "e5m2":
        value[0x7C] = np.inf
    values_: NDArray[np.float32] = np.concatenate([value, -value]).astype(np.float32)
    return values_


def decode(fp8: Array, name: str) -> NDArray[np.float32]:
    """The values of ``fp8``: uint8, or an array of ml_dtypes' type of that name."""
    decoded: NDArray[np.float32] = table(name)[np.asarray(fp8).view(np.uint8)]
    return decoded


def encode(numbers: Array, name: str) -> NDArray[np.uint8]:
    """The nearest code of each of ``numbers``, of two the even one. What is too large saturates, a NaN is 0x7F."""
    form, numbers = DTYPES[name], np.asarray(numbers)
    size = np.fmin(np.abs(numbers), form.max)
    exponent = np.frexp(np.maximum(size, 2.0**form.lowest))[1] - 1  # of what is subnormal, the lowest
    fraction = form.significand - 1
    steps = np.rint(np.ldexp(size, fraction - exponent))  # a tie goes to the even one
    code: NDArray[np.uint8] = (steps + (exponent - form.lowest << fraction)).astype(np.uint8)
    code |= np.where(np.signbit(numbers), SIGN, 0).astype(np.uint8)
    code[np.isnan(numbers)] = NAN
    return code


def padded_starts(ends: Array) -> NDArray[np.int64]:
    """int64[E + 1]: the token at which each group begins in transposed tensors, and where the last one ends."""
    sizes = np.diff(np.asarray(ends, dtype=np.int64), prepend=0)
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    starts[1:] = np.cumsum(-(-sizes // SIDE) * SIDE)
    return starts


class Coded(NamedTuple):
    """A result with FP8 output: of its rows, of its transpose, of which `columns` have one scale; side: numbers
    that have one in a row.
    """

    name: str
    rows: bool
    turned: bool
    columns: int
    side: int = SIDE

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a launch writes."""
        rowwise = [("q", "s")] if self.rows else []
        return tuple(
            f"{self.name}_{end}" for pair in [*rowwise, *([("t", "ts")] if self.turned else [])] for end in pair
        )


def coded(means: Meaning) -> list[Coded]:
    """The results with FP8 output."""
    recipe, backward = means.quant, means.activation.backward
    columns = {name: SIDE if recipe.turned_square(name) else 1 for name in ("y", "dz")}
    name = "dz" if backward else "y"
    side = MX_SIDE if recipe.mx else SIDE
    results = [Coded(name, True, recipe.transpose, columns[name], side)] if recipe.coded else []
    if backward and recipe.transpose and means.operands["recompute"]:
        results.append(Coded("y", False, True, columns["y"], side))
    return results


def coded_shapes(means: Meaning, name: str, shape: tuple[int, int], groups: int) -> dict[str, tuple[Any, str]]:
    """Shape and dtype of what is stored of the result ``name`` [M, N]; the transpose has room for M + 127 E tokens."""
    if means.quant.mx:
        every = mx_shapes(name, shape, means.quant)
        return {output: every[output] for one in coded(means) if one.name == name for output in one.outputs}
    rows, columns = shape
    spare = (SIDE - 1) * groups if means.grouped else 0
    room = max(-(-(rows + spare) // SIDE), 1) * SIDE
    every = {
        f"{name}_q": (shape, E4M3),
        f"{name}_s": ((-(-columns // SIDE), rows), "f32"),
        f"{name}_t": ((columns, room), E4M3),
    }
    shapes: dict[str, tuple[Any, str]] = {}
    for one in coded(means):
        if one.name == name:
            every[f"{name}_ts"] = ((room // SIDE, -(-columns // one.columns)), "f32")
            shapes = {output: every[output] for output in one.outputs}
    return shapes


def mx_shapes(name: str, shape: tuple[int, int], recipe: Quant) -> dict[str, tuple[Any, str]]:
    """Shape and dtype of what is stored of the result ``name`` [M, N] as MXFP8."""
    tall, wide = (-(-extent // SIDE) for extent in shape)
    blocks = SIDE // MX_SIDE
    shapes: dict[str, tuple[Any, str]] = {
        f"{name}_q": (shape, E4M3),
        f"{name}_s": ((tall * SIDE, wide * blocks), "e8m0"),
    }
    if recipe.transpose:
        turned = (wide * SIDE, tall * blocks) if recipe.swizzled else (tall * blocks, wide * SIDE)
        shapes |= {f"{name}_t": (shape, E4M3), f"{name}_ts": (turned, "e8m0")}
    return shapes


def largest_shapes(means: Meaning, groups: int) -> dict[str, tuple[Any, str]]:
    """Shape and dtype of each; none for other kernels. Of dz, gates and ups have one each."""
    if not means.quant.largest:
        return {}
    backward = means.activation.backward
    sides = 2 if means.glu_layout != "none" else 1
    shape = ((groups,) if means.grouped else ()) + (sides,) if backward else (groups,)
    ends = ("amax", "rht_amax") if means.quant.rht_amax else ("amax",)
    return {f"{'dz' if backward else 'y'}_{end}": (shape, "f32") for end in ends}

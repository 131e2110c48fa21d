"""bf16 and fp16 as bit patterns: NumPy has no bfloat16, so a 16-bit tensor is held here as ``uint16``.

``encode`` rounds to nearest, ties to even, straight from the precision it is given (float64 is not rounded to float32
on the way), keeps infinities, signed zeros and subnormals, and maps every NaN to a NaN. A float32 tensor is just that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.dtypes import ARGUMENTS, DTYPES, FLOAT, DType

Array = NDArray[Any]


# Those that results are rounded to.
FORMATS = tuple(name for name in ARGUMENTS if DTYPES[name].kind == FLOAT and DTYPES[name].bits in (16, 32))

# All ones is a NaN in every format, and one that no arithmetic produces: what still holds it was never written.
POISON = 0xFFFF


def poisoned(array: Array) -> NDArray[np.bool_]:
    """Which elements of ``array`` (16 or 32 bits each) are all ones."""
    bits = array.view(f"u{array.itemsize}")
    return np.asarray(bits == np.iinfo(bits.dtype).max)


def format_of(name: str) -> DType:
    """The floating-point format ``name``; ``ValueError`` for anything but "bf16", "fp16" and "f32"."""
    if name not in FORMATS:
        raise ValueError(f"dtype {name!r}; a format is one of {', '.join(FORMATS)}")
    return DTYPES[name]


def held(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a tensor of ``name``: unsigned bits for a float of 16 bits or fewer."""
    dtype = DTYPES[name]
    return np.dtype(f"u{dtype.bytes}" if dtype.kind == FLOAT and dtype.bits <= 16 else dtype.array)


def encode(values: Array, name: str) -> NDArray[Any]:
    """Round float16/float32/float64 ``values`` to the format ``name``.

    The same shape: uint16 bit patterns of a 16-bit format, float32 numbers of "f32".
    """
    format_of(name)
    values = np.asarray(values)
    if values.dtype.char not in "efd":
        raise ValueError(f"cannot round an array of {values.dtype}; give float16, float32 or float64")
    if name == "bf16":
        return _encode_bf16(values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32) if name == "f32" else values.astype(np.float16).view(np.uint16)


def decode(bits: Array, name: str) -> NDArray[np.float32]:
    """The exact float32 values of uint16 ``bits`` in the 16-bit format ``name``; the same shape."""
    if name not in ("bf16", "fp16"):
        raise ValueError(f"dtype {name!r}; a 16-bit format is bf16 or fp16")
    if bits.dtype != np.uint16:
        raise ValueError(f"{name} bits come as uint16, not {bits.dtype}")
    if name == "fp16":
        with np.errstate(invalid="ignore"):
            return bits.view(np.float16).astype(np.float32)
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def values(array: Array, name: str) -> Array:
    """``array`` as floating-point numbers: uint16 (or an ml_dtypes bfloat16) is decoded as ``name``, floats pass."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return decode(array.view(np.uint16), "bf16")
    if array.dtype == np.uint16:
        return decode(array, name)
    if array.dtype.kind != "f":
        raise ValueError(f"a {name} tensor comes as uint16 bits or floating-point numbers, not {array.dtype}")
    return array


def _encode_bf16(values: Array) -> NDArray[np.uint16]:
    shape = values.shape
    values = np.ascontiguousarray(values).reshape(-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if values.dtype == np.float64:
        _undo_ties(values, single)
    # Half of the 16 bits dropped, less one, plus the bit that decides a tie. A mantissa that overflows carries into
    # the exponent, which is the next binade or, past the largest one, infinity.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x0040)
    return rounded.astype(np.uint16).reshape(shape)


def _undo_ties(values: NDArray[np.float64], single: NDArray[np.float32]) -> None:
    """Moves what rounding to float32 has put halfway between two bf16 numbers back to its side. A second rounding then
    gives what one rounding would; everywhere else it does already.
    """
    bits = single.view(np.uint32)
    half = np.flatnonzero((bits & np.uint32(0xFFFF)) == np.uint32(0x8000))
    exact, rounded = np.abs(values[half]), np.abs(single[half])
    bits[half] += (exact > rounded).astype(np.uint32)
    bits[half] -= (exact < rounded).astype(np.uint32)


# Root mean square of the numbers below, before scaling.
RMS = 0.88


def bits(shape: tuple[int, ...], dtype: str, seed: int, exponent: int = 0) -> NDArray[Any]:
    """Random numbers in +-[2**-3, 2) * 2**exponent, as bits of ``dtype``: uint16, or an unsigned number of its size.
    None is zero, rms 0.88 * 2**exponent.

    ``ValueError`` when the exponent takes them out of the format's normal range.
    """
    form = DTYPES[dtype] if DTYPES[dtype].bits == 8 else format_of(dtype)
    bias, fraction = 1 - form.lowest, form.significand - 1
    lowest = bias + exponent - 3
    if not 1 <= lowest <= 2 * bias - 3:
        raise ValueError(f"2**{exponent} scales {dtype} numbers out of its normal range; scale less")
    # Raw bits are kept as sign, two low exponent bits and mantissa; adding the lowest exponent makes them a number.
    kind, count = np.dtype(f"u{form.bytes}").type, int(np.prod(shape))
    raw = np.random.SFC64(seed).random_raw(-(-count * form.bits // 64)).view(kind)[:count]
    raw &= kind(1 << form.bits - 1 | ((4 << fraction) - 1))
    raw += kind(lowest << fraction)
    array: NDArray[Any] = raw.reshape(shape)
    return array

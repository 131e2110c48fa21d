"""MXFP4 weights as checkpoints have them: two e2m1 values a byte, the low nibble first, and a scale for 32 of a row.

    value = e2m1 2^(s - 127)

for a scale byte s from 1 to 249, which bf16 holds exactly. A byte of 0 counts as the scale 0. From 250 on, and for 255,
which is NaN, no number is finite: here all are NaN. Source of the formats: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import RMS, Array

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)])
SQUARE = float(np.mean(np.square(MAGNITUDES)))  # of any nibble, on average
LARGEST = 249  # the largest scale with which all values are finite


def scale(exponents: Array) -> NDArray[np.float64]:
    """What a value is multiplied by, of scale bytes."""
    given = np.asarray(exponents).view(np.uint8).astype(np.int64)
    return np.where(given > LARGEST, np.nan, np.where(given == 0, 0.0, np.ldexp(1.0, given - 127)))


def values(packed: Array) -> NDArray[np.float64]:
    """The e2m1 values of bytes [..., B], [..., 2 B]."""
    given = np.asarray(packed).view(np.uint8)
    return E2M1[np.stack([given & 15, given >> 4], axis=-1)].reshape(*given.shape[:-1], -1)


def decode(packed: Array, exponents: Array) -> NDArray[np.float64]:
    """Weights [..., K] of bytes [..., K / 32, 16] and scale bytes [..., K / 32]."""
    numbers = values(packed) * scale(exponents)[..., None]
    return numbers.reshape(*numbers.shape[:-2], -1)


def random_scales(shape: tuple[int, ...], depth: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Scale bytes with which sums of `depth` products of random values and inputs have a spread of about 1."""
    middle = 127 - round(0.5 * float(np.log2(max(depth, 1) * SQUARE * RMS**2)))
    return rng.integers(middle - 1, middle + 2, shape).astype(np.uint8)


def random_bytes(shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Bytes of random values."""
    count = int(np.prod(shape))
    raw: NDArray[Any] = np.random.SFC64(seed).random_raw(-(-count // 8)).view(np.uint8)[:count]
    return raw.reshape(shape)

"""Rounding to bf16 and fp16, against ml_dtypes and NumPy."""

import numpy as np
import pytest

from fusekit.reference import formats

ALL = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_pattern_survives_decode_and_encode(name):
    numbers = formats.decode(ALL, name)
    nan = np.isnan(numbers)
    for wide in (np.float32, np.float64):
        with np.errstate(invalid="ignore"):  # signalling NaNs on the way to float64
            back = formats.encode(numbers.astype(wide), name)
        assert np.array_equal(back[~nan], ALL[~nan])
        assert np.isnan(formats.decode(back[nan], name)).all()


def test_decode_bf16_is_the_upper_half_of_a_float32():
    assert np.array_equal(formats.decode(ALL, "bf16").view(np.uint32), ALL.astype(np.uint32) << 16)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_encode_float32_agrees_with_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    theirs = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[name]
    with np.errstate(all="ignore"):
        want = numbers.astype(theirs).view(np.uint16)
    got = formats.encode(numbers, name)
    nan = np.isnan(numbers)
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(formats.decode(got[nan], name)).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_ties_and_their_neighbours(name):
    """Half way between two neighbours goes to the even one; a hair off, in float64 only, goes to the nearer."""
    low = ALL[:-1][np.isfinite(formats.decode(ALL[:-1], name)) & np.isfinite(formats.decode(ALL[1:], name))]
    low = low[low < 0x7FFF]
    below, above = (formats.decode(bits, name).astype(np.float64) for bits in (low, low + np.uint16(1)))
    middle = (below + above) / 2
    assert np.array_equal(formats.encode(middle, name), low + (low & 1))
    assert np.array_equal(formats.encode(np.nextafter(middle, above), name), low + 1)
    assert np.array_equal(formats.encode(np.nextafter(middle, below), name), low)
    assert np.array_equal(formats.encode(-middle, name), (low + (low & 1)) | 0x8000)


@pytest.mark.parametrize(("name", "wide"), [("bf16", np.float32), ("bf16", np.float64), ("fp16", np.float64)])
def test_past_the_largest(name, wide):
    largest = formats.format_of(name).max
    half_unit = largest * 2.0 ** -formats.format_of(name).significand
    numbers = np.array([largest, largest + half_unit * 0.5, np.inf, -np.inf, -0.0], dtype=wide)
    assert formats.decode(formats.encode(numbers, name), name).tolist() == [largest, largest, np.inf, -np.inf, 0.0]
    assert np.signbit(formats.decode(formats.encode(numbers, name), name)[-1])
    with np.errstate(over="ignore"):
        over = np.array([largest + half_unit * 1.5, 2 * largest], dtype=np.float64).astype(wide)
    assert np.isinf(formats.decode(formats.encode(over, name), name)).all()


def test_format_facts():
    for name in ("bf16", "fp16"):
        form = formats.format_of(name)
        numbers = formats.decode(ALL, name)
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        assert finite.max() == form.max
        assert finite[finite > 0].min() == form.smallest
        assert formats.decode(formats.encode(np.ones(1), name) + np.uint16(1), name)[0] == 1 + 2 * 2**-form.significand
        assert np.isnan(formats.decode(np.array([formats.POISON], np.uint16), name)[0])


def test_values_takes_bits_floats_and_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = np.array([1.5, -3.0], dtype=np.float32)
    assert formats.values(formats.encode(numbers, "fp16"), "fp16").tolist() == [1.5, -3.0]
    assert formats.values(numbers.astype(ml_dtypes.bfloat16), "bf16").tolist() == [1.5, -3.0]
    assert formats.values(numbers, "bf16") is numbers


@pytest.mark.parametrize(
    "call",
    [
        lambda: formats.encode(np.ones(1), "fp8"),
        lambda: formats.encode(np.ones(1, dtype=np.int32), "bf16"),
        lambda: formats.decode(np.ones(1, dtype=np.int16), "bf16"),
        lambda: formats.values(np.ones(1, dtype=np.int32), "bf16"),
    ],
)
def test_what_is_no_number_is_refused(call):
    with pytest.raises(ValueError, match=r"fp8|int"):
        call()


def test_shape_and_strides_are_kept():
    numbers = np.arange(24, dtype=np.float64).reshape(2, 3, 4).transpose(2, 0, 1)
    bits = formats.encode(numbers, "bf16")
    assert bits.shape == (4, 2, 3)
    assert np.array_equal(formats.decode(bits[:, ::-1], "bf16"), numbers[:, ::-1])
    assert formats.encode(np.empty((0, 8)), "bf16").shape == (0, 8)

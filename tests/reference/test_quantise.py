"""Codes, scales and blocks against ml_dtypes and against the rules in exact arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fusekit import reference
from fusekit.reference import codes
from fusekit.reference.codes import padded_starts
from fusekit.reference.quantise import blocks, scale_of

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
KEYS = {"op": "quantise", "out": "fp8-block", "blocks": "1x128", "scales": "pow2", "transpose": False}


@pytest.mark.parametrize("name", TYPES)
def test_every_code_has_the_value_of_ml_dtypes(name):
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(codes.decode(every, name), every.view(TYPES[name]).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
def test_rounding_is_that_of_ml_dtypes_but_saturates(name):
    rng = np.random.default_rng(0)
    table = codes.table(name)
    finite = table[np.isfinite(table)]
    middles = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2  # ties
    numbers = np.concatenate([rng.standard_normal(200_000) * 50, finite, middles, [0.0, -0.0, 1e30, -1e30]])
    numbers = numbers.astype(np.float32)
    largest = finite.max()
    want = np.clip(numbers, -largest, largest).astype(TYPES[name]).view(np.uint8)
    assert np.array_equal(codes.encode(numbers, name), want)
    odd = codes.encode(np.array([np.nan, np.inf, -np.inf], np.float32), name)
    assert odd[0] == 0x7F
    assert np.array_equal(codes.decode(odd[1:], name), [largest, -largest])


def test_powers_of_two_are_the_least_that_hold_the_block():
    """For every bf16 number: e is the smallest integer in [-126, 126] with 448 2^e >= a."""
    bits = np.arange(1, 0x7F80, 7, dtype=np.uint32)
    a = (bits << 16).view(np.float32)
    scale, inverse = scale_of(a, "pow2")
    for number, each in zip(a, scale, strict=True):
        e = int(np.log2(each))
        assert e == 126 or Fraction(float(number)) <= 448 * Fraction(2) ** e
        assert e == -126 or Fraction(float(number)) > 448 * Fraction(2) ** (e - 1)
    assert np.array_equal(scale.astype(np.float64) * inverse, np.ones(scale.size))


def test_the_step_is_at_448_and_odd_blocks_have_scale_1():
    above = np.nextafter(np.float32(448 * 2.0**-5), np.float32(np.inf))
    a = np.array([448, 448 * 2.0**-5, above, 0, np.inf], np.float32)
    assert scale_of(a, "pow2")[0].tolist() == [1, 2.0**-5, 2.0**-4, 1, 1]
    scale, inverse = scale_of(np.array([0, 448, np.inf], np.float32), "f32")
    assert scale[0] == np.float32(1e-4) / np.float32(448)
    assert scale[1:].tolist() == inverse[1:].tolist() == [1, 1]


@pytest.mark.parametrize("rule", ["pow2", "f32"])
def test_a_block_is_its_numbers_within_half_a_step(rule):
    rng = np.random.default_rng(1)
    v = (rng.standard_normal((40, 300)) * 2.0 ** rng.integers(-20, 20, (40, 1))).astype(np.float32)
    made, scale = blocks(v, 1, 128, rule)
    back = codes.decode(made, "e4m3") * np.repeat(scale, 128, axis=1)[:, :300]
    assert np.linalg.norm(back - v) / np.linalg.norm(v) < 0.03
    assert np.abs(codes.decode(made, "e4m3")).max() <= 448


def test_nan_and_infinity_stay_for_themselves():
    v = np.full((1, 128), 3.0, np.float32)
    v[0, 5] = np.nan
    made, scale = blocks(v, 1, 128, "pow2")
    assert made[0, 5] == 0x7F
    assert scale[0, 0] == 2.0**-7
    assert set(codes.decode(np.delete(made[0], 5), "e4m3")) == {384.0}
    v[0, 6] = -np.inf
    made, scale = blocks(v, 1, 128, "pow2")
    assert scale[0, 0] == 1
    assert codes.decode(made[0, [6, 7]], "e4m3").tolist() == [-448, 3]


def test_transposed_groups_begin_at_multiples_of_128():
    sizes = (0, 1, 128, 129, 0, 31)
    inputs = reference.quantise_inputs(KEYS | {"transpose": True}, M=300, K=48, E=6, sizes=sizes)
    outputs = reference.quantise(KEYS | {"transpose": True}, inputs)
    assert padded_starts(inputs["offsets"]).tolist() == [0, 0, 128, 256, 512, 512, 640]
    x = reference.decode(inputs["x"], "bf16")
    scale = np.repeat(outputs["x_ts"], 128, axis=0).T
    back = codes.decode(outputs["x_t"], "e4m3") * scale
    assert np.allclose(back[:, 256:385], x[129:258].T, rtol=0.07)
    assert (outputs["x_t"][:, 385:512] == 0).all()
    assert (outputs["x_t"][:, 640:] == 0xFF).all()  # nothing writes there
    assert (outputs["x_q"][289:] == 0xFF).all()


def test_rows_that_an_index_chooses_are_those_of_the_permuted_copy():
    keys = KEYS | {"transpose": True}
    inputs = reference.quantise_inputs(keys | {"gather": True}, M=300, K=48, E=3, T=90, sizes=(100, 0, 190))
    index = inputs["index"]
    assert (index == -1).any() and index.max() < 90
    rows = np.where((index >= 0)[:, None], inputs["x"][index], np.uint16(0))
    want = reference.quantise(keys, inputs | {"x": rows})
    found = reference.quantise(keys | {"gather": True}, inputs)
    alone = reference.quantise(keys | {"gather": True, "rows": False}, inputs)
    for name in want:
        assert np.array_equal(found[name].view(np.uint8), want[name].view(np.uint8)), name
    assert set(alone) == {"x_t", "x_ts"}
    assert np.array_equal(alone["x_t"], want["x_t"])


def test_without_groups_all_rows_are_one():
    keys = KEYS | {"transpose": True}
    inputs = reference.quantise_inputs(keys | {"groups": False}, M=200, K=48)
    assert "offsets" not in inputs
    found = reference.quantise(keys | {"groups": False}, inputs)
    want = reference.quantise(keys, inputs | {"offsets": np.array([200])})
    assert found["x_t"].shape == (48, 256) and found["x_ts"].shape == (2, 48)
    assert np.array_equal(found["x_t"], want["x_t"][:, :256]) and np.array_equal(found["x_q"], want["x_q"])


def test_without_rows_one_group_has_a_block_of_zeros():
    keys = KEYS | {"transpose": True, "groups": False}
    found = reference.quantise(keys, reference.quantise_inputs(keys, M=0, K=48))
    assert found["x_t"].shape == (48, 128) and not found["x_t"].any()
    assert found["x_ts"].shape == (1, 48) and (found["x_ts"] == 1).all()


def test_squares_are_the_same_bytes_in_both_orientations():
    keys = KEYS | {"blocks": "128x128", "transpose": True}
    inputs = reference.quantise_inputs(keys, M=144, K=272, E=2)
    outputs = reference.quantise(keys, inputs)
    assert np.array_equal(outputs["w_t"], outputs["w_q"].transpose(0, 2, 1))
    assert outputs["w_ts"].shape == (2, 3, 2)
    assert reference.quantise_check(keys, inputs, outputs) == []
    outputs["w_t"][1, 7, 3] ^= 1
    assert (
        "w_t: 1 of 78336 elements differ (0 that nothing writes)" in reference.quantise_check(keys, inputs, outputs)[0]
    )

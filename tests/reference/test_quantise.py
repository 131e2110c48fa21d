"""FP8 values, scales and blocks against ml_dtypes and against the rules in exact arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fusekit import reference
from fusekit.plan.quantise import SIGNS
from fusekit.reference import fp8
from fusekit.reference.fp8 import padded_starts
from fusekit.reference.quantise import blocks, mx_blocks, rotated, scale_of, swizzled

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
KEYS = {"op": "quantise", "out": "fp8-block", "blocks": "1x128", "scales": "pow2", "transpose": False,
        "scale_layout": "plain", "rht_amax": False}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_code_has_the_value_of_ml_dtypes(name):
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(fp8.decode(every, name), every.view(TYPES[name]).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
def test_rounding_is_that_of_ml_dtypes_but_saturates(name):
    rng = np.random.default_rng(0)
    table = fp8.table(name)
    finite = table[np.isfinite(table)]
    middles = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2  # ties
    numbers = np.concatenate([rng.standard_normal(200_000) * 50, finite, middles, [0.0, -0.0, 1e30, -1e30]])
    numbers = numbers.astype(np.float32)
    largest = finite.max()
    want = np.clip(numbers, -largest, largest).astype(TYPES[name]).view(np.uint8)
    assert np.array_equal(fp8.encode(numbers, name), want)
    odd = fp8.encode(np.array([np.nan, np.inf, -np.inf], np.float32), name)
    assert odd[0] == 0x7F
    assert np.array_equal(fp8.decode(odd[1:], name), [largest, -largest])


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
    values, scale = blocks(v, 1, 128, rule)
    back = fp8.decode(values, "e4m3") * np.repeat(scale, 128, axis=1)[:, :300]
    assert np.linalg.norm(back - v) / np.linalg.norm(v) < 0.03
    assert np.abs(fp8.decode(values, "e4m3")).max() <= 448


def test_nan_and_infinity_stay_for_themselves():
    v = np.full((1, 128), 3.0, np.float32)
    v[0, 5] = np.nan
    values, scale = blocks(v, 1, 128, "pow2")
    assert values[0, 5] == 0x7F
    assert scale[0, 0] == 2.0**-7
    assert set(fp8.decode(np.delete(values[0], 5), "e4m3")) == {384.0}
    v[0, 6] = -np.inf
    values, scale = blocks(v, 1, 128, "pow2")
    assert scale[0, 0] == 1
    assert fp8.decode(values[0, [6, 7]], "e4m3").tolist() == [-448, 3]


def test_transposed_groups_begin_at_multiples_of_128():
    sizes = (0, 1, 128, 129, 0, 31)
    inputs = reference.quantise_inputs(KEYS | {"transpose": True}, M=300, K=48, E=6, sizes=sizes)
    outputs = reference.quantise(KEYS | {"transpose": True}, inputs)
    assert padded_starts(inputs["offsets"]).tolist() == [0, 0, 128, 256, 512, 512, 640]
    x = reference.decode(inputs["x"], "bf16")
    scale = np.repeat(outputs["x_ts"], 128, axis=0).T
    back = fp8.decode(outputs["x_t"], "e4m3") * scale
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
    got = reference.quantise(keys | {"gather": True}, inputs)
    alone = reference.quantise(keys | {"gather": True, "rows": False}, inputs)
    for name in want:
        assert np.array_equal(got[name].view(np.uint8), want[name].view(np.uint8)), name
    assert set(alone) == {"x_t", "x_ts"}
    assert np.array_equal(alone["x_t"], want["x_t"])


def test_without_groups_all_rows_are_one():
    keys = KEYS | {"transpose": True}
    inputs = reference.quantise_inputs(keys | {"groups": False}, M=200, K=48)
    assert "offsets" not in inputs
    got = reference.quantise(keys | {"groups": False}, inputs)
    want = reference.quantise(keys, inputs | {"offsets": np.array([200])})
    assert got["x_t"].shape == (48, 256) and got["x_ts"].shape == (2, 48)
    assert np.array_equal(got["x_t"], want["x_t"][:, :256]) and np.array_equal(got["x_q"], want["x_q"])


def test_without_rows_one_group_has_a_block_of_zeros():
    keys = KEYS | {"transpose": True, "groups": False}
    got = reference.quantise(keys, reference.quantise_inputs(keys, M=0, K=48))
    assert got["x_t"].shape == (48, 128) and not got["x_t"].any()
    assert got["x_ts"].shape == (1, 48) and (got["x_ts"] == 1).all()


def test_squares_are_the_same_bytes_in_both_orientations():
    keys = KEYS | {"blocks": "128x128", "transpose": True}
    inputs = reference.quantise_inputs(keys, M=144, K=272, E=2)
    outputs = reference.quantise(keys, inputs)
    assert np.array_equal(outputs["w_t"], outputs["w_q"].transpose(0, 2, 1))
    assert outputs["w_ts"].shape == (2, 3, 2)
    alone = reference.quantise(keys | {"rows": False}, inputs)
    assert alone.keys() == {"w_t", "w_ts"} and all(np.array_equal(alone[each], outputs[each]) for each in alone)
    assert reference.quantise_check(keys, inputs, outputs) == []
    outputs["w_t"][1, 7, 3] ^= 1
    assert (
        "w_t: 1 of 78336 elements differ (0 that nothing writes)" in reference.quantise_check(keys, inputs, outputs)[0]
    )


@pytest.mark.parametrize("more", [{"blocks": "128x128", "transpose": True}, {"transpose": True}, {"gather": True}])
def test_float32_has_the_fp8_values_of_its_rounding_to_bf16(more):
    keys = KEYS | more
    inputs = reference.quantise_inputs(keys | {"dtype": "f32"}, M=144, K=272, E=2)
    name = "w" if "blocks" in more else "x"
    wide = inputs[name]
    assert wide.dtype == np.float32 and (wide.view(np.uint32) & 0xFFFF).any()
    wide.flat[:5] = 3.4e38, -np.inf, np.nan, 1e-45, 448.9  # rounds to infinity; ...; to 448
    want = reference.quantise(keys, inputs | {name: reference.encode(wide, "bf16")})
    got = reference.quantise(keys | {"dtype": "f32"}, inputs)
    for each in want:
        assert np.array_equal(got[each].view(np.uint8), want[each].view(np.uint8)), each


def test_mx_scales_are_the_least_that_hold_32_numbers():
    bits = np.arange(0, 0x7F80, 5, dtype=np.uint32)
    a = (bits << 16).view(np.float32)
    v = np.zeros((a.size, 32), np.float32)
    v[:, 7] = -a
    coded, byte = mx_blocks(v)
    for number, each in zip(a, byte[:, 0], strict=True):
        e = int(each) - 127
        assert e == 127 or Fraction(float(number)) <= 448 * Fraction(2) ** e
        assert number == 0 or e == -126 or Fraction(float(number)) > 448 * Fraction(2) ** (e - 1)
    assert byte[0, 0] == 0
    back = fp8.decode(coded[:, 7], "e4m3") * np.ldexp(1.0, byte[:, 0].astype(int) - 127)
    wide = a > 1e-30
    assert (np.abs(back + a)[wide] <= a[wide] / 16).all()


def test_mx_blocks_end_where_they_must():
    keys = KEYS | {"out": "mxfp8", "transpose": True}
    inputs = reference.quantise_inputs(keys, M=300, K=48)
    got = reference.quantise(keys, inputs)
    assert {name: each.shape for name, each in got.items()} == {
        name: shape for name, (shape, _) in reference.quantise_output_shapes(keys, M=300, K=48).items()
    }
    assert not got["x_s"][:300, 2:].any()
    assert (got["x_s"][300:] == 0xFF).all()  # nothing writes there
    assert not got["x_ts"][10:].any()
    assert not got["x_ts"][:, 48:].any()
    x = reference.decode(inputs["x"], "bf16")
    byte = np.repeat(got["x_ts"][:10], 32, axis=0)[:300, :48].astype(int)
    assert np.allclose(fp8.decode(got["x_t"], "e4m3") * np.ldexp(1.0, byte - 127), x, rtol=0.07, atol=1e-2)
    infinite = np.full((1, 32), 2.0, np.float32)
    infinite[0, 3] = np.inf
    values, byte = mx_blocks(infinite)
    assert byte[0, 0] == 254
    assert fp8.decode(values[0], "e4m3")[3] == 448


@pytest.mark.parametrize("layout", ["plain", "swizzled"])
@pytest.mark.parametrize("transpose", [False, True])
def test_mx_of_no_rows_is_empty(layout, transpose):
    keys = KEYS | {"out": "mxfp8", "transpose": transpose, "scale_layout": layout}
    got = reference.quantise(keys, reference.quantise_inputs(keys, M=0, K=48))
    shapes = reference.quantise_output_shapes(keys, M=0, K=48)
    assert {name: each.shape for name, each in got.items()} == {name: shape for name, (shape, _) in shapes.items()}
    assert not any(each.size for each in got.values())


def test_swizzled_scales_lie_where_the_formula_says():
    plain = np.random.default_rng(0).integers(0, 255, (256, 12)).astype(np.uint8)
    flat = swizzled(plain).reshape(-1)
    for i in (0, 1, 31, 32, 100, 127, 128, 255):
        for j in range(12):
            assert flat[((i // 128) * 3 + j // 4) * 512 + (i % 32) * 16 + (i // 32 % 4) * 4 + j % 4] == plain[i, j]


def test_the_rotation_is_sylvesters_matrix():
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    v = np.random.default_rng(0).standard_normal((37, 5)).astype(np.float32)
    padded = np.zeros((48, 5))
    padded[:37] = v
    want = np.einsum("ij,rjc->ric", matrix * np.array(SIGNS), padded.reshape(3, 16, 5))
    got = rotated(v)
    assert np.allclose(got.reshape(3, 16, 5), want, atol=1e-5)
    keys = KEYS | {"out": "amax", "rht_amax": True}
    inputs = reference.quantise_inputs(keys, M=90, K=16, E=3, sizes=(37, 0, 50))
    quantised = reference.quantise(keys, inputs)
    x = reference.decode(inputs["x"], "bf16")
    assert quantised["x_amax"].tolist() == [np.abs(x[:37]).max(), 0, np.abs(x[37:87]).max()]
    assert quantised["x_rht_amax"][0] == pytest.approx(np.abs(rotated(x[:37])).max() / 4, rel=2**-8)
    assert not (quantised["x_rht_amax"].view(np.uint32) & 0xFFFF).any()

"""FP8 output: against ml_dtypes and exact scales, and every way of being wrong is found."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fusekit import reference
from fusekit.reference.fp8 import coded_shapes, largest_shapes, padded_starts
from fusekit.reference.largest import largest
from fusekit.reference.layouts import split
from fusekit.reference.meaning import meaning
from fusekit.reference.mx import in_rows
from fusekit.spec import parse_file

VARIANTS = {
    spec.full_name.partition("/")[2]: spec
    for spec in parse_file(Path(__file__).parents[1] / "gpu" / "matrix_fp8_output.toml")
}
SPECS = {spec.kernel: spec for spec in VARIANTS.values()}
SIZES = (0, 1, 128, 129, 0, 31)
E4M3 = ml_dtypes.float8_e4m3fn


def case(name, sizes=SIZES, n=2 * 208, k=144, spare=3):
    """(spec, inputs, y in bf16, outputs as a kernel leaves them)."""
    spec = SPECS[name]
    inputs = reference.make_inputs(spec, E=len(sizes), M=sum(sizes) + spare, N=n, K=k, seed=3, sizes=sizes, spare=spare)
    means = meaning(spec)
    wide = spec.canonical() | {
        "quant": spec.quant.canonical() if means.quant.keep else f"{spec.quant.canonical()} keep=true"
    }
    whole = reference.gemm(wide, inputs)["y"]
    y = reference.encode(np.nan_to_num(whole), "bf16")
    outputs = reference.coded_outputs(means, {"y": y}, inputs["offsets"])
    if means.quant.keep:
        outputs["y"] = y
    return spec, inputs, y, outputs


def by_hand(v):
    """FP8 values and scale of one block."""
    a = np.abs(v).max(initial=0)
    e = 0
    if a:
        e = int(np.ceil(np.log2(float(a) / 448)))
        e += int(448 * 2.0**e < a) - int(448 * 2.0 ** (e - 1) >= a)
    return (v * 2.0**-e).astype(E4M3).view(np.uint8), 2.0**e


def test_fp8_values_are_those_of_ml_dtypes():
    _, inputs, y, outputs = case("turned-kept")
    v, ends = reference.decode(y, "bf16"), inputs["offsets"]
    starts = padded_starts(ends)
    for group, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for row in range(begin, end, 37):
            for block, first in enumerate(range(0, 208, 128)):
                fp8, scale = by_hand(v[row, first : first + 128])
                assert np.array_equal(outputs["y_q"][row, first : first + 128], fp8)
                assert outputs["y_s"][block, row] == scale
        for token in range(begin, end, 128):
            at = int(starts[group]) + token - begin
            for column in range(0, 208, 29):
                stop = min(token + 128, end)
                fp8, scale = by_hand(v[token:stop, column])
                assert np.array_equal(outputs["y_t"][column, at : at + stop - token], fp8)
                assert not outputs["y_t"][column, at + stop - token : at + 128].any()
                assert outputs["y_ts"][at // 128, column] == scale


def test_squares_have_one_scale():
    _, inputs, y, outputs = case("turned-squares-kept")
    v, starts = reference.decode(y, "bf16"), padded_starts(inputs["offsets"])
    assert outputs["y_ts"].shape == (len(outputs["y_t"][0]) // 128, 2)
    for token, group, stop in ((1, 2, 129), (129, 3, 257), (257, 3, 258)):
        at = int(starts[group]) + token - int(inputs["offsets"][group - 1])
        for square, first in enumerate(range(0, 208, 128)):
            fp8, scale = by_hand(v[token:stop, first : first + 128])
            assert np.array_equal(outputs["y_t"][first : first + 128, at : at + stop - token], fp8.T)
            assert outputs["y_ts"][at // 128, square] == scale


@pytest.mark.parametrize("name", ["turned-kept", "turned", "rows", "turned-kept-interleaved", "turned-squares-kept"])
def test_what_is_right_passes(name):
    spec, inputs, _, outputs = case(name)
    assert reference.coded_check(spec, inputs, outputs) == []
    assert reference.coded_check(spec, inputs, outputs, most=2) == []


HARMS = {
    "code": ("y_q", (5, 7), 1, "y_q: 1 elements of tokens 1 to 128 differ"),
    "scale": ("y_s", (1, 130), 2, "y_s: 1 elements of tokens 129 to 256 differ"),
    "turned-code": ("y_t", (100, 129), 1, "y_t: 1 elements of tokens 1 to 128 differ"),
    "padding": ("y_t", (100, 450), 1, "y_t: 1 elements of tokens 257 to 257 differ"),
    "turned-scale": ("y_ts", (4, 9), 2, "y_ts: 1 elements of tokens 258 to 288 differ"),
    "spare-row": ("y_q", (290, 0), 0xFF, "y_q: 1 elements written, of no group's, the first at (290, 0)"),
    "spare-scale": ("y_s", (0, 291), 1.0, "y_s: 1 elements written, of no group's, the first at (0, 291)"),
    "spare-block": ("y_t", (0, 640), 0xFF, "y_t: 1 elements written, of no group's, the first at (0, 640)"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_each_way_of_being_wrong_is_found(harm):
    spec, inputs, _, outputs = case("turned-kept")
    name, place, change, message = HARMS[harm]
    if outputs[name].dtype == np.uint8:
        outputs[name][place] ^= change
    else:
        outputs[name][place] = change if np.isnan(outputs[name][place]) else outputs[name][place] * change
    assert [line for line in reference.coded_check(spec, inputs, outputs) if line.startswith(message)]


def test_what_was_not_written_is_found():
    spec, inputs, _, outputs = case("turned-kept")
    outputs["y_ts"][2, 3:5] = np.uint32(2**32 - 1).view(np.float32)
    assert "y_ts: 2 elements not written, the first at (2, 3)" in reference.coded_check(spec, inputs, outputs)


def test_without_the_bf16_result_fp8_values_may_be_those_of_its_neighbours():
    spec, inputs, y, outputs = case("turned")
    near = y.copy()
    near[1:289:4] += 1
    near = reference.coded_outputs(meaning(spec), {"y": near}, inputs["offsets"])
    assert (near["y_q"] != outputs["y_q"]).any()
    assert reference.coded_check(spec, inputs, near) == []
    size = outputs["y_q"][1:129] & 0x7F
    place = np.unravel_index(np.argmax(np.where(size < 0x70, size, 0)), size.shape)
    outputs["y_q"][1:129][place] += 1
    assert any(line.startswith("y_q: ") for line in reference.coded_check(spec, inputs, outputs))
    _, _, _, outputs = case("turned")
    outputs["y_s"][:, 1:60] *= 2
    assert any(line.startswith("y_s: ") for line in reference.coded_check(spec, inputs, outputs))


def test_shapes_have_room_for_padded_groups():
    means = meaning(SPECS["turned"])
    assert coded_shapes(means, "y", (1000, 2880), 10) == {
        "y_q": ((1000, 2880), "e4m3"), "y_s": ((23, 1000), "f32"), "y_t": ((2880, 2304), "e4m3"),
        "y_ts": ((18, 2880), "f32"),
    }  # fmt: skip
    assert list(coded_shapes(meaning(SPECS["rows"]), "y", (5, 128), 1)) == ["y_q", "y_s"]
    dense = coded_shapes(meaning(SPECS["dense-turned-kept"]), "y", (128, 128), 1)
    assert dense["y_t"] == ((128, 128), "e4m3")


ALIGNED = (0, 128, 384, 0)
MX = ["mx-rows-kept-64", "mx-swizzled-kept", "mx-turned-kept", "mx-rows"]


@pytest.mark.parametrize("name", MX)
def test_mxfp8_of_rows_and_tokens(name):
    """Each block by hand, wherever its scale lies; then every way of being wrong."""
    spec, inputs, y, outputs = case(name, ALIGNED, n=2 * 224, spare=40)
    recipe, last, v = meaning(spec).quant, sum(ALIGNED), reference.decode(y, "bf16")
    assert reference.coded_check(spec, inputs, outputs) == []
    scales = {end: in_rows(outputs[f"y_{end}"], end, recipe) for end in ("s", "ts") if f"y_{end}" in outputs}
    for row in range(0, last, 37):
        for block, first in enumerate(range(0, 224, 32)):
            fp8, scale = by_hand(v[row, first : first + 32])
            assert np.array_equal(outputs["y_q"][row, first : first + 32], fp8)
            assert 2.0 ** (int(scales["s"][row, block]) - 127) == scale
        assert not scales["s"][row, 7:].any()  # of columns that fill the tile
    for token in range(0, last if "ts" in scales else 0, 32):
        for column in range(0, 224, 29):
            fp8, scale = by_hand(v[token : token + 32, column])
            assert np.array_equal(outputs["y_t"][token : token + 32, column], fp8)
            assert 2.0 ** (int(scales["ts"][token // 32, column]) - 127) == scale
    for end in ("q", "s", "t", "ts"):
        whole = outputs.get(f"y_{end}") if recipe.keep else None  # else neighbours of a code may be right
        if whole is not None:
            place = (130, 3) if end in "qt" else (5, 2)
            whole[place] ^= 3
            assert any(line.startswith(f"y_{end}: ") for line in reference.coded_check(spec, inputs, outputs))
            whole[place] ^= 3
            spare = np.argwhere(whole == 0xFF)
            if end in "qt":
                whole[tuple(spare[0])] = 0
                assert any("of no group's" in line for line in reference.coded_check(spec, inputs, outputs))
                whole[tuple(spare[0])] = 0xFF


@pytest.mark.parametrize("name", ["amax@64x192", "amax-dense", "dz-amax", "dz-amax-interleaved"])
def test_largest_numbers_of_groups(name):
    spec = next(spec for key, spec in VARIANTS.items() if key.startswith(name))
    sizes = SIZES if spec.grouped else (sum(SIZES),)
    inputs = reference.make_inputs(spec, E=len(sizes), M=sum(sizes), N=2 * 208, K=144, seed=3, sizes=sizes)
    means, ends = meaning(spec), np.cumsum(sizes)
    results = {
        key: reference.encode(np.nan_to_num(value), "bf16") for key, value in reference.gemm(spec, inputs).items()
    }
    got = largest(means, results, ends)
    assert {key: (value.shape, "f32") for key, value in got.items()} == largest_shapes(means, len(sizes))
    result = "dz" if spec.activation.backward else "y"
    v = np.abs(reference.decode(results[result], "bf16"))
    wanted = [v[begin:end].max(initial=0) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    most = got[f"{result}_amax"].reshape(len(sizes), -1)
    assert np.array_equal(most.max(axis=1), wanted)
    if most.shape[1] == 2:
        gates, ups = split(v, spec.glu_layout)
        assert np.array_equal(most[3], [part[ends[2] : ends[3]].max() for part in (gates, ups)])
    outputs = results | {key: value.copy() for key, value in got.items()}
    assert reference.coded_check(spec, inputs, outputs) == []
    outputs[f"{result}_amax"].reshape(-1)[-1] += 1
    assert reference.coded_check(spec, inputs, outputs)[0].startswith(f"{result}_amax: ")

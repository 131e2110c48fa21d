"""Weight gradients against scalar loops, and bounds that let float32 pass and nothing else."""

import math

import numpy as np
import pytest

from fusekit import reference
from fusekit.reference import formats, wgrad
from fusekit.reference.measure import FROBENIUS

from .specs import canonical

WGRAD = canonical(op="grouped-wgrad")
MAIN_GRADIENTS = WGRAD | {"out_dtype": "f32", "accumulate": True}
BIAS = WGRAD | {"dbias": True}
SIZES = [40, 0, 500, 1, 17]


def inputs_of(spec, sizes=SIZES, n=48, k=72, seed=1, spare=3):
    rows = sum(sizes) + spare
    return reference.make_inputs(spec, E=len(sizes), M=rows, N=n, K=k, sizes=sizes, seed=seed)


def by_loops(spec, inputs):
    dy, x = (formats.values(inputs[name], spec["dtype"]).astype(float) for name in ("dy", "x"))
    dw = np.zeros((inputs["offsets"].size, dy.shape[1], x.shape[1]))
    start = 0
    for group, end in enumerate(inputs["offsets"]):
        for n in range(dy.shape[1]):
            for k in range(x.shape[1]):
                dw[group, n, k] = math.fsum(dy[row, n] * x[row, k] for row in range(start, end))
        start = end
    return dw + inputs["dw"] if spec["accumulate"] else dw


def in_steps(spec, inputs, step=16):
    """As the tensor cores do it: sums of 16 products, added to a float32 that is truncated, towards zero, each time."""
    dy, x = (formats.values(inputs[name], spec["dtype"]).astype(np.float64) for name in ("dy", "x"))
    dw = np.zeros((inputs["offsets"].size, dy.shape[1], x.shape[1]))
    start = 0
    for group, end in enumerate(inputs["offsets"]):
        for first in range(start, end, step):
            part = slice(first, min(first + step, end))
            total = dw[group] + dy[part].T @ x[part]
            near = total.astype(np.float32)
            away = np.abs(near) > np.abs(total)
            dw[group] = np.where(away, np.nextafter(near, np.float32(0)), near)
        start = end
    dw = dw.astype(np.float32)
    return {"dw": formats.encode(dw + inputs["dw"] if spec["accumulate"] else dw, spec["out_dtype"])}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("spec", [WGRAD, MAIN_GRADIENTS], ids=["plain", "accumulate"])
def test_every_group_by_loops(spec, dtype):
    spec = spec | {"dtype": dtype}
    inputs = inputs_of(spec, [3, 0, 9, 5], n=8, k=16)
    got = reference.gemm(spec, inputs)["dw"]
    np.testing.assert_allclose(got, by_loops(spec, inputs), rtol=1e-11, atol=1e-12)
    assert got.shape == (4, 8, 16)
    empty = inputs["dw"][1] if spec["accumulate"] else np.zeros((8, 16))
    np.testing.assert_array_equal(got[1], empty)


@pytest.mark.parametrize("spec", [BIAS, BIAS | {"dtype": "fp16"}, MAIN_GRADIENTS | {"dbias": True}])
def test_sums_of_dy_by_loops(spec):
    inputs = inputs_of(spec, [3, 0, 9, 5], n=8, k=16)
    got = reference.gemm(spec, inputs)
    dy = formats.values(inputs["dy"], spec["dtype"]).astype(float)
    want = inputs["dbias"].astype(float) if spec["accumulate"] else np.zeros((4, 8))
    for group, (start, end) in enumerate([(0, 3), (3, 3), (3, 12), (12, 17)]):
        for n in range(8):
            want[group, n] += math.fsum(dy[start:end, n])
    np.testing.assert_allclose(got["dbias"], want, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(got["dw"], reference.gemm(spec | {"dbias": False}, inputs)["dw"])
    np.testing.assert_array_equal(got["dbias"][1], inputs["dbias"][1] if spec["accumulate"] else 0)
    assert "dbias" not in reference.gemm(spec | {"dbias": False}, inputs)
    assert reference.output_shapes(spec, E=4, M=20, N=8, K=16)["dbias"] == ((4, 8), "f32")
    rows = [25, 0, 7, 7]
    some = reference.gemm(spec, inputs, rows, [3, 0])["dbias"]
    np.testing.assert_allclose(some, got["dbias"].reshape(-1, 1)[rows], rtol=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("spec", [BIAS, MAIN_GRADIENTS | {"dbias": True, "split": True}], ids=["plain", "accumulate"])
def test_a_dense_one_is_one_group_of_all_rows(spec, rows):
    dense = spec | {"op": "dense-wgrad"}
    inputs = reference.make_inputs(dense, E=1, M=rows, N=48, K=72, seed=3)
    assert "offsets" not in inputs
    before = {name: inputs[name][None] for name in ("dw", "dbias") if name in inputs}
    grouped = reference.gemm(spec, inputs | before | {"offsets": np.array([rows], np.int32)})
    outcome = reference.gemm(dense, inputs)
    shapes = reference.output_shapes(dense, E=1, M=rows, N=48, K=72)
    assert shapes == {"dw": ((48, 72), spec["out_dtype"]), "dbias": ((48,), "f32")}
    for name, value in outcome.items():
        assert value.shape == shapes[name][0]
        np.testing.assert_array_equal(value, grouped[name][0])
    some = reference.gemm(dense, inputs, [47, 3], [5])
    np.testing.assert_allclose(some["dw"], outcome["dw"][[47, 3]][:, [5]], rtol=1e-12)
    outputs = {name: formats.encode(value, shapes[name][1]) for name, value in outcome.items()}
    assert all(each.ok for each in reference.check(dense, inputs, outputs).values())
    outputs["dbias"][7] += 0.1
    assert reference.check(dense, inputs, outputs)["dbias"].worst == (7,)


def as_the_kernel_sums(spec, inputs):
    """float32, over even and over odd tokens of a group, then both."""
    dy = formats.values(inputs["dy"], spec["dtype"]).astype(np.float32)
    dbias = np.zeros((inputs["offsets"].size, dy.shape[1]), np.float32)
    start = 0
    for group, end in enumerate(inputs["offsets"]):
        halves = [np.cumsum(dy[first:end:2], axis=0, dtype=np.float32) for first in (start, start + 1)]
        dbias[group] = sum(half[-1] for half in halves if half.size)
        start = end
    return dbias + inputs["dbias"] if spec["accumulate"] else dbias


@pytest.mark.parametrize("spec", [BIAS, MAIN_GRADIENTS | {"dbias": True}], ids=["plain", "accumulate"])
@pytest.mark.parametrize("positive", [False, True])
def test_float32_sums_of_dy_pass_and_no_others(spec, positive):
    inputs = inputs_of(spec, [1, 16, 333, 5000, 0, 64], n=64, k=8)
    if positive:
        inputs["dy"] &= np.uint16(0x7FFF)
    outputs = in_steps(spec, inputs) | {"dbias": as_the_kernel_sums(spec, inputs)}
    result = reference.check(spec, inputs, outputs)["dbias"]
    assert result.ok, str(result)
    assert result.max_scaled < 0.5
    for token in (0, 17, 5349):
        other = inputs | {"dy": inputs["dy"].copy()}
        other["dy"][token] = 0
        wrong = reference.check(spec, inputs, outputs | {"dbias": as_the_kernel_sums(spec, other)})["dbias"]
        assert not wrong.ok
    moved = outputs | {"dbias": outputs["dbias"].copy()}
    moved["dbias"][3, 7] = outputs["dbias"][3, 8]
    wrong = reference.check(spec, inputs, moved)["dbias"]
    assert (wrong.wrong, wrong.worst) == (1, (3, 7))
    some = reference.check(spec, inputs, moved, rows=[3, 3 * 64 + 7], columns=[0])["dbias"]
    assert (some.wrong, some.worst, some.elements) == (1, (3, 7), 2)


def test_chosen_rows_and_columns_are_those_of_the_whole(monkeypatch):
    inputs = inputs_of(MAIN_GRADIENTS)
    whole = reference.gemm(MAIN_GRADIENTS, inputs)["dw"].reshape(-1, 72)
    rows, columns = [239, 0, 50, 97, 97], [71, 3, 0]
    some = reference.gemm(MAIN_GRADIENTS, inputs, rows, columns)["dw"]
    np.testing.assert_allclose(some, whole[rows][:, columns], rtol=1e-12)
    np.testing.assert_allclose(reference.gemm(MAIN_GRADIENTS, inputs, rows)["dw"], whole[rows], rtol=1e-12)
    monkeypatch.setattr(wgrad, "ROWS", 33)
    np.testing.assert_allclose(reference.gemm(MAIN_GRADIENTS, inputs)["dw"].reshape(-1, 72), whole, rtol=1e-11)


def test_no_rows_is_zeros_or_what_was_there():
    inputs = inputs_of(WGRAD, [0, 0], spare=5)
    assert (reference.gemm(WGRAD, inputs)["dw"] == 0).all()
    inputs = inputs_of(MAIN_GRADIENTS, [0, 0], spare=0)
    assert (reference.gemm(MAIN_GRADIENTS, inputs)["dw"] == inputs["dw"]).all()


def test_a_nan_stays_in_its_group():
    inputs = inputs_of(WGRAD)
    clean = reference.gemm(WGRAD, inputs)["dw"]
    inputs["x"][540:] = reference.POISON
    inputs["dy"][:40] = reference.POISON
    got = reference.gemm(WGRAD, inputs)["dw"]
    assert np.isnan(got[[0, 3, 4]]).all()
    np.testing.assert_array_equal(got[[1, 2]], clean[[1, 2]])


@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
def test_float32_sums_of_truncated_steps_pass(out_dtype):
    spec = WGRAD | {"out_dtype": out_dtype}
    inputs = inputs_of(spec, [1, 16, 333, 2500, 0, 64], n=64, k=64)
    result = reference.check(spec, inputs, in_steps(spec, inputs))["dw"]
    assert result.ok, str(result)
    assert result.max_scaled < 1
    assert result.fro > 1e-8
    if out_dtype == "f32":
        assert result.fro_limit == 2.0**-23 * (4 + 157)
    else:
        assert result.fro_limit == FROBENIUS["bf16"]


def test_numbers_of_one_sign_pass():
    """Sums that only grow are the worst for truncation."""
    spec = WGRAD | {"out_dtype": "f32"}
    inputs = inputs_of(spec, [2000], n=32, k=32)
    for name in ("dy", "x"):
        inputs[name] &= np.uint16(0x7FFF)
    result = reference.check(spec, inputs, in_steps(spec, inputs))["dw"]
    assert result.ok, str(result)


@pytest.mark.parametrize(
    "spec", [WGRAD, WGRAD | {"out_dtype": "f32"}, MAIN_GRADIENTS], ids=["bf16", "f32", "accumulate"]
)
@pytest.mark.parametrize("wrong", ["first row", "last row", "neighbour's row", "spare row"])
def test_a_row_too_few_or_too_many_is_found(spec, wrong):
    inputs = inputs_of(spec)
    moved = {
        "first row": [40, 40, 540, 541, 558],
        "last row": [39, 39, 539, 540, 557],
        "neighbour's row": [41, 41, 540, 541, 558],
        "spare row": [40, 40, 540, 541, 559],
    }[wrong]
    other = inputs | {"offsets": np.array(moved, np.int32)}
    if wrong == "first row":
        other |= {"dy": inputs["dy"].copy()}
        other["dy"][0] = 0
    assert reference.check(spec, inputs, in_steps(spec, inputs))["dw"].ok
    assert not reference.check(spec, inputs, in_steps(spec, other))["dw"].ok


def test_float32_that_went_through_16_bits_is_found():
    spec = WGRAD | {"out_dtype": "f32"}
    inputs = inputs_of(spec)
    exact = reference.gemm(spec, inputs)["dw"]
    assert reference.check(spec, inputs, {"dw": exact.astype(np.float32)})["dw"].ok
    for dtype in ("bf16", "fp16"):
        rounded = formats.decode(formats.encode(exact, dtype), dtype)
        assert not reference.check(spec, inputs, {"dw": rounded})["dw"].ok


@pytest.mark.parametrize("times", [0, 2])
def test_adding_not_exactly_once_is_found(times):
    inputs = inputs_of(MAIN_GRADIENTS)
    sums = reference.gemm(MAIN_GRADIENTS, inputs)["dw"] - inputs["dw"]
    right = {"dw": (inputs["dw"] + sums).astype(np.float32)}
    assert reference.check(MAIN_GRADIENTS, inputs, right)["dw"].ok
    wrong = {"dw": (inputs["dw"] + times * sums).astype(np.float32)}
    assert not reference.check(MAIN_GRADIENTS, inputs, wrong)["dw"].ok
    assert not reference.check(MAIN_GRADIENTS, inputs, {"dw": sums.astype(np.float32)})["dw"].ok


def test_the_worst_element_has_its_group():
    inputs = inputs_of(WGRAD)
    outputs = in_steps(WGRAD, inputs)
    outputs["dw"][2, 7, 5] = reference.POISON
    result = reference.check(WGRAD, inputs, outputs)["dw"]
    assert (result.wrong, result.worst) == (1, (2, 7, 5))
    assert "group 2 row 7 column 5" in str(result)
    some = reference.check(WGRAD, inputs, outputs, rows=[3, 2 * 48 + 7], columns=[5, 6])["dw"]
    assert some.worst == (2, 7, 5)


def test_made_inputs():
    inputs = inputs_of(MAIN_GRADIENTS)
    assert {name: (array.shape, array.dtype.name) for name, array in inputs.items()} == {
        "dy": ((561, 48), "uint16"),
        "x": ((561, 72), "uint16"),
        "offsets": ((5,), "int32"),
        "dw": ((5, 48, 72), "float32"),
    }
    assert "dw" not in inputs_of(WGRAD)
    assert inputs_of(MAIN_GRADIENTS | {"dbias": True})["dbias"].shape == (5, 48)
    assert "dbias" not in inputs_of(BIAS)
    assert reference.output_shapes(MAIN_GRADIENTS, E=5, M=561, N=48, K=72) == {"dw": ((5, 48, 72), "f32")}
    even = inputs_of(WGRAD, [700] * 4)
    assert 0.6 < np.std(reference.gemm(WGRAD, even)["dw"]) < 1.6


def test_sampled_weights():
    offsets = reference.offsets_of([0, 5, 1000, 1, 0, 300] + [50] * 40 + [0])
    rows, columns = reference.sample_weights(offsets, (47, 100, 3000), 20)
    groups = set((rows // 100).tolist())
    assert {0, 1, 2, 3, 45} <= groups
    assert len(groups) == 13
    assert all({100 * group, 100 * group + 99} <= set(rows.tolist()) for group in groups)
    assert {0, 2999} <= set(columns.tolist())
    assert rows.size <= 13 * 20
    assert columns.size <= 20
    rows, _ = reference.sample_weights(reference.offsets_of([0, 0]), (2, 8, 8), 4)
    assert set((rows // 8).tolist()) == {0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dy": None}, "no 'dy' among the inputs"),
        ({"dw": None}, "no 'dw' among the inputs"),
        ({"dy": np.zeros((560, 48), np.uint16)}, "dy has 560 rows and x has 561"),
        ({"dw": np.zeros((5, 72, 48), np.float32)}, r"dw has shape \(5, 72, 48\)"),
        ({"dbias": np.zeros((5, 72), np.float32)}, r"dbias has shape \(5, 72\)"),
        ({"offsets": np.array([40, 30, 540, 541, 558])}, "must not decrease"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, text):
    spec = MAIN_GRADIENTS | {"dbias": True}
    with pytest.raises(ValueError, match=text):
        reference.gemm(spec, inputs_of(spec) | change)


def test_rows_and_columns_that_are_not_there_are_refused():
    inputs = inputs_of(WGRAD)
    with pytest.raises(ValueError, match=r"rows 3\.\.240; dw has rows 0\.\.239"):
        reference.gemm(WGRAD, inputs, rows=[3, 240])
    with pytest.raises(ValueError, match=r"columns -1\.\.-1"):
        reference.gemm(WGRAD, inputs, columns=[-1])

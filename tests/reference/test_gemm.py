"""The reference GEMMs against scalar loops in the order of the epilogue's stages."""

import math

import numpy as np
import pytest

from fusekit import reference
from fusekit.reference import activations, formats, layouts, product
from fusekit.spec import Activation

from .specs import GPT_OSS, canonical


def by_loops(spec, inputs):
    """y and z, one element at a time, for a swiglu or identity kernel."""
    x = formats.values(inputs["x"], spec["dtype"])
    w = formats.values(inputs["w"], spec["dtype"])
    ends = inputs.get("offsets", [x.shape[0]])
    columns = w.shape[-2] if spec["b_major"] == "k" else w.shape[-1]
    z = np.full((x.shape[0], columns), np.nan)
    start = 0
    for group, end in enumerate(ends):
        for row in range(start, end):
            for column in range(columns):
                matrix = w[group] if "offsets" in inputs else w
                vector = matrix[column] if spec["b_major"] == "k" else matrix[:, column]
                total = math.fsum(float(a) * float(b) for a, b in zip(x[row], vector, strict=True))
                if spec["alpha"] != "none":
                    total *= float(inputs["alpha"][group] if spec["alpha"] == "group" else inputs["alpha"])
                if spec["bias"]:
                    bias = formats.values(inputs["bias"], spec["dtype"])
                    total += float(bias[group, column] if bias.ndim == 2 else bias[column])
                z[row, column] = total
        start = end
    if spec["activation"]["kind"] == "identity":
        y = z.copy()
    else:
        p = spec["activation"]
        g = np.minimum(z[:, 0::2], p["limit"])
        u = np.clip(z[:, 1::2], -p["limit"], p["limit"])
        y = g / (1 + np.exp(-p["alpha"] * g)) * (u + p["up_offset"])
    if spec["row_scale"]:
        y *= inputs["row_scale"][:, None]
    return {"y": y, "preactivation": z}


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_grouped_with_every_stage(b_major, dtype):
    spec = GPT_OSS | {"b_major": b_major, "dtype": dtype}
    inputs = reference.make_inputs(spec, E=4, M=20, N=16, K=24, sizes=[3, 0, 9, 5], seed=1)
    got, want = reference.gemm(spec, inputs), by_loops(spec, inputs)
    for name in ("y", "preactivation"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12)
        assert np.isnan(got[name][17:]).all()
        assert np.isfinite(got[name][:17]).all()


@pytest.mark.parametrize("alpha", ["none", "scalar"])
def test_dense(alpha):
    spec = canonical(op="dense-gemm", alpha=alpha, bias=True)
    inputs = reference.make_inputs(spec, E=1, M=5, N=8, K=16)
    assert "offsets" not in inputs
    assert inputs["w"].shape == (8, 16)
    got = reference.gemm(spec, inputs)
    assert set(got) == {"y"}
    np.testing.assert_allclose(got["y"], by_loops(spec, inputs)["y"], rtol=1e-12)


def test_chosen_rows_are_those_of_the_whole():
    inputs = reference.make_inputs(GPT_OSS, E=5, M=64, N=32, K=40, spare=4, seed=2)
    rows = [59, 0, 17, 17, 31]
    some = reference.gemm(GPT_OSS, inputs, rows=rows)
    for name, whole in reference.gemm(GPT_OSS, inputs).items():
        np.testing.assert_allclose(some[name], whole[rows], rtol=1e-12)


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_chosen_columns_are_those_of_the_whole(layout, b_major):
    spec = GPT_OSS | {"glu_layout": layout, "b_major": b_major}
    inputs = reference.make_inputs(spec, E=3, M=20, N=128, K=40, seed=2)
    whole = reference.gemm(spec, inputs)
    columns = np.array([63, 0, 31, 32, 32])
    some = reference.gemm(spec, inputs, rows=[3, 11], columns=columns)
    z_columns = np.concatenate([layouts.gate_columns(layout, 64)[columns], layouts.up_columns(layout, 64)[columns]])
    np.testing.assert_allclose(some["y"], whole["y"][[3, 11]][:, columns], rtol=1e-12)
    np.testing.assert_allclose(some["preactivation"], whole["preactivation"][[3, 11]][:, z_columns], rtol=1e-12)
    outputs = {name: formats.encode(value, "bf16") for name, value in whole.items()}
    assert all(each.ok for each in reference.check(spec, inputs, outputs, columns=columns).values())
    outputs["preactivation"][7, z_columns[7]] ^= 0x40
    bad = reference.check(spec, inputs, outputs, columns=columns)["preactivation"]
    assert (bad.wrong, bad.worst) == (1, (7, z_columns[7]))


def test_columns_are_taken_in_pieces(monkeypatch):
    inputs = reference.make_inputs(GPT_OSS, E=2, M=10, N=96, K=24, seed=5)
    whole = reference.gemm(GPT_OSS, inputs)
    monkeypatch.setattr(product, "COLUMNS", 40)
    np.testing.assert_allclose(reference.gemm(GPT_OSS, inputs)["y"], whole["y"], rtol=1e-12)


def test_run_time_scalars_replace_the_spec():
    inputs = reference.make_inputs(GPT_OSS, E=2, M=12, N=16, K=24, seed=3)
    other = GPT_OSS | {"activation": {"kind": "swiglu", "alpha": 1.0, "limit": 0.5, "up_offset": 0.0}}
    given = inputs | {"act_alpha": 1.0, "act_limit": 0.5, "act_up_offset": 0.0}
    np.testing.assert_array_equal(reference.gemm(GPT_OSS, given)["y"], reference.gemm(other, inputs)["y"])
    no_limit = reference.gemm(GPT_OSS, inputs | {"act_limit": math.inf})["y"]
    assert np.isfinite(no_limit).all()


def test_a_nan_row_stays_in_its_row():
    inputs = reference.make_inputs(GPT_OSS, E=3, M=12, N=16, K=24, sizes=[4, 4, 4], seed=3)
    clean = reference.gemm(GPT_OSS, inputs)["y"]
    inputs["x"][5] = reference.POISON
    got = reference.gemm(GPT_OSS, inputs)["y"]
    assert np.isnan(got[5]).all()
    others = [row for row in range(12) if row != 5]
    np.testing.assert_array_equal(got[others], clean[others])


def test_no_rows():
    inputs = reference.make_inputs(GPT_OSS, E=3, M=0, N=16, K=24)
    assert reference.gemm(GPT_OSS, inputs)["y"].shape == (0, 8)
    outputs = {"y": np.empty((0, 8), np.uint16), "preactivation": np.empty((0, 16), np.uint16)}
    assert all(result.ok for result in reference.check(GPT_OSS, inputs, outputs).values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda i: i.pop("bias"), "no 'bias' among the inputs"),
        (lambda i: i.update(offsets=np.array([5, 4, 12])), "must not decrease"),
        (lambda i: i.update(offsets=np.array([5, 6, 13])), "nor pass the 12 rows"),
        (lambda i: i.update(x=i["x"][:, :16]), "K = 16"),
        (lambda i: i.update(w=i["w"][0]), "3 dimensions"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, text):
    inputs = reference.make_inputs(GPT_OSS, E=3, M=12, N=16, K=24)
    change(inputs)
    with pytest.raises(ValueError, match=text):
        reference.gemm(GPT_OSS, inputs)


def test_spare_rows_columns_and_other_ops_are_refused():
    inputs = reference.make_inputs(GPT_OSS, E=3, M=12, N=16, K=24, spare=2)
    with pytest.raises(ValueError, match=r"groups own rows 0\.\.9 only"):
        reference.gemm(GPT_OSS, inputs, rows=[10])
    with pytest.raises(ValueError, match=r"columns 8\.\.8; y has columns 0\.\.7 only"):
        reference.gemm(GPT_OSS, inputs, columns=[8])
    with pytest.raises(ValueError, match="router-topk"):
        reference.gemm(GPT_OSS | {"op": "router-topk"}, inputs)


@pytest.mark.parametrize("kind", ["identity", "srelu", "geglu"])
@pytest.mark.parametrize("depth", [8, 2880])
def test_a_float32_result_is_that_of_float32_and_not_rounded_further(kind, depth):
    """Whoever stores bf16 or TF32 numbers as float32 is found."""
    layout = "interleaved" if kind == "geglu" else "none"
    spec = canonical(op="dense-gemm", out_dtype="f32", bias=True, activation={"kind": kind}, glu_layout=layout)
    inputs = reference.make_inputs(spec, E=1, M=70, N=48, K=depth, seed=2)
    x, w, bias = (formats.values(inputs[name], "bf16") for name in ("x", "w", "bias"))
    z = np.zeros((70, 48), np.float32)
    for first in range(0, depth, 16):  # truncated towards zero, as tensor cores sum
        total = z.astype(np.float64) + x[:, first : first + 16].astype(np.float64) @ w[:, first : first + 16].T
        near = total.astype(np.float32)
        z = np.where(np.abs(near) > np.abs(total), np.nextafter(near, np.float32(0)), near)
    z = z + bias
    y = activations.activate(Activation(kind), layout, z).astype(np.float32)
    outcome = reference.check(spec, inputs, {"y": y})["y"]
    assert outcome.ok, str(outcome)
    assert outcome.fro < outcome.fro_limit / 2
    for lost in (13, 16):
        rounded = ((y.view(np.uint32) + (1 << (lost - 1))) >> lost << lost).view(np.float32)
        assert not reference.check(spec, inputs, {"y": rounded})["y"].ok
    assert reference.output_shapes(spec, M=70, N=48)["y"] == (y.shape, "f32")

"""Backward activations against finite differences of the forward reference, and bounds that find what is wrong."""

import math

import numpy as np
import pytest

from fusekit import reference
from fusekit.plan.activations import functions
from fusekit.reference import activations, formats, layouts
from fusekit.spec import Activation

from .specs import canonical

KINDS = [
    (Activation("relu"), "none"),
    (Activation("srelu"), "none"),
    (Activation("silu"), "none"),
    (Activation("gelu"), "none"),
    (Activation("gelu", approximate="tanh"), "none"),
    *(
        (each, layout)
        for layout in ("concat", "interleaved", "interleaved-32")
        for each in (
            Activation("swiglu"),
            Activation("swiglu", alpha=1.702, limit=1.5, up_offset=1.0),
            Activation("geglu", limit=1.0),
            Activation("geglu", approximate="tanh", up_offset=-0.5),
            Activation("reglu", limit=0.75, up_offset=1.0),
        )
    ),
]
EACH = pytest.mark.parametrize(("activation", "layout"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
SIZES = [40, 0, 130, 1, 17]


def backward(activation, layout, **changes):
    """The spec of a grouped kernel with every output."""
    keys = {
        "approximate": activation.approximate,
        "alpha": activation.alpha,
        "limit": activation.limit,
        "up_offset": activation.up_offset,
    }
    return (
        canonical(
            activation={"kind": f"d{activation.kind}", **keys},
            glu_layout=layout,
            row_scale=True,
            recompute=True,
            dprob=True,
            dbias=True,
        )
        | changes
    )


GPT_OSS = backward(Activation("swiglu", alpha=1.702, limit=1.5, up_offset=1.0), "interleaved")


def inputs_of(spec, sizes=SIZES, n=64, k=72, seed=1, spare=3):
    return reference.make_inputs(
        spec, E=len(sizes), M=sum(sizes) + spare, N=n, K=k, sizes=sizes, spare=spare, seed=seed
    )


def test_every_activation_is_here():
    assert {activation.kind for activation, _ in KINDS} == set(functions()) - {"identity"}


@EACH
def test_slopes_are_those_of_finite_differences(activation, layout):
    z = np.random.default_rng(2).uniform(-3, 3, (40, 128))
    value, slopes = activations.derivative(activation, layout, z)
    np.testing.assert_array_equal(value, activations.activate(activation, layout, z))
    step = 1e-6
    # Where a step of z crosses a corner, the difference is of neither side.
    corners = [0.0] if activation.kind in ("relu", "reglu") else []
    corners += [] if activation.limit is None else [activation.limit, -activation.limit]
    near = np.zeros(z.shape, bool)
    for corner in corners:
        near |= np.abs(z - corner) < 2 * step
    parts = layouts.split(z, layout) if activation.gated else (z,)
    for index, slope in enumerate(slopes):
        moved = []
        for sign in (1, -1):
            shifted = [part + sign * step * (number == index) for number, part in enumerate(parts)]
            at = layouts.join(*shifted, layout) if activation.gated else shifted[0]
            moved.append(activations.activate(activation, layout, at))
        difference = (moved[0] - moved[1]) / (2 * step)
        corner = layouts.split(near, layout)[index] if activation.gated else near
        np.testing.assert_allclose(slope[~corner], difference[~corner], rtol=1e-6, atol=1e-8)


def test_a_clamped_element_has_no_gradient_and_one_at_the_limit_has():
    activation = Activation("swiglu", limit=2.0)
    z = np.array([[2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, -2.0, 2.5, -2.5]])  # gates, then ups
    _, (by_gate, by_up) = activations.derivative(activation, "concat", z)
    assert ((by_gate == 0) == [[False, True, False, False, False, False]]).all()
    assert ((by_up == 0) == [[False, False, False, False, True, True]]).all()
    _, (slope,) = activations.derivative(Activation("relu"), "none", np.array([[-1.0, 0.0, 1.0, np.nan]]))
    np.testing.assert_array_equal(slope, [[0.0, 0.0, 1.0, np.nan]])


@EACH
def test_slopes_are_finite_far_out(activation, layout):
    z = np.tile(np.array([-1e4, -700.0, -40.0, 0.0, 40.0, 700.0, 1e4, 1.0]), 8)[None]
    value, slopes = activations.derivative(activation, layout, z)
    assert np.isfinite(value).all()
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("op", ["grouped-gemm", "dense-gemm"])
@EACH
def test_outputs_by_the_chain_rule(activation, layout, op):
    """loss = sum of da * row_scale * activation(z), da being x.w: its gradients, each by its own difference."""
    spec = backward(activation, layout, op=op)
    sizes = [3, 0, 4] if op == "grouped-gemm" else [7]
    inputs = inputs_of(spec, sizes, k=16, spare=0)
    z = formats.decode(inputs["preactivation"], "bf16").astype(float)
    plain = canonical(op=op)
    da = reference.gemm(plain, {name: inputs[name] for name in inputs.keys() & {"x", "w", "offsets"}})["y"]

    def losses(z, scale):
        return (da * scale[:, None] * activations.activate(activation, layout, z)).sum(axis=1)

    got, scale = reference.gemm(spec, inputs), inputs["row_scale"].astype(float)
    np.testing.assert_allclose(got["dprob"], losses(z, np.ones_like(scale)), rtol=1e-12)
    np.testing.assert_allclose(
        got["y"], activations.activate(activation, layout, z) * scale[:, None], rtol=1e-12, atol=1e-14
    )
    step = 1e-6
    for column in (0, 1, 31, 32, 63, z.shape[1] - 1):
        moved = np.zeros_like(z)
        moved[:, column] = step
        difference = (losses(z + moved, scale) - losses(z - moved, scale)) / (2 * step)
        corner = np.isclose(np.abs(z[:, column]), activation.limit or np.inf, atol=2 * step)
        np.testing.assert_allclose(got["dz"][~corner, column], difference[~corner], rtol=1e-6, atol=1e-7)
    ends = np.cumsum(sizes)
    sums = [got["dz"][end - size : end].sum(axis=0) for size, end in zip(sizes, ends, strict=True)]
    want = np.array(sums) if op == "grouped-gemm" else sums[0]
    assert got["dbias"].shape == want.shape
    np.testing.assert_allclose(got["dbias"], want, rtol=1e-11, atol=1e-12)


def test_run_time_scalars_replace_the_spec():
    inputs = inputs_of(GPT_OSS)
    other = backward(Activation("swiglu", alpha=1.0, limit=0.5, up_offset=0.0), "interleaved")
    given = inputs | {"act_alpha": 1.0, "act_limit": 0.5, "act_up_offset": 0.0}
    for name, value in reference.gemm(other, inputs).items():
        np.testing.assert_array_equal(reference.gemm(GPT_OSS, given)[name], value)
    no_limit = reference.gemm(GPT_OSS, inputs | {"act_limit": math.inf})
    assert np.count_nonzero(no_limit["dz"] == 0) < np.count_nonzero(reference.gemm(GPT_OSS, inputs)["dz"] == 0)


def test_outputs_that_are_not_asked_for_are_left_out():
    fewer = GPT_OSS | {"row_scale": False, "recompute": False, "dprob": False, "dbias": False}
    inputs = inputs_of(fewer)
    assert "row_scale" not in inputs
    assert set(reference.gemm(fewer, inputs)) == {"dz"}
    assert reference.output_shapes(fewer, E=5, M=191, N=64) == {"dz": ((191, 128), "bf16")}
    assert reference.output_shapes(GPT_OSS | {"out_dtype": "fp16"}, E=5, M=191, N=64) == {
        "dz": ((191, 128), "bf16"),
        "y": ((191, 64), "fp16"),
        "dprob": ((191,), "f32"),
        "dbias": ((5, 128), "f32"),
    }
    dense = backward(Activation("gelu"), "none", op="dense-gemm")
    assert reference.output_shapes(dense, M=9, N=64)["dbias"] == ((64,), "f32")


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
def test_chosen_rows_and_columns_are_those_of_the_whole(layout):
    spec = GPT_OSS | {"glu_layout": layout}
    inputs = inputs_of(spec)
    whole = reference.gemm(spec, inputs)
    rows, columns = [187, 0, 40, 41], np.array([63, 5, 0])
    some = reference.gemm(spec, inputs, rows)
    assert set(some) == {"dz", "y", "dprob"}
    for name in ("dz", "y"):
        np.testing.assert_allclose(some[name], whole[name][rows], rtol=1e-11)
    np.testing.assert_allclose(some["dprob"][:, 0], whole["dprob"][rows], rtol=1e-11)
    z_columns = np.r_[layouts.gate_columns(layout, 64)[columns], layouts.up_columns(layout, 64)[columns]]
    some = reference.gemm(spec, inputs, columns=columns)
    assert set(some) == {"dz", "y", "dbias"}
    np.testing.assert_allclose(some["dz"], whole["dz"][:188][:, z_columns], rtol=1e-11)
    np.testing.assert_allclose(some["y"], whole["y"][:188][:, columns], rtol=1e-11)
    np.testing.assert_allclose(some["dbias"], whole["dbias"][:, z_columns], rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match=r"columns 64\.\.64; da has columns 0\.\.63 only"):
        reference.gemm(spec, inputs, columns=[64])


def test_spare_rows_are_left_alone_and_empty_groups_sum_to_zero():
    got = reference.gemm(GPT_OSS, inputs_of(GPT_OSS))
    for name in ("dz", "y", "dprob"):
        assert np.isnan(got[name][188:]).all()
        assert np.isfinite(got[name][:188]).all()
    assert (got["dbias"][1] == 0).all()
    none = reference.gemm(GPT_OSS, inputs_of(GPT_OSS, [0, 0], spare=2))
    assert (none["dbias"] == 0).all()
    assert np.isnan(none["dprob"]).all()


def in_float32(spec, inputs):
    """The outputs as a kernel makes them: float32 throughout, one rounding."""
    f = np.float32
    x, w, z = (formats.decode(inputs[name], spec["dtype"]) for name in ("x", "w", "preactivation"))
    rows = inputs["offsets"][-1]
    da = np.zeros((rows, w.shape[1]), f)
    start = 0
    for group, end in enumerate(inputs["offsets"]):
        da[start:end] = x[start:end] @ w[group].T
        start = end
    parameters = spec["activation"]
    limit, scale = f(parameters["limit"]), inputs["row_scale"][:rows, None]
    raw_g, raw_u = layouts.split(z[:rows], spec["glu_layout"])
    g, u = np.minimum(raw_g, limit), np.clip(raw_u, -limit, limit)
    s = 1 / (1 + np.exp(f(-parameters["alpha"]) * g))
    gate, up = g * s, u + f(parameters["up_offset"])
    by_gate = np.where(raw_g > limit, f(0), up * (s + f(parameters["alpha"]) * gate * (1 - s)))
    by_up = np.where(np.abs(raw_u) > limit, f(0), gate)
    dz = layouts.join(da * scale * by_gate, da * scale * by_up, spec["glu_layout"])
    starts = np.r_[0, inputs["offsets"][:-1]]
    dbias = np.array([dz[a:b].sum(axis=0) for a, b in zip(starts, inputs["offsets"], strict=True)], f)
    whole = len(inputs["x"])
    padded = {
        name: np.concatenate([value, np.full((whole - rows, *value.shape[1:]), np.nan, f)])
        for name, value in {"dz": dz, "y": gate * up * scale, "dprob": (da * gate * up).sum(axis=1)}.items()
    }
    return {
        "dz": formats.encode(padded["dz"], spec["dtype"]),
        "y": formats.encode(padded["y"], spec["out_dtype"]),
        "dprob": padded["dprob"],
        "dbias": dbias,
    }


@pytest.fixture(params=["bf16", "fp16"])
def run(request):
    spec = GPT_OSS | {"dtype": request.param, "out_dtype": request.param}
    inputs = inputs_of(spec, n=192, k=320)
    return spec, inputs, in_float32(spec, inputs)


def test_float32_arithmetic_passes(run):
    spec, inputs, outputs = run
    results = reference.check(spec, inputs, outputs)
    assert set(results) == {"dz", "y", "dprob", "dbias"}
    for result in results.values():
        assert result.ok, str(result)
        assert 0 < result.max_scaled < 1
    assert results["dprob"].fro < 1e-5
    assert results["dbias"].fro < 1e-5


@pytest.mark.parametrize("name", ["dz", "y", "dprob", "dbias"])
@pytest.mark.parametrize("wrong", ["scaled", "neighbour's row", "rounded"])
def test_a_wrong_output_is_found(run, name, wrong):
    spec, inputs, outputs = run
    if wrong == "scaled":
        outputs[name] = outputs[name].copy()
        value = formats.values(outputs[name][2], spec["dtype"]) * np.float32(1.02)
        outputs[name][2] = value if outputs[name].dtype == np.float32 else formats.encode(value, spec["dtype"])
    elif wrong == "neighbour's row":
        outputs[name][3] = outputs[name][2]
    elif outputs[name].dtype == np.float32:
        outputs[name] = formats.decode(formats.encode(outputs[name], "fp16"), "fp16")
    else:
        outputs[name] = outputs[name] & np.uint16(0xFFF8 if spec["dtype"] == "bf16" else 0xFFC0)
    assert not reference.check(spec, inputs, outputs)[name].ok


def test_a_row_less_in_a_groups_sum_is_found(run):
    spec, inputs, outputs = run
    dz = formats.decode(outputs["dz"], spec["dtype"])
    for row, group in ((0, 0), (39, 0), (169, 2), (170, 3)):
        harmed = {**outputs, "dbias": outputs["dbias"].copy()}
        harmed["dbias"][group] -= dz[row]
        result = reference.check(spec, inputs, harmed)["dbias"]
        assert not result.ok
        assert result.worst[0] == group


def test_a_tile_less_in_a_rows_sum_is_found(run):
    spec, inputs, outputs = run
    value = formats.decode(outputs["dz"], spec["dtype"])
    assert value.shape == (191, 384)
    short = reference.gemm(spec, inputs | {"w": np.where(np.arange(192)[:, None] < 16, 0, inputs["w"])})["dprob"]
    harmed = {**outputs, "dprob": outputs["dprob"].copy()}
    harmed["dprob"][7] = short[7]
    result = reference.check(spec, inputs, harmed)["dprob"]
    assert not result.ok
    assert result.worst == (7,)
    assert "element 7" in str(result)


def test_a_clamped_element_with_a_gradient_is_found():
    inputs = inputs_of(GPT_OSS)
    assert reference.check(GPT_OSS, inputs, in_float32(GPT_OSS, inputs))["dz"].ok
    unlimited = GPT_OSS | {"activation": GPT_OSS["activation"] | {"limit": 100.0}}
    assert not reference.check(GPT_OSS, inputs, in_float32(unlimited, inputs))["dz"].ok


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"preactivation": None}, "no 'preactivation' among the inputs"),
        ({"preactivation": np.zeros((191, 64), np.uint16)}, r"preactivation has shape \(191, 64\)"),
        ({"row_scale": None}, "no 'row_scale'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        reference.gemm(GPT_OSS, inputs_of(GPT_OSS) | change)

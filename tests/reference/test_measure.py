"""The error measure lets float32 arithmetic pass and nothing else."""

import numpy as np
import pytest

from fusekit import reference
from fusekit.reference import formats
from fusekit.reference.measure import Expected, measure

from .specs import GPT_OSS, canonical

SIZES = [40, 0, 70, 1, 17]


def in_float32(spec, inputs):
    """The outputs as a kernel makes them: float32 sums and activation, then one rounding."""
    x, w = (formats.values(inputs[name], spec["dtype"]).astype(np.float32) for name in ("x", "w"))
    bias = formats.values(inputs["bias"], spec["dtype"]).astype(np.float32)
    z = np.zeros((x.shape[0], w.shape[1]), np.float32)
    start = 0
    for group, end in enumerate(inputs["offsets"]):
        z[start:end] = x[start:end] @ w[group].T * inputs["alpha"][group] + bias[group]
        start = end
    g, u = np.minimum(z[:, 0::2], np.float32(7)), np.clip(z[:, 1::2], np.float32(-7), np.float32(7))
    y = g / (1 + np.exp(np.float32(-1.702) * g)) * (u + np.float32(1)) * inputs["row_scale"][:, None]
    return {"y": formats.encode(y, spec["out_dtype"]), "preactivation": formats.encode(z, spec["dtype"])}


@pytest.fixture(params=["bf16", "fp16"])
def run(request):
    spec = GPT_OSS | {"dtype": request.param, "out_dtype": request.param}
    inputs = reference.make_inputs(spec, E=5, M=128, N=192, K=320, sizes=SIZES, seed=7)
    return spec, inputs, in_float32(spec, inputs)


def test_float32_arithmetic_passes(run):
    spec, inputs, outputs = run
    for result in reference.check(spec, inputs, outputs).values():
        assert result.ok, str(result)
        assert 0 < result.max_scaled < 1
        assert result.fro > 1e-4
        assert "ok" in str(result)


@pytest.mark.parametrize("name", ["y", "preactivation"])
@pytest.mark.parametrize("wrong", ["zero", "neighbour", "sign", "nan", "inf", "poison"])
def test_one_wrong_element_is_found(run, name, wrong):
    spec, inputs, outputs = run
    want = reference.gemm(spec, inputs)[name]
    # An element of ordinary size: a wrong value near zero is no different from a rounded one.
    row, column = np.argwhere(np.isclose(np.abs(want), np.median(np.abs(want)), rtol=0.2))[11]
    outputs[name][row, column] = {
        "zero": 0,
        "neighbour": outputs[name][row, column] + (3 if spec["dtype"] == "bf16" else 24),
        "sign": outputs[name][row, column] ^ 0x8000,
        "nan": formats.encode(np.array([np.nan]), spec["dtype"])[0],
        "inf": formats.encode(np.array([np.inf]), spec["dtype"])[0],
        "poison": formats.POISON,
    }[wrong]
    result = reference.check(spec, inputs, outputs)[name]
    assert not result.ok
    assert result.wrong == 1
    assert result.worst == (row, column)
    assert f"row {row} column {column}" in str(result)


def test_a_wrong_row_is_found_with_its_row_in_the_buffer(run):
    spec, inputs, outputs = run
    outputs["y"][60] = outputs["y"][61]
    result = reference.check(spec, inputs, outputs, rows=[3, 60, 100])["y"]
    assert not result.ok
    assert result.worst[0] == 60
    assert result.wrong > 50


def test_a_shifted_group_is_found(run):
    """The first row of group 2 multiplied by the weights of group 0, as an off-by-one in offsets would."""
    spec, inputs, outputs = run
    shifted = inputs | {"offsets": inputs["offsets"] + np.array([1, 1, 0, 0, 0], np.int32)}
    outputs = in_float32(spec, shifted)
    for result in reference.check(spec, inputs, outputs).values():
        assert not result.ok
        assert result.worst[0] == 40
    assert reference.check(spec, inputs, outputs, rows=np.arange(41, 128))["y"].ok


def test_a_lost_k_block_is_found(run):
    spec, inputs, _ = run
    short = inputs | {"x": inputs["x"][:, :-8], "w": inputs["w"][:, :, :-8]}
    assert not reference.check(spec, inputs, in_float32(spec, short))["preactivation"].ok


def test_a_small_row_cannot_hide_behind_large_ones():
    """Row 1 is 2**-12 of row 0; leaving it zero changes the Frobenius error by nothing that shows."""
    spec = canonical()
    inputs = reference.make_inputs(spec, E=1, M=2, N=64, K=256, seed=1)
    inputs["x"][1] -= np.uint16(12 << 7)
    outputs = {"y": formats.encode(reference.gemm(spec, inputs)["y"], "bf16")}
    assert reference.check(spec, inputs, outputs)["y"].ok
    outputs["y"][1] = 0
    result = reference.check(spec, inputs, outputs)["y"]
    assert result.fro < result.fro_limit
    assert not result.ok
    assert result.worst[0] == 1


def test_a_bias_in_every_element_breaks_the_frobenius_bound():
    value = np.random.default_rng(0).normal(size=(64, 64))
    want = Expected("bf16", np.arange(64), value, np.zeros_like(value))
    result = measure("y", value * (1 + 2**-8), want)
    assert result.wrong == 0
    assert not result.ok


def test_infinities_and_nans_of_the_reference():
    value = np.array([[np.nan, np.inf, -np.inf, 1e6, -1e6, 65504.0]])
    want = Expected("fp16", np.arange(1), value, np.zeros_like(value))
    with np.errstate(over="ignore"):
        assert measure("y", value.astype(np.float16), want).ok
    assert not measure("y", np.array([[np.nan, np.nan, -np.inf, np.inf, -np.inf, 65504.0]]), want).ok
    assert not measure("y", np.array([[1.0, np.inf, -np.inf, np.inf, -np.inf, 65504.0]]), want).ok
    assert not measure("y", np.array([[np.nan, np.inf, np.inf, np.inf, -np.inf, 65504.0]]), want).ok
    assert not measure("y", np.array([[np.nan, np.inf, -np.inf, np.inf, -np.inf, -np.inf]]), want).ok


def test_a_zero_reference_wants_zero():
    want = Expected("bf16", np.arange(1), np.zeros((1, 4)), np.full((1, 4), 1e-6))
    assert measure("y", np.zeros((1, 4)), want).ok
    assert measure("y", np.full((1, 4), 1e-7), want).ok
    assert not measure("y", np.full((1, 4), 1e-5), want).ok


def test_nothing_to_compare_and_wrong_shapes():
    want = Expected("bf16", np.arange(0), np.zeros((0, 4)), np.zeros((0, 4)))
    result = measure("y", np.zeros((0, 4)), want)
    assert result.ok
    assert "nothing" in str(result)
    with pytest.raises(ValueError, match="shape"):
        measure("y", np.zeros((1, 4)), want)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "f32"])
@pytest.mark.parametrize("slack", [0.0, 0.25])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_bound_is_where_it_is_said_to_be(dtype, slack, sign):
    """One unit in the last place of the value, and the slack: just below passes, just above does not."""
    value = 3.0
    significand, smallest = {"bf16": (8, 2.0**-133), "fp16": (11, 2.0**-24), "f32": (24, 2.0**-149)}[dtype]
    room = value * 2.0 ** (1 - significand) + slack + smallest
    want = Expected(dtype, np.arange(1), np.array([[value]]), np.array([[slack]]), limit=1.0)
    for part, right in ((0.999, True), (1.001, False)):
        result = measure("y", np.array([[value + sign * part * room]]), want)
        assert result.ok == right, str(result)
        assert result.max_scaled == pytest.approx(part, rel=1e-5)

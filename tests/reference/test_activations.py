"""Activations against closed forms written another way, their limits, and the error bound that goes with them."""

import math

import numpy as np
import pytest

from fusekit.plan.activations import functions
from fusekit.reference import activations, layouts
from fusekit.spec import Activation

Z = np.concatenate([np.linspace(-30, 30, 601), [-700.0, 700.0, 1e-30, -1e-30]])

PLAIN = {
    "identity": lambda z: z,
    "relu": lambda z: z if z > 0 else 0.0,
    "srelu": lambda z: z * z if z > 0 else 0.0,
    "silu": lambda z: z / (1 + math.exp(-z)) if z > -700 else 0.0,
    "gelu": lambda z: z * (1 - 0.5 * math.erfc(z / math.sqrt(2))),
}


def gelu_tanh(z):
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def test_every_kind_of_the_spec_has_a_meaning():
    assert set(functions()) == {*PLAIN, "swiglu", "geglu", "reglu"}
    for kind, row in ((kind, activations.load(kind)) for kind in functions()):
        assert Activation(kind=kind).gated == row.gated


@pytest.mark.parametrize("kind", PLAIN)
def test_plain(kind):
    got = activations.activate(Activation(kind=kind), "none", Z)
    np.testing.assert_allclose(got, [PLAIN[kind](z) for z in Z], rtol=1e-12, atol=1e-14)


def test_gelu_tanh():
    got = activations.activate(Activation(kind="gelu", approximate="tanh"), "none", Z)
    np.testing.assert_allclose(got, [gelu_tanh(z) for z in Z], rtol=1e-12, atol=1e-14)


def test_gelu_keeps_its_digits_in_the_tail():
    got = activations.activate(Activation(kind="gelu"), "none", np.array([-10.0]))
    # Abramowitz and Stegun 26.2.12, asymptotic expansion of the normal tail.
    tail = math.exp(-50) / (10 * math.sqrt(2 * math.pi)) * (1 - 1e-2 + 3e-4 - 15e-6 + 105e-8)
    assert got[0] == pytest.approx(-10 * tail, rel=1e-7)


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        (Activation(kind="swiglu"), PLAIN["silu"]),
        (Activation(kind="swiglu", alpha=1.702, limit=7.0, up_offset=1.0), lambda g: g / (1 + math.exp(-1.702 * g))),
        (Activation(kind="geglu", limit=2.0), PLAIN["gelu"]),
        (Activation(kind="geglu", approximate="tanh", up_offset=-0.5), gelu_tanh),
        (Activation(kind="reglu", limit=0.5, up_offset=1.0), PLAIN["relu"]),
    ],
)
def test_gated(activation, gate, layout):
    z = np.random.default_rng(0).normal(scale=4, size=(3, 128))
    g, u = layouts.split(z, layout)
    limit = math.inf if activation.limit is None else activation.limit
    want = [
        [gate(min(a, limit)) * (min(max(b, -limit), limit) + activation.up_offset) for a, b in zip(*rows, strict=True)]
        for rows in zip(g, u, strict=True)
    ]
    np.testing.assert_allclose(activations.activate(activation, layout, z), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", functions())
def test_finite_in_finite_out_and_nan_stays(kind):
    layout = "concat" if activations.load(kind).gated else "none"
    z = np.tile(np.array([0.0, -1e4, 1e4, 1.0]), 2)[None]
    assert np.isfinite(activations.activate(Activation(kind=kind), layout, z)).all()
    assert np.isnan(activations.activate(Activation(kind=kind, limit=7.0), layout, np.full((1, 8), np.nan))).all()


@pytest.mark.parametrize("kind", functions())
def test_error_bound_holds_for_every_disturbance(kind):
    layout = "interleaved" if activations.load(kind).gated else "none"
    activation = Activation(kind=kind, alpha=1.3, limit=3.0, up_offset=0.25)
    rng = np.random.default_rng(1)
    z = rng.normal(scale=3, size=(64, 64))
    error = rng.uniform(0, 0.01, size=z.shape)
    bound = activations.error_bound(activation, layout, z, error)
    here = activations.activate(activation, layout, z)
    assert bound.shape == here.shape
    for _ in range(20):
        off = activations.activate(activation, layout, z + error * rng.choice([-1.0, 1.0], size=z.shape))
        assert (np.abs(off - here) <= bound * (1 + 1e-9)).all()
    # A bound that lets everything pass would hold too: it must stay of the size of the disturbance.
    assert np.median(bound) < 0.05


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'mish'; it is one of identity"):
        activations.activate(Activation(kind="mish"), "none", Z)

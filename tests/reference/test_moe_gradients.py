"""Training a mixture of experts: recipes of docs/router.md for where router weights may be, by finite differences.

Every step is an operation of the catalogue by its reference, in float64, forward and backward.
"""

import numpy as np
import pytest

from fusekit.reference import gemm, permutation

from .specs import canonical

T, X, K, H, I = 5, 4, 2, 8, 8  # noqa: E741 - the field's own name
ACTIVATION = {"alpha": 1.702, "limit": 2.0, "up_offset": 1.0}
FC1 = canonical(
    bias=True, save_preactivation=True, activation={"kind": "swiglu", **ACTIVATION}, glu_layout="interleaved"
)
DERIVATIVE = {"b_major": "n", "activation": {"kind": "dswiglu", **ACTIVATION}, "glu_layout": "interleaved"}
WGRAD = canonical(op="grouped-wgrad", dbias=True)
RECIPES = ["unpermute", "fc2", "permute"]


def problem():
    rng = np.random.default_rng(4)
    rows = permutation.index(rng.integers(-1, X, (T, K)), X)
    tensors = {
        "x": rng.standard_normal((T, H)),
        "weights": rng.uniform(0.2, 1.0, (T, K)),
        "w1": rng.standard_normal((X, 2 * I, H)) / 3,
        "b1": rng.standard_normal((X, 2 * I)) / 2,
        "w2": rng.standard_normal((X, H, I)) / 4,
        "b2": rng.standard_normal((X, H)),
    }
    return rows["inverse"], {"offsets": rows["offsets"]}, tensors, rng.standard_normal((T, H))


def rows_of(inverse, by_choice):
    """By row what is by choice ([T, K, ...]); zeros in rows that no choice has."""
    combined = np.zeros((inverse.size, *by_choice.shape[2:]))
    combined[inverse[inverse >= 0]] = by_choice[inverse >= 0]
    return combined


def per_choice(inverse, by_row):
    return np.where(inverse >= 0, by_row[inverse], 0.0)


def permute(inverse, x, weights=None):
    return rows_of(inverse, permutation.spread(x, np.ones(inverse.shape) if weights is None else weights))


def owned(offsets, outputs):
    """The outputs, zeros in rows that no group owns."""
    return {
        name: np.where(np.arange(len(value))[:, None] < offsets["offsets"][-1], value, 0.0)
        for name, value in outputs.items()
    }


def forward(where, inverse, offsets, t):
    """y, and what the backward keeps."""
    rows = permute(inverse, t["x"], t["weights"] if where == "permute" else None)
    fc1 = owned(offsets, gemm(FC1, offsets | {"x": rows, "w": t["w1"], "bias": t["b1"]}))
    given = offsets | {"x": fc1["y"], "w": t["w2"]}
    if where == "fc2":
        scale = rows_of(inverse, t["weights"][..., None])[:, 0]
        b = owned(offsets, gemm(canonical(row_scale=True), given | {"row_scale": scale}))["y"]
    else:
        b = owned(offsets, gemm(canonical(bias=True), given | {"bias": t["b2"]}))["y"]
    y, _ = permutation.unpermute(b, inverse, t["weights"] if where == "unpermute" else None)
    return y, {"rows": rows, "z": fc1["preactivation"], "b": b}


def backward(where, inverse, offsets, t, kept, grad_y):
    """The gradient of every tensor, by the recipe."""
    got = {}
    if where == "unpermute":  # moe-unpermute-bwd
        db = rows_of(inverse, permutation.spread(grad_y, t["weights"]))
        got["weights"], _ = permutation.weight_gradient(grad_y, kept["b"], inverse)
    else:  # moe-permute
        db = permute(inverse, grad_y)
    scaled = where == "fc2"
    spec = canonical(**DERIVATIVE, recompute=True, row_scale=scaled, dprob=scaled)
    given = offsets | {"x": db, "w": t["w2"], "preactivation": kept["z"]}
    if scaled:
        given["row_scale"] = rows_of(inverse, t["weights"][..., None])[:, 0]
    dgrad = gemm(spec, given)
    if scaled:
        got["weights"] = per_choice(inverse, dgrad.pop("dprob"))
    dgrad = owned(offsets, dgrad)
    fc2 = gemm(WGRAD, offsets | {"dy": db, "x": dgrad["y"]})
    fc1 = gemm(WGRAD, offsets | {"dy": dgrad["dz"], "x": kept["rows"]})
    got |= {"w2": fc2["dw"], "w1": fc1["dw"], "b1": fc1["dbias"]} | ({} if scaled else {"b2": fc2["dbias"]})
    dx = owned(offsets, gemm(canonical(b_major="n"), offsets | {"x": dgrad["dz"], "w": t["w1"]}))["y"]
    if where == "permute":  # moe-permute-bwd
        got["weights"], _ = permutation.weight_gradient(t["x"], dx, inverse)
    got["x"], _ = permutation.unpermute(dx, inverse, t["weights"] if where == "permute" else None)
    return got


@pytest.mark.parametrize("where", RECIPES)
def test_every_gradient_of_a_recipe_is_the_derivative(where, soak):
    """At up to 30 elements of each; at all with --soak."""
    inverse, offsets, tensors, grad_y = problem()
    _, kept = forward(where, inverse, offsets, tensors)
    got = backward(where, inverse, offsets, tensors, kept, grad_y)
    assert set(got) == set(tensors) - ({"b2"} if where == "fc2" else set())

    def loss(moved):
        return float((forward(where, inverse, offsets, tensors | moved)[0] * grad_y).sum())

    for name, gradient in got.items():
        assert gradient.shape == tensors[name].shape
        chosen = np.random.default_rng(5).permutation(gradient.size)[: None if soak else 30]
        want = np.zeros(chosen.size)
        for number, index in enumerate(chosen):
            step = np.zeros_like(gradient)
            step.flat[index] = 1e-6
            want[number] = (loss({name: tensors[name] + step}) - loss({name: tensors[name] - step})) / 2e-6
        np.testing.assert_allclose(gradient.flat[chosen], want, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_scaled_bias_would_have_wrong_gradients():
    """Why a spec may not have both: y = p (a w2 + b2) with the backward of row_scale lacks dy . b2 and weights."""
    inverse, offsets, tensors, grad_y = problem()
    scale = rows_of(inverse, tensors["weights"][..., None])[:, 0]
    _, kept = forward("fc2", inverse, offsets, tensors)
    got = backward("fc2", inverse, offsets, tensors, kept, grad_y)
    right = backward("unpermute", inverse, offsets, tensors, forward("unpermute", inverse, offsets, tensors)[1], grad_y)
    db = permute(inverse, grad_y)
    group = np.searchsorted(offsets["offsets"], np.arange(inverse.size), side="right").clip(max=X - 1)
    lacking = per_choice(inverse, (db * tensors["b2"][group]).sum(axis=1))
    np.testing.assert_allclose(got["weights"] + lacking, right["weights"], rtol=1e-9, atol=1e-12)
    plain = gemm(WGRAD, offsets | {"dy": db, "x": kept["rows"]})["dbias"]
    weighted = gemm(WGRAD, offsets | {"dy": db * scale[:, None], "x": kept["rows"]})["dbias"]
    np.testing.assert_allclose(weighted, right["b2"], rtol=1e-9, atol=1e-12)
    assert not np.allclose(plain, right["b2"])

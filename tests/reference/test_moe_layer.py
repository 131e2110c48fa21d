"""The definition of a mixture-of-experts layer: against one token at a time, and its gradients against differences."""

import numpy as np
import pytest

from fusekit.reference import activations, layouts
from fusekit.reference.layer import Layer, backward, forward
from fusekit.spec import Activation
from tests.soak import sample

H, I = 6, 4  # noqa: E741 - the field's own names
SWIGLU = Activation("swiglu")
GPT_OSS = Activation("swiglu", alpha=1.702, limit=0.9, up_offset=1.0)
STEP = 1e-6

# What each case has besides "silu", two of four experts and five tokens.
CASES = {
    "plain": {},
    "mixtral": {"activation": SWIGLU, "layout": "concat", "tokens": 7},
    "gpt-oss": {"activation": GPT_OSS, "layout": "interleaved", "tokens": 7, "more": ("router_bias", "b1", "b2")},
    "deepseek": {
        "activation": SWIGLU, "layout": "concat", "aux": 0.7, "experts": 8,
        "router": {"topk": 4, "score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2,
                   "scaling_factor": 2.5},
        "more": ("expert_bias", "shared_w1", "shared_w2"),
    },
    "llama4": {
        "activation": SWIGLU, "layout": "concat", "scale": "input", "more": ("shared_w1", "shared_w2"),
        "router": {"topk": 1, "score_function": "sigmoid"},
    },
    "biases-on-the-input": {"activation": Activation("gelu"), "scale": "input", "more": ("b1", "b2")},
    "all-experts": {
        "activation": Activation("srelu"), "aux": 1.3, "more": ("b1", "b2"), "router": {"topk": 4, "pre_softmax": True},
    },
    "sqrtsoftplus": {
        "activation": Activation("geglu"), "layout": "interleaved", "aux": 0.1, "more": ("b2",),
        "router": {"topk": 2, "score_function": "sqrtsoftplus"},
    },
    "experts-without-tokens": {
        "experts": 32, "tokens": 2, "more": ("b1", "b2", "router_bias"), "router": {"topk": 1},
    },
    "one-token": {"activation": Activation("reglu"), "layout": "concat", "tokens": 1, "more": ("b1", "b2")},
    "no-token": {
        "activation": SWIGLU, "layout": "concat", "aux": 1.0, "tokens": 0,
        "more": ("b1", "b2", "shared_w1", "shared_w2"),
    },
}  # fmt: skip
ROUTER = {
    "op": "router-topk", "dtype": "f32", "out_dtype": "f32", "topk": 2, "score_function": "softmax",
    "pre_softmax": False, "expert_bias": False, "num_groups": 0, "group_topk": 0, "outputs": "compact",
    "routing_map": "none", "scaling_factor": 1.0,
}  # fmt: skip


def problem(name):
    """The layer, x, its tensors and the gradient of y."""
    case = CASES[name]
    tokens, experts = case.get("tokens", 5), case.get("experts", 4)
    layout, activation = case.get("layout", "none"), case.get("activation", Activation("silu"))
    keys = ROUTER | {"experts": experts} | case.get("router", {})
    layer = Layer(keys, activation, layout, case.get("scale", "output"), case.get("aux"))
    n = I if layout == "none" else 2 * I
    shapes = {
        "router": (experts, H), "w1": (experts, n, H), "w2": (experts, H, I), "router_bias": (experts,),
        "expert_bias": (experts,), "b1": (experts, n), "b2": (experts, H), "shared_w1": (n, H), "shared_w2": (H, I),
    }  # fmt: skip
    rng = np.random.default_rng(len(name))
    tensors = {key: rng.standard_normal(shapes[key]) for key in ("router", "w1", "w2", *case.get("more", ()))}
    return layer, rng.standard_normal((tokens, H)), tensors, rng.standard_normal((tokens, H))


def token_by_token(layer, x, tensors, kept):
    """y as a loop over tokens and their experts."""
    outputs = []
    for token, row in enumerate(x):
        total = np.zeros(H)
        for expert, weight in zip(kept.indices[token], kept.weights[token], strict=True):
            given = weight * row if layer.scale == "input" else row
            z = tensors["w1"][expert] @ given + tensors.get("b1", np.zeros((99, 1)))[expert]
            a = activations.activate(layer.activation, layer.glu_layout, z[None])[0]
            o = tensors["w2"][expert] @ a + tensors.get("b2", np.zeros((99, 1)))[expert]
            total += o if layer.scale == "input" else weight * o
        if "shared_w1" in tensors:
            z = (tensors["shared_w1"] @ row)[None]
            total += tensors["shared_w2"] @ activations.activate(layer.activation, layer.glu_layout, z)[0]
        outputs.append(total)
    return np.array(outputs).reshape(x.shape)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_what_each_token_makes_of_its_experts(name):
    layer, x, tensors, _ = problem(name)
    y, loss, kept = forward(layer, x, tensors)
    np.testing.assert_allclose(y, token_by_token(layer, x, tensors, kept), rtol=1e-12, atol=1e-12)
    assert (loss > 0) is (layer.aux is not None and len(x) > 0)
    assert kept.offsets[-1] == kept.indices.size == len(kept.z)


@pytest.mark.parametrize("name", sample(CASES, most=4))
def test_every_gradient_is_the_derivative(name):
    layer, x, tensors, grad_y = problem(name)
    _, _, kept = forward(layer, x, tensors)
    got = backward(layer, tensors, kept, grad_y, grad_loss=0.4)
    assert got.pop("weights").shape == kept.weights.shape
    got.pop("logits")
    assert set(got) == {"x", *tensors} - {"expert_bias"}

    def loss(moved):
        given = tensors | moved
        y, aux, after = forward(layer, given.pop("x", x), given)
        assert np.array_equal(after.indices, kept.indices)  # a step must not change a choice
        return float((y * grad_y).sum() + 0.4 * aux)

    for key, gradient in got.items():
        at = x if key == "x" else tensors[key]
        assert gradient.shape == at.shape
        want = np.zeros_like(at)
        for where in np.ndindex(at.shape):
            step = np.zeros_like(at)
            step[where] = STEP
            want[where] = (loss({key: at + step}) - loss({key: at - step})) / (2 * STEP)
        np.testing.assert_allclose(gradient, want, rtol=2e-5, atol=2e-7, err_msg=key)


def test_the_gradient_of_the_logits_is_that_of_a_router_bias():
    layer, x, tensors, grad_y = problem("gpt-oss")
    _, _, kept = forward(layer, x, tensors)
    got = backward(layer, tensors, kept, grad_y)
    assert got["logits"].shape == (len(x), 4)
    np.testing.assert_allclose(got["logits"].sum(axis=0), got["router_bias"])


def test_an_expert_without_tokens_has_zero_gradients():
    layer, x, tensors, grad_y = problem("experts-without-tokens")
    _, _, kept = forward(layer, x, tensors)
    got = backward(layer, tensors, kept, grad_y)
    idle = np.diff(kept.offsets, prepend=0) == 0
    assert idle.sum() >= 30
    assert all(not got[name][idle].any() for name in ("w1", "w2", "b1", "b2"))


def test_a_nan_in_one_token_reaches_that_token_and_its_experts_weights():
    layer, x, tensors, grad_y = problem("mixtral")
    _, _, before = forward(layer, x, tensors)
    x = x.copy()
    x[2] = np.nan
    y, _, kept = forward(layer, x, tensors)
    got = backward(layer, tensors, kept, grad_y)
    others = np.arange(len(x)) != 2
    assert np.isnan(y[2]).all()
    assert np.isnan(got["x"][2]).all()
    assert np.isfinite(y[others]).all()
    assert np.isfinite(got["x"][others]).all()
    assert np.array_equal(kept.indices[others], before.indices[others])
    for name in ("w1", "w2"):
        hit = np.isnan(got[name]).any(axis=(1, 2))
        assert set(np.flatnonzero(hit)) <= set(kept.indices[2])


def test_split_and_joined_layouts_agree():
    """The layout of gate and up changes where weights lie and nothing else."""
    layer, x, tensors, _ = problem("mixtral")
    y, _, _ = forward(layer, x, tensors)
    gate, up = layouts.split(tensors["w1"].transpose(0, 2, 1), "concat")
    moved = tensors | {"w1": layouts.join(gate, up, "interleaved").transpose(0, 2, 1)}
    again, _, _ = forward(Layer(layer.router, layer.activation, "interleaved"), x, moved)
    np.testing.assert_allclose(y, again, rtol=1e-12)

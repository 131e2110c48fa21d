"""The recipe fp8-block in a layer: against Transformer Engine's, written down anew; its error; a small training."""

import ml_dtypes
import numpy as np
import pytest

from fusekit.reference import activations
from fusekit.reference.layer import Factors, Layer, backward, forward, groups, worth
from fusekit.spec import Activation
from tests.layers.blocks_of_te import quantised as te
from tests.reference.test_moe_layer import ROUTER

SWIGLU = Activation("swiglu")


def tensors_of(experts, hidden, width, rng):
    def weights(*shape, depth):
        return (rng.standard_normal(shape) * depth**-0.5).astype(ml_dtypes.bfloat16).astype(np.float64)

    return {
        "router": weights(experts, hidden, depth=hidden),
        "w1": weights(experts, 2 * width, hidden, depth=hidden),
        "w2": weights(experts, hidden, width, depth=width),
    }


def layer_of(experts, topk, recipe):
    return Layer(ROUTER | {"experts": experts, "topk": topk}, SWIGLU, "concat", recipe=recipe)


def by_transformer_engine(kept, tensors, grad_y):
    """y, and the gradients of x (of the experts alone), w1 and w2, expert by expert as linear layers have them."""
    result = {"y": np.zeros_like(kept.x), "x": np.zeros_like(kept.x), "w1": [], "w2": []}
    weight = np.empty(kept.token.size)
    weight[kept.inverse.reshape(-1)] = kept.weights.reshape(-1)
    for expert, group in enumerate(groups(kept)):
        token, r = kept.token[group], weight[group, None]
        w1, w2 = (te(tensors[name][expert], 128, 128) for name in ("w1", "w2"))
        z = te(kept.x[token], 1, 128) @ w1.T
        a, (by_gate, by_up) = activations.derivative(SWIGLU, "concat", z)
        np.add.at(result["y"], token, r * (te(a, 1, 128) @ w2.T))
        da = r * (te(grad_y[token], 1, 128) @ w2)
        dz = np.concatenate([da * by_gate, da * by_up], axis=1)
        np.add.at(result["x"], token, te(dz, 1, 128) @ w1)
        result["w2"].append(te(grad_y[token], 128, 1).T @ te(r * a, 128, 1))
        result["w1"].append(te(dz, 128, 1).T @ te(kept.x[token], 128, 1))
    return result | {name: np.stack(result[name]) for name in ("w1", "w2")}


def apart(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture(scope="module")
def sides():
    """The layer by the recipe, by Transformer Engine's, and in float64."""
    rng = np.random.default_rng(0)
    tensors = tensors_of(4, 336, 192, rng)  # blocks that are not whole; groups of more than one
    x, grad_y = (rng.standard_normal((500, 336)).astype(ml_dtypes.bfloat16).astype(np.float64) for _ in range(2))
    result = {}
    for recipe in ("none", "fp8-block"):
        layer = layer_of(4, 2, recipe)
        y, _, kept = forward(layer, x, tensors)
        gradients = backward(layer, tensors, kept, grad_y)
        gradients["x"] = gradients["x"] - gradients["logits"] @ tensors["router"]
        result[recipe] = {"y": y, **gradients}
    result["te"] = by_transformer_engine(kept, tensors, grad_y)
    return result


@pytest.mark.parametrize("name", ["y", "x", "w1", "w2"])
def test_the_recipe_is_transformer_engines(sides, name):
    assert apart(sides["fp8-block"][name], sides["te"][name]) < 1e-12


@pytest.mark.parametrize(
    ("name", "bound"), [("y", 0.07), ("x", 0.072), ("w1", 0.072), ("w2", 0.07), ("router", 0.075), ("weights", 0.075)]
)
def test_how_far_the_recipe_is_from_float64(sides, name, bound):
    """A factor is off by about 0.025, a product of two by sqrt(2) times that; errors of z, of da and of dz add up."""
    error = apart(sides["fp8-block"][name], sides["none"][name])
    assert 0.8 * bound < error < bound, f"{name}: {error:.4f}"


@pytest.mark.parametrize("shape", [(1, 128), (128, 1), (128, 128)])
def test_a_factor_is_off_by_a_fortieth(shape):
    v = np.random.default_rng(1).standard_normal((640, 640))
    assert 0.02 < apart(worth(v, *shape), v) < 0.03


class Bf16(Factors):
    """Factors in bf16, of every kind."""

    def rows(self, v):
        return v.astype(ml_dtypes.bfloat16).astype(np.float64)

    def weights(self, w):
        return self.rows(w)

    def tokens(self, v, owners, squares=False):
        return self.rows(v)


class InBf16(Layer):
    __slots__ = ()
    factors = property(lambda layer: Bf16())


def losses_of(layer, steps):
    """A training: next tokens of a Markov chain, by an embedding, the layer and a residual, an unembedding; Adam."""
    words, hidden, width, tokens = 48, 128, 64, 96
    rng = np.random.default_rng(5)
    chain = rng.dirichlet(np.full(words, 0.1), size=words).cumsum(axis=1)
    weights = tensors_of(4, hidden, width, rng)
    weights |= {"embedding": rng.standard_normal((words, hidden)), "out": 0.02 * rng.standard_normal((words, hidden))}
    first, second = ({name: np.zeros_like(each) for name, each in weights.items()} for _ in range(2))
    result = []
    for step in range(1, steps + 1):
        word = rng.integers(0, words, tokens)
        following = (rng.random((tokens, 1)) > chain[word, :-1]).sum(axis=1)
        tensors = {name: each.astype(ml_dtypes.bfloat16).astype(np.float64) for name, each in weights.items()}
        x = tensors["embedding"][word]
        y, _, kept = forward(layer, x, tensors)
        logits = (x + y) @ tensors["out"].T
        logits -= logits.max(axis=1, keepdims=True)
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        result.append(-np.log(chances[np.arange(tokens), following]).mean())
        chances[np.arange(tokens), following] -= 1
        chances /= tokens
        grad_y = chances @ tensors["out"]
        grads = backward(layer, tensors, kept, grad_y)
        grads = {name: grads[name] for name in ("router", "w1", "w2")} | {"out": chances.T @ (x + y)} | {
            "embedding": np.zeros_like(weights["embedding"])} | {"x": grads["x"]}  # fmt: skip
        np.add.at(grads["embedding"], word, grads.pop("x") + grad_y)
        for name, grad in grads.items():
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.98 * second[name] + 0.02 * grad**2
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.98**step)
            weights[name] -= 3e-3 * mean / (np.sqrt(square) + 1e-8)
    return np.array(result)


@pytest.mark.soak("500 steps of training; the bounds above are those of each of its products")
def test_a_training_follows_bf16s():
    """250 steps on the same data; the mean of the last 50 losses is within 1 %."""
    wide = losses_of(InBf16(ROUTER | {"experts": 4, "topk": 2}, SWIGLU, "concat"), 250)
    narrow = losses_of(layer_of(4, 2, "fp8-block"), 250)
    assert wide[0] > 3.5 and wide[-50:].mean() < 0.65 * wide[0], "it does not learn"
    assert (narrow != wide).any()
    assert abs(narrow[-50:].mean() / wide[-50:].mean() - 1) < 0.01

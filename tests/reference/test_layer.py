"""The launches of a layer, as the page of the operations lists them, give the layer and its gradients.

The page's own lines run here over the references, with the kernels of a file that `fusekit new` would write.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fusekit.reference import decode, encode, gemm, route
from fusekit.reference.permutation import index, unpermute
from fusekit.reference.router import topk_gradient
from fusekit.spec import parse_text
from fusekit.spec.hf_config import read_model
from fusekit.spec.model_kernels import Request
from tests.spec.kernel_lists import kernel_list

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
FORWARD, BACKWARD, SCALED = re.findall(r"```python\n(.*?)```", PAGE.partition("## A layer, forward")[2], re.DOTALL)
T, X, H, I = 23, 6, 32, 16  # noqa: E741 - the page's letters
SIZES = {"hidden_size": H, "intermediate_size": I, "num_local_experts": X, "hidden_act": "silu", "num_hidden_layers": 1}
CONFIGS = {
    "mixtral": {"model_type": "mixtral", "num_experts_per_tok": 2},
    "llama4": {"model_type": "llama4_text", "num_experts_per_tok": 1},
}


def launches(model):
    """The page's launches; for Llama 4 those of its second list take the place of the first one's."""
    lines = (FORWARD + BACKWARD).splitlines()
    if model == "llama4":
        changed = {line.partition("(")[0]: line for line in SCALED.splitlines()}
        assert set(changed) <= {line.partition("(")[0] for line in lines}
        lines = [changed.get(line.partition("(")[0], line) for line in lines]
    return "\n".join(lines)


class Reference:
    """A kernel that the reference computes, into the arrays that a launch gives for its outputs."""

    def __init__(self, spec):
        self.spec = spec

    def __call__(self, **given):
        for name, value in self.results(given).items():
            given[name][...] = encode(value, "bf16") if given[name].dtype == np.uint16 else value

    def results(self, given):
        """Every output, unrounded."""
        match self.spec.op:
            case "router-topk":
                return route(self.spec, given)
            case "router-topk-bwd":
                return {"grad_logits": topk_gradient(self.spec.canonical(), given)[0]}
            case "moe-index":
                order = index(given["indices"], X)
                return {name: order[name] for name in given if name in order}
            case "moe-permute":
                factor = given["weights"] if self.spec.scaled else np.ones(given["inverse"].shape)
                return {"y": permuted(given["inverse"], factor[..., None] * wide(given["x"])[:, None, :])}
            case "moe-permute-bwd":
                rows = wide(given["grad_y"])
                products = rows[given["inverse"]] * wide(given["x"])[:, None, :]
                grad = unpermute(rows, given["inverse"], given["weights"])[0]
                return {"grad_x": grad, "grad_weights": products.sum(axis=-1)}
            case "moe-unpermute":
                return {"y": unpermute(wide(given["x"]), given["inverse"], given.get("weights"))[0]}
            case "moe-unpermute-bwd":
                places, dy = given["inverse"], wide(given["grad_y"])[:, None, :]
                grad = permuted(places, given["weights"][..., None] * dy)
                return {"grad_x": grad, "grad_weights": (wide(given["x"])[places] * dy).sum(axis=-1)}
            case _:
                return gemm(self.spec, given)


def wide(x):
    return decode(x, "bf16").astype(np.float64)


def permuted(inverse, rows):
    """rows [T, K, H] in expert order: [T K, H]."""
    combined = np.zeros((inverse.size, rows.shape[-1]))
    combined[inverse.reshape(-1)] = rows.reshape(combined.shape)
    return combined


def layer(model, x, logits, w1, w2):
    """The layer in float64: y [T, H]."""
    y = np.zeros((T, H))
    for t in range(T):
        chosen = np.argsort(-logits[t], kind="stable")[: CONFIGS[model]["num_experts_per_tok"]]
        chosen_logits = logits[t, chosen]
        weights = np.exp(chosen_logits) / np.exp(chosen_logits).sum()
        if model == "llama4":
            weights = 1 / (1 + np.exp(-chosen_logits))
        for e, weight in zip(chosen, weights, strict=True):
            before, after = (weight, 1.0) if model == "llama4" else (1.0, weight)
            g, u = np.split(w1[e] @ (before * x[t]), 2)
            y[t] += after * (w2[e] @ (g / (1 + np.exp(-g)) * u))
    return y


@pytest.fixture(scope="module", params=CONFIGS)
def launched(request):
    """The model, and every tensor that the page names, after its launches."""
    config = CONFIGS[request.param] | SIZES
    text = kernel_list(read_model(json.dumps(config), "config.json"), Request("layer", tokens=T))
    kernels = {spec.kernel: Reference(spec) for spec in parse_text(text, "layer")}
    rng = np.random.default_rng(1)
    K = config["num_experts_per_tok"]  # noqa: N806
    M = T * K  # noqa: N806
    shapes = {
        "x": (T, H), "y": (T, H), "dy": (T, H), "dx": (T, H), "rows": (M, H), "b": (M, H), "db": (M, H),
        "drows": (M, H), "z": (M, 2 * I), "dz": (M, 2 * I), "a": (M, I), "w1": (X, 2 * I, H), "dw1": (X, 2 * I, H),
        "w2": (X, H, I), "dw2": (X, H, I),
    }  # fmt: skip
    t = {name: np.zeros(shape, np.uint16) for name, shape in shapes.items()}
    for name, scale in {"x": 1.0, "w1": 0.3, "w2": 0.3, "dy": 1.0}.items():
        t[name] = encode(rng.standard_normal(shapes[name]) * scale, "bf16")
    t |= {name: np.zeros((T, K), np.int32) for name in ("indices", "inverse")}
    t |= {name: np.zeros((T, K), np.float32) for name in ("weights", "grad_weights")}
    t |= {"offsets": np.zeros(X, np.int32), "order": np.zeros(M, np.int32)}
    t |= {"logits": rng.standard_normal((T, X)).astype(np.float32), "grad_logits": np.zeros((T, X), np.float32)}
    exec(launches(request.param), {"k": kernels, **t})
    return request.param, t


def values_of(t):
    """The layer's inputs in float64."""
    return {name: wide(t[name]) for name in ("x", "w1", "w2")} | {"logits": t["logits"].astype(np.float64)}


def test_the_forward_launches_are_the_layer(launched):
    model, t = launched
    want = layer(model, **values_of(t))
    assert np.linalg.norm(wide(t["y"]) - want) < 6e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(("gradient", "of"), [("dx", "x"), ("grad_logits", "logits"), ("dw1", "w1"), ("dw2", "w2")])
def test_the_backward_launches_are_its_gradients(launched, gradient, of):
    """Along its own direction and half of it, against a central difference in float64 of the sum of y times dy."""
    model, t = launched
    values = values_of(t)
    got = t[gradient].astype(np.float64) if gradient == "grad_logits" else wide(t[gradient])
    assert np.linalg.norm(got) > 0
    half = got * np.random.default_rng(2).integers(0, 2, got.shape)
    for direction in (got / np.linalg.norm(got), half / np.linalg.norm(half)):
        step = 1e-4
        ends = [
            (layer(model, **(values | {of: values[of] + sign * step * direction})) * wide(t["dy"])).sum()
            for sign in (1, -1)
        ]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((got * direction).sum(), rel=1e-2)

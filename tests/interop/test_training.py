"""The training of test_training.py of the GPU's tests, a few steps of it on the CPU with stand-in layers."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers as interop  # noqa: E402
from tests.interop import models, training  # noqa: E402
from tests.layers.host import host  # noqa: E402

RECIPES = ("none", "fp8-block")
H, I, STEPS = 64, 64, 3  # noqa: E741


@pytest.fixture
def layers():
    """By name; a backend for each recipe."""
    table = {"hidden": H, "intermediate": I, "experts": 8, "topk": 2, "router": {"input": "choices"}, "dtype": "bf16"}
    kinds = {"none": {}, "fp8": {"recipe": "fp8-block"}, "fp8-f32": {"recipe": "fp8-block", "weight_dtype": "f32"}}
    stored = {f"store/{name}": host(file="store", name=name, **table, **more) for name, more in kinds.items()}
    library = SimpleNamespace(layers=lambda: {name: each.options for name, each in stored.items()}, layer=stored.get)
    for recipe in RECIPES:
        interop.register(library, f"fusekit-{recipe}", recipe=recipe)
    yield stored
    for recipe in RECIPES:
        del moe.ExpertsInterface._global_mapping[f"fusekit-{recipe}"]


@pytest.mark.parametrize(("masters", "taken"), [(torch.bfloat16, "store/fp8"), (torch.float32, "store/fp8-f32")])
def test_steps_with_fp8_values_follow_those_without(layers, masters, taken):
    ids, losses = training.batches(STEPS, 2, 16), {}
    for recipe in RECIPES:
        model = models.model("mixtral", f"fusekit-{recipe}", H, I, dtype=masters)
        losses[recipe] = training.train(model, ids, warm_up=1)
        assert training.without_experts(model, ids[0]) > 0
    assert losses["none"][-1] < losses["none"][0]
    torch.testing.assert_close(losses["fp8-block"], losses["none"], rtol=0.01, atol=0)
    assert not torch.equal(losses["fp8-block"], losses["none"])
    passes = [which for which, *_ in layers[taken].passes]
    step = ["quantise", "forward"] * 2 + ["backward"] * 2  # of two layers
    assert passes[: len(step) * STEPS] == step * STEPS


def test_the_chain_is_one():
    """Each pair of tokens has at most three successors, the first of them most often; other seeds have other chains."""
    ids = training.batches(4, 16, 128)
    assert ids.shape == (4, 16, 128) and ids.min() >= 1 and ids.max() <= training.SYMBOLS
    assert torch.equal(ids, training.batches(4, 16, 128)) and not torch.equal(ids, training.batches(4, 16, 128, seed=1))
    counts = torch.zeros(*[training.SYMBOLS + 1] * 3)
    rows = ids.flatten(0, 1)
    counts.index_put_((rows[:, :-2], rows[:, 1:-1], rows[:, 2:]), torch.ones(()), accumulate=True)
    assert (counts > 0).sum(-1).max() <= len(training.SUCCESSORS)
    share = counts.max(-1).values.sum() / counts.sum()
    assert share.item() == pytest.approx(max(training.SUCCESSORS), abs=0.03)

"""Training and serving of one model give the same log-probabilities, bit for bit; here with layers by definition."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from fusekit.interop.torch import MoE  # noqa: E402
from tests.interop import train_serve  # noqa: E402
from tests.interop.train_serve import LENGTH  # noqa: E402

SPEC = """
schema = 1

[defaults]
kind = "moe"
hidden = 64
intermediate = 32
experts = 8
topk = 2

[[kernel]]
name = "train"

[[kernel]]
name = "serve"
keep = "none"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model after three steps, the name of the layer that serves, and log-probabilities in the forward pass."""
    path = tmp_path_factory.mktemp("specs") / "small.toml"
    path.write_text(SPEC)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'layers with device="cpu"')
        torch.manual_seed(0)
        moes = [MoE(f"{path}/train", device="cpu", dtype=torch.float32) for _ in range(2)]
        model = train_serve.Model(moes, 64)
        losses = train_serve.train(model, 3, 4)
    assert losses[-1] < losses[0]
    ids = train_serve.training.batches(1, 5, LENGTH + 1, seed=0)[0]
    return model, f"{path}/serve", ids, train_serve.trained_on(model, ids).detach()


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_served_log_probabilities_are_those_of_training(trained, batch):
    model, layer, ids, wanted = trained
    served = train_serve.serving(model, layer, device="cpu")
    assert not served.blocks[0].moe.layer.options.trained
    found, calls = train_serve.serve(served, ids, batch)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert batch in calls and max(calls) <= 5 * LENGTH // 2


def test_one_other_weight_is_seen(trained):
    model, layer, ids, wanted = trained
    served = train_serve.serving(model, layer, device="cpu")
    weights = served.blocks[1].moe.experts.down_proj.view(torch.int16)
    weights += 1  # the next number of bf16, in all
    found, _ = train_serve.serve(served, ids, 5)
    assert not torch.equal(found, wanted) and torch.allclose(found, wanted, atol=0.1)

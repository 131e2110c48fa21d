"""A model trains, then serves: log-probabilities of the decode path are those of the training forward, bit for bit.

fusekit --store STORE build tests/gpu/train-serve.toml     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_train_serve.py
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from fusekit.interop.torch import MoE  # noqa: E402
from tests.interop import train_serve  # noqa: E402
from tests.interop.train_serve import LENGTH  # noqa: E402

HIDDEN = 256  # as in train-serve.toml
LAYERS = ("qwen3", "gpt-oss", "mlp-fp16")
STEPS, ROWS, BLOCKS = 20, 32, 2
SEQUENCES = 96
BATCHES = (1, 2, 3, 7, 8, 16, 64, SEQUENCES)
AT_A_TIME = 4  # as many full batches are served, if there are so many sequences


@pytest.fixture(scope="module", params=LAYERS)
def trained(opened, request):
    """A model after its training, the layer that serves, token ids, and their log-probabilities in the forward pass."""
    name = f"train-serve/{request.param}"
    if not opened.store.names(f"{name}-serve"):
        pytest.skip(f"no layer {name}-serve in {opened}; build tests/gpu/train-serve.toml there and name the store")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.manual_seed(0)
    moes = [MoE(opened.layer(name), device="cuda", dtype=torch.float32) for _ in range(BLOCKS)]
    model = train_serve.Model(moes, HIDDEN).to("cuda")
    losses = train_serve.train(model, STEPS, ROWS)
    assert losses[-1] < 0.9 * losses[0], losses
    ids = train_serve.training.batches(1, SEQUENCES, LENGTH + 1, device="cuda")[0]
    wanted = train_serve.trained_on(model, ids)
    assert wanted.requires_grad  # the pass that keeps what the backward pass needs
    return model, opened.layer(f"{name}-serve"), ids, wanted.detach()


@pytest.mark.parametrize("batch", BATCHES)
def test_served_log_probabilities_are_those_of_training(trained, batch):
    model, layer, ids, wanted = trained
    served = train_serve.serving(model, layer, device="cuda")
    some = slice(0, AT_A_TIME * batch)
    found, calls = train_serve.serve(served, ids[some], batch)
    different = found.view(torch.int32) != wanted[some].view(torch.int32)
    apart = (found - wanted[some]).abs().max().item()
    assert not different.any(), f"{int(different.sum())} of {found.numel()} differ, by up to {apart}"
    assert batch in calls


def test_the_decode_path_has_kernels_of_its_own(trained):
    """Tiles of few tokens serve one token, and tiles of training train: else equal bits would say little."""
    model, layer, _, _ = trained
    first = "fc1-few" if "fc1-few" in layer.record.parts else "fc1-infer"  # which orders few choices itself
    for part, of_many in ((first, "fc1-infer"), ("fc2", "fc2")):
        few, many = layer.kernel_name(part, 1), model.blocks[0].moe.layer.kernel_name(of_many, ROWS * LENGTH)
        assert "@16x" in few and "@128x" in many, (few, many)


def test_one_other_weight_is_seen(trained):
    model, layer, ids, wanted = trained
    served = train_serve.serving(model, layer, device="cuda")
    moe = served.blocks[1].moe
    weights = moe.get_parameter(moe.names["w2"]).view(torch.int16)
    weights += 1  # the next number of the type, in all
    found, _ = train_serve.serve(served, ids, SEQUENCES)
    assert not torch.equal(found, wanted) and torch.allclose(found, wanted, atol=0.1)

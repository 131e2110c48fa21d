"""FP8 weights of blocks that are kept between calls: never of older weights."""

import copy
import gc
import pickle

import pytest

from fusekit.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers as interop  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers_blocks import H, I, library, restored  # noqa: E402, F401

NAME = "fusekit-test-held"


@pytest.fixture
def registered(restored):  # noqa: F811
    got = library(recipe="fp8-block")
    interop.register(got, NAME, recipe="fp8-block", blocks=True)
    yield got
    del moe.ExpertsInterface._global_mapping[NAME]


def passes(registered):
    """The passes of all layers since the last call, in order."""
    known = [which for layer in registered._layers.values() for which, *_ in layer.passes]
    for layer in registered._layers.values():
        layer.passes.clear()
    return known


def model(name="mixtral", held=True):
    network = models.model(name, NAME, H, I)
    if held:
        assert interop.hold_fp8(network) == 2
    return network


def result(network):
    return network(input_ids=models.tokens(5)).logits.detach()


def reference(network):
    """What calls that quantise themselves give."""
    return result(copy.deepcopy(network))


def step(network, optimizer):
    for seed in (1, 2):
        ids = models.tokens(7, seed=seed)
        network(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("name", "fused"), [("gpt-oss", True), ("deepseek-v3", False)])
def test_once_for_each_step_of_an_optimiser(registered, name, fused):
    network, plain = model(name), model(name, held=False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=fused) for each in (network, plain)]
    passes(registered)
    step(network, optimizers[0])
    assert passes(registered).count("quantise") == 2
    step(plain, optimizers[1])
    assert passes(registered).count("quantise") == 2 * 2
    for left, right in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(result(network), result(plain))


def changed_in_place(network, parameter):
    with torch.no_grad():
        parameter.mul_(-2.0)


def changed_by_a_state_dict(network, parameter):
    state = {name: -2.0 * each for name, each in network.state_dict().items()}
    network.load_state_dict(state)


def changed_by_an_assigned_state_dict(network, parameter):
    state = {name: -2.0 * each for name, each in network.state_dict().items()}
    network.load_state_dict(state, assign=True)


def changed_by_new_data(network, parameter):
    parameter.data = -2.0 * parameter.data


def changed_behind_pytorch(network, parameter):
    parameter.data.mul_(-2.0)
    interop.hold_fp8(network)


def changed_by_another_parameter(network, parameter):
    experts = network.model.layers[0].mlp.experts
    value = -2.0 * parameter.detach()
    del experts.gate_up_proj
    gc.collect()
    experts.gate_up_proj = torch.nn.Parameter(value)


@pytest.mark.parametrize("change", [
    changed_in_place, changed_by_a_state_dict, changed_by_an_assigned_state_dict, changed_by_new_data,
    changed_behind_pytorch, changed_by_another_parameter,
])  # fmt: skip
def test_changed_weights_are_seen(registered, change):
    network = model()
    before = result(network)
    change(network, network.model.layers[0].mlp.experts.gate_up_proj)
    after = result(network)
    assert not torch.equal(after, before) and torch.equal(after, reference(network))
    passes(registered)
    assert torch.equal(result(network), after)
    assert "quantise" not in passes(registered)


@pytest.mark.parametrize("change", ["step", "load", "hold"])
def test_compiled_code_reads_the_same_memory(registered, change):
    torch._dynamo.reset()
    network = model("qwen3-moe")
    block = network.model.layers[0].mlp
    x = torch.randn(2, 6, H)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, fused=True)
    passes(registered)
    before = compiled(x)
    before.square().sum().backward()
    assert passes(registered) == ["forward", "backward"]
    if change == "step":
        optimizer.step()
    elif change == "load":
        network.load_state_dict({name: -2.0 * each for name, each in network.state_dict().items()})
    else:
        block.experts.down_proj.data.mul_(-2.0)
        interop.hold_fp8(network)
    assert passes(registered) == ["quantise"] * (1 if change == "step" else 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        after = compiled(x)
    assert not torch.equal(after, before)
    interop.hold_fp8(network, hold=False)
    torch.testing.assert_close(after, block(x), rtol=1e-5, atol=1e-7)


def test_a_backward_pass_through_changed_weights_is_refused(registered):
    network = model()
    ids = models.tokens(5)
    loss = network(input_ids=ids, labels=ids).loss
    interop.hold_fp8(network)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_capture_makes_its_own_unless_they_are_of_these_weights(registered, monkeypatch):
    network = model()
    held = network.model.layers[0].mlp._fusekit_fp8
    monkeypatch.setattr(type(held), "_is_captured", staticmethod(lambda device: True))
    passes(registered)
    result(network)
    assert "quantise" not in passes(registered)
    changed_in_place(network, network.model.layers[0].mlp.experts.gate_up_proj)
    result(network)
    assert passes(registered).count("quantise") == 1  # in the graph; the other block's are right
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    optimizer.step()
    assert passes(registered) == ["quantise"] * 2
    monkeypatch.setattr(type(held), "_is_captured", staticmethod(lambda device: False))
    result(network)
    assert passes(registered).count("quantise") == 1  # nothing was replayed


def test_a_copy_holds_none(registered):
    network = model()
    copies = copy.deepcopy(network), pickle.loads(pickle.dumps(network))
    passes(registered)
    for each in copies:
        assert torch.equal(result(each), result(network))
        each.load_state_dict(network.state_dict())
    assert passes(registered).count("quantise") == 2 * len(copies)


def test_a_model_without_fp8_is_refused(restored):  # noqa: F811
    with pytest.raises(ArgumentError, match=r"Linear has no block that a layer with a recipe computes"):
        interop.hold_fp8(torch.nn.Linear(2, 2))
    interop.register(library(), NAME, blocks=True)
    with pytest.raises(ArgumentError, match=r"MixtralForCausalLM has no block .*recipe=\"fp8-block\""):
        interop.hold_fp8(models.model("mixtral", NAME, H, I))
    del moe.ExpertsInterface._global_mapping[NAME]

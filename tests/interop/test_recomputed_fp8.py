"""FP8 weights that backward passes make themselves, in the memory of the weights' gradients: the same bits."""

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers as interop  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers_blocks import H, I, library, restored  # noqa: E402, F401

NAME = "fusekit-test-recomputed"


@pytest.fixture
def registered(restored):  # noqa: F811
    got, others = library(recipe="fp8-block"), library(recipe="fp8-block", recompute_fp8=True)
    got._layers |= {f"{name}_recompute": layer for name, layer in others._layers.items()}
    interop.register(got, NAME, recipe="fp8-block", blocks=True)
    yield got
    del moe.ExpertsInterface._global_mapping[NAME]


def passes(registered):
    """The (layer recomputes, pass) of all layers since the last call."""
    known = [
        (layer.options.recompute_fp8, which) for layer in registered._layers.values() for which, *_ in layer.passes
    ]
    for layer in registered._layers.values():
        layer.passes.clear()
    return known


def model(blocks=1, name="gpt-oss", **more):
    network = models.model(name, NAME, H, I, **more)
    if blocks != 0:
        assert interop.recompute_fp8(network, blocks) == (2 if blocks is None else blocks)
    return network


def trained(network, steps=2, microbatches=2, fused=True):
    """Losses and parameters after some steps."""
    optimizer, losses = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=fused), []
    for seed in range(steps):
        for part in range(microbatches):
            ids = models.tokens(7, seed=10 * seed + part)
            loss = network(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *network.parameters()]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(("name", "blocks"), [("gpt-oss", 1), ("mixtral", None), ("deepseek-v3", 1)])
def test_some_blocks_train_to_the_same_bits(registered, name, blocks):
    want = trained(model(0, name))
    assert {again for again, _ in passes(registered)} == {False}
    assert same(trained(model(blocks, name)), want)
    counts = passes(registered)
    for which in ("quantise", "forward", "backward"):
        assert counts.count((True, which)) == 4 * (2 if blocks is None else 1), which
        assert counts.count((False, which)) == (0 if blocks is None else 4), which


def test_with_checkpointed_layers(registered):
    want = trained(model(0).train())
    network = model(None).train()
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    passes(registered)
    assert same(trained(network), want)
    assert passes(registered).count((True, "forward")) == 2 * 2 * 4


@pytest.mark.parametrize("first", ["hold", "recompute"])
def test_held_values_are_those_of_the_forward_pass_alone(registered, first):
    want = trained(model(0))
    network = models.model("gpt-oss", NAME, H, I)
    calls = [lambda: interop.hold_fp8(network), lambda: interop.recompute_fp8(network, None)]
    for call in calls if first == "hold" else calls[::-1]:
        assert call() == 2
    block = network.model.layers[0].mlp
    weights = [block.experts.gate_up_proj, block.experts.down_proj]
    held = sum(each.numel() for each in block._fusekit_fp8.tensors if each.element_size() == 1)
    assert held == sum(each.numel() for each in weights)
    passes(registered)
    assert same(trained(network), want)
    assert passes(registered).count((True, "quantise")) == 2 * 2  # once a step of the optimiser


def test_no_fp8_weights_are_saved_for_the_backward_pass(registered):
    ids = models.tokens(5)
    for blocks, count in ((0, 4), (1, 2), (None, 0)):
        network, saved = model(blocks), []

        def keep(tensor, saved=saved):
            saved.append(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            network(input_ids=ids, labels=ids).loss.backward()
        assert saved.count(torch.float8_e4m3fn) == count


def test_without_gradients_nothing_is_made_twice(registered):
    network, plain = model(None).eval(), model(0).eval()
    passes(registered)
    with torch.no_grad():
        got = network(input_ids=models.tokens(5)).logits
    assert passes(registered) == [(True, "quantise"), (True, "inference")] * 2
    assert torch.equal(got, plain(input_ids=models.tokens(5)).logits.detach())


def test_a_watched_block_runs_the_models_code_and_then_its_layer_again(registered):
    network = model(None, "mixtral")
    hook = network.model.layers[0].mlp.gate.register_forward_hook(lambda *given: None)
    passes(registered)
    network(input_ids=models.tokens(5))
    assert passes(registered).count((True, "forward")) == 1
    hook.remove()
    network(input_ids=models.tokens(5))
    assert passes(registered).count((True, "forward")) == 2


def test_frozen_weights_of_experts(registered):
    """dx is made of them all the same, in scratch memory."""
    gradients = []
    for blocks in (0, None):
        network = model(blocks)
        for path, parameter in network.named_parameters():
            parameter.requires_grad_("experts" not in path)
        ids = models.tokens(5)
        network(input_ids=ids, labels=ids).loss.backward()
        gradients.append([each.grad for each in network.parameters() if each.requires_grad])
    assert same(*gradients)


def test_compiled_without_a_break(registered):
    torch._dynamo.reset()
    results = []
    for blocks in (0, 1):
        block = model(blocks, "qwen3-moe").model.layers[0].mlp
        compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.manual_seed(0)
        x = torch.randn(2, 6, H, requires_grad=True)
        passes(registered)
        output = compiled(x)
        output.square().sum().backward()
        assert passes(registered) == [(blocks == 1, which) for which in ("quantise", "forward", "backward")]
        results.append([output, x.grad, *(each.grad for each in block.parameters())])
    assert same(*results)


def test_none_any_more(registered):
    network = model(None)
    assert interop.recompute_fp8(network, 0) == 0
    passes(registered)
    network(input_ids=models.tokens(5))
    assert {again for again, _ in passes(registered)} == {False}


def test_what_is_refused(registered):
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(ArgumentError, match=r"blocks = .*; it must be a number of blocks, 0 or more, or None"):
            interop.recompute_fp8(model(0), wrong)
    with pytest.raises(ArgumentError, match=r"Linear has no block that a layer with a recipe computes"):
        interop.recompute_fp8(torch.nn.Linear(2, 2))


def test_a_layer_that_is_not_built_is_named(registered):
    registered._layers = library(recipe="fp8-block", dtype="bf16", grad_dtype="bf16")._layers
    network = model(0, dtype=torch.bfloat16)
    with pytest.raises(NotBuiltError, match=r"(?s)no layer .*recompute_fp8 = true"):
        interop.recompute_fp8(network)
    assert interop.hold_fp8(network) == 2  # as before


def test_a_layer_that_recomputes_serves_alone(registered):
    registered._layers = {name: layer for name, layer in registered._layers.items() if "_recompute" in name}
    network = model(0)
    passes(registered)
    network(input_ids=models.tokens(5))
    assert {again for again, _ in passes(registered)} == {True}

"""Residuals around blocks of real model classes of Transformers, added by their layers, on the CPU with stand-ins."""

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer  # noqa: E402

from fusekit.interop import transformers as interop  # noqa: E402
from fusekit.interop import transformers_decoders as decoders  # noqa: E402
from tests.interop import models, test_transformers_blocks  # noqa: E402
from tests.interop.test_transformers import Library, said  # noqa: E402
from tests.interop.test_transformers_blocks import H, I, ran, restored  # noqa: E402, F401
from tests.layers.host import host  # noqa: E402
from tests.soak import sample  # noqa: E402

NAME = "fusekit-test-residuals"
FAMILIES = {"gpt-oss": "gpt", "qwen3-moe": "qwen", "mixtral": "mixtral", "deepseek-v3": "deepseek"}

DECODERS = (GptOssDecoderLayer, Qwen3MoeDecoderLayer, MixtralDecoderLayer, DeepseekV3DecoderLayer)


def library():
    """The layers of blocks' tests, and those of whole blocks with a residual."""
    got = test_transformers_blocks.library()
    for name in FAMILIES.values():
        table = {**got.layer(f"store/{name}").options.canonical(), "name": f"{name}_residual", "residual": True}
        got._layers[f"store/{name}_residual"] = host(**table)
    return got


def of_mixtral(**more):
    """Its block alone, with a residual and without."""
    table = {**said(8, 2, **more), "router": {}}
    return Library(residual={**table, "residual": True}, plain=table)


@pytest.fixture(autouse=True)
def decoders_restored(restored, monkeypatch):  # noqa: F811
    """Transformers' classes as they were."""
    for kind in DECODERS:
        monkeypatch.setattr(kind, "forward", kind.forward)
    decoders.arguments.cache_clear()


@pytest.fixture
def registered(decoders_restored):
    got = library()
    interop.register(got, NAME, blocks=True)
    yield got
    moe.ExpertsInterface._global_mapping.pop(NAME)


def fused(name, layers=2):
    network = models.model(name, NAME, H, I, layers=layers)
    assert interop.fuse(network, norms=False, residuals=True) == {"residuals": layers}
    return network


def trained(network, **more):
    """Loss, logits and gradients after a step."""
    ids = models.tokens(11)
    output = network(input_ids=ids, labels=ids, **more)
    output.loss.backward()
    return output.loss.item(), output.logits.detach(), {path: each.grad for path, each in network.named_parameters()}


def alike(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-4)
    assert got[2].keys() == want[2].keys()
    for path, grad in got[2].items():
        scale = want[2][path].abs().max().item()
        torch.testing.assert_close(grad, want[2][path], rtol=1e-3, atol=2e-4 * scale + 1e-9)


@pytest.mark.parametrize("name", sample(FAMILIES, "gpt-oss", "deepseek-v3"))
def test_loss_logits_and_gradients_are_those_of_eager(registered, name):
    alike(trained(fused(name)), trained(models.model(name, "eager", H, I)))
    assert ran(registered) == {f"store/{FAMILIES[name]}_residual": ["forward"] * 2 + ["backward"] * 2}
    parts = [part for part, _ in registered.layer(f"store/{FAMILIES[name]}_residual").launched]
    assert parts.count("unpermute") == 2


def test_dense_layers_keep_their_code(registered):
    config = models.configs(H, I)["deepseek-v3"]
    config.first_k_dense_replace = 1
    network = models.AutoModelForCausalLM.from_config(config, experts_implementation=NAME)
    assert interop.fuse(network, norms=False, residuals=True) == {"residuals": 1}
    network(input_ids=models.tokens(5))
    assert [*ran(registered)] == ["store/deepseek_residual"]


def test_gradient_checkpointing(registered):
    want = trained(fused("mixtral"))
    network = fused("mixtral").train()
    network.gradient_checkpointing_enable({"use_reentrant": False})
    alike(trained(network), want)


def test_one_graph_under_the_compiler(registered):
    torch._dynamo.reset()
    network = fused("qwen3-moe", layers=1).model
    layer, x = network.layers[0], torch.randn(2, 6, H, requires_grad=True)
    angles = network.rotary_emb(x, torch.arange(6)[None])
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        x.grad = None
        y = call(x, position_embeddings=angles)
        y.square().sum().backward()
        results.append([y, x.grad, *(each.grad for each in layer.parameters())])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)
    assert [*ran(registered)] == ["store/qwen_residual"]


WATCHED = ("mlp", "mlp.gate", "self_attn", "post_attention_layernorm")


@pytest.mark.parametrize("watched", sample(WATCHED, "mlp", "post_attention_layernorm"))
def test_hooks_see_what_they_are_on(registered, watched):
    network, seen = fused("mixtral"), []
    ids = models.tokens(5)
    want = network(input_ids=ids).logits
    network.model.layers[1].get_submodule(watched).register_forward_hook(lambda *given: seen.append(given[2]))
    plain = models.model("mixtral", "eager", H, I)
    own = []
    plain.model.layers[1].get_submodule(watched).register_forward_hook(lambda *given: own.append(given[2]))
    torch.testing.assert_close(network(input_ids=ids).logits, want, rtol=1e-4, atol=1e-5)
    plain(input_ids=ids)
    (left,), (right,) = seen, own
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (left, right)), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_router_logits_and_their_loss_come_from_the_models_own_router(registered):
    ids = models.tokens(9)
    got, want = (
        network(input_ids=ids, labels=ids, output_router_logits=True)
        for network in (fused("qwen3-moe"), models.model("qwen3-moe", "eager", H, I))
    )
    assert got.aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-5)
    assert [*ran(registered)] == ["store/sixteen"]


def test_hidden_states_are_those_of_the_model(registered):
    ids = models.tokens(9)
    got, want = (
        network(input_ids=ids, output_hidden_states=True).hidden_states
        for network in (fused("gpt-oss"), models.model("gpt-oss", "eager", H, I))
    )
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_autocast_leaves_a_residual_of_another_type_alone(registered):
    network, ids = fused("mixtral"), models.tokens(5)
    registered._layers = of_mixtral(dtype="bf16")._layers
    seen = []
    network.model.layers[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        network(input_ids=ids)
    assert seen == [torch.float32]


@pytest.mark.parametrize("order", ["held-first", "fused-first"])
def test_held_fp8_values_serve_the_layer_with_the_residual(decoders_restored, order):
    got = of_mixtral(recipe="fp8-block")
    interop.register(got, NAME, recipe="fp8-block", blocks=True)
    network = models.model("mixtral", NAME, H, I)
    steps = [lambda: interop.hold_fp8(network), lambda: interop.fuse(network, norms=False, residuals=True)]
    for each in steps if order == "held-first" else steps[::-1]:
        each()
    for layer in got._layers.values():
        layer.passes.clear()
    network(input_ids=models.tokens(5))
    assert ran(got) == {"store/residual": ["forward"] * 2}
    moe.ExpertsInterface._global_mapping.pop(NAME)


def scaled(own):
    def forward(self, hidden_states, *args, **kwargs):
        return 0.5 * own(self, hidden_states, *args, **kwargs)

    return forward


def dropped(own):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return own(self, hidden_states, position_embeddings=position_embeddings, **kwargs)

    return forward


@pytest.mark.parametrize("other", [scaled, dropped])
def test_a_class_that_computes_something_else_is_refused(registered, monkeypatch, other):
    network = models.model("mixtral", NAME, H, I)
    kind = type(network.model.layers[0])
    monkeypatch.setattr(kind, "forward", other(kind.forward))
    with pytest.raises(ArgumentError, match=r"MixtralDecoderLayer: its own code gives something else.*leave residuals"):
        interop.fuse(network, residuals=True)


def test_a_model_without_blocks_says_what_to_do(registered):
    network = models.model("mixtral", "eager", H, I)
    with pytest.raises(ArgumentError, match=r"no decoder layer around a whole block; call.*register\(blocks=True\)"):
        interop.fuse(network, norms=False, residuals=True)


def test_a_missing_layer_says_what_to_build(decoders_restored):
    interop.register(test_transformers_blocks.library(), NAME, blocks=True)
    network = models.model("mixtral", NAME, H, I, dtype=torch.bfloat16)
    interop.fuse(network, norms=False, residuals=True)
    with pytest.raises(NotBuiltError, match="residual = true"):
        network(input_ids=models.tokens(5))
    moe.ExpertsInterface._global_mapping.pop(NAME)

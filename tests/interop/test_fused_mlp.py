"""Dense MLPs of Transformers' models in a layer, on the CPU with stand-in layers."""

import copy

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig  # noqa: E402

from fusekit.interop import transformers_modules as modules  # noqa: E402
from fusekit.interop.transformers import fuse  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers import H, Library, read  # noqa: E402

I = 48  # noqa: E741


def said(**more):
    return {"kind": "mlp", "hidden": H, "intermediate": I, "grad_dtype": "f32", **more}


@pytest.fixture
def library(monkeypatch):
    for name in ("llama", "deepseek-v3"):
        kind = type(next(modules.mlps_of(model(name))))
        monkeypatch.setattr(kind, "forward", kind.forward)
    return Library(
        plain=said(), bias=said(bias=True), tanh=said(activation={"kind": "geglu", "approximate": "tanh"}),
        summed=said(intermediate=64, accumulate=True), moe=said(kind="moe", experts=8, topk=2),
    )  # fmt: skip


def model(name="llama", **more):
    torch.manual_seed(0)
    if name == "llama":
        config = LlamaConfig(
            **models.ATTENTION | {"hidden_size": H, "intermediate_size": I, "num_hidden_layers": 2} | more
        )
    else:
        config = models.configs(H, I)["deepseek-v3"]
        assert isinstance(config, DeepseekV3Config)
        config.first_k_dense_replace, config.intermediate_size, config.moe_intermediate_size = 1, I, I
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, each in network.named_parameters():
            if "proj" in path:
                each.normal_(std=0.2)
    return network


def trained(network):
    ids = models.tokens(9)
    loss = network(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {path: each.grad for path, each in network.named_parameters()}


def ran(library):
    return {name.removeprefix("store/"): len(layer.passes) for name, layer in library._layers.items() if layer.passes}


@pytest.mark.parametrize(("more", "layer"), [
    ({}, "plain"), ({"mlp_bias": True}, "bias"), ({"hidden_act": "gelu_pytorch_tanh"}, "tanh"),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_the_model(library, more, layer):
    want, want_grads = trained(model(**more))
    network = model(**more)
    assert fuse(network, norms=False, mlps=True, library=library) == {"mlps": 2}
    loss, grads = trained(network)
    assert loss == pytest.approx(want, rel=1e-5)
    for path, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[path], rtol=1e-3, atol=2e-5, msg=lambda m, p=path: f"{p}: {m}")
    assert ran(library) == {layer: 4}
    assert trained(copy.deepcopy(network))[0] == pytest.approx(want, rel=1e-5)
    assert ran(library) == {layer: 8}


def test_first_layers_and_shared_experts_of_deepseek(library):
    network = model("deepseek-v3")
    assert fuse(network, norms=False, mlps=True, library=library) == {"mlps": 2}
    network(input_ids=models.tokens(3))
    assert ran(library) == {"plain": 2}


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled(library, compiled):
    torch._dynamo.reset()
    network = model()
    mlp = network.model.layers[0].mlp
    x = torch.randn(2, 7, H)
    want = mlp(x)
    fuse(network, norms=False, mlps=True, library=library, compiled=compiled)
    got = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert ran(library) == ({"plain": 1} if compiled else {})


def test_a_model_runs_its_own_code_where_a_layer_does_not_fit(library):
    network = model()
    fuse(network, norms=False, mlps=True, library=library)
    seen = []
    hook = network.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: seen.append(given[2]))
    network(input_ids=models.tokens(3))
    assert len(seen) == 1 and ran(library) == {"plain": 1}
    hook.remove()
    network.bfloat16()(input_ids=models.tokens(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network.float()(input_ids=models.tokens(3))
    assert ran(library) == {"plain": 1}


def test_what_is_missing_or_something_else_is_refused(library, monkeypatch):
    network = model(intermediate_size=40).bfloat16()
    with pytest.raises(NotBuiltError, match="no layer of the store computes this MLP") as caught:
        fuse(network, norms=False, mlps=True, library=library)
    options = read(str(caught.value).partition("\n\n")[2], monkeypatch)
    assert (options.kind, options.hidden, options.intermediate, options.glu_layout) == ("mlp", H, 40, "concat")
    assert modules._dense(network.model.layers[0].mlp).fits(options)
    with pytest.raises(ArgumentError, match=r"store/summed has accumulate = true.*mlps=False"):
        fuse(model(intermediate_size=64), norms=False, mlps=True, library=library)
    network = model()
    kind = type(network.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * own(self, x))
    modules._activation.cache_clear()
    with pytest.raises(ArgumentError, match=r"LlamaMLP: its own code is no gated MLP .*mlps=False"):
        fuse(network, norms=False, mlps=True, library=library)
    modules._activation.cache_clear()
    with pytest.raises(ArgumentError, match="Linear has no module of mlps to fuse"):
        fuse(torch.nn.Linear(2, 2), norms=False, mlps=True, library=library)

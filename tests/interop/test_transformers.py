"""The experts backend in real model classes of Transformers, on the CPU with stand-in layers."""

import copy
from types import SimpleNamespace

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers as interop  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.layers.host import host  # noqa: E402

H, I = 32, 16  # noqa: E741
FAMILIES = ("gpt-oss", "qwen3-moe", "mixtral", "deepseek-v3")
GPT_OSS = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}


class Library:
    """Stands in for a library: layers by name, each what a spec says."""

    def __init__(self, **layers):
        self._layers = {f"store/{name}": host(file="store", name=name, **said) for name, said in layers.items()}
        self.looked = 0

    def layers(self):
        self.looked += 1
        return {name: layer.options for name, layer in self._layers.items()}

    def layer(self, name):
        return self._layers[name]


def said(experts, topk, **more):
    shapes = {"hidden": H, "intermediate": I, "experts": experts, "topk": topk}
    return {**shapes, "router": {"input": "choices"}, "grad_dtype": "f32", **more}


def library(**more):
    return Library(
        gpt=said(8, 4, activation=GPT_OSS, glu_layout="interleaved", bias=True, b_major="n", **more),
        wrong_limit=said(8, 4, activation={**GPT_OSS, "limit": 6.0}, glu_layout="interleaved", bias=True, b_major="n"),
        sixteen=said(16, 4, **more), mixtral=said(8, 2, **more), summed=said(8, 2, accumulate=True),
        not_choices=said(8, 2, router={}),
    )  # fmt: skip


@pytest.fixture
def registered():
    got = library()
    interop.register(got, "fusekit-test")
    yield got
    del moe.ExpertsInterface._global_mapping["fusekit-test"]


def trained(name, backend, **more):
    """Loss, logits and gradients after one step."""
    model = models.model(name, backend, H, I, **more)
    ids = models.tokens(11)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.loss.item(), output.logits.detach(), {path: each.grad for path, each in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_logits_and_gradients_are_those_of_eager(registered, name):
    loss, logits, gradients = trained(name, "fusekit-test")
    want_loss, want_logits, want = trained(name, "eager")
    assert loss == pytest.approx(want_loss, rel=1e-5)
    torch.testing.assert_close(logits, want_logits, rtol=1e-3, atol=1e-4)
    assert any("experts" in path for path in gradients)
    for path, grad in gradients.items():
        scale = want[path].abs().max().item()
        torch.testing.assert_close(
            grad, want[path], rtol=1e-3, atol=1e-4 * scale + 1e-9, msg=lambda m, p=path: f"{p}: {m}"
        )
    layers = [layer for layer in registered._layers.values() if layer.passes]
    assert len(layers) == 1 and [which for which, *_ in layers[0].passes] == ["forward"] * 2 + ["backward"] * 2
    assert registered.looked == 1  # for all modules alike


def test_inference_keeps_nothing(registered):
    model = models.model("mixtral", "fusekit-test", H, I)
    with torch.no_grad():
        model(input_ids=models.tokens(5))
    passes = registered.layer("store/mixtral").passes
    assert {which for which, *_ in passes} == {"inference"}


def test_a_call_asks_for_nothing_that_a_module_lacks(registered, monkeypatch):
    """nn.Module is slow where there is no such attribute."""
    experts = models.model("mixtral", "fusekit-test", H, I).model.layers[0].mlp.experts
    given = torch.randn(5, H), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
    search, lacking = torch.nn.Module.__getattr__, []

    def searched(module, name):
        try:
            return search(module, name)
        except AttributeError:
            lacking.append(name)
            raise

    with torch.no_grad():
        experts(*given)
        monkeypatch.setattr(torch.nn.Module, "__getattr__", searched)
        experts(*given)
    assert not lacking


def test_a_norm_behind_the_experts_is_refused(registered):
    experts = models.model("mixtral", "fusekit-test", H, I).model.layers[0].mlp.experts
    experts.has_post_expert_norm = True
    given = torch.randn(5, H), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
    with pytest.raises(ArgumentError, match="MixtralExperts: it normalises what each expert gives"):
        experts(*given)


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_without_a_break(registered, name):
    torch._dynamo.reset()
    model = models.model(name, "fusekit-test", H, I)
    block = model.model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (6, 9):
        x = torch.randn(2, count, H, requires_grad=True)
        grads = []
        for call in (block, compiled):
            model.zero_grad()
            x.grad = None
            output = call(x)
            (output[0] if isinstance(output, tuple) else output).square().sum().backward()
            grads.append([x.grad, *(each.grad for each in block.parameters())])
        for left, right in zip(*grads, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)


def test_gradient_checkpointing(registered):
    want = trained("qwen3-moe", "fusekit-test")[2]
    model = models.model("qwen3-moe", "fusekit-test", H, I).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = models.tokens(11)
    model(input_ids=ids, labels=ids).loss.backward()
    for path, each in model.named_parameters():
        torch.testing.assert_close(each.grad, want[path], rtol=1e-4, atol=1e-7)


def test_autocast():
    got = library(dtype="bf16")
    interop.register(got, "fusekit-test-bf16")
    model = models.model("mixtral", "fusekit-test-bf16", H, I)
    ids = models.tokens(11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = models.model("mixtral", "eager", H, I)(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(want.item(), rel=5e-3)
    assert all(each.grad.dtype == torch.float32 for each in model.parameters())


def test_indices_beyond_the_experts_add_nothing(registered):
    """As expert parallelism has them for experts of other ranks."""
    block = models.model("mixtral", "fusekit-test", H, I).model.layers[0].mlp
    x, weights = torch.randn(6, H), torch.rand(6, 2)
    indices = torch.tensor([[0, 8], [8, 3], [8, 8], [1, 2], [7, 0], [5, 8]])
    local = (indices < 8) * weights
    got = block.experts(x, indices, local)
    block.experts.config._experts_implementation_internal = "eager"
    want = torch.zeros_like(x)
    for place in range(2):
        for token in range(6):
            if indices[token, place] < 8:
                one = block.experts(x[token : token + 1], indices[token, place].reshape(1, 1), torch.ones(1, 1))
                want[token] += weights[token, place] * one[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


def test_weight_gradients_can_go_to_main_gradients():
    got = library()
    interop.register(got, "fusekit-test-main", layers="store/summed")
    model, eager = (models.model("mixtral", backend, H, I) for backend in ("fusekit-test-main", "eager"))
    ids = models.tokens(7)
    with pytest.raises(ArgumentError, match="w1 has no main_grad"):
        model(input_ids=ids)
    for path, each in model.named_parameters():
        if ".experts." in path:
            each.main_grad = torch.zeros_like(each)
    model(input_ids=ids, labels=ids).loss.backward()
    eager(input_ids=ids, labels=ids).loss.backward()
    for (path, each), want in zip(model.named_parameters(), eager.parameters(), strict=True):
        if ".experts." in path:
            assert each.grad is None
            torch.testing.assert_close(each.main_grad, want.grad, rtol=1e-3, atol=1e-7)


def test_a_missing_layer_says_what_to_build(monkeypatch):
    interop.register(Library(other=said(4, 1)), "fusekit-test-empty")
    model = models.model("gpt-oss", "fusekit-test-empty", H, I, dtype=torch.bfloat16)
    with pytest.raises(NotBuiltError, match=r"fusekit build experts\.toml") as caught:
        model(input_ids=models.tokens(5))
    text = str(caught.value).partition("\n\n")[2]
    options = read(text, monkeypatch)
    described = interop.described(*key_of(model.model.layers[0].mlp.experts, 4))
    assert described.fits(options)
    assert options.b_major == "n" and options.bias and options.glu_layout == "interleaved"


def read(text, monkeypatch):
    """The options of the one layer in a spec file."""
    from fusekit.spec import layer as spec
    from fusekit.spec import parse_text

    seen = []
    monkeypatch.setattr(spec, "program", lambda options: seen.append(options) or SimpleNamespace(parts={}))
    parse_text(text, "experts")
    assert len(seen) == 1
    return seen[0]


def key_of(module, topk):
    kinds = type(module), type(getattr(module, "act_fn", None)), *[module.down_proj.dtype] * 2
    flags = module.has_gate, module.has_bias, module.is_transposed
    numbers = [interop._text(getattr(module, name, None)) for name in interop._NUMBERS]
    return *kinds, *module.down_proj.shape, topk, *flags, *numbers


def test_float32_is_told_what_to_do():
    interop.register(Library(), "fusekit-test-f32")
    with pytest.raises(ArgumentError, match='load the model with dtype="bfloat16"'):
        models.model("mixtral", "fusekit-test-f32", H, I)(input_ids=models.tokens(5))


def gate_of(code, **numbers):
    """A module's class whose gate is `code`."""
    return type("Gate", (), {"_apply_gate": code}), numbers


@pytest.mark.parametrize(
    ("name", "act_fn", "want"),
    [
        ("silu", None, {"kind": "swiglu"}), ("gelu", None, {"kind": "geglu"}), ("relu", None, {"kind": "reglu"}),
        ("gelu_pytorch_tanh", None, {"kind": "geglu", "approximate": "tanh"}),
        ("gelu_new", None, {"kind": "geglu", "approximate": "tanh"}),
    ],
)  # fmt: skip
def test_activations_are_recognised(name, act_fn, want):
    from transformers.activations import ACT2FN

    module = type("Gate", (), {"_apply_gate": moe._default_apply_gate})
    got, layout = interop.recognised(module, type(ACT2FN[name]), True, {})
    assert (dict(interop.given_parameters(got)), layout) == (want, "concat")


def test_plain_activations_are_recognised():
    from transformers.activations import ACT2FN

    for name, kind in (("relu2", "srelu"), ("silu", "silu"), ("gelu", "gelu"), ("relu", "relu")):
        got, layout = interop.recognised(object, type(ACT2FN[name]), False, {})
        assert (dict(interop.given_parameters(got)), layout) == ({"kind": kind}, "none")


def test_a_clamp_of_large_numbers_is_seen():
    def clamped(self, z):
        gate, up = z.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    module, numbers = gate_of(clamped, limit=100.0)
    got, _ = interop.recognised(module, type(None), True, numbers)
    assert dict(interop.given_parameters(got)) == {"kind": "swiglu", "limit": 100.0}


def test_an_activation_that_is_none_of_ours_is_refused():
    def after(self, z):  # clamps what others clamp before
        gate, up = z.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)

    module, numbers = gate_of(after, limit=7.0)
    with pytest.raises(ArgumentError, match="its activation is none of swiglu, geglu, reglu"):
        interop.recognised(module, type(None), True, numbers)
    module, numbers = gate_of(lambda self, z: self.more(z))
    with pytest.raises(ArgumentError, match="cannot be looked at"):
        interop.recognised(module, type(None), True, numbers)


def test_copies_of_a_model_work(registered):
    model = models.model("mixtral", "fusekit-test", H, I)
    twin = copy.deepcopy(model)
    ids = models.tokens(5)
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)

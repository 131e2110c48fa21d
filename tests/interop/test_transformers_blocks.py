"""Whole blocks of real model classes of Transformers in one layer, on the CPU with stand-in layers."""

import copy

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import transformers as interop  # noqa: E402
from fusekit.interop import transformers_blocks as blocks  # noqa: E402
from fusekit.interop.torch_layer import DTYPES  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.interop.test_transformers import FAMILIES, GPT_OSS, H, I, Library, read, said, trained  # noqa: E402

DEEPSEEK = {
    "score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5,
}  # fmt: skip
NAME = "fusekit-test-blocks"


def library(**more):
    whole = [
        ("gpt", said(8, 4, activation=GPT_OSS, glu_layout="interleaved", bias=True, b_major="n",
                     **more | {"router": {"bias": True}})),
        ("qwen", said(16, 4, **more | {"router": {}})),
        ("mixtral", said(8, 2, **more | {"router": {}})),
        ("deepseek", said(16, 4, shared=I, **more | {"router": DEEPSEEK})),
        ("wrong_scale", said(8, 2, **more | {"router": {"scaling_factor": 2.0}})),
        ("with_loss", said(8, 2, **more | {"router": {"aux_loss": True}})),
    ]  # fmt: skip
    experts = [
        ("experts", said(8, 2, **more)), ("sixteen", said(16, 4, **more)),
        ("gpt_experts", said(8, 4, activation=GPT_OSS, glu_layout="interleaved", bias=True, b_major="n", **more)),
    ]  # fmt: skip
    return Library(**dict(whole), **dict(experts))


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Transformers' classes as they were."""
    for method in ("post_init", "set_experts_implementation"):
        monkeypatch.setattr(blocks.PreTrainedModel, method, getattr(blocks.PreTrainedModel, method))
    blocks._blocks.cache_clear()
    blocks._backends.cache_clear()
    for name, config in models.configs(H, I).items():
        kind = type(next(blocks.blocks_of(models.AutoModelForCausalLM.from_config(config)), None))
        assert kind is not type(None), name
        monkeypatch.setattr(kind, "forward", kind.forward)


@pytest.fixture
def registered(restored):
    got = library()
    interop.register(got, NAME, blocks=True)
    yield got
    del moe.ExpertsInterface._global_mapping[NAME]


def ran(registered):
    """Layers that ran, and their passes."""
    return {name: [which for which, *_ in layer.passes] for name, layer in registered._layers.items() if layer.passes}


@pytest.mark.parametrize(
    ("name", "layer"), [("gpt-oss", "gpt"), ("qwen3-moe", "qwen"), ("mixtral", "mixtral"), ("deepseek-v3", "deepseek")]
)
def test_loss_logits_and_gradients_are_those_of_eager(registered, name, layer):
    loss, logits, gradients = trained(name, NAME)
    want_loss, want_logits, want = trained(name, "eager")
    assert loss == pytest.approx(want_loss, rel=1e-5)
    torch.testing.assert_close(logits, want_logits, rtol=1e-3, atol=1e-4)
    routers = [path for path in gradients if ".gate.weight" in path or ".router." in path]
    assert len(routers) == (4 if name == "gpt-oss" else 2)
    for path, grad in gradients.items():
        scale = want[path].abs().max().item()
        torch.testing.assert_close(
            grad, want[path], rtol=1e-3, atol=2e-4 * scale + 1e-9, msg=lambda m, p=path: f"{p}: {m}"
        )
    assert ran(registered) == {f"store/{layer}": ["forward"] * 2 + ["backward"] * 2}
    assert registered.looked == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_without_a_break(registered, name):
    torch._dynamo.reset()
    block = models.model(name, NAME, H, I).model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (6, 9):
        x = torch.randn(2, count, H, requires_grad=True)
        grads = []
        for call in (block, compiled):
            block.zero_grad()
            x.grad = None
            output = call(x)
            (output[0] if isinstance(output, tuple) else output).square().sum().backward()
            grads.append([x.grad, *(each.grad for each in block.parameters())])
        for left, right in zip(*grads, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)
    assert len(ran(registered)) == 1


def test_router_logits_and_their_loss_come_from_the_models_own_router(registered):
    ids = models.tokens(9)
    got, want = (
        models.model("qwen3-moe", backend, H, I)(input_ids=ids, labels=ids, output_router_logits=True)
        for backend in (NAME, "eager")
    )
    assert len(got.router_logits) == 2
    assert got.aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-5)
    assert [*ran(registered)] == ["store/sixteen"]


def test_a_hook_on_the_router_sees_it(registered):
    model = models.model("mixtral", NAME, H, I)
    seen = []
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda *given: seen.append(given[2]))
    model(input_ids=models.tokens(5))
    assert len(seen) == 1 and {*ran(registered)} == {"store/mixtral", "store/experts"}
    hook.remove()
    model(input_ids=models.tokens(5))
    assert len(seen) == 1


def test_another_implementation_runs_the_models_code(registered):
    model = models.model("mixtral", NAME, H, I)
    model.set_experts_implementation("eager")
    model(input_ids=models.tokens(5))
    assert ran(registered) == {}
    model.set_experts_implementation(NAME)
    model(input_ids=models.tokens(5))
    assert [*ran(registered)] == ["store/mixtral"]


def test_set_later(registered):
    model = models.model("mixtral", "eager", H, I)
    model.set_experts_implementation(NAME)
    twin = copy.deepcopy(model)
    ids = models.tokens(5)
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert [*ran(registered)] == ["store/mixtral"]


def test_gradient_checkpointing(registered):
    want = trained("deepseek-v3", NAME)[2]
    model = models.model("deepseek-v3", NAME, H, I).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = models.tokens(11)
    model(input_ids=ids, labels=ids).loss.backward()
    for path, each in model.named_parameters():
        torch.testing.assert_close(each.grad, want[path], rtol=1e-4, atol=1e-7)


def test_a_layer_with_a_loss_serves_where_there_is_none_without(restored):
    got = library()
    interop.register(got, NAME, layers="store/with_loss", blocks=True)
    loss, _, gradients = trained("mixtral", NAME)
    want_loss, _, want = trained("mixtral", "eager")
    assert loss == pytest.approx(want_loss, rel=1e-5)
    path = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(gradients[path], want[path], rtol=1e-3, atol=2e-4 * want[path].abs().max().item())
    assert [*ran(got)] == ["store/with_loss"]


def test_a_router_that_computes_something_else_is_refused(registered, monkeypatch):
    block = models.model("mixtral", "eager", H, I).model.layers[0].mlp
    kind = type(block.gate)
    own = kind.forward

    def doubled(self, x):
        logits, weights, indices = own(self, x)
        return logits, 2 * weights, indices

    monkeypatch.setattr(kind, "forward", doubled)
    with pytest.raises(ArgumentError, match="MixtralSparseMoeBlock: its own code gives something else than its config"):
        models.model("mixtral", NAME, H, I)


def test_random_numbers_of_the_caller_are_left_alone(registered, monkeypatch):
    config = models.configs(H, I)["qwen3-moe"]
    torch.manual_seed(5)
    models.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    want = torch.rand(3)
    torch.manual_seed(5)
    for seed in ("manual_seed", "random.manual_seed", "cuda.manual_seed_all"):  # of whatever device
        monkeypatch.setattr(f"torch.{seed}", lambda *_: pytest.fail("seeded"))
    models.AutoModelForCausalLM.from_config(config, experts_implementation=NAME)
    assert torch.equal(torch.rand(3), want)


def test_noise_in_training_is_refused(registered):
    config = models.configs(H, I)["mixtral"]
    config.router_jitter_noise = 0.1
    with pytest.raises(ArgumentError, match="MixtralSparseMoeBlock: its own code gives something else"):
        models.AutoModelForCausalLM.from_config(config, experts_implementation=NAME)


def test_a_missing_layer_says_what_to_build(restored, monkeypatch):
    interop.register(Library(other=said(4, 1)), NAME, blocks=True)
    model = models.model("deepseek-v3", NAME, H, I, dtype=torch.bfloat16)
    with pytest.raises(NotBuiltError, match=r"fusekit build experts\.toml") as caught:
        model(input_ids=models.tokens(5))
    options = read(str(caught.value).partition("\n\n")[2], monkeypatch)
    assert (options.router["num_groups"], options.router["scaling_factor"], options.shared) == (4, 2.5, I)
    block = model.model.layers[0].mlp
    described = blocks._blocks()[block._fusekit_block].layer
    router = next(name for name, kind in DTYPES.items() if kind == block.gate.weight.dtype)
    assert options.router["weight_dtype"] == router and described.fits(options)

"""The experts backend in models of Transformers on the GPU, against their eager experts.

fusekit --store STORE build tests/gpu/layers.toml rms-norm     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_transformers.py
"""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from fusekit.interop import transformers as interop  # noqa: E402
from tests.interop import models  # noqa: E402

H, I = 256, 128  # noqa: E741 - as in layers.toml
FAMILIES = ("gpt-oss", "qwen3-moe", "mixtral", "deepseek-v3")
VALUES, GRADIENTS = 5e-3, 8e-3  # relative Frobenius error of one block against float64


@pytest.fixture(scope="module", autouse=True)
def backend(opened):
    if not opened.store.names("layers/hf-*"):
        pytest.skip(f"no kernels of layers in {opened}; build tests/gpu/layers.toml there and name the store")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    interop.register(opened, layers="layers/hf-*")
    interop.register(opened, "fusekit-blocks", layers="layers/hf-*", blocks=True)
    return "fusekit"


def model(name, backend, **more):
    return models.model(name, backend, H, I, dtype=torch.bfloat16, device="cuda", **more)


def error(found, want):
    return ((found.double() - want.double()).norm() / (want.double().norm() or 1.0)).item()


@pytest.mark.parametrize("tokens", [1, 127, 1024])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_alone(name, tokens, backend):
    """The module with given choices, against its own eager code in float64."""
    experts = model(name, backend).model.layers[0].mlp.experts
    wide = copy.deepcopy(experts).double()
    wide.config = copy.deepcopy(experts.config)
    wide.config._experts_implementation_internal = "eager"
    torch.manual_seed(1)
    count, topk = experts.num_experts, experts.config.num_experts_per_tok
    x = torch.randn(tokens, H, device="cuda").bfloat16()
    indices = torch.rand(tokens, count, device="cuda").argsort(1)[:, :topk]
    weights = torch.rand(tokens, topk, device="cuda").bfloat16()
    dy = torch.randn(tokens, H, device="cuda").bfloat16()

    def run(module, dtype):
        given = [item.detach().to(dtype, copy=True).requires_grad_() for item in (x, weights)]
        y = module(given[0], indices, given[1])
        y.backward(dy.to(y.dtype))
        return y, [given[0].grad, given[1].grad, *(parameter.grad for parameter in module.parameters())]

    y, grads = run(experts, torch.bfloat16)
    want, want_grads = run(wide, torch.float64)
    assert error(y, want) <= VALUES
    assert [error(*both) <= GRADIENTS for both in zip(grads, want_grads, strict=True)] == [True] * len(grads)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_logits_and_gradients_are_those_of_eager(name, backend):
    """A model of one layer, whose router sees the same bits with both: no choice differs, only roundings do."""
    results = {}
    ids = models.tokens(128, "cuda")
    for implementation in (backend, "eager"):
        each = model(name, implementation, layers=1)
        result = each(input_ids=ids, labels=ids)
        result.loss.backward()
        results[implementation] = (
            result.loss.item(),
            result.logits,
            {path: p.grad for path, p in each.named_parameters()},
        )
    actual, want = results[backend], results["eager"]
    assert actual[0] == pytest.approx(want[0], rel=1e-3)
    assert error(actual[1], want[1]) <= 1e-2
    off = {path: error(actual[2][path], grad) for path, grad in want[2].items() if grad is not None}
    assert all(value <= 2e-2 for value in off.values()), off


@pytest.mark.parametrize(
    ("name", "backend_", "residuals"),
    [
        *((name, backend, False) for name in FAMILIES for backend in ("fusekit", "fusekit-blocks")),
        ("deepseek-v3", "fusekit-blocks", True),
    ],
)
def test_a_training_follows_that_of_eager(name, backend, backend_, residuals):
    """Two layers, so a router's choice may differ where scores are close; the losses stay together."""
    backend = backend_
    losses = {}
    for implementation in (backend, "eager"):
        each = model(name, implementation)
        if residuals and implementation != "eager":
            interop.fuse(each, residuals=True)
        optimizer = torch.optim.AdamW(each.parameters(), lr=3e-4)
        losses[implementation] = []
        for step in range(50):
            ids = models.tokens(64, "cuda", seed=step % 4)
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())
    first = losses["eager"][0]
    apart = [abs(left - right) / first for left, right in zip(losses[backend], losses["eager"], strict=True)]
    assert losses[backend][-1] < 0.8 * first, losses
    assert max(apart) <= 0.03 and sum(apart) / len(apart) <= 0.01, (max(apart), losses)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 127, 1024])
def test_whole_blocks(name, tokens, backend):
    """Router, experts and shared expert against the block's own code in float64, where both choose alike."""
    block = model(name, "fusekit-blocks").model.layers[0].mlp
    wide = copy.deepcopy(block).double()
    for module in wide.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config)
            module.config._experts_implementation_internal = "eager"
    torch.manual_seed(1)
    x = torch.randn(1, tokens, H, device="cuda").bfloat16()
    dy = torch.randn(1, tokens, H, device="cuda").bfloat16()

    def run(module, dtype):
        given = x.detach().to(dtype, copy=True).requires_grad_()
        y = module(given)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy.to(y.dtype))
        return y, given.grad

    (y, dx), (want, want_dx) = run(block, torch.bfloat16), run(wide, torch.float64)
    apart = (y.double() - want).norm(dim=-1) / want.norm(dim=-1)
    same = apart.flatten() <= 2 * VALUES
    assert same.double().mean() >= 0.97, apart
    assert error(dx[0][same], want_dx[0][same]) <= GRADIENTS
    routers = [(path, each) for path, each in block.named_parameters() if "gate.w" in path or "router" in path]
    assert routers and all(each.grad is not None and each.grad.isfinite().all() for _, each in routers)


@pytest.mark.parametrize("backend_", ["fusekit", "fusekit-blocks"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_compiled_block(name, backend, backend_):
    torch._dynamo.reset()
    backend = backend_
    block = model(name, backend).model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for tokens in (64, 100):
        x = torch.randn(2, tokens, H, device="cuda", dtype=torch.bfloat16)
        result = []
        for call in (block, compiled):
            y = call(x)
            result.append(y[0] if isinstance(y, tuple) else y)
        # The compiler's router rounds otherwise, and may choose otherwise where scores are close.
        apart = (result[1].double() - result[0].double()).norm(dim=-1) / result[0].double().norm(dim=-1)
        assert (apart <= 2e-2).double().mean() >= 0.9, apart


def test_generation(backend):
    """One token at a time; greedy choices are eager's where logits are apart."""
    results = {}
    for implementation in (backend, "eager"):
        each = model("qwen3-moe", implementation).eval()
        results[implementation] = each.generate(models.tokens(16, "cuda"), max_new_tokens=8, do_sample=False)
    assert results[backend].shape == results["eager"].shape


def test_fused_norms_and_mlps(opened, backend):
    """A Llama with its norms and MLPs in kernels, next to its own code."""
    if not opened.store.names("rms-norm/*"):
        pytest.skip(f"no kernels of rms-norm in {opened}; run fusekit build rms-norm there and name the store")
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "mlp_bias": True}  # as layers.toml
    ids, results = models.tokens(128, "cuda"), []
    for fused in (True, False):
        torch.manual_seed(0)
        with torch.device("cuda"):
            config = LlamaConfig(**models.ATTENTION | sizes)
            each = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if fused:
            assert interop.fuse(each, mlps=True, library=opened, layers="layers/mlp") == {"norms": 5, "mlps": 2}
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), {path: p.grad for path, p in each.named_parameters()}))
    (loss, grads), (want, want_grads) = results
    assert loss == pytest.approx(want, rel=1e-3)
    off = {path: error(grad, want_grads[path]) for path, grad in grads.items()}
    assert all(value <= 3e-2 for value in off.values()), off

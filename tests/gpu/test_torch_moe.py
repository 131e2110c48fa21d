"""Layers as PyTorch modules on the GPU: results and gradients, bits, graphs, hard batches.

fusekit --store STORE build tests/gpu/layers.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_torch_moe.py
"""

import copy
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from fusekit.errors import ArgumentError  # noqa: E402
from fusekit.library import Library  # noqa: E402
from tests.interop import plain_torch  # noqa: E402
from tests.plans import plan_of  # noqa: E402

NAMES = (
    "qwen3", "gpt-oss", "mixtral", "deepseek", "qwen3-next", "llama4", "logits", "choices", "recompute",
    "gradients-f32", "plain", "router-f32", "mlp",
)  # fmt: skip
COEFFICIENT = 0.02
# Relative Frobenius error against float64: bf16 rounds z, a, o and y, and in the gradients also dz; one rounding is
# 1.7e-3.
VALUES, GRADIENTS = 5e-3, 8e-3
APART = 1e-4  # between the scores that decide a choice, so that float32 and float64 choose alike


@pytest.fixture(scope="module")
def layers(opened):
    if not opened.store.names("layers/*"):
        pytest.skip(f"no kernels of layers in {opened}; build tests/gpu/layers.toml there and name the store")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return opened


def module(library, name, seed=0, **more):
    torch.manual_seed(seed)
    moe = interop.MoE(library.layer(f"layers/{name}"), device="cuda", aux_coefficient=COEFFICIENT, **more)
    with torch.no_grad():
        for path, tensor in moe.state_dict().items():
            if "bias" in path:
                tensor.normal_(std=0.1)
    return moe


def router_of(moe):
    options = moe.layer.options
    return options.router["input"] if options.experts else ""


def inputs(moe, tokens, seed=1):
    """x, and what the layer is given of the choice; no choice hangs on the last bits of a score."""
    o, kind = moe.layer.options, router_of(moe)
    torch.manual_seed(seed)
    x = torch.randn(4 * tokens + 8, o.hidden, device="cuda").to(moe.operator.dtype)
    logits = torch.randn(len(x), o.experts, device="cuda") if o.experts else None
    if kind in ("x", "logits"):
        t = tensors_of(moe, torch.float64)
        logits_ = logits.double()
        if kind == "x":
            logits_ = torch.nn.functional.linear(x.double(), t["router"], t.get("router_bias"))
        far = plain_torch.margins(o, logits_, t.get("expert_bias")) > APART
        assert far.sum() >= tokens
        x, logits = x[far], logits[far]
    x = x[:tokens].clone().requires_grad_()
    if kind == "logits":
        return x, logits[:tokens].clone().requires_grad_()
    if kind == "choices":
        chosen = logits[:tokens].argsort(1)[:, : o.topk].int()
        return x, chosen, torch.rand(tokens, o.topk, device="cuda").requires_grad_()
    return (x,)


def tensors_of(moe, dtype):
    result = {}
    for name, path in moe.names.items():
        tensor = moe
        for part in path.split("."):
            tensor = getattr(tensor, part)
        result[name] = tensor.detach().to(dtype).requires_grad_(name != "expert_bias")
    return result


@cache
def direction(shape):
    """What y is multiplied by to make a number: a dy of the size of real ones, in bf16. Made before any capture."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16().to("cuda")


def total(outputs):
    y, loss = outputs if isinstance(outputs, tuple) else (outputs, None)
    result = (y.to(torch.promote_types(y.dtype, torch.float32)) * direction(y.shape)).sum()
    return result if loss is None else result + 3.0 * loss


def step(moe, given, call=None):
    """(outputs, gradients by name) of a forward and a backward pass."""
    moe.zero_grad(set_to_none=True)
    given = [item.detach().requires_grad_(item.is_floating_point()) for item in given]
    outputs = (moe if call is None else call)(*given)
    total(outputs).backward()
    grads = {f"input{number}": item.grad for number, item in enumerate(given) if item.is_floating_point()}
    grads |= {name: item.grad for name, item in moe.named_parameters()}
    return (outputs if isinstance(outputs, tuple) else (outputs,)), grads


def reference(moe, given):
    """The same in float64: plain PyTorch."""
    tensors = tensors_of(moe, torch.float64)
    given = [item.detach().double() if item.is_floating_point() else item for item in given]
    for entry in given:
        entry.requires_grad_(entry.is_floating_point())
    more = dict(zip({2: ("logits",), 3: ("indices", "weights")}.get(len(given), ()), given[1:], strict=True))
    y, loss = plain_torch.forward(moe.layer.options, tensors, given[0], coefficient=COEFFICIENT, **more)
    total(y if loss is None else (y, loss)).backward()
    grads = {f"input{number}": item.grad for number, item in enumerate(given) if item.is_floating_point()}
    grads |= {moe.names[name]: tensor.grad for name, tensor in tensors.items() if name != "expert_bias"}
    return ((y,) if loss is None else (y, loss)), grads


def error(found, want):
    """Relative Frobenius error; of what must be 0, the norm."""
    want = torch.zeros_like(found, dtype=torch.float64) if want is None else want.double()
    norm = want.norm().item()
    return ((found.double() - want).norm() / (norm or 1.0)).item()


def same(left, right):
    """Equal bits, NaN included."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("tokens", [0, 1, 127, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(layers, name, tokens):
    moe = module(layers, name)
    given = inputs(moe, tokens)
    outputs, grads = step(moe, given)
    want, want_grads = reference(moe, given)
    wrong = {"y": error(outputs[0], want[0])} if tokens else {}
    assert all(value <= VALUES for value in wrong.values()), wrong
    if len(outputs) > 1:
        assert outputs[1].item() == pytest.approx(want[1].item(), rel=1e-5, abs=1e-12)
    wrong = {path: error(grad, want_grads[path]) for path, grad in grads.items() if grad.numel()}
    # Of one token a router's gradient is one number, a sum of terms of both signs.
    limit = GRADIENTS * (4 if tokens == 1 else 1)
    assert all(value <= limit for value in wrong.values()), wrong
    with torch.no_grad():
        again = moe(*given)
    assert same(again[0] if isinstance(again, tuple) else again, outputs[0])  # the pass that keeps nothing


def test_logits_of_float32_weights_are_float32_products(layers):
    """Rounded to bf16, the weights alone would be 1.7e-3 of the spread off; a float32 GEMM is 3e-7."""
    moe, tokens = module(layers, "router-f32"), 300
    (x,), layer, t = inputs(moe, tokens), moe.layer, tensors_of(moe, torch.float64)
    parameters = {name: moe.get_parameter(path).detach() for name, path in moe.names.items()}
    sizes, new = layer.sizes(tokens), {"device": "cuda"}
    kept = torch.empty(sizes.kept, dtype=torch.uint8, **new)
    parameters |= {
        "total_tokens": torch.full((1,), tokens, dtype=torch.int32, **new),
        "aux_coefficient": torch.ones(1, **new),
    }
    outputs = {"y": torch.empty_like(x), "loss": torch.empty(1, **new), "kept": kept}
    layer.forward(x=x.detach(), **parameters, **outputs, scratch=torch.empty(sizes.forward, dtype=torch.uint8, **new))
    start = plan_of(layer).kept(layer.dims(tokens))[0]["logits"]
    actual = kept[start : start + 4 * tokens * layer.options.experts].view(torch.float32).view(tokens, -1).double()
    want = torch.nn.functional.linear(x.detach().double(), t["router"], t["router_bias"]).detach()
    assert ((actual - want).abs().max() / want.std()).item() <= 4e-6


def test_a_layer_for_inference(layers):
    """Its results are those of the layer that is trained, whose kernels it shares."""
    moe, trained = module(layers, "inference"), module(layers, "qwen3")
    (x,) = inputs(trained, 300)
    assert same(moe(x.detach()), trained(x).detach())
    with pytest.raises(ArgumentError, match="has no backward pass"):
        moe(x)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_have_the_same_bits(layers, name):
    moe = module(layers, name)
    given = inputs(moe, 1000)
    first, grads = step(moe, given)
    second, again = step(moe, given)
    assert all(map(same, first, second))
    assert all(same(grads[path], again[path]) for path in grads)


@pytest.mark.parametrize("name", NAMES)
def test_backward_passes_in_place_have_the_same_bits(layers, name):
    apart, moe = module(layers, name), module(layers, name, in_place=True)
    moe.load_state_dict(apart.state_dict())
    given = inputs(apart, 1000)
    first, grads = step(apart, given)
    second, again = step(moe, given)
    assert all(map(same, first, second))
    assert all(same(grads[path], again[path]) for path in grads)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_any_batch(layers, name):
    moe = module(layers, name)
    if moe.operator.loss:
        pytest.skip("the loss, and so its gradient, is of the whole batch")
    given = inputs(moe, 777)
    outputs, grads = step(moe, given)
    for rows in (slice(0, 1), slice(300, 433), slice(776, 777)):
        alone = [item[rows] for item in given]
        with torch.no_grad():
            assert same(moe(*alone), outputs[0][rows])
        part = [item.detach().clone().requires_grad_(item.is_floating_point()) for item in alone]
        (moe(*part).float() * direction(outputs[0].shape)[rows]).sum().backward()
        assert same(part[0].grad, grads["input0"][rows])


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_both_passes_is_replayed_with_other_tokens(layers, name):
    moe = module(layers, name)
    first, second = inputs(moe, 300, 1), inputs(moe, 300, 2)
    static = [item.detach().clone().requires_grad_(item.is_floating_point()) for item in first]

    def run():
        moe.zero_grad(set_to_none=True)
        for item in static:
            item.grad = None
        outputs = moe(*static)
        total(outputs).backward()
        return outputs if isinstance(outputs, tuple) else (outputs,)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    held = {path: item.grad for path, item in moe.named_parameters()} | {"input0": static[0].grad}
    for given in (second, first):
        with torch.no_grad():
            for entry, new in zip(static, given, strict=True):
                entry.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        want, grads = step(copy.deepcopy(moe), given)
        assert all(map(same, outputs, want))
        assert all(same(held[path], grads[path]) for path in held)


def test_a_capture_before_kernels_are_loaded_is_refused_and_pytorch_goes_on(layers):
    moe, tokens = module(Library(layers.store), "qwen3"), 33  # a library of its own has loaded nothing
    (x,) = inputs(moe, tokens)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match=r"the stream is captured, and .* is not loaded"):  # noqa: SIM117
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                moe(x)
        assert torch.randn(4, device="cuda").isfinite().all()
        moe.layer.load(tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe(x)
        graph.replay()
        torch.cuda.synchronize()
        assert same(y, moe(x))


def test_calls_on_tensors_that_come_and_go_have_the_same_bits(layers):
    """Kept passes are moved to where the tensors of a call lie."""
    moe = module(layers, "gpt-oss")
    given = inputs(moe, 200)
    want, want_grads = step(moe, given)
    held = []
    for size in (1, 1 << 12, 1 << 20, 1 << 24):
        held.append(torch.empty(size, device="cuda"))
        outputs, grads = step(moe, [item.detach().clone().requires_grad_() for item in given])
        held.append((outputs, grads))
        assert all(map(same, outputs, want)) and all(same(grads[path], want_grads[path]) for path in grads)


def test_all_tokens_to_one_expert_and_none_to_the_others(layers):
    moe = module(layers, "llama4")
    with torch.no_grad():
        moe.gate.weight[:, 0] = 0.0
        moe.gate.weight[5, 0] = 40.0
    torch.manual_seed(3)
    x = torch.randn(500, moe.layer.options.hidden, device="cuda").bfloat16()
    x[:, 0] = 1.0
    outputs, grads = step(moe, (x,))
    want, want_grads = reference(moe, (x,))
    assert error(outputs[0], want[0]) <= VALUES
    for path in ("experts.gate_up_proj", "experts.down_proj"):
        assert error(grads[path], want_grads[path]) <= GRADIENTS
        others = grads[path][torch.arange(16) != 5]
        assert not others.any()


def test_a_nan_reaches_its_token_and_its_experts(layers):
    moe = module(layers, "choices")
    given = inputs(moe, 200)
    outputs, grads = step(moe, given)
    x = given[0].detach().clone()
    x[17] = float("nan")
    result, found_grads = step(moe, (x, *given[1:]))
    others = torch.arange(200, device="cuda") != 17
    assert result[0][17].isnan().all() and same(result[0][others], outputs[0][others])
    assert same(found_grads["input0"][others], grads["input0"][others])
    hit = torch.zeros(16, dtype=torch.bool, device="cuda")
    hit[given[1][17].long()] = True
    for path in ("experts.gate_up_proj", "experts.down_proj", "experts.gate_up_proj_bias"):
        assert same(found_grads[path][~hit], grads[path][~hit]), path
        assert found_grads[path][hit].isnan().flatten(1).any(1).all(), path


def test_a_nan_in_a_gradient_reaches_its_token_and_its_experts(layers):
    moe = module(layers, "choices")
    given = inputs(moe, 200)
    dy, result = direction((200, moe.layer.options.hidden)).clone(), []
    for value in (1.0, float("nan")):
        dy[17] = value
        moe.zero_grad(set_to_none=True)
        inside = [item.detach().requires_grad_(item.is_floating_point()) for item in given]
        moe(*inside).backward(dy.to(moe.operator.dtype))
        result.append({name: item.grad for name, item in moe.named_parameters()} | {"x": inside[0].grad})
    before, after = result
    others = torch.arange(200, device="cuda") != 17
    assert after["x"][17].isnan().all() and same(after["x"][others], before["x"][others])
    hit = torch.zeros(16, dtype=torch.bool, device="cuda")
    hit[given[1][17].long()] = True
    for path in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        path = f"experts.{path}"
        assert same(after[path][~hit], before[path][~hit]), path
        assert after[path][hit].isnan().flatten(1).any(1).all(), path


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_a_nan_after_a_router_reaches_no_other_token(layers, name):
    moe = module(layers, name)
    given = inputs(moe, 200)
    outputs, grads = step(moe, given)
    x = given[0].detach().clone()
    x[17] = float("nan")
    result, found_grads = step(moe, (x,))
    others = torch.arange(200, device="cuda") != 17
    assert result[0][17].isnan().all() and same(result[0][others], outputs[0][others])
    if not moe.operator.loss:
        assert same(found_grads["input0"][others], grads["input0"][others])


def test_of_equal_logits_the_lower_experts_win(layers):
    moe = module(layers, "logits")
    torch.manual_seed(3)
    x = torch.randn(65, moe.layer.options.hidden, device="cuda").bfloat16()
    given = x, torch.zeros(65, 16, device="cuda")
    outputs, grads = step(moe, given)
    want, want_grads = reference(moe, given)
    assert error(outputs[0], want[0]) <= VALUES
    assert error(grads["experts.down_proj"], want_grads["experts.down_proj"]) <= GRADIENTS
    assert not grads["experts.down_proj"][4:].any()


def test_gradients_are_added_to_main_gradients(layers):
    moe, plain = module(layers, "accumulate"), module(layers, "accumulate")
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    total_of = {}
    for seed in (1, 2):
        given = inputs(moe, 400, seed)
        total(moe(*given)).backward()
        for path, grad in reference(plain, given)[1].items():
            total_of[path] = total_of.get(path, 0) + grad
    for name in moe.operator.summed:
        path = moe.names[name]
        assert moe.get_parameter(path).grad is None
        assert error(moe.get_parameter(path).main_grad, total_of[path]) <= GRADIENTS, path
    for path, parameter in moe.named_parameters():
        assert parameter.grad is None or error(parameter.grad, total_of[path]) <= GRADIENTS, path


def test_float32_gradients_reach_a_parameter_that_wants_them(layers):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    moe = module(layers, "gradients-f32")
    moe.experts.down_proj.grad_dtype = torch.float32
    given = inputs(moe, 400)
    _, grads = step(moe, given)
    assert grads["experts.down_proj"].dtype == torch.float32
    assert error(grads["experts.down_proj"], reference(moe, given)[1]["experts.down_proj"]) <= GRADIENTS


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek", "choices"])
def test_compiled(layers, name):
    """The default backend, as one graph; the layer is the same operator, so its results have the same bits."""
    torch._dynamo.reset()
    moe = module(layers, name)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (127, 300):
        given = inputs(moe, tokens)
        outputs, grads = step(moe, given)
        result, found_grads = step(moe, given, compiled)
        assert same(result[0], outputs[0])
        for path in grads:
            assert error(found_grads[path], grads[path].double()) <= 1e-5, path


def test_checkpointed(layers):
    moe = module(layers, "qwen3")
    given = inputs(moe, 300)
    outputs, grads = step(moe, given)
    for reentrant in (False, True):
        result, again = step(moe, given, lambda x, way=reentrant: checkpoint(moe, x, use_reentrant=way))
        assert same(result[0], outputs[0]) and all(same(grads[path], again[path]) for path in grads)


def test_autocast(layers):
    moe = module(layers, "gpt-oss").float()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(parameter.bfloat16())
    given = [item.detach().float().requires_grad_() for item in inputs(module(layers, "gpt-oss"), 300)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = moe(*given)
    assert outputs.dtype == torch.bfloat16
    total(outputs).backward()
    want, want_grads = reference(moe, given)
    assert error(outputs, want[0]) <= VALUES
    for path, parameter in moe.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert error(parameter.grad, want_grads[path]) <= GRADIENTS, path


def test_memory_that_stays_is_what_sizes_say(layers):
    moe = module(layers, "qwen3")
    tokens = 4096
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = moe(x)
    grown = torch.cuda.memory_allocated() - before
    kept = moe.layer.sizes(tokens).kept
    assert grown <= kept + y.numel() * 2 + 2 * 2**20 and kept < 1.1 * tokens * 8 * 512 * 2


def test_another_stream(layers):
    moe = module(layers, "gpt-oss")
    given = inputs(moe, 300)
    outputs, grads = step(moe, given)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    late = [torch.full_like(given[0], float("nan"))]
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late[0].copy_(given[0].detach())
        result, again = step(moe, late)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert same(result[0], outputs[0]) and all(same(grads[path], again[path]) for path in grads)

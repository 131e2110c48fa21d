"""Layers with a recipe in PyTorch and Transformers, on the CPU with stand-in layers: results and held FP8 values."""

import numpy as np
import pytest

from fusekit.errors import ArgumentError, NotBuiltError
from fusekit.plan.layer import Options
from fusekit.reference import layer as definition

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.layers.host import host  # noqa: E402
from tests.plan.test_layer_program import CASES, defined  # noqa: E402
from tests.soak import sample  # noqa: E402

TOKENS = 130
SAID = {"hidden": 144, "intermediate": 64, "grad_dtype": "f32"}


def module(name="fp8", seed=0, **more):
    torch.manual_seed(seed)
    moe = interop.MoE(host(**CASES[name] | SAID | more), aux_coefficient=0.25)
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers()):
            tensor.copy_(0.3 * torch.randn(tensor.shape))
    return moe


def x_of(moe, seed=1):
    torch.manual_seed(seed)
    return torch.randn(TOKENS, moe.layer.options.hidden, requires_grad=True)


def grads(moe, x):
    return {**{name: each.grad.clone() for name, each in moe.named_parameters()}, "x": x.grad.clone()}


def step(moe, x, call=None):
    moe.zero_grad()
    x.grad = None
    outputs = (moe if call is None else call)(x)
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    (y.sin().sum() + (outputs[1] if isinstance(outputs, tuple) else 0.0)).backward()
    return y.detach(), grads(moe, x)


NAMES = ("fp8", "fp8-gpt-oss", "fp8-interleaved", "fp8-deepseek", "fp8-llama4", "fp8-mlp", "fp8-mlp-as-stored")


@pytest.mark.parametrize("name", sample(NAMES, most=2))
def test_values_and_gradients_are_the_definitions(name):
    moe = module(name)
    x = x_of(moe)
    y, result = step(moe, x)
    tensors = {each: _path(moe, path).detach().double().numpy() for each, path in moe.names.items()}
    layer, theirs = defined(Options(**moe.layer.options.canonical()), tensors)
    want, _, kept = definition.forward(layer, x.detach().double().numpy(), theirs)
    assert np.linalg.norm(y.numpy() - want) < 1e-3 * np.linalg.norm(want)
    grad_y = y.double().cos().numpy()
    back = definition.backward(layer, theirs, kept, grad_y, 1.0 if layer.aux is not None else 0.0)
    for each, path in moe.names.items():
        if each == "expert_bias":
            continue
        got, right = result[path].double().numpy(), back[each].reshape(-1)
        if each in ("w1", "w2") and moe.layer.options.b_major == "n":
            right = back[each].swapaxes(-1, -2).reshape(-1)
        # z in float32 and y in float32 move some numbers over the edge between two values.
        assert np.linalg.norm(got.reshape(-1) - right) < 0.02 * np.linalg.norm(right), each
    assert np.linalg.norm(result["x"].double().numpy() - back["x"]) < 0.02 * np.linalg.norm(back["x"])


def test_every_call_makes_fp8_values_unless_they_are_held():
    moe = module()
    x = x_of(moe)
    y, result = step(moe, x)
    assert [which for which, *_ in moe.layer.passes] == ["quantise", "forward", "backward"]
    moe.layer.passes.clear()
    moe.quantise()
    for _ in range(2):
        again, same = step(moe, x)
        assert torch.equal(again, y)
        assert all(torch.equal(same[name], result[name]) for name in result)
    assert [which for which, *_ in moe.layer.passes] == ["quantise", *["forward", "backward"] * 2]
    with torch.no_grad():
        moe.experts.down_proj.mul_(2)
    with pytest.raises(ArgumentError, match="the weights of layers/moe have changed since quantise"):
        moe(x)
    moe.quantise()
    assert not torch.equal(moe(x), y)
    moe.experts.down_proj = torch.nn.Parameter(moe.experts.down_proj.detach())  # where the one before was
    moe._coded = [(data, 0 if data == moe.experts.down_proj.data_ptr() else version) for data, version in moe._coded]
    with pytest.raises(ArgumentError, match="the weights of layers/moe have changed since quantise"):
        moe(x)
    moe.quantise(hold=False)
    moe.layer.passes.clear()
    moe(x)
    assert [which for which, *_ in moe.layer.passes] == ["quantise", "forward"]
    assert "w1_q" not in moe.state_dict() and len(list(moe.buffers())) == 0


def test_a_module_without_a_recipe_has_nothing_to_quantise():
    with pytest.raises(ArgumentError, match="has no recipe"):
        interop.MoE(host(**CASES["plain"])).quantise()


@pytest.mark.parametrize("held", sample([False, True], True))
def test_compile_of_a_whole_graph(held):
    torch._dynamo.reset()
    moe = module("fp8-deepseek")
    x = x_of(moe)
    want = step(moe, x)
    if held:
        moe.quantise()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    result = step(moe, x, compiled)
    assert torch.equal(result[0], want[0])
    assert all(torch.equal(result[1][name], want[1][name]) for name in want[1])


def test_activation_checkpointing_and_autocast():
    moe = module("fp8")
    x = x_of(moe)
    want = step(moe, x)
    result = step(moe, x, lambda each: checkpoint(moe, each, use_reentrant=False))
    assert torch.equal(result[0], want[0]) and torch.equal(result[1]["x"], want[1]["x"])
    narrow = module("fp8", dtype="bf16", grad_dtype="bf16").float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = narrow(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert narrow.experts.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("name", sample(["fp8-deepseek", "fp8-mlp"], "fp8-mlp"))
def test_float32_parameters_have_the_results_of_their_rounding(name):
    """And float32 gradients, without a copy of the weights in bf16."""
    moe, narrow = module(name, dtype="bf16", weight_dtype="f32"), module(name, dtype="bf16")
    weights = [moe.names[each] for each in moe.operator.weights]
    types = {path: each.dtype for path, each in moe.named_parameters()}
    assert {path for path, kind in types.items() if kind == torch.float32} == set(weights)
    with torch.no_grad():
        for path, each in narrow.named_parameters():
            each.copy_(_path(moe, path))
            each.grad_dtype = types[path]  # as the kernels make it
    x = x_of(moe).detach().bfloat16().requires_grad_()
    y, result = step(moe, x)
    want_y, want = step(narrow, x)
    assert torch.equal(y, want_y)
    for path, grad in result.items():
        assert path not in weights or (grad.dtype == torch.float32 and (grad.bfloat16() != grad).any())
        assert torch.equal(grad, want[path]), path
    assert [which for which, *_ in moe.layer.passes] == ["quantise", "forward", "backward"]
    moe.quantise()
    assert torch.equal(step(moe, x)[0], y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(moe(x.detach().float())[0], y) if moe.operator.loss else torch.equal(moe(x.detach()), y)


@pytest.mark.parametrize("name", sample(["fp8", "fp8-mlp"], "fp8"))
def test_the_operators_are_as_registered(name):
    moe = module(name)
    operator, x = moe.operator, x_of(moe)
    weights = [_path(moe, moe.names[each]).detach() for each in operator.weights]
    quantise = getattr(torch.ops.fusekit, f"{operator.name}_quantise").default
    checks = ("test_faketensor",)  # the check of schemas multiplies, which PyTorch cannot with FP8 values
    torch.library.opcheck(quantise, tuple(weights), test_utils=checks)
    tensors = {each: _path(moe, path) for each, path in moe.names.items()} | {"x": x}
    tensors |= dict(zip(operator.fp8, quantise(*weights), strict=True))
    torch.library.opcheck(operator.op, (*(tensors[each] for each in operator.inputs), True), test_utils=checks)


def test_transformers_takes_layers_of_the_recipe():
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    from dataclasses import replace
    from types import SimpleNamespace

    from fusekit.interop.experts import Experts, layer_for

    table = {"router": {"input": "choices"}, "hidden": 144, "intermediate": 64, "dtype": "bf16"}
    layers = {name: host(**table, recipe=recipe).options for name, recipe in
              (("store/plain", "none"), ("store/fp8", "fp8-block"))}  # fmt: skip
    library = SimpleNamespace(layers=lambda: layers)
    wanted = {
        recipe: Experts(144, 64, 8, 3, "bf16", (("kind", "swiglu"),), "concat", False, "k", recipe)
        for recipe in ("none", "fp8-block")
    }
    assert layer_for(library, "*", wanted["none"], "Experts") == "store/plain"
    assert layer_for(library, "*", wanted["fp8-block"], "Experts") == "store/fp8"
    layers["store/masters"] = host(**table, recipe="fp8-block", weight_dtype="f32").options
    assert layer_for(library, "*", wanted["fp8-block"], "Experts") == "store/fp8"
    masters = replace(wanted["fp8-block"], weight_dtype="f32")
    assert layer_for(library, "*", masters, "Experts") == "store/masters"
    assert 'weight_dtype = "f32"' in masters.table()
    del layers["store/masters"]
    assert layer_for(library, "*", masters, "Experts") == "store/fp8"  # and casts
    del layers["store/fp8"]
    with pytest.raises(NotBuiltError, match='recipe = "fp8-block"'):
        layer_for(library, "*", wanted["fp8-block"], "Experts")


def _path(moe, path):
    for part in path.split("."):
        moe = getattr(moe, part)
    return moe

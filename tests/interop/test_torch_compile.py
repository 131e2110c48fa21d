"""The operators of modules: torch.compile, PyTorch's own checks, passes in place."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from fusekit.interop import torch_layer  # noqa: E402
from fusekit.interop.torch_layer import launch, operator_of  # noqa: E402
from tests.interop.torch_layers import GPT_OSS, gradients, inputs_of, module, total  # noqa: E402
from tests.layers.host import host  # noqa: E402
from tests.plan.test_layer_program import CASES, H  # noqa: E402
from tests.soak import sample  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sample(["gpt-oss", "deepseek", "choices", "logits", "mlp", "recompute"], "gpt-oss"))
@torch._dynamo.config.patch(recompile_limit=3)  # graphs for any count of tokens, for none, and for one
def test_compile_of_a_whole_graph_with_any_count_of_tokens(name):
    torch._dynamo.reset()
    moe = module(CASES[name])

    def step(*given):
        return total(moe(*given))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 5, 12, 0, 1):
        given = inputs_of(moe, tokens)
        moe.zero_grad()
        step(*given).backward()
        want = [*gradients(moe).values(), *(tensor.grad for tensor in given)]
        again = inputs_of(moe, tokens)
        moe.zero_grad()
        compiled(*again).backward()
        got = [*gradients(moe).values(), *(tensor.grad for tensor in again)]
        for left, right in zip(got, want, strict=True):
            assert (left is None and right is None) or torch.equal(left, right)
    with torch.no_grad():
        given = inputs_of(moe, 5)
        outputs, want = torch.compile(moe, fullgraph=True, backend="aot_eager")(*given), moe(*given)
        assert torch.equal(outputs[0], want[0])


@pytest.mark.parametrize("dynamic", sample([None, False, True], None))
def test_a_compiled_call_with_a_number_of_tokens_for_the_loss(dynamic):
    """A second number is traced as a symbol, unless every number has a graph of its own."""
    torch._dynamo.reset()
    moe = module(CASES["deepseek"])
    compiled = torch.compile(moe, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 14, 0, 1, 2**31 - 1):
        given, again = inputs_of(moe, 5), inputs_of(moe, 5)
        outputs, want = compiled(*given, total_tokens=tokens), moe(*again, total_tokens=tokens)
        assert torch.equal(outputs[1], want[1])
        total(outputs).backward()
        total(want).backward()
        assert torch.equal(given[0].grad, again[0].grad)
    assert compiled(*given, total_tokens=7)[1] != compiled(*given, total_tokens=14)[1]
    for wrong in (-1, 2**31, 7.5, True):
        with pytest.raises(ArgumentError, match=f"total_tokens is {wrong}; it must be a whole number"):
            torch.compile(moe, dynamic=dynamic, backend="aot_eager")(*given, total_tokens=wrong)


@pytest.mark.parametrize("name", sample(["gpt-oss", "deepseek", "choices", "mlp"], "deepseek"))
@pytest.mark.parametrize("keep", [False, True])
def test_the_operator_is_as_registered(name, keep, monkeypatch):
    """PyTorch's own checks: schema, fake against real results, autograd, dynamic shapes."""
    moe, seen = module(CASES[name]), []
    monkeypatch.setattr(torch_layer, "launch", lambda name, *given: seen.append(given) or launch(name, *given))
    moe(*inputs_of(moe, 6))
    ((tensors, sums),) = seen
    if not keep:
        tensors = [each.detach() for each in tensors]
    torch.library.opcheck(moe.operator.op, (*tensors, *sums, keep))


def test_one_layer_is_one_operator():
    layer = host(**GPT_OSS)
    assert operator_of(layer) is operator_of(layer)
    assert operator_of(host(**GPT_OSS)) is not operator_of(layer)  # another library, maybe with other kernels


@pytest.mark.parametrize("compiled", [False, True])
def test_every_pass_has_the_margin(compiled):
    """A module with another margin, or none, has an operator of its own over the same layer."""
    wide, without = module({}, cluster_margin=8), module({})
    given = inputs_of(wide, 5)
    total((torch.compile(wide, fullgraph=True, backend="aot_eager") if compiled else wide)(*given)).backward()
    with torch.no_grad():
        wide(*given)
    assert wide.layer.margins == [("forward", 8), ("backward", 8), ("inference", 8)]
    total(without(*given)).backward()
    assert without.layer.margins == [("forward", None), ("backward", None)]
    other = operator_of(wide.layer)
    assert other is not wide.operator and other.cluster_margin is None
    assert operator_of(wide.layer, 8) is wide.operator


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_on_the_meta_device_refuses_a_wrong_width(grad):
    moe = interop.MoE(host(**GPT_OSS), device="meta")
    with torch.set_grad_enabled(grad):
        for shape in ((6, H + 8), (6, 2 * H), (2, 3, H // 2)):
            with pytest.raises(ArgumentError, match=rf"x is torch.float32 .*; for 6 tokens it must be f32 \[6, {H}\]"):
                moe(torch.randn(shape, device="meta"))
        with pytest.raises(ArgumentError, match=r"x is torch.bfloat16 .* it must be f32"):
            moe(torch.randn(6, H, device="meta", dtype=torch.bfloat16))
        with pytest.raises(ArgumentError, match=r"w1 is torch.float32 .* it must be f32"):
            moe.experts.gate_up_proj = torch.nn.Parameter(moe.experts.gate_up_proj[:, :-8].clone())
            moe(torch.randn(6, H, device="meta"))


def test_a_call_without_the_dispatcher_is_seen_by_whoever_looks(monkeypatch):
    """A mode of PyTorch sees the operator; results and gradients are the same."""
    moe, seen = module(GPT_OSS), []

    class Looks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    (x,) = inputs_of(moe, 5)
    total(moe(x)).backward()
    want = {name: each.clone() for name, each in gradients(moe).items()}
    assert not seen
    moe.zero_grad()
    with Looks():
        total(moe(x)).backward()
    assert moe.operator.op in seen and moe.operator._backward in seen
    assert all(torch.equal(each, want[name]) for name, each in gradients(moe).items())


@pytest.mark.parametrize("looked_at", [False, True])
def test_second_derivatives_are_refused(looked_at):
    moe = module(GPT_OSS)
    (x,) = inputs_of(moe, 5)
    with torch.autograd.profiler.profile() if looked_at else contextlib.nullcontext():
        (dx,) = torch.autograd.grad(total(moe(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives of a layer are not computed"):
            dx.sum().backward()


def test_a_break_of_the_graph_beside_a_call():
    torch._dynamo.reset()
    moe = module(GPT_OSS)

    def step(x):
        x = x * 2
        torch._dynamo.graph_break()
        return moe(x)

    (x,) = inputs_of(moe, 5)
    assert torch.equal(torch.compile(step, backend="aot_eager")(x), step(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    moe = module(GPT_OSS).requires_grad_(False)
    x = inputs_of(moe, 5)[0].detach()
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(moe, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    other = inputs_of(moe, 9)[0].detach()
    assert torch.equal(program.module()(other), moe(other))


FIRST = """
import sys
import torch
from fusekit.layers import memory
from tests.interop.torch_layers import inputs_of, interop, module, total
from tests.layers.host import ALIGNMENT
memory.ALIGNMENT = ALIGNMENT
assert "torch._dynamo" not in sys.modules, "before"
moe = module({}, in_place=True)
total(moe(*inputs_of(moe, 5))).backward()
with torch.no_grad():
    moe(*inputs_of(moe, 5))
found = {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
assert not found, found
"""


def test_a_first_call_does_not_import_the_compiler():
    """torch.compile's modules take seconds."""
    ran = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("looked_at", [False, True])
def test_versions_of_what_a_backward_pass_writes_are_raised(looked_at):
    moe, saved = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"}, in_place=True), []
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each)
    with torch.autograd.profiler.profile() if looked_at else contextlib.nullcontext():
        with hooks:
            outputs = total(moe(*inputs_of(moe, 5)))
        (kept,) = (each for each in saved if each.dtype == torch.uint8)
        written = [kept, *(moe.get_parameter(moe.names[name]).main_grad for name in moe.operator.summed)]
        before = [each._version for each in written]
        outputs.backward()
    assert len(written) > 2 and all(each._version > was for each, was in zip(written, before, strict=True))


def test_a_call_on_the_meta_device_gives_shapes():
    moe = interop.MoE(host(**GPT_OSS), device="meta")
    x = torch.randn(6, H, device="meta", requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (6, H) and y.is_meta
    assert all(parameter.grad.shape == parameter.shape for parameter in moe.parameters())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", sample(["gpt-oss", "deepseek", "choices", "recompute", "mlp"], most=2))
def test_backward_passes_in_place(name, compiled):
    """The same bits. A second pass through the same call would read what the first has written, and is refused."""
    torch._dynamo.reset()
    moe, apart = module(CASES[name], in_place=True), module(CASES[name])
    call = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else moe
    for tokens in (6, 9):
        given, again = inputs_of(moe, tokens), inputs_of(moe, tokens)
        loss = total(call(*given))
        loss.backward(retain_graph=not compiled)
        total(apart(*again)).backward()
        for left, right in zip(given, again, strict=True):
            assert left.grad is None or torch.equal(left.grad, right.grad)
        if not compiled:  # a compiled graph writes to a copy
            with pytest.raises(ArgumentError, match="a second backward pass through one call; with in_place"):
                loss.backward()
    assert moe.layer.in_place == [True, True] and apart.layer.in_place == [False, False]
    wanted = gradients(apart)
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(moe).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_in_place(reentrant):
    moe, apart = module(GPT_OSS, in_place=True), module(GPT_OSS)
    given, again = inputs_of(moe, 7), inputs_of(moe, 7)
    total(checkpoint(moe, *given, use_reentrant=reentrant)).backward()
    total(apart(*again)).backward()
    assert torch.equal(given[0].grad, again[0].grad) and moe.layer.in_place == [True]


@pytest.mark.parametrize("name", sample(["gpt-oss", "mlp"], most=1))
def test_the_operator_of_passes_in_place_is_as_registered(name):
    moe = module(CASES[name], in_place=True)
    given = inputs_of(moe, 6)
    tensors = {"x": given[0], **{each: moe.get_parameter(path) for each, path in moe.names.items()}}
    arguments = (*(tensors[each] for each in moe.operator.inputs), True)
    # Not the fourth, whose graph returns what is kept: autograd then could not take it back.
    torch.library.opcheck(
        moe.operator.op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )

"""Which gradients a backward pass through a module makes, and where they are added."""

import contextlib

import pytest

from fusekit.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fusekit.interop.torch")

from tests.interop.torch_layers import DEEPSEEK, GPT_OSS, close, gradients, inputs_of, module, total  # noqa: E402


def test_only_gradients_that_are_asked_for_are_made():
    moe = module(GPT_OSS)
    moe.requires_grad_(False)
    moe.experts.down_proj.requires_grad_()
    (x,) = inputs_of(moe, 5)
    total(moe(x.detach())).backward()
    assert [(which, asked) for which, _, asked in moe.layer.passes] == [("forward", {"y"}), ("backward", {"dw2"})]
    assert [name for name, grad in gradients(moe).items() if grad is not None] == ["experts.down_proj"]


def test_gradients_of_several_steps_add_up():
    moe = module(GPT_OSS)
    for seed in (1, 3):
        total(moe(*inputs_of(moe, 6, seed))).backward()
    got = gradients(moe)
    moe.zero_grad()
    total(moe(*inputs_of(moe, 6, 1))).backward()
    first = {name: grad.clone() for name, grad in gradients(moe).items()}
    moe.zero_grad()
    total(moe(*inputs_of(moe, 6, 3))).backward()
    for name, grad in gradients(moe).items():
        close(got[name], first[name] + grad, 1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_gradients_are_added_to_main_gradients(compiled):
    torch._dynamo.reset()
    moe = module({**DEEPSEEK, "accumulate": True, "grad_dtype": "f32", "dtype": "bf16"})
    reference = module({**DEEPSEEK, "grad_dtype": "f32", "dtype": "f32"})
    with torch.no_grad():
        for weight, other in zip(moe.parameters(), reference.parameters(), strict=True):
            other.copy_(weight)
        for buffer, other in zip(moe.buffers(), reference.buffers(), strict=True):
            other.copy_(buffer)
    summed = {moe.names[name] for name in moe.operator.summed}
    assert summed == {name for name, _ in moe.named_parameters()}
    for parameter in moe.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    call = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    for seed in (1, 3):
        (x,) = inputs_of(moe, 6, seed, torch.bfloat16)
        total(call(x)).backward()
        total(reference(x.detach().float())).backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is None
        close(parameter.main_grad - 1, gradients(reference)[name], 0.05)
    assert x.grad is not None


@pytest.mark.parametrize("copied", [False, True])
def test_main_gradients_of_several_calls_that_wait_for_their_backward_passes(copied):
    """As microbatches of a pipeline do. copied: what is saved is held elsewhere meanwhile."""
    moe, reference = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"}), module(GPT_OSS)
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    given = [inputs_of(moe, 6, seed)[0] for seed in (1, 3)]
    copies = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda tensor: tensor)
    with copies if copied else contextlib.nullcontext():
        waiting = [total(moe(x)) for x in given]
    for each in waiting:
        each.backward()
    for x in given:
        total(reference(x.detach())).backward()
    for name, parameter in moe.named_parameters():
        got = parameter.grad if parameter.grad is not None else parameter.main_grad
        close(got, gradients(reference)[name])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_what_a_backward_pass_does_not_ask_for_is_not_made(how, compiled):
    """No weight's gradient is added to a main gradient where dx alone is asked for; a later pass adds it once."""
    moe = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"})
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    call = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    (x,) = inputs_of(moe, 6)
    hidden = x * 1.0
    loss = total(call(hidden))
    if how == "grad":
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert compiled or torch.equal(torch.autograd.grad(loss, hidden, retain_graph=True)[0], dx)
    else:
        loss.backward(inputs=[x], retain_graph=True)
        dx, x.grad = x.grad, None
    assert not moe.layer.passes[-1][-1] & {"dw1", "dw2"}
    assert compiled or moe.layer.passes[-1][-1] == {"dx"}
    loss = total(call(hidden)) if compiled else loss  # PyTorch runs a compiled graph that writes backward but once
    assert not any(parameter.main_grad.any() for parameter in moe.parameters())
    loss.backward()
    assert torch.equal(x.grad, dx)
    reference = module(GPT_OSS)
    total(reference(x.detach())).backward()
    for name, parameter in moe.named_parameters():
        got = parameter.grad if parameter.grad is not None else parameter.main_grad
        close(got, gradients(reference)[name])


def test_gradients_of_some_parameters_alone():
    moe = module(GPT_OSS)
    (x,) = inputs_of(moe, 6)
    loss = total(moe(x))
    wanted = [moe.experts.down_proj, moe.router.weight]
    got = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert moe.layer.passes[-1][-1] == {"dw2", "drouter"}
    loss.backward()
    for grad, parameter in zip(got, wanted, strict=True):
        assert torch.equal(grad, parameter.grad)


def test_an_answer_that_pytorch_does_not_give_is_no_yes(monkeypatch):
    """Nothing is added to a main gradient where PyTorch fails to say whether it is wanted."""

    def fails(node):
        raise RuntimeError("should only be called during the backward pass")

    moe = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"})
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    (x,) = inputs_of(moe, 6)
    loss = total(moe(x))
    monkeypatch.setattr(torch._C, "_will_engine_execute_node", fails)
    with pytest.raises(RuntimeError, match="should only be called during the backward pass"):
        loss.backward()
    assert not any(parameter.main_grad.any() for parameter in moe.parameters())


@pytest.mark.parametrize("zeros", [False, True])
def test_hooks_of_parameters_with_main_gradients_are_called_as_megatron_wants_it(zeros):
    """Its DDP with overlapped reduction refuses a parameter without a gradient, and adds one that is not in main_grad
    already, or of which it asked for zeros.
    """
    moe, reference = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"}), module(GPT_OSS)
    called, held = [], []
    for name in moe.operator.summed:
        parameter = moe.get_parameter(moe.names[name])
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = False, zeros

        def hook(*_, name=name, parameter=parameter):
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape
            if not parameter.grad_added_to_main_grad or parameter.zero_out_wgrad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            called.append(name)

        held.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        held[-1].register_hook(hook)
    (x,) = inputs_of(moe, 6)
    loss = total(moe(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    assert not called and not any(
        moe.get_parameter(moe.names[each]).grad_added_to_main_grad for each in moe.operator.summed
    )
    loss.backward()
    total(reference(x.detach())).backward()
    assert sorted(called) == sorted(moe.operator.summed)
    for name in moe.operator.summed:
        path = moe.names[name]
        assert moe.get_parameter(path).grad is None
        close(moe.get_parameter(path).main_grad, gradients(reference)[path])


def test_a_missing_main_gradient_is_named():
    moe = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"})
    with pytest.raises(ArgumentError, match=r"router\.weight has no main_grad.*zeros_like"):
        moe(*inputs_of(moe, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_without_a_gradient_need_no_main_gradient(compiled):
    torch._dynamo.reset()
    moe = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"})
    call = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    (x,) = inputs_of(moe, 6)
    with torch.no_grad():
        y = call(x)
    moe.experts.requires_grad_(False)
    weight = moe.router.weight
    weight.main_grad = torch.zeros_like(weight)
    before = [parameter.clone() for parameter in moe.parameters()]
    outputs = call(x)
    total(outputs).backward()
    assert torch.equal(outputs, y) and weight.main_grad.any() and x.grad is not None
    assert all(map(torch.equal, moe.parameters(), before))
    assert moe.layer.passes[-1][-1] == {"dx", "drouter", "drouter_bias"}


def test_an_f32_gradient_stays_one_where_the_parameter_says_so():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    moe = module({**GPT_OSS, "dtype": "bf16", "grad_dtype": "f32"})
    moe.experts.down_proj.grad_dtype = torch.float32
    total(moe(*inputs_of(moe, 5, dtype=torch.bfloat16))).backward()
    assert moe.experts.down_proj.grad.dtype == torch.float32
    assert (moe.experts.down_proj.grad != moe.experts.down_proj.grad.bfloat16()).any()
    assert moe.experts.gate_up_proj.grad.dtype == torch.bfloat16


def test_forward_mode_is_refused():
    moe = module(GPT_OSS)
    (x,) = inputs_of(moe, 6)
    with pytest.raises(ArgumentError, match=r"torch\.func\.jvp.*ask for a backward pass"):
        torch.func.jvp(moe, (x.detach(),), (torch.ones_like(x),))

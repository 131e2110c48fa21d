"""Layers as PyTorch modules, on the CPU with stand-in layers: values, gradients, and what PyTorch does with them."""

import contextlib
import copy
import itertools

import numpy as np
import pytest

from fusekit.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from fusekit.interop.torch_layer import Operator, operator_of  # noqa: E402
from tests.interop import plain_torch  # noqa: E402
from tests.layers.host import host  # noqa: E402
from tests.plan.test_layer_program import CASES, PLAIN, H, K, X  # noqa: E402

GPT_OSS, DEEPSEEK, CHOICES, LOGITS = CASES["gpt-oss"], CASES["deepseek"], CASES["choices"], CASES["logits"]
COEFFICIENT = 0.3


def module(said, seed=0, **more):
    torch.manual_seed(seed)
    moe = interop.MoE(host(**said), aux_coefficient=COEFFICIENT, **more)
    with torch.no_grad():
        for tensor in itertools.chain(moe.parameters(), moe.buffers()):
            tensor.copy_(torch.randn(tensor.shape))
    return moe


def inputs_of(moe, tokens, seed=1, dtype=torch.float32):
    """x, and what the layer is given of the choice."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, H, dtype=dtype, requires_grad=True)
    router = moe.layer.options.router.get("input") if moe.layer.options.experts else "x"
    if router == "logits":
        return x, torch.randn(tokens, X, requires_grad=True)
    if router == "choices":
        return x, torch.rand(tokens, X).argsort(1)[:, :K], torch.rand(tokens, K, requires_grad=True)
    return (x,)


def total(made):
    """A number that takes every output in."""
    y, loss = made if isinstance(made, tuple) else (made, None)
    found = (y.float() * torch.arange(H).cos()).sum()
    return found if loss is None else found + 0.7 * loss


def plain(moe, given, dtype=torch.float64):
    """Output, loss and gradients by name of the same layer in plain PyTorch."""
    o = moe.layer.options
    tensors = {name: plain_of(moe, name, dtype) for name in moe.names}
    x, *more = (tensor.detach() for tensor in given)
    x, more = x.to(dtype).requires_grad_(), [each.to(dtype) if each.is_floating_point() else each for each in more]
    for each in more:
        each.requires_grad_(each.is_floating_point())
    names = {1: ("logits",), 2: ("indices", "weights")}.get(len(more), ())
    y, loss = plain_torch.forward(
        o, tensors, x, coefficient=COEFFICIENT, **dict(zip(names, more, strict=True))
    )  # fmt: skip
    total(y if loss is None else (y, loss)).backward()
    return y, loss, [x.grad, *(each.grad for each in more)], {name: t.grad for name, t in tensors.items()}


def plain_of(moe, name, dtype):
    found = moe
    for part in moe.names[name].split("."):
        found = getattr(found, part)
    return found.detach().to(dtype).requires_grad_(name != "expert_bias")


def gradients(moe):
    return {name: parameter.grad for name, parameter in moe.named_parameters()}


def close(found, want, tolerance=2e-5):
    want = torch.zeros_like(found, dtype=torch.float64) if want is None else want.double()
    scale = want.abs().max().item() if want.numel() else 1.0
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance * max(scale, 1e-3))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", PLAIN)
def test_values_and_gradients_are_those_of_plain_pytorch(name, tokens):
    moe = module(CASES[name])
    given = inputs_of(moe, tokens)
    made = moe(*given)
    total(made).backward()
    y, loss, of_inputs, of_parameters = plain(moe, given)
    assert isinstance(made, tuple) == (loss is not None)
    close(made[0] if loss is not None else made, y)
    if loss is not None:
        close(made[1], loss)
    for tensor, want in zip(given, of_inputs, strict=True):
        if tensor.requires_grad:
            close(tensor.grad, want)
    for each, path in moe.names.items():
        if each != "expert_bias":
            close(gradients(moe)[path], of_parameters[each])


def test_leading_dims_stay():
    moe = module(CHOICES)
    x, indices, weights = inputs_of(moe, 6)
    flat = moe(x, indices, weights)
    shaped = moe(x.reshape(2, 3, H), indices.reshape(2, 3, K), weights.reshape(2, 3, K))
    assert torch.equal(shaped, flat.reshape(2, 3, H))


def test_only_gradients_that_are_asked_for_are_made():
    moe = module(GPT_OSS)
    moe.requires_grad_(False)
    moe.experts.down_proj.requires_grad_()
    (x,) = inputs_of(moe, 5)
    total(moe(x.detach())).backward()
    assert [(which, asked) for which, _, asked in moe.layer.passes] == [("forward", {"y"}), ("backward", {"dw2"})]
    assert [name for name, grad in gradients(moe).items() if grad is not None] == ["experts.down_proj"]


def test_nothing_is_kept_where_no_gradient_can_come():
    moe = module(GPT_OSS)
    (x,) = inputs_of(moe, 5)
    frozen = copy.deepcopy(moe).requires_grad_(False)
    with torch.no_grad():
        without = moe(x)
    with torch.inference_mode():
        moe(x)
    frozen(x.detach())
    assert [which for which, *_ in moe.layer.passes] == ["inference"] * 3
    assert torch.equal(without, moe(x))


@pytest.mark.parametrize(
    ("frozen", "rows"), [((), True), (("experts.gate_up_proj", "router.weight", "router.bias"), False)]
)
def test_x_and_the_kept_memory_are_all_that_stays(frozen, rows):
    moe = module(GPT_OSS)
    for name in frozen:
        moe.get_parameter(name).requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        x = inputs_of(moe, 50)[0]
        moe(x)
    parameters = {parameter.data_ptr() for parameter in moe.parameters()}
    stays = [tensor for tensor in saved if tensor.data_ptr() not in parameters]
    slope, rest = moe.layer.program.kept_line()
    wanted = {(slope * 50 + rest, torch.uint8)} | ({(50 * H, torch.float32)} if rows else set())
    assert {(tensor.numel(), tensor.dtype) for tensor in stays} == wanted
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in stays if tensor.dtype == torch.float32)


def test_the_loss_alone_has_gradients():
    moe = module(DEEPSEEK)
    (x,) = inputs_of(moe, 9)
    moe(x)[1].backward()
    _, loss, _, _ = plain(moe, (x,))
    tensors = {name: plain_of(moe, name, torch.float64) for name in moe.names}
    wide = x.detach().double().requires_grad_()
    loss = plain_torch.forward(moe.layer.options, tensors, wide, coefficient=COEFFICIENT)[1]
    loss.backward()
    close(x.grad, wide.grad)
    close(moe.gate.weight.grad, tensors["router"].grad)


def test_tokens_of_the_loss_can_be_those_of_many_ranks():
    moe = module(DEEPSEEK)
    (x,) = inputs_of(moe, 9)
    assert moe(x, total_tokens=torch.tensor([18], dtype=torch.int32))[1].item() == pytest.approx(
        moe(x)[1].item() / 4, rel=1e-5
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("said", [GPT_OSS, DEEPSEEK], ids=["gpt-oss", "deepseek"])
def test_activation_checkpointing(said, reentrant):
    moe = module(said)
    (x,) = inputs_of(moe, 7)
    total(moe(x)).backward()
    want = {**gradients(moe), "x": x.grad}
    moe.zero_grad()
    x.grad = None
    total(checkpoint(moe, x, use_reentrant=reentrant)).backward()
    for name, found in {**gradients(moe), "x": x.grad}.items():
        assert torch.equal(found, want[name]), name


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "choices", "logits", "mlp", "recompute"])
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
        found = [*gradients(moe).values(), *(tensor.grad for tensor in again)]
        for left, right in zip(found, want, strict=True):
            assert (left is None and right is None) or torch.equal(left, right)
    with torch.no_grad():
        given = inputs_of(moe, 5)
        made, want = torch.compile(moe, fullgraph=True, backend="aot_eager")(*given), moe(*given)
        assert torch.equal(made[0], want[0])


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "choices", "mlp"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_operator_is_as_registered(name, keep):
    """PyTorch's own checks: schema, fake against real results, autograd, dynamic shapes."""
    moe = module(CASES[name])
    given = inputs_of(moe, 6)
    seen = []
    operator = moe.operator
    stand_in = Operator.__new__(Operator)
    stand_in.__dict__.update(operator.__dict__)
    stand_in.op = lambda *arguments: seen.append(arguments) or operator.op(*arguments)
    moe.operator = stand_in
    moe(*given)
    arguments = (*seen[0][:-1], keep)
    if not keep:
        arguments = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in arguments)
    torch.library.opcheck(operator.op, arguments)


def test_gradients_of_several_steps_add_up():
    moe = module(GPT_OSS)
    for seed in (1, 3):
        total(moe(*inputs_of(moe, 6, seed))).backward()
    found = gradients(moe)
    moe.zero_grad()
    total(moe(*inputs_of(moe, 6, 1))).backward()
    first = {name: grad.clone() for name, grad in gradients(moe).items()}
    moe.zero_grad()
    total(moe(*inputs_of(moe, 6, 3))).backward()
    for name, grad in gradients(moe).items():
        close(found[name], first[name] + grad, 1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_gradients_are_added_to_main_gradients(compiled):
    torch._dynamo.reset()
    moe = module({**DEEPSEEK, "accumulate": True, "grad_dtype": "f32", "dtype": "bf16"})
    reference = module({**DEEPSEEK, "grad_dtype": "f32", "dtype": "f32"})
    with torch.no_grad():
        for mine, other in zip(moe.parameters(), reference.parameters(), strict=True):
            other.copy_(mine)
        for mine, other in zip(moe.buffers(), reference.buffers(), strict=True):
            other.copy_(mine)
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
        found = parameter.grad if parameter.grad is not None else parameter.main_grad
        close(found, gradients(reference)[name])


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_what_a_backward_pass_does_not_ask_for_is_not_made(how):
    """No weight's gradient is added to a main gradient where dx alone is asked for; a later pass adds it once."""
    moe = module({**GPT_OSS, "accumulate": True, "grad_dtype": "f32"})
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    (x,) = inputs_of(moe, 6)
    hidden = x * 1.0
    loss = total(moe(hidden))
    if how == "grad":
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(loss, hidden, retain_graph=True)[0], dx)
    else:
        loss.backward(inputs=[x], retain_graph=True)
        dx, x.grad = x.grad, None
    assert moe.layer.passes[-1][-1] == {"dx"}
    assert not any(parameter.main_grad.any() for parameter in moe.parameters())
    loss.backward()
    assert torch.equal(x.grad, dx)
    reference = module(GPT_OSS)
    total(reference(x.detach())).backward()
    for name, parameter in moe.named_parameters():
        found = parameter.grad if parameter.grad is not None else parameter.main_grad
        close(found, gradients(reference)[name])


def test_gradients_of_some_parameters_alone():
    moe = module(GPT_OSS)
    (x,) = inputs_of(moe, 6)
    loss = total(moe(x))
    wanted = [moe.experts.down_proj, moe.router.weight]
    found = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert moe.layer.passes[-1][-1] == {"dw2", "drouter"}
    loss.backward()
    for grad, parameter in zip(found, wanted, strict=True):
        assert torch.equal(grad, parameter.grad)


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
    made = call(x)
    total(made).backward()
    assert torch.equal(made, y) and weight.main_grad.any() and x.grad is not None
    assert all(map(torch.equal, moe.parameters(), before))
    assert moe.layer.passes[-1][-1] == {"dx", "drouter", "drouter_bias"}


@pytest.mark.parametrize("name", ["gpt-oss", "choices", "deepseek"])
def test_autocast(name):
    """float32 parameters and x, a layer in bf16: both are cast, and gradients come in float32."""
    moe = module({**CASES[name], "dtype": "bf16", "grad_dtype": "bf16"}, dtype=torch.float32)
    given = inputs_of(moe, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = moe(*given)
    assert (made[0] if isinstance(made, tuple) else made).dtype == torch.bfloat16
    total(made).backward()
    rounded = copy.deepcopy(moe)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    rounded_given = [tensor.detach().bfloat16() if number == 0 else tensor for number, tensor in enumerate(given)]
    _, _, of_inputs, of_parameters = plain(rounded, rounded_given)
    assert given[0].grad.dtype == torch.float32
    close(given[0].grad, of_inputs[0], 0.03)
    for each, path in moe.names.items():
        if each != "expert_bias":
            assert gradients(moe)[path].dtype == torch.float32
            close(gradients(moe)[path], of_parameters[each], 0.03)


def test_a_wrong_type_is_named():
    moe = module({**GPT_OSS, "dtype": "bf16"})
    with pytest.raises(ArgumentError, match=r"x is f32 \[3, 24\]; for 3 tokens it must be bf16"):
        moe(*inputs_of(moe, 3))


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "choices", "recompute", "mlp"])
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


@pytest.mark.parametrize("name", ["gpt-oss", "mlp"])
def test_the_operator_of_passes_in_place_is_as_registered(name):
    moe = module(CASES[name], in_place=True)
    given = inputs_of(moe, 6)
    tensors = {"x": given[0], **{each: moe.get_parameter(path) for each, path in moe.names.items()}}
    arguments = (*(tensors[each] for each in moe.operator.inputs), True)
    # Not the fourth, whose graph returns what is kept: autograd then could not take it back.
    torch.library.opcheck(
        moe.operator.op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("shape", [(4, 2 * H), (4, H // 2), (2, 3, 4 * H), (0,), ()])
@pytest.mark.parametrize("trained", [False, True])
def test_x_of_another_width_is_named(shape, trained):
    """Also one whose elements would make whole rows."""
    moe = module({}).requires_grad_(trained)
    with pytest.raises(ArgumentError, match=r"x is f32 \[.*; for [0-9]+ tokens? it must be f32 \[[0-9]+, 24\]"):
        moe(torch.randn(shape))
    assert moe(torch.randn(0, H)).shape == (0, H) and moe(torch.randn(H)).shape == (H,)


def test_what_a_call_is_given_fits_the_router():
    moe = module(CHOICES)
    with pytest.raises(ArgumentError, match="takes x, indices, weights; 1 were given"):
        moe(torch.randn(3, H))
    with pytest.raises(ArgumentError, match="has no parameter w3; it has w1, w2"):
        interop.MoE(moe.layer, names={"w3": "x"})


def test_an_f32_gradient_stays_one_where_the_parameter_says_so():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    moe = module({**GPT_OSS, "dtype": "bf16", "grad_dtype": "f32"})
    moe.experts.down_proj.grad_dtype = torch.float32
    total(moe(*inputs_of(moe, 5, dtype=torch.bfloat16))).backward()
    assert moe.experts.down_proj.grad.dtype == torch.float32
    assert (moe.experts.down_proj.grad != moe.experts.down_proj.grad.bfloat16()).any()
    assert moe.experts.gate_up_proj.grad.dtype == torch.bfloat16


def test_copies_and_checkpoints():
    moe = module(DEEPSEEK)
    twin = copy.deepcopy(moe)
    assert twin.operator is moe.operator
    state = moe.state_dict()
    gate, up = state.pop("shared_experts.gate_up_proj.weight").chunk(2)
    state |= {"shared_experts.gate_proj.weight": gate, "shared_experts.up_proj.weight": up}
    other = module(DEEPSEEK, seed=9)
    other.load_state_dict(state)
    for left, right in zip(other.state_dict().values(), moe.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    holder = torch.nn.Sequential(module(CASES["mlp"], seed=3))
    whole = holder.state_dict()
    split = {name: value for name, value in whole.items() if "gate_up" not in name}
    for end in ("weight", "bias"):
        parts = whole[f"0.gate_up_proj.{end}"].chunk(2)
        split |= {f"0.{side}_proj.{end}": part for side, part in zip(("gate", "up"), parts, strict=True)}
    other = torch.nn.Sequential(module(CASES["mlp"], seed=4))
    other.load_state_dict(split)
    assert torch.equal(other[0].gate_up_proj.weight, holder[0].gate_up_proj.weight)


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved-32"])
def test_gate_and_up_join_as_they_are_split(layout):
    from fusekit.interop.torch_moe import joined

    gate, up = torch.randn(64, 3), torch.randn(64, 3)
    found = plain_torch.split(joined(gate, up, layout).T, layout)
    assert torch.equal(found[0].T, gate) and torch.equal(found[1].T, up)


def test_names_can_be_others():
    layer = host(**GPT_OSS)
    moe = interop.MoE(layer, names={"w1": "mlp.up.weight", "router": "wg"})
    assert set(moe.state_dict()) == {
        "mlp.up.weight", "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias", "wg",
        "router.bias",
    }  # fmt: skip


def test_one_layer_is_one_operator():
    layer = host(**GPT_OSS)
    assert operator_of(layer) is operator_of(layer)
    assert operator_of(host(**GPT_OSS)) is not operator_of(layer)  # another library, maybe with other kernels


def test_weights_on_the_meta_device_can_be_given_memory():
    moe = interop.MoE(host(**DEEPSEEK), device="meta")
    moe = moe.to_empty(device="cpu")
    moe.reset_parameters()
    total(moe(*inputs_of(moe, 4))).backward()
    assert all(parameter.grad.isfinite().all() for parameter in moe.parameters())
    bound = max(parameter.abs().max().item() for parameter in moe.experts.parameters())
    assert 0 < bound <= 8**-0.5


def test_a_call_on_the_meta_device_gives_shapes():
    moe = interop.MoE(host(**GPT_OSS), device="meta")
    x = torch.randn(6, H, device="meta", requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (6, H) and y.is_meta
    assert all(parameter.grad.shape == parameter.shape for parameter in moe.parameters())


@pytest.fixture
def one_rank():
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_fully_sharded(one_rank, compiled):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch._dynamo.reset()
    moe = module({**GPT_OSS, "dtype": "bf16", "grad_dtype": "bf16"}, dtype=torch.float32)
    plain_one = copy.deepcopy(moe).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = fully_shard(moe, mesh=one_rank, mp_policy=policy)
    call = torch.compile(sharded, backend="aot_eager") if compiled else sharded
    (x,) = inputs_of(moe, 6)
    for _ in range(2):
        total(call(x.bfloat16())).backward()
        total(plain_one(x.bfloat16())).backward()
    for (name, mine), other in zip(sharded.named_parameters(), plain_one.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32, name
        close(mine.grad.full_tensor(), other.grad, 0.02)


def test_kept_memory_is_bounded_by_a_line():
    for said in CASES.values():
        made = host(**said).program
        slope, rest = made.kept_line()
        for tokens in [*range(40), 127, 128, 129, 1000, 24576]:
            size = made.kept(made.dims(tokens))[1]
            assert size <= slope * tokens + rest
            assert slope * tokens + rest - size <= 2 * rest
    assert np.isscalar(rest)


def test_a_layer_for_inference():
    moe, trained = module({"keep": "none"}), module({})
    assert not any(parameter.requires_grad for parameter in moe.parameters())
    moe.load_state_dict(trained.state_dict())
    (x,) = inputs_of(moe, 7)
    with torch.no_grad():
        assert torch.equal(moe(x), trained(x))
    moe(x.detach())
    with pytest.raises(ArgumentError, match=r"has no backward pass.*or call it under torch.no_grad\(\)"):
        moe(x)

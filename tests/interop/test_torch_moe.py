"""Layers as PyTorch modules, on the CPU with stand-in layers: values, gradients, and what PyTorch does with them."""

import copy

import numpy as np
import pytest

from fusekit.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.interop import plain_torch  # noqa: E402
from tests.interop.torch_layers import (  # noqa: E402
    CHOICES,
    COEFFICIENT,
    DEEPSEEK,
    GPT_OSS,
    close,
    gradients,
    inputs_of,
    module,
    plain,
    plain_of,
    residual_of,
    total,
)
from tests.layers.host import host  # noqa: E402
from tests.plan.test_layer_program import CASES, PLAIN, H, K  # noqa: E402
from tests.soak import sample  # noqa: E402


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", sample(PLAIN, PLAIN[0], "deepseek", "residual", "llama4-choices", PLAIN[-1]))
def test_values_and_gradients_are_those_of_plain_pytorch(name, tokens):
    moe = module(CASES[name])
    given = inputs_of(moe, tokens)
    added = residual_of(moe, given[0])
    outputs = moe(*given, **added)
    total(outputs).backward()
    for residual in added.values():
        close(residual.grad, torch.arange(H).cos().expand(tokens, H))
    y, loss, of_inputs, of_parameters = plain(moe, given)
    assert isinstance(outputs, tuple) == (loss is not None)
    close(outputs[0] if loss is not None else outputs, y)
    if loss is not None:
        close(outputs[1], loss)
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
    slope, rest = moe.layer.record.kept_line(moe.layer.dims(1))
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


@pytest.mark.parametrize("total", [18, np.int64(18), torch.tensor([18]), torch.tensor([18], dtype=torch.int32)])
def test_tokens_of_the_loss_may_be_a_number(total):
    moe = module(DEEPSEEK)
    (x,) = inputs_of(moe, 9)
    assert moe(x, total_tokens=total)[1].item() == pytest.approx(moe(x)[1].item() / 4, rel=1e-5)


@pytest.mark.parametrize("total", [18.0, -1, 2**31, True, "18", np.float32(18), [18]])
def test_tokens_of_the_loss_that_are_no_count(total):
    moe = module(DEEPSEEK)
    with pytest.raises(ArgumentError, match=r"total_tokens is .*; it must be a whole number from 0 to 2147483647, or"):
        moe(*inputs_of(moe, 9), total_tokens=total)


def test_what_would_be_cut_is_refused():
    moe = module(DEEPSEEK)
    with pytest.raises(ArgumentError, match=r"total_tokens is torch\.float32; it must be of integers"):
        moe(*inputs_of(moe, 9), total_tokens=torch.tensor([18.5]))
    with pytest.raises(ArgumentError, match=r"total_tokens is i32 \[\]; for 9 tokens it must be i32 \[1\]"):
        moe(*inputs_of(moe, 9), total_tokens=torch.tensor(18))
    chosen = module(CHOICES)
    x, indices, weights = inputs_of(chosen, 4)
    with pytest.raises(ArgumentError, match=r"indices is torch\.float32; it must be of integers"):
        chosen(x, weights, indices)
    with pytest.raises(
        ArgumentError, match=r"indices is \[2, 2, \d+\], x \[4, \d+\]; all extents but the last must agree"
    ):
        chosen(x, indices.reshape(2, 2, -1), weights)
    for given, name in (((None, indices, weights), "x"), ((x, indices.numpy(), weights), "indices")):
        with pytest.raises(ArgumentError, match=f"{name} is of type .*; it must be a tensor of PyTorch"):
            chosen(*given)


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
    for name, got in {**gradients(moe), "x": x.grad}.items():
        assert torch.equal(got, want[name]), name


@pytest.mark.parametrize("name", ["gpt-oss", "choices", "deepseek"])
def test_autocast(name):
    """float32 parameters and x, a layer in bf16: both are cast, and gradients come in float32."""
    moe = module({**CASES[name], "dtype": "bf16", "grad_dtype": "bf16"}, dtype=torch.float32)
    given = inputs_of(moe, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = moe(*given)
    assert (outputs[0] if isinstance(outputs, tuple) else outputs).dtype == torch.bfloat16
    total(outputs).backward()
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


@pytest.mark.parametrize("shape", [(4, 2 * H), (4, H // 2), (2, 3, 4 * H), (0,), ()])
@pytest.mark.parametrize("trained", [False, True])
def test_x_of_another_width_is_named(shape, trained):
    """Also one whose elements would make whole rows."""
    moe = module({}).requires_grad_(trained)
    with pytest.raises(ArgumentError, match=r"x is f32 \[.*; for [0-9]+ tokens? it must be f32 \[[0-9]+, 24\]"):
        moe(torch.randn(shape))
    assert moe(torch.randn(0, H)).shape == (0, H) and moe(torch.randn(H)).shape == (H,)


def test_a_residual_is_for_layers_that_add_one():
    moe = module(CASES["residual"])
    (x,) = inputs_of(moe, 4)
    with pytest.raises(ArgumentError, match="has residual = true, and was given none; call it with residual=tensor"):
        moe(x)
    for given, what in ((x[:3], rf"\[3, {H}\]"), (1.0, "of type <class 'float'>")):
        with pytest.raises(ArgumentError, match=rf"residual is {what}; it must be a tensor of x's shape, \[4, {H}\]"):
            moe(x, residual=given)
    with pytest.raises(ArgumentError, match="takes no residual; leave it out, or build the layer with residual = true"):
        module({})(x, residual=x)
    shaped = moe(x.reshape(2, 2, H), residual=x.reshape(2, 2, H))
    assert torch.equal(shaped.reshape(4, H), moe(x, residual=x))
    frozen, residual = moe.requires_grad_(False), torch.randn(2, 2, H, requires_grad=True)
    frozen.layer.passes.clear()
    total(frozen(x.detach().reshape(2, 2, H), residual=residual)).backward()
    close(residual.grad, torch.arange(H).cos().expand(2, 2, H))
    assert [which for which, *_ in frozen.layer.passes] == ["forward"]


def test_what_a_call_is_given_fits_the_router():
    moe = module(CHOICES)
    with pytest.raises(ArgumentError, match="takes x, indices, weights; 1 were given"):
        moe(torch.randn(3, H))
    with pytest.raises(ArgumentError, match="has no parameter w3; it has w1, w2"):
        interop.MoE(moe.layer, names={"w3": "x"})


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
    got = plain_torch.split(joined(gate, up, layout).T, layout)
    assert torch.equal(got[0].T, gate) and torch.equal(got[1].T, up)


def test_names_can_be_others():
    layer = host(**GPT_OSS)
    moe = interop.MoE(layer, names={"w1": "mlp.up.weight", "router": "wg"})
    assert set(moe.state_dict()) == {
        "mlp.up.weight", "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias", "wg",
        "router.bias",
    }  # fmt: skip


def test_weights_on_the_meta_device_can_be_given_memory():
    moe = interop.MoE(host(**DEEPSEEK), device="meta")
    moe = moe.to_empty(device="cpu")
    moe.reset_parameters()
    total(moe(*inputs_of(moe, 4))).backward()
    assert all(parameter.grad.isfinite().all() for parameter in moe.parameters())
    bound = max(parameter.abs().max().item() for parameter in moe.experts.parameters())
    assert 0 < bound <= 8**-0.5


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
    for (name, shard), other in zip(sharded.named_parameters(), plain_one.parameters(), strict=True):
        assert shard.grad.dtype == torch.float32, name
        close(shard.grad.full_tensor(), other.grad, 0.02)


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

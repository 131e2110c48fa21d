"""Modules over stand-in layers, what they are given, and the same in plain PyTorch."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("fusekit.interop.torch")

from tests.interop import plain_torch  # noqa: E402
from tests.layers.host import host  # noqa: E402
from tests.plan.test_layer_program import CASES, H, K, X  # noqa: E402

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


def residual_of(moe, x):
    """What a call is given to add, by name."""
    return {"residual": x.detach().cos().requires_grad_()} if moe.layer.options.residual else {}


def total(outputs):
    """A number that takes every output in."""
    y, loss = outputs if isinstance(outputs, tuple) else (outputs, None)
    got = (y.float() * torch.arange(H).cos()).sum()
    return got if loss is None else got + 0.7 * loss


def plain(moe, given, dtype=torch.float64):
    """Output, loss and gradients by name of the same layer in plain PyTorch; with a residual, that of `residual_of`."""
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
    y = y + sum(residual_of(moe, given[0].to(dtype)).values())
    total(y if loss is None else (y, loss)).backward()
    return y, loss, [x.grad, *(each.grad for each in more)], {name: t.grad for name, t in tensors.items()}


def plain_of(moe, name, dtype):
    got = moe
    for part in moe.names[name].split("."):
        got = getattr(got, part)
    return got.detach().to(dtype).requires_grad_(name != "expert_bias")


def gradients(moe):
    return {name: parameter.grad for name, parameter in moe.named_parameters()}


def close(found, want, tolerance=2e-5):
    want = torch.zeros_like(found, dtype=torch.float64) if want is None else want.double()
    scale = want.abs().max().item() if want.numel() else 1.0
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance * max(scale, 1e-3))

"""RMSNorm in PyTorch on the GPU, against the definition in float64.

fusekit --store STORE build rms-norm          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_norm.py
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from fusekit.interop.torch import rms_norm  # noqa: E402

EPS = 1e-6


@pytest.fixture(autouse=True)
def built(opened):
    if not opened.store.names("rms-norm/*"):
        pytest.skip(f"no kernels of rms-norm in {opened}; run fusekit build rms-norm there and name the store")


def given(tokens, hidden):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, hidden), (tokens, hidden), (hidden,), (tokens, hidden), (tokens, hidden)
    return [torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes]


def error(actual, want):
    return ((actual.double() - want.double()).norm() / (want.double().norm() or 1.0)).item()


def ran(tensors, residual, is_rounded, wide):
    """y, the sum, and the gradients of x, the residual and the weights."""
    x, other, weight, dy, dtotal = tensors
    x, other, weight = (each.clone().requires_grad_() for each in (x, other, weight))
    if wide:
        total = x + other if residual else x  # rounded, as the kernel rounds it
        y = weight.double() * total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + EPS)
    elif residual:
        y, total = rms_norm(x, weight, EPS, other, rounded=is_rounded)
    else:
        y, total = rms_norm(x, weight, EPS, rounded=is_rounded), x
    (y * dy).sum(dtype=torch.float64).backward(retain_graph=residual)
    if residual:
        total.backward(dtotal)
    return y, total, x.grad, weight.grad, *([other.grad] if residual else [])


@pytest.mark.parametrize("hidden", [64, 128, 2048, 2880])
@pytest.mark.parametrize("tokens", [1, 33, 5000])
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients(residual, is_rounded, tokens, hidden):
    tensors = given(tokens, hidden)
    actual, want = (ran(tensors, residual, is_rounded, wide) for wide in (False, True))
    assert torch.equal(actual[1], want[1])
    assert max(error(left, right) for left, right in zip(actual, want, strict=True)) <= 8e-3
    again = ran(tensors, residual, is_rounded, False)
    assert all(torch.equal(left, right) for left, right in zip(actual, again, strict=True))


def test_no_tokens():
    x, residual, weight, *_ = (each.requires_grad_() for each in given(0, 128))
    y, total = rms_norm(x, weight, EPS, residual)
    (y.sum() + total.sum()).backward()
    assert y.shape == total.shape == x.grad.shape == (0, 128) and not weight.grad.any()


def test_compiled_and_in_a_graph():
    torch._dynamo.reset()
    x, residual, weight, *_ = (each.requires_grad_() for each in given(300, 2048))

    def step(x, residual, weight):
        y, total = rms_norm(torch.tanh(x), weight, EPS, residual)
        return torch.autograd.grad((y.float().sin() + total.float()).sum(), (x, residual, weight))

    want = step(x, residual, weight)
    compiled = torch.compile(lambda x, residual, weight: rms_norm(torch.tanh(x), weight, EPS, residual), fullgraph=True)
    y, total = compiled(x, residual, weight)
    grads = torch.autograd.grad((y.float().sin() + total.float()).sum(), (x, residual, weight))
    assert max(error(left, right) for left, right in zip(grads, want, strict=True)) <= 8e-3
    # New leaves: `y` keeps those of before, whose gradients PyTorch accumulates in the stream of that pass.
    leaves = [each.detach().requires_grad_() for each in (x, residual, weight)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(*leaves)
    graph.replay()
    assert all(torch.equal(left, right) for left, right in zip(result, want, strict=True))

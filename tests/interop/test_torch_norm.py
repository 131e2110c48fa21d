"""RMSNorm in PyTorch and in models of Transformers, on the CPU with kernels that are their formulas."""

import copy

import numpy as np
import pytest

from fusekit.errors import ArgumentError
from fusekit.reference.permutation import rms_norm as plain_norm
from fusekit.reference.permutation import rms_norm_gradient

torch = pytest.importorskip("torch", reason="torch is not installed")

moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
if not hasattr(moe, "ExpertsInterface"):
    pytest.skip("this version of transformers has no ExpertsInterface", allow_module_level=True)

from fusekit.interop import torch_norm  # noqa: E402
from fusekit.interop import transformers_modules as modules  # noqa: E402
from fusekit.interop.torch import rms_norm  # noqa: E402
from fusekit.interop.transformers import fuse  # noqa: E402
from tests.interop import models  # noqa: E402

H, EPS = 32, 1e-3


class Kernels:
    """Stands in for a library with the kernels of `rms-norm`. launched: their names."""

    def __init__(self):
        self.launched = []

    def load(self, name):
        def launch(*, stream, **tensors):
            assert stream is None
            self.launched.append(name.removeprefix("rms-norm/"))
            rows = {key: each for key, each in tensors.items() if isinstance(each, torch.Tensor)}
            for key, each in rows.items():
                assert each.dim() == (1 if key == "rstd" else 2) and each.stride(-1) == 1 and each.data_ptr() % 16 == 0
                assert each.dtype == (torch.float32 if key in ("rstd", "partial") else torch.bfloat16)
            (backward if "dy" in tensors else forward)(name, **tensors)

        return launch


def wide(tensor):
    return tensor.double().numpy()


def forward(name, x, w, y, rstd, eps, residual=None, sum=None):
    assert ("residual" in name) == (residual is not None)
    if residual is not None:
        x = sum.copy_(x + residual)
    scale = plain_norm(wide(x), wide(w), eps)[1]
    rstd.copy_(torch.from_numpy(scale))
    normal = torch.from_numpy(wide(x) * scale[:, None])
    y.copy_(w * normal.bfloat16() if name.endswith("rounded") else w.double() * normal)


def backward(name, dy, x, w, rstd, dx, partial, addend=None):
    assert name.endswith("@w2") and ("addend" in name) == (addend is not None)
    result, each = rms_norm_gradient(wide(dy), wide(x), wide(w), wide(rstd))
    dx.copy_(torch.from_numpy(result + (0 if addend is None else wide(addend))))
    parts = np.add.reduceat(each, np.arange(0, len(each), 32))
    partial.copy_(torch.from_numpy(parts))


@pytest.fixture
def kernels(monkeypatch):
    library = Kernels()
    torch_norm._kernel.cache_clear()
    monkeypatch.setattr(torch_norm, "default_library", lambda: library)
    monkeypatch.setattr(torch_norm, "_DEVICES", ("cuda", "cpu"))
    yield library.launched
    torch_norm._kernel.cache_clear()


def given(*shape, residual=True):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(1 + residual)]
    tensors.append(torch.randn(shape[-1], generator=generator).bfloat16())
    return [tensor.requires_grad_() for tensor in tensors]


def plain(x, residual, weight):
    """In float64, of bf16 tensors."""
    total = x if residual is None else x + residual
    wide_total = total.double()
    return weight.double() * wide_total * torch.rsqrt(wide_total.square().mean(-1, keepdim=True) + EPS), total


def close(left, right):
    assert (left.double() - right.double()).norm() <= 8e-3 * right.double().norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_values_and_gradients_with_a_residual(kernels, is_rounded, compiled):
    torch._dynamo.reset()
    call = torch.compile(rms_norm, fullgraph=True, backend="aot_eager") if compiled else rms_norm
    x, residual, weight = given(3, 25, H)
    y, total = call(x, weight, EPS, residual, rounded=is_rounded)
    (y.float().sin().sum() + total.float().cos().sum()).backward()
    grads = [each.grad for each in (x, residual, weight)]
    wanted = given(3, 25, H)
    want, want_total = plain(*wanted)
    (want.sin().sum() + want_total.float().cos().sum()).backward()
    assert torch.equal(total, want_total)
    close(y, want)
    for left, right in zip(grads, wanted, strict=True):
        close(left, right.grad)
    assert kernels == [f"residual{'-rounded' * is_rounded}", "backward-addend@w2"]


def test_without_a_residual_and_of_strided_rows(kernels):
    whole, weight = given(40, 3 * H, residual=False)[0], given(1, H, residual=False)[1]
    part = whole[:, H : 2 * H]
    y = rms_norm(part, weight, EPS)
    y.float().sin().sum().backward()
    leaf, want_weight = (each.detach().clone().requires_grad_() for each in (part, weight))
    want = plain(leaf, None, want_weight)[0]
    want.sin().sum().backward()
    close(y, want)
    close(whole.grad[:, H : 2 * H], leaf.grad)
    close(weight.grad, want_weight.grad)
    assert kernels == ["norm-rounded", "backward@w2"]


def test_the_sum_alone(kernels):
    x, residual, weight = given(4, H)
    rms_norm(x, weight, EPS, residual)[1].float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(residual.grad, x.grad) and weight.grad is None
    assert kernels == ["residual-rounded"]


def test_gradients_by_torchs_own_checks(kernels):
    x, residual, weight = given(5, H)
    torch.library.opcheck(torch.ops.fusekit.rms_norm.default, (x, residual, weight, EPS, True))
    torch.library.opcheck(torch.ops.fusekit.rms_norm.default, (x, None, weight, EPS, False))
    turned = torch.randn(3, H, 5).bfloat16().transpose(1, 2)
    torch.library.opcheck(
        torch.ops.fusekit.rms_norm_backward.default, (turned, turned, weight.detach(), torch.ones(3, 5), None)
    )


def test_what_does_not_fit_is_refused(kernels):
    x, residual, weight = given(4, H)
    with pytest.raises(ArgumentError, match=r"x is torch.float32 \[4, 32\] on cpu, weight torch.bfloat16 \[32\]"):
        rms_norm(x.float(), weight, EPS)
    with pytest.raises(ArgumentError, match="residual is torch"):
        rms_norm(x, weight, EPS, residual[:2])


# -- models -----------------------------------------------------------------------------------------------------------

FAMILIES = {"gpt-oss": (5, "norm"), "qwen3-moe": (9, "norm-rounded"), "mixtral": (5, "norm-rounded"),
            "deepseek-v3": (9, "norm-rounded")}  # fmt: skip


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Transformers' classes as they were."""
    for name in FAMILIES:
        for kind in {type(each) for each in modules.norms_of(model(name))}:
            monkeypatch.setattr(kind, "forward", kind.forward)


def model(name):
    return models.model(name, "eager", H, 16, dtype=torch.bfloat16)


def trained(network):
    ids = models.tokens(11)
    loss = network(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {path: each.grad for path, each in network.named_parameters() if "norm" in path}


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_of_a_model(kernels, name):
    count, forward_kernel = FAMILIES[name]
    want, want_grads = trained(model(name))
    network = model(name)
    assert fuse(network, norms=True) == {"norms": count}
    loss, grads = trained(network)
    assert loss == pytest.approx(want, rel=2e-3)
    assert kernels == [forward_kernel] * count + ["backward@w2"] * count
    for path, grad in grads.items():
        assert (grad - want_grads[path]).norm() <= 0.1 * want_grads[path].norm() + 1e-4, path
    kernels.clear()
    trained(copy.deepcopy(network))
    assert len(kernels) == 2 * count
    network.float()(input_ids=models.tokens(3))
    assert len(kernels) == 2 * count, "float32 runs the model's own code"


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled(kernels, compiled):
    torch._dynamo.reset()
    network = model("qwen3-moe")
    fuse(network, compiled=compiled)
    norm = network.model.layers[0].input_layernorm
    run = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 7, H).bfloat16().requires_grad_()
    run(x).sum().backward()
    assert kernels == ["norm-rounded", "backward@w2"] * compiled


def test_a_norm_that_computes_something_else_is_refused(kernels, monkeypatch):
    network = model("mixtral")
    kind = type(network.model.norm)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) + x)
    modules.rounded.cache_clear()
    with pytest.raises(ArgumentError, match=r"MixtralRMSNorm: its own code gives something else .*norms=False"):
        fuse(network)
    modules.rounded.cache_clear()


def test_a_model_without_norms_is_refused():
    with pytest.raises(ArgumentError, match="Linear has no module of norms to fuse"):
        fuse(torch.nn.Linear(2, 2))

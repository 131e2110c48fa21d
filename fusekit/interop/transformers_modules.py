"""RMSNorms and dense MLPs of a Transformers model by fusekit: `fusekit.interop.transformers.fuse(model)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

import torch

from fusekit.errors import ArgumentError
from fusekit.interop.experts import Experts, given_parameters, layer_for
from fusekit.interop.torch_layer import DTYPES, casting, launch, operator_of
from fusekit.interop.torch_moe import joined
from fusekit.interop.torch_norm import fits, rms_norm
from fusekit.interop.transformers import activated, candidates
from fusekit.interop.transformers_blocks import has_hooks, is_watched
from fusekit.library import Library, open_library

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ALIKE = 0.98  # of the elements; the two roundings differ in a third of them


def fuse_norms(model: Any, compiled: bool) -> int:
    """Lets kernels compute the RMSNorms of a model. Returns how many. Raises ArgumentError."""
    count = 0
    for module in norms_of(model):
        kind: Any = type(module)
        module._fusekit_norm = rounded(kind), compiled
        _take_over(kind)
        count += 1
    return count


def norms_of(model: Any) -> Iterator[Any]:
    """The modules that are called an RMSNorm, and have its weight and epsilon."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            yield module


def _take_over(kind: type) -> None:
    """Lets modules of the class ask first whether a kernel computes them."""
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    if hasattr(original, "_fusekit_norm"):
        return

    @wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        is_rounded, compiled = getattr(self, "_fusekit_norm", (None, False))
        left_alone = torch.compiler.is_compiling() and not compiled
        if is_rounded is None or left_alone or args or kwargs or not fits(hidden_states, self.weight):
            return original(self, hidden_states, *args, **kwargs)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, rounded=is_rounded)

    forward._fusekit_norm = True  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[attr-defined]


def added_norm(module: Any, x: Any, residual: Any) -> tuple[Any, Any]:
    """The norm of x + residual by the module, and that sum; in one kernel, where one computes the module."""
    is_rounded, compiled = getattr(module, "_fusekit_norm", (None, False))
    left_alone = torch.compiler.is_compiling() and not compiled
    if is_rounded is None or left_alone or has_hooks(module) or not fits(x, module.weight) or x.dtype != residual.dtype:
        total = residual + x
        return module(total), total
    y, total = rms_norm(x, module.weight, module.variance_epsilon, residual, rounded=is_rounded)
    return y, total


@cache
def rounded(kind: Any) -> bool:
    """Whether the class rounds the normalised row before its weight multiplies it.

    Raises ArgumentError where its code gives anything else than one of the two on test numbers.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        scales = torch.logspace(-3, 1, 64)[:, None]  # the epsilon counts in some of the rows
        x = (torch.randn(64, 256, generator=generator) * scales).bfloat16()
        weight, eps = torch.randn(256, generator=generator).bfloat16(), 1e-3
        try:
            result = kind.forward(SimpleNamespace(weight=weight, variance_epsilon=eps), x)
        except Exception as error:  # of whatever the module's code needs beyond
            raise _refused(kind, f"its code cannot be looked at ({type(error).__name__}: {error})") from error
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        for is_rounded, want in ((True, weight * normal.bfloat16()), (False, (weight * normal).bfloat16())):
            if result.dtype == want.dtype and (result == want).float().mean() >= _ALIKE:
                return is_rounded
    raise _refused(kind, "its own code gives something else than an RMSNorm in float32")


# -- dense MLPs -------------------------------------------------------------------------------------------------------


def fuse_mlps(model: Any, library: Library | None, layers: str, compiled: bool) -> int:
    """Lets layers compute the dense MLPs of a model. Returns how many. Raises ArgumentError, NotBuiltError."""
    library = open_library() if library is None else library
    count = 0
    for module in mlps_of(model):
        kind: Any = type(module)
        dtype = module.down_proj.weight.dtype
        layer = library.layer(layer_for(library, layers, _dense(module), kind.__name__))
        operator = operator_of(layer)
        if operator.summed:
            raise _refused(kind, f"{layer.name} has accumulate = true, for weights that are not split in two", "mlps")
        module._fusekit_mlp = operator.name, operator.inputs, dtype, compiled
        _take_over_mlp(kind)
        count += 1
    return count


def mlps_of(model: Any) -> Iterator[Any]:
    """The modules of a gate, an up and a down projection that are plain linear layers."""
    for module in model.modules():
        if hasattr(module, "act_fn") and _is_plain(module):
            yield module


def _is_plain(module: Any) -> bool:
    """Whether the projections are PyTorch's own: no adapter, no hook."""
    parts = [module._modules.get(name) for name in _PROJECTIONS]
    return all(type(part) is torch.nn.Linear for part in parts) and not is_watched(module)


def _dense(module: Any) -> Experts:
    """The computation of a dense MLP. Raises ArgumentError for one that is no layer of fusekit."""
    kind: Any = type(module)
    intermediate, hidden = module.gate_proj.weight.shape
    biases = [getattr(module, name).bias is not None for name in _PROJECTIONS]
    if len({*biases}) > 1:
        raise _refused(kind, "some of its projections have a bias, and others none", "mlps")
    dtype = next((name for name, known in DTYPES.items() if known == module.down_proj.weight.dtype), "")
    act_fn: Any = type(module.act_fn)
    activation = given_parameters(_activation(kind, act_fn))
    return Experts(hidden, intermediate, 0, 0, dtype, activation, "concat", biases[0], "k", router=())


@cache
def _activation(kind: Any, act_fn: Any) -> dict[str, Any]:
    """The activation with which the definition gives the same as the class's own code on test numbers in float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        gate, up, down = (torch.randn(16, 16, dtype=torch.float64, generator=generator) for _ in range(3))
        x = torch.randn(64, 16, dtype=torch.float64, generator=generator)
        linear = torch.nn.functional.linear
        stand_in = SimpleNamespace(
            gate_proj=partial(linear, weight=gate), up_proj=partial(linear, weight=up),
            down_proj=partial(linear, weight=down), act_fn=act_fn(), training=False,
        )  # fmt: skip
        try:
            want = kind.forward(stand_in, x)
        except Exception as error:  # of whatever the module's code needs beyond
            raise _refused(kind, f"its code cannot be looked at ({type(error).__name__}: {error})", "mlps") from error
        z = linear(x, torch.cat([gate, up]))
        for activation, layout in candidates(True, {}):
            if layout == "concat" and torch.allclose(linear(activated(activation, layout, z), down), want, rtol=1e-9):
                return activation
    raise _refused(kind, "its own code is no gated MLP with an activation that fusekit has", "mlps")


def _take_over_mlp(kind: type) -> None:
    """Lets modules of the class ask first whether a layer computes them."""
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    if hasattr(original, "_fusekit_mlp"):
        return

    @wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        name, inputs, dtype, compiled = getattr(self, "_fusekit_mlp", ("", (), None, False))
        left_alone = torch.compiler.is_compiling() and not compiled
        if not name or left_alone or args or kwargs or x.dtype != dtype or self.down_proj.weight.dtype != dtype:
            return original(self, x, *args, **kwargs)
        if casting(x.device.type) or not _is_plain(self):
            return original(self, x)
        tensors = {
            "x": x, "w1": joined(self.gate_proj.weight, self.up_proj.weight, "concat"), "w2": self.down_proj.weight,
        }  # fmt: skip
        if "b1" in inputs:
            tensors |= {"b1": joined(self.gate_proj.bias, self.up_proj.bias, "concat"), "b2": self.down_proj.bias}
        return launch(name, [tensors[argument] for argument in inputs], [])[0]

    forward._fusekit_mlp = True  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[attr-defined]


def _refused(kind: Any, why: str, sort: str = "norms") -> ArgumentError:
    return ArgumentError(
        f"{kind.__name__}: {why}; leave the {sort} out: fusekit.interop.transformers.fuse(model, {sort}=False)",
        argument=sort,
    )

"""RMSNorms of a Transformers model by fusekit's kernels: `fusekit.interop.transformers.fuse(model)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch

from fusekit.errors import ArgumentError
from fusekit.interop.torch_norm import fits, rms_norm

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


def _refused(kind: Any, why: str) -> ArgumentError:
    return ArgumentError(
        f"{kind.__name__}: {why}; leave the norms out: fusekit.interop.transformers.fuse(model, norms=False)",
        argument="norms",
    )

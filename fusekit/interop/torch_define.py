"""Operators of PyTorch. `torch.library.custom_op` would import torch._dynamo, which takes seconds; this does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    key: str = "CompositeExplicitAutograd",
) -> Any:  # fmt: skip
    """The overload of a new operator.

    name: "namespace::name". run: the operator, for the dispatch key `key`; it raises the versions of what it mutates.
    fake: what it returns, without values. autograd: (backward, set_up), as torch.library.register_autograd takes them.
    """
    namespace, _, operator = name.partition("::")
    library = _library(namespace)
    library.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(operator, _undisturbed(run), key)
    torch.library.register_fake(name, fake, lib=library)
    if autograd is not None:
        torch.library.register_autograd(name, autograd[0], setup_context=autograd[1], lib=library)
    return getattr(getattr(torch.ops, namespace), operator).default


@cache
def _library(namespace: str) -> Any:
    """Kept for good: an operator ends with its library."""
    return torch.library.Library(namespace, "FRAGMENT")


def _undisturbed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, into which torch.compile does not look when it is there."""
    disabled: list[Callable[..., Any]] = []

    @wraps(run)
    def call(*given: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return run(*given, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(run))
        return disabled[0](*given, **named)

    return call

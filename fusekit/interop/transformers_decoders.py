"""Residuals around whole blocks of Transformers: `fusekit.interop.transformers.fuse(model, residuals=True)`.

A decoder layer is x + attention(norm(x)), and that sum + block(norm(sum)). Here the first sum is made with the norm
after it, and the second where the block's layer adds up the rows of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import torch

from fusekit.errors import ArgumentError
from fusekit.interop.torch_layer import casting
from fusekit.interop.transformers import has_scales
from fusekit.interop.transformers_blocks import has_hooks, hold_fp8, is_served, run
from fusekit.interop.transformers_modules import added_norm

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def fuse_residuals(model: Any) -> int:
    """Lets layers of blocks add the residuals around them. Returns how many. Raises ArgumentError."""
    decoders = [*decoders_of(model)]
    if not decoders:
        raise ArgumentError(
            f"{type(model).__name__} has no decoder layer around a whole block; call"
            " fusekit.interop.transformers.register(blocks=True) before the model is made, or leave residuals out",
            argument="residuals",
        )
    for module in decoders:
        kind: Any = type(module)
        module._fusekit_decoder = arguments(kind, module.mlp._fusekit_tuple)
        module.mlp._fusekit_residual = True
        _take_over(kind)
    if any(getattr(module.mlp, "_fusekit_fp8", None) is not None for module in decoders):
        hold_fp8(model, True)  # for the layers that run from now on
    return len(decoders)


def decoders_of(model: Any) -> Iterator[Any]:
    """The modules of a model that have an attention and a whole block, each after a norm."""
    for module in model.modules():
        parts = module._modules
        if all(name in parts for name in _PARTS) and "_fusekit_block" in vars(parts["mlp"]):
            yield module


def _take_over(kind: type) -> None:
    """Lets modules of the class ask first whether a layer adds their residual."""
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    if hasattr(original, "_fusekit_decoder"):
        return

    @wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        defaults = getattr(self, "_fusekit_decoder", None)
        if defaults is None or len(args) > len(defaults) or not _adds(self.mlp, hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        rows, total = added_norm(self.post_attention_layernorm, attended, hidden_states)
        return run(self.mlp, rows, total)

    forward._fusekit_decoder = True  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[attr-defined]


def _adds(block: Any, x: Any) -> bool:
    """Whether the layer of a block adds residuals such as x: nobody wants to see the block's own result, and x has the
    layer's type, to which autocast would round it.
    """
    if "forward" in vars(block) or has_hooks(block) or casting(x.device.type) or not is_served(block):
        return False
    return has_scales(block.experts) or bool(x.dtype == block.experts.down_proj.dtype)


@cache
def arguments(kind: Any, is_tuple: bool) -> dict[str, Any]:
    """The arguments after x of a decoder's forward, all of which its attention takes, with their defaults. is_tuple:
    whether its block gives a tuple.

    Raises ArgumentError where the class's code gives anything else than both sums on test numbers in float64.
    """
    generator = torch.Generator().manual_seed(0)
    seen: dict[str, Any] = {}
    with torch.device("cpu"), torch.no_grad():
        weights = torch.randn(4, 16, 16, dtype=torch.float64, generator=generator)
        x = torch.randn(2, 8, 16, dtype=torch.float64, generator=generator)
        before, mix, after, block = map(_sines, weights)

        def attention(hidden_states: Any, **given: Any) -> Any:
            seen.clear()
            seen.update(given)
            return mix(hidden_states), None

        # Transformers' wrapper of forward looks at both.
        stand_in_class = type("StandIn", (SimpleNamespace,), {"forward": kind.forward, "gradient_checkpointing": False})
        stand_in = stand_in_class(
            input_layernorm=before, self_attn=attention, post_attention_layernorm=after, training=False,
            mlp=lambda rows: (block(rows), None) if is_tuple else block(rows),
        )  # fmt: skip
        total = x + mix(before(x))
        want = total + block(after(total))
        try:
            _, _, *parameters = signature(kind.forward).parameters.values()
            named = {each.name: each.default for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD}
            others = {each.name: object() for each in parameters}  # also one of the name of **kwargs
            for given in ({}, others):
                result = kind.forward(stand_in, x, **given)
                same = torch.is_tensor(result) and torch.allclose(result, want, rtol=1e-12)
                if not same or seen != {**named, **given}:
                    raise _refused(kind, "its own code gives something else than its input plus attention plus block")
        except ArgumentError:
            raise
        except Exception as error:  # of whatever the module's code needs beyond
            raise _refused(kind, f"its code cannot be looked at ({type(error).__name__}: {error})") from error
    return named


def _sines(weight: Any) -> Callable[[Any], Any]:
    """A stand-in for a part of a decoder."""
    return lambda rows: torch.sin(rows @ weight)


def _refused(kind: Any, why: str) -> ArgumentError:
    return ArgumentError(
        f"{kind.__name__}: {why}; leave residuals out of fusekit.interop.transformers.fuse() for this model",
        argument="residuals",
    )

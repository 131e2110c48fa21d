"""RMSNorm as a PyTorch operator with gradients: `fusekit.interop.torch.rms_norm`, by the kernels of `rms-norm`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fusekit.errors import ArgumentError
from fusekit.interop.torch_define import define
from fusekit.interop.torch_layer import NAMESPACE, stream_of
from fusekit.library import default_library
from fusekit.plan.token_operation import NORM_TOKENS

FILE = "rms-norm"
_ALIGNED = 8  # elements: rows are multiples of 16 bytes
_SHORT = 512  # elements of rows for which two warps are enough
_DEVICES = ("cuda",)


def rms_norm(x: Any, weight: Any, eps: float, residual: Any = None, *, rounded: bool = True) -> Any:
    """The norm of each row by its root mean square, times the weight, in one kernel each way.

        y, residual = rms_norm(attention, norm.weight, norm.variance_epsilon, residual)

    Works under torch.compile, with gradients of all tensors. Needs the kernels of `fusekit build rms-norm`.

    Parameters
    ----------
    x : torch.Tensor
        [..., H] in bf16 on a GPU, H a multiple of 8.
    weight : torch.Tensor
        [H] in bf16.
    eps : float
        Added to the mean of the squares.
    residual : torch.Tensor, optional
        As x. The norm is then of x + residual, rounded to bf16.
    rounded : bool
        Round the normalised row before the weight multiplies it, as Llama's code does; gpt-oss's does not.

    Returns
    -------
    torch.Tensor or tuple
        y, as x; with a residual (y, x + residual).

    Raises
    ------
    ArgumentError
    NotBuiltError
    """
    if not fits(x, weight):
        raise ArgumentError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}, weight {weight.dtype} {list(weight.shape)}; they must be"
            f" bf16 [..., H] and [H] on a GPU, H a multiple of {_ALIGNED}",
            argument="x",
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ArgumentError(
            f"residual is {residual.dtype} {list(residual.shape)}; it must be as x, {x.dtype} {list(x.shape)}",
            argument="residual",
        )
    y, total, _ = torch.ops.fusekit.rms_norm.default(x, residual, weight, eps, rounded)
    return y if residual is None else (y, total)


def fits(x: Any, weight: Any) -> bool:
    """Whether the kernels take these tensors. torch.compile follows this."""
    return (
        x.device.type in _DEVICES
        and x.dtype == weight.dtype == torch.bfloat16
        and x.shape[-1:] == weight.shape
        and weight.shape[0] % _ALIGNED == 0
    )


@cache
def _kernel(name: str) -> Any:
    return default_library().load(f"{FILE}/{name}")


def _results(x: Any, residual: Any) -> tuple[Any, Any, Any]:
    """Memory for y, the sum, which is empty without a residual, and rstd."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    return y, total, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _rows(tensor: Any) -> Any:
    """[T, H], as it lies where kernels can read that."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.stride(1) != 1 or rows.stride(0) % _ALIGNED or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


def _run(x: Any, residual: Any, weight: Any, eps: float, rounded: bool) -> tuple[Any, Any, Any]:
    y, total, rstd = results = _results(x, residual)
    arguments = {"x": _rows(x), "w": _rows(weight), "y": _rows(y), "rstd": rstd.view(-1), "eps": eps}
    if residual is not None:
        arguments |= {"residual": _rows(residual), "sum": _rows(total)}
    name = ("norm" if residual is None else "residual") + ("-rounded" if rounded else "")
    _kernel(name)(**arguments, stream=stream_of(x))
    return results


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, residual, weight, *_ = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, *([total] if residual is None else []))
    ctx.save_for_backward(x if residual is None else total, weight, rstd)


def _gradients(ctx: Any, dy: Any, dtotal: Any, _: Any) -> tuple[Any, ...]:
    if dy is None:  # the sum alone was used
        return dtotal, dtotal, None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = torch.ops.fusekit.rms_norm_backward.default(dy, x, weight, rstd, dtotal)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None


def _run_backward(dy: Any, x: Any, weight: Any, rstd: Any, addend: Any) -> tuple[Any, Any]:
    rows, hidden = _rows(x), x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((-(-len(rows) // NORM_TOKENS), hidden), dtype=torch.float32, device=x.device)
    arguments = {"dy": _rows(dy), "x": rows, "w": _rows(weight), "rstd": rstd.view(-1), "dx": _rows(dx)}
    if addend is not None:
        arguments["addend"] = _rows(addend)
    name = "backward" if addend is None else "backward-addend"
    _kernel(f"{name}@w{2 if hidden <= _SHORT else 8}")(**arguments, partial=partial, stream=stream_of(x))
    return dx, partial.sum(0).to(weight.dtype)


define(
    f"{NAMESPACE}::rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? addend) -> (Tensor, Tensor)",
    _run_backward, lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)  # fmt: skip
define(
    f"{NAMESPACE}::rms_norm",
    "(Tensor x, Tensor? residual, Tensor weight, float eps, bool rounded) -> (Tensor y, Tensor sum, Tensor rstd)",
    _run, lambda x, residual, *_: _results(x, residual), (_gradients, _set_up),
)  # fmt: skip

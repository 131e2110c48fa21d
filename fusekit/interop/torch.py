"""Kernels as PyTorch operators: `operator` registers one with a fake, so that torch.compile sees through it.

    fc1 = fusekit.interop.torch.operator(library.load("quickstart/moe-fc1"), "mylib::fc1")
    y = fc1(x, w, offsets)  # allocates the outputs, launches on PyTorch's current stream

A kernel can also be called on tensors directly, without this module; it then writes into outputs that the caller gives.
`MoE` is a whole layer as a module, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fusekit.abi import TensorArgument, evaluate
from fusekit.dtypes import DTYPES as ROWS
from fusekit.dtypes import FLOAT
from fusekit.errors import ArgumentError
from fusekit.interop.shapes import dims_of
from fusekit.interop.torch_define import define
from fusekit.interop.torch_layer import DTYPES
from fusekit.interop.torch_moe import MoE, expert_parameters
from fusekit.interop.torch_norm import rms_norm
from fusekit.runtime import DeviceArray, Kernel

__all__ = ["DTYPES", "MoE", "copy_of", "expert_parameters", "operator", "rms_norm"]


@dataclass(slots=True)
class _Defined:
    """A registered operator: the kernel that it launches, and the identity that all its kernels share."""

    kernel: Kernel
    identity: tuple[Any, ...]
    op: Callable[..., Any]


@cache
def _defined() -> dict[str, _Defined]:
    """The operators of this process by name."""
    return {}


def operator(kernel: Kernel, name: str, *, cluster_margin: int | None = None) -> Callable[..., Any]:
    """Registers `kernel` as the PyTorch operator `name` ("namespace::name") and returns it.

    The operator launches on the current stream of the inputs' device. It can be captured in a CUDA graph, and works
    under torch.compile, dynamic shapes included. torch.compile's cache on disk knows a kernel by the name alone: choose
    another name when its dtypes or shapes change.

    Parameters
    ----------
    kernel : Kernel
    name : str
        "namespace::name".
    cluster_margin : int, optional
        Reserved clusters: a launch leaves their SMs to other kernels. Default: the spec's.

    Returns
    -------
    callable
        Takes the kernel's inputs in the record's order, then its scalars (those with a default are optional). Returns
        the outputs, newly allocated: one tensor, or a tuple in the record's order.

    Raises
    ------
    ArgumentError
        For a kernel with an `inout` argument, with windows of other ranks, without an input tensor, or with an output
        dtype that this PyTorch lacks; for a name that belongs to another kernel. A call raises it if the inputs do not
        determine the outputs' shapes.
    """
    record = kernel.record
    if any(tensor.role == "inout" for tensor in record.tensors):
        raise ArgumentError(f"{kernel.name} changes an argument in place; call it directly instead of as an operator")
    if record.peers:
        raise ArgumentError(
            f"{kernel.name} takes the windows of other ranks; call it directly instead of as an operator"
        )
    inputs = [tensor for tensor in record.tensors if not tensor.written]
    outputs = [tensor for tensor in record.tensors if tensor.written]
    for tensor in outputs:
        if tensor.dtype not in DTYPES:
            raise ArgumentError(f"{tensor.name} is {tensor.dtype}, which PyTorch {torch.__version__} lacks; update it")
    if not inputs:
        raise ArgumentError(f"{kernel.name} has no input tensor to take the device from; call it directly")
    identity = record, kernel.digest, dict(kernel.defaults), cluster_margin  # equal records may have other code
    known = _defined().get(name)
    if known is not None and known.identity != identity:
        raise ArgumentError(
            f"the operator {name} is another kernel, or has another cluster_margin; what was compiled with it would"
            " launch this one; choose another name",
            argument="name",
        )
    if known is not None:  # again, as in a notebook
        known.kernel = kernel
        return known.op
    required = [scalar for scalar in record.scalars if kernel.defaults.get(scalar.name, scalar.default) is None]
    optional = [scalar for scalar in record.scalars if scalar not in required]
    names = [tensor.name for tensor in inputs] + [scalar.name for scalar in (*required, *optional)]

    def allocate(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
        dims = dims_of(record, {tensor.name: tuple(arguments[tensor.name].shape) for tensor in inputs})
        like = arguments[inputs[0].name]
        return {output.name: _empty(output, dims, like) for output in outputs}

    def returned(outputs: dict[str, torch.Tensor]) -> Any:
        return tuple(outputs.values()) if len(outputs) > 1 else next(iter(outputs.values()))

    def launch(*values: Any, **named: Any) -> Any:
        arguments = {**dict(zip(names, values, strict=False)), **named}
        given = {key: value for key, value in arguments.items() if value is not None}
        outputs = allocate(given)
        stream = torch.cuda.current_stream(given[inputs[0].name].device).cuda_stream
        defined.kernel(**given, **outputs, stream=stream, cluster_margin=cluster_margin)
        return returned(outputs)

    def fake(*values: Any, **named: Any) -> Any:
        return returned(allocate({**dict(zip(names, values, strict=False)), **named}))

    parts = [f"Tensor {tensor.name}" for tensor in inputs]
    kinds = {scalar.name: "float" if ROWS[scalar.dtype].kind == FLOAT else "int" for scalar in record.scalars}
    parts += [f"{kinds[scalar.name]} {scalar.name}" for scalar in required]
    parts += [f"{kinds[scalar.name]}? {scalar.name}=None" for scalar in optional]
    results = ", ".join(["Tensor"] * len(outputs))
    schema = f"({', '.join(parts)}) -> {results if len(outputs) == 1 else f'({results})'}"
    defined = _Defined(kernel, identity, define(name, schema, launch, fake, key="CUDA"))
    _defined()[name] = defined
    return defined.op


def copy_of(array: DeviceArray) -> torch.Tensor:
    """A new tensor on the array's device, with its contents. Waits for the device."""
    data = torch.frombuffer(array.download(), dtype=torch.uint8).view(DTYPES[array.dtype]).reshape(array.shape)
    return data.to(f"cuda:{array.device}")


def _empty(output: TensorArgument, dims: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    shape = [evaluate(extent, dims) for extent in output.shape]
    return torch.empty(shape, dtype=DTYPES[output.dtype], device=like.device)

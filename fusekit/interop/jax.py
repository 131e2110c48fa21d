"""Kernels inside jax.jit: a call through the XLA FFI, without a copy and in the order of XLA's stream.

    fc1 = fusekit.interop.jax.operator(library.load("quickstart/moe-fc1"), "fc1")
    y = jax.jit(fc1)(x=x, w=w, offsets=offsets)

XLA hands the launcher the addresses of its own buffers and its stream, on one of its threads; the launch is queued and
the thread goes on. Calls may become part of XLA's command buffers (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fusekit.abi import ScalarArgument, evaluate
from fusekit.dtypes import DTYPES, by
from fusekit.errors import ArgumentError
from fusekit.interop import xla
from fusekit.interop.shapes import dims_of
from fusekit.runtime import Kernel
from fusekit.runtime.binding import check_scalar

_XLA = by("xla")


class _Tensor:
    """One of XLA's buffers, in the terms that launches read."""

    __slots__ = ("_address", "_strides", "device", "dtype", "shape")

    def __init__(self, buffer: xla.Buffer, device: int, wanted: str) -> None:
        self.dtype = _XLA.get(buffer.dtype, f"XLA type {buffer.dtype}")
        if self.dtype == "u8" and DTYPES[wanted].array == "uint8":  # JAX has no type for two codes in a byte
            self.dtype = wanted
        self.shape = tuple(buffer.dims[: buffer.rank])
        self.device = device
        self._address = buffer.data or 0
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= max(extent, 1)
        self._strides = tuple(reversed(strides))

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides


def operator(
    kernel: Kernel, name: str, *, cluster_margin: int | None = None, platform: str = "CUDA", **scalars: Any
) -> Callable[..., Any]:
    """Registers `kernel` with XLA under `name`, unique in the process, and returns a function for use inside jax.jit.

    The function takes the kernel's inputs by name, row-major as JAX has them, and returns its outputs, newly allocated:
    one array, or a tuple in the record's order. Arrays of e2m1x2 are uint8, two codes in each. A call queues every
    launch of the record. scalars: of the kernel; a call may give others, numbers that jax.jit does not trace. Raises
    ArgumentError for a kernel with an `inout` argument, or (when called) for a scalar that is no number and for inputs
    that do not determine the outputs' shapes.
    """
    record = kernel.record
    if any(tensor.role == "inout" for tensor in record.tensors):
        raise ArgumentError(f"{kernel.name} changes an argument in place, which an array of JAX's does not allow")
    inputs = [tensor for tensor in record.tensors if not tensor.written]
    outputs = [tensor for tensor in record.tensors if tensor.written]
    numbers = {scalar.name: scalar for scalar in record.scalars}

    def launch(buffers: list[xla.Buffer], given: dict[str, float | int], stream: int) -> None:
        device = kernel.current_device()
        arguments: dict[str, Any] = {**scalars, **given}
        for tensor, buffer in zip((*inputs, *outputs), buffers, strict=True):
            arguments[tensor.name] = _Tensor(buffer, device, tensor.dtype)
        kernel(**arguments, stream=stream, cluster_margin=cluster_margin)

    made = xla.handler(launch)
    jax.ffi.register_ffi_target(name, xla.capsule(made), platform=platform, api_version=1)

    def call(**given: Any) -> Any:
        attributes = {key: _attribute(numbers[key], value) for key, value in given.items() if key in numbers}
        arrays = {key: value for key, value in given.items() if key not in numbers}
        missing = [tensor.name for tensor in inputs if tensor.name not in arrays]
        unknown = sorted(set(arrays) - {tensor.name for tensor in inputs})
        if missing or unknown:
            known = ", ".join((*(tensor.name for tensor in inputs), *numbers))
            raise ArgumentError(
                f"{name} takes {known}; missing: {', '.join(missing) or 'none'};"
                f" unknown: {', '.join(unknown) or 'none'}"
            )
        dims = dims_of(record, {key: array.shape for key, array in arrays.items()})
        shapes = [
            jax.ShapeDtypeStruct([evaluate(extent, dims) for extent in output.shape], DTYPES[output.dtype].array)
            for output in outputs
        ]
        found = jax.ffi.ffi_call(name, shapes)(*(arrays[tensor.name] for tensor in inputs), **attributes)
        return found[0] if len(found) == 1 else tuple(found)

    return call


def _attribute(scalar: ScalarArgument, value: Any) -> Any:
    """A number as XLA takes one: NumPy's, of the scalar's type."""
    return jax.numpy.dtype(DTYPES[scalar.dtype].array).type(check_scalar(scalar, value))

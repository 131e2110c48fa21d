"""A kernel inside jax.jit as a call through the XLA FFI, and what such calls have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusekit.abi import ScalarArgument, evaluate
from fusekit.dtypes import DTYPES, by
from fusekit.errors import ArgumentError
from fusekit.interop import xla
from fusekit.interop.jax_ranks import devices_of
from fusekit.interop.shapes import dims_of
from fusekit.layers.memory import Slice
from fusekit.runtime import Kernel
from fusekit.runtime.binding import check_scalar

_XLA = by("xla")
Arrays = dict[str, Any]


def operator(
    kernel: Kernel, name: str, *, cluster_margin: int | None = None, platform: str = "CUDA", **scalars: Any
) -> Callable[..., Any]:
    """Registers `kernel` with XLA and returns a function for use inside jax.jit.

    Parameters
    ----------
    kernel : Kernel
    name : str
        Unique in the process.
    cluster_margin : int, optional
        Reserved clusters: a launch leaves their SMs to other kernels. Default: the spec's.
    platform : str
        XLA's name of the platform.
    **scalars : number
        Of the kernel. A call may give others: numbers that jax.jit does not trace.

    Returns
    -------
    callable
        Takes the kernel's inputs by name, row-major as JAX has them. Returns the outputs, newly allocated: one array,
        or a tuple in the record's order. Arrays of e2m1x2 are uint8, with two FP4 values in each.

    Raises
    ------
    ArgumentError
        For a kernel with an `inout` argument. A call raises it for a scalar that is not a number, and for inputs that
        do not determine the outputs' shapes.
    """
    record = kernel.record
    if any(tensor.role == "inout" for tensor in record.tensors):
        raise ArgumentError(f"{kernel.name} changes an argument in place, which an array of JAX's does not allow")
    if record.peers:
        raise ArgumentError(f"{kernel.name} takes the windows of other ranks, which are no arrays; call it directly")
    inputs = [tensor for tensor in record.tensors if not tensor.written]
    outputs = [tensor for tensor in record.tensors if tensor.written]
    types = {tensor.name: tensor.dtype for tensor in (*inputs, *outputs)}
    numbers = {scalar.name: scalar for scalar in record.scalars}

    def launch(buffers: list[xla.Buffer], given: dict[str, float | int], stream: int) -> None:
        tensors = tensors_of(buffers, types, kernel.current_device())
        kernel(**tensors, **{**scalars, **given}, stream=stream, cluster_margin=cluster_margin)

    register(name, launch, platform)

    def call(**given: Any) -> Any:
        attributes = {key: _attribute(numbers[key], value) for key, value in given.items() if key in numbers}
        arrays = {key: value for key, value in given.items() if key not in numbers}
        check_names(name, [tensor.name for tensor in inputs], arrays, numbers)
        for device in devices_of(platform, kernel.device):  # not in the handler: XLA may be capturing then
            kernel.prepare(device)
        dims = dims_of(record, {key: array.shape for key, array in arrays.items()})
        shapes = [shape_of([evaluate(extent, dims) for extent in output.shape], output.dtype) for output in outputs]
        results = jax.ffi.ffi_call(name, shapes)(*(arrays[tensor.name] for tensor in inputs), **attributes)
        results = varying(results, axes_of(arrays))
        return results[0] if len(results) == 1 else tuple(results)

    return call


def check_names(name: str, wanted: Sequence[str], given: Collection[str], more: Collection[str] = ()) -> None:
    """Raises ArgumentError unless `given` has the names `wanted`, and no other."""
    missing = [argument for argument in wanted if argument not in given]
    unknown = sorted(set(given) - set(wanted))
    if missing or unknown:
        raise ArgumentError(
            f"{name} takes {', '.join((*wanted, *more))}; missing: {', '.join(missing) or 'none'};"
            f" unknown: {', '.join(unknown) or 'none'}"
        )


def register(name: str, launch: xla.Launch, platform: str, streams: bool = True) -> None:
    handler = xla.capsule(xla.handler(launch, streams))
    jax.ffi.register_ffi_target(name, handler, platform=platform, api_version=1)


def tensors_of(buffers: list[xla.Buffer], types: Mapping[str, str], device: int) -> Arrays:
    """XLA's buffers by name, in the terms that launches read. types: of each, in order."""
    slices = {}
    for (name, wanted), buffer in zip(types.items(), buffers, strict=True):
        dtype = _XLA.get(buffer.dtype, f"XLA type {buffer.dtype}")
        if dtype == "u8" and DTYPES[wanted].array == "uint8":  # JAX has no type for two FP4 values in a byte
            dtype = wanted
        slices[name] = Slice(buffer.data or 0, tuple(buffer.dims[: buffer.rank]), dtype, device)
    return slices


def shape_of(extents: Sequence[Any], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(extents, DTYPES[dtype].array)


def axes_of(arrays: Any) -> frozenset[str]:
    """The axes of jax.shard_map along which any of them differs."""
    kinds = [getattr(jax.typeof(array), "manual_axis_type", None) for array in jax.tree.leaves(arrays)]
    return frozenset().union(*(kind.varying for kind in kinds if kind is not None))


def varying(arrays: Any, axes: frozenset[str]) -> Any:
    """The arrays, marked as varying along `axes` for jax.shard_map, which cannot see that of a call."""

    def marked(array: Any) -> Any:
        more = tuple(sorted(axes - axes_of(array)))
        return jax.lax.pcast(array, more, to="varying") if more else array

    return jax.tree.map(marked, arrays) if axes else arrays


def _attribute(scalar: ScalarArgument, value: Any) -> Any:
    """A number as XLA takes one: NumPy's, of the scalar's type; float32 for one that is rounded further."""
    dtype = "f32" if scalar.dtype in ("bf16", "fp16") else scalar.dtype
    return jnp.dtype(DTYPES[dtype].array).type(check_scalar(scalar, value))

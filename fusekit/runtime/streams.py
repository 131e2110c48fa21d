"""Streams of any framework as the driver's integer handles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from fusekit.errors import ArgumentError

# Handles that name no stream of their own: the driver takes the current context for them.
LEGACY, PER_THREAD = 1, 2


Current = Callable[[], int]  # the handle of a framework's current stream, asked at each launch


def current_stream(tensors: Iterable[Any]) -> Current:
    """A function that returns the handle of the current stream of the tensors' framework, on their device.

    PyTorch, CuPy and frameworks with DLPack's exchange API have a current stream; other memory uses the legacy default
    stream. A framework's streams do not wait for that one, so a launch there would read what is still to be written.
    Raises ArgumentError for tensors of two frameworks.
    """
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))  # not imported: then no tensor is of it
    kinds = getattr(torch, "Tensor", ()), getattr(cupy, "ndarray", ())
    current: dict[str, Current] = {}
    for tensor in tensors:
        if isinstance(tensor, kinds[0]):
            if tensor.device.type == "cuda" and "PyTorch" not in current:
                current["PyTorch"] = _of_torch(torch, tensor.device)
        elif isinstance(tensor, kinds[1]):
            if "CuPy" not in current:
                current["CuPy"] = _of_cupy(cupy, tensor.device.id)
        elif hasattr(type(tensor), "__dlpack_c_exchange_api__"):
            from fusekit.runtime.work_stream import current_of

            if (framework := current_of(tensor)) is not None:
                current.setdefault(*framework)
    if len(current) > 1:
        raise ArgumentError(
            f"the arguments are tensors of {' and of '.join(current)}, which have a current stream each; give the one"
            " to launch on, such as stream=torch.cuda.current_stream(), or stream='legacy'",
            argument="stream",
        )
    return next(iter(current.values()), _legacy)


def _legacy() -> int:
    return 0


def _of_torch(torch: Any, device: Any) -> Current:
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def _of_cupy(cupy: Any, device: int) -> Current:
    return lambda: int(cupy.cuda.get_current_stream(device).ptr)


def handle_of(stream: Any, tensors: Iterable[Any]) -> int:
    """`stream_handle`; for None the current stream of the tensors' framework."""
    return current_stream(tensors)() if stream is None else stream_handle(stream)


def stream_handle(stream: Any) -> int:
    """The CUstream handle of `stream`.

    None and "legacy" are the legacy default stream (0). An int is a handle already; otherwise ``__cuda_stream__`` (a
    method or a property giving (version, handle)), then the attributes ``cuda_stream`` (PyTorch) and ``ptr`` (CuPy),
    then ``int()`` (cuda.bindings' CUstream). Raises ArgumentError for anything else.
    """
    if stream is None or (isinstance(stream, str) and stream == "legacy"):
        return 0
    handle: Any = stream
    if type(stream) is not int:
        if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
            pair = protocol() if callable(protocol) else protocol
            handle = pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None
        else:
            handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        try:
            handle = handle.__index__() if hasattr(handle, "__index__") else _of_class(handle)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"stream is a {type(stream).__name__}; it must be None, 'legacy', an integer handle or an object with"
                " __cuda_stream__, which gives (version, handle)",
                argument="stream",
            ) from None
    check_handle(handle)
    return int(handle)


def check_handle(handle: int) -> None:
    """Raises ArgumentError for an integer that cannot be a handle."""
    if not 0 <= handle < 2**64:
        raise ArgumentError(f"stream is {handle}; a stream handle is an integer from 0 to 2**64 - 1", argument="stream")


def _of_class(handle: Any) -> int:
    """The handle in an object such as cuda.bindings' CUstream. Raises TypeError for what int() would cut or parse."""
    if isinstance(handle, str | bytes) or hasattr(handle, "__float__"):
        raise TypeError
    return int(handle)

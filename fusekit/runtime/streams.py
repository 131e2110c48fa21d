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

    PyTorch and CuPy have a current stream; other memory uses the legacy default stream. A framework's streams do not
    wait for that one, so a launch there would read what is still to be written. Raises ArgumentError for tensors of
    both.
    """
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))  # not imported: then no tensor is of it
    kinds = getattr(torch, "Tensor", ()), getattr(cupy, "ndarray", ())
    current: list[Current | None] = [None, None]
    for tensor in tensors:
        if isinstance(tensor, kinds[0]) and tensor.device.type == "cuda":
            current[0] = current[0] or _of_torch(torch, tensor.device)
        elif isinstance(tensor, kinds[1]):
            current[1] = current[1] or _of_cupy(cupy, tensor.device.id)
    if all(current):
        raise ArgumentError(
            "the arguments are tensors of PyTorch and of CuPy, which have a current stream each; give the one to launch"
            " on, such as stream=torch.cuda.current_stream(), or stream='legacy'",
            argument="stream",
        )
    return current[0] or current[1] or _legacy


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

"""Streams of any owner as the driver's integer handle."""

from __future__ import annotations

from typing import Any

from fusekit.errors import ArgumentError

# Handles that name no stream of their own: the driver takes the current context for them.
LEGACY, PER_THREAD = 1, 2


def stream_handle(stream: Any) -> int:
    """The CUstream handle of `stream`.

    None is the legacy default stream (0). An int is a handle already; otherwise ``__cuda_stream__`` (a method or a
    property giving (version, handle)), then the attributes ``cuda_stream`` (PyTorch) and ``ptr`` (CuPy), then ``int()``
    (cuda.bindings' CUstream). Raises ArgumentError for anything else.
    """
    if stream is None:
        return 0
    handle: Any = stream
    if type(stream) is not int:
        if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
            found = protocol() if callable(protocol) else protocol
            handle = found[1] if isinstance(found, tuple | list) and len(found) == 2 else None
        else:
            handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        try:
            handle = handle.__index__() if hasattr(handle, "__index__") else _of_class(handle)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"stream is a {type(stream).__name__}; it must be None, an integer handle or an object with"
                " __cuda_stream__, which gives (version, handle)",
                argument="stream",
            ) from None
    check_handle(handle)
    return int(handle)


def check_handle(handle: int) -> None:
    """Raises ArgumentError for an integer that is no handle."""
    if not 0 <= handle < 2**64:
        raise ArgumentError(f"stream is {handle}; a stream handle is an integer from 0 to 2**64 - 1", argument="stream")


def _of_class(handle: Any) -> int:
    """The handle in an object such as cuda.bindings' CUstream. Raises TypeError for what int() would cut or parse."""
    if isinstance(handle, str | bytes) or hasattr(handle, "__float__"):
        raise TypeError
    return int(handle)

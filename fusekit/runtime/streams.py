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
    if type(stream) is int:
        handle = stream
    elif (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        _, handle = protocol() if callable(protocol) else protocol
    elif isinstance(found := getattr(stream, "cuda_stream", getattr(stream, "ptr", None)), int):
        handle = found
    else:
        try:
            handle = int(stream)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"stream is a {type(stream).__name__}; it must be None, an integer handle or an object with"
                " __cuda_stream__",
                argument="stream",
            ) from None
    handle = int(handle)
    if handle < 0:
        raise ArgumentError(f"stream is {handle}; a stream handle is not negative", argument="stream")
    return handle

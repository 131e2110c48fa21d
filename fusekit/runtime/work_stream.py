"""The current stream of a framework by DLPack's exchange API, a table of C functions at the type of its tensors."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from operator import index
from typing import Any, ClassVar

from fusekit.errors import ArgumentError
from fusekit.runtime.tensors import CUDA_KINDS, capsule_pointer

ATTRIBUTE = "__dlpack_c_exchange_api__"
_MAJOR = 1
_CURRENT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Table(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h 1.2 and later minor versions."""

    _fields_: ClassVar = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("view_of_object", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    )


def current_of(tensor: Any) -> tuple[str, Any] | None:
    """The framework of a CUDA tensor, and a function that returns the handle of its current stream on the tensor's
    device; None without an exchange API, or for other memory. Raises ArgumentError.
    """
    kind: Any = type(tensor)
    if not hasattr(kind, ATTRIBUTE):
        return None
    framework = kind.__module__.partition(".")[0]
    try:
        where, ordinal = map(index, tensor.__dlpack_device__())
        if where not in CUDA_KINDS:
            return None
        function = _function(kind)
    except (TypeError, ValueError, AttributeError, BufferError, RuntimeError) as error:
        raise _refused(framework, error) from error
    return framework, partial(_ask, function, framework, where, ordinal)


def _refused(framework: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"{framework} does not give its current stream through {ATTRIBUTE}: {error}; give the stream to launch on, or"
        " stream='legacy'",
        argument="stream",
    )


@lru_cache(maxsize=64)
def _function(kind: type) -> Any:
    """The function of the tensors' type. Raises ValueError for a table of another major version."""
    pointer = capsule_pointer()(getattr(kind, ATTRIBUTE), b"dlpack_exchange_api")
    versions = []
    while pointer:
        table = _Table.from_address(pointer)
        if table.major == _MAJOR and table.current_work_stream:
            return _CURRENT(table.current_work_stream)
        versions.append(f"{table.major}.{table.minor}")
        pointer = table.previous
    raise ValueError(f"it has version {', '.join(versions)}; fusekit reads version {_MAJOR}")


def _ask(function: Any, framework: str, where: int, ordinal: int) -> int:
    stream = ctypes.c_void_p()
    try:
        failed = function(where, ordinal, ctypes.byref(stream))
    except Exception as error:
        raise _refused(framework, error) from error
    if failed:
        raise _refused(framework, RuntimeError(f"current_work_stream returned {failed}"))
    return stream.value or 0

"""The C structures of XLA's foreign function interface, as far as a launch needs them.

They are those of xla/ffi/api/c_api.h, version 0.x, in which fields are only ever added at the end; every structure
begins with its own size, by which XLA tells versions apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
    cast,
    sizeof,
)
from typing import Any

from fusekit.dtypes import ROWS

_C = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "double": c_double}
SCALARS: dict[int | None, Any] = {row.xla: _C[row.c] for row in ROWS if row.c in _C}
SCALAR = 3  # XLA_FFI_AttrType
METADATA = 1  # XLA_FFI_Extension_Metadata
COMMAND_BUFFER_COMPATIBLE = 1
INVALID_ARGUMENT, INTERNAL = 3, 13
# What a handler says that it was written for; XLA refuses a later one than its own.
VERSION = 0, 1


class Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p), ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )  # fmt: skip


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", POINTER(c_int)),
        ("items", POINTER(POINTER(Buffer))),
    )  # fmt: skip


class ByteSpan(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t))


class Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(ByteSpan))), ("items", POINTER(c_void_p)),
    )  # fmt: skip


class Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class ErrorCreate(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class StreamGet(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", Version), ("internal", c_void_p),
        ("error_create", CFUNCTYPE(c_void_p, POINTER(ErrorCreate))), ("error_get_message", c_void_p),
        ("error_destroy", c_void_p), ("handler_register", c_void_p),
        ("stream_get", CFUNCTYPE(c_void_p, POINTER(StreamGet))),
    )  # fmt: skip


class CallFrame(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("api", POINTER(Api)), ("context", c_void_p),
        ("stage", c_int), ("args", Buffers), ("rets", Buffers), ("attributes", Attributes),
    )  # fmt: skip


class Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state_type_id", c_int64))


class Extension(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata)),
    )  # fmt: skip


Handler: Any = CFUNCTYPE(c_void_p, POINTER(CallFrame))
Launch = Callable[[list[Buffer], dict[str, float | int], int], None]
"""Takes a call's buffers, arguments then results, its attributes, which are numbers, and the stream's handle."""


def handler(launch: Launch, streams: bool = True) -> Any:
    """A handler that XLA can call: it answers what XLA asks at registration and hands every execution to `launch`.

    streams: whether the platform has streams, which the CPU has not.

    What `launch` raises becomes an error of the computation. The handler is never freed: XLA has no way to give it up.
    """

    def called(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension and _answer(frame.extension):
                return None
            given = [frame.args.items[index].contents for index in range(frame.args.size)]
            given += [frame.rets.items[index].contents for index in range(frame.rets.size)]
            return _launch(frame, launch, given, _numbers(frame.attributes), streams)
        except Exception as error:
            return _error(frame, INTERNAL, f"{type(error).__name__}: {error}")

    handler = Handler(called)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    return handler


def _answer(extension: int) -> bool:
    """Whether the call only asks for version and traits, which are then filled in."""
    header = Extension.from_address(extension)
    if header.type != METADATA:
        return False
    metadata = header.metadata.contents
    metadata.version.major, metadata.version.minor = VERSION
    metadata.traits = COMMAND_BUFFER_COMPATIBLE
    return True


def _numbers(attributes: Attributes) -> dict[str, float | int]:
    """The call's attributes that are numbers of a scalar argument's type, by name."""
    numbers: dict[str, float | int] = {}
    for index in range(attributes.size):
        if attributes.types[index] != SCALAR:
            continue
        name, scalar = attributes.names[index].contents, Scalar.from_address(attributes.items[index])
        if scalar.dtype in SCALARS:
            value = SCALARS[scalar.dtype].from_address(scalar.value).value
            numbers[ctypes.string_at(name.data, name.size).decode()] = value
    return numbers


def _launch(
    frame: CallFrame, launch: Launch, given: list[Buffer], scalars: dict[str, float | int], streams: bool
) -> int | None:
    from fusekit.errors import FusekitError

    failed, stream = stream_of(frame) if streams else (None, 0)
    if failed:
        return failed
    try:
        launch(given, scalars, stream)
    except FusekitError as error:
        return _error(frame, INVALID_ARGUMENT, str(error))
    return None


def stream_of(frame: CallFrame) -> tuple[int | None, int]:
    """An error of XLA's, or None, and the handle of the call's stream."""
    wanted = StreamGet(sizeof(StreamGet), None, frame.context, None)
    failed: int | None = frame.api.contents.stream_get(ctypes.byref(wanted))
    return failed, wanted.stream or 0


def _error(frame: CallFrame, code: int, message: str) -> int | None:
    details = ErrorCreate(sizeof(ErrorCreate), None, message.encode(), code)
    error_handle: int | None = frame.api.contents.error_create(ctypes.byref(details))
    return error_handle


def capsule(handler: Any) -> Any:
    """The handler's address in a PyCapsule, as registration wants it."""
    new = ctypes.pythonapi.PyCapsule_New
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)
    return cast(new, prototype)(cast(handler, c_void_p), None, None)

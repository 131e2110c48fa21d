"""Tensors of any framework as (address, meta): torch-like duck typing, then DLPack, then __cuda_array_interface__.

`read` is on the launch path, so it only picks values up; what they mean is worked out by `describe`, once for each new
combination of shapes, strides, dtypes and devices. No framework is imported. A view is taken without any stream
synchronisation: that the data are ready in the stream of the launch is the caller's business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

from fusekit.dtypes import ARGUMENTS, DTYPES, ROWS, UNSIGNED, by
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver

# Types that no record has (int8, int16, bool) are its unsigned integers of as many bits.
_AS_BITS = {
    row.name: next(name for name in ARGUMENTS if (DTYPES[name].kind, DTYPES[name].bits) == (UNSIGNED, row.bits))
    for row in ROWS if row.framework and not row.argument
}  # fmt: skip


def _known(column: str) -> dict[Any, str]:
    return by(column) | {value: _AS_BITS[name] for value, name in by(column, tuple(_AS_BITS)).items()}


_NAMES = _known("framework") | {alias: name for name in ARGUMENTS for alias in DTYPES[name].aliases}
# NumPy has no bfloat16: extension types show up as 2 opaque bytes.
_TYPESTRS = _known("typestr")
_DLPACK_DTYPES = _known("dlpack")
_DLPACK_DEVICES = {1: "the CPU", 3: "pinned host memory", 10: "ROCm"}
CUDA_KINDS = 2, 13  # of DLPack: device memory, managed memory

Meta = tuple[Any, tuple[int, ...], tuple[int, ...], Any]
"""(dtype, shape, strides in elements, device), hashable; dtype and device are the framework's own objects or ours."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor without its address. `strides` are in elements, `device` is an ordinal."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int

    @property
    def span(self) -> int:
        """Bytes from the begin of the first element to the end of the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * abs(stride) for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype].bytes

    @property
    def contiguous(self) -> bool:
        """Whether the strides are the row-major ones, as far as they mean something: of extents above 1."""
        if self.strides == strides_of(self.shape) or 0 in self.shape:
            return True
        each = zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        return all(extent == 1 or stride == row for extent, stride, row in each)


class Slice:
    """A tensor in memory that another object owns; row-major, or with `strides`."""

    __slots__ = ("_address", "_strides", "device", "dtype", "shape")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: Any, device: Any, strides: tuple[int, ...] | None = None
    ) -> None:
        self._address, self.dtype, self.device = address, dtype, device
        self.shape = shape = tuple(map(index, shape))  # those of NumPy overflow
        self._strides = strides_of(shape) if strides is None else strides

    def data_ptr(self) -> int:
        """The device address of the first element."""
        return self._address

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._strides


def read(tensor: Any, name: str, driver: Driver, written: bool = False) -> tuple[int, Meta]:
    """The address and meta of `tensor`, passed as argument `name`. Raises ArgumentError when it is no device tensor, or
    one that is `written` says that it is read-only.
    """
    try:
        return tensor.data_ptr(), (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
    except AttributeError:
        pass
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _read_dlpack(tensor, name)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is not None:
        return _read_interface(interface, name, driver, written)
    raise ArgumentError(
        f"{name} is a {type(tensor).__name__}; it must be a CUDA tensor with data_ptr()/stride(), __dlpack__ or"
        " __cuda_array_interface__",
        argument=name,
    )


def describe(meta: Meta, name: str) -> View:
    """`meta` as a View. Raises ArgumentError for an unknown dtype or a tensor not on a GPU."""
    dtype, shape, strides, device = meta
    text = str(dtype).rpartition(".")[2]
    known = text if text in ARGUMENTS else _NAMES.get(text)
    if known is None:
        raise ArgumentError(f"{name} has dtype {dtype}; known are {', '.join(sorted(ARGUMENTS))}", argument=name)
    extents, steps = _integers(shape), _integers(strides)
    if extents is None or steps is None or len(extents) != len(steps):
        raise ArgumentError(
            f"{name} has shape {shape!r} and strides {strides!r}; both must be integers, as many of the one as of the"
            " other",
            argument=name,
        )
    return View(known, extents, steps, _ordinal(device, name))


def _integers(values: Any) -> tuple[int, ...] | None:
    """The values as integers; None if one is not an integer."""
    try:
        return tuple(map(index, values))
    except TypeError:
        return None


def unhashable(metas: Sequence[Any], names: Sequence[str]) -> ArgumentError:
    """The error for a tensor whose shape, strides, dtype or device no launch can be looked up by."""
    for name, meta in zip(names, metas, strict=False):
        for value, what in zip(meta, ("dtype", "shape", "strides", "device"), strict=True):
            try:
                hash(value)
            except TypeError:
                text = f"{name} has {what} {value!r}, a {type(value).__name__}; it must be hashable, such as a tuple"
                return ArgumentError(text, argument=name)
    return ArgumentError(f"the arguments are not hashable: {metas!r}; give tensors of a framework")


def _ordinal(device: Any, name: str) -> int:
    if isinstance(device, int) and not isinstance(device, bool) and device >= -1:  # -1: any device, fusekit's own value
        return device
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind == "cuda" and isinstance(index, int):
        return index
    raise ArgumentError(f"{name} is on {device}; it must be in the memory of a CUDA device", argument=name)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _read_dlpack(tensor: Any, name: str) -> tuple[int, Meta]:
    try:
        kind, ordinal = map(index, tensor.__dlpack_device__())
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{name} does not say its device through DLPack: {error}", argument=name) from error
    if kind not in CUDA_KINDS:
        where = _DLPACK_DEVICES.get(kind, f"DLPack device type {kind}")
        raise ArgumentError(f"{name} is on {where}; it must be in the memory of a CUDA device", argument=name)
    try:
        try:
            capsule = tensor.__dlpack__(stream=-1)  # -1: do not synchronise
        except RuntimeError:  # JAX takes it for a stream
            capsule = tensor.__dlpack__()
        pointer = capsule_pointer()(capsule, b"dltensor")
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{name} refuses to be viewed through DLPack: {error}", argument=name) from error
    dl = _DLTensor.from_address(pointer)
    dtype = _DLPACK_DTYPES.get((dl.code, dl.bits, dl.lanes))
    if dtype is None:
        raise ArgumentError(
            f"{name} has DLPack dtype code {dl.code}, {dl.bits} bits, {dl.lanes} lanes; known are"
            f" {', '.join(by('dlpack').values())}",
            argument=name,
        )
    shape = tuple(dl.shape[: dl.ndim]) if dl.ndim else ()
    strides = tuple(dl.strides[: dl.ndim]) if dl.ndim and dl.strides else compact_strides(shape)
    address = (dl.data or 0) + dl.byte_offset
    # The capsule was not consumed: dropping it calls the producer's deleter. The caller's tensor keeps the memory.
    return address, (dtype, shape, strides, ordinal)


def capsule_pointer() -> Any:
    """PyCapsule_GetPointer(capsule, name)."""
    # A prototype of its own: setting argtypes on the shared pythonapi object would be felt by everyone else.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return prototype(("PyCapsule_GetPointer", ctypes.pythonapi))


def _read_interface(interface: Any, name: str, driver: Driver, written: bool) -> tuple[int, Meta]:
    try:
        typestr, shape = str(interface["typestr"]), tuple(map(index, interface["shape"]))
        address, read_only = index(interface["data"][0] or 0), interface["data"][1]
        strides = interface.get("strides")
        strides = None if strides is None else tuple(map(index, strides))
        masked = interface.get("mask") is not None
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ArgumentError(
            f"{name} has the __cuda_array_interface__ {interface!r}; it must be a dict with typestr, shape and data, as"
            f" Numba describes it ({type(error).__name__}: {error})",
            argument=name,
        ) from error
    if masked:
        raise ArgumentError(f"{name} has a mask, which kernels do not read; give an array without", argument=name)
    if written and read_only:
        raise ArgumentError(f"{name} is read-only, and the kernel writes to it; give a writable array", argument=name)
    dtype = _TYPESTRS.get(typestr[1:]) if typestr[:1] in "<|=" else None
    if dtype is None:
        known = ", ".join(f"<{key}" for key in _TYPESTRS)
        raise ArgumentError(f"{name} has typestr {typestr}; known are {known} (V2 is bf16)", argument=name)
    size = DTYPES[dtype].bytes
    if strides is None:
        elements = compact_strides(shape)
    elif any(stride % size for stride in strides):
        raise ArgumentError(f"{name} has strides {strides} bytes; they must be multiples of {size}", argument=name)
    else:
        elements = tuple(stride // size for stride in strides)
    return address, (dtype, shape, elements, _ordinal_of_address(address, name, driver))


def _ordinal_of_address(address: int, name: str, driver: Driver) -> int:
    """The device of the memory at `address`: that of its context, since some drivers report device 0 for any memory.

    Memory that was mapped by hand has no context; there the driver is asked for the device.
    """
    api, check = driver.api, driver.check
    if address == 0:  # an empty array: it is wherever the others are
        return -1
    kinds = api.CUpointer_attribute
    status, context = api.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_CONTEXT, address)
    if status:
        raise ArgumentError(f"{name} points at {address:#x}, which is no device memory the driver knows", argument=name)
    if int(context) == 0:
        ordinal = api.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        return int(check(ordinal, "cuPointerGetAttribute"))
    with driver.inside(context):
        return int(check(api.cuCtxGetDevice(), "cuCtxGetDevice"))


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of `shape` in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


strides_of = lru_cache(maxsize=4096)(compact_strides)  # for shapes of integers, which come again and again

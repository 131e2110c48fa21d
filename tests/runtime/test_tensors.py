"""Tensors of other owners: DLPack capsules made by ctypes, the CUDA array interface, device memory of our own."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.errors import ArgumentError
from fusekit.runtime import DeviceArray, Devices, Driver
from fusekit.runtime.tensors import View, _DLTensor, compact_strides, describe, read
from tests.runtime.fake import FakeDriver

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Producer:
    """An array that speaks DLPack only; `deleted` counts how often its deleter ran."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, code: int, bits: int, *, lanes: int = 1,
        device: tuple[int, int] = (2, 0), data: int = 0x7000, offset: int = 0,
    ) -> None:  # fmt: skip
        self.deleted = 0
        self.device = device
        self.streams: list[Any] = []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = _DLTensor(data, *device, len(shape), code, bits, lanes, self._shape, self._strides, offset)
        self._deleter = DELETER(self._delete)
        self._managed = Managed(tensor, None, self._deleter)
        self._destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._destroy)

    def _delete(self, pointer: int) -> None:
        self.deleted += 1

    def _destroy(self, capsule: int) -> None:
        self._delete(0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: Any = None) -> Any:
        self.streams.append(stream)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        make = new(("PyCapsule_New", ctypes.pythonapi))
        return make(ctypes.addressof(self._managed), b"dltensor", ctypes.cast(self._destructor, ctypes.c_void_p))


@pytest.fixture
def driver() -> Driver:
    return Driver(FakeDriver())


def view(tensor: Any, driver: Driver) -> tuple[int, View]:
    address, meta = read(tensor, "x", driver)
    hash(meta)
    return address, describe(meta, "x")


@pytest.mark.parametrize(("code", "bits", "dtype"), [(4, 16, "bf16"), (2, 16, "fp16"), (2, 32, "f32"), (0, 32, "i32")])
def test_dlpack(driver: Driver, code: int, bits: int, dtype: str) -> None:
    producer = Producer((3, 8), (16, 1), code, bits, device=(2, 1), offset=32)
    assert view(producer, driver) == (0x7020, View(dtype, (3, 8), (16, 1), 1))
    assert producer.streams == [-1]
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("code", "bits", "name", "dtype"), [(0, 8, "int8", "u8"), (0, 16, "int16", "u16"), (6, 8, "bool", "u8")]
)
def test_types_that_no_record_has_are_unsigned_bits(
    driver: Driver, code: int, bits: int, name: str, dtype: str
) -> None:
    assert view(Producer((8,), None, code, bits), driver)[1].dtype == dtype
    assert describe((f"torch.{name}", (8,), (1,), 0), "x").dtype == dtype


def test_a_producer_that_takes_minus_one_for_a_stream(driver: Driver) -> None:
    """As JAX does."""
    producer = Producer((8,), None, 2, 32)
    given = producer.__dlpack__

    def refuses(**stream: Any) -> Any:
        if stream:
            raise RuntimeError("CUDA_ERROR_INVALID_HANDLE")
        return given()

    producer.__dlpack__ = refuses  # type: ignore[method-assign]
    assert view(producer, driver)[1].shape == (8,)


def test_dlpack_without_strides_is_compact(driver: Driver) -> None:
    assert view(Producer((2, 3, 8), None, 4, 16), driver)[1].strides == (24, 8, 1)
    assert view(Producer((), None, 2, 32), driver)[1].shape == ()


def test_dlpack_refusals(driver: Driver) -> None:
    with pytest.raises(ArgumentError, match="x is on the CPU; it must be in the memory of a CUDA device"):
        read(Producer((3,), None, 2, 32, device=(1, 0)), "x", driver)
    with pytest.raises(ArgumentError, match="DLPack dtype code 2, 8 bits, 1 lanes"):
        read(Producer((3,), None, 2, 8), "x", driver)
    with pytest.raises(ArgumentError, match="2 lanes"):
        read(Producer((3,), None, 2, 32, lanes=2), "x", driver)

    class Refusing(Producer):
        def __dlpack__(self, stream: Any = None) -> Any:
            raise BufferError("it requires a gradient")

    with pytest.raises(ArgumentError, match=r"x refuses .*requires a gradient"):
        read(Refusing((3,), None, 2, 32), "x", driver)


def interface(**entries: Any) -> SimpleNamespace:
    interface = {"shape": (3, 8), "typestr": "<V2", "data": (0x9000, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface | entries)


@pytest.mark.parametrize(("typestr", "dtype"), [("<V2", "bf16"), ("|V2", "bf16"), ("<f2", "fp16"), ("<i4", "i32")])
def test_cuda_array_interface(driver: Driver, typestr: str, dtype: str) -> None:
    driver.api.owner[0x9000] = 1
    assert view(interface(typestr=typestr), driver) == (0x9000, View(dtype, (3, 8), (8, 1), 1))


def test_cuda_array_interface_of_memory_without_a_context(driver: Driver) -> None:
    driver.api.owner[0x9000] = 1
    driver.api.mapped.add(0x9000)
    assert view(interface(), driver) == (0x9000, View("bf16", (3, 8), (8, 1), 1))


def test_cuda_array_interface_strides_are_bytes(driver: Driver) -> None:
    driver.api.owner[0x9000] = 0
    assert view(interface(strides=(64, 2)), driver)[1].strides == (32, 1)
    with pytest.raises(ArgumentError, match=r"x has strides \(65, 2\) bytes; they must be multiples of 2"):
        read(interface(strides=(65, 2)), "x", driver)


def test_cuda_array_interface_refusals(driver: Driver) -> None:
    with pytest.raises(ArgumentError, match="x points at 0x9000, which is no device memory"):
        read(interface(), "x", driver)
    with pytest.raises(ArgumentError, match="x has typestr >f2"):
        read(interface(typestr=">f2"), "x", driver)


def test_device_array_is_read_like_a_torch_tensor(driver: Driver) -> None:
    devices = Devices(driver)
    array = DeviceArray(devices, (3, 8), "bf16", offset=256, tail=64)
    assert view(array, driver) == (array.data_ptr(), View("bf16", (3, 8), (8, 1), 0))
    array.fill(0xFF)
    array.upload(bytes(range(48)))
    calls = driver.api.calls
    assert "cuStreamSynchronize" in calls[calls.index("cuMemcpyHtoD") :]  # a copy may still be under way
    assert array.download() == bytes(range(48))
    assert array.download(-256, 256) == b"\xff" * 256
    assert array.download(48, 64) == b"\xff" * 64
    with pytest.raises(ArgumentError, match="the allocation has -256 to 112"):
        array.download(0, 113)
    with pytest.raises(ArgumentError, match="upload of 3 bytes"):
        array.upload(b"abc")
    array.free()
    array.free()
    assert not driver.api.memory


def test_compact_strides() -> None:
    assert compact_strides((4, 0, 3)) == (3, 3, 1)
    assert compact_strides(()) == ()

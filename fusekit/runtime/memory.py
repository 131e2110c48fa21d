"""Device memory without a framework, for `fusekit run` and small programs."""

from __future__ import annotations

import ctypes
from math import prod
from operator import index
from typing import Any

from fusekit.dtypes import ARGUMENTS, DTYPES
from fusekit.errors import ArgumentError
from fusekit.runtime.devices import Devices
from fusekit.runtime.handle import Handle
from fusekit.runtime.tensors import compact_strides


class DeviceArray(Handle):
    """A row-major array in device memory, freed by `free()` or with the object.

    It has what launches read of a tensor: data_ptr(), stride(), shape, dtype, device.

    Parameters
    ----------
    devices : Devices
        `library.devices`.
    shape : tuple of int
        Extents in elements.
    dtype : str
        A dtype name of fusekit, such as "bf16".
    device : int
        Ordinal.
    offset, tail : int
        Unused bytes before and after the array: for sentinels, or a misaligned array.

    Raises
    ------
    ArgumentError, DriverError
    """

    def __init__(
        self, devices: Devices, shape: tuple[int, ...], dtype: str, device: int = 0, *, offset: int = 0, tail: int = 0
    ) -> None:
        if dtype not in ARGUMENTS:
            raise ArgumentError(f"dtype {dtype!r}; known are {', '.join(ARGUMENTS)}")
        shape = tuple(index(extent) for extent in shape)  # those of NumPy overflow
        if any(extent < 0 for extent in shape):
            raise ArgumentError(f"shape {list(shape)}; extents are not negative")
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.nbytes = DTYPES[dtype].bytes * prod(shape)
        self.offset = offset
        self.tail = tail
        self._strides = compact_strides(self.shape)
        self._devices = devices
        self._base = 0
        self._base = int(self._call("cuMemAlloc", max(offset + self.nbytes + tail, 1)))

    def _call(self, function: str, *arguments: Any) -> Any:
        """A function of the driver on the array's device."""
        driver = self._devices.driver
        with self._devices.active(self._devices.get(self.device)):
            return driver.check(getattr(driver.api, function)(*arguments), function)

    def data_ptr(self) -> int:
        """The device address of the first element."""
        return self._base + self.offset

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._strides

    @property
    def allocation(self) -> tuple[int, int]:
        """Address and bytes of the whole allocation, sentinels included."""
        return self._base, self.offset + self.nbytes + self.tail

    def fill(self, byte: int) -> None:
        """Sets every byte of the whole allocation, sentinels included, and waits."""
        base, size = self.allocation
        if size:
            self._call("cuMemsetD8", base, byte, size)
            self._arrived()

    def upload(self, source: Any) -> None:
        """Copies a contiguous host buffer of exactly `nbytes` bytes (bytes, memoryview, NumPy array) and waits."""
        view = memoryview(source)
        if view.nbytes != self.nbytes or not view.contiguous:
            raise ArgumentError(
                f"upload of {view.nbytes} bytes (contiguous: {view.contiguous}); expected {self.nbytes}, contiguous"
            )
        if self.nbytes:
            self._call("cuMemcpyHtoD", self.data_ptr(), source, self.nbytes)
            self._arrived()

    def upload_repeated(self, source: Any) -> None:
        """Fills the array with a contiguous host buffer of at most `nbytes` bytes, repeated: one upload, then copies on
        the device that double what is there.
        """
        view = memoryview(source)
        if not self.nbytes:
            return
        if not 0 < view.nbytes <= self.nbytes or not view.contiguous:
            raise ArgumentError(
                f"upload of {view.nbytes} bytes (contiguous: {view.contiguous}), repeated; expected 1 to {self.nbytes},"
                " contiguous"
            )
        self._call("cuMemcpyHtoD", self.data_ptr(), source, view.nbytes)
        done = view.nbytes
        while done < self.nbytes:
            size = min(done, self.nbytes - done)
            self._call("cuMemcpyDtoD", self.data_ptr() + done, self.data_ptr(), size)
            done += size
        self._arrived()

    def _arrived(self) -> None:
        """Waits until it is done: the driver may return before, and non-blocking streams do not wait for it."""
        self._call("cuStreamSynchronize", 0)

    def download(self, start: int = 0, size: int | None = None) -> bytearray:
        """`size` bytes from `start` (default: all of the array), counted from the first element; waits for the device.

        `start` may be negative and the end beyond the array, as far as the allocation reaches.
        """
        size = self.nbytes - start if size is None else size
        if start < -self.offset or size < 0 or start + size > self.nbytes + self.tail:
            raise ArgumentError(
                f"download of bytes {start} to {start + size}; the allocation has {-self.offset} to"
                f" {self.nbytes + self.tail}"
            )
        data = bytearray(size)
        if size:
            buffer = (ctypes.c_char * size).from_buffer(data)
            self._call("cuMemcpyDtoH", ctypes.addressof(buffer), self.data_ptr() + start, size)
            del buffer
        return data

    def free(self) -> None:
        """Frees the memory. The array must not be used afterwards."""
        base, self._base = self._base, 0
        if base:
            self._call("cuMemFree", base)

    def __del__(self) -> None:
        try:
            if getattr(self, "_base", 0):
                self.free()
        except Exception:  # the driver may be gone at interpreter exit; its context takes the memory along
            self._base = 0

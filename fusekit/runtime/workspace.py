"""Workspaces: device memory that a kernel keeps its scheduler's counters in.

A launch leaves its workspace as the next one needs it, so launches that share one must not overlap in time. Those of
one stream do not; so every stream has a workspace of its own, given out without asking the driver until a stock is used
up.
"""

from __future__ import annotations

import threading

from fusekit.runtime.devices import Device, Devices
from fusekit.runtime.streams import LEGACY, PER_THREAD

_ALIGNMENT = 256
# So much is allocated at once: for a kernel's few counters, many streams' worth.
_STOCK_BYTES, _STOCK_MOST = 1 << 16, 64


class Workspaces:
    """The workspaces of one kernel on one device, `size` bytes each. Safe from many threads; `close` gives all back."""

    def __init__(self, devices: Devices, device: Device, size: int, zeroed: bool, name: str) -> None:
        self._devices, self._device, self._name, self._zeroed = devices, device, name, zeroed
        self._size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._count = min(max(_STOCK_BYTES // self._size, 1), _STOCK_MOST)
        self._free: list[int] = []
        self._given: dict[int | tuple[str, int], int] = {}
        self._allocations: list[int] = []
        self._closed = False
        self._stock()

    def of(self, stream: int) -> int:
        """The address of the workspace for launches in `stream`; 0 when closed."""
        key: int | tuple[str, int] = stream or LEGACY
        if key == PER_THREAD:
            key = "thread", threading.get_ident()
        address = self._given.get(key)
        if address is not None or self._closed:
            return address or 0
        while address is None:
            try:
                address = self._free.pop()
            except IndexError:
                self._stock()
        kept = self._given.setdefault(key, address)
        if kept != address:  # another thread was first
            self._free.append(address)
        return kept

    def _stock(self) -> None:
        """Allocates more. What is to be zeroed is so when this returns, whichever stream launches next."""
        api, check = self._devices.driver.api, self._devices.driver.check
        total = self._count * self._size
        what = f"{self._name}: {self._count} workspaces of {self._size} bytes on {self._device}"
        with self._devices.active(self._device), self._devices.apart():
            base = int(check(api.cuMemAlloc(total), what))
            self._allocations.append(base)
            if self._zeroed:
                # A stream of its own: the default one may have to wait for others, or not be waited for by them.
                stream = check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate")
                check(api.cuMemsetD8Async(base, 0, total, stream), f"{what}: cuMemsetD8Async")
                check(api.cuStreamSynchronize(stream), f"{what}: cuStreamSynchronize")
                check(api.cuStreamDestroy(stream), "cuStreamDestroy")
        self._free.extend(base + index * self._size for index in reversed(range(self._count)))

    def close(self) -> None:
        """Gives the memory back; no launch that uses it may be pending."""
        self._closed = True
        self._given.clear()
        self._free.clear()
        with self._devices.active(self._device), self._devices.apart():
            while self._allocations:
                self._devices.driver.check(self._devices.driver.api.cuMemFree(self._allocations.pop()), "cuMemFree")

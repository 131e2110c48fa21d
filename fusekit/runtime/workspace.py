"""Device memory that a kernel needs besides its arguments: a workspace for its counters, scratch for partial results.

A launch leaves its workspace as the next one needs it, so launches that share a workspace or scratch must not overlap
in time. Launches of one stream do not; so every stream has memory of its own, until `close`. When a thread ends, the
memory of its default stream stays, since launches may be pending. So memory grows where threads come and go, unless
they launch on streams that the program creates and keeps.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from fusekit.runtime.allocators import ALIGNMENT
from fusekit.runtime.devices import Device, Devices
from fusekit.runtime.streams import LEGACY, PER_THREAD

# So much is allocated at once: for a kernel's few counters, many streams' worth.
_STOCK_BYTES, _STOCK_MOST = 1 << 16, 64
_SCRATCH_GRANULE = 1 << 21  # what the driver allocates at least

_Stream = int | object


def owner_of(stream: int, devices: Devices) -> _Stream:
    """A key for a stream: the per-thread default stream has one handle for all threads."""
    return devices.thread() if stream == PER_THREAD else stream or LEGACY


def _handle(key: _Stream) -> int:
    return key if isinstance(key, int) else PER_THREAD


class _Own:
    """Memory of one kernel on one device. Thread-safe; `close` frees it."""

    def __init__(self, devices: Devices, device: Device, name: str) -> None:
        self._devices, self._device, self._name = devices, device, name
        self._api, self._check = devices.driver.api, devices.driver.check
        self._given: dict[_Stream, Any] = {}
        self._allocations: dict[int, int] = {}  # bytes by address
        self._closed = False

    def _allocate(self, size: int, what: str) -> int:
        """The context being current, and no capture being disturbed."""
        address = self._devices.allocate(self._device, size, what)
        self._allocations[address] = size
        return address

    def close(self) -> None:
        """Frees the memory. No launch that uses it may be pending."""
        self._closed = True
        self._given.clear()
        with self._devices.active(self._device), self._devices.apart():
            while self._allocations:
                self._devices.free(self._device, self._allocations.popitem()[0])


class Workspaces(_Own):
    """Workspaces of `size` bytes each, allocated in stocks."""

    def __init__(self, devices: Devices, device: Device, size: int, zeroed: bool, name: str) -> None:
        super().__init__(devices, device, name)
        self._zeroed = zeroed
        self._size = -(-size // ALIGNMENT) * ALIGNMENT
        self._count = min(max(_STOCK_BYTES // self._size, 1), _STOCK_MOST)
        self._free: list[int] = []
        self._stock()

    def of(self, stream: int) -> int:
        """The address of the workspace for launches in `stream`; 0 when closed."""
        key = owner_of(stream, self._devices)
        address: int | None = self._given.get(key)
        if address is not None or self._closed:
            return address or 0
        while address is None:
            try:
                address = self._free.pop()
            except IndexError:
                self._stock()
        kept: int = self._given.setdefault(key, address)
        if kept != address:  # another thread was first
            self._free.append(address)
        return kept

    def used(self) -> Counter[int | None]:
        """Bytes by stream; None: of no stream yet."""
        used = Counter[int | None]()
        for key in list(self._given):
            used[_handle(key)] += self._size
        used[None] = sum(self._allocations.copy().values()) - used.total()
        return used

    def _stock(self) -> None:
        """Allocates more. They are zeroed when this returns, whichever stream launches next."""
        api, check = self._api, self._check
        total = self._count * self._size
        what = f"{self._name}: {self._count} workspaces of {self._size} bytes on {self._device}"
        with self._devices.active(self._device), self._devices.apart(capturing=True):
            base = self._allocate(total, what)
            if self._zeroed:
                # A stream of its own: the default one may have to wait for others, or not be waited for by them.
                stream = check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate")
                check(api.cuMemsetD8Async(base, 0, total, stream), f"{what}: cuMemsetD8Async")
                check(api.cuStreamSynchronize(stream), f"{what}: cuStreamSynchronize")
                check(api.cuStreamDestroy(stream), "cuStreamDestroy")
        self._free.extend(base + index * self._size for index in reversed(range(self._count)))


class Scratch(_Own):
    """A stream's scratch grows with the largest launch there was. What it had before stays until `close`: bound
    launches and graphs may still use it.
    """

    def __init__(self, devices: Devices, device: Device, name: str) -> None:
        super().__init__(devices, device, name)
        self._growing = threading.Lock()
        self._sizes: dict[_Stream, int] = {}  # with what was outgrown

    def of(self, stream: int, size: int) -> int:
        """The address of `size` bytes at least for launches in `stream`; 0 when closed."""
        key = owner_of(stream, self._devices)
        address: int
        address, there = self._given.get(key, (0, 0))
        if there >= size or self._closed:
            return address
        with self._growing:
            address, there = self._given.get(key, (0, 0))
            if there >= size or self._closed:  # another thread was first
                return address
            # Half as much again as before: a slowly growing batch takes few allocations, three times its size at most.
            wanted = max(size, there * 3 // 2)
            wanted = -(-wanted // _SCRATCH_GRANULE) * _SCRATCH_GRANULE
            what = f"{self._name}: {wanted} bytes of scratch on {self._device}"
            with self._devices.active(self._device), self._devices.apart(capturing=True):
                address = self._allocate(wanted, what)
            self._given[key] = address, wanted
            self._sizes[key] = self._sizes.get(key, 0) + wanted
        return address

    def used(self) -> Counter[int | None]:
        """Bytes by stream."""
        used = Counter[int | None]()
        for key, size in self._sizes.copy().items():
            used[_handle(key)] += size
        return used

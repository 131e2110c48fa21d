"""Allocators of workspaces and scratch memory other than the driver."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fusekit.errors import ArgumentError, UsageError, whole

if TYPE_CHECKING:
    from fusekit.runtime.devices import Device, Devices

ALIGNMENT = 256


@runtime_checkable
class Allocator(Protocol):
    """Allocates device memory for kernels. It may be called from several threads, and while a stream is captured."""

    def allocate(self, size: int, device: int) -> int:
        """The address of `size` bytes on the device with that ordinal, a multiple of 256, that no queued work uses."""

    def free(self, address: int, device: int) -> None:
        """Takes memory back. No queued work uses it."""


def check_allocator(allocator: Any) -> None:
    """Raises ArgumentError for what is neither "torch", None, nor an Allocator."""
    if allocator not in (None, "torch") and (isinstance(allocator, type) or not isinstance(allocator, Allocator)):
        raise ArgumentError(
            f"allocator is {allocator!r}; it must be 'torch', None, or an object with allocate(size, device) and"
            " free(address, device)",
            argument="allocator",
        )


def checked_address(address: Any, allocator: Any) -> int:
    """`address` as an int. Raises ArgumentError for what is none of an aligned allocation."""
    number = whole(address)
    if number is None or not 0 < number < 2**64 or number % ALIGNMENT:
        raise ArgumentError(
            f"{type(allocator).__name__}.allocate returned {address!r}; it must return an address, an integer that is a"
            f" multiple of {ALIGNMENT}",
            argument="allocator",
        )
    return number


class TorchAllocator:
    """PyTorch's caching allocator.

    Its memory belongs to streams. It is taken for a stream that no tensor is ever made in: what PyTorch got back in
    another one may still be in use by kernels that are queued there.
    """

    def __init__(self, devices: Devices) -> None:
        try:
            self._cuda: Any = import_module("torch").cuda
        except ImportError as error:
            raise UsageError(
                f"allocator='torch' needs PyTorch, which cannot be imported ({error}); install it, or leave it out"
            ) from None
        self._devices = devices
        self._streams: dict[int, int] = {}

    def allocate(self, size: int, device: int) -> int:
        self._cuda.init()
        if device not in self._streams:
            self._streams.setdefault(device, self._stream(self._devices.get(device)))
        address: int = self._cuda.caching_allocator_alloc(size, device, self._streams[device])
        return address

    def free(self, address: int, device: int) -> None:
        self._cuda.caching_allocator_delete(address)

    def _stream(self, device: Device) -> int:
        api, check = self._devices.driver.api, self._devices.driver.check
        with self._devices.active(device):
            return int(check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate"))

"""Windows: buffers of one size on every rank, which all ranks can address (IPC buffers, a symmetric memory).

In one process, peer access is enabled between devices. Between processes of one machine, each rank exports a CUDA IPC
handle, which the others open. NCCL's windows would need its Python package nccl4py, which is built for one version of
NCCL, newer than that of common installations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fusekit.errors import ArgumentError, FusekitError, PeerTimeoutError
from fusekit.plan.exchange import MOST_RANKS, NEXT, OPEN, STAGES, STATUS, STATUS_WORDS
from fusekit.runtime.devices import Device, Devices
from fusekit.runtime.handle import SharedHandle

GRANULE = 2 << 20  # bytes that the driver maps at once: an IPC handle then covers this window alone
_HANDLE = slice(8, 72)  # in the record that ranks exchange: the window's size, its IPC handle, the digest of layers
Gather = Callable[[bytes], Sequence[bytes]]


class Window(SharedHandle):
    """This rank's window and the addresses of the others; see `in_process` and `between_processes`.

    Attributes
    ----------
    peers : list[int]
        Addresses of all ranks' windows: the argument `window` of kernels.
    rank, device : int
        This rank, and the ordinal of its device.
    size : int
        Bytes of each window.
    user : object
        Identifies the pass that was launched last on the window.
    shared : bool
        Whether other ranks of the process have the same device.
    """

    def __init__(self, devices: Devices, device: Device, rank: int, peers: Sequence[int], size: int) -> None:
        self.rank, self.peers, self.size, self.device = rank, list(peers), size, device.ordinal
        self._devices, self._device = devices, device
        self.user: object = None
        self.shared = False
        self._opened: list[int] = []
        self._next = self
        self._gather: Gather | None = None

    @property
    def address(self) -> int:
        """The address of this rank's window."""
        return self.peers[self.rank]

    def __repr__(self) -> str:
        return f"<Window of rank {self.rank} of {len(self.peers)}, {self.size} bytes on device {self.device}>"

    def check(self) -> None:
        """Raises PeerTimeoutError if a launch on this window stopped waiting for another rank.

        It waits for no launch and no stream. After the error the windows cannot be used any more: the ranks no longer
        agree on the next launch. Close the ranks and open the layers with new ones.
        """
        missing, stage, launch = self.words()[STATUS // 4 :][:STATUS_WORDS]
        if missing:
            shared = ""
            if self.shared:
                shared = (
                    f"; ranks share device {self.device} and may lack room there: give each a device of its own, or"
                    ' fewer tokens (docs/expert-parallelism.md, "Rules")'
                )
            raise PeerTimeoutError(
                f"rank {self.rank} waited in launch {launch} on this window for rank {missing - 1} to {STAGES[stage]}, "
                "and it did not in time; what this launch and later ones gave is of no use; look for what ended or held"
                f" up that rank, make new windows, or give a longer timeout{shared}",
                rank=missing - 1,
            )

    def words(self) -> list[int]:
        """The words of this window's header that launches of this rank alone write. Waits for no stream."""
        return read(self._devices, self._device, self.address, OPEN // 4)

    def join(self, other: Window) -> None:
        """Once a launch on this window or another one of the ring that `other` is in has given up waiting, later
        launches on any of them wait for nothing. The windows of a ring are of one rank, and closed together.
        """
        self._next, other._next = other._next, self
        for window in (self, other):
            address = ctypes.c_uint64(window._next.address + STATUS)
            with _apart(self._devices, self._device) as stream:
                api = self._devices.driver.api
                copied = api.cuMemcpyHtoDAsync(window.address + NEXT, ctypes.addressof(address), 8, stream)
                self._devices.driver.check(copied, "cuMemcpyHtoDAsync")

    def close(self, *, alone: bool = False) -> None:
        """Frees the memory, when no launch is pending. Between processes it waits for all ranks to close.

        alone: does not wait, because another rank is gone.
        """
        api, check = self._devices.driver.api, self._devices.driver.check
        gather = None if alone or not self.peers else self._gather
        if gather is not None:
            gather(b"")
        with self._devices.active(self._device), self._devices.apart():
            while self._opened:
                check(api.cuIpcCloseMemHandle(self._opened.pop()), "cuIpcCloseMemHandle")
            if gather is not None:
                gather(b"")
        if self.peers:
            address, self.peers = self.address, []
            free(self._devices, self._device, address)


def in_process(devices: Devices, ordinals: Sequence[int], size: int) -> list[Window]:
    """A window of `size` bytes for each rank of this process: rank r is on device `ordinals[r]`.

    Ranks may share a device if their blocks fit it together (docs/expert-parallelism.md, "Rules"). Raises ArgumentError
    if a device cannot access another's memory, and DriverError.
    """
    _check_ranks(len(ordinals))
    size = _whole(size)
    placed = [devices.get(ordinal) for ordinal in ordinals]
    for device in placed:
        for other in placed:
            _reach(devices, device, other)
    addresses: list[int] = []
    windows = [Window(devices, device, rank, (), size) for rank, device in enumerate(placed)]
    try:
        for device in placed:
            addresses.append(allocate(devices, device, size))
    except FusekitError:
        for device, address in zip(placed, addresses, strict=False):
            free(devices, device, address)
        raise
    for window in windows:
        window.peers, window.shared = list(addresses), list(ordinals).count(window.device) > 1
    return windows


def between_processes(
    devices: Devices, ordinal: int, rank: int, size: int, gather: Gather, layers: bytes = b""
) -> Window:
    """This rank's window of `size` bytes on device `ordinal`; the other ranks are processes of the same machine.

    gather: gives every rank the bytes of all ranks, in their order, when all have called it: `comm.allgather` of
    mpi4py, or a function around torch.distributed's `all_gather_object`. All ranks call this together. layers: a digest
    of what this rank will launch on windows, which is the same on all ranks. Raises ArgumentError on every rank for
    sizes or digests that differ, DriverError.
    """
    device, size = devices.get(ordinal), _whole(size)
    window = Window(devices, device, rank, (), size)
    address = allocate(devices, device, size)
    try:
        window.peers = _exchanged(window, address, gather, layers)
    except BaseException:  # whatever the caller's `gather` raises
        window.close(alone=True)
        free(devices, device, address)
        raise
    window._gather = gather
    return window


def _exchanged(window: Window, address: int, gather: Gather, layers: bytes) -> list[int]:
    """The address of each rank's window in this process; `address` is this rank's."""
    devices, device = window._devices, window._device
    api, check = devices.driver.api, devices.driver.check
    with devices.active(device), devices.apart():
        # getPtr: the one member that the structure has in every version of cuda-bindings.
        exported = check(api.cuIpcGetMemHandle(address), "cuIpcGetMemHandle")
        handle = ctypes.string_at(exported.getPtr(), _HANDLE.stop - _HANDLE.start)
    records = [bytes(record) for record in gather(window.size.to_bytes(8, "little") + handle + layers)]
    _check_ranks(len(records))
    others = [rank for rank, record in enumerate(records) if record[_HANDLE.stop :] != records[0][_HANDLE.stop :]]
    if others:
        raise ArgumentError(
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} opened other layers than rank 0,"
            " or other builds of them; close these ranks, and open the same layers on every rank with new ones, when no"
            " build runs",
            argument="ranks",
        )
    sizes = [int.from_bytes(record[:8], "little") for record in records]
    if len(set(sizes)) > 1:
        raise ArgumentError(f"the ranks' windows have {sizes} bytes; give every rank the same size", argument="size")
    peers = []
    flags = int(api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    with devices.active(device), devices.apart():
        for rank, record in enumerate(records):
            if rank == window.rank:
                peers.append(address)
                continue
            there = api.CUipcMemHandle()
            ctypes.memmove(there.getPtr(), record[_HANDLE], _HANDLE.stop - _HANDLE.start)
            opened = int(check(api.cuIpcOpenMemHandle(there, flags), f"cuIpcOpenMemHandle of rank {rank}"))
            window._opened.append(opened)
            peers.append(opened)
    return peers


def _check_ranks(count: int) -> None:
    if not 1 <= count <= MOST_RANKS:
        raise ArgumentError(f"{count} ranks; there are 1 to {MOST_RANKS}")


def _whole(size: int) -> int:
    """`size` as an int. Raises ArgumentError."""
    return ArgumentError.integer("size", size, "the bytes of a window, 1 or more", 1)


def read(devices: Devices, device: Device, address: int, count: int) -> list[int]:
    """Words of device memory as int32. Waits for no stream, and is no danger to a capture."""
    words = (ctypes.c_int32 * count)()
    with _apart(devices, device, capturing=True) as stream:
        api = devices.driver.api
        copied = api.cuMemcpyDtoHAsync(ctypes.addressof(words), address, ctypes.sizeof(words), stream)
        devices.driver.check(copied, "cuMemcpyDtoHAsync")
    return list(words)


@contextmanager
def _apart(devices: Devices, device: Device, *, capturing: bool = False) -> Iterator[object]:
    """A stream of its own, which is empty afterwards: what is pending on the device may be a launch that waits for a
    rank that this call holds up.
    """
    api, check = devices.driver.api, devices.driver.check
    with devices.active(device), devices.apart(capturing=capturing):
        stream = check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate")
        try:
            yield stream
            check(api.cuStreamSynchronize(stream), "cuStreamSynchronize")
        finally:
            check(api.cuStreamDestroy(stream), "cuStreamDestroy")


def allocate(devices: Devices, device: Device, size: int) -> int:
    """Zeros: no launch was, and no flag is up."""
    api, check = devices.driver.api, devices.driver.check
    with _apart(devices, device) as stream:
        address = int(check(api.cuMemAlloc(-(-size // GRANULE) * GRANULE), f"a window of {size} bytes on {device}"))
        check(api.cuMemsetD8Async(address, 0, size, stream), "cuMemsetD8Async")
    return address


def free(devices: Devices, device: Device, address: int) -> None:
    with devices.active(device), devices.apart():
        devices.driver.check(devices.driver.api.cuMemFree(address), "cuMemFree")


def _reach(devices: Devices, device: Device, other: Device) -> None:
    """Lets kernels of `device` address the memory of `other`."""
    api, check = devices.driver.api, devices.driver.check
    if device.ordinal == other.ordinal:
        return
    if not check(api.cuDeviceCanAccessPeer(device.handle, other.handle), "cuDeviceCanAccessPeer"):
        raise ArgumentError(f"{device} cannot address the memory of {other}; use devices that NVLink or PCIe connects")
    with devices.active(device):
        status = api.cuCtxEnablePeerAccess(other.context, 0)
        if status[0] and status[0] != api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            raise devices.driver.error(status[0], f"cuCtxEnablePeerAccess of {device} to {other}")

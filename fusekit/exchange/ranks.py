"""One rank among those of a group, and the windows that its layers share."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fusekit.errors import ArgumentError
from fusekit.exchange.windows import GRANULE, Gather, Window, allocate, between_processes, free, in_process
from fusekit.plan.exchange import MOST_RANKS
from fusekit.runtime.devices import Devices, ordinal_of
from fusekit.runtime.handle import SharedHandle
from fusekit.runtime.side_stream import SideStream

TIMEOUT = 60_000
CHECKED = 16  # bytes of a layer that its `check` reads


class Ranks(SharedHandle):
    """A rank of several, for `library.layer(name, ranks=...)`; see `Ranks.in_process` and `Ranks.of_process`.

    All ranks open the same layers in the same order, since all of them allocate a window together.

    Attributes
    ----------
    rank, count : int
        This rank, and the number of ranks.
    device : int
        Ordinal of the rank's device.
    timeout : int
        Milliseconds that a launch waits for the other ranks.
    sharing : int
        The number of ranks of this process on the device.
    """

    def __init__(
        self, rank: int, count: int, device: int, timeout: int, make: Callable[[tuple[Any, ...], int], Window],
        layers: dict[str, tuple[str, int]], used: dict[str, str] | None = None, sharing: int = 1,
    ) -> None:  # fmt: skip
        self.rank, self.count, self.device, self.timeout = rank, count, ordinal_of(device), milliseconds(timeout)
        self.sharing = sharing
        self.closed = False
        self._make = make
        # layers: (digest, first rank) of each opened layer by name, shared by the ranks of a process. used: digests of
        # the layers that asked for a window.
        self._layers, self._used = layers, {} if used is None else used
        self._windows: dict[tuple[Any, ...], Window] = {}
        self._checked: list[tuple[Devices, int]] = []  # memory of layers, each piece of GRANULE bytes
        self._places = 0  # of layers there
        self._side_stream: SideStream | None = None

    @classmethod
    def in_process(cls, devices: Devices, ordinals: Sequence[int], timeout: int = TIMEOUT) -> list[Ranks]:
        """The ranks of this process: rank r is on device `ordinals[r]`.

        A launch waits for those of the other ranks, so give each rank a device of its own. Ranks that share a device
        must all be launched before you wait, and their blocks must fit the device together
        (docs/expert-parallelism.md, "Rules").

        Parameters
        ----------
        devices : Devices
            `library.devices`.
        ordinals : sequence of int
        timeout : int
            Milliseconds that a launch waits for the other ranks.

        Raises
        ------
        ArgumentError
            For no ranks, or too many.
        """
        count, windows = len(ordinals), _ProcessWindows(devices, ordinals)
        layers: dict[str, tuple[str, int]] = {}
        if not 1 <= count <= MOST_RANKS:
            raise ArgumentError(f"{count} ranks; there are 1 to {MOST_RANKS}")
        return [
            cls(rank, count, device, timeout, windows.of(rank), layers, sharing=list(ordinals).count(device))
            for rank, device in enumerate(ordinals)
        ]

    @classmethod
    def of_process(cls, devices: Devices, device: int, rank: int, gather: Gather, timeout: int = TIMEOUT) -> Ranks:
        """This process's rank; the others are processes of the same machine. All ranks call this together.

        Parameters
        ----------
        devices : Devices
            `library.devices`.
        device : int
            Ordinal.
        rank : int
        gather : callable
            All-gather: gives every rank the bytes of all ranks in their order, such as `comm.allgather` of mpi4py. Its
            exceptions are passed on.
        timeout : int
            Milliseconds that a launch waits for the other ranks.

        Raises
        ------
        ArgumentError
            If the ranks' numbers are not in the order of `gather`.
        """
        rank = ArgumentError.integer("rank", rank, "a whole number, 0 or more")
        gathered = [
            int.from_bytes(number, "little", signed=True) for number in gather(rank.to_bytes(8, "little", signed=True))
        ]
        if gathered != list(range(len(gathered))):
            raise ArgumentError(f"the ranks call themselves {gathered}; they are 0, 1, ..., in the order of `gather`")

        used: dict[str, str] = {}

        def make(_: tuple[Any, ...], size: int) -> Window:
            # Layers share windows, so the digest covers every layer that was used so far.
            digest = hashlib.sha256(json.dumps(used, sort_keys=True).encode()).digest()
            return between_processes(devices, device, rank, size, gather, digest)

        return cls(rank, len(gathered), device, timeout, make, {}, used)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.count} on device {self.device}, {len(self._windows)} windows>"

    def opens(self, name: str, digest: str) -> None:
        """Registers a layer of this rank. digest: of its table, and of the kernels that ranks launch together.

        Raises ArgumentError if this rank, or another rank of the process, opened the name with another digest. Ranks in
        different processes compare the layers that they use when they allocate a window.
        """
        known, first = self._layers.setdefault(name, (digest, self.rank))
        if known != digest:
            before = "it did before" if first == self.rank else f"rank {first}"
            raise ArgumentError(
                f"rank {self.rank} opened another build of {name} than {before}, and kernels of two builds may not work"
                " together; close these ranks, and open the layer on every rank with new ones, when no build runs",
                argument="ranks",
            )

    def window(self, key: tuple[Any, ...], size: int, layer: str = "") -> Window:
        """The window of `size` bytes that layers share by `key`; the first call allocates it. layer: the caller."""
        if layer:
            self._used[layer] = self._layers[layer][0]
        if key not in self._windows:
            first, window = next(iter(self._windows.values()), None), self._make(key, size)
            self._windows[key] = window
            if first is not None:
                window.join(first)
        return self._windows[key]

    def checked(self, devices: Devices) -> int:
        """The address of CHECKED zeroed bytes on this rank's device, which belong to a layer until `close`."""
        place = self._places % (GRANULE // CHECKED)
        if place == 0:
            self._checked.append((devices, allocate(devices, devices.get(self.device), GRANULE)))
        self._places += 1
        return self._checked[-1][1] + place * CHECKED

    def side_stream(self, devices: Devices) -> SideStream:
        """The side stream of this rank's layers. devices: `library.devices`."""
        if self._side_stream is None:
            self._side_stream = SideStream(devices, self.device)
        return self._side_stream

    def check(self) -> None:
        """Raises PeerTimeoutError if a launch gave up waiting for another rank; waits for no launch itself."""
        for window in self._windows.values():
            window.check()

    def close(self, *, alone: bool = False) -> None:
        """Frees the windows, when no launch is pending: all ranks together, or alone if one is gone."""
        self.closed = True
        if self._side_stream is not None:
            self._side_stream.close()
            self._side_stream = None
        while self._windows:  # a window that could not be closed is still there for another try
            key = next(reversed(self._windows))
            self._windows[key].close(alone=alone)
            del self._windows[key]
        while self._checked:
            devices, address = self._checked[-1]
            free(devices, devices.get(self.device), address)
            self._checked.pop()
        self._layers.clear()
        self._used.clear()


def milliseconds(timeout: int) -> int:
    """`timeout` as an int. Raises ArgumentError."""
    rule = f"a whole number of milliseconds, 1 to {2**31 - 1}"
    number = ArgumentError.integer("timeout", timeout, rule, 1)
    if number >= 2**31:
        raise ArgumentError(f"timeout = {number}; it must be {rule}", argument="timeout")
    return number


class _ProcessWindows:
    """The windows of all ranks of a process: the first rank that asks allocates those of all."""

    def __init__(self, devices: Devices, ordinals: Sequence[int]) -> None:
        self._devices, self._ordinals = devices, list(ordinals)
        self._left: dict[tuple[int, tuple[Any, ...]], Window] = {}
        self._lock = threading.Lock()  # ranks may each have a thread

    def of(self, rank: int) -> Callable[[tuple[Any, ...], int], Window]:
        def make(key: tuple[Any, ...], size: int) -> Window:
            with self._lock:
                if (rank, key) not in self._left:
                    allocated = in_process(self._devices, self._ordinals, size)
                    self._left |= {(other, key): window for other, window in enumerate(allocated)}
                return self._left.pop((rank, key))

        return make

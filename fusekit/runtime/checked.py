"""The checked mode: a kernel checks on the device that `offsets` rise and lie within the rows.

A library that is opened with ``checked=True`` loads kernels that launch a tiny kernel of the store, `checks/offsets`,
before themselves, in the same stream. It writes to a report in host memory if something is wrong. Nothing waits:
`Library.problems` reads the reports at any time. A CUDA graph captures launches of the check, too, and every replay
checks again. Kernels of an unchecked library are of another class.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.abi import LaunchRecord, TensorArgument
from fusekit.errors import FusekitError
from fusekit.runtime.devices import Device, Devices
from fusekit.runtime.kernel import Kernel
from fusekit.runtime.launch import Launch, Launches
from fusekit.runtime.launch_plan import LaunchPlan
from fusekit.runtime.streams import handle_of
from fusekit.runtime.tensors import Slice
from fusekit.runtime.workspace import owner_of

CHECK = "checks/offsets"
ARGUMENT, ROWS = "offsets", "M"
# Words of a report: finished, group, begin, end, rows, started; see fusekit/kernels/check/offsets.py.
_WORDS, _REPORT_BYTES, _STOCK = 8, 64, 64
_PORTABLE_MAPPED = 0x1 | 0x2


@dataclass(frozen=True, slots=True)
class OffsetsProblem:
    """The last wrong group of `offsets` that was seen in a launch of `kernel` on `device`.

    group: the first wrong one of that launch; it begins at row `begin` (where the one before ends) and ends at `end`,
    which must be `begin` to `rows`. times: launches that had a wrong group since the last look.
    """

    kernel: str
    device: int
    group: int
    begin: int
    end: int
    rows: int
    times: int

    def __str__(self) -> str:
        seen = "" if self.times == 1 else f"; {self.times} launches had such a group"
        return (
            f"{self.kernel}: {ARGUMENT}[{self.group}] is {self.end}; it must be {self.begin} (where the group before it"
            f" ends) to {self.rows} (the rows){seen}; what this launch wrote is of no use"
        )


def checkable(record: LaunchRecord) -> bool:
    """Whether kernels of `record` take ends of groups over rows M."""
    dims = {dim.name for dim in record.dims}
    return ROWS in dims and any(
        tensor.name == ARGUMENT and tensor.dtype == "i32" and tensor.rank == 1 and not tensor.written
        for tensor in record.tensors
    )


class _Report:
    """The report of launches of one kernel in one stream; `host` and `address` are the same memory."""

    __slots__ = ("_words", "kernel", "seen", "words")

    def __init__(self, kernel: str, host: int, address: int, device: int) -> None:
        self.kernel = kernel
        self._words = (ctypes.c_int32 * _WORDS).from_address(host)
        self.words = Slice(address, (_WORDS,), "i32", device)
        self.seen = 0

    def look(self) -> OffsetsProblem | None:
        """The problem written since the last look; None while it is being written, so the next look finds it."""
        finished = self._words[0] & 0xFFFF_FFFF
        group, begin, end, rows = self._words[1:5]
        started = self._words[5] & 0xFFFF_FFFF
        if finished == self.seen or started != finished:
            return None
        times, self.seen = (finished - self.seen) & 0xFFFF_FFFF, finished
        return OffsetsProblem(self.kernel, self.words.device, group, begin, end, rows, times)


class Checks:
    """The reports of a checked library, and the kernel that writes them. Safe from many threads.

    load: gives the check for a device, by its ordinal.
    """

    def __init__(self, devices: Devices, load: Callable[[int], Kernel]) -> None:
        self._devices, self._load = devices, load
        self._kernels: dict[int, Kernel] = {}
        self._reports: dict[Any, _Report] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}  # by device: host and device address
        self._pages: list[tuple[Device, int]] = []
        self._lock = threading.Lock()

    def prepare(self, ordinal: int) -> None:
        """Loads the check and makes a stock of reports, so that launches on the device need neither.

        Raises NotBuiltError where the store lacks the check, DriverError.
        """
        with self._lock:
            if ordinal not in self._kernels:
                self._kernels[ordinal] = self._load(ordinal)
            if ordinal not in self._free:
                self._stock(self._devices.get(ordinal))

    def launch(self, kernel: str, plan: LaunchPlan, addresses: list[int], handle: int) -> None:
        """Checks the offsets of a launch of `plan` that follows in the stream."""
        device = plan.loaded.device
        key = kernel, device.ordinal, owner_of(handle, self._devices)
        report = self._reports.get(key)
        if report is None:
            self.prepare(device.ordinal)
            report = self._give(key, kernel, device)
        index = plan.index[ARGUMENT]
        groups, rows = plan.bound.env[_extent(plan.record, index)], plan.bound.env[ROWS]
        offsets = Slice(addresses[index], (groups,), "i32", device.ordinal)
        self._kernels[device.ordinal](offsets=offsets, report=report.words, rows=rows, stream=handle)

    def problems(self) -> list[OffsetsProblem]:
        """The problems since the last look, one for each kernel and stream. Waits for nothing."""
        with self._lock:
            problems = [report.look() for report in self._reports.values()]
        return [problem for problem in problems if problem is not None]

    def close(self) -> None:
        """Frees the memory. No launch may be pending, and no graph may be replayed."""
        with self._lock:
            self._reports.clear()
            self._free.clear()
            while self._kernels:
                self._kernels.popitem()[1].unload()
            while self._pages:
                device, host = self._pages.pop()
                with self._devices.active(device), self._devices.apart():
                    self._devices.driver.check(self._devices.driver.api.cuMemFreeHost(host), "cuMemFreeHost")

    def _give(self, key: Any, kernel: str, device: Device) -> _Report:
        with self._lock:
            if key not in self._reports:
                free = self._free[device.ordinal]
                if not free:
                    self._stock(device)
                self._reports[key] = _Report(kernel, *free.pop(), device.ordinal)
            return self._reports[key]

    def _stock(self, device: Device) -> None:
        api, check = self._devices.driver.api, self._devices.driver.check
        what = f"{_STOCK} reports of {CHECK} for {device}"
        with self._devices.active(device), self._devices.apart(capturing=True):
            host = int(check(api.cuMemHostAlloc(_STOCK * _REPORT_BYTES, _PORTABLE_MAPPED), what))
            self._pages.append((device, host))
            address = int(check(api.cuMemHostGetDevicePointer(host, 0), what))
        ctypes.memset(host, 0, _STOCK * _REPORT_BYTES)
        places = [(host + at, address + at) for at in range(0, _STOCK * _REPORT_BYTES, _REPORT_BYTES)]
        self._free.setdefault(device.ordinal, []).extend(reversed(places))


def _extent(record: LaunchRecord, index: int) -> str:
    """The dim of the extent of `offsets`."""
    tensor: TensorArgument = record.tensors[index]
    extent = tensor.shape[0]
    assert isinstance(extent, str)
    return extent


class CheckedKernel(Kernel):
    """A `Kernel` whose launches are preceded by the check of its offsets."""

    def __init__(
        self, devices: Devices, name: str, record: LaunchRecord, cubin: bytes, defaults: Mapping[str, Any], device: int,
        spec: Mapping[str, Any] | None, checks: Checks,
    ) -> None:  # fmt: skip
        super().__init__(devices, name, record, cubin, defaults, device, spec)
        self.checks = checks
        try:
            checks.prepare(device)
        except FusekitError:
            self.unload()
            raise

    def __call__(
        self, *, stream: Any = None, cluster_margin: int | None = None, priority: int | None = None,
        sm_count: int | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        """As `Kernel.__call__`."""
        handle = stream if type(stream) is int else handle_of(stream, arguments.values())
        plan, addresses, _ = self._resolve(arguments, cluster_margin, priority, sm_count)
        if not plan.skip:
            plan.place(addresses)  # raises before the check is launched
            self.checks.launch(self.name, plan, addresses, handle)
            settings = {"cluster_margin": cluster_margin, "priority": priority, "sm_count": sm_count}
            super().__call__(stream=handle, **settings, **arguments)

    def prepare(self, device: int) -> None:
        """As `Kernel.prepare`."""
        super().prepare(device)
        self.checks.prepare(device)

    def bind(
        self, *, cluster_margin: int | None = None, priority: int | None = None, sm_count: int | None = None,
        **arguments: Any,
    ) -> Launch:  # fmt: skip
        """As `Kernel.bind`."""
        kind = CheckedLaunches if self.record.then else CheckedLaunch
        return kind(self, arguments, (cluster_margin, priority, sm_count))


class CheckedLaunch(Launch):
    """A `Launch` of a `CheckedKernel`, preceded by the check."""

    __slots__ = ()
    kernel: CheckedKernel

    def __call__(self, stream: Any = None) -> None:
        """As `Launch.__call__`."""
        block = self._block
        if block is None:
            return
        handle = stream if type(stream) is int else self._handle(stream)
        self.kernel.checks.launch(self.kernel.name, self._plan, block.addresses, handle)
        super().__call__(handle)


class CheckedLaunches(CheckedLaunch, Launches):
    """A `CheckedLaunch` of a record of several launches, with one check for all."""

    __slots__ = ()

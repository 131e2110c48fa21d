"""Devices and their primary contexts. A context is made current only where another one is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fusekit.errors import ArchMismatchError, ArgumentError, DriverError, how_to_build, whole
from fusekit.runtime.allocators import Allocator, TorchAllocator, checked_address
from fusekit.runtime.driver import Driver
from fusekit.runtime.streams import LEGACY, PER_THREAD


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its retained primary context. `capability` is (major, minor), `sm_count` the multiprocessors that
    this process may use: those of a MIG slice, or what MPS leaves it.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    handle: Any
    context: Any

    @property
    def arch(self) -> str:
        """The architecture of kernels for exactly this device, such as sm_90a."""
        return archs_of(self.capability)[0]

    def __str__(self) -> str:
        return f"device {self.ordinal} ({self.name}, {self.arch})"


def ordinal_of(device: Any) -> int:
    """The ordinal `device` as an int. Raises ArgumentError for what is no integer: 0.0 and False are equal to 0, and
    would be found where 0 is kept.
    """
    ordinal = whole(device)
    if ordinal is None:
        raise ArgumentError(
            f"device is {device!r}; it must be the ordinal of a GPU, a whole number such as 0", argument="device"
        )
    return ordinal


def look_at(driver: Driver, ordinal: int) -> tuple[Any, str, tuple[int, int], int]:
    """Handle, name, capability and multiprocessors of the device `ordinal`. Makes no context."""
    api, check = driver.api, driver.check
    handle = check(api.cuDeviceGet(ordinal), "cuDeviceGet")

    def attribute(name: str) -> int:
        kind = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(api.cuDeviceGetAttribute(kind, handle), f"cuDeviceGetAttribute {name}"))

    name = check(api.cuDeviceGetName(128, handle), "cuDeviceGetName").split(b"\0")[0].decode()
    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    return handle, name, capability, attribute("MULTIPROCESSOR_COUNT")


def archs_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """The targets that compile for this capability alone, the most specific first: ("sm_90a", "sm_90")."""
    base = f"sm_{capability[0]}{capability[1]}"
    return (
        (f"{base}a", f"{base}f", base)
        if capability >= (10, 0)
        else (f"{base}a", base)
        if capability >= (9, 0)
        else (base,)
    )


def check_arch(arch: str, device: Device, name: str) -> None:
    """Raises ArchMismatchError unless `device` runs cubins for `arch`.

    An ``a`` target runs on its own capability only, an ``f`` target and a plain one also on later minors of the major.
    """
    number = arch.removeprefix("sm_").rstrip("af")
    major, minor = int(number[:-1]), int(number[-1])
    exact = arch.endswith("a")
    if device.capability[0] == major and (device.capability[1] == minor if exact else device.capability[1] >= minor):
        return
    _, remedy = how_to_build(name, device.arch)
    raise ArchMismatchError(
        f"{name} is for {arch}, {device} is not; expected {arch}, found {device.arch}; {remedy}",
        expected=arch,
        found=device.arch,
    )


class Devices:
    """The devices of one process for a library; a primary context is retained at its first use.

    allocator: of workspaces and scratch memory. Default: the driver.
    """

    def __init__(self, driver: Driver, allocator: Allocator | Literal["torch"] | None = None) -> None:
        self.driver = driver
        self._allocator = TorchAllocator(self) if allocator == "torch" else allocator
        self._devices: dict[int, Device] = {}
        self._thread = threading.local()
        self.count: int = driver.check(driver.api.cuDeviceGetCount(), "cuDeviceGetCount")
        if self.count == 0:
            raise DriverError(
                "the driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES", name="CUDA_ERROR_NO_DEVICE"
            )

    def current(self) -> int:
        """The ordinal of the device of this thread's current context; 0 without one."""
        api = self.driver.api
        if int(self.driver.check(api.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
            return 0
        return int(self.driver.check(api.cuCtxGetDevice(), "cuCtxGetDevice"))

    def get(self, ordinal: int) -> Device:
        """The device of that ordinal. Raises DriverError where there is none, and ArgumentError as `ordinal_of`."""
        ordinal = ordinal_of(ordinal)
        device = self._devices.get(ordinal)
        if device is None:
            opened = self._open(ordinal)
            device = self._devices.setdefault(ordinal, opened)
            if device is not opened:  # another thread was first: one retained context is enough
                self.driver.check(self.driver.api.cuDevicePrimaryCtxRelease(opened.handle), "cuDevicePrimaryCtxRelease")
        return device

    def thread(self) -> object:
        """Identifies this thread and no later one: the ident of a thread that ended is soon another's.

        A thread that C made may get a new Python thread for each call, so its start time comes from the system.
        """
        if not hasattr(self._thread, "identity"):
            ident = threading.get_native_id()
            try:
                stat = Path(f"/proc/self/task/{ident}/stat").read_bytes()
                self._thread.identity = ident, stat.rpartition(b")")[2].split()[19]
            except OSError:  # no such file on this system
                self._thread.identity = object()
        identity: object = self._thread.identity
        return identity

    @contextmanager
    def apart(self, *, capturing: bool = False) -> Iterator[None]:
        """Inside, driver calls of this thread do not break captures of other threads.

        Otherwise a global capture elsewhere would refuse loading, allocating and unloading, and be broken by them.
        capturing: nor captures of this thread, for memory that a captured launch needs.
        """
        exchange, check = self.driver.api.cuThreadExchangeStreamCaptureMode, self.driver.check
        modes = self.driver.api.CUstreamCaptureMode
        mode = modes.CU_STREAM_CAPTURE_MODE_RELAXED if capturing else modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        before = check(exchange(mode), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            check(exchange(before), "cuThreadExchangeStreamCaptureMode")

    def refuse_capture(self, device: Device, what: str) -> None:
        """Raises DriverError while this thread captures a stream, or a blocking stream of `device` is captured.

        It queries an event, which the driver refuses during a capture that this thread began, unless it is a relaxed
        one. Captures of other threads go on.
        """
        api, check = self.driver.api, self.driver.check
        with self.active(device), self.apart():
            status = api.cuStreamIsCapturing(LEGACY)[0]
            if not status:
                event = check(api.cuEventCreate(0), "cuEventCreate")
                status = api.cuEventQuery(event)[0]
                api.cuEventDestroy(event)
        if status:
            raise self.driver.error(status, what)

    def part_of(self, stream: int) -> int:
        """The multiprocessors of the green context that `stream` belongs to; 0 for a stream of the whole device.

        Nothing is kept by handle, which a later stream gets again; and cuStreamGetId would end a capture.
        """
        if stream <= PER_THREAD:
            return 0
        api = self.driver.api
        failed, green = api.cuStreamGetGreenCtx(stream)
        if failed or not int(green):
            return 0  # after a failure the launch that follows has the error
        kind = api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return int(self.driver.check(api.cuGreenCtxGetDevResource(green, kind), "cuGreenCtxGetDevResource").sm.smCount)

    def _open(self, ordinal: int) -> Device:
        if not 0 <= ordinal < self.count:
            raise DriverError(f"device {ordinal}; this process sees devices 0 to {self.count - 1}; choose one of them")
        api, check = self.driver.api, self.driver.check
        handle, name, capability, sm_count = look_at(self.driver, ordinal)
        context = check(api.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
        sm_count = min(sm_count, self._limit(handle, context) or sm_count)
        return Device(ordinal, name, capability, sm_count, handle, context)

    def _limit(self, handle: Any, context: Any) -> int:
        """The multiprocessors that MPS leaves to `context`; 0 if it does not say."""
        api = self.driver.api
        kind = api.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
        failed, limited = api.cuDeviceGetExecAffinitySupport(kind, handle)
        if failed or not limited:
            return 0
        with self.driver.inside(context):
            failed, affinity = api.cuCtxGetExecAffinity(kind)
        return 0 if failed else int(affinity.param.smCount.val)

    def allocate(self, device: Device, size: int, what: str) -> int:
        """The address of `size` bytes for kernels, the device's context being current. what: how an error begins."""
        if self._allocator is None:
            return int(self.driver.check(self.driver.api.cuMemAlloc(size), what))
        return checked_address(self._allocator.allocate(size, device.ordinal), self._allocator)

    def free(self, device: Device, address: int) -> None:
        """Gives back what `allocate` returned."""
        if self._allocator is None:
            self.driver.check(self.driver.api.cuMemFree(address), "cuMemFree")
        else:
            self._allocator.free(address, device.ordinal)

    @contextmanager
    def active(self, device: Device) -> Iterator[None]:
        """Makes `device`'s context current inside, and restores the previous one."""
        if self.driver.is_inside(device.context):
            yield
            return
        with self.driver.inside(device.context):
            yield

    def synchronize(self, device: Device, what: str = "cuCtxSynchronize") -> None:
        """Returns when every stream of `device` is empty. what: how an error begins."""
        with self.active(device):
            self.driver.check(self.driver.api.cuCtxSynchronize(), what)

    def close(self) -> None:
        """Releases the primary contexts. Kernels of this library must not be used afterwards."""
        while self._devices:
            _, device = self._devices.popitem()
            self.driver.check(self.driver.api.cuDevicePrimaryCtxRelease(device.handle), "cuDevicePrimaryCtxRelease")

"""A recording driver for the C launcher: the functions that it looks up, as callbacks.

`Recorder.launches` holds what each cuLaunchKernelEx was handed. Tensor maps are encoded by fusekit's own encoder, so
their bytes are those of a real descriptor.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import Any

from fusekit.abi import LaunchRecord, RecordError
from fusekit.abi.parameters import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLE_BYTES
from fusekit.abi.tensormap import TensorMap, encode
from fusekit.dtypes import MAPS, by
from fusekit.store.entries import CUBIN_FORMAT

# The context of a device that knows no tensor maps.
NO_TENSOR_MAPS = 0x7777
# Where the first stock of workspaces begins, and how far after it the next.
WORKSPACE, STOCK_STEP = 0xABC000, 1 << 24
# What a driver refuses while a stream is captured, and the mode of a thread in which it does not.
UNSAFE = {"cuMemAlloc_v2", "cuMemFree_v2", "cuStreamSynchronize", "cuEventQuery", "cuLibraryLoadData"}
RELAXED = 2
KERNEL, FUNCTION = 0x3000, 0x4000  # handles of the first launch's
ATTRIBUTES = {2: "cooperative", 4: "cluster", 6: "serialization", 7: "programmatic", 8: "priority", 11: "preferred",
              12: "completion"}  # fmt: skip

_NUMBERS = by("number", MAPS)


class Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("padding", c_int), ("numbers", c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(Attribute)), ("count", c_uint),
    )  # fmt: skip


@dataclass
class Launched:
    """`parameters` are the bytes after each pointer, in order; `attributes` by name."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: dict[str, Any]
    parameters: list[bytes]
    context: int  # the current one, or 0
    function: int  # of which of the record's launches


class _Thread(threading.local):
    """What a driver keeps for each thread."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.capture_mode = 0  # global, as a thread begins


@dataclass
class Recorder:
    """The driver of one kernel of `record`, on a device of `sm_count` multiprocessors."""

    record: LaunchRecord
    sm_count: int = 132
    capability: tuple[int, int] = (9, 0)
    version: int = 13000
    missing: str = ""
    fail: dict[str, int] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    settings: dict[int, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # those not asked to by `fail`
    retained: int = 0
    loaded: int = 0
    cubin_format: int = -1  # of the cubin that was loaded last
    allocated: int = 0
    sm_counts: dict[int, int] = field(default_factory=dict)  # of devices that differ from the rest
    strict: bool = False  # a launch wants the kernel's context to be current, whatever the stream
    capturing: bool = False  # this thread captures a stream: what is unsafe is refused in any mode but relaxed
    sizes: list[int] = field(default_factory=list)  # of allocations
    filled: list[tuple[int, int]] = field(default_factory=list)
    active_clusters: int = 66
    most_launches: int = 1 << 30  # those after them fail
    recorded: dict[int, int] = field(default_factory=dict)  # the stream that an event was recorded in last
    waits: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # launches before, stream, the one that it waits for
    asked: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)  # for clusters

    def __post_init__(self) -> None:
        self._thread = _Thread()
        self._symbols = [launch.symbol for launch in self.record.launches]
        self._places = [
            sorted((item.offset, item.size) for item in launch.parameters) for launch in self.record.launches
        ]
        self._kept: dict[str, Any] = {}
        self.lookup = CFUNCTYPE(c_void_p, c_char_p, c_void_p)(self._lookup)

    @property
    def contexts(self) -> list[int]:
        """Those of this thread, the current one last."""
        return self._thread.contexts

    @property
    def capture_mode(self) -> int:
        return self._thread.capture_mode

    @capture_mode.setter
    def capture_mode(self, mode: int) -> None:
        self._thread.capture_mode = mode

    def _lookup(self, symbol: bytes, user: int | None) -> int | None:
        name = symbol.decode()
        if name == self.missing:
            return None
        if name not in self._kept:
            self._kept[name] = self._callback(name)
        return ctypes.cast(self._kept[name], c_void_p).value

    def _callback(self, name: str) -> Any:
        arguments, function = getattr(self, name)()

        def called(*values: Any) -> int:
            self.calls.append(name)
            if self.capturing and self.capture_mode != RELAXED and name in UNSAFE:
                return 900
            if name in self.fail:
                return self.fail[name]
            result = function(*values) or 0
            self.failed += [name] if result else []
            return result

        return CFUNCTYPE(c_int, *arguments)(called)

    # Each function below gives a driver function's argument types and what it does.

    def cuInit(self) -> Any:  # noqa: N802
        return (c_uint,), lambda flags: 0

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return (POINTER(c_int),), lambda out: _set(out, self.version)

    def cuGetErrorName(self) -> Any:  # noqa: N802
        return (c_int, POINTER(c_char_p)), lambda status, out: _set(out, b"CUDA_ERROR_TEST")

    def cuGetErrorString(self) -> Any:  # noqa: N802
        return (c_int, POINTER(c_char_p)), lambda status, out: _set(out, b"a test")

    def cuDeviceGet(self) -> Any:  # noqa: N802
        return (POINTER(c_int), c_int), lambda out, ordinal: _set(out, ordinal)

    def cuDeviceGetAttribute(self) -> Any:  # noqa: N802
        def attribute(out: Any, kind: int, device: int) -> int:
            count = self.sm_counts.get(device, self.sm_count)
            return _set(out, {16: count, 75: self.capability[0], 76: self.capability[1], 97: 232448}[kind])

        return (POINTER(c_int), c_int, c_int), attribute

    def cuDevicePrimaryCtxRetain(self) -> Any:  # noqa: N802
        def retain(out: Any, device: int) -> None:
            self.retained += 1
            _set(out, 0x1000 + device)

        return (POINTER(c_void_p), c_int), retain

    def cuDevicePrimaryCtxRelease_v2(self) -> Any:  # noqa: N802
        def release(device: int) -> None:
            self.retained -= 1

        return (c_int,), release

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return (POINTER(c_void_p),), lambda out: _set(out, self.contexts[-1] if self.contexts else None)

    def cuCtxPushCurrent_v2(self) -> Any:  # noqa: N802
        return (c_void_p,), lambda context: self.contexts.append(context)

    def cuCtxPopCurrent_v2(self) -> Any:  # noqa: N802
        return (POINTER(c_void_p),), lambda out: _set(out, self.contexts.pop())

    def cuLibraryLoadData(self) -> Any:  # noqa: N802
        def load(out: Any, code: int, *rest: Any) -> None:
            self.loaded += 1
            self.cubin_format = ctypes.string_at(code, CUBIN_FORMAT + 1)[CUBIN_FORMAT]
            _set(out, 0x2000)

        return (POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint), load

    def cuLibraryUnload(self) -> Any:  # noqa: N802
        def unload(library: int) -> None:
            self.loaded -= 1

        return (c_void_p,), unload

    def cuLibraryGetKernel(self) -> Any:  # noqa: N802
        def get(out: Any, library: int, name: bytes) -> int:
            if name.decode() not in self._symbols:
                return 500
            return _set(out, KERNEL + self._symbols.index(name.decode()))

        return (POINTER(c_void_p), c_void_p, c_char_p), get

    def cuKernelGetParamInfo(self) -> Any:  # noqa: N802
        def info(kernel: int, index: int, offset: Any, size: Any) -> int:
            if not self.contexts:
                return 201
            places = self._places[kernel - KERNEL]
            if index >= len(places):
                return 1
            _set(offset, places[index][0])
            return _set(size, places[index][1])

        return (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)), info

    def cuKernelSetAttribute(self) -> Any:  # noqa: N802
        return (c_int, c_int, c_void_p, c_int), lambda kind, value, kernel, device: self.settings.update({kind: value})

    def cuKernelGetAttribute(self) -> Any:  # noqa: N802
        return (POINTER(c_int), c_int, c_void_p, c_int), lambda out, kind, kernel, device: _set(out, {1: 1024}[kind])

    def cuKernelGetFunction(self) -> Any:  # noqa: N802
        return (POINTER(c_void_p), c_void_p), lambda out, kernel: _set(out, FUNCTION + kernel - KERNEL)

    def cuOccupancyMaxActiveClusters(self) -> Any:  # noqa: N802
        def active(out: Any, function: int, config: Any) -> int:
            if not self.contexts:
                return 201
            given = config.contents
            self.asked.append((function - FUNCTION, tuple(given.grid), tuple(given.block), given.shared))
            return _set(out, self.active_clusters)

        return (POINTER(c_int), c_void_p, POINTER(LaunchConfig)), active

    def cuTensorMapEncodeTiled(self) -> Any:  # noqa: N802
        sizes = POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint), POINTER(c_uint)

        def tiled(
            place: int, dtype: int, rank: int, address: int | None, dims: Any, strides: Any, box: Any, steps: Any,
            interleave: int, swizzle: int, promotion: int, fill: int,
        ) -> int:  # fmt: skip
            if not self.contexts:
                return 201
            if self.contexts[-1] == NO_TENSOR_MAPS:
                return 801
            tensor_map = TensorMap(
                address or 0, _NUMBERS[dtype], tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]),
                tuple(steps[:rank]), INTERLEAVES[interleave], tuple(SWIZZLE_BYTES)[swizzle], L2_PROMOTIONS[promotion],
                OOB_FILLS[fill],
            )  # fmt: skip
            assert place % 64 == 0
            try:
                ctypes.memmove(place, encode(tensor_map), 128)
            except RecordError:
                return 1
            return 0

        return (c_void_p, c_int, c_uint, c_void_p, *sizes, c_int, c_int, c_int, c_int), tiled

    def cuLaunchKernelEx(self) -> Any:  # noqa: N802
        def launch(config: Any, function: int, parameters: Any, extra: int) -> int:
            if self.strict and self.contexts[-1:] != [0x1000]:
                return 201
            if len(self.launches) == self.most_launches:
                return 719
            given = config.contents
            attributes: dict[str, Any] = {}
            for attribute in given.attributes[: given.count]:
                name = ATTRIBUTES[attribute.id]
                attributes[name] = tuple(attribute.numbers[:3]) if attribute.id in (4, 11) else attribute.numbers[0]
                if attribute.id in (7, 12):  # handle, flags, at_block_start
                    attributes[name] = struct.unpack_from("<qii", bytes(attribute.numbers))
            places = self._places[function - FUNCTION]
            values = [ctypes.string_at(parameters[n], size) for n, (_, size) in enumerate(places)]
            self.launches.append(
                Launched(
                    tuple(given.grid),
                    tuple(given.block),
                    given.shared,
                    given.stream or 0,
                    attributes,
                    values,
                    self.contexts[-1] if self.contexts else 0,
                    function - FUNCTION,
                )
            )
            return 0

        return (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), c_void_p), launch

    def cuMemAlloc_v2(self) -> Any:  # noqa: N802
        def allocate(out: Any, size: int) -> None:
            self.allocated += 1
            self.sizes.append(size)
            _set(out, WORKSPACE + STOCK_STEP * (self.calls.count("cuMemAlloc_v2") - 1))

        return (POINTER(c_ulonglong), c_size_t), allocate

    def cuMemFree_v2(self) -> Any:  # noqa: N802
        def free(address: int) -> None:
            self.allocated -= 1

        return (c_ulonglong,), free

    def cuMemsetD8Async(self) -> Any:  # noqa: N802
        def fill(address: int, value: int, count: int, stream: int) -> None:
            assert (value, stream) == (0, 0x5000)
            self.filled.append((address, count))

        return (c_ulonglong, ctypes.c_ubyte, c_size_t, c_void_p), fill

    def cuStreamCreate(self) -> Any:  # noqa: N802
        return (POINTER(c_void_p), c_uint), lambda out, flags: _set(out, 0x5000)

    def cuStreamSynchronize(self) -> Any:  # noqa: N802
        return (c_void_p,), lambda stream: 0

    def cuThreadExchangeStreamCaptureMode(self) -> Any:  # noqa: N802
        def exchange(mode: Any) -> None:
            self.capture_mode, mode[0] = mode[0], self.capture_mode

        return (POINTER(c_int),), exchange

    def cuStreamIsCapturing(self) -> Any:  # noqa: N802
        return (c_void_p, POINTER(c_int)), lambda stream, out: _set(out, 0)

    def cuEventCreate(self) -> Any:  # noqa: N802
        return (POINTER(c_void_p), c_uint), lambda out, flags: _set(out, 0x6000)

    def cuEventQuery(self) -> Any:  # noqa: N802
        return (c_void_p,), lambda event: 0

    def cuEventRecord(self) -> Any:  # noqa: N802
        def record(event: int, stream: int | None) -> None:
            self.recorded[event] = stream or 0

        return (c_void_p, c_void_p), record

    def cuStreamWaitEvent(self) -> Any:  # noqa: N802
        def wait(stream: int | None, event: int, flags: int) -> None:
            self.waits.append((len(self.launches), stream or 0, self.recorded[event]))

        return (c_void_p, c_void_p, c_uint), wait

    def cuEventDestroy_v2(self) -> Any:  # noqa: N802
        return (c_void_p,), lambda event: 0

    def cuStreamDestroy_v2(self) -> Any:  # noqa: N802
        return (c_void_p,), lambda stream: 0


def _set(out: Any, value: Any) -> int:
    out[0] = value
    return 0

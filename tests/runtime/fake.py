"""A stand-in for ``cuda.bindings.driver``: records what it is asked, keeps device memory in host buffers.

It behaves as the runtime relies on: (status, values...) tuples, IntEnum statuses, one current-context stack a thread,
parameters read through ``kernelParams`` at the moment of a launch. Nothing is computed.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from fusekit.abi.tensormap import TensorMap, encode_raw


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_MISALIGNED_ADDRESS = 716
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


OK = CUresult.CUDA_SUCCESS
GREEN = 5000  # the green context of a stream has its handle, and so much more
# What the driver calls potentially unsafe while a stream is captured.
UNSAFE = {
    "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuEventQuery", "cuStreamSynchronize",
    "cuLibraryLoadData", "cuLibraryUnload",
}  # fmt: skip
RELAXED, GLOBAL = "CU_STREAM_CAPTURE_MODE_RELAXED", "CU_STREAM_CAPTURE_MODE_GLOBAL"


class Names:
    """Any enum: members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class CUtensorMap:
    def __init__(self, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(data, 128)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._buffer)


@dataclass
class Launched:
    """One cuLaunchKernelEx: the grid as (x, y, z), each parameter's bytes, attribute id -> value, the context."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    attributes: dict[str, Any]
    parameters: list[bytes]
    function: Any
    context: int


@dataclass
class FakeDriver:
    """`parameters` are the (offset, size) pairs of the one kernel that every cubin contains, under `symbol`; `others`
    those of further ones, by symbol.
    """

    parameters: list[tuple[int, int]] = field(default_factory=list)
    symbol: str = "kernel"
    others: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    version: int = 13000
    devices: int = 1
    capability: tuple[int, int] = (9, 0)
    sm_count: int = 132
    calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # those not asked to by `fail`
    launches: list[Launched] = field(default_factory=list)
    encoded: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[tuple[str, int], int] = field(default_factory=dict)
    # Of devices that differ from the rest, by ordinal.
    capabilities: dict[int, tuple[int, int]] = field(default_factory=dict)
    sm_counts: dict[int, int] = field(default_factory=dict)
    affinity: int | None = None  # multiprocessors that MPS leaves to a context; None: there is no MPS
    # Whether a launch in a stream of its own wants that stream's context to be current as well.
    strict: bool = False
    retained: dict[int, int] = field(default_factory=dict)
    stream_contexts: dict[int, int] = field(default_factory=dict)
    greens: dict[int, int] = field(default_factory=dict)  # multiprocessors of the green context of a stream
    fail: dict[str, CUresult] = field(default_factory=dict)
    loaded: int = 0
    active_clusters: int = 66

    def __post_init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.mapped: set[int] = set()
        self.host_memory: dict[int, Any] = {}
        self.owner: dict[int, int] = {}
        self.captures: dict[int, tuple[str, int]] = {}  # by stream: mode, and the thread that began it
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self.CUresult = CUresult
        for enum in (
            "CUdevice_attribute", "CUfunction_attribute", "CUlaunchAttributeID", "CUpointer_attribute",
            "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion",
            "CUtensorMapFloatOOBfill", "CUstreamCaptureMode", "CUdevResourceType",
            "CUexecAffinityType",
        ):  # fmt: skip
            setattr(self, enum, Names())
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.on_launch: Callable[[Launched], None] = lambda launched: None
        self.cuuint32_t = self.cuuint64_t = int
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(
            value=SimpleNamespace(
                clusterDim=SimpleNamespace(),
                preferredClusterDim=SimpleNamespace(),
                programmaticEvent=SimpleNamespace(),
                launchCompletionEvent=SimpleNamespace(),
            )
        )

    def __getattribute__(self, name: str) -> Any:
        got = object.__getattribute__(self, name)
        if not name.startswith("cu") or name.startswith("cuuint"):
            return got

        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            status = self.fail.get(name)
            if name in UNSAFE and self._captured():
                self.captures = dict.fromkeys(self.captures, ("", 0))
                status = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            if status:
                return status, None
            result = got(*arguments)
            if result[0]:
                self.failed.append(name)
            return result

        return called

    # -- the driver and its devices

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return OK, self.version

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        return (OK,)

    def cuGetErrorName(self, status: CUresult) -> Any:  # noqa: N802
        return OK, CUresult(status).name.encode()

    def cuGetErrorString(self, status: CUresult) -> Any:  # noqa: N802
        return OK, f"text of {int(status)}".encode()

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return OK, self.devices

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return OK, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> Any:  # noqa: N802
        return OK, b"FAKE H200" + bytes(length - 9)

    def cuDeviceGetAttribute(self, kind: str, device: int) -> Any:  # noqa: N802
        major, minor = self.capabilities.get(device, self.capability)
        count = self.sm_counts.get(device, self.sm_count)
        values = {"CAPABILITY_MAJOR": major, "CAPABILITY_MINOR": minor, "MULTIPROCESSOR_COUNT": count}
        values |= {"CLOCK_RATE": 1_980_000, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448}
        return OK, next((value for key, value in values.items() if kind.endswith(key)), 0)

    # -- contexts

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def cuDeviceGetExecAffinitySupport(self, kind: str, device: int) -> Any:  # noqa: N802
        return OK, int(self.affinity is not None)

    def cuCtxGetExecAffinity(self, kind: str) -> Any:  # noqa: N802
        assert self.stack and kind.endswith("SM_COUNT")
        return OK, SimpleNamespace(param=SimpleNamespace(smCount=SimpleNamespace(val=self.affinity)))

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        self.retained[device] = self.retained.get(device, 0) + 1
        return OK, 1000 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:  # noqa: N802
        self.retained[device] -= 1
        return (OK,)

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return OK, self.stack[-1] if self.stack else 0

    def cuCtxPushCurrent(self, context: int) -> Any:  # noqa: N802
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        return OK, self.stack.pop()

    def cuCtxGetDevice(self) -> Any:  # noqa: N802
        return OK, self.stack[-1] - 1000

    def cuCtxSynchronize(self) -> Any:  # noqa: N802
        return (OK,)

    def cuStreamGetCtx(self, stream: int) -> Any:  # noqa: N802
        return OK, self.stream_contexts.get(stream, 1000)

    def cuStreamGetGreenCtx(self, stream: int) -> Any:  # noqa: N802
        context = self.stack[-1] if stream <= 2 and self.stack else GREEN + stream
        return OK, context if context - GREEN in self.greens else 0

    def cuGreenCtxGetDevResource(self, context: int, kind: str) -> Any:  # noqa: N802
        assert kind.endswith("SM")
        return OK, SimpleNamespace(sm=SimpleNamespace(smCount=self.greens[context - GREEN]))

    # -- kernels

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:  # noqa: N802
        self.loaded += 1
        return OK, f"library {next(self._numbers)}"

    def cuLibraryUnload(self, library: Any) -> Any:  # noqa: N802
        self.loaded -= 1
        return (OK,)

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:  # noqa: N802
        symbol = name.decode()
        known = symbol == self.symbol or symbol in self.others
        return (OK, symbol) if known else (CUresult.CUDA_ERROR_NOT_FOUND, None)

    def parameters_of(self, symbol: str) -> list[tuple[int, int]]:
        return sorted(self.parameters if symbol == self.symbol else self.others[symbol])

    def cuKernelGetParamInfo(self, kernel: Any, index: int) -> Any:  # noqa: N802
        if not self.stack:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None
        places = self.parameters_of(kernel)
        if index >= len(places):
            return CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return (OK, *places[index])

    def cuKernelSetAttribute(self, kind: str, value: int, kernel: Any, device: int) -> Any:  # noqa: N802
        self.settings[kind, device] = value
        return (OK,)

    def cuKernelGetAttribute(self, kind: str, kernel: Any, device: int) -> Any:  # noqa: N802
        return OK, {"CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1024}[kind]

    def cuKernelGetFunction(self, kernel: Any) -> Any:  # noqa: N802
        return OK, (kernel, self.stack[-1])

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> Any:  # noqa: N802
        return OK, self.active_clusters

    def cuTensorMapEncodeTiled(self, *fields: Any) -> Any:  # noqa: N802
        names = (
            "dtype", "rank", "address", "dims", "strides", "box", "element_strides", "interleave", "swizzle",
            "promotion", "fill",
        )  # fmt: skip
        if not self.stack:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        if self.capabilities.get(self.stack[-1] - 1000, self.capability) < (9, 0):
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        self.encoded.append(given := dict(zip(names, fields, strict=True)))
        dims, strides, box, steps = (tuple(given[name]) for name in ("dims", "strides", "box", "element_strides"))
        data = encode_raw(TensorMap(given["address"], "u8", dims, strides[: len(dims) - 1], box, steps))
        return OK, CUtensorMap(data[:64] + struct.pack("<Q", len(self.encoded)))  # where the driver's own notes are

    def cuTensorMapReplaceAddress(self, tensor_map: CUtensorMap, address: int) -> Any:  # noqa: N802
        if not self.stack:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if not address:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        ctypes.memmove(tensor_map.getPtr(), struct.pack("<Q", address), 8)
        return (OK,)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:  # noqa: N802
        if function is None:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        context = self.stream_contexts.get(config.hStream, 1000) if config.hStream > 2 else (self.stack or [0])[-1]
        if function[1] != context or (self.strict and self.stack[-1:] != [context]):
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        sizes = [size for _, size in self.parameters_of(function[0])]
        pointers = (ctypes.c_void_p * max(len(sizes), 1)).from_address(parameters) if sizes else []
        values = {
            "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": lambda value: _dims(value.clusterDim),
            "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION": lambda value: _dims(value.preferredClusterDim),
            "CU_LAUNCH_ATTRIBUTE_PRIORITY": lambda value: value.priority,
            "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": lambda value: value.cooperative,
            "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": lambda value: (
                value.programmaticStreamSerializationAllowed
            ),
            "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT": lambda value: (
                value.programmaticEvent.event, value.programmaticEvent.flags,
                value.programmaticEvent.triggerAtBlockStart,
            ),
            "CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT": lambda value: (
                value.launchCompletionEvent.event, value.launchCompletionEvent.flags, 0
            ),
        }  # fmt: skip
        assert config.numAttrs == len(config.attrs)
        launched = Launched(
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            shared=config.sharedMemBytes,
            stream=config.hStream,
            attributes={attribute.id: values[attribute.id](attribute.value) for attribute in config.attrs},
            parameters=[ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)],
            function=function,
            context=context,
        )
        self.launches.append(launched)
        self.on_launch(launched)
        return (OK,)

    # -- streams, captures and events

    @property
    def capture_mode(self) -> str:
        return getattr(self._local, "capture_mode", GLOBAL)

    def _captured(self) -> bool:
        """Whether what is unsafe is refused: for a capture of this thread's, or one of another's that is global."""
        if self.capture_mode == RELAXED:
            return False
        forbidden = any(mode != RELAXED and thread == threading.get_ident() for mode, thread in self.captures.values())
        return forbidden or (self.capture_mode == GLOBAL and any(mode == GLOBAL for mode, _ in self.captures.values()))

    def cuStreamBeginCapture(self, stream: int, mode: str) -> Any:  # noqa: N802
        self.captures[stream] = mode, threading.get_ident()
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Any:  # noqa: N802
        mode, _ = self.captures.pop(stream)
        return (OK, "graph") if mode else (CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None)

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, 4096 + next(self._numbers)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> Any:  # noqa: N802
        before, self._local.capture_mode = self.capture_mode, mode
        return OK, before

    def cuEventQuery(self, event: int) -> Any:  # noqa: N802
        return (OK,)

    def cuStreamIsCapturing(self, stream: int) -> Any:  # noqa: N802
        return OK, int(stream in self.captures)

    def cuStreamDestroy(self, stream: int) -> Any:  # noqa: N802
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        return (OK,)

    def cuEventCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, next(self._numbers)

    def cuEventDestroy(self, event: int) -> Any:  # noqa: N802
        return (OK,)

    def cuEventRecord(self, event: int, stream: int) -> Any:  # noqa: N802
        return (OK,)

    def cuEventElapsedTime(self, start: int, end: int) -> Any:  # noqa: N802
        return OK, 2.0

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> Any:  # noqa: N802
        return (OK,)

    # -- memory

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        buffer = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.memory[address] = buffer
        self.owner[address] = self.stack[-1] - 1000
        return OK, address

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:  # noqa: N802
        buffer = ctypes.create_string_buffer(b"\xff" * (size + 64))
        address = -(-ctypes.addressof(buffer) // 64) * 64
        self.host_memory[address] = buffer
        return OK, address

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> Any:  # noqa: N802
        return (OK, host) if host in self.host_memory else (CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def cuMemFreeHost(self, host: int) -> Any:  # noqa: N802
        del self.host_memory[host]
        return (OK,)

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        del self.memory[address]
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, count: int) -> Any:  # noqa: N802
        ctypes.memset(address, value, count)
        return (OK,)

    def cuMemcpyHtoD(self, target: int, source: Any, count: int) -> Any:  # noqa: N802
        ctypes.memmove(target, bytes(memoryview(source).cast("B")), count)
        return (OK,)

    def cuMemcpyDtoD(self, target: int, source: int, count: int) -> Any:  # noqa: N802
        ctypes.memmove(target, source, count)
        return (OK,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, count: int, stream: int) -> Any:  # noqa: N802
        ctypes.memmove(target, source, count)
        return (OK,)

    cuMemcpyDtoH = cuMemcpyDtoD  # noqa: N815

    def cuPointerGetAttribute(self, kind: str, address: int) -> Any:  # noqa: N802
        if address not in self.owner:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        mapped = address in self.mapped  # by hand, so that no context owns it
        if kind.endswith("CONTEXT"):
            return OK, 0 if mapped else 1000 + self.owner[address]
        return OK, self.owner[address] if mapped else 0  # as a driver was seen to answer


def _dims(value: Any) -> tuple[int, int, int]:
    return value.x, value.y, value.z

"""Running a prepared launch on the GPU: buffers up, kernel, buffers down; a hung or crashed kernel is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fusekit.library import Library
from fusekit.runtime import DeviceArray, Kernel
from fusekit.spec import KernelSpec

from .cases import Case
from .harness import Buffer, Launch, differences, faults, in_place, laid_over, prepare

TYPESTRS = {"bf16": "<V2", "fp16": "<f2", "f32": "<f4", "i32": "<i4"}
SIZES = {"bf16": 2, "fp16": 2, "f32": 4, "i32": 4, "e4m3": 1, "e5m2": 1}
SECONDS = 60.0  # a launch of these tests takes milliseconds; one that takes longer than this never ends
NOT_READY = 600


@dataclass(frozen=True)
class View:
    """A tensor somewhere inside device memory, by ``__cuda_array_interface__``. Strides are in elements."""

    memory: DeviceArray
    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = SIZES[self.dtype]
        return {
            "version": 3,
            "typestr": TYPESTRS[self.dtype],
            "data": (self.memory.data_ptr() + self.offset, False),
            "shape": self.shape,
            "strides": None if self.strides is None else tuple(stride * size for stride in self.strides),
        }


@dataclass(frozen=True)
class CodeView:
    """The same of FP8 values, which array interfaces have no name for: a tensor as frameworks have it."""

    memory: DeviceArray
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0

    def data_ptr(self) -> int:
        return self.memory.data_ptr() + self.offset

    def stride(self) -> tuple[int, ...]:
        return self.strides


class Gpu:
    """Device 0 with the kernels of the store. ``give_up(message)`` ends the process: its context is lost."""

    def __init__(self, library: Library, give_up: Callable[[str], None]) -> None:
        self.library = library
        self.devices = library.devices
        self.driver = library.devices.driver
        self.api = self.driver.api
        self.give_up = give_up
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The spec's kernel, loaded once."""
        if spec.full_name not in self._kernels:
            if not self.library.store.names(f"{spec.file}/*"):
                pytest.skip(f"no kernels of {spec.file}.toml in {self.library}; build it there")
            self._kernels[spec.full_name] = self.library.load(spec.full_name)
        return self._kernels[spec.full_name]

    def array(self, nbytes: int, byte: int | None = None) -> DeviceArray:
        """Raw device memory, filled with ``byte`` if there is one."""
        memory = DeviceArray(self.devices, (nbytes,), "u8")
        if byte is not None:
            memory.fill(byte)
        return memory

    def place(self, buffer: Buffer) -> View:
        """``buffer`` with its guards on the device."""
        memory = self.array(buffer.image.nbytes)
        memory.upload(buffer.image)
        kind = View if buffer.dtype in TYPESTRS else CodeView
        return kind(memory, buffer.guard, buffer.dtype, buffer.shape, buffer.strides)

    def arguments(self, launch: Launch) -> dict[str, View | float]:
        """Every argument of the launch, tensors placed on the device."""
        return {
            name: self.place(value) if isinstance(value, Buffer) else value for name, value in launch.arguments.items()
        }

    def upload(self, launch: Launch, placed: dict[str, View | float]) -> None:
        """Puts the launch's buffers into memory that another launch of the same shapes has placed."""
        for name, buffer in launch.arguments.items():
            if isinstance(buffer, Buffer):
                placed[name].memory.upload(buffer.image)
        self.driver.check(self.api.cuCtxSynchronize(), "cuCtxSynchronize")  # a copy from pageable memory returns early

    def download(self, launch: Launch, placed: dict[str, View | float]) -> None:
        """Outputs back into the launch's buffers."""
        for name in launch.outputs:
            launch.arguments[name].image[:] = np.frombuffer(placed[name].memory.download(), np.uint8)

    def trial(self, spec: KernelSpec, case: Case) -> list[str]:
        """What is wrong with the kernel in this case: outputs, strays, changed inputs, other bits in a second run, also
        in one whose output lies over the input that it may lie over.
        """
        kernel, launch = self.kernel(spec), prepare(spec, case)
        placed = self.arguments(launch)
        second = launch.fresh()
        for run in (launch, second):
            for name in launch.outputs:
                placed[name].memory.upload(run.arguments[name].image)
            kernel(**placed, cluster_margin=case.margin)
            self.finish(f"{spec.full_name} in case {case.name}")
            self.download(run, placed)
        result = faults(launch) + differences(launch, second) + self._changed(launch, placed)
        for tensor in kernel.record.tensors:
            if tensor.in_place_of:
                third, over = in_place(launch, tensor.name, tensor.in_place_of), placed[tensor.in_place_of]
                for name in third.outputs:
                    placed[name].memory.upload(third.arguments[name].image)
                over.memory.upload(third.arguments[tensor.name].image)
                kernel(**placed | {tensor.name: over}, cluster_margin=case.margin)
                self.finish(f"{spec.full_name} in place, in case {case.name}")
                self.download(third, placed | {tensor.name: over})
                result += differences(laid_over(launch, tensor.name, tensor.in_place_of), third)
        return result

    def _changed(self, launch: Launch, placed: dict[str, View | float]) -> list[str]:
        if launch.case.sample is not None:
            return []
        return [
            f"{name}: an input was changed"
            for name, buffer in launch.arguments.items()
            if isinstance(buffer, Buffer)
            and name not in launch.outputs
            and placed[name].memory.download() != buffer.image.tobytes()
        ]

    def finish(self, what: str, stream: int = 0) -> None:
        """Waits for the stream; a kernel that crashed or does not end is named and ends the run."""
        deadline = time.monotonic() + SECONDS
        while (status := self.api.cuStreamQuery(stream)[0]) == NOT_READY:
            if time.monotonic() > deadline:
                self.give_up(f"{what} did not end within {SECONDS:.0f} s")
        if status:
            self.give_up(f"{what}: {self.driver.error(status, 'the kernel')}")

    def write(self, memory: DeviceArray, start: int, data: np.ndarray) -> None:
        """Copies ``data`` to byte ``start`` of ``memory``."""
        data = np.ascontiguousarray(data)
        if start < 0 or start + data.nbytes > memory.nbytes:
            raise ValueError(f"bytes {start} to {start + data.nbytes} of an allocation of {memory.nbytes}")
        self.driver.check(
            self.api.cuMemcpyHtoD(memory.data_ptr() + start, data.ctypes.data, data.nbytes), "cuMemcpyHtoD"
        )

    @contextmanager
    def stream(self) -> Iterator[int]:
        """A non-blocking stream's handle."""
        flags = int(self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = self.driver.check(self.api.cuStreamCreate(flags), "cuStreamCreate")
        try:
            yield int(handle)
        finally:
            self.driver.check(self.api.cuStreamDestroy(handle), "cuStreamDestroy")

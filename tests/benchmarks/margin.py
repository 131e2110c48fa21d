"""A GEMM next to a communication kernel, with and without reserved SMs (cluster_margin).

    python tests/benchmarks/run.py margin NAME [--rows M] [--copy-sms 16] [--margins 0,8,16,32]

On a second stream of high priority, a copy kernel of one block on each of `--copy-sms` multiprocessors moves data for
about two thirds of the GEMM's time, as a collective's kernel does. It fills a multiprocessor, so without a margin it
takes places that the persistent GEMM counts on (or waits for them to end). Both orders are measured: the copy is queued
first, or second. Prints one JSON document: for each margin, counted in multiprocessors, the median time in ms until
both are done (`step`), until the GEMM is, and until the copy is.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from fusekit.bench.arrays import Tensors, sizes_of
from fusekit.bench.timing import median, own_stream
from fusekit.errors import UsageError
from fusekit.library import Library, open_library
from fusekit.runtime import DeviceArray, Kernel

ROUNDS = 15
COPY_THREADS = 1024
SHARE = 2 / 3
# Grid-stride copy of `count` bytes, 16 at a time; written out because nothing may be compiled where this runs.
COPY = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry copy(.param .u64 target, .param .u64 source, .param .u64 count)
{
    .reg .pred %p;
    .reg .b32 %r<9>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [target];
    ld.param.u64 %d2, [source];
    ld.param.u64 %d3, [count];
    cvta.to.global.u64 %d1, %d1;
    cvta.to.global.u64 %d2, %d2;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mul.wide.u32 %d4, %r1, 16;
    mul.lo.u32 %r4, %r4, %r2;
    mul.wide.u32 %d5, %r4, 16;
AGAIN:
    setp.ge.u64 %p, %d4, %d3;
    @%p bra DONE;
    add.s64 %d6, %d2, %d4;
    ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%d6];
    add.s64 %d7, %d1, %d4;
    st.global.v4.u32 [%d7], {%r5, %r6, %r7, %r8};
    add.s64 %d4, %d4, %d5;
    bra AGAIN;
DONE:
    ret;
}
\0"""


class Copier:
    """The copy kernel and its two buffers of `nbytes`."""

    def __init__(self, library: Library, device: int, nbytes: int, blocks: int) -> None:
        self._devices = library.devices
        driver = self._devices.driver
        api, check = driver.api, driver.check
        self.nbytes = nbytes
        self._arrays = [DeviceArray(self._devices, (nbytes,), "u8", device) for _ in range(2)]
        self._library = check(
            api.cuLibraryLoadData(COPY, None, None, 0, None, None, 0), "cuLibraryLoadData of the copy"
        )
        kernel = check(api.cuLibraryGetKernel(self._library, b"copy"), "cuLibraryGetKernel")
        self._function = check(api.cuKernelGetFunction(kernel), "cuKernelGetFunction")
        self._config = api.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = blocks, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = COPY_THREADS, 1, 1

    def __call__(self, stream: int, nbytes: int) -> None:
        import ctypes

        driver = self._devices.driver
        self._config.hStream = stream
        values = (*(array.data_ptr() for array in self._arrays), nbytes)
        driver.check(
            driver.api.cuLaunchKernelEx(self._config, self._function, (values, (ctypes.c_uint64,) * 3), 0), "the copy"
        )

    def close(self) -> None:
        for array in self._arrays:
            array.free()
        self._devices.driver.check(self._devices.driver.api.cuLibraryUnload(self._library), "cuLibraryUnload")


class Race:
    """A GEMM and a copy that start together on two streams."""

    def __init__(self, library: Library, kernel: Kernel, tensors: dict[str, Any], copier: Copier) -> None:
        driver = library.devices.driver
        self.api, self.check = driver.api, driver.check
        self.kernel, self.tensors, self.copier = kernel, tensors, copier
        self.copied = copier.nbytes
        _, greatest = self.check(self.api.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
        flags = int(self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.streams = [
            int(self.check(self.api.cuStreamCreateWithPriority(flags, priority), "cuStreamCreateWithPriority"))
            for priority in (0, greatest)
        ]
        self.events = [self.check(self.api.cuEventCreate(0), "cuEventCreate") for _ in range(4)]

    def once(self, launch: Any, order: str) -> dict[str, float]:
        """Milliseconds from the common start. order: which is queued, and in which order: "gemm", "copy", ..."""
        api, check = self.api, self.check
        start, *ends = self.events[0], self.events[1], self.events[2]
        check(api.cuEventRecord(start, self.streams[0]), "cuEventRecord")
        check(api.cuStreamWaitEvent(self.streams[1], start, 0), "cuStreamWaitEvent")
        for what in order.split("+"):
            if what == "gemm":
                launch(self.streams[0])
                check(api.cuEventRecord(ends[0], self.streams[0]), "cuEventRecord")
            else:
                self.copier(self.streams[1], self.copied)
                check(api.cuEventRecord(ends[1], self.streams[1]), "cuEventRecord")
        for stream in self.streams:
            check(api.cuStreamSynchronize(stream), "cuStreamSynchronize")
        times = {}
        for what, end in zip(("gemm", "copy"), ends, strict=True):
            if what in order:
                times[what] = float(check(api.cuEventElapsedTime(start, end), "cuEventElapsedTime"))
        return times | {"step": max(times.values())}

    def median(self, margin: int, order: str) -> dict[str, float]:
        launch = self.kernel.bind(**self.tensors, cluster_margin=margin)
        for _ in range(2):
            self.once(launch, order)
        runs = [self.once(launch, order) for _ in range(ROUNDS)]
        return {key: round(median([run[key] for run in runs]), 4) for key in runs[0]}

    def close(self) -> None:
        for stream in self.streams:
            self.check(self.api.cuStreamDestroy(stream), "cuStreamDestroy")
        for event in self.events:
            self.check(self.api.cuEventDestroy(event), "cuEventDestroy")


def measure(name: str, rows: int, copy_sms: int, margins: Sequence[int]) -> dict[str, Any]:
    """The document that the module prints. margins: in multiprocessors."""
    library = open_library()
    kernel = library.load(name)
    problem = kernel.spec.get("problem")
    if not problem:
        raise UsageError(f"{kernel.name} names no problem; choose a kernel whose spec does")
    given = {**problem, "M": rows}
    device = library.devices.get(kernel.device)
    size = kernel.record.cluster[0] * kernel.record.cluster[1] * kernel.record.cluster[2]
    with library.devices.active(device), own_stream(library.devices, device):
        tensors = Tensors(library.devices, kernel, given, sizes_of("even", rows, given["E"]))
        copier = Copier(library, kernel.device, 1 << 31, copy_sms)
        race = Race(library, kernel, tensors.arguments, copier)
        try:
            alone = race.median(0, "gemm")["step"]
            whole = race.median(0, "copy")["step"]
            race.copied = int(copier.nbytes * min(1.0, SHARE * alone / whole)) // 16 * 16
            document: dict[str, Any] = {
                "name": kernel.name, "device": device.name, "rows": rows, "sms": device.sm_count, "cluster": size,
                "copy_sms": copy_sms, "gemm_alone_ms": alone, "copy_alone_ms": race.median(0, "copy")["step"],
                "copy_gbs": 0.0, "margins": [],
            }  # fmt: skip
            document["copy_gbs"] = round(2 * race.copied / document["copy_alone_ms"] / 1e6, 1)
            for sms in margins:
                clusters = -(-sms // size)
                document["margins"].append(
                    {
                        "margin_sms": sms,
                        "cluster_margin": clusters,
                        "gemm_alone_ms": race.median(clusters, "gemm")["step"],
                        "copy_first": race.median(clusters, "copy+gemm"),
                        "gemm_first": race.median(clusters, "gemm+copy"),
                    }
                )
        finally:
            race.close()
            copier.close()
            tensors.free()
            kernel.unload()
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="A GEMM next to a communication kernel.")
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--copy-sms", type=int, default=16)
    parser.add_argument("--margins", default="0,8,16,32", help="in multiprocessors")
    given = parser.parse_args(arguments)
    margins = [int(margin) for margin in given.margins.split(",")]
    json.dump(measure(given.name, given.rows, given.copy_sms, margins), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0

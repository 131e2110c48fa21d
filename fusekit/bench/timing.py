"""Device time of a launch by CUDA events, and host time by the clock.

Every timed launch finds an L2 cache full of something else: a buffer of twice its size is overwritten before the start
event, in the same stream. So weights come from memory, as they do in a model whose layers take turns. No CUDA graph is
involved: events stand right around one launch, whose own start costs are part of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fusekit.runtime import Device, Devices

_TARGET_MS = 300.0
_SAMPLES = (10, 200)
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """`ms`: median device time. `best_ms`: the least. `host_us`: median host time of queueing one launch."""

    ms: float
    best_ms: float
    samples: int
    host_us: float


@contextmanager
def own_stream(devices: Devices, device: Device) -> Iterator[int]:
    """The handle of a new stream of `device` that does not wait for the default stream; destroyed afterwards."""
    api, check = devices.driver.api, devices.driver.check
    with devices.active(device):
        stream = check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate")
        try:
            yield int(stream)
        finally:
            check(api.cuStreamDestroy(stream), "cuStreamDestroy")


def time_launch(devices: Devices, device: Device, launch: Callable[[int], Any], stream: int) -> Timing:
    """Times `launch(stream)`, which queues one launch on `device`: 10 to 200 of them, about 0.3 s of device time."""
    driver = devices.driver
    api, check = driver.api, driver.check
    with devices.active(device):
        kind = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        flush_bytes = 2 * int(check(api.cuDeviceGetAttribute(kind, device.handle), "cuDeviceGetAttribute"))
        flush = check(api.cuMemAlloc(max(flush_bytes, 1)), "cuMemAlloc")
        events = [check(api.cuEventCreate(0), "cuEventCreate") for _ in range(2 * _SAMPLES[1])]
        try:

            def run(count: int) -> list[float]:
                pairs = list(zip(events[: 2 * count : 2], events[1 : 2 * count : 2], strict=True))
                for start, end in pairs:
                    check(api.cuMemsetD8Async(flush, 0, flush_bytes, stream), "cuMemsetD8Async")
                    check(api.cuEventRecord(start, stream), "cuEventRecord")
                    launch(stream)
                    check(api.cuEventRecord(end, stream), "cuEventRecord")
                check(api.cuStreamSynchronize(stream), "cuStreamSynchronize")
                return [check(api.cuEventElapsedTime(*pair), "cuEventElapsedTime") for pair in pairs]

            estimate = max(_median(run(_WARM_UP)), 1e-3)
            times = run(min(max(int(_TARGET_MS / estimate), _SAMPLES[0]), _SAMPLES[1]))
            host_us = _host_us(launch, stream, lambda: check(api.cuStreamSynchronize(stream), "cuStreamSynchronize"))
        finally:
            for event in events:
                check(api.cuEventDestroy(event), "cuEventDestroy")
            check(api.cuMemFree(flush), "cuMemFree")
    return Timing(_median(times), min(times), len(times), host_us)


def _median(values: Sequence[float]) -> float:
    # Not the module statistics: importing it would be a good part of a cold start.
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _host_us(launch: Callable[[int], Any], stream: int, wait: Callable[[], Any]) -> float:
    """The median of rounds of 20 launches: few enough that the driver's queue never fills and makes the host wait."""
    rounds = []
    for _ in range(15):
        wait()
        start = time.perf_counter()
        for _ in range(20):
            launch(stream)
        rounds.append((time.perf_counter() - start) / 20)
    wait()
    return _median(rounds) * 1e6

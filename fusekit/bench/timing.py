"""Device time of launches by CUDA events, and host time by the clock.

Every timed launch finds an L2 cache full of something else: a buffer of twice its size is overwritten before the start
event, in the same stream. So weights come from memory, as they do in a model whose layers take turns. No CUDA graph is
involved: events stand right around one launch, whose own start costs are part of the time.

What is compared is timed in rounds, each of which does everything once and begins with another one than the round
before: clocks and temperature, which follow what ran last, are then the same for all. Or it is timed steady: each alone
for a while, at the clock that its own power leaves it. Where tensor cores are busy enough to reach the device's power
limit, that favours the kernel that takes less energy, as a training step does that has no pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fusekit.runtime import Device, Devices

Run = Callable[[int], Any]  # queues its work in the stream of that handle

_TARGET_MS = 300.0
_SAMPLES = (10, 200)
_WARM_UP = 3
_TURNS = 2
ROUND = 20  # launches of a round of `host_us`


@dataclass(frozen=True, slots=True)
class Timing:
    """`ms`: median device time. `host_us`: median host time of queueing one launch."""

    ms: float
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


def device_clock(devices: Devices, device: Device) -> int | None:
    """The highest clock of the multiprocessors of `device`, in MHz; None if the driver gives none. Where power is the
    limit, they run below it.
    """
    api, check = devices.driver.api, devices.driver.check
    kind = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE  # in kHz
    return int(check(api.cuDeviceGetAttribute(kind, device.handle), "cuDeviceGetAttribute CLOCK_RATE")) // 1000 or None


class Stopwatch:
    """Times work in one stream of `device`, L2 overwritten before each; a context manager that makes its events and
    the buffer for that. `device`'s context is current inside.
    """

    def __init__(self, devices: Devices, device: Device, stream: int) -> None:
        self._devices, self._device, self._stream = devices, device, stream
        self._api, self._check = devices.driver.api, devices.driver.check
        self._events: list[Any] = []

    def __enter__(self) -> Stopwatch:
        self._active = self._devices.active(self._device)
        self._active.__enter__()
        kind = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        size = self._check(self._api.cuDeviceGetAttribute(kind, self._device.handle), "cuDeviceGetAttribute")
        self._flush_bytes = 2 * int(size)
        self._flush = self._check(self._api.cuMemAlloc(max(self._flush_bytes, 1)), "cuMemAlloc")
        return self

    def __exit__(self, *problem: object) -> None:
        while self._events:
            self._check(self._api.cuEventDestroy(self._events.pop()), "cuEventDestroy")
        self._check(self._api.cuMemFree(self._flush), "cuMemFree")
        self._active.__exit__(None, None, None)

    def wait(self) -> None:
        """Until the stream is empty."""
        self._check(self._api.cuStreamSynchronize(self._stream), "cuStreamSynchronize")

    def rounds(self, runs: Sequence[Run], count: int) -> list[list[float]]:
        """Milliseconds of each of `runs` in each of `count` rounds."""
        api, check, stream = self._api, self._check, self._stream
        while len(self._events) < 2 * count * len(runs):
            self._events.append(check(api.cuEventCreate(0), "cuEventCreate"))
        fresh = iter(self._events)
        pairs: list[list[tuple[Any, Any]]] = [[] for _ in runs]
        for number in range(count):
            for index in [*range(number % len(runs), len(runs)), *range(number % len(runs))]:
                pair = next(fresh), next(fresh)
                check(api.cuMemsetD8Async(self._flush, 0, self._flush_bytes, stream), "cuMemsetD8Async")
                check(api.cuEventRecord(pair[0], stream), "cuEventRecord")
                runs[index](stream)
                check(api.cuEventRecord(pair[1], stream), "cuEventRecord")
                pairs[index].append(pair)
        self.wait()
        return [[check(api.cuEventElapsedTime(*pair), "cuEventElapsedTime") for pair in turn] for turn in pairs]

    def compare(
        self, runs: Sequence[Run], target_ms: float = _TARGET_MS, least: int = _SAMPLES[0]
    ) -> list[list[float]]:
        """`rounds` after a warm-up: as many as fit into `target_ms` of device time, `least` to 200."""
        estimates = [median(times) for times in self.rounds(runs, _WARM_UP)]
        return self.rounds(runs, min(max(int(target_ms / max(sum(estimates), 1e-3)), least), _SAMPLES[1]))

    def steady(self, runs: Sequence[Run], target_ms: float) -> list[list[float]]:
        """Milliseconds of each of `runs`, which has the device to itself for `target_ms`, in two turns. The first half
        of a turn is not counted: the clock follows the power of the last tenth of a second.
        """
        times: list[list[float]] = [[] for _ in runs]
        counts = [
            max(int(target_ms / (2 * _TURNS) / max(median(self.rounds([run], _WARM_UP)[0]), 1e-3)), 2) for run in runs
        ]
        for _ in range(_TURNS):
            for run, count, samples in zip(runs, counts, times, strict=True):
                self.rounds([run], count)
                samples += self.rounds([run], count)[0]
        return times


def time_launch(devices: Devices, device: Device, launch: Run, stream: int) -> Timing:
    """Times `launch(stream)`, which queues one launch on `device`: 10 to 200 of them, about 0.3 s of device time."""
    with Stopwatch(devices, device, stream) as watch:
        (times,) = watch.compare([launch])
        return Timing(median(times), host_us(lambda: launch(stream), watch.wait))


def median(values: Sequence[float]) -> float:
    """The median of one or more values."""
    # Not the module statistics: importing it would be a good part of a cold start.
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def host_us(work: Callable[[], Any], wait: Callable[[], Any], rounds: int = 15, warm_up: int = 0) -> float:
    """Microseconds of one `work()`, which queues a launch: the median of rounds of `ROUND`, few enough that the
    driver's queue never fills and makes the host wait. `wait()` empties the stream between rounds.
    """
    times = []
    for _ in range(warm_up + rounds):
        wait()
        start = time.perf_counter_ns()
        for _ in range(ROUND):
            work()
        times.append((time.perf_counter_ns() - start) / ROUND)
    wait()
    return median(times[warm_up:]) / 1e3

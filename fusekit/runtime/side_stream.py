"""Launches on a side stream, forked and joined by events, so that a CUDA graph captures them, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fusekit.runtime.launch import Launch, Launches, LaunchSequence

if TYPE_CHECKING:
    from fusekit.runtime.debug import Annotate
    from fusekit.runtime.devices import Devices

Queue = Callable[[int], None]  # queues a launch on the stream with that handle
_FIRST = -5  # more urgent than any stream is: the driver takes the most urgent that it has
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING


class SideStream:
    """A stream of a device next to the caller's. It belongs to one thread at a time."""

    def __init__(self, devices: Devices, ordinal: int) -> None:
        self._devices, self._device = devices, devices.get(ordinal)
        api, check = devices.driver.api, devices.driver.check
        with devices.active(self._device), devices.apart(capturing=True):
            flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._stream = int(check(api.cuStreamCreateWithPriority(flags, _FIRST), "cuStreamCreateWithPriority"))
            self._begin, self._end = (check(api.cuEventCreate(_UNTIMED), "cuEventCreate") for _ in range(2))
        self._queued = False

    def queue(self, launch: Queue, stream: int) -> None:
        """Queues the launch here, after what `stream` holds. `stream` first joins what was queued here before."""
        self.join(stream)
        api, check = self._devices.driver.api, self._devices.driver.check
        with self._devices.active(self._device):
            check(api.cuEventRecord(self._begin, stream), "cuEventRecord")
            check(api.cuStreamWaitEvent(self._stream, self._begin, 0), "cuStreamWaitEvent")
            launch(self._stream)
            check(api.cuEventRecord(self._end, self._stream), "cuEventRecord")
        self._queued = True

    def join(self, stream: int) -> None:
        """Lets `stream` wait for what was queued here."""
        if self._queued:
            self._queued = False
            with self._devices.active(self._device):
                api, check = self._devices.driver.api, self._devices.driver.check
                check(api.cuStreamWaitEvent(stream, self._end, 0), "cuStreamWaitEvent")

    def close(self) -> None:
        """Destroys the stream, when nothing is pending."""
        api, check = self._devices.driver.api, self._devices.driver.check
        with self._devices.active(self._device), self._devices.apart():
            for event in (self._begin, self._end):
                check(api.cuEventDestroy(event), "cuEventDestroy")
            check(api.cuStreamDestroy(self._stream), "cuStreamDestroy")


class SideStreamLaunch:
    """A launch that is queued on the side stream."""

    __slots__ = ("_launch", "side_stream")

    def __init__(self, launch: Queue, side_stream: SideStream) -> None:
        self._launch, self.side_stream = launch, side_stream

    def __call__(self, stream: int) -> None:
        self.side_stream.queue(self._launch, stream)


class JoinLaunch:
    """A launch on the caller's stream, which first joins the side stream."""

    __slots__ = ("_launch", "_side_stream")

    def __init__(self, launch: Queue, side_stream: SideStream) -> None:
        self._launch, self._side_stream = launch, side_stream

    def __call__(self, stream: int) -> None:
        self._side_stream.join(stream)
        self._launch(stream)


def chain(launches: Sequence[Queue]) -> Queue:
    """Queues the launches in order. The stream then joins the side streams, even if a launch cannot be queued."""
    queues: list[Queue] = []
    for plain, group in groupby(launches, lambda launch: type(launch) in (Launch, Launches)):
        run: list[Any] = list(group)
        queues += [LaunchSequence(run)] if plain else run
    side_streams = [launch.side_stream for launch in launches if type(launch) is SideStreamLaunch]
    return queues[0] if len(queues) == 1 and not side_streams else partial(_queue_all, queues, side_streams)


def _queue_all(queues: Sequence[Queue], side_streams: Sequence[SideStream], stream: int) -> None:
    try:
        for queue in queues:
            queue(stream)
    finally:
        for side_stream in side_streams:
            side_stream.join(stream)


Chain = Callable[[Sequence[Queue]], Queue]


def chain_named(annotate: Annotate | None, name: str) -> Chain:
    """`chain`, inside a range of a profiler where there are ranges."""
    return chain if annotate is None else lambda launches: partial(_queue_annotated, annotate, name, chain(launches))


def _queue_annotated(annotate: Annotate, name: str, queue: Queue, stream: int) -> None:
    with annotate(name):
        queue(stream)

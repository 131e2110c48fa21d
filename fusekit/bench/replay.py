"""Many small launches as one CUDA graph: what they take without a host that is too slow to keep up.

Launches rotate over sets of buffers that together are larger than the L2 cache, so each finds its data in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusekit.bench.timing import Run
from fusekit.runtime import Devices

LAUNCHES = 48
ROTATED_BYTES = 300 << 20  # several times the L2 cache
SETS = (2, 24)


def sets_for(nbytes: int) -> int:
    """How many sets of buffers of `nbytes` to rotate over."""
    return min(max(-(-ROTATED_BYTES // max(nbytes, 1)), SETS[0]), SETS[1])


def launches_for(sets: int) -> int:
    """Launches of a graph that uses each of `sets` sets equally often."""
    return sets * max(1, LAUNCHES // sets)


class Replay:
    """A graph of `count` launches: of `runs` in turn. Calling it launches the graph in the stream of a handle.

    ready: the caller has launched each of `runs`, such as those that wait for another device. Else this does.
    """

    def __init__(
        self, devices: Devices, runs: Sequence[Run], count: int, stream: int, *, ready: bool = False
    ) -> None:  # fmt: skip
        self._api, self._check = devices.driver.api, devices.driver.check
        self.count = count
        if not ready:  # what a first launch makes ready must not be made ready during a capture
            for run in runs:
                run(stream)
            self._check(self._api.cuStreamSynchronize(stream), "cuStreamSynchronize")
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(self._api.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        try:
            for index in range(count):
                runs[index % len(runs)](stream)
        except BaseException:
            status, captured = self._api.cuStreamEndCapture(stream)  # the stream must not stay in a capture
            if not status and captured is not None:
                self._api.cuGraphDestroy(captured)
            raise
        captured = self._check(self._api.cuStreamEndCapture(stream), "cuStreamEndCapture")
        try:
            self._graph: Any = self._check(self._api.cuGraphInstantiate(captured, 0), "cuGraphInstantiate")
        finally:
            self._check(self._api.cuGraphDestroy(captured), "cuGraphDestroy")

    def __call__(self, stream: int) -> None:
        self._check(self._api.cuGraphLaunch(self._graph, stream), "cuGraphLaunch")

    def close(self) -> None:
        """Gives the graph back."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._check(self._api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")

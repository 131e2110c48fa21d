"""Layers over ranks whose kernels are their formulas, on host memory: windows, memory and launches are the layer's own.

A launch is queued; a stream is worked off when it is waited for, and a launch of all ranks when it is the next of each.
"""

from collections import deque
from types import SimpleNamespace

import numpy as np

from fusekit.exchange import Layout
from fusekit.layers.ranked import RankedLayer
from fusekit.plan.layer.ranks import stores
from fusekit.plan.layer.record import unproved
from fusekit.runtime import Devices, Driver
from tests.exchange.test_windows import PeerDriver
from tests.layers.host import moved, put, taken
from tests.plan import layer_meaning, ranks_meaning
from tests.plans import plan_of
from tests.runtime.fake import OK


class HostDriver(PeerDriver):
    """Waiting for a stream runs what all streams of `machine` hold."""

    machine = None

    def cuStreamSynchronize(self, stream):  # noqa: N802
        if self.machine is not None and stream in self.machine.streams:
            self.machine.run()
        return (OK,)


class Machine:
    """What ranks have queued. together: the launches of all ranks, in order."""

    def __init__(self):
        self.queues, self.streams, self.together = {}, set(), []

    def add(self, rank, stream, launch):
        self.streams.add(stream)
        self.queues.setdefault(rank, deque()).append(launch)

    def run(self):
        """Until nothing is left. Ranks that wait for one that launches nothing are an error."""
        while any(self.queues.values()):
            for queue in self.queues.values():
                while queue and not queue[0].window:
                    queue.popleft().alone()
            waiting = [self.queues[rank][0] for rank in sorted(self.queues) if self.queues[rank]]
            if waiting:
                assert len(waiting) == len(waiting[0].layer._library.layers), "a rank launches nothing"
                assert len({each.window for each in waiting}) == 1, "the ranks launch in other orders"
                self.together.append(waiting[0].part)
                meet(waiting)
                for queue in self.queues.values():
                    queue.popleft()


class HostLibrary:
    """A library of one layer, `options`; every layer it opens is of a rank."""

    def __init__(self, options, devices=2):
        self.options, self.driver = options, HostDriver(devices=devices)
        self.machine = self.driver.machine = Machine()
        self.devices = Devices(Driver(self.driver))
        self.layers = {}
        self.store = SimpleNamespace(names=lambda pattern: [])

    def layer(self, name, *, ranks, **said):
        ranked = HostRanked(self, unproved(self.options, "sm_90a", lambda part, tokens: part), ranks=ranks, **said)
        self.layers[ranks.rank] = ranked
        return ranked


class HostRanked(RankedLayer):
    """The layer of a rank."""

    def _kernel(self, part, dims):
        return Kernel(self, part, dims)


class Kernel:
    """A part of a layer; a launch is made by `bind` and a call, or by a call."""

    def __init__(self, layer, part, dims, given=None):
        self.layer, self.part, self.dims, self.given = layer, part, dims, given
        self.keys = plan_of(layer).parts[part]
        steps = [step for each in plan_of(layer).steps.values() for step in each if step.part == part]
        self.written = {name for step in steps for name in step.writes if not name.startswith("window.")}

    def bind(self, **given):
        return Kernel(self.layer, self.part, self.dims, given)

    def _tensors(self):
        return {name: each for name, each in self.given.items() if hasattr(each, "data_ptr")}

    @property
    def addresses(self):
        return {name: each.data_ptr() for name, each in self._tensors().items()}

    def place(self, addresses):
        self.given |= moved(self._tensors(), addresses)

    def __call__(self, stream=None, **given):
        launch = self.bind(**(given or self.given))  # of its own: it may be placed elsewhere before it runs
        peers = launch.given.get("window")
        launch.window = next((name for name, each in self.layer._windows.items() if each.peers == peers), "")
        assert bool(peers) == bool(launch.window)
        self.layer._library.machine.add(self.layer.ranks.rank, stream, launch)

    def reads(self):
        """Every argument, in float64 or int64."""
        return {name: taken(each) for name, each in self.given.items() if hasattr(each, "data_ptr")}

    def write(self, outputs):
        for name in self.written & self.given.keys():
            put(self.given[name], outputs[name])

    def alone(self):
        with np.errstate(all="ignore"):  # of memory that nothing has written yet
            self.write(layer_meaning.OPERATIONS[self.keys["op"]](self.keys, self.reads(), self.dims))


def meet(launches):
    """A launch of all ranks, which lie in their order."""
    first = launches[0]
    assert [each.given["rank"] for each in launches] == list(range(len(launches)))
    assert len({each.given["capacity"] for each in launches}) == 1
    windows = []
    for each in launches:
        part, window = stores(plan_of(each.layer))[each.window], each.layer._windows[each.window]
        layout = Layout(plan_of(each.layer).parts[part], each.layer.capacity, each.layer.options.hidden)
        parts = layout.parts(window.address, each.layer.ranks.device)
        windows.append({f"{each.window}.{name}": part for name, part in parts.items() if name != "flags"})
    wide = [{name: taken(part).astype(np.float64) for name, part in each.items()} for each in windows]
    world = SimpleNamespace(program=plan_of(first.layer), windows=wide)
    reads = [each.reads() for each in launches]
    with np.errstate(all="ignore"):
        outputs = ranks_meaning.EXCHANGES[first.keys["op"]](first.keys, reads, world, first)
    for each, parts, numbers, got in zip(launches, windows, wide, outputs, strict=True):
        for name, part in parts.items():
            put(part, numbers[name])
        each.write(got)

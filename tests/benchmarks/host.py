"""Host time of a launch, compared with the driver's call with ready parameters in the same process; for a record of
several launches, with as many calls.

    python tests/benchmarks/run.py host NAME [--rows M] [--tensors torch]

Prints one JSON document: microseconds of each way to launch, and as a multiple of the bare call. Each figure is the
median of rounds of 20 launches, few enough that the driver's queue never fills and makes the host wait.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from fusekit.bench.timing import ROUND, host_us, own_stream
from fusekit.bench.trial import Trial
from fusekit.bench.trials import open_trial
from fusekit.library import open_library
from fusekit.runtime import DeviceArray
from fusekit.runtime.tensors import Slice

ROUNDS, WARM_UP = 400, 40
ROWS = 256


def measure(name: str, rows: int | None, make: Callable[[Trial], dict[str, Any]]) -> dict[str, Any]:
    """The document that the module prints. make: the arguments of the launches, from a trial's."""
    library = open_library()
    kernel = library.load(name)
    if rows is None and kernel.spec["op"] != "extern":
        rows = ROWS
    trial = open_trial(library, kernel, rows, 0, guarded=False)
    devices = trial.devices
    with closing(trial), devices.active(trial.device), own_stream(devices, trial.device) as stream:
        arguments = make(trial)
        output = next(tensor.name for tensor in kernel.record.tensors if tensor.written)
        fresh = Rotation(arguments[output], trial, output)
        bound = kernel.bind(**arguments)
        driver_calls = bare(bound, stream)
        wait = partial(devices.synchronize, trial.device)
        ways: dict[str, Callable[[], Any]] = {
            "bare cuLaunchKernelEx": driver_calls,
            "bound": lambda: bound(stream),
            "bound, legacy default stream": lambda: bound(0),
            "update of one output, two in turn": lambda: bound.update(**{output: fresh.two()})(stream),
            "update of one output, never seen before": lambda: bound.update(**{output: fresh.new()})(stream),
            "call": lambda: kernel(**arguments, stream=stream),
        }
        costs = {way: host_us(work, wait, ROUNDS, WARM_UP) for way, work in ways.items()}
        wait()
    least = costs["bare cuLaunchKernelEx"]
    return {
        "name": kernel.name, "device": trial.device.name, "tensors": make.__name__, "count": len(kernel.record.tensors),
        "launches": len(kernel.record.launches),
        "us": {way: round(cost, 3) for way, cost in costs.items()},
        "of bare": {way: round(cost / least, 3) for way, cost in costs.items()},
    }  # fmt: skip


def bare(bound: Any, stream: int) -> Callable[[], Any]:
    """The driver's calls alone, with ready configurations, functions and parameters."""
    call = bound._driver.api.cuLaunchKernelEx
    parts = getattr(bound, "_parts", None) or ((bound._plan, bound._block),)
    for plan, block in parts:
        plan.aim(block, stream)
    ready = [(block.config, plan.loaded.function, block.parameters, 0) for plan, block in parts]
    config, function, parameters, _ = ready[0]
    if len(ready) == 1:
        return lambda: call(config, function, parameters, 0)
    if len(ready) == 2:  # written out: a loop is part of what is compared with this
        config_2, function_2, parameters_2, _ = ready[1]
        return lambda: (call(config, function, parameters, 0), call(config_2, function_2, parameters_2, 0))
    return lambda: [call(*each) for each in ready]


class Rotation:
    """Outputs for `update`: two arrays in turn, or ever new addresses inside one large allocation."""

    STEP, COUNT = 1024, (WARM_UP + ROUNDS) * ROUND + 1

    def __init__(self, like: Any, trial: Trial, name: str) -> None:
        nbytes = trial.arrays[name].nbytes
        self._pool = DeviceArray(trial.devices, (nbytes + self.STEP * self.COUNT,), "u8", trial.device.ordinal)
        strides = tuple(like.stride())
        self._views = [
            Slice(self._pool.data_ptr() + index * self.STEP, like.shape, like.dtype, like.device, strides)
            for index in range(self.COUNT)
        ]
        self._next = 0

    def two(self) -> Any:
        self._next ^= 1
        return self._views[self._next]

    def new(self) -> Any:
        self._next += 1
        return self._views[self._next]


def arrays(trial: Trial) -> dict[str, Any]:
    """The trial's arguments as they are: `DeviceArray`s and numbers."""
    return trial.arguments


def torch(trial: Trial) -> dict[str, Any]:
    """The same as PyTorch tensors."""
    from fusekit.interop.torch import copy_of

    return {name: copy_of(value) if type(value) is DeviceArray else value for name, value in trial.arguments.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Host time of a launch.")
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, help=f"rows of x (default: {ROWS}; of a foreign kernel what fits)")
    parser.add_argument("--tensors", choices=("own", "torch"), default="own")
    given = parser.parse_args(arguments)
    json.dump(measure(given.name, given.rows, {"own": arrays, "torch": torch}[given.tensors]), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0

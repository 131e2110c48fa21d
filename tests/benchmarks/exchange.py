"""Dispatch and combine between two devices of this process, by how many blocks send and how many warps they have.

    python tests/benchmarks/run.py exchange --spec > bench-exchange.toml     on any machine
    fusekit build bench-exchange.toml
    python tests/benchmarks/run.py exchange [--tokens 8192] [--hidden 2048]

Each rank has as many tokens of one choice, half of them of the other's experts. Prints one JSON document, with the
microseconds of a launch in CUDA graphs: medians of rounds, each of the slower rank. `copy` is what the driver takes for
the bytes that cross, both ways at once; `apart` are dispatches in two launches; `fp8` is one of FP8 values.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fusekit.bench.replay import Replay
from fusekit.bench.timing import median
from fusekit.exchange import Layout, Ranks
from fusekit.library import Library, open_library
from fusekit.plan.quantise import SIDE
from fusekit.runtime import DeviceArray
from fusekit.runtime.side_stream import SideStreamLaunch, chain

FILE = "bench-exchange"
COUNT, ROUNDS = 40, 9  # launches of a graph, graphs
TIMEOUT = 10_000
BLOCKS, WARPS, FEW = (16, 18, 20, 24, 32, 64), (8, 16), (8, 16, 32)
FP8 = "fp8-64"
HEAD = """schema = 1

[defaults]
arch = "sm_90a"
"""
Launch = Callable[[int], None]


def table(name: str, op: str, **keys: Any) -> str:
    """A table of a spec file: a kernel of two ranks with an expert each."""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    return f'\n[[kernel]]\nname = "{name}"\nop = "{op}"\nranks = 2\nexperts = 2\ntopk = 1\n{lines}'


def spec() -> str:
    """The file with all kernels."""
    tables = [HEAD]
    for op in ("dispatch", "combine"):
        tables += [table(f"{op}-{blocks}", f"moe-{op}", blocks=blocks, warps=list(WARPS)) for blocks in BLOCKS]
    tables += [table(f"rows-{blocks}", "moe-dispatch", blocks=blocks, sends="rows") for blocks in FEW]
    tables.append(table(FP8, "moe-dispatch", dtype="e4m3"))
    return "".join([*tables, table("choices-64", "moe-dispatch", sends="choices")])


class Rank:
    """The tensors of a rank, and a stream."""

    def __init__(self, library: Library, ranks: Ranks, tokens: int, hidden: int, indices: Sequence[Any]) -> None:
        import numpy as np  # which prints of the spec do without

        self.library, self.ranks, self.hidden, self.tokens = library, ranks, hidden, tokens
        chosen_here = indices[ranks.rank]
        capacity = -(-tokens // 128) * 128
        chosen = np.concatenate([np.pad(each, (0, capacity - tokens), constant_values=-1) for each in indices])
        is_here = chosen == ranks.rank
        inverse = np.where(is_here, np.cumsum(is_here) - 1, -1).astype(np.int32)[:, None]
        source = np.random.default_rng(ranks.rank)
        self.tensors = {
            "x": self._array(source.integers(0, 2**14, (tokens, hidden)).astype(np.uint16), "bf16"),
            "fp8": self._array(source.integers(0, 2**6, (tokens, hidden)).astype(np.uint8), "e4m3"),
            "scales": self._array(source.random((-(-hidden // SIDE), tokens), np.float32), "f32"),
            "indices": self._array(chosen_here.astype(np.int32)[:, None], "i32"),
            "rows": self._array(
                source.integers(0, 2**14, (max(int(is_here.sum()), 1), hidden)).astype(np.uint16), "bf16"
            ),
            "inverse": self._array(inverse, "i32"),
            "y": self._array(np.zeros((tokens, hidden), np.uint16), "bf16"),
        }
        driver = library.devices.driver
        with library.devices.active(library.devices.get(ranks.device)):
            self.stream = int(driver.check(driver.api.cuStreamCreate(1), "cuStreamCreate"))
            self.events = [driver.check(driver.api.cuEventCreate(0), "cuEventCreate") for _ in range(2)]

    def close(self) -> None:
        """Gives stream, events and windows back."""
        api, check = self.library.devices.driver.api, self.library.devices.driver.check
        with self.library.devices.active(self.library.devices.get(self.ranks.device)):
            check(api.cuStreamDestroy(self.stream), "cuStreamDestroy")
            for event in self.events:
                check(api.cuEventDestroy(event), "cuEventDestroy")
        self.ranks.close()

    def _array(self, value: Any, dtype: str) -> DeviceArray:
        array = DeviceArray(self.library.devices, value.shape, dtype, self.ranks.device)
        array.upload(value)
        return array

    def launch(self, name: str) -> Any:
        """A kernel bound to this rank's tensors, and its window."""
        kernel = self.library.load(f"{FILE}/{name}", device=self.ranks.device)
        whole = {**kernel.spec, "sends": "all"}
        layout = Layout(whole, self.tokens, self.hidden)
        window = self.ranks.window((kernel.spec["op"],), layout.bytes)
        given: dict[str, Any] = {"indices": self.tensors["indices"]}
        if kernel.spec["op"] == "moe-combine":
            given |= {"x": self.tensors["rows"], "inverse": self.tensors["inverse"], "y": self.tensors["y"]}
        elif kernel.spec["dtype"] == "e4m3":
            given |= {"x": self.tensors["fp8"], "x_s": self.tensors["scales"]}
        elif kernel.spec["sends"] != "choices":
            given["x"] = self.tensors["x"]
        common = {"rank": self.ranks.rank, "capacity": layout.capacity, "timeout": TIMEOUT}
        return kernel.bind(**given, **common, window=window.peers)


def measure(ranks: Sequence[Rank], launches: Sequence[Sequence[Launch]]) -> float:
    """Microseconds of the launches of each rank, one after the other."""
    library = ranks[0].library
    devices, api, check = library.devices, library.devices.driver.api, library.devices.driver.check
    for rank, launch in zip(ranks, launches, strict=True):  # what a first launch makes ready, no capture can
        with devices.active(devices.get(rank.ranks.device)):
            chain(list(launch))(rank.stream)
    for rank in ranks:
        with devices.active(devices.get(rank.ranks.device)):
            check(api.cuStreamSynchronize(rank.stream), "cuStreamSynchronize")
    with ExitStack() as graphs:
        replays = []
        for rank, launch in zip(ranks, launches, strict=True):
            with devices.active(devices.get(rank.ranks.device)):
                replays.append(Replay(devices, [chain(list(launch))], COUNT, rank.stream, ready=True))
            graphs.callback(replays[-1].close)
        times = [_round(ranks, replays) for _ in range(ROUNDS + 1)]
    for rank in ranks:
        rank.ranks.check()
    return float(median(times[1:])) * 1e3 / COUNT


def _round(ranks: Sequence[Rank], graphs: Sequence[Replay]) -> float:
    """Milliseconds of the slower rank's graph."""
    devices = ranks[0].library.devices
    api, check = devices.driver.api, devices.driver.check
    for rank, graph in zip(ranks, graphs, strict=True):
        with devices.active(devices.get(rank.ranks.device)):
            check(api.cuEventRecord(rank.events[0], rank.stream), "cuEventRecord")
            graph(rank.stream)
            check(api.cuEventRecord(rank.events[1], rank.stream), "cuEventRecord")
    times = []
    for rank in ranks:
        with devices.active(devices.get(rank.ranks.device)):
            check(api.cuStreamSynchronize(rank.stream), "cuStreamSynchronize")
            times.append(float(check(api.cuEventElapsedTime(*rank.events), "cuEventElapsedTime")))
    return max(times)


def copies(ranks: Sequence[Rank]) -> list[list[Launch]]:
    """The driver's copies of half of each rank's rows to the other one."""
    devices = ranks[0].library.devices
    api, check = devices.driver.api, devices.driver.check
    size = ranks[0].tokens // 2 * ranks[0].hidden * 2

    def copy(rank: Rank, other: Rank) -> Launch:
        target, source = other.tensors["y"].data_ptr(), rank.tensors["x"].data_ptr()
        return lambda stream: check(api.cuMemcpyDtoDAsync(target, source, size, stream), "cuMemcpyDtoDAsync")

    return [[copy(rank, ranks[1 - index])] for index, rank in enumerate(ranks)]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = ArgumentParser(description="Dispatch and combine.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--spec", action="store_true", help=f"print {FILE}.toml, the kernels that are needed")
    given = parser.parse_args(arguments)
    if given.spec:
        sys.stdout.write(spec())
        return 0
    import numpy as np

    library = open_library()
    half = np.arange(given.tokens) % 2
    indices = [np.random.default_rng(7 + rank).permutation(half) for rank in range(2)]
    handles = Ranks.in_process(library.devices, [0, 1], TIMEOUT)
    ranks = [Rank(library, handle, given.tokens, given.hidden, indices) for handle in handles]
    figures: dict[str, Any] = {"tokens": given.tokens, "hidden": given.hidden, "us": {}}
    names = [f"{op}-{blocks}@w{warps}" for op in ("dispatch", "combine") for blocks in BLOCKS for warps in WARPS]
    runs = {name: [[rank.launch(name)] for rank in ranks] for name in [*names, FP8]}
    for blocks in FEW:
        pairs = [[rank.launch(f"rows-{blocks}@w16"), rank.launch("choices-64@w16")] for rank in ranks]
        runs[f"apart-{blocks}"] = [
            [SideStreamLaunch(rows, rank.ranks.side_stream(library.devices)), choices]
            for rank, (rows, choices) in zip(ranks, pairs, strict=True)
        ]
    runs["copy"] = copies(ranks)
    for name, each in runs.items():
        figures["us"][name] = round(measure(ranks, each), 2)
        sys.stderr.write(f"{name} {figures['us'][name]}\n")
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    for rank in ranks:
        rank.close()
    return 0

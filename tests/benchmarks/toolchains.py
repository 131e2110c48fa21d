"""Two toolchains over a catalogue: the same kernels, built by each into a store of its own.

    python tests/benchmarks/run.py toolchains STORE STORE [PATTERN ...] [--time [--rows M]]

Prints a row for each kernel whose cubins differ: registers, spilled bytes and machine instructions of both, and with
`--time`, on a GPU, microseconds of both on the same inputs, in turns.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord
from fusekit.store import Entry, Store
from tests.compiler.sass import instructions


@dataclass(frozen=True, slots=True)
class Pair:
    """One name in both stores."""

    name: str
    arch: str
    entries: tuple[Entry, Entry]

    @property
    def same(self) -> bool:
        return self.entries[0].cubin_sha256 == self.entries[1].cubin_sha256


def pairs(stores: Sequence[Store], patterns: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """The kernels that both stores have; the names that one of them lacks."""
    tables: list[dict[tuple[str, str], Entry]] = []
    for store in stores:
        rows = [row for pattern in patterns for row in store.overview(pattern).rows]
        tables.append({(row.name, row.arch): store.load(row.key)[0] for row in rows})
    both = sorted(tables[0].keys() & tables[1].keys())
    return (
        [Pair(*where, (tables[0][where], tables[1][where])) for where in both],
        sorted(f"{name} for {arch}" for name, arch in tables[0].keys() ^ tables[1].keys()),
    )


def facts(store: Store, entry: Entry) -> dict[str, int]:
    """What is compared of one cubin."""
    cubin = store.read_cubin(entry)
    symbols = {launch.symbol for launch in LaunchRecord.from_json(entry.launch).launches}
    return {
        "registers": entry.resources["registers"],
        "spilled": entry.resources["spill_bytes"],
        "instructions": sum(len(instructions(cubin, symbol)) for symbol in symbols),
    }


def lines(stores: Sequence[Store], compared: Sequence[Pair], times: Any = None) -> Iterator[str]:
    """The table, as Markdown, and what all of it comes to."""
    columns = ["registers", "spilled", "instructions", *(["us"] if times else [])]
    yield f"| kernel | arch | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    for pair in compared:
        if pair.same:
            continue
        first, second = (facts(store, entry) for store, entry in zip(stores, pair.entries, strict=True))
        cells = [f"{first[name]} to {second[name]}" for name in first]
        if times:
            cells.append("{:.1f} to {:.1f}".format(*times(pair)))
        yield f"| {pair.name} | {pair.arch} | {' | '.join(cells)} |"
    yield f"\n{len(compared)} kernels in both stores; {sum(pair.same for pair in compared)} have the same cubin."


def timed(stores: Sequence[Store], rows: int | None) -> Any:
    """Microseconds of both kernels of a pair, on a GPU."""
    from fusekit.bench.timing import Stopwatch, median, own_stream
    from fusekit.bench.trials import open_trial
    from fusekit.library import Library
    from fusekit.runtime.driver import Driver

    driver = Driver()
    libraries = [Library(store, driver) for store in stores]

    def times(pair: Pair) -> list[float]:
        kernels = [library.load(pair.name) for library in libraries]
        trial = open_trial(libraries[0], kernels[0], rows, 0, guarded=False)
        with closing(trial), own_stream(trial.devices, trial.device) as stream:
            launches = [kernel.bind(**trial.arguments) for kernel in kernels]
            with Stopwatch(trial.devices, trial.device, stream) as watch:
                return [1000 * median(samples) for samples in watch.compare(launches)]

    return times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Compare what two toolchains make of the same kernels.")
    parser.add_argument("stores", nargs=2, type=Path, metavar="STORE")
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--time", action="store_true", help="also launch both, on a GPU")
    parser.add_argument("--rows", type=int, help="rows of x (default: the spec's)")
    given = parser.parse_args(arguments)
    stores = [Store(path) for path in given.stores]
    compared, missing = pairs(stores, given.patterns)
    times = timed(stores, given.rows) if given.time else None
    sys.stdout.write("\n".join(lines(stores, compared, times)) + "\n")
    for where in missing:
        sys.stdout.write(f"only in one store: {where}\n")
    return 0 if compared and not missing else 1

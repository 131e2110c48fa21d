"""The table of foreign kernels in a store, as Markdown: `python tests/benchmarks/run.py table 'quack/*' 'cudnn/*'`.

Columns: the name, the architecture, its arguments, the parameters that were read over all its launches, the launches
that were proved, the seconds to read and prove it, those to trace, compile, read and prove it (twice where an argument
is lifted; of reading and proof the longer one). The last line has the largest of the former.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fusekit.abi import LaunchRecord
from fusekit.config import Config
from fusekit.store import Store


def rows(store: Store, patterns: Sequence[str]) -> Iterator[str]:
    """The lines of the table, sorted by name and architecture."""
    yield "| kernel | arch | arguments | launches | parameters read | launches proved | read, proved | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    most, count = 0.0, 0
    rows = {(row.name, row.arch): row for pattern in patterns for row in store.overview(pattern).rows}
    for name, arch in sorted(rows):
        record = store.find_name(name, arch)
        entry = None if record is None else store.find_entry(record.key)
        if record is None or entry is None or record.spec.get("op") != "extern":
            continue
        launch = LaunchRecord.from_json(entry.launch)
        read = sum(len(step.parameters) for step in launch.launches)
        arguments = ", ".join(argument.name for argument in launch.arguments)
        yield (
            f"| {name} | {arch} | {arguments} | {len(launch.launches)} | {read} | {entry.proof['launches']} |"
            f" {entry.proof['seconds']:.2f} | {entry.seconds:.2f} |"
        )
        most, count = max(most, entry.proof["seconds"]), count + 1
    yield f"\n{count} kernels; reading and proof took {most:.2f} s at most."


def main() -> int:
    """Prints the table of the kernels that the patterns of the command line name, of every root."""
    store = Store.open(Config.from_environment())
    sys.stdout.write("\n".join(rows(store, sys.argv[1:] or ("*",))) + "\n")
    return 0

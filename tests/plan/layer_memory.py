"""Memory of every packaged layer: `python -m tests.plan.layer_memory` writes `layer_memory.json`, with which later
layouts are compared.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH
from fusekit.plan.layer import Options, Program, program
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE
from fusekit.spec.parse import parse_text

TABLE = Path(__file__).with_suffix(".json")
TOKENS = (1, 64, 512, 8192, 24576)


def packaged() -> dict[str, Options]:
    """The options of packaged layers by name."""
    layers = {}
    for path in sorted((Path(__file__).parents[2] / "kernel_specs").glob("*.toml")):
        for spec in parse_text(path.read_text(), path.stem, str(path)):
            if (options := getattr(spec, "layer", None)) is not None:
                layers[f"{options.file}/{options.name}"] = options
    return layers


def cases(plan: Program) -> Iterator[tuple[str, str, set[str], bool]]:
    """(label, pass, outputs, in_place) of each row of the table."""
    for which in (FORWARD, INFERENCE):
        yield which, which, set(plan.arguments(which)[1]), False
    every = set(plan.arguments(BACKWARD)[1])
    for label, outputs in (("all", every), ("dx", {"dx"}), ("weights", every - {"dx"})):
        for in_place in (False, True):
            yield f"{BACKWARD} {label}{' in place' if in_place else ''}", BACKWARD, outputs, in_place


def sizes(plan: Program, tokens: int) -> dict[str, int]:
    """Bytes of `kept`, and of scratch memory: of each case, with outputs that lend their memory and without."""
    dims = plan.dims(tokens)
    row = {"kept": plan.kept(dims)[1]}
    for label, which, outputs, in_place in cases(plan):
        row[label] = plan.scratch(which, outputs, dims, (), in_place=in_place)[1]
        row[f"{label}, lent"] = plan.scratch(which, outputs, dims, in_place=in_place)[1]
    return row


def table() -> dict[str, dict[str, list[int]]]:
    """By layer and row, the bytes for each of `TOKENS`."""
    result = {}
    for name, options in packaged().items():
        rows = [sizes(program(options), tokens) for tokens in TOKENS]
        result[name] = {label: [row[label] for row in rows] for label in rows[0]}
    return result


def apart_in_memory(
    plan: Program, which: str, given: set[str], dims: Mapping[str, int], lent: Collection[str] | None = None, *,
    in_place: bool = False,
) -> None:  # fmt: skip
    """Buffers that are needed at the same time lie apart, but for dz, which is written over z; what the backward pass
    may write to in kept memory lives from its begin, and an output from where it is first written to the end.
    """
    places, total = plan.scratch(which, given, dims, lent, in_place=in_place)
    kept, kept_bytes = plan.kept(dims)
    inputs = plan.arguments(which)[0].keys()
    homes = places | ({item: (KEPT, begin) for item, begin in kept.items()} if which != INFERENCE else {})
    homes |= {item: (item, 0) for item in given}
    steps = plan.needed(which, given, in_place=in_place)
    live: dict[str, tuple[int, int]] = {}
    over = set()
    for index, step in enumerate(steps):
        assert {*step.reads.values(), *step.arguments.values()} - inputs <= homes.keys() | windows(plan)
        for entry in {*step.reads.values(), *step.writes.values()} & homes.keys():
            summed = plan.parts[step.part].get("accumulate") and entry in given
            begin = 0 if summed or (which == BACKWARD and entry in kept) else index
            live[entry] = live.get(entry, (begin,))[0], len(steps) if entry in given else index
        if "dz" in step.writes:
            over.add((step.reads["preactivation"], step.writes["dz"], index))
    assert {home for home, _ in places.values()} <= {SCRATCH, KEPT, *(given if lent is None else lent)}
    room = {name: plan.buffers[name].bytes(dims) for name in given} | {SCRATCH: total, KEPT: kept_bytes}
    for first in live:
        home, begin = homes[first]
        end = begin + plan.buffers[first].bytes(dims)
        assert begin % 256 == 0 and end <= room[home]
        for second in live.keys() - {first}:
            at_once = live[first][0] <= live[second][1] and live[second][0] <= live[first][1]
            other, start = homes[second]
            apart = home != other or end <= start or start + plan.buffers[second].bytes(dims) <= begin
            pairs = {(first, second, live[first][1]), (second, first, live[second][1])}
            assert apart or not at_once or (homes[first] == homes[second] and pairs & over), (first, second)
    by_place = {dz: homes[dz] == homes[z] for z, dz, _ in over}
    assert all(by_place.values()) or (plan.buffers["z"].place == KEPT and not in_place)


def windows(plan: Program) -> set[str]:
    """Buffers in windows."""
    return {name for name, buffer in plan.buffers.items() if buffer.place not in (ARGUMENT, KEPT, SCRATCH)}


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(label)}: {json.dumps(row)}" for label, row in rows.items())
        + "\n}"
        for name, rows in table().items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")

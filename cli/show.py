"""`fusekit show`: one entry in full."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import IntegrityError, UsageError
from fusekit.store import Entry, NameListing, NameRecord, Store, names
from fusekit.store.listing import SUMMARY, Build
from fusekit.store.names import layer_of
from fusekit_cli import complete, output, sources
from fusekit_cli.lookup import chosen, is_layer, kernels, stored, to_load
from fusekit_cli.options import Session, common, stored_names

if TYPE_CHECKING:
    from fusekit.plan.occupancy import Occupancy
    from fusekit.share.push_pull import Survey


LINES = 40  # of an entry, unless all of it is wanted
_SHORT = ("name", "arch", "key", "root", "lowest_driver", "resources", "spec", "candidates", "defaults", "cubin",
          "toolchain", "seconds")  # fmt: skip
ARGUMENT = ("ARGUMENT", "ROLE", "DTYPE", "SHAPE", "WHAT IT IS")
_UNSAID: tuple[Any, ...] = (None, False, "none", [], {}, 0)


@click.command("show")
@click.argument("name", shell_complete=complete.stored, callback=stored_names)
@click.option("--arch", help="The architecture, such as sm_90a, if the store has several.")
@click.option("--all", "whole", is_flag=True, help="Also the whole spec, proof, launch record and fields of the key.")
@click.option("--sass", "machine_code", is_flag=True, help="Only the machine code, by nvdisasm.")
@sources.sourced
@common
def command(
    session: Session, name: str, arch: str | None, whole: bool, machine_code: bool, source: str | None
) -> None:  # fmt: skip
    """Show the entry of NAME: arguments, resources, toolchain and spec, in 40 lines; with --all in full.

    FILE/KERNEL shows the variant that `load` takes. A FILE or a glob shows each kernel that it matches; with --json
    several are a list, and one is an object. FILE/LAYER shows a layer: options, arguments, steps,
    memory, kernels.
    """
    if machine_code:
        _sass(session, name, arch, source)
        return
    if source is None:
        store = session.open_store()
        listings = stored(store, name, arch)
        if is_layer(name, [listed.record for listed in listings]):
            _layer(session, store, name, [listed.record for listed in listings], str(listings[0].root))
            return
        documents = [_stored(store, listed) for listed in chosen(store, name, arch)]
    else:
        held = _held(session, source, name, arch)
        store, where = session.open_store(), sources.shown(source)
        if is_layer(name, held.records):
            with sources.opened(session, source, (name,), arch) as (copy, _):
                _layer(session, copy, name, [listed.record for listed in stored(copy, name, arch)], where)
            return
        documents = [describe(record, held.entries[record.key], where) for record in to_load(store, held.records, name)]

    def text() -> None:
        for index, document in enumerate(documents):
            if index:
                click.echo()
            _text(session, document, whole)

    output.answer(session, output.one_or_many(documents), text)


def _sass(session: Session, name: str, arch: str | None, source: str | None) -> None:
    from fusekit_cli.sass import sass

    if source is not None:
        raise UsageError("--sass reads the store; pull or import the kernel first, and leave --from out")
    store = session.open_store()
    listings = stored(store, name, arch)
    if is_layer(name, [listed.record for listed in listings]):
        raise UsageError(
            f"--sass is of one kernel; {name} is a layer; name one of its kernels: {listings[0].record.name}"
        )
    listed, *others = chosen(store, name, arch)
    if others:
        raise UsageError(f"--sass is of one kernel; '{name}' matches {1 + len(others)}; name one: {listed.record.name}")
    entry = store.find_entry(listed.record.key)
    if entry is None:
        raise store.not_built(name, arch)
    kernels([listed])
    code = sass(store.read_cubin(entry))
    output.answer(
        session, {"name": listed.record.name, "arch": listed.record.arch, "sass": code}, lambda: click.echo(code)
    )


def _text(session: Session, document: Mapping[str, Any], whole: bool) -> None:
    rest = dict(document)
    rows = argument_rows(rest.pop("arguments"))
    rest["proof"] = short_proof(rest["proof"])
    printed = 1  # with the last line
    if rows:
        printed += output.table(session, ARGUMENT, rows, prose=ARGUMENT[-1:])
    if not whole:
        for part in ("resources", "spec"):
            rest[part] = set_values(rest[part])
        rest = {name: rest[name] for name in _SHORT if rest[name] not in _UNSAID}
    lines = output.lines(output.tree_lines(rest))
    most = len(lines) if whole else max(LINES - printed, 1)
    for line in lines[:most]:
        click.echo(line)
    if not whole:
        more = f"{len(lines) - most} more lines, " if len(lines) > most else ""
        click.echo(f"--all: {more}proof, launch record and fields of the key")


def short_proof(proof: Mapping[str, Any]) -> dict[str, Any]:
    """`proof` with the number of the edges that it lists."""
    edges = {"edges": f"{len(proof['edges'])}; fusekit show --json lists them"} if proof.get("edges") else {}
    return {**proof, **edges}


def set_values(part: Mapping[str, Any]) -> dict[str, Any]:
    """What of a spec, or of the resources, is set."""
    return {name: value for name, value in part.items() if name != "layer" and value not in _UNSAID}


def argument_rows(arguments: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """The rows of `arguments` of a document, below the headings `ARGUMENT`."""
    return [(row["name"], row["role"], row["dtype"], row["shape"], row["what"]) for row in arguments]


def _layer(session: Session, store: Store, name: str, records: Sequence[NameRecord], where: str) -> None:
    from fusekit_cli import show_layer

    document = show_layer.describe(store, name, records, where)
    output.answer(session, document, lambda: show_layer.text(session, document))


def _held(session: Session, source: str, name: str, arch: str | None) -> Survey:
    held = sources.look(session, source, (name,), arch, entries=True)
    if held.failed:
        raise IntegrityError(held.failed[0][2])
    kernels = tuple(record for record in held.records if layer_of(record.name) is None)
    if not kernels:
        raise sources.absent(source, (name,), arch)
    return replace(held, records=kernels)


def _stored(store: Store, listed: NameListing) -> dict[str, Any]:
    record = listed.record
    entry = store.find_entry(record.key)
    if entry is None:
        why = f"its name points to entry {record.key}, which no root holds"
        raise store.not_built(record.name, record.arch, why)
    others = names.one_per_format(store.candidates(record))[1:]
    builds = [Build.of(other.key, other.summary) for other in others if other.summary.keys() >= SUMMARY]
    return describe(record, entry, str(listed.root)) | {
        "candidates": [build._asdict() | {"lowest_driver": output.driver(build.lowest_driver)} for build in builds]
    }


def describe(record: NameRecord, entry: Entry, root: str) -> dict[str, Any]:
    """The document of a kernel. root: path of the root that holds it. IntegrityError for an entry that no launcher
    could use.
    """
    from fusekit.choice.variants import check_name
    from fusekit.runtime.wellformed import check_entry

    check_entry(entry)
    check_name(record)
    build = Build.of(record.key, entry.summary())
    return {
        "name": record.name,
        "arch": record.arch,
        "key": record.key,
        "root": root,
        "seconds": entry.seconds,
        "cubin": {"sha256": entry.cubin_sha256, "bytes": entry.cubin_bytes},
        "resources": entry.resources,
        "proof": entry.proof,
        "lowest_driver": output.driver(build.lowest_driver),
        "toolchain": entry.toolchain,
        "candidates": [],
        "spec": record.spec,
        "defaults": record.defaults,
        "launch": entry.launch,
        "fields": entry.fields,
        "arguments": _arguments(record.spec, entry.launch),
    }


def rendered(value: Any) -> Any:
    """`value`, of a launch record, with its expressions as formulas."""
    from fusekit.abi import render
    from fusekit.abi.expr import OPERATORS

    if isinstance(value, Mapping):
        return {name: rendered(item) for name, item in value.items()}
    if isinstance(value, list):
        formula = len(value) > 1 and isinstance(value[0], str) and value[0] in OPERATORS
        return render(value) if formula else [rendered(item) for item in value]
    return value


def block_of(entry: Entry) -> tuple[int, int]:
    """Threads and bytes of shared memory of a CTA of `entry`: of the launch that its resources are of."""
    launches = entry.launch, *entry.launch.get("then", ())
    takes = entry.resources.get("dynamic_shared")
    launch = next((step for step in launches if step["dynamic_shared"] == takes), entry.launch)
    return math.prod(launch["block"]), launch["dynamic_shared"] + entry.resources.get("static_shared", 0)


def occupancy_of(entry: Entry) -> Occupancy | None:
    """The occupancy of `entry`; None where its registers or the limits of its architecture are not known."""
    from fusekit.plan.occupancy import occupancy

    registers, (threads, shared) = entry.resources.get("registers"), block_of(entry)
    return None if registers is None else occupancy(entry.arch, threads, registers, shared)


def _arguments(spec: Mapping[str, Any], launch: Mapping[str, Any]) -> list[dict[str, str]]:
    """Name, role, dtype, shape and meaning of each argument of a launch."""
    from fusekit.abi import render
    from fusekit.spec.operands import operands

    known = operands(spec)
    return [
        {
            "name": argument["name"],
            "role": argument.get("role", argument["kind"]),
            "dtype": argument.get("dtype", "u8"),
            "shape": _shape(argument, render),
            "what": known.get(argument["name"], ""),
        }
        for argument in launch.get("arguments", [])
    ]


def _shape(argument: Mapping[str, Any], render: Callable[[Any], str]) -> str:
    """The shape as text; peers are an IPC buffer of so many bytes for each rank."""
    if argument["kind"] == "peers":
        return f"{argument['count']} x [{render(argument['bytes'])}]"
    return "[" + ", ".join(map(render, argument["shape"])) + "]" if "shape" in argument else ""

"""`fusekit diff`: what differs between two kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from fusekit.errors import UsageError
from fusekit.store import Store
from fusekit_cli import complete, output
from fusekit_cli.lookup import chosen, kernels
from fusekit_cli.options import Session, common, one_arch, stored_names

_NAMES = ("file", "kernel", "summary", "layer")  # of a spec: they compute nothing
_LONG = 48  # characters of a value in the table


@click.command("diff")
@click.argument("first", metavar="A", shell_complete=complete.stored, callback=stored_names)
@click.argument("second", metavar="B", shell_complete=complete.stored, callback=stored_names)
@one_arch
@common
def command(session: Session, first: str, second: str, arch: str | None) -> None:
    """Show what differs between the kernels A and B of the store: spec, resources, launch, and how many instructions of
    each opcode they have, where nvdisasm is installed.

    FILE/KERNEL is the variant that `load` takes. Exit code 0 whether they differ or not.
    """
    from fusekit_cli.sass import counts

    store = session.open_store()
    kernels = [_kernel(store, name, arch) for name in (first, second)]
    documents = [document for document, _ in kernels]
    instructions = None
    try:
        instructions = _differences(*(_with_total(counts(cubin)) for _, cubin in kernels), absent=0)
        instructions.sort(key=lambda row: -abs(row["a"] - row["b"]))
    except UsageError as error:
        session.note(f"without counts of instructions: {error}")
    a, b = documents
    document = {
        "a": {name: a[name] for name in ("name", "arch", "key", "cubin")},
        "b": {name: b[name] for name in ("name", "arch", "key", "cubin")},
        "spec": _differences(*(dict(_flat(_without(each["spec"], _NAMES))) for each in documents)),
        "resources": _differences(*(each["resources"] for each in documents)),
        "launch": _differences(*(_launch(each["launch"]) for each in documents)),
        "instructions": instructions,
    }
    output.answer(session, document, lambda: _text(session, document))


def _kernel(store: Store, name: str, arch: str | None) -> tuple[dict[str, Any], bytes]:
    """The document of the kernel `name`, its occupancy among its resources, and its cubin."""
    from fusekit.runtime.wellformed import launch_record
    from fusekit_cli.show import describe, occupancy_of

    listed, *others = chosen(store, name, arch)
    kernels([listed])
    if others:
        raise UsageError(f"diff is of two kernels; '{name}' matches {1 + len(others)}; name one: {listed.record.name}")
    entry = store.find_entry(listed.record.key)
    if entry is None:
        raise store.not_built(name, arch)
    launch_record(entry)
    document = describe(listed.record, entry, str(listed.root))
    fits = occupancy_of(entry)
    document["resources"] = {
        **document["resources"], "cubin_bytes": entry.cubin_bytes, "ctas": None if fits is None else fits.ctas,
        "warps": None if fits is None else fits.warps,
    }  # fmt: skip
    return document, store.read_cubin(entry)


def _launch(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a launch record people compare; arguments and parameters by their names."""
    from fusekit_cli.show import rendered

    known = {name: record.get(name) for name in ("block", "cluster", "grid", "workspace", "scratch")}
    named = {part: [each["name"] for each in record[part]] for part in ("arguments", "parameters")}
    return dict(_flat(rendered({**known, **named, "launches": 1 + len(record.get("then", ()))})))


def _without(document: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by their dotted names."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with_total(counts: Mapping[str, int]) -> dict[str, int]:
    return {**counts, "all": sum(counts.values())}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], *, absent: Any = None) -> list[dict[str, Any]]:
    return [
        {"name": name, "a": a.get(name, absent), "b": b.get(name, absent)}
        for name in sorted({*a, *b})
        if a.get(name, absent) != b.get(name, absent)
    ]


def _text(session: Session, document: Mapping[str, Any]) -> None:
    rows = [
        (title, row["name"], output.plain(row["a"]), output.plain(row["b"]))
        for title in ("spec", "resources", "launch", "instructions")
        for row in document[title] or ()
    ]
    a, b = document["a"], document["b"]
    click.echo(f"A  {a['name']}  {a['arch']}  {a['key'][:12]}")
    click.echo(f"B  {b['name']}  {b['arch']}  {b['key'][:12]}")
    short = [row for row in rows if max(map(len, row)) <= _LONG]
    if short:
        click.echo()
        output.table(session, ("PART", "WHAT", "A", "B"), short)
    for title, name, *values in rows:
        if max(map(len, values)) > _LONG:
            click.echo()
            for line in output.lines((f"{title} {name}", f"  A  {values[0]}", f"  B  {values[1]}")):
                click.echo(line)
    if a["cubin"] == b["cubin"]:
        click.echo("\nthe cubins are the same")
    elif not rows:
        click.echo("\nthe cubins differ, and nothing that is compared here")

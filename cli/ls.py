"""`fusekit ls`: list the kernels of all roots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from fusekit.errors import NoStoreError, NotBuiltError
from fusekit.store import NameRecord, Row
from fusekit_cli import complete, output, sources
from fusekit_cli.options import Session, common, one_arch, stored_names


@click.command("ls")
@click.argument("patterns", metavar="[GLOB]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@sources.sourced
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None, source: str | None) -> int:
    """List the kernels of all roots of the store, or those that GLOB matches, and the records of layers, which are
    named FILE/LAYER.layer@record. PART OF is the layer that a kernel belongs to, DRIVER the CUDA version of the first
    driver that reads the cubin. A name with builds in several cubin formats has a row for each, the last build first.

    Exit code 1 if a root cannot be listed, or is missing; the others are listed anyway.
    """
    store = session.open_store()
    kernels: dict[tuple[str, str], Row] = {}
    problems: list[str] = []
    unlisted = False
    if source is not None:
        roots = {Path(source): sources.shown(source)}
        for record, summary in _elsewhere(session, source, patterns, arch, problems):
            kernels[record.name, record.arch] = Row.of(record, summary, Path(source))
        unlisted = bool(problems)
    else:
        for pattern in patterns or ("*",):
            overview = store.overview(pattern, arch, layers=True)
            kernels.update({(row.name, row.arch): row for row in overview.rows})
            problems += overview.problems
            unlisted |= overview.unlisted
        roots = {root.path: str(root.path) for root in store.roots}
    rows = [_document(row) | {"root": roots[row.root]} for _, row in sorted(kernels.items())]

    def text() -> None:
        several = len({row["root"] for row in rows}) > 1
        parts = any(row["part_of"] for row in rows)
        more = {"PART OF": "part_of"} if parts else {}
        more |= {"ROOT": "root"} if several else {}
        headings = ["NAME", "ARCH", "REGISTERS", "SPILLS", "BYTES", "KEY", "DRIVER", "TOOLCHAIN", *more]
        keys = ("name", "arch", "registers", "spill_bytes", "bytes")
        cells = []
        for row in rows:
            cells.append(
                (
                    *("" if row[key] is None else row[key] for key in keys),
                    *_build(row),
                    *(row[key] or "" for key in more.values()),
                )
            )
            for build in row["candidates"]:
                cells.append((row["name"], row["arch"], "", "", build["bytes"], *_build(build), *[""] * len(more)))
        if rows:
            spare = ["TOOLCHAIN", "DRIVER", "KEY", "SPILLS", "REGISTERS", "PART OF", "ROOT", "BYTES", "ARCH"]
            if len(cells) > len(rows):  # the drivers tell several builds of a name apart
                spare.append(spare.pop(1))
            output.table(session, headings, cells, right=("REGISTERS", "SPILLS", "BYTES"), spare=spare)

    output.answer(session, rows, text)
    if not rows:
        where = ", ".join(roots.values())
        wanted = (" of that name" if patterns else "") + (f" for {arch}" if arch else "")
        remedy = ""
        if source is None:
            try:
                store.check_writable()
                remedy = "; `fusekit build` fills the store"
            except NoStoreError as error:
                problems.append(str(error))
                unlisted = True
        session.note(f"nothing{wanted} in {where}{remedy}")
    output.note_left_out(session, problems)
    absent = store.absent() if source is None else ()
    for why in absent:
        session.note(f"{why}: there is no store to list; check FUSEKIT_STORES and the mount")
    return 1 if unlisted or absent else 0


def _document(row: Row) -> dict[str, Any]:
    of_name: dict[str, Any] = row._asdict()
    of_name["candidates"] = [build._asdict() for build in row.candidates]
    for build in (of_name, *of_name["candidates"]):
        build["lowest_driver"] = output.driver(build["lowest_driver"])
    return of_name


def _build(build: Mapping[str, Any]) -> tuple[str, str, str]:
    return build["key"][:12], build["lowest_driver"] or "", build["toolchain"] or ""


def _elsewhere(
    session: Session, source: str, patterns: tuple[str, ...], arch: str | None, problems: list[str]
) -> Iterator[tuple[NameRecord, Mapping[str, Any]]]:
    """Each name record of `source`, with the summary of its entry."""
    from fusekit.store.listing import SUMMARY

    try:
        held = sources.look(session, source, patterns, arch)
    except NotBuiltError:
        return
    problems += [why for _, _, why in held.failed]
    for record in held.records:
        entry = held.entries.get(record.key)
        if entry is not None or record.summary.keys() >= SUMMARY:
            yield record, record.summary if entry is None else entry.summary()
        else:
            problems.append(f"{record.name} for {record.arch} has no summary of its entry; pull it to see one")

"""`fusekit ls`: what the store holds, all layers."""

from __future__ import annotations

import click

from fusekit.errors import IntegrityError, StoreError
from fusekit.store import NameListing
from fusekit_cli import output
from fusekit_cli.options import Session, common


@click.command("ls")
@click.argument("patterns", metavar="[GLOB]...", nargs=-1)
@click.option("--arch", help="Only this architecture, such as sm_90a.")
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None) -> None:
    """List the kernels in the store, of every layer, or those that GLOB names."""
    store = session.open_store()
    found: dict[tuple[str, str], NameListing] = {}
    problems: list[str] = []
    for pattern in patterns or ("*",):
        listing = store.listing(pattern, arch)
        found.update({(listed.record.name, listed.record.arch): listed for listed in listing.names})
        problems += listing.problems
    rows = []
    for _, listed in sorted(found.items()):
        record = listed.record
        try:
            summary = store.summary(record)
        except (IntegrityError, StoreError) as error:
            problems.append(str(error))
            continue
        if summary is None:
            problems.append(f"{record.name} for {record.arch} stands for entry {record.key}, which no layer holds")
            continue
        rows.append(
            {
                "name": record.name,
                "arch": record.arch,
                "key": record.key,
                **{label: summary[label] for label in ("cubin_sha256", "bytes", "registers", "spill_bytes")},
                "layer": str(listed.layer),
            }
        )

    def text() -> None:
        layers = len({row["layer"] for row in rows}) > 1
        headings = ["NAME", "ARCH", "REGISTERS", "SPILLS", "BYTES", "KEY", *(["LAYER"] if layers else [])]
        cells = [
            [
                *(row[label] for label in ("name", "arch", "registers", "spill_bytes", "bytes")),
                str(row["key"])[:12],
                *([row["layer"]] if layers else []),
            ]
            for row in rows
        ]
        if rows:
            output.table(session, headings, cells, right=("REGISTERS", "SPILLS", "BYTES"))

    output.answer(session, rows, text)
    if not rows:
        roots = ", ".join(str(layer.root) for layer in store.layers)
        session.note(f"nothing{' of that name' if patterns else ''} in {roots}; `fusekit build` fills the store")
    for problem in dict.fromkeys(problems):
        session.note(f"left out: {problem}")

"""`fusekit copy`: bring kernels from read-only roots into the writable store."""

from __future__ import annotations

from contextlib import nullcontext

import click

from fusekit_cli import complete, output
from fusekit_cli.lookup import stored
from fusekit_cli.options import Session, common, one_arch, stored_names


@click.command("copy")
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None) -> None:
    """Copy kernels from read-only roots into the writable store, checked; no argument: all of them.

    Nothing else copies kernels between roots: a kernel in a read-only root is loaded from there.
    """
    store = session.open_store()
    records = {
        (listed.record.name, listed.record.arch): listed.record
        for pattern in patterns or ("*",)
        for listed in (*stored(store, pattern, arch), *store.listing(pattern, arch, layers=True).names)
    }
    copied, present, count = [], [], 0
    with store.lease() if records else nullcontext():  # nothing is collected until all is copied
        for _, record in sorted(records.items()):
            row = {"name": record.name, "arch": record.arch, "key": record.key}
            if store.adopt(record):
                copied.append(row)
                count += int(record.summary.get("bytes") or 0)
            else:
                present.append(row)
    document = {"copied": copied, "present": present, "bytes": count}

    def text() -> None:
        for row in copied:
            click.echo(f"{row['name']}  {row['arch']}")
        click.echo(f"{output.plural(len(copied), 'kernel')} copied, {len(present)} there already")

    output.answer(session, document, text)

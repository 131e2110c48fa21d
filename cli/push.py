"""`fusekit push`: kernels of the store to a remote."""

from __future__ import annotations

from typing import Any

import click

from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, signing
from fusekit_cli.progress import progress, progress_of


@click.command("push")
@click.argument("url", metavar="URL", shell_complete=complete.files)
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored)
@click.option("--arch", help="Only this architecture, such as sm_90a.")
@click.option("--full", is_flag=True, help="Read and check what is there already, and replace what is damaged.")
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@signing
@common
def command(session: Session, url: str, patterns: tuple[str, ...], arch: str | None, full: bool, dry_run: bool) -> None:
    """Move the kernels that NAME means (none: all) to URL, as far as they are not there.

    URL is a folder or whatever fsspec reaches: s3://bucket/kernels, gs://..., with the plugin for it installed.
    """
    from fusekit.store.exchange import push
    from fusekit.store.remote import Remote
    from fusekit.store.selection import select

    store = session.open_store()
    selection, remote = select(store, patterns, arch), Remote(url)
    with progress(session, "pushing", moves_bytes=True) as update:
        notify = progress_of(update)
        report = push(store, selection, remote, full, notify, dry_run=dry_run)
    document: dict[str, Any] = {
        "entries": report.entries,
        "names": report.names,
        "bytes": report.bytes,
        "skipped": report.skipped,
    }

    document |= output.dry_document(dry_run, report.steps)

    def text() -> None:
        output.dry_rows(session, dry_run, report.steps)
        would = "would be " if dry_run else ""
        moved = f"{output.plural(report.entries, 'entry')} and {output.plural(report.names, 'name')} {would}pushed"
        click.echo(f"{moved} ({output.size(report.bytes)}), {report.skipped} there already")

    output.answer(session, document, text)

"""`fusekit push`: kernels of the store to a remote."""

from __future__ import annotations

import click

from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, signing
from fusekit_cli.progress import progress


@click.command("push")
@click.argument("url", metavar="URL")
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored)
@click.option("--arch", help="Only this architecture, such as sm_90a.")
@click.option("--full", is_flag=True, help="Read and check what is there already, and replace what is damaged.")
@signing
@common
def command(session: Session, url: str, patterns: tuple[str, ...], arch: str | None, full: bool) -> None:
    """Move the kernels that NAME means (none: all) to URL, as far as they are not there.

    URL is a folder or whatever fsspec reaches: s3://bucket/kernels, gs://..., with the plugin for it installed.
    """
    from fusekit.store.exchange import push
    from fusekit.store.remote import Remote
    from fusekit.store.selection import select

    store = session.open_store()
    selection, remote = select(store, patterns, arch), Remote(url)
    with progress(session, "pushing", moves_bytes=True) as update:
        report = push(store, selection, remote, full, lambda step: update(step.done, step.total, step.what, step.bytes))
    document = {
        "entries": report.entries,
        "names": report.names,
        "bytes": report.bytes,
        "skipped": report.skipped,
    }

    def text() -> None:
        moved = f"{output.plural(report.entries, 'entry')} and {output.plural(report.names, 'name')} pushed"
        click.echo(f"{moved} ({output.size(report.bytes)}), {report.skipped} there already")

    output.answer(session, document, text)

"""`fusekit push`: kernels of the store to a remote."""

from __future__ import annotations

import click

from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, signing, stored_names
from fusekit_cli.progress import progress, progress_of


@click.command("push")
@click.argument("url", metavar="URL", shell_complete=complete.files)
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@click.option("--full", is_flag=True, help="Read and check the files that are there, and replace damaged ones.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@signing
@common
def command(session: Session, url: str, patterns: tuple[str, ...], arch: str | None, full: bool, dry_run: bool) -> None:
    """Copy the kernels that NAME matches to URL, unless they are there. None: all, or with trusted keys all that one of
    them signed.

    URL is a folder or anything that fsspec reaches: s3://bucket/kernels, gs://..., with the plugin for it installed;
    or the name of a remote of fusekit.toml.
    """
    from fusekit.share.push_pull import push
    from fusekit.share.remote import Remote
    from fusekit.share.selection import select

    store = session.open_store()
    selection, remote = select(store, patterns, arch), Remote(session.remote(url))
    output.note_left_out(session, selection.left_out)
    with progress(session, "pushing", moves_bytes=True) as update:
        report = push(store, selection, remote, full, progress_of(update), dry_run=dry_run)
    output.transferred(session, report, "pushed", dry_run)

"""`fusekit import`: a bundle into the writable store."""

from __future__ import annotations

import sys

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Check the bundle, and only show what would be imported.")
@common
def command(session: Session, file: str, dry_run: bool) -> None:
    """Publish the kernels of the bundle FILE, checked: all, or none if any of it is wrong.

    FILE is a path, a URL (https://host/kernels.tar, s3://...), or - for standard input; the last two are copied to a
    temporary file first. With FUSEKIT_TRUSTED_KEYS, a bundle that none of those keys signed is refused before it is
    read. With FUSEKIT_LOCK, one that has anything that the lock does not list is refused.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.bundle_import import import_bundle
    from fusekit.share.source import bundle_source
    from fusekit.share.sync import pinned

    store, source = session.open_store(), bundle_source(file, sys.stdin.buffer)
    lock = session.lock(store)
    inspect = WELLFORMED if lock is None else pinned(lock, WELLFORMED)
    done = import_bundle(store, source, inspect=inspect, dry_run=dry_run)
    document = {"entries": done.entries, "names": done.names, "bytes": done.bytes, "skipped": done.skipped}
    document |= output.dry_document(dry_run, done.steps)

    def text() -> None:
        output.dry_rows(session, dry_run, done.steps)
        held = f"{output.plural(done.names, 'name')}, {output.plural(done.entries, 'entry')}"
        there = f", {done.skipped} of them there already" if done.skipped else ""
        click.echo(f"{held}{there}; {output.size(done.bytes)} of cubins {'would be ' if dry_run else ''}imported")

    output.answer(session, document, text)

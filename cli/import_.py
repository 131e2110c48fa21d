"""`fusekit import`: a bundle into the writable store."""

from __future__ import annotations

from pathlib import Path

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@common
def command(session: Session, file: str) -> None:
    """Publish what the bundle FILE holds, whole and checked, or nothing of it.

    With FUSEKIT_TRUSTED_KEYS, a bundle that none of those keys signed is refused before it is read.
    """
    from fusekit.store.bundle_import import import_bundle

    done = import_bundle(session.open_store(), Path(file).absolute())
    document = {"entries": done.entries, "names": done.names, "bytes": done.bytes, "skipped": done.skipped}

    def text() -> None:
        held = f"{output.plural(done.names, 'name')}, {output.plural(done.entries, 'entry')}"
        there = f", {done.skipped} of them there already" if done.skipped else ""
        click.echo(f"{held}{there}; {output.size(done.bytes)} of cubins imported")

    output.answer(session, document, text)

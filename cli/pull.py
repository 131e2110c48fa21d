"""`fusekit pull`: kernels of a remote into the writable store."""

from __future__ import annotations

from typing import Any

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common
from fusekit_cli.progress import progress, progress_of


@click.command("pull")
@click.argument("url", metavar="URL")
@click.argument("patterns", metavar="[NAME]...", nargs=-1)
@click.option("--arch", help="Only this architecture, such as sm_90a.")
@click.option("--dry-run", is_flag=True, help="Only say what would come in.")
@common
def command(session: Session, url: str, patterns: tuple[str, ...], arch: str | None, dry_run: bool) -> int:
    """Move the kernels that NAME means (none: all) from URL into the store, as far as it lacks them; each is checked.

    With FUSEKIT_TRUSTED_KEYS, what none of those keys signed is refused before it is read.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.store.exchange import pull
    from fusekit.store.remote import Remote

    store, remote = session.open_store(), Remote(url)
    with progress(session, "pulling", moves_bytes=True) as update:
        notify = progress_of(update)
        report = pull(store, remote, patterns, arch, notify, inspect=WELLFORMED, dry_run=dry_run)
    document: dict[str, Any] = {
        "entries": report.entries,
        "names": report.names,
        "bytes": report.bytes,
        "skipped": report.skipped,
        "failed": [{"name": name, "error": error} for name, error in report.failed],
    }

    document |= output.dry_document(dry_run, report.steps)

    def text() -> None:
        output.dry_rows(session, dry_run, report.steps)
        would = "would be " if dry_run else ""
        moved = f"{output.plural(report.entries, 'entry')} and {output.plural(report.names, 'name')} {would}pulled"
        click.echo(f"{moved} ({output.size(report.bytes)}), {report.skipped} there already")

    output.answer(session, document, text)
    for name, error in report.failed:
        session.error(f"{name}: {error}")
    return 1 if report.failed else 0

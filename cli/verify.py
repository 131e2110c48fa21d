"""`fusekit verify`: the store against its digests."""

from __future__ import annotations

import contextlib

import click

from fusekit.errors import StoreError
from fusekit_cli import output
from fusekit_cli.options import Session, common


@click.command("verify")
@click.option("--full", is_flag=True, help="Hash every cubin too, instead of only comparing sizes.")
@common
def command(session: Session, full: bool) -> int:
    """Check every entry and name of every layer against its digest, changing nothing; exit code 1 if one is bad."""
    from fusekit.store.files import exists

    store = session.open_store()
    report = store.verify(full)
    document = {
        "checked": report.checked,
        "bad": [
            {"key": bad.key, "problem": bad.problem, "path": str(bad.path), "layer": str(bad.layer)}
            for bad in report.bad
        ],
        "entries": report.entries,
        "names": report.names,
        "blobs": report.blobs,
        "full": report.full,
        "orphans": report.orphans,
        "temporaries": report.temporaries,
    }

    def text() -> None:
        for bad in report.bad:
            click.echo(f"bad: {bad.problem}")
        counts = ", ".join(
            output.plural(count, noun)
            for count, noun in ((report.entries, "entry"), (report.names, "name"), (report.blobs, "cubin"))
        )
        click.echo(f"{counts} checked{' in full' if full else ''}: {len(report.bad) or 'none'} bad")

    output.answer(session, document, text)
    if report.orphans or report.temporaries:
        left = f"{output.plural(report.orphans, 'unused cubin')} and {output.plural(report.temporaries, 'temporary')}"
        session.note(f"{left} lie there as well: no damage, a builder that was stopped leaves them")
    for layer in store.layers:
        with contextlib.suppress(StoreError):  # said above
            if exists(layer.root):
                continue
            session.note(f"there is no store at {layer.root} yet; `fusekit build` makes the writable one")
    return 1 if report.bad else 0

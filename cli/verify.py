"""`fusekit verify`: the store against its digests."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusekit.errors import IntegrityError, some
from fusekit.store.folders import printable
from fusekit_cli import complete, output, sources
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.store import Store, VerifyReport
    from fusekit.store.lockfile import Lock
    from fusekit.store.verify import Problem


@click.command("verify")
@click.option("--full", is_flag=True, help="Also hash every cubin, and check launch records and specs.")
@sources.sourced
@click.option(
    "--check", metavar="LOCK", shell_complete=complete.files,
    help="A lock: its kernels must be there, with their keys, cubins and launch records.",
)  # fmt: skip
@common
def command(session: Session, full: bool, source: str | None, check: str | None) -> int:
    """Check every entry and name of every root against its digest; changes nothing. A bundle is checked in full. With
    FUSEKIT_LOCK, every build that the lock lists must be there.

    Exit code 1 if one is bad; 3 if there is no store: at --store, in a root of FUSEKIT_STORES, or anywhere.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.store.lockfile import read_lock

    store = session.open_store()
    locked = None if check is None else read_lock(Path(check), store.trust, folder=True)
    report = store.verify(full, WELLFORMED) if source is None else _elsewhere(session, source, full, locked)
    lock = session.lock(store) if source is None else None
    if lock is not None:
        report = replace(report, bad=(*report.bad, *_differences(store, lock, names=False)))
    if locked is not None and source is None:
        report = replace(report, bad=(*report.bad, *_differences(store, locked, names=True)))
    fields = ("checked", "bad", "entries", "names", "blobs", "full", "orphans", "temporaries")
    document = {
        **{name: getattr(report, name) for name in fields},
        "strays": [printable(path) for path in report.strays],
        "absent": list(report.absent),
        "open_to_all": [printable(path) for path in report.open_to_all],
    }

    def text() -> None:
        for bad in report.bad:
            click.echo(f"bad: {bad.problem}")
        if len(report.absent) == len(store.roots):
            click.echo("nothing was checked: there is no store")
            return
        counts = ", ".join(
            output.plural(count, noun)
            for count, noun in ((report.entries, "entry"), (report.names, "name"), (report.blobs, "cubin"))
        )
        click.echo(f"{counts} checked{' in full' if full else ''}: {len(report.bad) or 'none'} bad")

    output.answer(session, document, text)
    if report.orphans or report.temporaries:
        left = f"{output.plural(report.orphans, 'unused cubin')} and {output.plural(report.temporaries, 'temporary')}"
        session.note(f"there are {left}: no damage, a stopped builder leaves them")
    if report.strays:
        names = ", ".join(printable(path) for path in report.strays[:5])
        session.note(f"not fusekit's, and not touched: {names}{' and more' if len(report.strays) > 5 else ''}")
    if report.open_to_all:
        paths = [printable(path) for path in report.open_to_all]
        session.note(
            f"every user of this machine may write in {some(paths, 5)}, and so add or replace kernels; "
            f"`chmod -R o-w {shlex.quote(paths[0])}` ends that"
        )
    # The user's cache folder may be missing if other roots have the kernels.
    optional = {store.root} if session.store is None and len(store.roots) > 1 else set()
    missing = {root: why for root, why in report.absent.items() if root not in optional}
    for root, why in missing.items():
        remedy = "`fusekit build` makes a store" if root == store.root else "check FUSEKIT_STORES and the mount"
        if root == store.root and why.endswith("no store of fusekit"):
            remedy = "nothing is written there; name another folder"
        session.note(f"{why}: there is no store to check; {remedy}")
    if report.bad:
        return 1
    return 3 if missing else 0


def _differences(store: Store, lock: Lock, names: bool) -> list[Problem]:
    """Builds of `lock` that `store` lacks, or has with a difference; with `names`, names that point elsewhere, too."""
    from fusekit.store.lockfile import differences
    from fusekit.store.verify import Problem

    return [
        Problem(key, why, store.roots[0].name_path(*where), store.root)
        for where, key, why in differences(lock, store.find_entry, store.find_name if names else None)
    ]


def _elsewhere(session: Session, source: str, full: bool, lock: Lock | None) -> VerifyReport:
    """The report on a bundle, or on the names of a remote and their entries."""
    from fusekit.share.source import is_bundle
    from fusekit.store.lockfile import differences
    from fusekit.store.verify import Problem, VerifyReport

    at, bundle = Path(sources.shown(source)), is_bundle(source)
    names = entries = cubins = 0
    try:
        held = sources.look(session, source, entries=True, cubins=full)
        names, entries, cubins = len(held.records), len(held.entries), held.cubins
        problems = [(key, why) for _, key, why in held.failed]
        if lock is not None:
            named = {(record.name, record.arch): record for record in held.records}
            found = differences(lock, held.entries.get, lambda *where: named.get(where))
            problems += [(key, why) for _, key, why in found]
    except IntegrityError as error:
        problems = [(error.key, str(error))]
    bad = tuple(Problem(key=key, problem=why, path=at, root=at) for key, why in dict.fromkeys(problems))
    return VerifyReport(entries, names, cubins, orphans=0, temporaries=0, full=full or bundle, bad=bad)

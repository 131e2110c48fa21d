"""`fusekit pull`: kernels of a remote into the writable store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, stored_names
from fusekit_cli.progress import progress, progress_of

if TYPE_CHECKING:
    from fusekit.share.remote import Remote
    from fusekit.share.transfer import Notify, Report
    from fusekit.store import Store
    from fusekit.store.lockfile import Lock


@click.command("pull")
@click.argument("url", metavar="URL", shell_complete=complete.files)
@click.argument("patterns", metavar="[NAME]...", nargs=-1, callback=stored_names)
@one_arch
@click.option("--dry-run", is_flag=True, help="Only show what would be copied.")
@common
def command(session: Session, url: str, patterns: tuple[str, ...], arch: str | None, dry_run: bool) -> int:
    """Copy the kernels that NAME matches (none: all) from URL into the store, unless it has them; each is checked. URL
    may be the name of a remote of fusekit.toml.

    With FUSEKIT_TRUSTED_KEYS, what none of those keys signed is refused before it is read. With FUSEKIT_LOCK, the
    builds that the lock lists are copied, and nothing else.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.push_pull import pull
    from fusekit.share.remote import Remote

    store, remote = session.open_store(), Remote(session.remote(url))
    lock = session.lock(store)
    with progress(session, "pulling", moves_bytes=True) as update:
        if lock is None:
            report = pull(store, remote, patterns, arch, progress_of(update), inspect=WELLFORMED, dry_run=dry_run)
        else:
            report = _locked(store, remote, _listed(lock, patterns, arch), progress_of(update), dry_run)
    failed = [{"name": name, "error": error} for name, error in report.failed]
    output.transferred(session, report, "pulled", dry_run, failed=failed)
    for name, error in report.failed:
        session.error(f"{name}: {error}")
    return 1 if report.failed else 0


def _locked(store: Store, remote: Remote, lock: Lock, notify: Notify, dry_run: bool) -> Report:
    """Copy the builds of `lock` that the writable root lacks."""
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.selection import Step
    from fusekit.share.sync import sync
    from fusekit.share.transfer import Report

    done = sync(store.writable(), lock, {remote.url: remote}, WELLFORMED, notify, dry_run=dry_run)
    copied = {source.key: source.bytes for source in done.sources if source.origin == remote.url}
    why = "; ".join(done.problems) or f"{remote.url} does not have it"
    return Report(
        entries=len(copied), skipped=len({source.key for source in done.sources} - copied.keys()), names=done.names,
        bytes=sum(copied.values()),
        failed=[(name, f"the build {build.key[:12]} that the lock lists: {why}") for (name, _), build in done.missing],
        steps=[Step(source.name, source.arch, source.key, source.bytes) for source in done.sources
               if source.key in copied],
    )  # fmt: skip


def _listed(lock: Lock, patterns: tuple[str, ...], arch: str | None) -> Lock:
    """`lock` with the names alone that `patterns` match."""
    from fusekit.store.names import matching

    known = dict.fromkeys(name for name, its_arch in lock.kernels if arch in (None, its_arch))
    wanted = {name for pattern in patterns or ("*",) for name in matching(pattern, known)}
    kernels = {
        where: builds for where, builds in lock.kernels.items() if where[0] in wanted and arch in (None, where[1])
    }
    if not kernels:
        raise UsageError(f"{lock.path} lists none of these names; give names that it lists, or another lock")
    return replace(lock, kernels=kernels)

"""`fusekit pull`: kernels of a remote into the writable store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output, sources
from fusekit_cli.options import Session, common, one_arch
from fusekit_cli.progress import progress, progress_of

if TYPE_CHECKING:
    from fusekit.share.manifest import Manifest


@click.command("pull")
@click.argument("url", metavar="URL", shell_complete=complete.files)
@click.argument("patterns", metavar="[NAME]...", nargs=-1)
@one_arch
@sources.checked
@click.option("--dry-run", is_flag=True, help="Only say what would come in.")
@common
def command(
    session: Session, url: str, patterns: tuple[str, ...], arch: str | None, manifest: str | None, dry_run: bool
) -> int:
    """Move the kernels that NAME means (none: all) from URL into the store, as far as it lacks them; each is checked.

    With FUSEKIT_TRUSTED_KEYS, what none of those keys signed is refused before it is read.
    """
    from fusekit.share.push_pull import pull
    from fusekit.share.remote import Remote

    inspect, locked = sources.inspecting(session, manifest)
    if locked is not None:
        patterns, arch = _listed(locked, patterns, arch), locked.arch
    store, remote = session.open_store(), Remote(url)
    with progress(session, "pulling", moves_bytes=True) as update:
        report = pull(store, remote, patterns, arch, progress_of(update), inspect=inspect, dry_run=dry_run)
    failed = [{"name": name, "error": error} for name, error in report.failed]
    output.exchanged(session, report, "pulled", dry_run, failed=failed)
    for name, error in report.failed:
        session.error(f"{name}: {error}")
    return 1 if report.failed else 0


def _listed(manifest: Manifest, patterns: tuple[str, ...], arch: str | None) -> tuple[str, ...]:
    """The full names of `manifest` that `patterns` mean: each has to be there."""
    from fusekit.store.names import meant

    wanted = {name for each in patterns or ("*",) for name in meant(each, manifest.kernels)}
    found = tuple(name for name in manifest.kernels if name in wanted)
    if not found or arch not in (None, manifest.arch):
        raise UsageError(
            f"the manifest is for {manifest.arch} and lists none of what is asked for; name what it lists, or another"
        )
    return found

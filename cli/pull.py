"""`fusekit pull`: kernels of a remote into the writable store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output, sources
from fusekit_cli.options import Session, common, one_arch, stored_names
from fusekit_cli.progress import progress, progress_of

if TYPE_CHECKING:
    from fusekit.share.manifest import Manifest


@click.command("pull")
@click.argument("url", metavar="URL", shell_complete=complete.files)
@click.argument("patterns", metavar="[NAME]...", nargs=-1, callback=stored_names)
@one_arch
@sources.checked
@click.option("--dry-run", is_flag=True, help="Only show what would be copied.")
@common
def command(
    session: Session, url: str, patterns: tuple[str, ...], arch: str | None, manifest: str | None, dry_run: bool
) -> int:
    """Copy the kernels that NAME matches (none: all) from URL into the store, unless it has them; each is checked. URL
    may be the name of a remote of fusekit.toml.

    With FUSEKIT_TRUSTED_KEYS, what none of those keys signed is refused before it is read.
    """
    from fusekit.share.push_pull import pull
    from fusekit.share.remote import Remote

    inspect, locked = sources.inspecting(session, manifest)
    if locked is not None:
        patterns, arch = _listed(locked, patterns, arch), locked.arch
    store, remote = session.open_store(), Remote(session.remote(url))
    with progress(session, "pulling", moves_bytes=True) as update:
        report = pull(
            store, remote, patterns, arch, progress_of(update), inspect=inspect, dry_run=dry_run,
            candidates=locked is None,  # a manifest lists one build of a name
        )  # fmt: skip
    failed = [{"name": name, "error": error} for name, error in report.failed]
    output.transferred(session, report, "pulled", dry_run, failed=failed)
    for name, error in report.failed:
        session.error(f"{name}: {error}")
    return 1 if report.failed else 0


def _listed(manifest: Manifest, patterns: tuple[str, ...], arch: str | None) -> tuple[str, ...]:
    """The full names of `manifest` that `patterns` match; the remote must have each of them."""
    from fusekit.store.names import matching

    wanted = {name for pattern in patterns or ("*",) for name in matching(pattern, manifest.kernels)}
    listed = tuple(name for name in manifest.kernels if name in wanted)
    if not listed or arch not in (None, manifest.arch):
        raise UsageError(
            f"the manifest is for {manifest.arch} and lists none of these names; give names that it lists, or "
            "another manifest"
        )
    return listed

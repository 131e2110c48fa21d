"""`fusekit lock` in a project: fusekit.lock."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import FusekitError
from fusekit_cli import output
from fusekit_cli.build import failures
from fusekit_cli.options import Session
from fusekit_cli.progress import progress

if TYPE_CHECKING:
    from fusekit.project import Project
    from fusekit.spec import Spec
    from fusekit.store import Store


def run(session: Session, project: Project, *, check: bool, expires: float | None, jobs: int | None) -> int:
    """Write the lock of `project`, or with `check` compare it; returns the exit code."""
    from fusekit.compiler.resolve import changes, expiry, resolve
    from fusekit.compiler.targets import select, trust
    from fusekit.share.lock_folder import write_lock
    from fusekit.store.lockfile import read_lock

    store = session.open_store()
    specs = trust(select(project=project), session.config.allow_extern, named=True).specs
    before = None if project.lock is None else read_lock(project.lock, store.trust)
    if not check:
        _build(session, store, project, specs, jobs)
    resolved = resolve(store, specs, project, before)
    lock, missing, moved = resolved.lock, resolved.missing, changes(before, resolved)
    if check:  # what is not in this store is compared by its key
        missing = tuple(row for row in missing if row.why is not None)
    listed = {(*where, build.toolchain) for where, builds in lock.kernels.items() for build in builds}
    same = len(listed - {(row.name, row.arch, row.toolchain) for row in moved})
    renewed = before is None or not lock.same_content(before) or expires is not None or store.signer is not None
    renewed |= before is not None and before.expires is not None and before.expires <= expiry(0)
    written = renewed and not check and not missing
    if written:
        if before is not None and before.expires is not None and expires is None:
            session.note(f"the lock before expires at {before.expires}; this one does not: give --expires DAYS")
        serial = 1 if before is None else before.serial + 1
        lock = replace(lock, serial=serial, expires=None if expires is None else expiry(expires))
        write_lock(lock, lock.path, store.signer)
    document: dict[str, Any] = {
        "file": str(lock.path), "serial": lock.serial, "written": written, "same": same,
        "changed": [{key: value for key, value in asdict(row).items() if key != "why"} for row in moved],
        "missing": [asdict(row) for row in missing],
        "expires": None if lock.expires is None else lock.expires.isoformat(),
    }  # fmt: skip

    def text() -> None:
        rows = [(row.name, row.arch, row.toolchain, (row.before or "")[:12], (row.now or "")[:12]) for row in moved]
        if rows:
            output.table(session, ("NAME", "ARCH", "TOOLCHAIN", "BEFORE", "NOW"), rows)
        for row in missing:
            click.echo(f"missing: {row.name} ({row.arch}) by {row.toolchain}: {row.why or 'not built yet'}")
        what = "wrote" if document["written"] else "compared with" if check else "left as it is:"
        click.echo(
            f"{what} {lock.path}, serial {lock.serial}: {same} same, {len(moved)} changed, {len(missing)} missing"
        )

    output.answer(session, document, text)
    for name, label in resolved.left_out:
        session.note(f"{name} by {label} is not as its spec is now, and left out; run `fusekit lock` where {label} is")
    if missing:
        session.note("nothing was written; build what is missing where its toolchain is, into this store or a remote")
    return 1 if missing or (check and (moved or before is None)) else 0


def _build(session: Session, store: Store, project: Project, specs: tuple[Spec, ...], jobs: int | None) -> None:
    from fusekit.compiler.build import execute, plan_build
    from fusekit.compiler.identity import Identity
    from fusekit.compiler.targets import check_toolchain

    identity = Identity()
    check_toolchain(project, identity.toolchain)
    with progress(session, "compiling") as update:
        report = execute(
            plan_build(specs, store, identity), store, jobs, lambda step: update(step.done, step.total, step.name, 0)
        )
    failures(session, report.failed)
    if not report.ok:
        count = output.plural(len(report.failed), "kernel")
        raise FusekitError(f"{count} could not be built; a lock needs all; nothing was written; fix the errors")

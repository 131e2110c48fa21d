"""`fusekit lock`: the lock of a project, or those of the packaged kernels, in cache_manifests."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from fusekit.errors import FusekitError, IntegrityError, UsageError
from fusekit_cli import complete, output
from fusekit_cli.build import comparison_document, comparison_text, failures
from fusekit_cli.lookup import targets as looked_up
from fusekit_cli.options import Session, common, namespaced, signing
from fusekit_cli.progress import progress

FOLDER = "cache_manifests"


@click.command("lock")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete.packaged)
@click.option("--write", is_flag=True, help="Build what the store lacks, then write the locks.")
@click.option("--check", is_flag=True, help="With a fusekit.toml: build and write nothing, and show what differs.")
@click.option(
    "--expires", metavar="DAYS", type=click.FloatRange(min=0, min_open=True),
    help="With a fusekit.toml: the lock is refused after that many days.",
)  # fmt: skip
@click.option("-j", "--jobs", metavar="N", type=click.IntRange(min=1), help="Compile processes, with --write.")
@namespaced
@signing
@common
def command(
    session: Session, targets: tuple[str, ...], write: bool, check: bool, expires: float | None,
    jobs: int | None, namespace: str | None,
) -> int:  # fmt: skip
    """With a fusekit.toml that has targets: build what the store lacks of them, and write fusekit.lock: names, keys and
    digests of cubins and launch records for each toolchain. Exit code 1 if a toolchain that the project names has not
    built all, or with --check if something differs.

    Otherwise compare the store with the locks in cache_manifests, one for each architecture and toolchain, or write
    them. TARGET is as for `fusekit build`; without one: every packaged spec, foreign kernels only with
    FUSEKIT_ALLOW_EXTERN=1. Nothing is compiled without --write; `fusekit build --check` rebuilds.
    """
    project = session.project
    if project is not None and (project.specs or project.models):
        if targets or write or namespace:
            raise UsageError(
                f"the lock of {project.path} has all of its targets; TARGET, --write and --namespace are for "
                "locks of packaged kernels; leave them out"
            )
        from fusekit_cli import lock_project

        return lock_project.run(session, project, check=check, expires=expires, jobs=jobs)
    if check or expires:
        raise UsageError(
            "--check and --expires are for the lock of a fusekit.toml with targets; `fusekit init` writes it"
        )
    from fusekit.compiler.build_check import locked_in
    from fusekit.compiler.identity import Identity
    from fusekit.compiler.resolve import layer_builds
    from fusekit.compiler.targets import select, trust
    from fusekit.share.lock_folder import alone, compared, write_lock
    from fusekit.spec.schemas import layer_name
    from fusekit.store.files import exists
    from fusekit.store.lockfile import Lock, lock_file, read_lock
    from fusekit.store.names import layer_record

    store, identity = session.open_store(), Identity()
    with looked_up(session, targets):
        specs = select(targets, namespace=namespace)
    if not targets:
        specs = trust(specs, session.config.allow_extern, named=False).specs
    where = _folder(write)
    if write:
        _build(session, targets, jobs, namespace)
    document: dict[str, Any] = {"same": [], "changed": [], "missing": [], "written": []}
    with alone(where) if write else nullcontext():
        for arch in sorted({spec.arch for spec in specs}):
            wanted = {(spec.full_name, arch): spec for spec in specs if spec.arch == arch}
            path = where / lock_file(arch, identity.toolchain)
            built, wrong = locked_in(store, wanted.values(), identity)
            records = layer_builds(store, wanted.values(), {where: (build,) for where, build in built.items()})
            layers = {layer_record(name) for spec in wanted.values() if (name := layer_name(spec))}
            known = {*store.recorded(), *wrong}
            wrong |= {one: "not built yet" for one in wanted if one not in known}
            built |= {where: build for where, (build,) in records.items()}
            present, listed = exists(path), {}
            lock = Lock.of_folder(arch, identity.toolchain, {})
            if present and not (write and not targets):
                # Kernels of it that are kept are signed again.
                lock = read_lock(path, store.trust, folder=True)
                others = {of for _, of in lock.kernels} - {arch}
                if others or [*lock.toolchains.values()] != [identity.toolchain]:
                    raise IntegrityError(
                        f"{path} lists {', '.join(sorted(others)) or arch} by {', '.join(lock.toolchains)}; a lock of "
                        "a folder is named by its architecture and toolchain; get it again, or remove it and write it "
                        "with `fusekit lock --write`"
                    )
                listed = {name: build for (name, _), (build,) in lock.kernels.items()}
            if write:
                listed = {name: build for name, build in listed.items() if name not in layers}
                listed |= {name: build for (name, _), build in built.items()}
                lock = Lock.of_folder(arch, identity.toolchain, listed)
                document["written"].append(str(write_lock(lock, path, store.signer, folder=True)))
            elif not present:
                raise UsageError(
                    f"there is no lock {path} for {arch} and the toolchain installed here; "
                    "`fusekit lock --write` writes it; install the toolchain of an existing one, or write this one"
                )
            locked = {(name, arch) for name in layers}.intersection(lock.kernels)  # none in a lock of before
            for label, rows in comparison_document(*compared(lock, built, {*wanted, *locked}, wrong)).items():
                document[label] += rows

    def text() -> None:
        comparison_text(session, document)
        for path in document["written"]:
            click.echo(f"wrote {path}")
        counts = (f"{len(document[label])} {label}" for label in ("same", "changed", "missing"))
        click.echo(", ".join(counts))

    output.answer(session, document, text)
    if document["changed"] or document["missing"]:
        session.note("`fusekit build` builds what the store lacks; `fusekit lock --write` accepts the change")
        return 1
    return 0


def _folder(write: bool) -> Path:
    here = Path(FOLDER).absolute()
    if here.is_dir():
        return here
    if write:
        raise UsageError(f"there is no folder {here}; locks are written to their folder; make it first")
    from fusekit.spec.catalog import packaged_folder

    return packaged_folder().with_name(FOLDER)


def _build(session: Session, targets: tuple[str, ...], jobs: int | None, namespace: str | None) -> None:
    from fusekit.compiler.build import build

    with progress(session, "compiling") as update:
        report = build(
            targets or None,
            jobs=jobs,
            config=session.config,
            namespace=namespace,
            progress=lambda step: update(step.done, step.total, step.name, 0),
        )
    failures(session, report.failed)
    if not report.ok:
        count = output.plural(len(report.failed), "kernel")
        raise FusekitError(f"{count} could not be built; a lock needs all; nothing was written; fix the errors")

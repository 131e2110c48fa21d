"""`fusekit sync`: the store holds what the lock lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import UsageError
from fusekit.store import names
from fusekit_cli import output
from fusekit_cli.build import failures
from fusekit_cli.options import Session, common, signing
from fusekit_cli.progress import progress, progress_of

if TYPE_CHECKING:
    from fusekit.compiler.build import Task
    from fusekit.store import NameRecord, Store
    from fusekit.store.lockfile import Build, Where

COMPILED = "built here"


@click.command("sync")
@click.option("--frozen", is_flag=True, help="Build nothing: what is in no root and no remote is an error.")
@click.option("--dry-run", is_flag=True, help="Only show what would be copied, and what would be left to build.")
@click.option("-j", "--jobs", metavar="N", type=click.IntRange(min=1), help="Compile processes.")
@signing
@common
def command(session: Session, frozen: bool, dry_run: bool, jobs: int | None) -> int:
    """Make the store hold every build that fusekit.lock lists (FUSEKIT_LOCK, else that of the project), with its names.

    What no root of the store has, installed wheels included, comes from the remotes of fusekit.toml, in their order;
    the rest is built, from the project's targets. Names change only when all is there. Exit code 1 if something is
    missing.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.sync import sync
    from fusekit.store.lockfile import read_lock

    if session.config.lock is None:
        raise UsageError("there is no lock; `fusekit lock` writes that of a fusekit.toml, and FUSEKIT_LOCK names one")
    store = session.open_store()
    lock = read_lock(session.config.lock, store.trust)
    urls = {} if session.project is None else session.project.remotes
    if urls:
        from fusekit.share.remote import Remote
    remotes = {name: Remote(url) for name, url in urls.items()}

    layers: list[NameRecord] = []

    def compiled(missing: Sequence[tuple[Where, Build]]) -> Mapping[str, str]:
        return {} if frozen else _build(session, store, missing, jobs, layers)

    def records() -> Mapping[tuple[Where, str], NameRecord]:
        from fusekit.compiler.naming import record_of

        tasks = _planned(session, store)
        specs = [(spec, task.key) for task in tasks for spec in task.specs]
        known = {((spec.full_name, spec.arch), key): record_of(key, spec) for spec, key in specs}
        return known | {((each.name, each.arch), each.key): each for each in layers}

    with progress(session, "syncing", moves_bytes=True) as update:
        report = sync(store, lock, remotes, WELLFORMED, progress_of(update), compiled, records, dry_run=dry_run)
    roots = {str(root.path): str(root.path) for root in store.roots} | {str(store.root): "here"}
    origins = Counter(roots.get(source.origin, source.origin) for source in report.sources)
    fresh = [source for source in report.sources if source.origin not in roots]
    document: dict[str, Any] = {
        "lock": str(lock.path), "serial": lock.serial, "from": dict(sorted(origins.items())), "names": report.names,
        "bytes": sum({source.key: source.bytes for source in report.sources}.values()),
        "copied": [asdict(source) for source in fresh],
        "missing": [{"name": name, "arch": arch, "toolchain": build.toolchain, "key": build.key}
                    for (name, arch), build in report.missing],
        "problems": report.problems, "dry_run": dry_run,
    }  # fmt: skip

    def text() -> None:
        if fresh:
            rows = [
                (row.name, row.arch, row.toolchain, row.origin, output.size(row.bytes), row.key[:12]) for row in fresh
            ]
            output.table(session, ("NAME", "ARCH", "TOOLCHAIN", "FROM", "BYTES", "KEY"), rows, right=("BYTES",))
        for (name, arch), build in report.missing:
            click.echo(f"missing: {name} ({arch}) by {build.toolchain}, key {build.key[:12]}")
        shares = ("here" if origin == "here" else f"from {origin}" for origin in sorted(origins))
        counts = ", ".join(f"{origins[share.removeprefix('from ')]} {share}" for share in shares)
        click.echo(f"{lock.path}, serial {lock.serial}: {counts or 'nothing'}; {len(report.missing)} missing")

    output.answer(session, document, text)
    for problem in report.problems:
        session.note(problem)
    if report.missing:
        unchanged = "no name was changed; " if not dry_run else ""
        how = "push them from where they were built, or sync without --frozen where their toolchain is"
        session.note(f"{unchanged}{output.plural(len(report.missing), 'build')} missing: {how}")
    return 1 if report.missing and not dry_run else 0


def _planned(session: Session, store: Store) -> tuple[Task, ...]:
    """What the project's targets give with the toolchain here; nothing, with a note, if there is none."""
    from fusekit.compiler.build import plan_build
    from fusekit.compiler.targets import select, trust
    from fusekit.errors import ToolchainError

    if session.project is None:
        session.note("nothing is built: there is no fusekit.toml, whose targets say what")
        return ()
    try:
        specs = trust(select(project=session.project), session.config.allow_extern, named=True).specs
        planned = plan_build(specs, store)
    except ToolchainError as error:
        session.note(str(error))
        return ()
    return (*planned.hits, *planned.misses)


def _build(
    session: Session, store: Store, missing: Sequence[tuple[Where, Build]], jobs: int | None, layers: list[NameRecord]
) -> dict[str, str]:  # fmt: skip
    """Build those of `missing` that are planned here; key -> origin. layers: takes the names of their records."""
    from fusekit.compiler.build import BuildPlan, execute

    keys = {build.key for _, build in missing}
    tasks = tuple(task for task in _planned(session, store) if task.key in keys)
    report = execute(BuildPlan(misses=tasks), store, jobs, named=False)
    failures(session, report.failed)
    from fusekit.compiler.layers import layers_of, publish_layer

    known = [(spec, task.key) for task in _planned(session, store) for spec in task.specs]
    wanted = {names.layer_of(name) for (name, _), _ in missing}
    for layer in layers_of(known):
        if layer.name in wanted and (record := publish_layer(store, layer, named=False)) is not None:
            layers.append(record)
    return dict.fromkeys([*(built.key for built in report.built), *(record.key for record in layers)], COMPILED)

"""`fusekit build`: compile, prove and publish what the store lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import UsageError
from fusekit_cli import output
from fusekit_cli.options import Session, common, signing
from fusekit_cli.progress import progress

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fusekit.compiler.build import BuildPlan, BuildReport
    from fusekit.compiler.build_check import Checked
    from fusekit.store import Store


@click.command("build")
@click.argument("targets", metavar="[SPEC_FILE|NAME|GLOB]...", nargs=-1)
@click.option("--arch", metavar="A,B", help="Only these architectures, such as sm_90a.")
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Compile processes (default: one a processor, fewer if memory is short), or kernels given to --executor.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be built, and why.")
@click.option("--check", metavar="MANIFEST", help="Build from nothing and compare with this cache manifest.")
@click.option("--executor", metavar="URL", help="Compile on a cluster: dask://host:port, a Dask scheduler.")
@signing
@common
def command(
    session: Session,
    targets: tuple[str, ...],
    arch: str | None,
    jobs: int | None,
    dry_run: bool,
    check: str | None,
    executor: str | None,
) -> int:
    """Compile, prove and publish what the store lacks; no argument: every packaged spec. Needs no GPU and no driver."""
    import time

    from fusekit.compiler.build import execute, plan_build, select

    start = time.perf_counter()
    if check is not None:
        if dry_run or arch:
            raise UsageError("--check with --dry-run or --arch: a manifest is of one architecture; leave those out")
        return _check(session, check, targets, jobs, executor)
    store = session.open_store()
    archs = None if arch is None else [name.strip() for name in arch.split(",")]
    wanted = plan_build(select(targets, archs), store)
    if dry_run:
        return _dry_run(session, wanted, store)
    with _executor(executor if wanted.misses else None) as pool, progress(session, "compiling") as update:
        report = execute(wanted, store, jobs, lambda step: update(step.done, step.total, step.name, 0), executor=pool)
    report.seconds = round(time.perf_counter() - start, 3)
    output.answer(session, _document(session, report), lambda: _text(session, report))
    _failures(session, report)
    return 0 if report.ok else 1


@contextlib.contextmanager
def _executor(url: str | None) -> Iterator[Executor | None]:
    if url is None:
        yield None
        return
    from fusekit.compiler.executor import connect

    with connect(url) as executor:
        yield executor


def _dry_run(session: Session, wanted: BuildPlan, store: Store) -> int:
    from fusekit.compiler.explain import explain

    missing = [explain(store, spec, task.fields) for task in wanted.misses for spec in task.specs]
    cached = [spec.full_name for task in wanted.hits for spec in task.specs]
    document = {
        "would_build": [
            {"name": each.name, "arch": each.arch, "key": each.key, "status": each.status, "reason": each.reason}
            for each in missing
        ],
        "cached": cached,
        "warnings": session.warned,
    }

    def text() -> None:
        if missing:
            rows = [(each.name, each.arch, (each.key or "")[:12], each.reason) for each in missing]
            output.table(session, ("NAME", "ARCH", "KEY", "WHY"), rows)
        kernels = output.plural(len(wanted.misses), "kernel")
        click.echo(f"{len(missing)} to build ({kernels} to compile), {len(cached)} cached")

    output.answer(session, document, text)
    return 0


def _check(
    session: Session, manifest_path: str, targets: tuple[str, ...], jobs: int | None, executor: str | None
) -> int:
    from fusekit.compiler.build_check import check_build
    from fusekit.store.manifest import read_manifest

    manifest = read_manifest(Path(manifest_path), session.open_store().trust)
    with _executor(executor) as pool, progress(session, "compiling") as update:
        checked = check_build(
            manifest, targets, jobs, lambda step: update(step.done, step.total, step.name, 0), executor=pool
        )
    output.answer(session, _check_document(session, checked, manifest.arch), lambda: _check_text(session, checked))
    _failures(session, checked.report)
    return 0 if checked.ok else 1


def _check_document(session: Session, checked: Checked, arch: str) -> dict[str, Any]:
    return _document(session, checked.report) | comparison_document(checked.comparison, arch)


def comparison_document(comparison: Any, arch: str) -> dict[str, Any]:
    """`same`, `changed` and `missing` of a comparison with a manifest."""
    return {
        "same": list(comparison.same),
        "changed": [
            {"name": row.name, "arch": arch, "expected": row.expected, "found": row.found, "reason": row.why}
            for row in comparison.changed
        ],
        "missing": [{"name": name, "arch": arch, "reason": why} for name, why in comparison.missing],
    }


def _check_text(session: Session, checked: Checked) -> None:
    comparison_text(session, checked.comparison)
    counts = checked.comparison
    click.echo(
        f"{len(counts.same)} same, {len(counts.changed)} changed, {len(counts.missing)} missing, "
        f"{len(checked.report.failed)} failed"
    )


def comparison_text(session: Session, comparison: Any) -> None:
    """A row for every kernel that differs."""
    rows = [(row.name, row.expected[:12], row.found[:12], row.why) for row in comparison.changed]
    rows += [(name, "", "", why) for name, why in comparison.missing]
    if rows:
        output.table(session, ("NAME", "MANIFEST", "NOW", "WHY"), rows)


def _document(session: Session, report: BuildReport) -> dict[str, Any]:
    keys = ("name", "arch", "key", "cubin_sha256", "bytes", "seconds", "proved_launches")
    return {
        "built": [{key: getattr(built, key) for key in keys} for built in report.built],
        "cached": report.cached,
        "failed": [{"name": failed.name, "arch": failed.arch, "error": failed.error} for failed in report.failed],
        "seconds": report.seconds,
        "warnings": session.warned,
    }


def _text(session: Session, report: BuildReport) -> None:
    if report.built:
        headings = ("NAME", "ARCH", "RESULT", "REGISTERS", "SPILLED", "CUBIN", "PROVED", "SECONDS")
        rows = [
            (
                row.name,
                row.arch,
                result,
                row.registers,
                row.spill_bytes,
                output.size(row.bytes),
                f"{row.proved_launches} launches",
                f"{row.seconds:.2f}",
            )
            for result, found in (("built", report.built), ("hit", report.hits))
            for row in found
        ]
        output.table(session, headings, rows, right=("REGISTERS", "SPILLED", "CUBIN", "SECONDS"))
    total = len(report.built) + len(report.hits) + len(report.failed)
    if len(report.hits) == total:
        click.echo(f"{output.plural(total, 'kernel')}, all cached ({report.seconds:.2f} s)")
        return
    counts = [(len(report.built), "built"), (len(report.hits), "cached"), (len(report.failed), "failed")]
    click.echo(f"{', '.join(f'{count} {what}' for count, what in counts if count)} ({report.seconds:.2f} s)")


def _failures(session: Session, report: BuildReport) -> None:
    for failed in report.failed:
        session.error(f"{failed.name} ({failed.arch}): {failed.error}")
        if session.debug and failed.detail:
            session.note(failed.detail)

"""`fusekit build`: compile, prove and publish what the store lacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.compiler.build import BuildPlan, BuildReport, Progress


@click.command("build")
@click.argument("targets", metavar="[SPEC_FILE|NAME|GLOB]...", nargs=-1)
@click.option("--arch", metavar="A,B", help="Only these architectures, such as sm_90a.")
@click.option("--jobs", metavar="N", type=click.IntRange(min=1), help="Compile processes (default: one a processor).")
@click.option("--dry-run", is_flag=True, help="Only say what would be built.")
@common
def command(session: Session, targets: tuple[str, ...], arch: str | None, jobs: int | None, dry_run: bool) -> int:
    """Compile, prove and publish what the store lacks; no argument: every packaged spec. Needs no GPU and no driver."""
    import time

    from fusekit.compiler.build import execute, plan_build, select

    start = time.perf_counter()
    store = session.open_store()
    archs = None if arch is None else [name.strip() for name in arch.split(",")]
    wanted = plan_build(select(targets, archs), store)
    if dry_run:
        return _dry_run(session, wanted)
    with _progress(session, len(wanted.misses)) as progress:
        report = execute(wanted, store, jobs, progress)
    report.seconds = round(time.perf_counter() - start, 3)
    output.answer(session, _document(report), lambda: _text(session, report))
    for failed in report.failed:
        session.error(f"{failed.name} ({failed.arch}): {failed.error}")
        if session.debug and failed.detail:
            session.note(failed.detail)
    return 0 if report.ok else 1


def _dry_run(session: Session, wanted: BuildPlan) -> int:
    missing = [(spec.full_name, task.arch, task.key) for task in wanted.misses for spec in task.specs]
    cached = [spec.full_name for task in wanted.hits for spec in task.specs]
    document = {
        "would_build": [{"name": name, "arch": arch, "key": key} for name, arch, key in missing],
        "cached": cached,
    }

    def text() -> None:
        if missing:
            output.table(session, ("NAME", "ARCH", "KEY"), [(name, arch, key[:12]) for name, arch, key in missing])
        kernels = output.plural(len(wanted.misses), "kernel")
        click.echo(f"{len(missing)} to build ({kernels} to compile), {len(cached)} cached")

    output.answer(session, document, text)
    return 0


def _document(report: BuildReport) -> dict[str, Any]:
    keys = ("name", "arch", "key", "cubin_sha256", "bytes", "seconds", "proved_launches")
    return {
        "built": [{key: getattr(built, key) for key in keys} for built in report.built],
        "cached": report.cached,
        "failed": [{"name": failed.name, "arch": failed.arch, "error": failed.error} for failed in report.failed],
        "seconds": report.seconds,
    }


def _text(session: Session, report: BuildReport) -> None:
    if report.built:
        headings = ("NAME", "ARCH", "REGISTERS", "SPILLED", "CUBIN", "PROVED", "SECONDS")
        rows = [
            (
                built.name,
                built.arch,
                built.registers,
                built.spill_bytes,
                output.size(built.bytes),
                f"{built.proved_launches} launches",
                f"{built.seconds:.2f}",
            )
            for built in report.built
        ]
        output.table(session, headings, rows, right=("REGISTERS", "SPILLED", "CUBIN", "SECONDS"))
    total = len(report.built) + len(report.cached) + len(report.failed)
    if len(report.cached) == total:
        click.echo(f"{output.plural(total, 'kernel')}, all cached ({report.seconds:.2f} s)")
        return
    counts = [(len(report.built), "built"), (len(report.cached), "cached"), (len(report.failed), "failed")]
    click.echo(f"{', '.join(f'{count} {what}' for count, what in counts if count)} ({report.seconds:.2f} s)")


@contextlib.contextmanager
def _progress(session: Session, total: int) -> Iterator[Callable[[Progress], None] | None]:
    """Draws a bar on a terminal, says a line a kernel elsewhere, and nothing when there is nothing to do."""
    if not total:
        yield None
        return
    bar = _bar(session) if sys.stderr.isatty() else None
    if bar is None:
        yield lambda step: session.note(f"{step.done}/{step.total} {step.name}") if step.name else None
        return
    with bar:
        task = bar.add_task("compiling", total=total)
        yield lambda step: bar.update(task, completed=step.done, description=step.name or "compiling")


def _bar(session: Session) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # drawn only where it is installed
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True, no_color=not session.config.color), transient=True)

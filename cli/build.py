"""`fusekit build`: compile, prove and publish what the store lacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import UsageError, some
from fusekit_cli import complete, output
from fusekit_cli.lookup import targets as looked_up
from fusekit_cli.options import Session, common, namespaced, signing
from fusekit_cli.progress import progress
from fusekit_cli.rm import unread

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fusekit.compiler.build import BuildPlan, BuildReport, Failed
    from fusekit.compiler.estimate import Estimate
    from fusekit.compiler.naming import Left, Moved
    from fusekit.share.lock_folder import Change
    from fusekit.store import DiscardReport, Store
    from fusekit.store.lockfile import Where

NAMED = 5  # names that a note lists


@click.command("build")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete.packaged)
@click.option("--arch", metavar="A,B", help="Only for these, such as sm_90a; a packaged spec: instead of its own.")
@click.option(
    "-j",
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Compile processes (default: one a processor, fewer if memory is short), or kernels sent to --executor.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be built, and why.")
@click.option("--check", metavar="LOCK", type=click.Path(), help="Build from nothing and compare with this lock.")
@click.option("--executor", metavar="URL", help="Compile on a cluster: dask://host:port, a Dask scheduler.")
@click.option(
    "--prune", is_flag=True, help="Remove the names that TARGET matches and its spec file no longer has, as `rm` does."
)
@click.option("--lineinfo", is_flag=True, help="Keep source lines in the cubins, for profilers. Their keys differ.")
@click.option(
    "--executor-timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    help="How long to wait if the cluster has no worker (default: 300).",
)
@click.option(
    "--allow-extern",
    is_flag=True,
    help='Run the Python that specs with op = "extern" name (default: FUSEKIT_ALLOW_EXTERN).',
)
@namespaced
@signing
@common
def command(
    session: Session, targets: tuple[str, ...], arch: str | None, jobs: int | None, dry_run: bool, check: str | None,
    executor: str | None, executor_timeout: float | None, prune: bool, allow_extern: bool, namespace: str | None,
    lineinfo: bool,
) -> int:  # fmt: skip
    """Compile, prove and publish what the store lacks; no argument: the targets of fusekit.toml, else every packaged
    spec. Needs no GPU and no driver.

    A TARGET is a spec file (moe.toml), kernels of it (moe.toml/fc1, moe.toml/fc1@128x128-c2x1), a folder of spec files,
    a packaged name (FILE, FILE/KERNEL, FILE/KERNEL@VARIANT), a quoted glob over either ('specs/*.toml', '*/fc1*'), or -
    for a spec on stdin, whose names begin with stdin/. If KERNEL is a layer, all kernels that it needs are built.
    """
    import time

    from fusekit.compiler.build import execute, plan_build, tidy
    from fusekit.compiler.estimate import estimate
    from fusekit.compiler.identity import Identity
    from fusekit.compiler.naming import left_behind
    from fusekit.compiler.targets import check_toolchain, look_up, of_arch, trust
    from fusekit.spec.catalog import specs_of
    from fusekit.spec.extern import EXTERN

    start = time.perf_counter()
    if check is not None:
        if dry_run or arch or prune or lineinfo:
            raise UsageError(
                "--check with --dry-run, --arch, --prune or --lineinfo: a lock lists kernels without line "
                "information, and --check does not change the store; leave those out"
            )
        with _executor(session, executor, executor_timeout) as pool:
            return _check(session, check, targets, jobs, pool, namespace, allow_extern)
    store = session.open_store()
    archs = None if arch is None else [name.strip() for name in arch.split(",")]
    with looked_up(session, targets):
        catalog = look_up(targets, namespace, archs, session.project)
    allowed = allow_extern or session.config.allow_extern or (dry_run and bool(targets))  # a dry run runs nothing
    trusted = trust(specs_of(catalog), allowed, named=bool(targets))
    identity = Identity(lineinfo=lineinfo)
    check_toolchain(session.project, identity.toolchain)
    wanted = plan_build(of_arch(trusted.specs, archs), store, identity)
    _untrusted(session, trusted.left_out)
    layers = _layers(wanted)
    expected = None if executor else estimate(store, wanted.misses, jobs)
    if dry_run:
        return _dry_run(session, wanted, layers, store, left_behind(store, catalog, archs), expected)
    _explain(session, wanted, store)
    whole = not targets and not (session.project and (session.project.specs or session.project.models))
    if whole and wanted.misses and not _confirmed(session, len(wanted.misses), expected):
        return 1
    with (
        _executor(session, executor if wanted.misses else None, executor_timeout) as pool,
        progress(session, "compiling", expected=expected, steps=len(wanted.misses)) as update,
    ):
        report = execute(wanted, store, jobs, lambda step: update(step.done, step.total, step.name, 0), executor=pool)
    report.untrusted = list(trusted.left_out)
    tidy(report, store, catalog, archs, prune=prune)
    report.seconds = round(time.perf_counter() - start, 3)
    output.answer(session, _document(session, report, layers), lambda: _text(session, report, layers))
    _moved(session, report.moved)
    _left(session, report.left, report.pruned, prune=prune)
    failures(session, report.failed)
    if report.built and not session.json:
        name = layers[0]["name"] if layers else report.built[0].name.partition("@")[0]
        foreign = any(spec.op == EXTERN for spec in wanted.specs)  # --check has no definition of theirs
        on_gpu = "" if foreign else f", or on a GPU: fusekit run {name} --check"
        session.note(f"next: fusekit show {name}{on_gpu}")
    kept = 0 if report.pruned is None else unread(session, report.pruned)
    return kept if report.ok else 1


def _confirmed(session: Session, kernels: int, expected: Estimate | None) -> bool:
    """Whether to compile every packaged kernel; asked on a terminal only."""
    if session.json or session.quiet or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    count = f"{output.plural(kernels, 'kernel')} to compile{_about(expected)}"
    if click.confirm(f"without a TARGET every packaged spec is built: {count}; continue?", err=True):
        return True
    session.note("nothing was built; `fusekit build quickstart` builds three kernels, `--dry-run` lists them all")
    return False


def _about(expected: Estimate | None) -> str:
    return f", about {output.duration(expected.whole)}" if expected else ""


def _layers(wanted: BuildPlan) -> list[dict[str, Any]]:
    """Each layer, for each architecture, with the kernels that it needs."""
    from fusekit.spec.schemas import layer_name, layer_of

    layers = {(name, spec.arch): layer_of(spec) for spec in wanted.specs if (name := layer_name(spec))}
    if not layers:
        return []
    from fusekit.plan.layer import program

    return [
        {"name": name, "arch": arch, "kernels": [f"{name}.{part}" for part in program(options).parts]}
        for (name, arch), options in sorted(layers.items(), key=lambda item: item[0])
    ]


def _by_layer(rows: list[tuple[Any, ...]], layers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The rows, which begin with a name and an architecture; those of layers last, each layer under its own row."""
    of = {(kernel, layer["arch"]): layer["name"] for layer in layers for kernel in layer["kernels"]}
    by: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        by.setdefault(of.get((row[0].partition("@")[0], row[1]), ""), []).append(row)
    grouped = by.pop("", [])
    for layer in layers:
        of_layer = [row for row in by.get(layer["name"], ()) if row[1] == layer["arch"]]
        if of_layer:
            kernels = f"needs {output.plural(len(layer['kernels']), 'kernel')}:"
            grouped += [(layer["name"], layer["arch"], kernels, *[""] * (len(of_layer[0]) - 3)), *of_layer]
    return grouped


def _explain(session: Session, wanted: BuildPlan, store: Store) -> None:
    """With --verbose, print which kernels are cached, and why the others are not."""
    if session.verbose:
        from fusekit.compiler.explain import explain

        for task in (*wanted.hits, *wanted.misses):
            for spec in task.specs:
                reason = explain(store, spec, task.fields).reason
                session.detail(f"{spec.full_name} ({spec.arch}): {reason}")


@contextlib.contextmanager
def _executor(session: Session, url: str | None, seconds: float | None) -> Iterator[Executor | None]:
    if url is None:
        yield None
        return
    from fusekit.compiler.executor import WORKER_SECONDS, connect

    with connect(url, note=session.note, worker_seconds=seconds or WORKER_SECONDS) as executor:
        yield executor


def _dry_run(
    session: Session, wanted: BuildPlan, layers: list[dict[str, Any]], store: Store, left: list[Left],
    expected: Estimate | None,
) -> int:  # fmt: skip
    from fusekit.compiler.explain import explain

    missing = [explain(store, spec, task.fields) for task in wanted.misses for spec in task.specs]
    cached = [spec.full_name for task in wanted.hits for spec in task.specs]
    keys = ("name", "arch", "key", "status", "reason")
    document = {
        "would_build": [{key: getattr(miss, key) for key in keys} for miss in missing],
        "cached": cached,
        "failed": _failed_document(wanted.failed),
        "warnings": session.warned,
        "left_behind": left,
        "layers": layers,
        "estimated_seconds": expected and round(expected.whole, 1),
    }

    def text() -> None:
        if missing:
            rows = [(miss.name, miss.arch, (miss.key or "")[:12], miss.reason) for miss in missing]
            output.table(
                session, ("NAME", "ARCH", "KEY", "WHY"), _by_layer(rows, layers), spare=("KEY", "ARCH"), prose=("WHY",)
            )
        kernels = output.plural(len(wanted.misses), "kernel")
        click.echo(f"{len(missing)} to build ({kernels} to compile{_about(expected)}), {len(cached)} cached")

    output.answer(session, document, text)
    _left(session, left, None, prune=False)
    failures(session, wanted.failed)
    return 1 if wanted.failed else 0


def _check(
    session: Session, lock_path: str, targets: tuple[str, ...], jobs: int | None, executor: Executor | None,
    namespace: str | None, allow_extern: bool,
) -> int:  # fmt: skip
    from fusekit.compiler.build_check import check_build
    from fusekit.store.lockfile import read_lock

    lock = read_lock(Path(lock_path), session.open_store().trust, folder=True)
    with progress(session, "compiling") as update:
        checked = check_build(
            lock,
            targets,
            jobs,
            lambda step: update(step.done, step.total, step.name, 0),
            executor=executor,
            namespace=namespace,
            allow_extern=allow_extern or session.config.allow_extern,
        )
    document = _document(session, checked.report, [])
    document |= comparison_document(checked.same, checked.changed, checked.missing)
    output.answer(session, document, lambda: _check_text(session, document))
    failures(session, checked.report.failed)
    return 0 if checked.ok else 1


def comparison_document(
    same: Sequence[Where], changed: Sequence[Change], missing: Sequence[tuple[Where, str]]
) -> dict[str, Any]:
    """`same`, `changed` and `missing` of a comparison with a lock."""
    return {
        "same": [name for name, _ in same],
        "changed": [
            {"name": row.name, "arch": row.arch, "expected": row.before, "found": row.now, "reason": row.why}
            for row in changed
        ],
        "missing": [{"name": name, "arch": arch, "reason": why} for (name, arch), why in missing],
    }


def _check_text(session: Session, document: Mapping[str, Any]) -> None:
    comparison_text(session, document)
    counts = [f"{len(document[label])} {label}" for label in ("same", "changed", "missing", "failed")]
    click.echo(", ".join(counts))


def comparison_text(session: Session, document: Mapping[str, Any]) -> None:
    """A row for every kernel that differs."""
    rows = [(row["name"], row["expected"][:12], row["found"][:12], row["reason"]) for row in document["changed"]]
    rows += [(row["name"], "", "", row["reason"]) for row in document["missing"]]
    if rows:
        output.table(session, ("NAME", "LOCK", "NOW", "WHY"), rows, spare=("NOW", "LOCK"), prose=("WHY",))


def _document(session: Session, report: BuildReport, layers: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("name", "arch", "key", "cubin_sha256", "bytes", "seconds", "proved_launches")
    return {
        "built": [{key: getattr(built, key) for key in keys} for built in report.built],
        "cached": report.cached,
        "failed": _failed_document(report.failed),
        "seconds": report.seconds,
        "warnings": session.warned,
        "untrusted": report.untrusted,
        "moved": report.moved,
        "left_behind": report.left,
        "pruned": [{"name": name, "arch": arch} for name, arch in report.pruned.names] if report.pruned else [],
        "layers": layers,
    }


def _failed_document(failures: Sequence[Failed]) -> list[dict[str, str]]:
    return [{"name": failed.name, "arch": failed.arch, "error": failed.error} for failed in failures]


def _text(session: Session, report: BuildReport, layers: list[dict[str, Any]]) -> None:
    if report.built:
        headings = ("NAME", "ARCH", "RESULT", "REGISTERS", "SPILLED", "CUBIN", "PROVED", "SECONDS")
        rows = [
            (row.name, row.arch, result, row.registers, row.spill_bytes, output.size(row.bytes),
             f"{row.proved_launches} launches", f"{row.seconds:.2f}")
            for result, kernels in (("built", report.built), ("hit", report.hits))
            for row in kernels
        ]  # fmt: skip
        output.table(
            session, headings, _by_layer(rows, layers), right=("REGISTERS", "SPILLED", "CUBIN", "SECONDS"),
            spare=("PROVED", "SPILLED", "REGISTERS", "CUBIN", "ARCH"),
        )  # fmt: skip
    total = len(report.built) + len(report.hits) + len(report.failed)
    if len(report.hits) == total:
        click.echo(f"{output.plural(total, 'kernel')}, all cached ({report.seconds:.2f} s)")
        return
    counts = [(len(report.built), "built"), (len(report.hits), "cached"), (len(report.failed), "failed")]
    click.echo(f"{', '.join(f'{count} {what}' for count, what in counts if count)} ({report.seconds:.2f} s)")


def _untrusted(session: Session, names: tuple[str, ...]) -> None:
    if names:
        files = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
        session.note(
            f"left out: {output.plural(len(names), 'foreign kernel')} ({files}), whose specs run Python to be built; "
            "--allow-extern builds them too"
        )


def _moved(session: Session, moved: list[Moved]) -> None:
    """Print which names point to other kernels now."""
    other = [name for name in moved if name.differs]
    for name in other[:NAMED]:
        session.note(
            f"{name.name} ({name.arch}) pointed to another kernel before: {', '.join(name.differs)} "
            f"{'differs' if len(name.differs) == 1 else 'differ'} in its spec"
        )
    if len(other) > NAMED:
        session.note(f"... and {len(other) - NAMED} more; --json lists all")
    if other:
        file = other[0].name.partition("/")[0]
        session.note(
            f"if another spec file of the same stem ({file}) had these names, give one of the two a namespace: "
            '--namespace TEXT, or namespace = "TEXT" in the file'
        )
    if same := len(moved) - len(other):
        point = "now points to a new build" if same == 1 else "now point to new builds"
        session.note(
            f"{output.plural(same, 'name')} {point}: same spec, other sources, options or toolchain; earlier builds of "
            "another cubin format stay for the drivers that need them"
        )


def _left(session: Session, left: list[Left], pruned: DiscardReport | None, *, prune: bool) -> None:
    """Print which names the spec files no longer have, and whether they were removed."""
    gone = set() if pruned is None else set(pruned.names)
    if gone:
        session.note(f"removed, as the spec no longer has them: {some([name for name, _ in sorted(gone)], NAMED)}")
    stay = [name for name in left if (name.name, name.arch) not in gone]
    if not stay:
        return
    names = some([name.name for name in stay], NAMED)
    if pruned is not None:
        why = "; they are in a read-only root, or in use"
    elif prune:
        why = "; nothing is removed, as kernels have failed"
    else:
        why = "; remove them with --prune, or `fusekit rm NAME`"
    session.note(f"in the store, and no longer in the spec: {names}{why}")


def failures(session: Session, failures: Sequence[Failed]) -> None:
    for failed in failures:
        session.error(f"{failed.name} ({failed.arch}): {failed.error}")
        if session.debug and failed.detail:
            session.note(failed.detail)

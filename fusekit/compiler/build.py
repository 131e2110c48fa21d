"""`fusekit.build`: what is missing in the store is compiled, proven and published."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusekit.compiler.families import plan
from fusekit.compiler.identity import Identity
from fusekit.compiler.sources import changed
from fusekit.compiler.toolchain import describe, distributions
from fusekit.config import Config
from fusekit.errors import BuildError, FusekitError, IntegrityError, StoreError, ToolchainError, UsageError
from fusekit.spec import KernelSpec, find
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit.store.keys import sha256

if TYPE_CHECKING:
    from fusekit.compiler.plan import TracePlan
    from fusekit.compiler.pool import Worker


@dataclass(frozen=True, slots=True)
class Task:
    """One key and the specs that stand for it: names that differ in run-time scalars alone share a kernel."""

    key: str
    fields: dict[str, str]
    specs: tuple[KernelSpec, ...]

    @property
    def name(self) -> str:
        return self.specs[0].full_name

    @property
    def arch(self) -> str:
        return self.specs[0].arch


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do: tasks that are in the store already, and those that are not."""

    hits: tuple[Task, ...]
    misses: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """One name whose kernel was compiled now. bytes: of the cubin; seconds: to trace, compile and prove it."""

    name: str
    arch: str
    key: str
    cubin_sha256: str
    bytes: int
    seconds: float
    proved_launches: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """One name that could not be built, and why. detail: a traceback where the cause is a defect, else empty."""

    name: str
    arch: str
    error: str
    detail: str = ""


@dataclass(slots=True)
class BuildReport:
    """built: compiled now. cached: full names found in the store. failed: the rest. seconds: of the whole call."""

    built: list[Built] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: kernels finished and in all (one for each key that was missing), and the last one with its outcome."""

    done: int
    total: int
    name: str = ""
    error: str = ""


def build(
    targets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    arch: str | Sequence[str] | None = None,
    jobs: int | None = None,
    config: Config | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Builds what the store lacks of `targets`; needs the `build` extra, but no GPU.

    targets: spec files, names or globs; none: every packaged spec. arch: only these architectures. jobs: compile
    processes; default: one for each processor this process may use. config: names the store; default: from the
    environment. progress: called with a `Progress` at the start and after every kernel. A kernel that fails does not
    stop the others: look at the report's `failed`. Raises UsageError and SpecError for bad targets, ToolchainError
    without the DSL, StoreError and IntegrityError when the store cannot be written.
    """
    start = time.perf_counter()
    store = Store.open(config or Config.from_environment())
    wanted = plan_build(select(targets, arch), store)
    report = execute(wanted, store, jobs, progress)
    report.seconds = round(time.perf_counter() - start, 3)
    return report


def select(
    targets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), arch: str | Sequence[str] | None = None
) -> tuple[KernelSpec, ...]:
    """The specs that `targets` and `arch` name; UsageError when an architecture has none of them."""
    several = [targets] if isinstance(targets, str | os.PathLike) else list(targets)
    specs = find([os.fspath(target) for target in several])
    if arch is None:
        return specs
    wanted = {arch} if isinstance(arch, str) else set(arch)
    known = sorted({spec.arch for spec in specs})
    for name in sorted(wanted - set(known)):
        raise UsageError(f"arch '{name}': none of the kernels named is for it; they are for {', '.join(known)}")
    return tuple(spec for spec in specs if spec.arch in wanted)


def plan_build(specs: Sequence[KernelSpec], store: Store, identity: Identity | None = None) -> BuildPlan:
    """Splits `specs` into what `store` has whole and what it lacks. Imports no compiler and writes nothing."""
    identity = identity or Identity()
    grouped: dict[str, tuple[dict[str, str], list[KernelSpec]]] = {}
    for spec in specs:
        fields = identity.key_fields(spec)
        grouped.setdefault(key_of(fields), (fields, []))[1].append(spec)
    tasks = [Task(key, fields, tuple(members)) for key, (fields, members) in grouped.items()]
    found = {task.key for task in tasks if _stored(store, task.key) is not None}
    return BuildPlan(
        hits=tuple(task for task in tasks if task.key in found),
        misses=tuple(task for task in tasks if task.key not in found),
    )


def execute(
    wanted: BuildPlan,
    store: Store,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    planner: Callable[[KernelSpec], TracePlan] = plan,
) -> BuildReport:
    """Builds the plan's misses and names everything; see `build`. planner: importable by name; called in a worker."""
    report = BuildReport()
    for task in wanted.hits:
        _name(store, task)
        report.cached += [spec.full_name for spec in task.specs]
    if not wanted.misses:
        return report
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}; it must be at least 1; leave it out for one per processor")
    from fusekit.compiler.pool import run

    notify = progress or (lambda _: None)
    total = len(wanted.misses)
    notify(Progress(0, total))
    workers = jobs or len(os.sched_getaffinity(0))
    with closing(run(wanted.misses, workers, lambda worker, task: _make(worker, task, store, planner))) as outcomes:
        for done, (task, outcome) in enumerate(outcomes, start=1):
            if isinstance(outcome, Exception):
                _fail(report, task, outcome)
            else:
                _report(report, task, outcome)
            notify(Progress(done, total, task.name, str(outcome) if isinstance(outcome, Exception) else ""))
    names = [(spec.full_name, spec.arch) for task in wanted.misses for spec in task.specs]
    report.built.sort(key=lambda built: names.index((built.name, built.arch)))
    report.failed.sort(key=lambda failed: names.index((failed.name, failed.arch)))
    return report


def _make(worker: Worker, task: Task, store: Store, planner: Callable[[KernelSpec], TracePlan]) -> tuple[Entry, bool]:
    """The entry of `task`, and whether it was compiled here. Another process may have been faster."""
    from fusekit.compiler.worker import Job

    with store.lock(task.key):
        entry = _stored(store, task.key)
        made = entry is None
        if entry is None:
            done = worker.compile(Job(task.name, planner, task.specs[0]))
            compiled = done.compiled
            _unchanged(task)
            fresh = Entry(
                key=task.key,
                fields=task.fields,
                cubin_sha256=sha256(compiled.cubin),
                cubin_bytes=len(compiled.cubin),
                launch=compiled.launch,
                resources=compiled.resources,
                proof=compiled.proof,
                toolchain=describe(_labelled(task.fields, "toolchain.")),
                seconds=done.seconds,
            )
            entry = store.publish(fresh, compiled.cubin)
    _name(store, task)
    return entry, made


def _unchanged(task: Task) -> None:
    """Raises BuildError if a source was edited meanwhile: which version was compiled can then not be told."""
    sources, toolchain = _labelled(task.fields, "source."), _labelled(task.fields, "toolchain.")
    names = [f"source.{name}" for name in changed(sources)]
    names += [f"toolchain.{name}" for name, _ in sorted(toolchain.items() ^ distributions().items())]
    if names:
        listed = ", ".join(dict.fromkeys(names))
        raise BuildError(f"{listed} changed while {task.name} was compiled; run the build again")


def _stored(store: Store, key: str) -> Entry | None:
    """The entry of `key` with a whole cubin; one that is damaged counts as missing: a build mends it."""
    try:
        found = store.load(key)
    except IntegrityError:
        return None
    return None if found is None else found[0]


def _name(store: Store, task: Task) -> None:
    for spec in task.specs:
        store.publish_name(NameRecord(spec.full_name, spec.arch, task.key, spec.canonical(), spec.defaults()))


def _report(report: BuildReport, task: Task, outcome: tuple[Entry, bool]) -> None:
    entry, made = outcome
    if not made:
        report.cached += [spec.full_name for spec in task.specs]
        return
    report.built += [
        Built(
            name=spec.full_name,
            arch=spec.arch,
            key=entry.key,
            cubin_sha256=entry.cubin_sha256,
            bytes=entry.cubin_bytes,
            seconds=entry.seconds,
            proved_launches=entry.proof["launches"],
            registers=entry.resources["registers"],
            spill_bytes=entry.resources["spill_bytes"],
        )
        for spec in task.specs
    ]


def _fail(report: BuildReport, task: Task, error: Exception) -> None:
    # A kernel's own failure is reported; a store or a toolchain that fails would fail every kernel: it ends the build.
    if isinstance(error, StoreError | IntegrityError | ToolchainError) or not isinstance(error, FusekitError):
        raise error
    detail = "\n".join(getattr(error, "__notes__", ()))
    report.failed += [Failed(spec.full_name, spec.arch, str(error), detail) for spec in task.specs]


def _labelled(fields: dict[str, str], prefix: str) -> dict[str, str]:
    """The fields of one kind, by what follows `prefix`."""
    return {label.removeprefix(prefix): value for label, value in fields.items() if label.startswith(prefix)}

"""`fusekit.build`: what is missing in the store is compiled, proven and published."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fusekit.compiler.explain import check_usable
from fusekit.compiler.foreign import Foreign
from fusekit.compiler.identity import Identity
from fusekit.compiler.naming import Left, Moved, give_names, left_behind, record_of
from fusekit.compiler.options import variables
from fusekit.compiler.sources import Sources
from fusekit.compiler.targets import Arches, Targets, look_up, of_arch, several, trust
from fusekit.compiler.toolchain import distributions
from fusekit.config import Config
from fusekit.errors import (
    ArgumentError,
    BuildError,
    FusekitError,
    IntegrityError,
    SignatureError,
    StoreError,
    ToolchainError,
)
from fusekit.spec import ExternSpec, Spec
from fusekit.spec.catalog import Found, specs_of
from fusekit.store import DiscardReport, Entry, Store, key_of
from fusekit.store.entries import CUBIN_FORMAT
from fusekit.store.keys import sha256
from fusekit.store.locks import PATIENCE

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fusekit.compiler.hostfunction import TracePlan
    from fusekit.compiler.pool import Compiler


@dataclass(frozen=True, slots=True)
class Task:
    """One key and the specs that have it: names that differ in run-time scalars alone share a kernel.

    sources: what the key was made from. summary: of the store's entry (see `Entry.summary`), if it has it whole. named:
    the store has every name too.
    """

    key: str
    fields: dict[str, str]
    specs: tuple[Spec, ...]
    sources: Sources
    summary: Mapping[str, Any] | None = None
    named: bool = False

    @property
    def name(self) -> str:
        return self.specs[0].full_name


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do: tasks that are in the store already, those that are not, and specs without a key."""

    hits: tuple[Task, ...] = ()
    misses: tuple[Task, ...] = ()
    failed: tuple[Failed, ...] = ()

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every spec that has a key, hits first."""
        return tuple(spec for task in (*self.hits, *self.misses) for spec in task.specs)


@dataclass(frozen=True, slots=True)
class Built:
    """One name and its kernel. bytes: of the cubin; seconds: that it took to trace, compile and prove it."""

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
    """built: compiled now. hits: found in the store. failed: the rest. seconds: of the whole call. moved: names that
    now point to new builds. left: names that the store has, and the spec files no longer. pruned: those of
    `left` that were removed, if that was asked for. untrusted: names of foreign kernels that were left out. layers:
    those that have a new record.
    """

    built: list[Built] = field(default_factory=list)
    hits: list[Built] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    seconds: float = 0.0
    moved: list[Moved] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    pruned: DiscardReport | None = None
    untrusted: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    @property
    def cached(self) -> list[str]:
        """The full names of `hits`."""
        return [hit.name for hit in self.hits]

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
    targets: Targets | None = None,
    arch: Arches = None,
    jobs: int | None = None,
    config: Config | None = None,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    namespace: str | None = None,
    prune: bool = False,
    allow_extern: bool = False,
) -> BuildReport:
    """Builds what the store lacks of `targets`. Needs the `build` extra, but no GPU.

    Each kernel is published as it comes. One that fails, whose process dies, or that cannot replace what is in the
    store, does not stop the others: see `BuildReport.failed`.

    Parameters
    ----------
    targets : str, os.PathLike or a list of them, optional
        Spec files (also with a kernel, `moe.toml/fc1`), folders of them, packaged names, or globs over either; see
        `fusekit.spec.catalog.targets`. Default: every packaged spec.
    arch : str or a collection of them, optional
        Only these architectures. Default: those of the specs.
    jobs : int, optional
        Compile processes, fewer where the memory holds fewer; with `executor`, kernels in flight. Default: one per
        processor that this process may use.
    config : Config, optional
        Names the store. Default: from the environment.
    progress : callable, optional
        Called with a `Progress` at the start and after every kernel.
    executor : concurrent.futures.Executor, optional
        Compiles on its processes instead. Each needs the same fusekit and toolchain, but not the store. It is left
        open.
    namespace : str, optional
        Begins every name, instead of the files' own.
    prune : bool
        Removes names in the writable store that the targets mean and their files no longer have, once all is built.
    allow_extern : bool
        Lets the build run the Python that specs with op = "extern" name, as the configuration may. Without it such a
        target is a UsageError, and no target leaves them out.

    Returns
    -------
    BuildReport
        What was built, found in the store, failed and renamed.

    Raises
    ------
    UsageError, SpecError
        The targets are not valid.
    ArgumentError
        An argument has another type.
    ToolchainError
        The DSL is not installed.
    StoreError
        The store cannot be written.
    SignatureError
        The store would not trust what is built.
    """
    start = time.perf_counter()
    ArgumentError.unless(Callable | None, "progress", progress, "a function of one argument")  # type: ignore[arg-type]
    ArgumentError.unless(str | None, "namespace", namespace, "text")
    for name, flag in (("prune", prune), ("allow_extern", allow_extern)):
        ArgumentError.unless(bool, name, flag, "True or False")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ArgumentError(
            f"executor = {executor!r}; it must be a concurrent.futures.Executor or the like, with `submit`",
            argument="executor",
        )
    config = Config.given(config)
    store = Store.open(config)
    given = () if targets is None else several("targets", targets)
    chosen = look_up(given, namespace, arch) if given or targets is None else ()  # an empty list names nothing
    trusted = trust(specs_of(chosen), allow_extern or config.allow_extern, named=bool(given))
    report = execute(plan_build(of_arch(trusted.specs, arch), store), store, jobs, progress, executor=executor)
    report.untrusted = list(trusted.left_out)
    tidy(report, store, chosen, arch, prune=prune)
    report.seconds = round(time.perf_counter() - start, 3)
    return report


def tidy(report: BuildReport, store: Store, chosen: Sequence[Found], arch: Arches = None, *, prune: bool) -> None:
    """Lists in `report` the names that are left behind, and removes them with `prune`, unless a kernel has failed."""
    report.left = left_behind(store, chosen, {arch} if isinstance(arch, str) else arch)
    if prune and report.ok:
        report.pruned = store.discard([(left.name, left.arch) for left in report.left if left.root == store.root])


def plan_build(specs: Sequence[Spec], store: Store, identity: Identity | None = None) -> BuildPlan:
    """Splits `specs` into what `store` has whole and what it lacks. Imports no compiler and writes nothing.

    A foreign kernel whose package is missing is one that failed.
    """
    identity, store = identity or Identity(), store.inspecting(check_usable)
    grouped: dict[str, tuple[dict[str, str], list[Spec]]] = {}
    failed = []
    for spec in specs:
        try:
            fields = identity.key_fields(spec)
        except BuildError as error:
            failed.append(Failed(spec.full_name, spec.arch, str(error)))
        else:
            grouped.setdefault(key_of(fields), (fields, []))[1].append(spec)
    tasks = [
        _look(store, Task(key, fields, tuple(members), identity.sources)) for key, (fields, members) in grouped.items()
    ]
    return BuildPlan(
        hits=tuple(task for task in tasks if task.summary is not None),
        misses=tuple(task for task in tasks if task.summary is None),
        failed=tuple(failed),
    )


def _look(store: Store, task: Task) -> Task:
    """The task with what the store has of it."""
    summaries = [store.settled(record_of(task.key, spec)) for spec in task.specs]
    if None not in summaries:
        return replace(task, summary=summaries[-1], named=True)
    entry = store.present(task.key)
    return replace(task, summary=None if entry is None else entry.summary())


def execute(
    wanted: BuildPlan,
    store: Store,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    planner: Callable[[Spec], TracePlan] | None = None,
    executor: Executor | None = None,
    named: bool = True,
) -> BuildReport:
    """Builds the plan's misses and names everything; see `build`.

    planner: instead of the operations' own; importable by name, called in a worker. named: False publishes no name.
    """
    report, store = BuildReport(failed=list(wanted.failed)), store.inspecting(check_usable)
    if jobs is not None:
        jobs = ArgumentError.integer("jobs", jobs, "a whole number, 1 or more; leave it out for one per processor", 1)
    if wanted.misses:
        _ = store.signer  # a key that cannot be read is refused before anything is written
    with store.lease() if wanted.misses or not all(task.named for task in wanted.hits) else nullcontext():
        for task in wanted.hits:
            assert task.summary is not None
            try:
                if named and not task.named:
                    report.moved += give_names(store, task.key, task.specs)
            except IntegrityError as error:
                _fail(report, task, error)
            else:
                report.hits += _rows(task, task.summary)
        if wanted.misses:
            _build(wanted.misses, store, jobs, progress or (lambda _: None), planner, executor, report, named)
        if named:
            _name_layers(wanted, store, report)
    order = {(spec.full_name, spec.arch): place for place, spec in enumerate(wanted.specs)}
    for rows in (report.built, report.hits, report.failed, report.moved):
        rows.sort(key=lambda row: order.get((row.name, row.arch), -1))
    return report


def _name_layers(wanted: BuildPlan, store: Store, report: BuildReport) -> None:
    """Publishes the records of the layers whose kernels are there."""
    done = {(built.name, built.arch): built.key for built in (*report.built, *report.hits)}
    specs = [spec for spec in wanted.specs if getattr(spec, "layer", None) is not None]
    if not specs:
        return
    from fusekit.compiler.layers import layers_of, publish_layer

    known = [(spec, key) for spec in specs if (key := done.get((spec.full_name, spec.arch))) is not None]
    for layer in layers_of(known):
        try:
            if publish_layer(store, layer):
                report.layers.append(layer.name)
        except (IntegrityError, StoreError, SignatureError):
            raise
        except FusekitError as error:
            report.failed.append(Failed(layer.name, layer.arch, str(error)))


def _build(
    misses: Sequence[Task],
    store: Store,
    jobs: int | None,
    notify: Callable[[Progress], None],
    planner: Callable[[Spec], TracePlan] | None,
    executor: Executor | None,
    report: BuildReport,
    named: bool,
) -> None:
    store.sign("entry", b"")  # a store that would not trust what is built here raises before it is built
    from fusekit.compiler.pool import processes, run

    total = len(misses)
    notify(Progress(0, total))
    if executor is None:
        team = processes(min(total, jobs or len(os.sched_getaffinity(0))))
    else:
        from fusekit.compiler.executor import IN_FLIGHT, remotes

        team = remotes(executor, min(total, jobs or IN_FLIGHT))

    begun: dict[str, float] = {}  # key -> when it was first tried

    def make(compiler: Compiler, task: Task) -> tuple[Entry, bool, list[Moved]]:
        waits = time.monotonic() - begun.setdefault(task.key, time.monotonic()) < PATIENCE
        return _make(compiler, task, store, planner, waits, named)

    with team as (compilers, stop), closing(run(misses, compilers, make, stop)) as outcomes:
        for done, (task, outcome) in enumerate(outcomes, start=1):
            if isinstance(outcome, Exception):
                _fail(report, task, outcome)
            else:
                entry, compiled, moved = outcome
                report.moved += moved
                (report.built if compiled else report.hits).extend(_rows(task, entry.summary()))
            notify(Progress(done, total, task.name, str(outcome) if isinstance(outcome, Exception) else ""))


def _make(
    compiler: Compiler, task: Task, store: Store, planner: Callable[[Spec], TracePlan] | None, waits: bool, named: bool
) -> tuple[Entry, bool, list[Moved]]:
    """The entry of `task`, whether it was compiled now, and the names that it moved. Another builder may have been
    faster. If it is at it now this is postponed, as long as it `waits`: so builders of one catalogue share it.
    """
    from fusekit.compiler.pool import PostponedError
    from fusekit.compiler.worker import Job, alone

    def compiled() -> tuple[Entry, bytes]:
        done = compiler.compile(Job(task.name, planner, alone(task.specs[0]), task.fields, _home(task.specs[0])))
        _unchanged(task)
        cubin = done.compiled.cubin
        entry = Entry(
            key=task.key,
            fields=task.fields,
            cubin_sha256=sha256(cubin),
            cubin_bytes=len(cubin),
            launch=done.compiled.launch,
            resources=done.compiled.resources | {"cubin_format": cubin[CUBIN_FORMAT]},
            proof=done.compiled.proof,
            toolchain=done.toolchain,
            seconds=done.seconds,
        )
        return entry, cubin

    outcome = store.ensure_unless_held(task.key, compiled) if waits else store.ensure(task.key, compiled, patience=0)
    if outcome is None:
        raise PostponedError
    entry, is_new = outcome
    return entry, is_new, give_names(store, task.key, task.specs, entry) if named else []


def _home(spec: Spec) -> tuple[str, ...] | None:
    """Where a foreign kernel is compiled: packages change the DSL as they are imported, each for itself."""
    if not isinstance(spec, ExternSpec):
        return None
    given = (f"{name}={value}" for name, value in variables(spec.env).items())
    return spec.source.partition(":")[0], spec.arch, *given


def _unchanged(task: Task) -> None:
    """Raises BuildError if a source was edited meanwhile: the version that was compiled is then unknown."""
    spec = task.specs[0]
    now = {f"toolchain.{name}": version for name, version in distributions().items()}
    now |= Foreign().fields(spec) if isinstance(spec, ExternSpec) else {}
    before = {label: value for label, value in task.fields.items() if label.startswith(("toolchain.", "foreign."))}
    sources = {label[7:]: value for label, value in task.fields.items() if label.startswith("source.")}
    names = [f"source.{name}" for name in task.sources.changed(sources)]
    names += dict.fromkeys(label for label, _ in sorted(before.items() ^ now.items()))
    if names:
        raise BuildError(f"{', '.join(names)} changed while {task.name} was compiled; run the build again")


def _rows(task: Task, summary: Mapping[str, Any]) -> list[Built]:
    facts = [summary[name] for name in ("cubin_sha256", "bytes", "seconds", "launches", "registers", "spill_bytes")]
    return [Built(spec.full_name, spec.arch, task.key, *facts) for spec in task.specs]


def _fail(report: BuildReport, task: Task, error: Exception) -> None:
    # A kernel's own failure is reported; a store, its key or a toolchain that fails would fail every one: it ends the
    # build.
    if isinstance(error, StoreError | SignatureError | ToolchainError) or not isinstance(error, FusekitError):
        raise error
    detail = "\n".join(getattr(error, "__notes__", ()))
    report.failed += [Failed(spec.full_name, spec.arch, str(error), detail) for spec in task.specs]

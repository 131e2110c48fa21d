"""Reproducibility: what the store has, or what is built anew, against a lock."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusekit.compiler.build import BuildReport, Progress, execute, plan_build
from fusekit.compiler.explain import check_usable
from fusekit.compiler.identity import Identity
from fusekit.compiler.resolve import layer_builds
from fusekit.compiler.targets import select, trust
from fusekit.errors import IntegrityError, StoreError, ToolchainError
from fusekit.share.lock_folder import Change, compared
from fusekit.spec import find
from fusekit.store import Store
from fusekit.store.entries import toolchain_label
from fusekit.store.lockfile import Build, Lock, Where

if TYPE_CHECKING:
    from fusekit.spec import Spec


@dataclass(frozen=True, slots=True)
class Checked:
    """How a rebuild compares with a lock: what is the same, what differs, what one of them lacks and why.

    report: of the rebuild.
    """

    same: list[Where]
    changed: list[Change]
    missing: list[tuple[Where, str]]
    report: BuildReport

    @property
    def ok(self) -> bool:
        return not self.changed and not self.missing and self.report.ok


def check_build(
    lock: Lock,
    targets: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    namespace: str | None = None,
    allow_extern: bool = False,
) -> Checked:
    """Builds kernels of `lock` from nothing and compares the cubins. No store is read or written.

    Parameters
    ----------
    lock : Lock
        What to compare with: its builds by the toolchain that is installed here.
    targets : sequence of str
        Its kernels to build, as for `fusekit.build`; none: all.
    jobs, progress, executor, namespace, allow_extern
        As for `fusekit.build`.

    Returns
    -------
    Checked
        The report of the rebuild, and which cubins differ.

    Raises
    ------
    ToolchainError
        The lock has no build by the toolchain that is installed here: other compilers make other bytes.
    """
    identity = Identity()
    label = _check_toolchain(lock, identity.toolchain)
    listed = {where for where, builds in lock.kernels.items() if label in {build.toolchain for build in builds}}
    specs = _chosen(listed, targets, namespace)
    wanted = list(trust(tuple(specs), allow_extern, named=True).specs)
    with tempfile.TemporaryDirectory(prefix="fusekit-check-") as folder:
        store = Store(Path(folder))
        report = execute(plan_build(wanted, store, identity), store, jobs, progress, executor=executor)
        entries = {(row.name, row.arch): store.find_entry(row.key) for row in (*report.built, *report.hits)}
        built = {where: Build.of(label, entry) for where, entry in entries.items() if entry is not None}
        records = layer_builds(store, wanted, {where: (build,) for where, build in built.items()})
    failed = {(row.name, row.arch) for row in report.failed}
    asked = {(spec.full_name, spec.arch) for spec in wanted} if targets else listed
    asked |= listed & {*records}
    built |= {where: build for where, (build,) in records.items()}
    return Checked(*compared(lock, built, asked - failed), report)


def _chosen(listed: Collection[Where], targets: Sequence[str], namespace: str | None) -> list[Spec]:
    """The specs of `targets` for each architecture that is listed; without targets those of what is listed."""
    if targets:
        return [spec for arch in sorted({arch for _, arch in listed}) for spec in select(targets, arch, namespace)]
    return [spec for spec in find([]) if (spec.full_name, spec.arch) in listed]


def locked_in(store: Store, specs: Iterable[Spec], identity: Identity) -> tuple[dict[Where, Build], dict[Where, str]]:
    """What `store` has whole of `specs`, under the keys that they have now; and what is wrong with that which it has
    not whole.
    """
    label = toolchain_label(identity.toolchain)
    locked: dict[Where, Build] = {}
    wrong: dict[Where, str] = {}
    planned = plan_build([*specs], store, identity)
    for task in (*planned.hits, *planned.misses):
        try:
            if (entry := store.find_entry(task.key)) is None:
                continue
            if task in planned.hits:
                locked |= dict.fromkeys(((spec.full_name, spec.arch) for spec in task.specs), Build.of(label, entry))
            else:
                store.read_cubin(entry)
                check_usable(entry)
        except (IntegrityError, StoreError) as error:
            wrong |= dict.fromkeys(((spec.full_name, spec.arch) for spec in task.specs), str(error))
    return locked, wrong


def _check_toolchain(lock: Lock, installed: dict[str, str]) -> str:
    """The label of the toolchain that is `installed`. Raises ToolchainError unless `lock` has builds by it."""
    label = toolchain_label(installed)
    if lock.toolchains.get(label) == installed:
        return label
    there = next(iter(lock.toolchains.values()), {})
    odd = [
        f"{name} {there.get(name, 'none')} there, {installed.get(name, 'none')} here"
        for name in sorted({*there, *installed})
        if there.get(name) != installed.get(name)
    ]
    raise ToolchainError(
        f"the lock {lock.path} is of another toolchain: {'; '.join(odd)}; other compilers make other bytes; install "
        "that one, or write a lock for this one with `fusekit lock --write`"
    )

"""Reproducibility: what the store has, or what is built anew, against a cache manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusekit.compiler.build import BuildReport, Progress, execute, plan_build, select, trust
from fusekit.compiler.explain import check_usable
from fusekit.compiler.identity import Identity
from fusekit.errors import IntegrityError, StoreError, ToolchainError
from fusekit.share.manifest import Comparison, Locked, Manifest
from fusekit.spec import find
from fusekit.store import Store

if TYPE_CHECKING:
    from fusekit.spec import Spec


@dataclass(frozen=True, slots=True)
class Checked:
    """How a rebuild compares with a manifest. report: of the rebuild."""

    comparison: Comparison
    report: BuildReport

    @property
    def ok(self) -> bool:
        return self.comparison.ok and self.report.ok


def check_build(
    manifest: Manifest,
    targets: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    namespace: str | None = None,
    allow_extern: bool = False,
) -> Checked:
    """Builds kernels of `manifest` from nothing and compares the cubins. No store is read or written.

    Parameters
    ----------
    manifest : Manifest
        The cache manifest to compare with.
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
        The manifest is of another toolchain than the one installed here: other compilers make other bytes.
    """
    identity = Identity()
    same_toolchain(manifest, identity.toolchain)
    wanted = list(trust(tuple(chosen(manifest, targets, namespace)), allow_extern, named=True).specs)
    with tempfile.TemporaryDirectory(prefix="fusekit-check-") as folder:
        store = Store(Path(folder))
        report = execute(plan_build(wanted, store, identity), store, jobs, progress, executor=executor)
        entries = {row.name: store.find_entry(row.key) for row in (*report.built, *report.hits)}
    built = {name: Locked.of(entry) for name, entry in entries.items() if entry is not None}
    failed = {row.name for row in report.failed}
    asked = {spec.full_name for spec in wanted} if targets else set(manifest.kernels)
    return Checked(manifest.compare(built, asked - failed), report)


def chosen(manifest: Manifest, targets: Sequence[str] = (), namespace: str | None = None) -> list[Spec]:
    """The specs of `targets` for the manifest's architecture; without targets those of the manifest that there are."""
    if targets:
        return list(select(targets, manifest.arch, namespace))
    return [spec for spec in find([]) if spec.arch == manifest.arch and spec.full_name in manifest.kernels]


def locked_in(store: Store, specs: Iterable[Spec], identity: Identity) -> tuple[dict[str, Locked], dict[str, str]]:
    """Full name -> what `store` has whole of `specs`, under the keys that they have now; and -> what is wrong with that
    which it has not whole.
    """
    locked: dict[str, Locked] = {}
    wrong: dict[str, str] = {}
    planned = plan_build([*specs], store, identity)
    for task in (*planned.hits, *planned.misses):
        try:
            if (entry := store.find_entry(task.key)) is None:
                continue
            if task in planned.hits:
                locked |= dict.fromkeys((spec.full_name for spec in task.specs), Locked.of(entry))
            else:
                store.read_cubin(entry)
                check_usable(entry)
        except (IntegrityError, StoreError) as error:
            wrong |= dict.fromkeys((spec.full_name for spec in task.specs), str(error))
    return locked, wrong


def same_toolchain(manifest: Manifest, installed: dict[str, str]) -> None:
    """Raises ToolchainError unless `manifest` is of the toolchain that is `installed`."""
    odd = [
        f"{name} {manifest.toolchain.get(name, 'none')} there, {installed.get(name, 'none')} here"
        for name in sorted({*manifest.toolchain, *installed})
        if manifest.toolchain.get(name) != installed.get(name)
    ]
    if odd:
        raise ToolchainError(
            f"the manifest {manifest.filename} is of another toolchain: {'; '.join(odd)}; other compilers make other "
            "bytes; install that one, or write a manifest for this one with `fusekit lock --write`"
        )

"""What a lock of a project lists: every kernel of its targets, under the key that it has now, for each toolchain."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from fusekit.compiler.explain import check_usable
from fusekit.compiler.identity import Identity
from fusekit.errors import IntegrityError, StoreError
from fusekit.share.lock_folder import Change
from fusekit.store.entries import toolchain_label
from fusekit.store.keys import key_of, sha256
from fusekit.store.lockfile import Build, Lock, Where
from fusekit.store.names import layer_record

if TYPE_CHECKING:
    from fusekit.project import Project
    from fusekit.spec import Spec
    from fusekit.store import Store

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Missing:
    """A build that a lock should list and that no root of the store has. key: that it has now; None if that is not
    known here. why: None if it was not built yet.
    """

    name: str
    arch: str
    toolchain: str
    key: str | None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """lock: what is resolved, with the id and serial of the one before. missing: what it lacks. left_out: (name,
    toolchain) of builds of a toolchain that the project does not ask for, that are not as the specs have them now.
    """

    lock: Lock
    missing: tuple[Missing, ...]
    left_out: tuple[tuple[str, str], ...]


def resolve(store: Store, specs: Sequence[Spec], project: Project, before: Lock | None) -> Resolved:
    """What a lock lists of `specs`. Compiles nothing.

    A build of a toolchain that is not installed is taken from the store, or from `before` if its key is the one that
    the toolchain gives now. Which toolchains: those that the project names, else the one installed here and those that
    `before` or the store has for a name.
    """
    installed = Identity()
    identities = {toolchain_label(installed.toolchain): installed}
    for versions in _others(store, specs, before):
        label = toolchain_label(versions)
        if label not in identities and (not project.toolchains or label in project.toolchains):
            identities[label] = Identity(toolchain=dict(versions), sources=installed.sources)
    wanted = [label for label in identities if not project.toolchains or label in project.toolchains]
    unknown = [label for label in project.toolchains if label not in identities]
    required = {*project.toolchains} or {next(iter(identities))}
    kernels: dict[Where, tuple[Build, ...]] = {}
    missing: list[Missing] = []
    left_out: list[tuple[str, str]] = []
    for spec in specs:
        where = spec.full_name, spec.arch
        listed = {build.toolchain: build for build in (before.kernels.get(where, ()) if before is not None else ())}
        builds = []
        for label in wanted:
            key, why = key_of(identities[label].key_fields(spec)), None
            build = None
            try:
                build = _stored(store, key, label)
            except (IntegrityError, StoreError) as error:
                why = str(error)
            if build is None and label in listed and listed[label].key == key:
                build = listed[label]
            if build is not None:
                builds.append(build)
            elif label in required:
                missing.append(Missing(*where, label, key, why))
            elif label in listed:
                left_out.append((spec.full_name, label))
        missing += [Missing(*where, label, None) for label in unknown]
        if builds:
            kernels[where] = tuple(sorted(builds))
    kernels |= layer_builds(store, specs, kernels, {} if before is None else before.kernels)
    labels = {build.toolchain for builds in kernels.values() for build in builds}
    tables = {arch: store.tuning_tables(arch) for arch in sorted({spec.arch for spec in specs})}
    lock = Lock(
        id=os.urandom(_ID_BYTES).hex() if before is None else before.id,
        serial=1 if before is None else before.serial,
        expires=None if before is None else before.expires,
        toolchains={label: dict(identities[label].toolchain) for label in sorted(labels)},
        tuning={arch: sha256(found[0][1]) for arch, found in tables.items() if found},
        kernels=dict(sorted(kernels.items())),
        path=project.lock_path,
    )
    return Resolved(lock, tuple(missing), tuple(left_out))


def layer_builds(
    store: Store, specs: Iterable[Spec], kernels: Mapping[Where, tuple[Build, ...]],
    listed: Mapping[Where, tuple[Build, ...]] = MappingProxyType({}),
) -> dict[Where, tuple[Build, ...]]:  # fmt: skip
    """The records of the layers of `specs`, for each toolchain whose kernels are in `kernels`: those of the store, or
    of `listed`, a lock before, where that lists the same kernels.
    """
    layers: dict[Where, tuple[Build, ...]] = {}
    for name, arch in sorted({(f"{layer.file}/{layer.name}", spec.arch) for spec in specs
                              if (layer := getattr(spec, "layer", None)) is not None}):  # fmt: skip
        where = layer_record(name), arch
        parts = [each for each in kernels if each[1] == arch and each[0].startswith(f"{name}.")]
        records = [record] if (record := store.find_name(*where)) is not None else []
        records += [each for record in records for each in store.candidates(record)[1:]]
        found: dict[str, Build] = {}
        for build in listed.get(where, ()):
            if all(_of(kernels, part, build.toolchain) == _of(listed, part, build.toolchain) for part in parts):
                found[build.toolchain] = build
        for record in records:
            entry = store.find_entry(record.key)
            for label in {build.toolchain for part in parts for build in kernels[part]}:
                keys = {build.key for part in parts for build in _of(kernels, part, label)}
                if entry is not None and keys.issuperset(entry.launch["kernels"]) and label not in found:
                    found[label] = Build.of(label, entry)
        if found:
            layers[where] = tuple(sorted(found.values()))
    return layers


def _of(kernels: Mapping[Where, tuple[Build, ...]], where: Where, label: str) -> list[Build]:
    return [build for build in kernels.get(where, ()) if build.toolchain == label]


def changes(before: Lock | None, resolved: Resolved) -> tuple[Change, ...]:
    """How what is resolved differs from `before`, build by build; what is missing, by its key."""
    old, new = ({} if lock is None else _by_toolchain(lock) for lock in (before, resolved.lock))
    missing = {(row.name, row.arch, row.toolchain): row.key for row in resolved.missing}
    rows = []
    for where in sorted({*old, *new, *missing}):
        one, other = old.get(where), new.get(where)
        if one is not None and one == other:
            continue
        if one is not None and other is not None and one.key == other.key:
            part = one.differs(other) or "launch record"
            rows.append(Change(*where, one.digest(part), other.digest(part)))
        else:
            now = missing.get(where) if other is None else other.key
            rows.append(Change(*where, None if one is None else one.key, now))
    return tuple(rows)


def expiry(days: float) -> datetime:
    """The time in so many days, in whole seconds."""
    return (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)


def _by_toolchain(lock: Lock) -> dict[tuple[str, str, str], Build]:
    return {(*where, build.toolchain): build for where, builds in lock.kernels.items() for build in builds}


def _stored(store: Store, key: str, label: str) -> Build | None:
    """The build of `key`, if a root has it whole."""
    entry = store.find_entry(key)
    if entry is None:
        return None
    check_usable(entry)
    store.read_cubin(entry)
    return Build.of(label, entry)


def _others(store: Store, specs: Iterable[Spec], before: Lock | None) -> list[Mapping[str, str]]:
    """The toolchains of `before`, and those of which the store has a build of one of `specs`."""
    toolchains = {toolchain_label(versions): versions for versions in (before.toolchains.values() if before else ())}
    for spec in specs:
        try:
            record = store.find_name(spec.full_name, spec.arch)
            builds = [] if record is None else store.candidates(record)
        except (IntegrityError, StoreError):
            continue
        for build in builds:
            label = build.summary.get("toolchain")
            if label is not None and label not in toolchains and (entry := store.find_entry(build.key)) is not None:
                toolchains[label] = entry.toolchain["distributions"]
    return [*toolchains.values()]

"""What a build does to names: which now point to new builds, and which the spec files no longer have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusekit.errors import IntegrityError, StoreError
from fusekit.store import NameRecord, Store
from fusekit.store.names import differences, layer_of

if TYPE_CHECKING:
    from pathlib import Path

    from fusekit.spec import Spec
    from fusekit.spec.catalog import Found
    from fusekit.store import Entry


@dataclass(frozen=True, slots=True)
class Moved:
    """A name that now points to another kernel, or to the same with other defaults.

    before, now: keys. differs: the keys of the spec that have another value; empty where only sources, toolchain or
    format of the key changed: then it computes the same.
    """

    name: str
    arch: str
    before: str
    now: str
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A name in the store that a target means and that its spec file does not have. root: path of the store."""

    name: str
    arch: str
    root: Path


def record_of(key: str, spec: Spec) -> NameRecord:
    """The record that points the name of `spec` to `key`."""
    return NameRecord(spec.full_name, spec.arch, key, spec.canonical(), spec.defaults())


def give_names(store: Store, key: str, specs: Sequence[Spec], entry: Entry | None = None) -> list[Moved]:
    """Publishes a name for each of `specs`; returns those that pointed to another build."""
    moved = []
    for spec in specs:
        record, before = record_of(key, spec), None
        with suppress(IntegrityError, StoreError):  # a damaged one is replaced
            before = store.find_name(record.name, record.arch)
        store.publish_name(record, entry)
        if before is not None and (before.key, before.defaults) != (record.key, record.defaults):
            moved.append(Moved(record.name, record.arch, before.key, record.key, differences(before.spec, record.spec)))
    return moved


def left_behind(store: Store, chosen: Sequence[Found], archs: Collection[str] | None = None) -> list[Left]:
    """The names in `store`, of `archs` (None: of all), that the targets mean and their files no longer have."""
    there = {(spec.full_name, spec.arch) for file in chosen for spec in file.every}
    layers = {(f"{each.file}/{each.name}", spec.arch) for file in chosen for spec in file.every
              if (each := getattr(spec, "layer", None)) is not None}  # fmt: skip
    left: dict[tuple[str, str], Left] = {}
    for file in chosen:
        archs_of_file = {spec.arch for spec in file.every}
        for (name, arch), root in store.recorded(file.file).items():
            if file.packaged and arch not in archs_of_file:  # built for another than the file names
                continue
            if (layer := layer_of(name)) is not None and (layer, arch) in layers:
                continue
            if (name, arch) not in there and file.means(name) and (archs is None or arch in archs):
                left[name, arch] = Left(name, arch, root)
    return [left[where] for where in sorted(left)]

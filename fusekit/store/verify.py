"""Checking a whole store: every document, every name, every cubin."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusekit.errors import IntegrityError, NoStoreError, OtherSchemaError, StoreError
from fusekit.store import names
from fusekit.store.documents import damaged
from fusekit.store.entries import Entry
from fusekit.store.files import quietly, size_of
from fusekit.store.folders import Folders, printable
from fusekit.store.keys import is_digest
from fusekit.store.layout import MARKER, open_to_all, strays
from fusekit.store.marker import absence, check_format, is_file
from fusekit.store.names import NameRecord
from fusekit.store.root import Root
from fusekit.store.scan import digests_of

_PAUSES = (0.01, 0.05)  # seconds
_PATIENCE = 2.0  # seconds, of one verification: a store that lost thousands of cubins is not waited for


@dataclass(frozen=True, slots=True)
class Inspect:
    """Checks of documents whose content a store does not know; each raises IntegrityError for one that cannot be used.

    entry takes the entry and its cubin, if that was read. tuning takes bytes, path and architecture of a tuning table.
    See `fusekit.runtime.wellformed`.
    """

    entry: Callable[[Entry, bytes | None], None]
    name: Callable[[NameRecord], None]
    tuning: Callable[[bytes, str, str], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. key: of the entry, empty if not known. path: the file. root: path of the root."""

    key: str
    problem: str
    path: Path
    root: Path


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a check.

    entries, names, blobs: how many of each were checked. orphans: blobs of no entry. temporaries: files of writers. A
    killed builder leaves both, and neither is damage. full: whether every blob was hashed, or only its size compared.
    strays: files that are not fusekit's. absent: path of each root that is not a store -> why, in words. open_to_all:
    folders of the roots in which every user of the machine may write.
    """

    entries: int
    names: int
    blobs: int
    orphans: int
    temporaries: int
    full: bool
    bad: tuple[Problem, ...]
    strays: tuple[Path, ...] = ()
    absent: Mapping[Path, str] = field(default_factory=dict)
    open_to_all: tuple[Path, ...] = ()

    @property
    def checked(self) -> int:
        """Entries and names together."""
        return self.entries + self.names


def verify(roots: tuple[Root, ...], full: bool, inspect: Inspect | None = None) -> VerifyReport:
    """Check every root. Damage is reported, never raised, and nothing is changed.

    Without `full`: the digest, key and path of each entry and name, and that the cubin of each entry is there with its
    size. With `full`: every blob is hashed too, and `inspect` checks every entry, name and tuning table.
    """
    check = _Check(roots, full, inspect if full else None)
    absent = {root.path: why for root in roots if (why := absence(root.path)) is not None}
    folders = [root for root in roots if not is_file(root.path)]
    for root in folders:
        check.entries_of(root)
    for root in folders:
        check.names_of(root)
        if root.path not in absent:
            check.strays_of(root)
        check.tuning_of(root)
        with contextlib.suppress(StoreError):  # a folder that cannot be listed is reported above
            check.temporaries += sum(1 for _ in root.temporary_files())
    return VerifyReport(
        entries=check.entries,
        names=check.names,
        blobs=check.blobs,
        orphans=check.orphans,
        temporaries=check.temporaries,
        full=full,
        bad=tuple(check.bad),
        strays=tuple(check.strays),
        absent=absent,
        open_to_all=tuple(
            path for root in folders if root.path not in absent for path in open_to_all(Folders(root.path))
        ),
    )


class _Check:
    def __init__(self, roots: tuple[Root, ...], full: bool, inspect: Inspect | None) -> None:
        self.roots, self.full, self._inspect = roots, full, inspect
        self.entries = self.names = self.blobs = self.orphans = self.temporaries = 0
        self.bad: list[Problem] = []
        self.strays: list[Path] = []
        self._keys: dict[str, str] = {}  # key -> arch of each good entry, of any root
        self._damaged: set[str] = set()  # keys of damaged entries
        self._patience = _PATIENCE

    def entries_of(self, root: Root) -> None:
        cubins: dict[str, list[Entry]] = {}
        mentioned: set[str] = set()  # digests in damaged entries, as far as they can be read
        reported: set[Path] = set()
        try:
            for path in root.entry_files():
                self.entries += 1
                at = path  # the file with the problem
                key = path.name.removesuffix(".json")
                try:
                    if not is_digest(key) or path != root.entry_path(key):
                        raise damaged(path, "is not an entry; it does not have the path of one")
                    entry = root.entry(key)
                    if entry is None:  # collected since it was listed
                        self.entries -= 1
                        continue
                    if self._inspect is not None:
                        self._inspect.entry(entry, None)
                    blob = at = root.blob_path(entry.cubin_sha256)
                    if (size := self._size_in_time(blob)) is None:
                        at = path
                        if root.size_of_entry(key) is None:  # collected since it was read
                            self.entries -= 1
                            continue
                        if root.blob(entry.cubin_sha256, entry.cubin_bytes) is None:
                            raise damaged(path, f"names the cubin {entry.cubin_sha256}, which is missing")
                    elif size != entry.cubin_bytes:
                        raise damaged(blob, f"has {size} bytes, and its entry gives {entry.cubin_bytes}")
                    self._keys[key] = entry.arch
                    cubins.setdefault(entry.cubin_sha256, []).append(entry)
                except (IntegrityError, StoreError) as error:
                    self._damaged.add(key)
                    mentioned |= digests_of(path) or frozenset()
                    if not isinstance(error, OtherSchemaError):  # whole, for another version
                        reported.add(at)
                        self._add(root, at, error, key if is_digest(key) else "")
            self._blobs_of(root, cubins, mentioned, reported)
        except StoreError as error:
            self._add(root, root.path, error, "")

    def _blobs_of(self, root: Root, cubins: dict[str, list[Entry]], mentioned: set[str], reported: set[Path]) -> None:
        for path in root.blob_files():
            self.blobs += 1
            owners = cubins.get(path.name, [])
            key = owners[-1].key if owners else ""
            self.orphans += not owners and path.name not in mentioned
            if path in reported:
                continue
            try:
                if not is_digest(path.name) or path != root.blob_path(path.name):
                    raise damaged(path, "is not a blob; it does not have the path of one")
                if self.full:
                    cubin = root.blob(path.name)
                    if self._inspect is not None and cubin is not None:
                        for owner in owners:
                            key = owner.key
                            self._inspect.entry(owner, cubin)
                else:
                    size_of(path)
            except (IntegrityError, StoreError) as error:
                self._add(root, path, error, key)

    def names_of(self, root: Root) -> None:
        for below in ("names", "candidates"):
            self._names_of(root, below)

    def _names_of(self, root: Root, below: str) -> None:
        is_name = below == "names"

        def read(folder: str, filename: str) -> NameRecord | None:
            if is_name:
                return root.name(*names.of_path(folder, filename))
            return root.candidate(*names.of_candidate(folder, filename), filename[-len("0123456789ab.json") :])

        try:
            for folder, filename in root.name_files(below=below):
                self.names += is_name
                path = root.path / below / folder / filename
                key = ""
                try:
                    record = read(folder, filename)
                    if record is None:
                        self.names -= is_name
                        continue
                    key = record.key
                    if self._inspect is not None:
                        self._inspect.name(record)
                    if key in self._damaged and key not in self._keys:
                        continue  # reported with the entry
                    if key not in self._keys and (entry := self._published_since(key)) is not None:
                        self._keys[key] = entry.arch
                    if key not in self._keys:
                        if read(folder, filename) != record:  # collected or replaced since it was read
                            self.names -= is_name
                            continue
                        raise damaged(path, f"points to entry {key}, which no root holds whole")
                    if self._keys[key] != record.arch:
                        raise damaged(path, f"is for {record.arch}, its entry for {self._keys[key]}")
                except OtherSchemaError:
                    continue
                except (IntegrityError, StoreError) as error:
                    self._add(root, path, error, key)
        except StoreError as error:
            self._add(root, root.path, error, "")

    def strays_of(self, root: Root) -> None:
        reported = {problem.path for problem in self.bad}
        try:
            with contextlib.suppress(NoStoreError):  # reported above
                check_format(root.path)
        except (IntegrityError, StoreError) as error:
            self._add(root, root.path / MARKER, error, "")
        try:
            for node in strays(Folders(root.path)):
                if node.path in reported:
                    continue
                if node.kind == "link":
                    problem = f"{printable(node.path)} is a symbolic link; a store follows none below its own folder; "
                    self._add(root, node.path, IntegrityError(f"{problem}remove it"), "")
                else:
                    self.strays.append(node.path)
        except StoreError as error:
            self._add(root, root.path, error, "")

    def tuning_of(self, root: Root) -> None:
        for arch in sorted(set(self._keys.values())) if self._inspect is not None else ():
            path = root.tuning_path(arch)
            try:
                data = root.tuning(arch)
                if data is not None and self._inspect is not None:
                    self._inspect.tuning(data, str(path), arch)
            except (IntegrityError, StoreError) as error:
                self._add(root, path, error, "")

    def _size_in_time(self, path: Path) -> int | None:
        # A collection moves a cubin aside for a moment before it sees that a new entry needs it.
        for pause in _PAUSES:
            if (size := size_of(path)) is not None or self._patience < pause:
                return size
            self._patience -= pause
            time.sleep(pause)
        return size_of(path)

    def _published_since(self, key: str) -> Entry | None:
        return next(filter(None, (quietly(root.entry, key) for root in self.roots)), None)

    def _add(self, root: Root, path: Path, error: Exception, key: str) -> None:
        self.bad.append(Problem(key=key, problem=str(error), path=path, root=root.path))

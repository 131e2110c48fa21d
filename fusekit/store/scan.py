"""What lies in a store, as collection sees it: which files, how big, how old, and which digests each one mentions.

No document is understood here: an entry keeps every blob whose digest stands anywhere in its bytes, and a name goes
with the entry whose key stands in it. So what a later version of fusekit wrote is treated as rightly as our own, and
a damaged entry keeps what it can still be read to name. A document that cannot be read may name anything. What is no
plain file, or has no name that a store gives, is left alone (see fusekit.store.layout). So is what lies behind a link:
a link to a folder of entries or names counts as a document that could not be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusekit.store.documents import LIMIT
from fusekit.store.files import quietly, read_file
from fusekit.store.folders import Folders
from fusekit.store.keys import sha256
from fusekit.store.layout import (
    BLOBS,
    ENTRIES,
    LEASES,
    LOCKS,
    NAMES,
    ROOT,
    SIGNATURES,
    TUNING,
    USED,
    Found,
    Part,
    walk,
)

_DIGEST = re.compile(rb"[0-9a-f]{64}")

State = tuple[int, int, int]
"""What a change of a file changes: its number, size and time stamp."""


@dataclass(slots=True)
class File:
    """A plain file. stamp: of its last change, in nanoseconds as its file system counts."""

    path: Path
    bytes: int
    stamp: int
    state: State

    @classmethod
    def of(cls, found: Found) -> File:
        """Of a walk that asked for the status."""
        assert found.status is not None
        status = found.status
        return cls(found.path, status.st_size, status.st_mtime_ns, state_of(status))


@dataclass(slots=True)
class Item:
    """An entry. digests: every one that its bytes mention. mark: its mark's file, if it has one. names: of the records
    that stand for it. documents: the digests of its own bytes and of its names'.
    """

    key: str
    file: File
    digests: frozenset[str]
    mark: File | None
    names: list[File] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of the entry and its names."""
        return self.file.bytes + sum(name.bytes for name in self.names)

    @property
    def stamp(self) -> int:
        """The latest there is of its use: it was published or marked then."""
        return max(self.file.stamp, self.mark.stamp if self.mark else 0)

    def used(self, now: int) -> int | None:
        """When it was used last, for all that is known; None when every stamp is later than `now`."""
        stamps = (self.file.stamp, *([self.mark.stamp] if self.mark else []))
        return max((stamp for stamp in stamps if stamp <= now), default=None)


@dataclass(slots=True)
class Scan:
    """All of a store. documents: the digest of every entry, name and tuning table. unread: paths of documents, or of
    links in the place of folders of them, that could not be read, so that what they need is not known; unread_names:
    whether there are names among them. strays: paths of what is not fusekit's.
    """

    entries: dict[str, Item] = field(default_factory=dict)
    blobs: dict[str, File] = field(default_factory=dict)
    temporaries: list[File] = field(default_factory=list)
    marks: list[File] = field(default_factory=list)
    locks: list[File] = field(default_factory=list)
    signatures: list[File] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    unread_names: bool = False
    strays: list[Path] = field(default_factory=list)
    loose: dict[Path, File] = field(default_factory=dict)  # names that stand for no entry here
    other_bytes: int = 0  # of those


def state_of(status: os.stat_result) -> State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def scan(folders: Folders) -> Scan:
    """Look at all of a store."""
    result = Scan()

    def unread(path: Path, part: Part) -> None:
        result.unread.append(str(path))
        result.unread_names |= part is NAMES

    def files(part: Part) -> Iterator[tuple[File, int]]:
        for found in walk(folders, part, status=True):
            if found.kind == "file":
                yield File.of(found), found.at
            elif found.kind == "temporary":
                result.temporaries.append(File.of(found))
            elif part is not ROOT:
                result.strays.append(found.path)
                if found.kind == "link" and part in (ENTRIES, NAMES):
                    unread(found.path, part)

    def document(file: File, at: int, part: Part) -> bytes:
        data = _read(file.path, at)
        if data is None:
            unread(file.path, part)
            return b""
        result.documents.add(sha256(data))
        return data

    marks = {}
    for file, _ in files(USED):
        result.marks.append(file)
        marks[file.path.name] = file
    result.blobs = {file.path.name: file for file, _ in files(BLOBS)}
    for file, at in files(ENTRIES):
        key = file.path.stem
        data = document(file, at, ENTRIES)
        result.entries[key] = Item(key, file, _digests(data), marks.get(key), documents={sha256(data)})
    for file, at in files(NAMES):
        data = document(file, at, NAMES)
        keys = [key for key in _digests(data) if key in result.entries]
        for key in keys:
            result.entries[key].names.append(file)
            result.entries[key].documents.add(sha256(data))
        if not keys:
            result.loose[file.path] = file
            result.other_bytes += file.bytes
    result.signatures = [file for file, _ in files(SIGNATURES)]
    result.locks = [file for file, _ in files(LOCKS)]
    for file, at in files(TUNING):
        document(file, at, TUNING)  # it stays, with its signatures
    for part in (ROOT, LEASES):
        for _ in files(part):
            pass  # only temporaries are collected there; of leases, see fusekit.store.marks
    return result


def mentioned_since(folders: Folders, known: Mapping[Path, State], blobs: Collection[str]) -> Collection[str]:
    """Every digest in an entry that is new, or was replaced, since its state was `known`; all `blobs` where one cannot
    be read.
    """
    mentioned: set[str] = set()
    for found in walk(folders, ENTRIES, status=True):
        if found.kind == "file" and known.get(found.path) != File.of(found).state:
            data = _read(found.path, found.at)
            mentioned |= set(blobs) if data is None else _digests(data)
        elif found.kind == "link":
            mentioned |= set(blobs)
    return mentioned


def digests_of(path: Path) -> frozenset[str] | None:
    """Every digest that stands in the file; None where it could not be read, or is too long to be a document."""
    data = _read(path)
    return None if data is None else _digests(data)


def _digests(data: bytes) -> frozenset[str]:
    return frozenset(found.decode() for found in _DIGEST.findall(data))


def _read(path: Path, at: int | None = None) -> bytes | None:
    return quietly(lambda: read_file(path, limit=LIMIT, at=at) or b"")

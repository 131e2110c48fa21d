"""The files of a store as collection sees them: size, age, and the digests that each one mentions.

Documents are not parsed here: an entry keeps every blob whose digest occurs anywhere in its bytes, and a name goes with
the entry whose key occurs in it. So files of a later version of fusekit are treated correctly, and a damaged entry
keeps what it still mentions. A document that cannot be read may mention anything. What is not a plain file, or has a
name that fusekit does not give, is not touched (see fusekit.store.layout). Nothing is reached through a link: a link
where a folder of entries or names should be counts as a document that could not be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusekit.store.documents import LIMIT
from fusekit.store.entries import ADOPTED
from fusekit.store.files import quietly, read_file
from fusekit.store.folders import Folders
from fusekit.store.keys import sha256
from fusekit.store.layout import (
    BLOBS,
    CANDIDATES,
    ENTRIES,
    LEASES,
    LOCKED,
    LOCKS,
    NAMES,
    ROOT,
    SIGNATURES,
    TUNING,
    USED,
    Node,
    Part,
    walk,
)

_ADOPTED = re.compile(rb'"%s":"\\"([0-9a-f]{64})\\""' % ADOPTED.encode())
_DIGEST = re.compile(rb"[0-9a-f]{64}")

State = tuple[int, int, int]
"""Inode, size and time stamp: they show that a file has changed."""


@dataclass(slots=True)
class File:
    """A plain file. stamp: of its last change, in nanoseconds as its file system counts."""

    path: Path
    bytes: int
    stamp: int
    state: State

    @classmethod
    def of(cls, node: Node) -> File:
        """The file of a node whose walk read the status."""
        assert node.status is not None
        status = node.status
        return cls(node.path, status.st_size, status.st_mtime_ns, state_of(status))


@dataclass(slots=True)
class Item:
    """An entry. digests: every digest in its bytes but the key of what it was adopted from. mark: the file of its mark,
    if it has one. names: files of the name records that point to it, of candidates too. documents: digests of the entry
    and of those records. with_it: entries that compute the same under one name, in another cubin format: a use of one
    is a use of all.
    """

    key: str
    file: File
    digests: frozenset[str]
    mark: File | None
    names: list[File] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)
    with_it: list[Item] = field(default_factory=list, compare=False, repr=False)

    @property
    def bytes(self) -> int:
        """Size in bytes of the entry and its names."""
        return self.file.bytes + sum(name.bytes for name in self.names)

    @property
    def stamp(self) -> int:
        """Time of its last use: the later of its publication and its mark."""
        return max(self.file.stamp, self.mark.stamp if self.mark else 0)

    def used(self, now: int) -> int | None:
        """Time of its last use, or of an entry `with_it`, that is not after `now`; None if every stamp is."""
        stamps = [file.stamp for item in (self, *self.with_it) for file in (item.file, item.mark) if file]
        return max((stamp for stamp in stamps if stamp <= now), default=None)


@dataclass(slots=True)
class Scan:
    """All files of a store. documents: digests of all entries, names and tuning tables. unread: paths of documents that
    could not be read, and of links where their folders should be: what they need is not known. unread_names: whether
    names are among them. strays: paths of files that are not fusekit's.
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
    loose: dict[Path, File] = field(default_factory=dict)  # names that point to no entry here
    other_bytes: int = 0  # of those


def state_of(status: os.stat_result) -> State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def scan(folders: Folders) -> Scan:
    """Scan a whole store."""
    result = Scan()

    def unread(path: Path, part: Part) -> None:
        result.unread.append(str(path))
        result.unread_names |= part in (NAMES, CANDIDATES)

    def files(part: Part) -> Iterator[tuple[File, int]]:
        for node in walk(folders, part, status=True):
            if node.kind == "file":
                yield File.of(node), node.at
            elif node.kind == "temporary":
                result.temporaries.append(File.of(node))
            elif part is not ROOT:
                result.strays.append(node.path)
                if node.kind == "link" and part in (ENTRIES, NAMES, CANDIDATES):
                    unread(node.path, part)

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
        of = _ADOPTED.search(data)
        digests = _digests(data) - {of[1].decode() if of else ""}
        result.entries[key] = Item(key, file, digests, marks.get(key), documents={sha256(data)})
    for part in (NAMES, CANDIDATES):
        for file, at in files(part):
            data = document(file, at, part)
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
    for part in (ROOT, LEASES, LOCKED):
        for _ in files(part):
            pass  # only temporaries are collected there; of leases, see fusekit.store.marks
    return result


def mentioned_since(folders: Folders, known: Mapping[Path, State], blobs: Collection[str]) -> Collection[str]:
    """Every digest in the entries that are new or changed compared with `known`; all `blobs` if one cannot be read."""
    mentioned: set[str] = set()
    for node in walk(folders, ENTRIES, status=True):
        if node.kind == "file" and known.get(node.path) != File.of(node).state:
            data = _read(node.path, node.at)
            mentioned |= set(blobs) if data is None else _digests(data)
        elif node.kind == "link":
            mentioned |= set(blobs)
    return mentioned


def digests_of(path: Path) -> frozenset[str] | None:
    """Every digest in the file; None if it could not be read, or is too long to be a document."""
    data = _read(path)
    return None if data is None else _digests(data)


def _digests(data: bytes) -> frozenset[str]:
    return frozenset(digest.decode() for digest in _DIGEST.findall(data))


def _read(path: Path, at: int | None = None) -> bytes | None:
    return quietly(lambda: read_file(path, limit=LIMIT, at=at) or b"")

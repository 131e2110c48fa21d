"""What lies in a store, as collection sees it: which files, how big, how old, and which digests each one mentions.

No document is understood here: an entry keeps every blob whose digest stands anywhere in its bytes, and a name goes
with the entry whose key stands in it. So what a later version of fusekit wrote is treated as rightly as our own, and
a damaged entry keeps what it can still be read to name. Of what is no plain file, or has no name that a store gives,
nothing is taken up. Links to folders are not followed; as a reader finds what lies behind one, they count as unread.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fusekit.errors import IntegrityError, StoreError
from fusekit.store.documents import LIMIT
from fusekit.store.files import TEMPORARY_SUFFIX, read_file, store_error
from fusekit.store.keys import is_digest, sha256
from fusekit.store.layer import Layer

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
    def of(cls, found: os.DirEntry[str]) -> File | None:
        """None for what is no plain file, or is gone."""
        try:
            if not found.is_file(follow_symlinks=False):
                return None
            status = found.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        return cls(Path(found.path), status.st_size, status.st_mtime_ns, state_of(status))

    @classmethod
    def at(cls, path: Path) -> File | None:
        """The plain file at `path`; None for what is none, or is not there."""
        try:
            status = path.lstat()
        except OSError:
            return None
        return cls(path, status.st_size, status.st_mtime_ns, state_of(status)) if stat.S_ISREG(status.st_mode) else None


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
    """All of a store. documents: the digest of every entry and name. unread: paths of documents, or of links to folders
    of them, that could not be read, so that what they need is not known.
    """

    entries: dict[str, Item] = field(default_factory=dict)
    blobs: dict[str, File] = field(default_factory=dict)
    temporaries: list[File] = field(default_factory=list)
    marks: list[File] = field(default_factory=list)
    locks: list[File] = field(default_factory=list)
    signatures: list[File] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    other_bytes: int = 0  # of names that stand for no entry here


def state_of(status: os.stat_result) -> State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def scan(layer: Layer) -> Scan:
    """Look at all of `layer`."""
    result = Scan()
    marks = {}
    for file in _files(layer.root / "used", 2, result.temporaries):
        result.marks.append(file)
        marks[file.path.name] = file
    for file in _files(layer.root / "blobs" / "sha256", 2, result.temporaries):
        if is_digest(file.path.name):
            result.blobs[file.path.name] = file
    for file in _files(layer.root / "entries", 2, result.temporaries, result.unread):
        key = file.path.name.removesuffix(".json")
        data = _document(file.path, result)
        if is_digest(key) and file.path.name == f"{key}.json":
            result.entries[key] = Item(key, file, _digests(data), marks.get(key), documents={sha256(data)})
    for file in _files(layer.root / "names", 2, result.temporaries, result.unread):
        data = _document(file.path, result)
        keys = [key for key in _digests(data) if key in result.entries]
        for key in keys:
            result.entries[key].names.append(file)
            result.entries[key].documents.add(sha256(data))
        if not keys:
            result.other_bytes += file.bytes
    for file in _files(layer.root / "signatures", 2, result.temporaries):
        if is_digest(file.path.name[:64]) and file.path.name[64:65] == ".":
            result.signatures.append(file)
    result.locks = list(_files(layer.root / "locks", 1, result.temporaries))
    for top in (layer.root, layer.root / "tuning"):
        for _ in _files(top, 1, result.temporaries):
            pass  # only temporaries are collected there
    return result


def entry_states(layer: Layer) -> dict[Path, State]:
    """The state of every file under `entries`."""
    return {file.path: file.state for file in _files(layer.root / "entries", 2, [])}


def digests_of(path: Path) -> frozenset[str] | None:
    """Every digest that stands in the file; None where it could not be read, or is too long to be a document."""
    data = _read(path)
    return None if data is None else _digests(data)


def _document(path: Path, result: Scan) -> bytes:
    data = _read(path)
    if data is None:
        result.unread.append(str(path))
        return b""
    result.documents.add(sha256(data))
    return data


def _digests(data: bytes) -> frozenset[str]:
    return frozenset(found.decode() for found in _DIGEST.findall(data))


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path, limit=LIMIT) or b""
    except (IntegrityError, StoreError):
        return None


def state(path: Path) -> State | None:
    """The state of `path` now; None where there is nothing."""
    try:
        return state_of(path.lstat())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(path, "look at", error) from error


def _files(top: Path, depth: int, temporaries: list[File], linked: list[str] | None = None) -> Iterator[File]:
    """The plain files `depth` levels below `top`, those of writers aside; `linked` gets the links to folders."""
    try:
        with os.scandir(top) as found:
            for each in found:
                if depth > 1:
                    if each.is_dir(follow_symlinks=False):
                        yield from _files(Path(each.path), depth - 1, temporaries, linked)
                    elif linked is not None and each.is_dir():
                        linked.append(each.path)
                elif (file := File.of(each)) is not None:
                    if each.name.endswith(TEMPORARY_SUFFIX):
                        if each.name.startswith("."):
                            temporaries.append(file)
                    else:
                        yield file
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise store_error(top, "list", error) from error

"""One root of a store on the disk, read-only: the paths of its files, and checked reading.

    <root>/fusekit-store.json                            the marker, with the format (fusekit.store.marker)
    <root>/blobs/sha256/<2 digits>/<64 digits>           a cubin, under its own digest
    <root>/entries/<2 digits>/<key>.json                 an entry, under its key
    <root>/names/<file>/<kernel>@<variant>.<arch>.json   a name record: the last build
    <root>/candidates/<file>/<kernel>@<variant>.<arch>.<12 digits of the key>.json   a name record of each build, once
                                                         a name has several
    <root>/signatures/<2 digits>/<64 digits>.<key id>    a signature over the entry or name record of that SHA-256
    <root>/used/<2 digits>/<key>                         an empty file; its time stamp is the last use of the entry
    <root>/leases/<host>-<process>-<random>              the lease of a running build
    <root>/locks/<key>.lock                              an empty file that a builder locks
    <root>/locked/<id>.json                              the highest serial of a lock that was used
    <root>/tuning/<arch>.json                            measured times (fusekit.choice.tuning)

The first six are the store; the others only save work and may be removed at any time. Temporary files are
`.<name>.<host>-<process>-<random>.tmp`, in the folder of the final file. Readers open files by name only, so what a
killed writer left is never taken for a part of the store.

A folder is listed only if no part of its path below the root is a link. A file that is read by name is opened by its
whole path, which is faster: the digest checks the bytes, wherever the path leads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusekit.errors import IntegrityError, StoreError
from fusekit.store import names
from fusekit.store.documents import LIMIT, damaged
from fusekit.store.entries import CUBIN_LIMIT, Entry
from fusekit.store.files import TEMPORARY_SUFFIX, quietly, read_file, size_of, store_error
from fusekit.store.folders import Folders
from fusekit.store.keys import is_digest, sha256
from fusekit.store.layout import LOCKED, TUNING
from fusekit.store.marker import check_format
from fusekit.store.names import Brief, NameRecord
from fusekit.store.signature import Trust, is_key_id, read_signatures

if TYPE_CHECKING:
    from fusekit.store.lockfile import Lock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Root:
    """What lies under `path`, which need not exist: it is empty then. With `trust`, what no trusted key signed is
    refused before it is parsed; with `owners`, what another user may have written. With `lock`, a name points to a
    build that the lock lists, and no other is read.
    """

    path: Path
    trust: Trust | None = None
    lock: Lock | None = None
    owners: frozenset[int] | None = None
    _checked: list[bool] = field(default_factory=list, init=False, compare=False, repr=False)

    def check(self) -> None:
        """Raises NoStoreError for a format that this fusekit does not know; reads the marker once."""
        if not self._checked:
            with contextlib.suppress(IntegrityError):  # a damaged marker does not prevent reading
                check_format(self.path)
            self._checked.append(True)

    def entry_path(self, key: str) -> Path:
        return Path(self.entry_file(key))

    def blob_path(self, digest: str) -> Path:
        return Path(self._blob(digest))

    def name_path(self, name: str, arch: str) -> Path:
        return self.path / names.record_path(name, arch)

    def lock_path(self, key: str) -> Path:
        return self.path / "locks" / f"{key}.lock"

    def tuning_path(self, arch: str) -> Path:
        return self.path / "tuning" / f"{names.check_arch(arch)}.json"

    def locked_path(self, lock: str) -> Path:
        return self.path.joinpath(*LOCKED.parts, f"{lock}.json")

    def signature_path(self, digest: str, key_id: str) -> Path:
        return self.path / "signatures" / digest[:2] / f"{digest}.{key_id}"

    def signatures(self, digest: str) -> dict[str, bytes]:
        """Key id -> signature, for every signature over the document of SHA-256 `digest`; unchecked."""
        files = self._listing("signatures", digest[:2], start=f"{digest}.")
        return self._signatures_by(filter(is_key_id, (name.removeprefix(f"{digest}.") for name in files)), digest)

    def entry(self, key: str) -> Entry | None:
        """The entry of `key`, fully checked; None if there is none. Raises IntegrityError, StoreError."""
        if not is_digest(key):
            raise IntegrityError(f"{key!r} is not a key; a key is 64 lower-case hexadecimal digits")
        path = self.entry_file(key)
        data = self._document("entry", path)
        entry = None if data is None else Entry.from_bytes(data, path, key)
        if entry is not None and self.lock is not None:
            self.lock.check_entry(entry)
        return entry

    def blob(self, digest: str, size: int | None = None) -> bytes | None:
        """The blob of `digest`, hashed, and of `size` bytes if that is given; None if there is none.

        A collection may have moved it aside, and may have been killed then: a temporary with that digest is the blob.
        """
        path = self._blob(digest)
        data = read_file(path, limit=CUBIN_LIMIT, exactly=size)
        if data is None:
            return self._blob_aside(digest, size)
        if (actual := sha256(data)) != digest:
            raise damaged(path, f"has the digest {actual}, not that of its name")
        return data

    def _blob_aside(self, digest: str, size: int | None) -> bytes | None:
        folder = self.blob_path(digest).parent
        for name in self._listing("blobs", "sha256", digest[:2], temporary=True, start=f".{digest}."):
            with contextlib.suppress(IntegrityError, StoreError):
                data = read_file(folder / name, limit=CUBIN_LIMIT, exactly=size)
                if data is not None and sha256(data) == digest:
                    return data
        return None

    def name(self, name: str, arch: str) -> NameRecord | None:
        """The record of the full name `name` for `arch`, checked; None if there is none."""
        path = f"{self.path}/{names.record_path(name, arch)}"
        data = self._document("name", path)
        record = None if data is None else NameRecord.from_bytes(data, path, name, arch)
        return record if self.lock is None else self._locked(record, self.lock.keys(name, arch))

    def _locked(self, record: NameRecord | None, keys: Sequence[str]) -> NameRecord | None:
        """The build of a name that a lock lists, under `keys`; None if it does not list the name."""
        if record is None or self.lock is None or not keys:
            return None
        for key in keys if record.key not in keys else ():
            if (candidate := quietly(self.candidate, record.name, record.arch, key)) is not None:
                return candidate
        self.lock.check_name(record)
        return record

    def brief(self, name: str, arch: str) -> Brief | None:
        """As `name`, for a listing. `name` and `arch` must be well-formed."""
        if self.lock is not None:
            record = self.name(name, arch)
            return None if record is None else Brief.of(record)
        path = f"{self.path}/names/{name}.{arch}.json"
        data = self._document("name", path)
        return None if data is None else Brief.from_bytes(data, path, name, arch)

    def candidate(self, name: str, arch: str, key: str) -> NameRecord | None:
        """The record of `name` for `arch`, checked, whose key begins with the first digits of `key`, from `candidates`;
        None if there is none.
        """
        path = f"{self.path}/{names.candidate_path(name, arch, key)}"
        data = self._document("name", path)
        record = None if data is None else NameRecord.from_bytes(data, path, name, arch)
        if record is not None and record.key[:12] != key[:12]:
            raise damaged(path, f"has the key {record.key}")
        return record

    def candidates(self, name: str, arch: str, but: str = "") -> list[NameRecord]:
        """The readable candidates of `name` for `arch`, the last that was published first. but: the key of one to leave
        out.
        """
        file, _, kernel = name.partition("/")
        start = f"{kernel}.{arch}."
        stamps: dict[str, int] = {}
        for filename in self._listing("candidates", file, start=start):
            if but and filename.startswith(f"{start}{but[:12]}."):
                continue
            with contextlib.suppress(OSError, IntegrityError):
                names.of_candidate(file, filename)
                stamps[filename[len(start) :]] = os.lstat(f"{self.path}/candidates/{file}/{filename}").st_mtime_ns
        records = (quietly(self.candidate, name, arch, tag) for tag in sorted(stamps, key=lambda tag: -stamps[tag]))
        allowed = None if self.lock is None else self.lock.keys(name, arch)
        return [record for record in records if record is not None and (allowed is None or record.key in allowed)]

    def tuning(self, arch: str) -> bytes | None:
        """The tuning table for `arch`, signed if there is a trust; None if there is none."""
        data = self._document("tuning", str(self.tuning_path(arch)))
        if self.lock is not None and (data is None or self.lock.tuning.get(arch) != sha256(data)):
            return None
        return data

    def tuned(self) -> list[str]:
        """The architectures that have a tuning table."""
        return [name.removesuffix(".json") for name in self._listing("tuning") if TUNING.ours.fullmatch(name)]

    def name_files(self, file: str | None = None, start: str = "", below: str = "names") -> Iterator[tuple[str, str]]:
        """(folder, file name) of the files under `names`, or `candidates`, sorted; only those in the folder `file`, if
        given, and only those that begin with `start`. Reads no record.
        """
        self.check()
        for folder in [file] if file is not None else self._listing(below, top=True):
            for entry in self._listing(below, folder, start=start, top=file is not None):
                yield folder, entry

    def has_temporary_name(self, file: str, start: str) -> bool:
        """Whether the folder `file` has a temporary of a name record that begins with `start`."""
        return bool(self._listing("names", file, temporary=True, start=f".{start}"))

    def has_entry_aside(self, key: str) -> bool:
        """Whether there is a temporary of the entry of `key`: it is being written, or was moved aside to be removed."""
        path = self.entry_path(key)
        return bool(self._listing("entries", key[:2], temporary=True, start=f".{path.name}."))

    def stamp_of_name(self, name: str, arch: str) -> int | None:
        """Time stamp of the record of `name`, in nanoseconds as its file system counts; None if there is none."""
        with contextlib.suppress(OSError):
            return os.lstat(f"{self.path}/names/{name}.{arch}.json").st_mtime_ns
        return None

    def is_settled(self, key: str, summary: Mapping[str, Any], named: int | None = None) -> bool:
        """Whether entry and cubin have the sizes in `summary`, and were written in the order of publication: the cubin
        before the entry, the entry before its name (`named`: its stamp, if known).

        Reads neither. A file that is too young was changed, or is a repair, and must be read. A stamp can only cause
        a closer look, never replace the check of sizes.
        """
        try:
            entry, cubin = os.lstat(self.entry_file(key)), os.lstat(self._blob(summary["cubin_sha256"]))
        except OSError:
            return False
        return (
            stat.S_ISREG(entry.st_mode)
            and stat.S_ISREG(cubin.st_mode)
            and (entry.st_size, cubin.st_size) == (summary["entry_bytes"], summary["bytes"])
            and cubin.st_mtime_ns <= entry.st_mtime_ns
            and (named is None or entry.st_mtime_ns <= named)
        )

    def size_of_entry(self, key: str) -> int | None:
        """Size in bytes of the file of the entry of `key`; None if there is none. Does not read it."""
        return size_of(self.entry_file(key))

    def has_cubin(self, entry: Entry) -> bool:
        """Whether the cubin of `entry` is there with its size. Does not read it."""
        return size_of(self._blob(entry.cubin_sha256)) == entry.cubin_bytes

    def entry_files(self) -> Iterator[Path]:
        """Paths of the files under `entries`, sorted, without temporaries."""
        return self._two_deep("entries")

    def blob_files(self) -> Iterator[Path]:
        """Paths of the files under `blobs/sha256`, sorted, without temporaries."""
        return self._two_deep("blobs", "sha256")

    def temporary_files(self) -> Iterator[Path]:
        """Temporaries that writers use now or have left."""
        for top in (("entries",), ("blobs", "sha256"), ("names",), ("candidates",), ("signatures",)):
            for folder in self._listing(*top):
                directory = self.path.joinpath(*top, folder)
                yield from (directory / name for name in self._listing(*top, folder, temporary=True))

    def _document(self, kind: str, path: str) -> bytes | None:
        if not self._checked:
            self.check()
        data = read_file(path, limit=LIMIT, owners=self.owners)
        if data is not None and self.trust is not None:
            # By name: listing a folder would cost more.
            signatures = self._signatures_by((key.id for key in self.trust.keys), sha256(data))
            self.trust.check(kind, data, signatures, path)
        return data

    def _signatures_by(self, key_ids: Iterable[str], digest: str) -> dict[str, bytes]:
        return read_signatures(((key_id, self.signature_path(digest, key_id)) for key_id in key_ids), read_file)

    def entry_file(self, key: str) -> str:
        """As `entry_path`, but cheap: building a `Path` costs as much as reading a file."""
        return f"{self.path}/entries/{key[:2]}/{key}.json"

    def _blob(self, digest: str) -> str:
        return f"{self.path}/blobs/sha256/{digest[:2]}/{digest}"

    def _two_deep(self, *top: str) -> Iterator[Path]:
        self.check()
        for folder in self._listing(*top, top=True):
            for name in self._listing(*top, folder):
                yield self.path.joinpath(*top, folder, name)

    def _listing(self, *parts: str, temporary: bool = False, start: str = "", top: bool = False) -> list[str]:
        """Names in the folder `parts`; none if it is missing. A file or a link of that name counts as missing, but is
        an error at the `top`.
        """
        try:
            with Folders(self.path).at(*parts, listed=True) as descriptor:
                files = os.listdir(descriptor)  # noqa: PTH208 - names only, of an open folder
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP) and not top:
                return []
            raise store_error(self.path.joinpath(*parts), "list", error) from error
        return sorted(name for name in files if name.startswith(start) and name.endswith(TEMPORARY_SUFFIX) == temporary)


def first_good(roots: Sequence[Root], read: Callable[[Root], T | None]) -> T | None:
    """The result of `read` for the first root that has it good; None if no root has it. If none is good, raises the
    error of the first root where it is damaged or cannot be read.
    """
    problem: IntegrityError | StoreError | None = None
    for root in roots:
        try:
            if (result := read(root)) is not None:
                return result
        except (IntegrityError, StoreError) as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None


RELATIVE = Root(Path())  # gives paths relative to the root

"""Reading bundles, which may come from anybody: see `fusekit.store.bundle` for their form."""

from __future__ import annotations

import contextlib
import itertools
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fusekit.errors import FusekitError, IntegrityError
from fusekit.store import names
from fusekit.store.bundle import (
    BLOCK,
    END,
    INDEX,
    SCHEMA,
    Member,
    Transfer,
    blob_of,
    entry_of,
    header,
    name_of,
    padding,
    signature_name,
    signature_of,
)
from fusekit.store.documents import LIMIT, parse
from fusekit.store.entries import CUBIN_LIMIT, Entry
from fusekit.store.files import store_error
from fusekit.store.given import given_file
from fusekit.store.keys import canonical_json, is_digest, sha256
from fusekit.store.names import NameRecord
from fusekit.store.signature import SIGNATURE_BYTES, Trust, is_key_id
from fusekit.store.store import Store

INDEX_LIMIT = 16 << 20
"""Largest index accepted, in bytes: about 40,000 kernels. Parsed, it takes some ten times as much memory."""
SIGNER_LIMIT = 64
"""Most signatures accepted over one index."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK": "zip"}


@dataclass(frozen=True, slots=True)
class Index:
    """What a bundle holds. signers: ids of the keys that signed it; signer: the trusted one, if a trust was given."""

    members: tuple[Member, ...]
    signers: tuple[str, ...] = ()
    signer: str | None = None

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind]


def import_bundle(store: Store, path: Path) -> Transfer:
    """Publish everything in the bundle `path` into `store`, or nothing of one that is wrong anywhere.

    Raises SignatureError when the store trusts keys and none of them signed the bundle and each document in it, before
    the index is parsed; IntegrityError for any byte of the file that is not as its index says. The store is unchanged
    then. A disk that fails while it is written (StoreError) keeps whole kernels, and names only once every entry is
    there; the same import carries on.
    """
    with given_file(path, "bundle") as (file, status):
        reader = _Reader(file, status.st_size, path, store.trust)
        index = reader.index()
        reader.check(index)
        return reader.publish(index, store)


def read_index(path: Path, trust: Trust | None = None) -> Index:
    """The checked index of the bundle `path`. Its members are not read; only their total size is checked."""
    with given_file(path, "bundle") as (file, status):
        return _Reader(file, status.st_size, path, trust).index()


# Columns of each row of the index: what a value must be.
_Column = Callable[[object], bool]


def _size_up_to(limit: int) -> _Column:
    return lambda value: type(value) is int and 0 < value <= limit


def _is_name(value: object) -> bool:
    return isinstance(value, str) and names.is_full(value)


def _is_arch(value: object) -> bool:
    with contextlib.suppress(FusekitError):
        return isinstance(value, str) and bool(names.check_arch(value))
    return False


_ROWS: tuple[tuple[str, tuple[_Column, ...], Callable[..., Member]], ...] = (
    ("blobs", (is_digest, _size_up_to(CUBIN_LIMIT)), blob_of),
    ("signatures", (is_digest, is_key_id, is_digest), signature_of),
    ("entries", (is_digest, _size_up_to(LIMIT), is_digest), entry_of),
    ("names", (_is_name, _is_arch, _size_up_to(LIMIT), is_digest), name_of),
)


class _Reader:
    """Reads one open bundle of `size` bytes. Every refusal names the file and says what is wrong with it."""

    def __init__(self, file: BinaryIO, size: int, path: Path, trust: Trust | None) -> None:
        self._file = file
        self._size = size
        self._path = path
        self._trust = trust
        self._start = 0  # of the first member behind the index

    def index(self) -> Index:
        """The index, once its signatures are checked; the sizes in it add up to the file's."""
        signatures: dict[str, bytes] = {}
        while True:
            name, size = self._leading_header()
            if name == INDEX:
                break
            key_id = name.removeprefix(f"{INDEX}.").removesuffix(".sig")
            if name != signature_name(key_id) or not is_key_id(key_id):
                raise self._bad(f"begins with the member {name!r}, where {INDEX} or a signature of it must stand")
            if size != SIGNATURE_BYTES or len(signatures) == SIGNER_LIMIT or list(signatures)[-1:] >= [key_id]:
                raise self._bad(f"has the signature {name!r} of {size} bytes: too large, one too many, or out of order")
            signatures[key_id] = self._content(name, size)
        if not 0 < size <= INDEX_LIMIT:
            raise self._bad(f"has an index of {size} bytes, where 1 to {INDEX_LIMIT} are allowed")
        data = self._content(INDEX, size)
        signer = None if self._trust is None else self._trust.check("bundle", data, signatures, self._path)
        members = self._parse(data)
        self._start = self._file.tell()
        total = sum(len(header(each.path, each.bytes)) + each.bytes + padding(each.bytes) for each in members)
        if self._start + total + len(END) != self._size:
            raise self._bad(
                f"has {self._size} bytes, where its index makes {self._start + total + len(END)}: it is cut, or a size "
                "is a lie"
            )
        return Index(members, tuple(signatures), None if signer is None else signer.id)

    def check(self, index: Index) -> None:
        """Read everything once: digests, documents, and how they belong together."""
        blobs = {member.sha256: member.bytes for member in index.of("blob")}
        signatures = {member.subject: member for member in index.of("signature")}
        documents: dict[str, str] = {}  # digest -> kind
        archs: dict[str, str] = {}  # key -> arch
        held: dict[str, dict[str, bytes]] = {}
        used: set[str] = set()
        for member, data in self._members(index):
            if member.kind == "signature":
                of, key_id = member.subject
                held.setdefault(of, {})[key_id] = data
            elif member.kind == "entry":
                entry = self._document(member, data, held)
                assert isinstance(entry, Entry)
                if blobs.get(entry.cubin_sha256) != entry.cubin_bytes:
                    raise self._bad(f"has the entry {entry.key}, but not its cubin {entry.cubin_sha256}")
                used.add(entry.cubin_sha256)
                archs[entry.key] = entry.arch
                documents[member.sha256] = "entry"
            elif member.kind == "name":
                record = self._document(member, data, held)
                assert isinstance(record, NameRecord)
                if archs.get(record.key) != record.arch:
                    raise self._bad(f"has the name {record.name} for {record.arch}, but no such entry {record.key}")
                documents[member.sha256] = "name"
        if unused := sorted(blobs.keys() - used):
            raise self._bad(f"has the cubin {unused[0]}, which is of none of its entries")
        if strangers := sorted({of for of, _ in signatures} - documents.keys()):
            raise self._bad(f"has a signature over {strangers[0]}, which is none of its documents")
        if self._file.read(len(END) + 1) != END:
            raise self._bad("does not end where its index says")

    def publish(self, index: Index, store: Store) -> Transfer:
        """Publish what `check` has passed: each entry with its cubin, then the names."""
        own = store.writable()  # what a layer below has may be what this disk is to be rid of
        blobs = {member.sha256: offset for member, offset in self._offsets(index) if member.kind == "blob"}
        held: dict[str, dict[str, bytes]] = {}
        moved = skipped = 0
        for member, offset in self._offsets(index):
            if member.kind == "blob":
                continue
            data = self._again(member, offset)
            if member.kind == "signature":
                of, key_id = member.subject
                held.setdefault(of, {})[key_id] = data
                continue
            document = self._document(member, data, held)
            signatures = held.get(member.sha256, {})
            if isinstance(document, NameRecord):
                own.publish_name(document, signatures=signatures)
                continue
            if own.present(document.key) is not None:
                skipped += 1
                continue
            cubin = blob_of(document.cubin_sha256, document.cubin_bytes)
            own.publish(document, self._again(cubin, blobs[cubin.sha256]), signatures)
            moved += cubin.bytes
        return Transfer(len(index.of("entry")), len(index.of("name")), moved, skipped)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> tuple[Member, ...]:
        try:
            document = parse(data, INDEX_LIMIT)
            canonical = (canonical_json(document) + "\n").encode() == data
        except (ValueError, FusekitError) as error:
            raise self._bad(f"has an index that is no JSON ({error})") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            raise self._bad(f"has an index of schema {schema!r}, where this fusekit reads {SCHEMA}")
        if not canonical or set(document) != {"schema", *(label for label, _, _ in _ROWS)}:
            raise self._bad("has an index that is not in its one form: sorted keys, no spaces, no other members")
        members: list[Member] = []
        for label, columns, make in _ROWS:
            rows = document[label]
            if not isinstance(rows, list):
                raise self._bad(f"has an index whose {label} are no list")
            for row in rows:
                fits = isinstance(row, list) and len(row) == len(columns)
                if not fits or not all(fit(value) for fit, value in zip(columns, row, strict=True)):
                    raise self._bad(f"lists among its {label} {_short(row)}, which cannot be one")
            made = [make(*row) for row in rows]
            for before, after in itertools.pairwise(made):
                if before.subject >= after.subject:
                    raise self._bad(f"lists {after.path} twice or out of order among its {label}")
            members += made
        return tuple(members)

    def _document(self, member: Member, data: bytes, held: dict[str, dict[str, bytes]]) -> Entry | NameRecord:
        where = Path(f"{self._path}:{member.path}")
        if self._trust is not None:
            self._trust.check(member.kind, data, held.get(member.sha256, {}), where)
        document: Entry | NameRecord
        if member.kind == "entry":
            document = Entry.from_bytes(data, where, member.subject)
        else:
            document = NameRecord.from_bytes(data, where, *member.subject)
        if document.to_bytes() != data:
            raise self._bad(f"has {member.path} in another form than the one that a store writes")
        return document

    def _offsets(self, index: Index) -> Iterator[tuple[Member, int]]:
        """Each member with the place of its first byte."""
        at = self._start
        for member in index.members:
            at += len(header(member.path, member.bytes))
            yield member, at
            at += member.bytes + padding(member.bytes)

    def _members(self, index: Index) -> Iterator[tuple[Member, bytes]]:
        seen: set[str] = set()
        for member in index.members:
            expected = header(member.path, member.bytes)
            found = self._read(len(expected))
            if found != expected:
                raise self._bad(f"{_difference(found, member, seen)}, where {member.path!r} must stand")
            data = self._content(member.path, member.bytes)
            if (digest := sha256(data)) != member.sha256:
                raise self._bad(f"has {member.path!r} with the digest {digest}, where its index says {member.sha256}")
            seen.add(member.path)
            yield member, data

    def _leading_header(self) -> tuple[str, int]:
        """Name and size of a member in front of, or of, the index."""
        block = self._read(BLOCK)
        for magic, name in _COMPRESSED.items():
            if block.startswith(magic):
                raise self._bad(f"is compressed with {name}; a bundle is a plain tar file; decompress it first")
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._bad(f"is no tar file ({error})") from None
        if block != _header_or_nothing(info.name, info.size):
            raise self._bad(f"begins with {_kind(info)}, which no bundle has there")
        return info.name, info.size

    def _content(self, name: str, size: int) -> bytes:
        if size > self._size - self._file.tell():
            raise self._bad(f"ends within {name!r}: it states {size} bytes")
        data = self._read(size)
        if self._read(padding(size)).strip(b"\0"):
            raise self._bad(f"has bytes between {name!r} and the next member")
        return data

    def _again(self, member: Member, offset: int) -> bytes:
        self._file.seek(offset)
        data = self._read(member.bytes)
        if sha256(data) != member.sha256:
            raise self._bad(f"changed while it was imported, in {member.path!r}")
        return data

    def _read(self, count: int) -> bytes:
        try:
            data = self._file.read(count)
        except OSError as error:
            raise store_error(self._path, "read", error) from error
        if len(data) != count:
            raise self._bad("ends too early")
        return data

    def _bad(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self._path} {what}; a bundle is taken whole or not at all; get it again")


def _header_or_nothing(name: str, size: int) -> bytes:
    try:
        return header(name, size)
    except (ValueError, tarfile.HeaderError):
        return b""


def _difference(found: bytes, member: Member, seen: set[str]) -> str:
    """What the header `found` is, in words."""
    try:
        info = tarfile.TarInfo.frombuf(found[-BLOCK:], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return "has no member"
    if info.name in seen:
        return f"has {info.name!r} twice"
    if info.name == member.path and info.isreg() and info.size != member.bytes:
        return f"states {info.size} bytes for a member of {member.bytes}"
    return f"has {_kind(info)}"


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return f"a link, {info.name!r} to {info.linkname!r}"
    if info.name.startswith("/") or ".." in info.name.split("/"):
        return f"the path {info.name!r}, which leads out of a store"
    if not info.isreg():
        return f"{info.name!r}, which is no plain file"
    return f"a header of its own making for {info.name!r}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

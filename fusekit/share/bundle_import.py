"""Reading bundles, which may be hostile: see `fusekit.share.bundle` for their format."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fusekit.errors import FusekitError, IntegrityError
from fusekit.share.bundle import (
    BLOCK,
    END,
    INDEX,
    LOADER,
    SCHEMAS,
    SINCE,
    Member,
    Transfer,
    before,
    blob_of,
    candidate_of,
    entry_of,
    header,
    loader_of,
    name_of,
    padding,
    signature_name,
    signature_of,
)
from fusekit.share.selection import Step
from fusekit.share.source import Source, spooled
from fusekit.store import names
from fusekit.store.documents import LIMIT, parse
from fusekit.store.entries import CUBIN_LIMIT, KIND, LAYER, Entry
from fusekit.store.files import store_error
from fusekit.store.given import given_file
from fusekit.store.keys import canonical_json, is_digest, sha256
from fusekit.store.names import NameRecord
from fusekit.store.signature import SIGNATURE_BYTES, Trust, is_key_id
from fusekit.store.store import Store
from fusekit.store.verify import Inspect

INDEX_LIMIT = 16 << 20
"""Largest index accepted, in bytes: about 40,000 kernels. Parsed, it takes some ten times as much memory."""
SIGNER_LIMIT = 64
"""Most signatures accepted over one index."""
_HEAD_LIMIT = INDEX_LIMIT + 2 * BLOCK * (SIGNER_LIMIT + 2)  # signatures and index, with their headers

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK": "zip"}


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a bundle. signers: ids of the keys that signed it. signer: the trusted one, if a trust was given."""

    members: tuple[Member, ...]
    signers: tuple[str, ...] = ()
    signer: str | None = None

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind]


def import_bundle(store: Store, source: Source, *, inspect: Inspect | None = None, dry_run: bool = False) -> Transfer:
    """Publish everything in the bundle `source` into `store`, or nothing if any of it is wrong.

    Raises SignatureError, before the index is parsed, if the store trusts keys and none of them signed the bundle and
    each document in it; IntegrityError for any byte of the file that does not match its index, and for documents that
    `inspect` refuses. The store is unchanged then, and with `dry_run` always. If the disk fails while it is written
    (StoreError), the store has whole kernels, and names only once every entry is there; the same import continues.
    """
    with open_bundle(source, store.trust) as reader:
        index = reader.index()
        reader.check(index, inspect)
        return reader.publish(index, store, dry_run)


def read_bundle(
    source: Source, trust: Trust | None = None, inspect: Inspect | None = None
) -> tuple[list[NameRecord], dict[str, Entry]]:
    """The names in the bundle `source`, sorted, and its entries by key; everything is checked as for an import."""
    with open_bundle(source, trust) as reader:
        return reader.check(reader.index(), inspect)


@contextlib.contextmanager
def open_bundle(source: Source, trust: Trust | None) -> Iterator[_Reader]:
    """The bundle in a file, or a stream, which is copied to a temporary file first.

    Of a stream, no more is read than the index needs, and then than the index gives.
    """
    if isinstance(source, Path):
        with given_file(source, "bundle") as (file, status):
            yield _Reader(file, status.st_size, str(source), trust)
        return

    def length(spool: BinaryIO, have: int) -> int:
        # If it is cut within the index it ends too early; after it, the index gives the length.
        return _Reader(spool, have, source.where, trust).length()

    with spooled(source, _HEAD_LIMIT, length) as spool:
        yield _Reader(spool, spool.seek(0, os.SEEK_END), source.where, trust)


# Checks of the columns of a row of the index.
_Column = Callable[[object], bool]
Kernels = Sequence[tuple[NameRecord, Entry]]


def _size_up_to(limit: int) -> _Column:
    return lambda value: type(value) is int and 0 < value <= limit


def _is_name(value: object) -> bool:
    return isinstance(value, str) and names.is_full(value)


def _is_arch(value: object) -> bool:
    with contextlib.suppress(FusekitError):
        return isinstance(value, str) and bool(names.check_arch(value))
    return False


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{12}", value) is not None


_ROWS: tuple[tuple[str, tuple[_Column, ...], Callable[..., Member]], ...] = (
    ("blobs", (is_digest, _size_up_to(CUBIN_LIMIT)), blob_of),
    ("signatures", (is_digest, is_key_id, is_digest), signature_of),
    ("entries", (is_digest, _size_up_to(LIMIT), is_digest), entry_of),
    ("candidates", (_is_name, _is_arch, _is_digits, _size_up_to(LIMIT), is_digest), candidate_of),
    ("names", (_is_name, _is_arch, _size_up_to(LIMIT), is_digest), name_of),
    ("loader", (is_digest, _size_up_to(CUBIN_LIMIT)), loader_of),
)


class _Reader:
    """Reads an open bundle of `size` bytes. Every error names the file and the problem."""

    def __init__(self, file: BinaryIO, size: int, path: str, trust: Trust | None) -> None:
        file.seek(0)
        self._file = file
        self._size = size
        self._path = path
        self._trust = trust
        self._start = 0  # of the first member after the index

    def index(self) -> Index:
        """The index. Its signatures are checked first; the sizes in it add up to that of the file."""
        index, length = self._head()
        if length != self._size:
            raise self._bad(f"has {self._size} bytes, and by its index {length}: it is truncated, or a size is false")
        return index

    def length(self) -> int:
        """Size in bytes of the whole bundle by its index, whose signatures are checked first."""
        return self._head()[1]

    def _head(self) -> tuple[Index, int]:
        signatures: dict[str, bytes] = {}
        while True:
            name, size = self._leading_header()
            if name == INDEX:
                break
            key_id = name.removeprefix(f"{INDEX}.").removesuffix(".sig")
            if name != signature_name(key_id) or not is_key_id(key_id):
                raise self._bad(f"begins with the member {name!r}, where {INDEX} or a signature of it is expected")
            if size != SIGNATURE_BYTES or len(signatures) == SIGNER_LIMIT or list(signatures)[-1:] >= [key_id]:
                raise self._bad(f"has the signature {name!r} of {size} bytes: too large, one too many, or out of order")
            signatures[key_id] = self._content(name, size)
        if not 0 < size <= INDEX_LIMIT:
            raise self._bad(f"has an index of {size} bytes, where 1 to {INDEX_LIMIT} are allowed")
        data = self._content(INDEX, size)
        signer = None if self._trust is None else self._trust.check("bundle", data, signatures, self._path)
        members = self._parse(data)
        self._start = self._file.tell()
        total = sum(len(header(member.path, member.bytes)) + member.bytes + padding(member.bytes) for member in members)
        index = Index(members, tuple(signatures), None if signer is None else signer.id)
        return index, self._start + total + len(END)

    def check(self, index: Index, inspect: Inspect | None = None) -> tuple[list[NameRecord], dict[str, Entry]]:
        """Check every digest and document, and that they fit together. Returns names, and entries by key."""
        blobs = {member.sha256: member.bytes for member in index.of("blob")}
        signed = {member.subject[0] for member in index.of("signature")}
        at = {member.sha256: (member, offset) for member, offset in self._offsets(index) if member.kind == "blob"}
        records: list[NameRecord] = []
        candidates: list[NameRecord] = []
        entries: dict[str, Entry] = {}
        signatures: dict[str, dict[str, bytes]] = {}  # digest of a document -> key id -> signature
        loader: bytes | None = None
        for member, data in self._members(index):
            if member.kind == "signature":
                of, key_id = member.subject
                signatures.setdefault(of, {})[key_id] = data
            elif member.kind == "loader":
                loader = data
            elif member.kind in ("entry", "candidate", "name"):
                signed.discard(member.sha256)
                document = self._document(member, data, signatures)
                if isinstance(document, Entry):
                    if blobs.get(document.cubin_sha256) != document.cubin_bytes:
                        raise self._bad(f"has the entry {document.key}, but not its cubin {document.cubin_sha256}")
                    if inspect is not None:
                        self._inspect(member, inspect.entry, document, self._again(*at[document.cubin_sha256]))
                    entries[document.key] = document
                    continue
                if inspect is not None:
                    self._inspect(member, inspect.name, document)
                if document.key not in entries or entries[document.key].arch != document.arch:
                    raise self._bad(
                        f"has the name {document.name} for {document.arch}, but no such entry {document.key}"
                    )
                (records if member.kind == "name" else candidates).append(document)
        if unused := sorted(blobs.keys() - {entry.cubin_sha256 for entry in entries.values()}):
            raise self._bad(f"has the cubin {unused[0]}, which is of none of its entries")
        if signed:
            raise self._bad(f"has a signature over {min(signed)}, which is none of its documents")
        if self._file.read(len(END) + 1) != END:
            raise self._bad("does not end where its index ends it")
        if loader is not None:
            built = [[(record, entries[record.key]) for record in listed] for listed in (records, candidates)]
            documents = {
                key: self._again(*at[entry.cubin_sha256])
                for key, entry in entries.items()
                if entry.fields.get(KIND) == LAYER
            }
            self._check_loader(loader, index, documents, *built)
        return records, entries

    def _check_loader(
        self, loader: bytes, index: Index, documents: Mapping[str, bytes], names: Kernels, candidates: Kernels
    ) -> None:
        """The member for the C loader must follow from the documents, byte for byte; a digest does not show that."""
        from fusekit.share.loader import derived

        places = before(index.members[:-1])
        none: dict[str, bytes] = {}
        forms = ((documents, True), (none, True), (none, False))  # of now, and of before
        if all(
            loader != derived(names, candidates, places, layers, in_place=in_place)[0] for layers, in_place in forms
        ):
            raise self._bad(
                f"has a {LOADER} that does not follow from its entries and names: it was changed, or written by another"
                " version of fusekit",
                remedy="; export it again",
            )

    def _inspect(self, member: Member, look: Callable[..., None], *what: object) -> None:
        try:
            look(*what)
        except IntegrityError as error:
            raise self._bad(f"has {member.path}, which cannot be used: {error}", remedy="") from None

    def publish(self, index: Index, store: Store, dry_run: bool = False) -> Transfer:
        """Publish the members that `check` has passed: each entry with its cubin, then the names."""
        target = store.writable()  # a root below may have the kernels, and is not to be needed
        with contextlib.nullcontext() if dry_run else target.lease():
            return self._publish(index, target, dry_run)

    def _publish(self, index: Index, target: Store, dry_run: bool) -> Transfer:
        blobs = {member.sha256: offset for member, offset in self._offsets(index) if member.kind == "blob"}
        signatures: dict[str, dict[str, bytes]] = {}  # digest of a document -> key id -> signature
        fresh: dict[str, int] = {}  # key of each new entry -> bytes of its cubin; 0 once a name counts them
        moved, skipped, steps = 0, len(index.of("entry")), list[Step]()
        for member, offset in self._offsets(index):
            if member.kind in ("blob", "loader"):
                continue
            data = self._again(member, offset)
            if member.kind == "signature":
                of, key_id = member.subject
                signatures.setdefault(of, {})[key_id] = data
                continue
            document = self._document(member, data, signatures)
            over = signatures.get(member.sha256, {})
            if member.kind == "candidate" and isinstance(document, NameRecord):
                if not dry_run:
                    target.publish_candidate(document, over)
            elif isinstance(document, NameRecord):
                if document.key in fresh or not _has(target, document):
                    steps.append(Step(document.name, document.arch, document.key, fresh.get(document.key, 0)))
                    fresh[document.key] = 0
                if not dry_run:
                    target.publish_name(document, signatures=over)
            elif target.present(document.key, mark=not dry_run) is None:
                cubin = blob_of(document.cubin_sha256, document.cubin_bytes)
                if not dry_run:
                    target.publish(document, self._again(cubin, blobs[cubin.sha256]), over)
                fresh[document.key] = cubin.bytes
                moved += cubin.bytes
                skipped -= 1
        return Transfer(len(index.of("entry")), len(index.of("name")), moved, skipped, steps=tuple(steps))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> tuple[Member, ...]:
        try:
            document = parse(data, INDEX_LIMIT)
            canonical = (canonical_json(document) + "\n").encode() == data
        except (ValueError, FusekitError) as error:
            raise self._bad(f"has an index that is not valid JSON ({error})") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if type(schema) is not int or schema not in SCHEMAS:
            raise self._bad(f"has an index of schema {schema!r}, and this fusekit reads {SCHEMAS}")
        rows_of = [row for row in _ROWS if schema >= SINCE.get(row[0], 1)]
        if not canonical or set(document) != {"schema", *(label for label, _, _ in rows_of)}:
            raise self._bad("has an index that is not in canonical form: sorted keys, no spaces, no other members")
        members: list[Member] = []
        for label, columns, make in rows_of:
            rows = document[label]
            if not isinstance(rows, list):
                raise self._bad(f"has an index whose {label} are not a list")
            for row in rows:
                fits = isinstance(row, list) and len(row) == len(columns)
                if not fits or not all(fit(value) for fit, value in zip(columns, row, strict=True)):
                    raise self._bad(f"lists among its {label} {_short(row)}, which cannot be one")
            listed = [make(*row) for row in rows]
            for one, after in itertools.pairwise(listed):
                if one.subject >= after.subject:
                    raise self._bad(f"lists {after.path} twice or out of order among its {label}")
            members += listed
        return tuple(members)

    def _document(self, member: Member, data: bytes, signatures: dict[str, dict[str, bytes]]) -> Entry | NameRecord:
        where = f"{self._path}:{member.path}"
        if self._trust is not None:
            kind = "entry" if member.kind == "entry" else "name"
            self._trust.check(kind, data, signatures.get(member.sha256, {}), where)
        document: Entry | NameRecord
        if member.kind == "entry":
            document = Entry.from_bytes(data, where, member.subject)
        else:
            document = NameRecord.from_bytes(data, where, *member.subject[:2])
            if member.kind == "candidate" and document.key[:12] != member.subject[2]:
                raise self._bad(f"has {member.path} for the key {document.key}")
        if document.to_bytes() != data:
            raise self._bad(f"has {member.path} in another form than a store writes")
        return document

    def _offsets(self, index: Index) -> Iterator[tuple[Member, int]]:
        """Each member with the offset of its first byte."""
        at = self._start
        for member in index.members:
            at += len(header(member.path, member.bytes))
            yield member, at
            at += member.bytes + padding(member.bytes)

    def _members(self, index: Index) -> Iterator[tuple[Member, bytes]]:
        seen: set[str] = set()
        for member in index.members:
            expected = header(member.path, member.bytes)
            actual = self._read(len(expected))
            if actual != expected:
                raise self._bad(f"{_difference(actual, member, seen)}, where {member.path!r} is expected")
            data = self._content(member.path, member.bytes)
            if (digest := sha256(data)) != member.sha256:
                raise self._bad(f"has {member.path!r} with the digest {digest}, and its index gives {member.sha256}")
            seen.add(member.path)
            yield member, data

    def _leading_header(self) -> tuple[str, int]:
        """Name and size of the next member, which is the index or precedes it."""
        block = self._read(BLOCK)
        for magic, name in _COMPRESSED.items():
            if block.startswith(magic):
                raise self._bad(f"is compressed with {name}; a bundle is a plain tar file; decompress it first")
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._bad(f"is not a tar file ({error})") from None
        if block != _header_or_nothing(info.name, info.size):
            raise self._bad(f"begins with {_kind(info)}, which no bundle has there")
        return info.name, info.size

    def _content(self, name: str, size: int) -> bytes:
        if size > self._size - self._file.tell():
            raise self._bad(f"ends within {name!r}: it should have {size} bytes")
        data = self._read(size)
        if self._read(padding(size)).strip(b"\0"):
            raise self._bad(f"has bytes between {name!r} and the next member")
        return data

    def _again(self, member: Member, offset: int) -> bytes:
        at = self._file.tell()
        self._file.seek(offset)
        data = self._read(member.bytes)
        self._file.seek(at)
        if sha256(data) != member.sha256:
            raise self._bad(f"changed while it was imported, in {member.path!r}")
        return data

    def _read(self, count: int) -> bytes:
        try:
            data = self._file.read(count)
        except OSError as error:
            raise store_error(self._path, "read", error) from error
        if len(data) != count:
            raise self._bad("ends too early" if self._file.tell() > BLOCK else "is not a bundle, or ends too early")
        return data

    def _bad(self, what: str, remedy: str = "; get it again") -> IntegrityError:
        return IntegrityError(f"{self._path} {what}; a bundle is imported whole or not at all{remedy}")


def _has(store: Store, record: NameRecord) -> bool:
    with contextlib.suppress(IntegrityError):
        return store.roots[0].name(record.name, record.arch) == record
    return False


def _header_or_nothing(name: str, size: int) -> bytes:
    try:
        return header(name, size)
    except (ValueError, tarfile.HeaderError):
        return b""


def _difference(actual: bytes, member: Member, seen: set[str]) -> str:
    """The header `actual` in words."""
    try:
        info = tarfile.TarInfo.frombuf(actual[-BLOCK:], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return "has no member"
    if info.name in seen:
        return f"has {info.name!r} twice"
    if info.name == member.path and info.isreg() and info.size != member.bytes:
        return f"gives {info.size} bytes for a member of {member.bytes}"
    return f"has {_kind(info)}"


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return f"a link, {info.name!r} to {info.linkname!r}"
    if info.name.startswith("/") or ".." in info.name.split("/"):
        return f"the path {info.name!r}, which leads out of a store"
    if not info.isreg():
        return f"{info.name!r}, which is no plain file"
    return f"an unexpected header for {info.name!r}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

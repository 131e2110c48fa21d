"""Bundles: part of a store in one file, for seeding the disks of other machines.

A bundle is a plain tar file, so that `tar -t` lists it. Its members, in this order:

    bundle.json.<key id>.sig     a signature over bundle.json; any number, sorted
    bundle.json                  the index: every other member with its size and digest
    blobs/...                    sorted; paths as in a store
    signatures/...
    entries/...
    candidates/...               only where a name has builds in several cubin formats
    names/...
    loader.bin                   the data of the C loader; only in a bundle that was exported for it

The index decides every other byte of the file: the headers are those that this module writes for it, sizes and order
follow from it, and each member has the digest that it gives. So the same kernels give the same bytes on every machine,
and a reader does not interpret tar headers: it computes the expected header and compares. A link, a device, an absolute
path, a `..`, a member twice, an additional member or an extension header is never the expected one. Nothing is
compressed: no file can grow when it is read, and its bytes do not depend on the version of a library.

`bundle_import` reads the whole file before it writes the first byte, and checks what it writes again, so a file that
changes meanwhile is refused, too. Cubins come before entries and entries before names, as in a build: a killed import
leaves a correct store, and the same import completes it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fusekit.errors import UsageError
from fusekit.share.selection import Selection, Step
from fusekit.store.files import exists
from fusekit.store.keys import canonical_json, sha256
from fusekit.store.names import candidate_path
from fusekit.store.publishing import replace_file
from fusekit.store.root import RELATIVE
from fusekit.store.signature import SIGNATURE_BYTES
from fusekit.store.store import Store

SCHEMAS = (1, 2, 3)
"""Versions of the index: 2 has the member for the C loader, 3 candidates. The lowest that can list all is written."""
INDEX = "bundle.json"
LOADER = "loader.bin"

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
_MODE = 0o644
_LABELS = {
    "blob": "blobs",
    "signature": "signatures",
    "entry": "entries",
    "candidate": "candidates",
    "name": "names",
    "loader": "loader",
}
SINCE = {"loader": 2, "candidates": 3}
"""The schema of the index that first had a list, of those that were not always there."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member after the index. kind: `blob`, `signature`, `entry`, `candidate`, `name` or `loader`. path: in a store.

    subject: the digest of a blob, the key of an entry, (name, architecture), the same with the first digits of the key
    of a candidate, or (digest of the document, key id). row:
    its row of the index, from which the functions below make it.
    """

    kind: str
    path: str
    bytes: int
    sha256: str
    subject: Any
    row: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of an export or import. entries, names: numbers of all. bytes: of the cubins that were copied, or of
    the bundle. skipped: entries that were there already. digest: SHA-256 of a bundle's index, which decides everything
    in it, or the digest from `Loader`. steps: what was imported, by name.
    """

    entries: int
    names: int
    bytes: int
    skipped: int = 0
    digest: str | None = None
    steps: tuple[Step, ...] = ()


Loader = Callable[[Mapping[str, int]], tuple[bytes, str]]
"""Digest of each cubin -> how many bytes before the loader's member it begins; gives the content of that member and a
digest for display."""


def export_bundle(store: Store, selection: Selection, path: Path, loader: Loader | None = None) -> Transfer:
    """Write `selection` of `store` to the file `path`, in one step; signed if the store has a signing key. An existing
    file is replaced, and so is a link, but not its target.

    loader: gives the member of the C loader. The same kernels give the same bytes. Raises UsageError for a `path` that
    is not a plain file or whose folder is missing, IntegrityError for a damaged cubin, StoreError if `path` cannot be
    written; it is then unchanged.
    """
    if not exists(path.parent):
        raise UsageError(f"{path}: there is no folder {path.parent}; make it first")
    selection = selection.signed(store)
    members = tuple(_members(selection))
    loader_content, digest = (b"", None) if loader is None else loader(before(members))
    if loader is not None:
        members = (*members, loader_of(sha256(loader_content), len(loader_content)))
    index = _index_bytes(members)
    signatures = {} if store.signer is None else store.signer.sign("bundle", index)
    entries = {entry.cubin_sha256: entry for entry, _ in selection.entries}
    content: dict[str, bytes] = {sha256(loader_content): loader_content}
    for signed in selection.documents:
        content[signed.digest] = signed.data
        content |= {sha256(signature): signature for signature in signed.signatures.values()}

    def write(file: BinaryIO) -> None:
        for key_id, signature in sorted(signatures.items()):
            _put(file, signature_name(key_id), signature)
        _put(file, INDEX, index)
        for member in members:
            data = store.read_cubin(entries[member.sha256]) if member.kind == "blob" else content[member.sha256]
            _put(file, member.path, data)
        file.write(END)

    size = replace_file(path, write)
    return Transfer(len(selection.entries), len(selection.records), bytes=size, digest=digest or sha256(index))


# -- the form ---------------------------------------------------------------------------------------------------------


def header(path: str, size: int) -> bytes:
    """The one header that a member may have; a path of more than 100 characters needs extension blocks before it."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, _MODE  # time, owner and group are 0
    return info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict")


def padding(size: int) -> int:
    return -size % BLOCK


def _put(file: BinaryIO, path: str, data: bytes) -> None:
    file.write(header(path, len(data)))
    file.write(data)
    file.write(bytes(padding(len(data))))


def signature_name(key_id: str) -> str:
    return f"{INDEX}.{key_id}.sig"


def signed_by(path: Path) -> str:
    """The id of a key whose signature the file begins with, unchecked; empty if it is no signed bundle or no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        name = file.read(100).partition(b"\0")[0].decode("ascii", "replace")
    key_id = name.removeprefix(f"{INDEX}.").removesuffix(".sig")
    return key_id if name == signature_name(key_id) else ""


def _members(selection: Selection) -> Iterator[Member]:
    """The members in the order of the file: kinds in order of publication, each sorted by path."""
    blobs = {entry.cubin_sha256: entry.cubin_bytes for entry, _ in selection.entries}
    signatures = {
        (signed.digest, key_id): signature
        for signed in selection.documents
        for key_id, signature in signed.signatures.items()
    }
    yield from (blob_of(digest, size) for digest, size in sorted(blobs.items()))
    yield from (signature_of(*of, sha256(signature)) for of, signature in sorted(signatures.items()))
    yield from (entry_of(entry.key, len(signed.data), signed.digest) for entry, signed in selection.entries)
    yield from (
        candidate_of(record.name, record.arch, record.key[:12], len(signed.data), signed.digest)
        for record, signed in selection.candidates
    )
    yield from (
        name_of(record.name, record.arch, len(signed.data), signed.digest) for record, signed in selection.records
    )


def blob_of(digest: str, size: int) -> Member:
    return Member("blob", RELATIVE.blob_path(digest).as_posix(), size, digest, digest, (digest, size))


def signature_of(of: str, key_id: str, digest: str) -> Member:
    path = RELATIVE.signature_path(of, key_id).as_posix()
    return Member("signature", path, SIGNATURE_BYTES, digest, (of, key_id), (of, key_id, digest))


def entry_of(key: str, size: int, digest: str) -> Member:
    return Member("entry", RELATIVE.entry_path(key).as_posix(), size, digest, key, (key, size, digest))


def name_of(name: str, arch: str, size: int, digest: str) -> Member:
    path = RELATIVE.name_path(name, arch).as_posix()
    return Member("name", path, size, digest, (name, arch), (name, arch, size, digest))


def candidate_of(name: str, arch: str, digits: str, size: int, digest: str) -> Member:
    path = candidate_path(name, arch, digits)
    return Member("candidate", path, size, digest, (name, arch, digits), (name, arch, digits, size, digest))


def loader_of(digest: str, size: int) -> Member:
    return Member("loader", LOADER, size, digest, LOADER, (digest, size))


def before(members: tuple[Member, ...]) -> dict[str, int]:
    """Digest of each cubin -> how many bytes before the content of the loader's member it begins."""
    offsets: dict[str, int] = {}
    at = BLOCK  # the header of that member
    for member in reversed(members):
        at += member.bytes + padding(member.bytes)
        if member.kind == "blob":
            offsets[member.sha256] = at
        at += len(header(member.path, member.bytes))
    return offsets


def _index_bytes(members: tuple[Member, ...]) -> bytes:
    rows = {label: [member.row for member in members if member.kind == kind] for kind, label in _LABELS.items()}
    schema = 3 if rows["candidates"] else 2 if rows["loader"] else 1
    for label, since in SINCE.items():
        if schema < since:
            del rows[label]
    return (canonical_json({"schema": schema, **rows}, "bundle index") + "\n").encode()

"""Bundles: part of a store in one file, for seeding the disks of other machines.

A bundle is a plain tar file, so that `tar -t` lists it. Its members, in this order:

    bundle.json.<key id>.sig     a signature over bundle.json; any number, sorted
    bundle.json                  the index: every other member with its size and digest
    blobs/...                    sorted; paths as in a store
    signatures/...
    entries/...
    names/...
    loader.bin                   what the C loader reads; only in a bundle that was exported for it

The index decides every other byte of the file: the headers are the ones that this module would write for it, sizes
and order follow from it, and each member has the digest that it states. So the same kernels give the same bytes on
every machine, and a reader need not interpret a tar header: it computes the one that must stand there and compares.
A link, a device, an absolute path, a `..`, a member twice, a member too many, an extension header: none of them is
the expected header. Nothing is compressed: no file can grow when it is read, and its bytes depend on no library's
version.

`bundle_import` reads the whole file before it writes the first byte, and what it then writes it checks again, so a file
that changes under its eyes is refused too. Cubins come before entries and entries before names, as in a build: an
import that is killed leaves nothing that is wrong, and the same import finishes it.
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
from fusekit.store.publishing import replace_file
from fusekit.store.root import SHELL
from fusekit.store.signature import SIGNATURE_BYTES
from fusekit.store.store import Store

SCHEMAS = (1, 2)
"""Of the index: 2 has the member for the C loader."""
INDEX = "bundle.json"
LOADER = "loader.bin"

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
_MODE = 0o644
_LABELS = {"blob": "blobs", "signature": "signatures", "entry": "entries", "name": "names", "loader": "loader"}


@dataclass(frozen=True, slots=True)
class Member:
    """One member behind the index: its kind (`blob`, `signature`, `entry`, `name` or `loader`), path in a store, size,
    digest.

    subject: what it is for: a blob's digest, an entry's key, (name, architecture), (document's digest, key id). row:
    its row of the index, which the functions below make it of.
    """

    kind: str
    path: str
    bytes: int
    sha256: str
    subject: Any
    row: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What went into or out of a store. entries, names: in all; bytes: of the cubins that moved, or of the bundle;
    skipped: entries that were there already. digest: SHA-256 of a bundle's index, which decides everything in it, or
    what `export_bundle` was given with the loader's member. steps: what came in, by name.
    """

    entries: int
    names: int
    bytes: int
    skipped: int = 0
    digest: str | None = None
    steps: tuple[Step, ...] = ()


Loader = Callable[[Mapping[str, int]], tuple[bytes, str]]
"""How many bytes before the loader's member each cubin begins, by its digest -> the content, and a digest to tell."""


def export_bundle(store: Store, selection: Selection, path: Path, loader: Loader | None = None) -> Transfer:
    """Write `selection` of `store` to the file `path`, in one step; signed if the store has a key. A file that is there
    is replaced, and so is a link to one: what it leads to stays as it is.

    loader: makes what the C loader reads. The same kernels give the same bytes. Raises UsageError for a `path` that is
    no plain file or in no folder, IntegrityError when a cubin is damaged, StoreError when `path` cannot be written; it
    is then as it was.
    """
    if not exists(path.parent):
        raise UsageError(f"{path}: there is no folder {path.parent}; a bundle is put where one is; make it first")
    selection = selection.signed(store)
    members = tuple(_members(selection))
    own_content, digest = (b"", None) if loader is None else loader(before(members))
    if loader is not None:
        members = (*members, loader_of(sha256(own_content), len(own_content)))
    index = _index_bytes(members)
    own = {} if store.signer is None else store.signer.sign("bundle", index)
    entries = {entry.cubin_sha256: entry for entry, _ in selection.entries}
    content: dict[str, bytes] = {sha256(own_content): own_content}
    for _, signed in (*selection.entries, *selection.records):
        content[signed.digest] = signed.data
        content |= {sha256(signature): signature for signature in signed.signatures.values()}

    def write(file: BinaryIO) -> None:
        for key_id, signature in sorted(own.items()):
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
    """The one header that a member may have; a path of more than 100 letters takes extension blocks before it."""
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


def _members(selection: Selection) -> Iterator[Member]:
    """In the order of the file: kinds in order of publication, each sorted by path."""
    blobs = {entry.cubin_sha256: entry.cubin_bytes for entry, _ in selection.entries}
    signatures = {
        (signed.digest, key_id): signature
        for _, signed in (*selection.entries, *selection.records)
        for key_id, signature in signed.signatures.items()
    }
    yield from (blob_of(digest, size) for digest, size in sorted(blobs.items()))
    yield from (signature_of(*of, sha256(signature)) for of, signature in sorted(signatures.items()))
    yield from (entry_of(entry.key, len(signed.data), signed.digest) for entry, signed in selection.entries)
    yield from (
        name_of(record.name, record.arch, len(signed.data), signed.digest) for record, signed in selection.records
    )


def blob_of(digest: str, size: int) -> Member:
    return Member("blob", SHELL.blob_path(digest).as_posix(), size, digest, digest, (digest, size))


def signature_of(of: str, key_id: str, digest: str) -> Member:
    path = SHELL.signature_path(of, key_id).as_posix()
    return Member("signature", path, SIGNATURE_BYTES, digest, (of, key_id), (of, key_id, digest))


def entry_of(key: str, size: int, digest: str) -> Member:
    return Member("entry", SHELL.entry_path(key).as_posix(), size, digest, key, (key, size, digest))


def name_of(name: str, arch: str, size: int, digest: str) -> Member:
    path = SHELL.name_path(name, arch).as_posix()
    return Member("name", path, size, digest, (name, arch), (name, arch, size, digest))


def loader_of(digest: str, size: int) -> Member:
    return Member("loader", LOADER, size, digest, LOADER, (digest, size))


def before(members: tuple[Member, ...]) -> dict[str, int]:
    """How many bytes each cubin begins before the content of the loader's member."""
    found: dict[str, int] = {}
    at = BLOCK  # that member's own header
    for member in reversed(members):
        at += member.bytes + padding(member.bytes)
        if member.kind == "blob":
            found[member.sha256] = at
        at += len(header(member.path, member.bytes))
    return found


def _index_bytes(members: tuple[Member, ...]) -> bytes:
    rows = {label: [member.row for member in members if member.kind == kind] for kind, label in _LABELS.items()}
    if not rows["loader"]:
        del rows["loader"]
    return (canonical_json({"schema": SCHEMAS["loader" in rows], **rows}, "bundle index") + "\n").encode()

"""Cache manifests: the kernels built for one architecture by one toolchain, as a file to commit and compare with.

`<arch>-<toolchain>.json` lists every kernel's key and the digests of its cubin and its launch record. The same sources
and toolchain must give the same digests on any machine; if they do not, the difference is reported for each kernel.

A manifest may be signed: `<file>.<key id>.sig` next to it is a signature over its exact bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusekit.errors import IntegrityError, StoreError, UsageError
from fusekit.store import names
from fusekit.store.documents import parse
from fusekit.store.entries import Entry, toolchain_label
from fusekit.store.files import close, file_error
from fusekit.store.keys import is_digest
from fusekit.store.lockfile import read_signed, signature_path
from fusekit.store.names import NameRecord
from fusekit.store.publishing import Publisher
from fusekit.store.signature import SigningKey, Trust, is_key_id
from fusekit.store.verify import Inspect

SCHEMA = 2
"""Version of manifests. 2 has the digests of launch records; 1, of fusekit 0.1, is read too."""
LIMIT = 64 << 20
"""Largest manifest accepted, in bytes."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}")  # a distribution or its version: both become part of a path


@dataclass(frozen=True, slots=True)
class Locked:
    """One kernel: its key, SHA-256 and size in bytes of its cubin, SHA-256 of its launch record, which is empty in a
    manifest of schema 1.
    """

    key: str
    cubin_sha256: str
    bytes: int
    launch_sha256: str = ""

    @classmethod
    def of(cls, entry: Entry) -> Locked:
        return cls(entry.key, entry.cubin_sha256, entry.cubin_bytes, entry.launch_sha256)

    def launches_as(self, other: Locked) -> bool:
        """Whether both have the same launch record, as far as they say."""
        return "" in (self.launch_sha256, other.launch_sha256) or self.launch_sha256 == other.launch_sha256


@dataclass(frozen=True, slots=True)
class Changed:
    """A kernel whose cubin or launch record differs from the manifest. expected, built: its digests. why: whether its
    key has changed, or the same key gave another result.
    """

    name: str
    expected: str
    built: str
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison. same: names whose cubins and launch records are those of the manifest. missing: (name,
    reason).
    """

    same: tuple[str, ...]
    changed: tuple[Changed, ...]
    missing: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        return not self.changed and not self.missing


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest. arch: such as `sm_90a`. toolchain: distribution -> version. kernels: by full name."""

    arch: str
    toolchain: Mapping[str, str]
    kernels: Mapping[str, Locked]

    @property
    def filename(self) -> str:
        return f"{self.arch}-{toolchain_label(self.toolchain)}.json"

    def to_bytes(self) -> bytes:
        """The bytes of its file: sorted, indented, one value a line, so that a diff shows each change."""
        kernels = {name: _document(kernel) for name, kernel in self.kernels.items()}
        schema = SCHEMA if all(kernel.launch_sha256 for kernel in self.kernels.values()) else 1
        document = {"schema": schema, "arch": self.arch, "toolchain": dict(self.toolchain), "kernels": kernels}
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    def updated(self, kernels: Mapping[str, Locked]) -> Manifest:
        """This manifest with `kernels` instead of those of the same names."""
        return replace(self, kernels={**self.kernels, **kernels})

    def compare(
        self, built: Mapping[str, Locked], wanted: Iterable[str], wrong: Mapping[str, str] | None = None
    ) -> Comparison:
        """Compare `built` (by full name) with this manifest, for the names `wanted`. wrong: why some are not built, if
        known.
        """
        same: list[str] = []
        changed: list[Changed] = []
        missing: list[tuple[str, str]] = []
        for name in sorted(wanted):
            locked, now = self.kernels.get(name), built.get(name)
            if locked is None:
                missing.append((name, "the manifest does not have it"))
            elif now is None:
                missing.append((name, (wrong or {}).get(name, "it is not built from the present sources")))
            elif locked.cubin_sha256 == now.cubin_sha256 and locked.launches_as(now):
                same.append(name)
            else:
                cubin = locked.cubin_sha256 != now.cubin_sha256
                what = "other bytes" if cubin else "the same cubin with another launch record"
                why = (
                    f"{what} from the same sources and toolchain: the build is not reproducible"
                    if locked.key == now.key
                    else f"{what}: its spec, sources or toolchain have changed since the manifest was written"
                )
                digests = (
                    (locked.cubin_sha256, now.cubin_sha256) if cubin else (locked.launch_sha256, now.launch_sha256)
                )
                changed.append(Changed(name, *digests, why))
        return Comparison(tuple(same), tuple(changed), tuple(missing))


def _document(kernel: Locked) -> dict[str, Any]:
    return {name: value for name, value in asdict(kernel).items() if value != ""}


def pinned(manifest: Manifest, inspect: Inspect) -> Inspect:
    """`inspect`, extended by the check that names and entries are those of `manifest`: key, cubin and launch record.

    So nothing older passes, even if it is signed: the manifest is the latest state.
    """
    by_key = {locked.key: locked for locked in manifest.kernels.values()}

    def name(record: NameRecord) -> None:
        locked = manifest.kernels.get(record.name) if record.arch == manifest.arch else None
        if locked is None:
            raise IntegrityError(
                f"{record.name} for {record.arch} is not in the manifest; take another, or leave it out"
            )
        if locked.key != record.key:
            raise IntegrityError(
                f"{record.name} points to {record.key}, and in the manifest to {locked.key}: one of them is older; get "
                "the manifest or the kernel again",
                key=record.key,
            )
        inspect.name(record)

    def entry(built: Entry, cubin: bytes | None) -> None:
        locked, now = by_key.get(built.key), Locked.of(built)
        same = locked is not None and (locked.cubin_sha256, locked.bytes) == (now.cubin_sha256, now.bytes)
        if locked is None or not same or not locked.launches_as(now):
            part = "launch record" if same else "cubin"
            digest = now.cubin_sha256 if part == "cubin" else now.launch_sha256
            raise IntegrityError(
                f"entry {built.key} has the {part} {digest}, which the manifest does not list for it; get the manifest "
                "or the kernel again",
                key=built.key,
            )
        inspect.entry(built, cubin)

    return Inspect(entry, name, inspect.tuning)


def differences(
    manifest: Manifest, look: Callable[[str], tuple[NameRecord, Entry | None] | None]
) -> Iterator[tuple[str, str, str]]:
    """(name, key, problem) of each kernel of `manifest` that is missing or different. look: gives the record of a full
    name, and its entry.
    """
    check = pinned(manifest, Inspect(lambda *_: None, lambda _: None, lambda *_: None))
    for name, locked in sorted(manifest.kernels.items()):
        try:
            kernel = look(name)
            if kernel is None or kernel[1] is None:
                what = "is not there" if kernel is None else "points to no entry"
                raise IntegrityError(f"{name} for {manifest.arch} is in the manifest and {what}; get it again")
            check.name(kernel[0])
            check.entry(kernel[1], None)
        except (IntegrityError, StoreError) as error:
            yield name, locked.key, str(error)


def read_manifest(path: Path, trust: Trust | None = None) -> Manifest:
    """The manifest in the file `path`; with `trust`, refused before it is parsed unless one of its keys signed it.

    Raises UsageError if there is no such file or it is not a manifest, IntegrityError if it is damaged, SignatureError
    if it is not trusted.
    """
    return _parse(read_signed(path, "manifest", LIMIT, trust), path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is created if missing, against other writers of manifests; no lock if its file system has
    none.

    The folder itself is locked: it is part of a checkout, and gets no lock file.
    """
    from filelock import lock_descriptor

    with _in_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            lock_descriptor(descriptor, blocking=True)
        yield
    finally:
        close(descriptor)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Turns errors of the body into a StoreError about `path`, which the user has named and is not in a store."""
    try:
        yield
    except (OSError, StoreError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError):
            raise file_error(path, "write", cause) from error
        raise


def write_manifest(manifest: Manifest, folder: Path, signer: SigningKey | None = None) -> Path:
    """Write `manifest` into `folder`, with a signature if there is a `signer`; returns the path of the file.

    Signatures over the previous file are removed. Raises StoreError if it cannot be written; it is then unchanged.
    """
    return write_signed(folder / manifest.filename, manifest.to_bytes(), "manifest", signer)


def write_signed(path: Path, data: bytes, kind: str, signer: SigningKey | None = None) -> Path:
    """Write `data`, a document of `kind` to commit, to the file `path`, as `write_manifest` does."""
    folder = path.parent
    publisher = Publisher(folder)
    with _in_words(path):
        publisher.put(path, data)
    path.chmod(0o644)  # to edit and commit, unlike files of a store
    signatures = {} if signer is None else signer.sign(kind, data)
    for key_id, signature in signatures.items():
        publisher.put(signature_path(path, key_id), signature)
    for other in folder.iterdir():
        key_id = other.name.removeprefix(f"{path.name}.").removesuffix(".sig")
        stale = is_key_id(key_id) and key_id not in signatures and other == signature_path(path, key_id)
        if stale and not other.is_dir():
            other.unlink(missing_ok=True)
    return path


def _parse(data: bytes, path: Path) -> Manifest:
    try:
        document = parse(data, LIMIT)
        absent = [name for name in ("schema", "arch", "toolchain", "kernels") if name not in document]
        manifest = None if absent else _manifest(document, path)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise IntegrityError(
            f"{path} is not a cache manifest ({type(error).__name__}: {error}); check the path; `fusekit lock --write` "
            "makes one"
        ) from None
    if manifest is None:
        raise UsageError(
            f"{path} is not a cache manifest: it has no {', '.join(absent)}; check the path; `fusekit lock --write` "
            "makes one"
        )
    return manifest


def _manifest(document: Any, path: Path) -> Manifest:
    schema = document["schema"]
    if schema not in (1, SCHEMA):
        raise IntegrityError(
            f"{path} has schema {schema!r}; this fusekit reads 1 and {SCHEMA}; write it again with `fusekit lock "
            "--write`"
        )
    return Manifest(
        names.check_arch(document["arch"]),
        {name: _version(name, version) for name, version in document["toolchain"].items()},
        {name: _locked(name, value, schema) for name, value in document["kernels"].items()},
    )


def _version(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(name) or not _WORD.fullmatch(value):
        raise ValueError(f"its distribution {name!r} has the version {value!r}")
    return value


def _locked(name: str, value: Mapping[str, Any], schema: int) -> Locked:
    locked = Locked(**value)
    digests = [locked.key, locked.cubin_sha256]
    digests += [locked.launch_sha256] if schema > 1 or locked.launch_sha256 != "" else []
    if not names.is_full(name) or not all(map(is_digest, digests)):
        raise ValueError(f"{name!r} has {value!r}")
    if type(locked.bytes) is not int or locked.bytes <= 0:
        raise ValueError(f"{name!r} has {locked.bytes!r} bytes")
    return locked

"""Wheels: part of a store as a Python package of data alone, which pip installs and removes.

    NAME/__init__.py                      a docstring
    NAME/store/...                        the store: marker, blobs, entries, names, candidates, signatures
    NAME/locks/<arch>-<toolchain>.json    locks of the kernels, and their signatures
    NAME-VERSION.dist-info/...            METADATA, WHEEL, entry_points.txt, RECORD

The entry point makes the store a read-only root of every library (fusekit.store.installed). Nothing in the file depends
on the time or the machine: the same kernels give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from fusekit.errors import IntegrityError, UsageError
from fusekit.share.bounds import Bounds
from fusekit.share.bundle import Transfer, export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.lock_folder import write_lock
from fusekit.share.selection import Selection
from fusekit.store.entries import CUBIN_LIMIT, toolchain_label
from fusekit.store.files import exists
from fusekit.store.given import given_file
from fusekit.store.installed import GROUP, STORE
from fusekit.store.layout import BLOBS, CANDIDATES, ENTRIES, MARKER, NAMES, SIGNATURES
from fusekit.store.lockfile import Build, Lock, lock_file
from fusekit.store.publishing import replace_file
from fusekit.store.store import Store

_VERSION = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
_NAME = re.compile(rf"([A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*)-({_VERSION})", re.ASCII)
_FIRST = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
_MODE = 0o100644 << 16
_PARTS = (BLOBS, ENTRIES, NAMES, CANDIDATES, SIGNATURES)


def check_wheel_name(text: str) -> tuple[str, str]:
    """(name, version) of a wheel, from NAME-VERSION. Raises UsageError."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not NAME-VERSION; a wheel is called such as my-kernels-1.0")
    return match[1], match[2]


def module_name(name: str) -> str:
    """The package in the wheel `name`."""
    return re.sub(r"[-_.]+", "_", name).lower()


def wheel_path(name: str, version: str, folder: Path) -> Path:
    """The file of a wheel in `folder`."""
    return folder / f"{module_name(name)}-{version}-py3-none-any.whl"


def signed_by(path: Path) -> str:
    """The id of a key that signed kernels of the wheel at `path`, unchecked; empty if there is none, or no wheel."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as wheel:
        for member in wheel.namelist():
            store, _, name = member.partition(f"/{STORE}/{'/'.join(SIGNATURES.parts)}/")
            if SIGNATURES.ours.fullmatch(name) and "/" not in store:
                return name.rpartition(".")[2]
    return ""


def export_wheel(store: Store, selection: Selection, name: str, version: str, folder: Path) -> tuple[Path, Transfer]:
    """Write `selection` of `store` as a wheel into `folder`, which is made if it is missing; signed if the store has a
    signing key. An existing file is replaced.

    Raises IntegrityError for a damaged cubin, StoreError if the file cannot be written; it is then unchanged.
    """
    module, path = module_name(name), wheel_path(name, version, folder)
    if not exists(folder):
        folder.mkdir(parents=True)
    with TemporaryDirectory(prefix="fusekit-wheel-") as scratch:
        where = Path(scratch)
        done = export_bundle(store, selection, where / "bundle")
        import_bundle(Store(where / STORE), where / "bundle")
        for file, lock in _locks(selection):
            write_lock(lock, where / "locks" / file, store.signer, folder=True)
        held = f"{done.names} names, {done.entries} kernels"
        summary = f"GPU kernels of fusekit: {held}"
        info = f"{module}-{version}.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
        files = {f"{module}/__init__.py": f'"""{summary}; fusekit finds them by an entry point."""\n'.encode()}
        files |= {f"{module}/{file.relative_to(where).as_posix()}": file.read_bytes() for file in _files(where)}
        files |= {
            f"{info}/METADATA": head.encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: fusekit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[{GROUP}]\n{module} = {module}\n".encode(),
        }
        files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")

        def write(file: BinaryIO) -> None:
            with zipfile.ZipFile(file, "w") as wheel:
                for member, data in files.items():
                    row = zipfile.ZipInfo(member, _FIRST)
                    row.external_attr, row.create_system = _MODE, 3
                    wheel.writestr(row, data, zipfile.ZIP_STORED)  # compressed bytes depend on the library's version

        size = replace_file(path, write)
    return path, Transfer(done.entries, done.names, bytes=size, digest=done.digest)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A temporary folder with the store that is in the wheel at `path`; what else the wheel has is left out.

    Raises UsageError for a file that is missing or has no store, IntegrityError for one that cannot be read.
    """
    with given_file(path, "wheel") as (file, _), TemporaryDirectory(prefix="fusekit-wheel-") as scratch:
        folder = Path(scratch, STORE)
        try:
            with zipfile.ZipFile(file) as wheel:
                marker = next((name for name in wheel.namelist() if name.endswith(f"/{STORE}/{MARKER}")), None)
                if marker is None:
                    raise UsageError(f"{path} has no store of kernels; `fusekit export --wheel` writes wheels that do")
                _unpack(wheel, marker.removesuffix(MARKER), folder)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise IntegrityError(f"{path} is not a readable wheel: {error}; get it again") from error
        yield folder


def _unpack(wheel: zipfile.ZipFile, store: str, folder: Path) -> None:
    """Write the files below `store` in `wheel`, those that a store can have, into `folder`."""
    room = Bounds().total_bytes
    for member in wheel.infolist():
        path = member.filename.removeprefix(store)
        if not member.filename.startswith(store) or not _is_ours(path):
            continue
        room -= member.file_size
        if member.file_size > CUBIN_LIMIT or room < 0:
            raise IntegrityError(f"{member.filename} unpacks to {member.file_size} bytes, more than a store may have")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(member))


def _is_ours(path: str) -> bool:
    """Whether a store may have the file `path`, and a wheel of it."""
    folders = {"/".join(part.parts) + "/": part.ours for part in _PARTS}
    return path == MARKER or any(
        path.startswith(folder) and ours.fullmatch(path.removeprefix(folder)) for folder, ours in folders.items()
    )


def _files(where: Path) -> Iterator[Path]:
    """What of a store is data, and the locks, sorted."""
    folders = [where / STORE / Path(*part.parts) for part in _PARTS] + [where / "locks"]
    found = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    yield from sorted([where / STORE / MARKER, *found])


def _locks(selection: Selection) -> Iterator[tuple[str, Lock]]:
    """The name of the file, and a lock for each architecture and toolchain."""
    entries = {entry.key: entry for entry, _ in selection.entries}
    kernels: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, Build]] = defaultdict(dict)
    for record, _ in (*selection.candidates, *selection.records):
        entry = entries[record.key]
        toolchain = entry.toolchain.get("distributions", {})
        build = Build.of(toolchain_label(toolchain), entry)
        kernels[record.arch, tuple(sorted(toolchain.items()))][record.name] = build
    for (arch, toolchain), builds in sorted(kernels.items()):
        yield lock_file(arch, dict(toolchain)), Lock.of_folder(arch, dict(toolchain), builds)


def _record(files: dict[str, bytes], itself: str) -> bytes:
    rows = []
    for member, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{member},sha256={digest},{len(data)}\n")
    return "".join([*rows, f"{itself},,\n"]).encode()

"""Writes locks: that of a project, and a folder of locks, one for each architecture and toolchain.

The same sources and toolchain must give the same digests on any machine; `compared` reports the difference, kernel by
kernel. A lock may be signed: `<file>.<key id>.sig` next to it is a signature over its exact bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fusekit.errors import IntegrityError, StoreError
from fusekit.store.files import close, file_error
from fusekit.store.lockfile import Build, Lock, Where, signature_path
from fusekit.store.publishing import Publisher
from fusekit.store.signature import SigningKey, is_key_id


@dataclass(frozen=True, slots=True)
class Change:
    """A build that a lock lists otherwise than it is now. before, now: keys, or digests where these alone differ; None:
    not listed, not there. why: in words; empty where keys say it.
    """

    name: str
    arch: str
    toolchain: str
    before: str | None
    now: str | None
    why: str = ""


def compared(
    lock: Lock, built: Mapping[Where, Build], wanted: Iterable[Where], wrong: Mapping[Where, str] | None = None
) -> tuple[list[Where], list[Change], list[tuple[Where, str]]]:
    """What of `wanted` is in `lock` as it is in `built`, by cubin and launch record; what is not; what either lacks.

    wrong: why some are not built, if known.
    """
    same: list[Where] = []
    changed: list[Change] = []
    missing: list[tuple[Where, str]] = []
    for where in sorted(wanted):
        now = built.get(where)
        listed = [build for build in lock.kernels.get(where, ()) if now is None or build.toolchain == now.toolchain]
        if not listed:
            missing.append((where, "the lock does not have it"))
        elif now is None:
            missing.append((where, (wrong or {}).get(where, "it is not built from the present sources")))
        elif (part := listed[0].differs(now)) is None:
            same.append(where)
        else:
            what = "other bytes" if part == "cubin" else "the same cubin with another launch record"
            why = (
                f"{what} from the same sources and toolchain: the build is not reproducible"
                if listed[0].key == now.key
                else f"{what}: its spec, sources or toolchain have changed since the lock was written"
            )
            digests = (listed[0].digest(part), now.digest(part))
            changed.append(Change(*where, now.toolchain, *digests, why))
    return same, changed, missing


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is created if missing, against other writers of locks; no lock if its file system has none.

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


def write_lock(lock: Lock, path: Path, signer: SigningKey | None = None, *, folder: bool = False) -> Path:
    """Write `lock` to the file `path`, with a signature if there is a `signer`; returns the path. folder: it is a lock
    of a folder.

    Signatures over the previous file are removed. Raises StoreError if it cannot be written; it is then unchanged.
    """
    without = [name for (name, _), builds in lock.kernels.items() if any(not each.launch_sha256 for each in builds)]
    if without:
        raise IntegrityError(
            f"{path} lists {without[0]} without its launch record, as fusekit 0.1 did; remove the file and write it "
            "again with `fusekit lock --write`"
        )
    data = lock.to_bytes()
    publisher = Publisher(path.parent)
    with _in_words(path):
        publisher.put(path, data)
    path.chmod(0o644)  # to edit and commit, unlike files of a store
    signatures = {} if signer is None else signer.sign("manifest" if folder else "lock", data)
    for key_id, signature in signatures.items():
        publisher.put(signature_path(path, key_id), signature)
    for other in path.parent.iterdir():
        key_id = other.name.removeprefix(f"{path.name}.").removesuffix(".sig")
        stale = is_key_id(key_id) and key_id not in signatures and other == signature_path(path, key_id)
        if stale and not other.is_dir():
            other.unlink(missing_ok=True)
    return path

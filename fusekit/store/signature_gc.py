"""Collecting signatures whose documents are gone. The rule is that of fusekit.store.gc.

A signature is published before its document, and given a new stamp if it was there already. So one without a document
is left alone while it is young. An old one is moved aside and looked at again: if its stamp is new by now, a publisher
relies on it, and it is put back.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fusekit.errors import IntegrityError, StoreError
from fusekit.store.documents import LIMIT
from fusekit.store.files import Publisher, read_file, store_error
from fusekit.store.keys import sha256
from fusekit.store.layer import Layer

YOUNG_SECONDS = 3600


def collect_signatures(layer: Layer, publisher: Publisher, dry_run: bool = False) -> int:
    """Remove signatures over no document of `layer`; how many went, or with `dry_run` would go."""
    signatures = list(layer.signature_files())
    documents = _documents(layer) if signatures else set()
    unneeded = [path for path in signatures if path.name.partition(".")[0] not in documents]
    if not unneeded:
        return 0
    try:
        oldest = _now(layer.root, publisher) - YOUNG_SECONDS * 10**9
        return sum(_remove(path, oldest, publisher, dry_run) for path in unneeded)
    except OSError as error:
        raise store_error(layer.root / "signatures", "collect", error) from error


def _documents(layer: Layer) -> set[str]:
    """The digests of all entries and name records. One that cannot be read has no signature that counts."""
    paths = [*layer.entry_files(), *(layer.root / "names" / folder / name for folder, name in layer.name_files())]
    found = set()
    for path in paths:
        with contextlib.suppress(IntegrityError, StoreError):
            data = read_file(path, limit=LIMIT)
            if data is not None:
                found.add(sha256(data))
    return found


def _remove(path: Path, oldest: int, publisher: Publisher, dry_run: bool) -> bool:
    try:
        if path.lstat().st_mtime_ns > oldest or dry_run:
            return dry_run and path.lstat().st_mtime_ns <= oldest
        aside = publisher.temporary(path)
        publisher.disk.replace(path, aside)
        if aside.lstat().st_mtime_ns > oldest:
            publisher.give(aside, path)
            return False
        publisher.disk.remove(aside)
    except FileNotFoundError:
        return False
    return True


def _now(root: Path, publisher: Publisher) -> int:
    """Nanoseconds, as the store's file system counts."""
    probe = publisher.temporary(root / "now")
    publisher.disk.write(probe, b"")
    try:
        return probe.stat().st_mtime_ns
    finally:
        publisher.disk.remove(probe)

"""Stores whose kernels were used some time ago."""

import os
import time
from pathlib import Path

from fusekit.store import Store
from fusekit.store.layout import MARKER
from fusekit.store.marks import mark_path
from tests.store.samples import build_entry, build_record

DAY = 86400.0


def age(path, seconds):
    stamp = time.time() - seconds
    os.utime(path, (stamp, stamp))


def fill(root, count=4, *, idle=100.0, cubin=b"x" * 1000):
    """A store with kernels f/k0 ... each used `idle` seconds before the next."""
    store = Store(root)
    entries = []
    for seed in range(count):
        entry, data = build_entry(seed, cubin=b"%d" % seed + cubin)
        store.publish(entry, data)
        store.publish_name(build_record(entry, f"f/k{seed}@v"))
        use(store, entry, (count - seed) * idle)
        entries.append(entry)
    return store, entries


def use(store, entry, ago):
    root = store.roots[0]
    age(root.entry_path(entry.key), ago)
    age(root.blob_path(entry.cubin_sha256), ago)
    mark = mark_path(store.root, entry.key)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    age(mark, ago)


def held(store):
    assert not store.verify(full=True).bad
    return [listed.record.name.partition("/")[2] for listed in store.names()]


def unreadable_files(monkeypatch, code):
    """Reading the files that are given to what this returns fails with `code`, however often it is tried."""
    paths, real = set(), os.open

    def fail(path, flags, *rest, dir_fd=None, **options):
        folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        if folder / path in paths:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *rest, dir_fd=dir_fd, **options)

    monkeypatch.setattr(os, "open", fail)
    return paths.add


def everything(root):
    """Every file but the marker."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != MARKER)

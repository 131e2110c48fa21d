"""Remotes that fail, and that somebody damaged."""

import functools

import fsspec

from fusekit.share.remote import Remote
from fusekit.store.layout import MARKER
from fusekit.store.publishing import Disk
from tests.store.samples import build_entry, build_record

NAMES = ("quickstart/fc1@128x160-c2x1", "quickstart/fc2@a", "other/fc1@b")


def fill(store, names=NAMES, first=0):
    for seed, name in enumerate(names, start=first):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, name))
    return store


class Unsteady:
    """A file system that fails when `fails(operation, path)` says so, and writes down what it was asked for."""

    def __init__(self, real, fails=lambda operation, path: None):
        self.real = real
        self.fails = fails
        self.calls = []

    def __getattr__(self, name):
        value = getattr(self.real, name)
        if name not in ("pipe_file", "open", "find", "ls", "mv", "info", "makedirs"):
            return value

        @functools.wraps(value)
        def call(path, *arguments, **options):
            self.ask(name, path)
            return value(path, *arguments, **options)

        return call

    def ask(self, name, path):
        self.calls.append((name, path))
        error = self.fails(name, path)
        if error is not None:
            raise error

    def count(self, operation, part=""):
        return sum(name == operation and part in path for name, path in self.calls)


class UnsteadyDisk(Disk):
    """The steps of a folder of this machine, under the names that they have in fsspec; the marker's are left out."""

    def __init__(self, unsteady):
        self.unsteady = unsteady

    def make_directory(self, path, at=None):
        self.unsteady.ask("makedirs", str(path))
        return super().make_directory(path, at)

    def write(self, path, data, at=None):
        if MARKER not in path.name:
            self.unsteady.ask("pipe_file", str(path))
        super().write(path, data, at)

    def replace(self, source, target, at=None):
        self.unsteady.ask("mv", str(source))
        super().replace(source, target, at)


def remote(url, fails=lambda operation, path: None):
    opened = Remote(url, pause=0.001)
    opened._fs = Unsteady(opened._fs, fails)
    if opened._publisher is not None:
        opened._publisher.disk = UnsteadyDisk(opened._fs)
    return opened


def elsewhere(opened):
    """`opened`, the remote of a folder, written through fsspec alone, as on a file system of another machine."""
    opened._publisher = None
    return opened


def damage(url, path, change):
    filesystem, root = fsspec.core.url_to_fs(url)
    full = f"{root.rstrip('/')}/{path}"
    data = change(filesystem.cat_file(full))
    filesystem.rm_file(full)
    if data is not None:
        filesystem.pipe_file(full, data)


def paths_of(seed, name):
    entry, _ = build_entry(seed)
    digest = entry.cubin_sha256
    return {
        "blob": f"blobs/sha256/{digest[:2]}/{digest}",
        "entry": f"entries/{entry.key[:2]}/{entry.key}.json",
        "name": f"names/{name}.sm_90a.json",
    }

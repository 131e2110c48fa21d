"""The file layer: what is refused, in which order a disk is changed, what a failing disk leaves."""

import errno
import os
import socket
from pathlib import Path

import pytest

from fusekit.errors import IntegrityError, StoreError
from fusekit.store import Store
from fusekit.store.files import read_file, size_of
from fusekit.store.layout import MARKER
from fusekit.store.publishing import Disk, Publisher


class Recorder(Disk):
    """Writes down each step that changes the disk; fails at step `fail` with `code`, once."""

    def __init__(self, root, fail=None, code=errno.EIO):
        self.root, self.fail, self.code = root, fail, code
        self.steps = []

    def _step(self, name, path):
        path = path.relative_to(self.root) if path.is_relative_to(self.root) else Path("outside")
        self.steps.append((name, "temporary" if path.suffix == ".tmp" else str(path.parts[0] if path.parts else path)))
        if len(self.steps) - 1 == self.fail:
            raise OSError(self.code, os.strerror(self.code))

    def make_directory(self, path, at=None):
        self._step("make", path)
        return super().make_directory(path, at)

    def write(self, path, data, at=None):
        self._step("write", path)
        super().write(path, data, at)

    def link(self, source, target, at=None):
        self._step("name", target)
        super().link(source, target, at)

    def replace(self, source, target, at=None):
        self._step("name", target)
        super().replace(source, target, at)

    def sync(self, path, at=None):
        self._step("sync", path)
        super().sync(path, at)


def test_reads_a_plain_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, limit=5) == read_file(path, limit=9, exactly=5) == b"12345"
    assert size_of(path) == 5


def test_nothing_there_is_none(tmp_path):
    assert read_file(tmp_path / "file", limit=5) is None
    assert read_file(tmp_path / "no" / "file", limit=5) is None
    assert size_of(tmp_path / "file") is None


def plant(kind, path):
    if kind == "link":
        other = path.with_name("other")
        other.write_bytes(b"12345")
        path.symlink_to(other)
    elif kind == "dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may have 108 bytes only
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "directory", "socket"])
def test_what_is_no_plain_file_is_refused(tmp_path, kind):
    path = tmp_path / "file"
    plant(kind, path)
    with pytest.raises(IntegrityError, match=kind.split()[-1]):
        read_file(path, limit=100)
    with pytest.raises(IntegrityError, match=kind.split()[-1]):
        size_of(path)


def test_a_wrong_size_is_refused_before_reading(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with pytest.raises(IntegrityError, match="at most 4"):
        read_file(path, limit=4)
    with pytest.raises(IntegrityError, match="must have 6"):
        read_file(path, limit=9, exactly=6)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it would be noticed
    with pytest.raises(IntegrityError, match="1099511627776"):
        read_file(path, limit=100)


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IntegrityError, match="no directory"):
        read_file(tmp_path / "file" / "under", limit=4)


def test_a_name_is_claimed_once(tmp_path):
    publisher = Publisher(tmp_path)
    path = tmp_path / "a" / "b" / "file"
    assert publisher.claim(path, b"first")
    assert not publisher.claim(path, b"second")
    assert path.read_bytes() == b"first"
    publisher.put(path, b"third")
    assert path.read_bytes() == b"third"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o222 == 0


def test_the_umask_decides_who_reads(tmp_path):
    for mask, mode in ((0o022, 0o444), (0o077, 0o400)):
        old = os.umask(mask)
        try:
            Publisher(tmp_path).claim(tmp_path / f"{mask:o}", b"")
        finally:
            os.umask(old)
        assert (tmp_path / f"{mask:o}").stat().st_mode & 0o777 == mode


def test_without_hard_links_the_last_one_wins(tmp_path):
    class NoLinks(Disk):
        def link(self, source, target, at=None):
            raise OSError(errno.EPERM, "no hard links here")

    publisher = Publisher(tmp_path, NoLinks())
    assert publisher.claim(tmp_path / "file", b"first")
    assert publisher.claim(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_store_that_was_cleared_is_made_again(tmp_path):
    import shutil

    publisher = Publisher(tmp_path / "store")
    publisher.put(tmp_path / "store" / "a" / "file", b"1")
    shutil.rmtree(tmp_path / "store")
    publisher.put(tmp_path / "store" / "a" / "file", b"2")
    assert (tmp_path / "store" / "a" / "file").read_bytes() == b"2"


def test_the_order_that_survives_a_power_loss(tmp_path, make_entry, make_record):
    disk = Recorder(tmp_path)
    store = Store(tmp_path, disk=disk)
    entry, cubin = make_entry()
    store.publish(entry, cubin)
    store.publish_name(make_record(entry))
    steps = [step for step in disk.steps if step[0] != "make"]
    durable = []
    for top in ("blobs", "entries", "names"):
        named = steps.index(("name", top))
        # The bytes are synced by `write` itself, before they have a name; the directory after it.
        assert steps[named - 1] == ("write", "temporary")
        assert steps[named + 1] == ("sync", top)
        durable.append((named, named + 1))
    assert durable == sorted(durable)
    # The marker comes first: a folder with entries and without a marker is not a store yet.
    assert [top for action, top in disk.steps if action == "name"] == [MARKER, "blobs", "entries", "names"]
    for number, step in enumerate(disk.steps):
        if step[0] == "make":
            assert disk.steps[number + 1][0] == "sync"


def test_a_cubin_somebody_else_left_is_synced_before_an_entry_names_it(tmp_path, make_entry):
    entry, cubin = make_entry()
    first = Store(tmp_path)
    first.publish(entry, cubin)
    first.roots[0].entry_path(entry.key).unlink()
    disk = Recorder(tmp_path)
    Store(tmp_path, disk=disk).publish(entry, cubin)
    assert disk.steps.count(("sync", "blobs")) >= 2
    assert disk.steps.index(("name", "entries")) > disk.steps.index(("sync", "blobs"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_step_leaves_a_store_that_is_whole(tmp_path, make_entry, make_record, code):
    entry, cubin = make_entry()
    other, other_cubin = make_entry(1)
    for fail in range(60):
        root = tmp_path / str(fail)
        Store(root).publish(other, other_cubin)
        disk = Recorder(root, fail, code)
        store = Store(root, disk=disk)
        try:
            store.publish(entry, cubin)
            store.publish_name(make_record(entry))
        except StoreError as error:
            assert str(root) in str(error)
            assert os.strerror(code) in str(error)
            assert error.path
        else:
            assert len(disk.steps) <= fail, "every step was made to fail"
            break
        plain = Store(root)
        report = plain.verify(full=True)
        assert not report.bad
        assert report.temporaries == 0
        assert plain.load(other.key) == (other, other_cubin)
        assert plain.load(entry.key) in (None, (entry, cubin))
        # The same builder carries on once the disk is well again.
        store.publish(entry, cubin)
        store.publish_name(make_record(entry))
        assert plain.load(entry.key) == (entry, cubin)
        assert plain.find_name(make_record(entry).name, "sm_90a") == make_record(entry)
    else:
        pytest.fail("more steps than expected")


def test_a_directory_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert Publisher(tmp_path).claim(tmp_path / "file", b"1")


def test_a_root_below_a_file_is_an_error_with_the_path(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is a file"):
        Publisher(tmp_path / "file" / "store").put(tmp_path / "file" / "store" / "x", b"")

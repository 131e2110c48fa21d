"""Disks and file systems that misbehave: the error names the path and the remedy, readers go on, nothing is lost."""

import errno
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest

# Commands import their parts late; a test that gave up its rights may no longer be able to.
from fusekit.compiler.build_check import locked_in
from fusekit.compiler.identity import Identity
from fusekit.errors import IntegrityError, StoreError
from fusekit.share.lock_folder import compared
from fusekit.store import Store, files
from fusekit.store.files import read_file
from fusekit.store.lockfile import Lock
from fusekit.store.marks import mark_path
from fusekit.store.publishing import Disk
from fusekit.store.signature import read_any_keys
from fusekit_cli.doctor import _stores
from fusekit_cli.main import main
from tests.cli.test_explain import SPEC, fill
from tests.store.samples import build_entry, build_record, cut


class Failing(Disk):
    """Every change fails with `code`."""

    def __init__(self, code):
        self.code = code

    def _fail(self, *_):
        raise OSError(self.code, os.strerror(self.code))

    make_directory = write = link = replace = remove = sync = _fail


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    entry, cubin = build_entry()
    store.publish(entry, cubin)
    store.publish_name(build_record(entry))
    return store


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some quota"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "grant access"),
        (errno.EIO, "fusekit verify --full"),
        (errno.ESTALE, "remount"),
        (errno.ENOTDIR, "is a file"),
        (errno.EMFILE, "check the path"),
    ],
)
def test_a_disk_that_takes_nothing(store, code, remedy):
    broken = Store(store.root, disk=Failing(code))
    entry, cubin = build_entry(1)
    for change in (
        lambda: broken.publish(entry, cubin),
        lambda: broken.publish_name(build_record(build_entry()[0], "other/name@v")),
        lambda: broken.collect(max_bytes=0),
    ):
        with pytest.raises(StoreError, match=remedy) as caught:
            change()
        assert str(store.root) in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        assert str(store.root) in caught.value.path
    assert broken.load(build_entry()[0].key) == build_entry()
    assert not store.verify(full=True).bad


def test_a_file_too_large_for_the_process(store, monkeypatch):
    """A real limit of the system, met in the middle of a cubin."""
    resource = pytest.importorskip("resource")
    import signal

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a module that is imported first below the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match="cannot write"):
            store.publish(*build_entry(1, cubin=b"x" * 9000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    report = store.verify(full=True)
    assert (report.entries, report.blobs, report.temporaries, report.bad) == (1, 1, 0, ())


@pytest.mark.parametrize("unwritable", ["everything", "used only"])
def test_a_store_that_may_only_be_read(unprivileged, unwritable):
    """As on a read-only mount: launching, listing, verifying work, and building what is there already."""
    root = unprivileged / "store"
    store = Store(root)
    entry, cubin = build_entry()
    store.publish(entry, cubin)
    store.publish_name(build_record(entry))
    shutil.rmtree(root / "used")
    (root / "used").mkdir()
    for path in (root, *root.rglob("*")):
        if path.is_dir() and (unwritable == "everything" or path.name == "used"):
            path.chmod(0o555)
    reader = Store(root)
    with reader.lease():
        assert reader.load(entry.key) == (entry, cubin)
        assert reader.ensure(entry.key, pytest.fail) == (entry, False)
        assert reader.settled(build_record(entry)) is not None
        reader.publish_name(build_record(entry))
    assert len(reader.overview().rows) == 1
    assert not reader.verify(full=True).bad
    assert not list((root / "used").iterdir())


@pytest.fixture
def identity():
    """For a test that gives up its rights after this: making keys imports much of the standard library."""
    identity = Identity()
    identity.key_fields(SPEC)
    return identity


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(lambda path: path.parent.chmod(0), "Permission denied"), (cut, "bytes"), (os.unlink, "is in no root")],
)
def test_a_lock_says_what_is_wrong_with_a_kernel(identity, unprivileged, spoil, problem):
    root = unprivileged / "store"
    entry = fill(root)
    locked, wrong = locked_in(Store(root), [SPEC], identity)
    where = (SPEC.full_name, SPEC.arch)
    assert (set(locked), wrong) == ({where}, {})
    lock = Lock.of_folder(SPEC.arch, identity.toolchain, {SPEC.full_name: locked[where]})
    path = Store(root).roots[0].blob_path(entry.cubin_sha256)
    spoil(path)
    built, wrong = locked_in(Store(root), [SPEC], identity)
    _, _, ((missing, why),) = compared(lock, built, [where], wrong)
    assert (built, missing) == ({}, where)
    assert problem in why
    assert entry.cubin_sha256 in why


class TestAFolderThatNobodyMayEnter:
    """What cannot even be looked at is neither empty nor a defect: the error has the path and the remedy."""

    @pytest.fixture
    def closed(self, unprivileged):
        store = Store(unprivileged / "closed" / "store")
        store.publish(*build_entry())
        store.publish_name(build_record(build_entry()[0]))
        yield store
        (unprivileged / "closed").chmod(0o700)

    @pytest.mark.parametrize("part", ["..", "entries", "names", "blobs/sha256", "leases", "used", "locks"])
    def test_whatever_is_done_says_so_or_works(self, closed, part):
        entry, cubin = build_entry()
        record = build_record(entry)
        folder = closed.root.parent if part == ".." else closed.root / part
        folder.mkdir(exist_ok=True)
        folder.chmod(0)
        refused = 0
        for step in (
            closed.collect,
            lambda: closed.collect(max_bytes=0, dry_run=True),
            lambda: closed.load(entry.key) or pytest.fail(),
            lambda: closed.ensure(entry.key, lambda: (entry, cubin)),
            lambda: closed.publish(*build_entry(1)),
            lambda: closed.publish_name(record),
            lambda: closed.find_name(record.name, record.arch) or pytest.fail(),
        ):
            try:
                step()
            except StoreError as error:
                assert "Permission denied; grant access to it" in str(error)
                refused += 1
        # Without marks, leases and locks only collection cannot do its work.
        expected = {"..": 7, "leases": 2, "used": 2, "locks": 2}
        assert refused == expected[part] if part in expected else refused >= 3
        folder.chmod(0o700)
        assert closed.load(entry.key) == (entry, cubin)
        assert not closed.verify(full=True).bad

    def test_what_is_wrong_with_it_does_not_hide_the_others(self, closed):
        upper = Store(closed.root.parent.parent / "own", [closed.root])
        upper.publish(*build_entry(1))
        closed.root.parent.chmod(0)
        report = upper.verify(full=True)
        assert report.entries == 1
        assert {problem.root for problem in report.bad} == {closed.root}
        assert all("Permission denied" in problem.problem for problem in report.bad)
        assert upper.load(build_entry(1)[0].key) == build_entry(1)

    def test_commands_say_so(self, closed, capsys, monkeypatch):
        monkeypatch.setenv("NO_COLOR", "1")
        closed.root.parent.chmod(0)
        for arguments in (["gc"], ["gc", "--dry-run"], ["verify"], ["copy"], ["show", "quickstart/*"]):
            assert main([*arguments, "--store", str(closed.root)]) != 0
            out, err = capsys.readouterr()
            assert f"{closed.root}" in out + err
            assert "Permission denied" in out + err
            assert "defect" not in err
        (answer,) = _stores(SimpleNamespace(open_store=lambda: closed), None)
        assert "Permission denied" in answer["problem"]
        with pytest.raises(StoreError, match="Permission denied"):
            read_any_keys(closed.root / "key")


def test_a_store_that_vanishes(store, tmp_path):
    """An unmounted file system looks like an empty directory, or like none: nothing is there, nothing is guessed."""
    entry, cubin = build_entry()
    moved = tmp_path / "moved"
    store.root.rename(moved)
    assert store.load(entry.key) is None
    assert store.names() == []
    assert store.collect(max_bytes=0).removed == 0
    assert not store.root.exists()
    below = Store(store.root, [moved])
    assert below.load(entry.key) == (entry, cubin)
    moved.rename(store.root)
    assert store.load(entry.key) == (entry, cubin)


@pytest.mark.parametrize("place", ["", "names", "entries"])
def test_a_file_in_the_place_of_a_store_is_no_empty_store(tmp_path, place):
    root = tmp_path / "store"
    file = root / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    store = Store(root)
    report = store.verify()
    problems = [problem.problem for problem in report.bad]
    assert any("a part of the path is a file" in problem for problem in problems) == bool(place)
    if not place:
        assert report.absent == {root: f"{root} is a file, and no store of fusekit"}
        with pytest.raises(StoreError, match="a part of the path is a file"):
            store.collect()
    if place != "entries":
        (problem,) = store.listing().problems
        assert f"cannot list {root / 'names'}" in problem


def test_a_store_that_vanishes_while_it_is_written(store):
    class Pulled(Disk):
        """Every directory is gone again before a file can be made in it."""

        def write(self, path, data, at=None):
            shutil.rmtree(path.parent)
            super().write(path, data, at)

    with pytest.raises(StoreError, match="has vanished: check that its file system is still mounted"):
        Store(store.root, disk=Pulled()).publish(*build_entry(1))


def test_a_temporary_that_somebody_cleared_is_written_again(store):
    class Cleared(Disk):
        times = 0

        def link(self, source, target, at=None):
            self.times += 1
            if self.times == 1:
                source.unlink()
            super().link(source, target, at)

    entry, cubin = build_entry(1)
    Store(store.root, disk=Cleared()).publish(entry, cubin)
    assert store.load(entry.key) == (entry, cubin)


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("times", [1, 3, 99])
def test_a_stale_handle_is_opened_again(tmp_path, monkeypatch, call, times):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    real, left = getattr(os, call), [times]

    def stale(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, stale)
    if times < 10:
        assert read_file(path, limit=100) == b"12345"
    else:
        with pytest.raises(StoreError, match=f"{path}: Stale file handle; the network file system lost the file"):
            read_file(path, limit=100)


def test_a_cubin_that_is_seen_later_than_its_entry(store, monkeypatch):
    """A network file system that does not show a new file yet: the reader waits a moment, and asks again."""
    entry, cubin = build_entry()
    blob = store.roots[0].blob_path(entry.cubin_sha256)
    hidden = blob.with_name("hidden")
    blob.rename(hidden)
    looked = []

    def revalidate(directory):
        looked.append(directory)
        if hidden.exists() and len(looked) > 2:
            hidden.rename(blob)

    monkeypatch.setattr("fusekit.store.lookup.revalidate", revalidate)
    assert store.load(entry.key) == (entry, cubin)
    assert blob.parent in looked
    files.revalidate(blob.parent)
    files.revalidate(blob.parent / "nowhere")


def test_a_kernel_that_is_collected_between_entry_and_cubin_is_a_miss(store, monkeypatch):
    entry, _ = build_entry()
    real = Store.read_cubin

    def read_cubin(self, entry):
        for path in store.root.rglob("*"):
            if path.is_file():
                path.unlink()
        return real(self, entry)

    monkeypatch.setattr(Store, "read_cubin", read_cubin)
    assert store.load(entry.key) is None


def test_what_is_lost_for_good_is_not_waited_for(store, monkeypatch):
    """Marks outlive entries that somebody removed by hand, thousands perhaps."""
    entry, cubin = build_entry()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waits"))
    store.roots[0].entry_path(entry.key).unlink()
    assert mark_path(store.root, entry.key).exists()
    assert store.present(entry.key) is None
    assert store.ensure(entry.key, lambda: (entry, cubin)) == (entry, True)
    assert store.present(entry.key) == entry


def test_verification_does_not_wait_for_every_cubin_that_is_lost(store, monkeypatch):
    for seed in range(1, 100):
        store.publish(*build_entry(seed))
    shutil.rmtree(store.root / "blobs")
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert len(store.verify().bad) == 100
    assert 0 < sum(waits) <= 2.0


def test_stamps_that_make_no_sense_change_nothing(store):
    entry, cubin = build_entry()
    for stamp in (0, 1, 2**33, -1000):
        for path in store.root.rglob("*"):
            os.utime(path, (stamp, stamp))
        assert store.load(entry.key) == (entry, cubin)
        assert not store.verify(full=True).bad
        assert len(store.overview().rows) == 1


class TestSettled:
    """The quick look of a build with nothing to do: it may be too careful, never too trusting."""

    def look(self, store):
        return store.settled(build_record(build_entry()[0]))

    def test_it_gives_what_a_listing_shows(self, store):
        entry, cubin = build_entry()
        summary = self.look(store)
        assert summary == entry.summary()
        assert (summary["bytes"], summary["registers"], summary["launches"]) == (len(cubin), 168, 8)

    def test_another_default_is_another_record(self, store):
        from dataclasses import replace

        record = build_record(build_entry()[0])
        assert store.settled(replace(record, defaults=dict(record.defaults) | {"cluster_margin": 1})) is None
        assert store.settled(replace(record, spec=dict(record.spec) | {"summary": "x"})) is None
        assert store.settled(replace(record, key="0" * 64)) is None

    @pytest.mark.parametrize("kind", ["blob", "entry", "name"])
    @pytest.mark.parametrize("damage", ["cut", "flip", "missing", "link", "directory"])
    def test_damage_is_looked_at_closely(self, store, kind, damage):
        entry, _ = build_entry()
        root, record = store.roots[0], build_record(entry)
        path = {
            "blob": root.blob_path(entry.cubin_sha256),
            "entry": root.entry_path(entry.key),
            "name": root.name_path(record.name, record.arch),
        }[kind]
        path.chmod(0o644)
        data = path.read_bytes()
        if damage == "cut":
            path.write_bytes(data[:-1])
        elif damage == "flip":
            path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        else:
            path.unlink()
            if damage == "link":
                path.symlink_to("/dev/null")
            elif damage == "directory":
                path.mkdir()
        assert self.look(store) is None
        if (kind, damage) == ("entry", "flip"):
            with pytest.raises(IntegrityError):
                store.load(entry.key)

    def test_a_repaired_entry_is_read_once(self, store):
        entry, cubin = build_entry()
        path = store.roots[0].entry_path(entry.key)
        path.write_bytes(path.read_bytes()[:-2] + b"!\n")
        assert self.look(store) is None
        store.publish_name(build_record(entry), store.publish(entry, cubin))
        assert self.look(store) == entry.summary()

    def test_a_lower_root_settles_it_without_a_copy(self, store, tmp_path):
        upper = Store(tmp_path / "upper", [store.root])
        assert self.look(upper) == build_entry()[0].summary()
        upper.publish_name(build_record(build_entry()[0]))
        assert not upper.root.exists()

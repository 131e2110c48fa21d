"""Remotes that fail or lie: what breaks is resumed, and nothing that comes back is believed."""

import contextlib
import os

import fsspec
import pytest

from fusekit.errors import IntegrityError, NotBuiltError, StoreError
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from tests.share.remotes import NAMES, damage, elsewhere, fill, paths_of, remote
from tests.store.samples import files


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


# -- connections that fail --------------------------------------------------------------------------------------------


def test_a_failing_connection_is_tried_again(store, url, tmp_path):
    failed = set()

    def once(operation, path):
        if (operation, path) in failed or ".tmp" in path:
            return None
        failed.add((operation, path))
        return ConnectionResetError("gone")

    assert push(store, select(store), remote(url, once)).entries == 3
    failed.clear()
    assert pull(Store(tmp_path / "seeded"), remote(url, once)).entries == 3
    assert len(failed) > 9
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_what_will_not_change_is_not_tried_again(store, url):
    broken = remote(url, lambda operation, path: PermissionError("no") if operation == "pipe_file" else None)
    with pytest.raises(StoreError, match=r"cannot write .*/blobs/.*: PermissionError: no; .* continues"):
        push(store, select(store, [NAMES[0]]), broken)
    assert broken._fs.count("pipe_file") == 1


def test_a_listing_that_breaks_off_is_no_short_listing(store, tmp_path, monkeypatch):
    """fsspec's own walk leaves out a folder that it cannot list."""
    url = str(tmp_path / "remote")
    push(store, select(store), Remote(url))
    opened = Remote(url, pause=0.001)
    real = opened._fs.ls

    def ls(path, **options):
        if path.endswith("names/other"):
            raise ConnectionResetError("gone")
        return real(path, **options)

    monkeypatch.setattr(opened._fs, "ls", ls)
    with pytest.raises(StoreError, match=r"cannot list .*/names, 5 times: ConnectionResetError"):
        pull(Store(tmp_path / "seeded"), opened)


def test_a_connection_that_stays_away(store, url):
    broken = remote(url, lambda operation, path: TimeoutError("late") if operation in ("find", "ls") else None)
    with pytest.raises(StoreError, match=r"cannot list .*, 5 times: TimeoutError: late"):
        push(store, select(store), broken)
    assert broken._fs.count("ls") + broken._fs.count("find") == 5


@pytest.mark.parametrize("writes", range(0, 9, 2))
def test_a_broken_push_is_resumed(store, url, tmp_path, writes):
    def breaks(operation, path):
        return PermissionError("no more") if operation == "pipe_file" and broken._fs.count(operation) > writes else None

    broken = remote(url, breaks)
    with pytest.raises(StoreError):
        push(store, select(store), broken)
    # Whoever comes by now finds nothing that is wrong.
    target = Store(tmp_path / "meanwhile")
    with contextlib.suppress(NotBuiltError):
        assert pull(target, Remote(url)).failed == []
    assert not target.verify(full=True).bad
    resumed = remote(url)
    push(store, select(store), resumed)
    assert resumed._fs.count("pipe_file") == 9 - writes
    assert pull(Store(tmp_path / "seeded"), Remote(url)).failed == []
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


@pytest.mark.parametrize("reads", range(0, 9, 2))
def test_a_broken_pull_is_resumed(store, url, tmp_path, reads):
    push(store, select(store), Remote(url))

    def breaks(operation, path):
        return PermissionError("no more") if operation == "open" and broken._fs.count(operation) > reads else None

    broken = remote(url, breaks)
    target = Store(tmp_path / "seeded")
    with pytest.raises(StoreError):
        pull(target, broken)
    assert not target.verify(full=True).bad
    there = target.verify().entries
    report = pull(target, Remote(url))
    assert (report.skipped, report.entries) == (there, 3 - there)
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_a_push_that_was_killed_while_it_wrote(store, tmp_path):
    """On a file system, a part of a file never has its name."""
    url = str(tmp_path / "remote")
    broken = elsewhere(remote(url, lambda operation, path: ConnectionError("gone") if operation == "mv" else None))
    with pytest.raises(StoreError, match="5 times"):
        push(store, select(store), broken)
    assert files(url) == {}
    (tmp_path / "remote" / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (tmp_path / "remote" / "blobs" / "sha256" / ".x.1-ab.tmp").write_bytes(b"part")  # of one that was killed
    push(store, select(store), elsewhere(Remote(url)))
    assert pull(Store(tmp_path / "seeded"), Remote(url)).entries == 3


# -- what is damaged there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["blob", "entry", "name"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: b"",
        lambda data: b"[" * 3000,
        lambda data: None,
    ],
    ids=["cut", "longer", "flipped", "empty", "nested", "missing"],
)
def test_what_is_damaged_is_refused_and_the_rest_comes(store, url, tmp_path, which, change):
    push(store, select(store), Remote(url))
    damage(url, paths_of(0, NAMES[0])[which], change)
    target = Store(tmp_path / "seeded")
    report = pull(target, Remote(url))
    gone = which == "name" and change(b"x" * 10) is None
    assert [name for name, _ in report.failed] == ([] if gone else [NAMES[0]])
    assert report.entries == 2
    assert sorted(listed.record.name for listed in target.names()) == sorted(NAMES[1:])
    assert not target.verify(full=True).bad
    # Pushing again repairs it, and only it: with --full also if the sizes fit.
    repaired = push(store, select(store), Remote(url), full=True)
    assert (repaired.entries, repaired.names) == ((0, 1) if which == "name" else (1, 0))
    assert pull(target, Remote(url)).failed == []
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_a_cut_cubin_is_seen_by_its_size(store, url):
    push(store, select(store), Remote(url))
    damage(url, paths_of(0, NAMES[0])["blob"], lambda data: data[:-1])
    again = remote(url)
    assert push(store, select(store), again).entries == 1
    assert again._fs.count("pipe_file") == 2


def test_documents_in_each_others_place(store, url, tmp_path):
    push(store, select(store), Remote(url))
    filesystem, root = fsspec.core.url_to_fs(url)
    at = {
        (seed, what): f"{root.rstrip('/')}/{path}"
        for seed in (0, 1)
        for what, path in paths_of(seed, NAMES[seed]).items()
    }
    for what in ("blob", "entry", "name"):
        data = filesystem.cat_file(at[1, what])
        filesystem.rm_file(at[0, what])
        filesystem.pipe_file(at[0, what], data)
        target = Store(tmp_path / f"seeded-{what}")
        assert [name for name, _ in pull(target, Remote(url)).failed] == [NAMES[0]]
        assert not target.verify(full=True).bad
        push(store, select(store), Remote(url), full=True)


def test_an_enormous_answer_is_not_read(store, url, monkeypatch):
    push(store, select(store), Remote(url))
    opened = Remote(url)

    class Endless:
        taken = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, count):
            Endless.taken += 1
            return b"x" * min(count, 1 << 16)

    monkeypatch.setattr(opened._fs, "open", lambda path, mode: Endless())
    with pytest.raises(IntegrityError, match="more than 1048576 bytes; it may have at most 1048576"):
        opened.read(paths_of(0, NAMES[0])["entry"], limit=1 << 20)
    assert Endless.taken == 17


def test_strange_files_are_left_alone(store, tmp_path):
    url = str(tmp_path / "remote")
    push(store, select(store), Remote(url))
    names = tmp_path / "remote" / "names"
    (names / "quickstart" / "readme.txt").write_text("hello")
    (names / "stray.json").write_text("{}")
    (names / "a" / "b").mkdir(parents=True)
    (names / "a" / "b" / "c@d.sm_90a.json").write_text("{}")
    os.mkfifo(names / "quickstart" / "pipe@x.sm_90a.json")
    (names / "quickstart" / "link@x.sm_90a.json").symlink_to("/dev/zero")
    (names / "quickstart" / "folder@x.sm_90a.json").mkdir()
    target = Store(tmp_path / "seeded")
    report = pull(target, Remote(url))
    assert report.entries == 3
    assert {name for name, _ in report.failed} <= {"quickstart/link@x", "quickstart/pipe@x"}
    assert files(tmp_path / "seeded") == files(tmp_path / "store")

"""Links planted at every folder and file name of a store: what they lead to is never written, stamped or removed."""

import os
import shutil
import time
from pathlib import Path

import pytest

from fusekit.errors import IntegrityError, StoreError
from fusekit.share.bundle import export_bundle
from fusekit.share.lock_folder import write_lock
from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store, marks
from fusekit.store.folders import Folders
from fusekit.store.layout import MARKER
from fusekit.store.lockfile import Lock, lock_file
from fusekit.store.publishing import Publisher
from fusekit.store.signature import generate
from tests.soak import sample
from tests.store.attacks import COMMANDS, attempt, folders_of, state, victim_of, whole_store
from tests.store.collecting import DAY, age, everything, held
from tests.store.samples import build_entry, build_record

ENTRY = build_entry()[0]
TWO = ENTRY.key[:2]
FOLDERS = (
    "blobs", "blobs/sha256", f"blobs/sha256/{ENTRY.cubin_sha256[:2]}", "entries", f"entries/{TWO}", "names", "names/f",
    "used", f"used/{TWO}", "leases", "locks", "signatures", "signatures/{2}", "tuning",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # of those who miss something, and look again


def plant(root, folder, victim):
    """Put a link to a likeness of `folder` in its place; the path of the link."""
    if folder == "signatures/{2}":
        folder = next(folder for folder in folders_of(root) if folder.startswith("signatures/"))
    victim_of(root / folder, victim)
    shutil.rmtree(root / folder)
    (root / folder).symlink_to(victim, target_is_directory=True)
    return root / folder


def test_the_list_of_folders_is_whole(tmp_path):
    whole_store(tmp_path)
    kinds = {(folder.partition("/")[0], folder.count("/")) for folder in folders_of(tmp_path)}
    assert kinds == {(folder.partition("/")[0], folder.count("/")) for folder in FOLDERS}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_in_the_place_of_a_folder(tmp_path, aside, folder, command):
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    link = plant(store.root, folder, victim)
    before, rest = state(victim), everything(store.root)
    result = attempt(command, Store(store.root), aside)
    assert state(victim) == before
    assert link.is_symlink()
    if command.startswith("gc"):
        assert not isinstance(result, Exception)
        assert str(link) in result.strays
        assert any(str(link) in note for note in result.notes)
    if command == "verify":
        assert str(link) in {str(problem.path) for problem in result.bad}
        assert everything(store.root) == rest
    if isinstance(result, Exception):
        assert str(link) in str(result)


def test_a_link_as_the_whole_store_is_the_users_choice(tmp_path, aside):
    whole_store(tmp_path / "there")
    (tmp_path / "store").symlink_to(tmp_path / "there")
    store = Store(tmp_path / "store")
    for command in COMMANDS:
        assert not isinstance(attempt(command, store, aside), Exception), command


@pytest.mark.parametrize("folder", ["entries", f"entries/{TWO}", "names", "names/f"])
def test_cubins_stay_that_something_behind_a_link_may_need(tmp_path, folder):
    store = whole_store(tmp_path / "store")
    link = plant(store.root, folder, tmp_path / "victim")
    report = store.collect(max_bytes=0)
    assert (report.orphans, report.signatures) == (0, 0)
    assert str(link) in report.notes[0]
    assert "no cubin and no signature is removed" in report.notes[0]
    assert store.roots[0].blob_path(ENTRY.cubin_sha256).exists()


def names_in(root):
    return [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling link"])
@pytest.mark.parametrize("command", COMMANDS)
def test_links_at_every_file_name(tmp_path, aside, command, kind):
    """All of a store's files are links: their targets stay as they are, whatever is written at those names."""
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    victim.mkdir()
    for number, path in enumerate(names_in(store.root)):
        if path.name == MARKER and kind != "hard link":
            continue  # without its marker nothing is written at all: see test_marker.py
        target = victim / str(number)
        if kind != "dangling link":
            shutil.copy2(path, target)
            age(target, 9 * DAY)
        path.unlink()
        if kind == "hard link":
            os.link(target, path)
        else:
            path.symlink_to(target)
    before = state(victim)
    attempt(command, Store(store.root), aside)
    assert {name: seen for name, seen in state(victim).items() if name != "."} == {
        name: seen for name, seen in before.items() if name != "."
    }


CALLS = ("open", "scandir", "unlink", "replace", "link", "stat", "utime", "mkdir", "listdir")


class Swapper:
    """Puts a link to `victim` in the place of `folder` before call number `at` of those that the store makes."""

    def __init__(self, monkeypatch, folder, victim, at):
        self.folder, self.victim, self.at, self.calls = folder, victim, at, 0
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            monkeypatch.setattr(os, name, self.hook(name))

    def hook(self, name):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls == self.at:
                os.rename(self.folder, self.folder.with_name("was-here"))  # noqa: PTH104 - not a call that is counted
                os.symlink(self.victim, self.folder)  # noqa: PTH211
            return self.real[name](*arguments, **options)

        return call


@pytest.mark.parametrize("command", ["gc", "rm", "build", "load"])
@pytest.mark.parametrize("folder", sample(FOLDERS))
def test_a_folder_that_becomes_a_link_at_any_moment(tmp_path, aside, folder, command, soak):
    step, reached = 1 if soak else 4 if command == "load" else 19, 0
    for at in range(1, 3000, step):
        root = tmp_path / str(at)
        whole_store(root)
        victim = tmp_path / f"victim-{at}"
        real = root / (
            next(folder for folder in folders_of(root) if folder.startswith("signatures/"))
            if folder == "signatures/{2}"
            else folder
        )
        victim_of(real, victim)
        before = state(victim)
        with pytest.MonkeyPatch.context() as patch:
            swapper = Swapper(patch, real, victim, at)
            attempt(command, Store(root), aside)
        assert state(victim) == before, at
        shutil.rmtree(root)
        shutil.rmtree(victim)
        if swapper.calls < at:
            break
        reached += 1
    else:
        pytest.fail("more calls than expected")
    assert reached > 2


def test_the_race_is_one_that_paths_lose(tmp_path, monkeypatch):
    """The same swap empties the victim of a collector that opens folders by their paths: these tests can fail."""

    def careless(self, *parts, flags=os.O_RDONLY | os.O_DIRECTORY):
        return os.open(self.root.joinpath(*parts), flags)

    monkeypatch.setattr(Folders, "open", careless)
    for at in range(1, 400, 10):
        store, victim = whole_store(tmp_path / str(at)), tmp_path / f"victim-{at}"
        victim_of(store.root / "used" / TWO, victim)
        before = state(victim)
        with pytest.MonkeyPatch.context() as patch:
            Swapper(patch, store.root / "used" / TWO, victim, at)
            attempt("gc", store, tmp_path)
        if state(victim) != before:
            return
    pytest.fail("nothing was removed from the victim")


@pytest.mark.parametrize("kind", ["link", "hard link"])
@pytest.mark.parametrize("moment", ["when it is taken", "when it is renewed", "when it is given back"])
def test_a_lease_writes_through_nothing(tmp_path, monkeypatch, kind, moment):
    store = whole_store(tmp_path / "store")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    age(victim, DAY)
    before = victim.stat().st_mtime_ns

    def put(path):
        path.unlink(missing_ok=True)
        os.link(victim, path) if kind == "hard link" else path.symlink_to(victim)

    if moment == "when it is taken":
        monkeypatch.setattr(os, "urandom", lambda count: b"\x01" * count)
        from fusekit.store import process

        put(store.root / "leases" / f"{process.owner(process.host())}-{'01' * 6}")
    with store.lease():
        (lease,) = store._leases
        if moment == "when it is renewed":
            put(lease.path)
            lease._renewed -= marks._RENEW_SECONDS
            lease.renew()
            assert len(list((store.root / "leases").iterdir())) == 3  # it was taken anew, under another name
        elif moment == "when it is given back":
            put(lease.path)
    assert (victim.read_text(), victim.stat().st_mtime_ns) == ("precious", before)


def test_a_temporary_writes_through_nothing(tmp_path, monkeypatch):
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(os, "urandom", lambda count: b"\x01" * count)
    path = store.roots[0].tuning_path("sm_100a")
    temporary = Publisher(store.root).temporary(path)
    temporary.symlink_to(victim)
    with pytest.raises(StoreError, match="File exists"):
        store.publish_tuning("sm_100a", b"{}")
    assert victim.read_text() == "precious"


def test_a_lock_is_no_link(tmp_path):
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    path = store.roots[0].lock_path(ENTRY.key)
    path.unlink()
    path.symlink_to(victim)
    with store.lock(ENTRY.key, patience=0) as is_held:
        assert not is_held
    assert not victim.exists()
    assert store.collect().locks == 0
    assert path.is_symlink()


def test_a_mark_with_a_further_name_is_made_anew(tmp_path):
    """As in a copy of a store made with hard links: both keep marks of their own."""
    store = whole_store(tmp_path / "store")
    shutil.copytree(store.root, tmp_path / "copy", copy_function=os.link)
    mark = marks.mark_path(tmp_path / "copy", ENTRY.key)
    before = mark.stat().st_mtime_ns
    store.load(ENTRY.key)
    store.publish_name(build_record(ENTRY, "f/k0@v"))
    assert mark.stat().st_mtime_ns == before
    assert marks.mark_path(store.root, ENTRY.key).stat().st_mtime_ns > before
    assert held(Store(tmp_path / "copy")) == held(store) == ["k0@v"]
    age(marks.mark_path(store.root, ENTRY.key), DAY)
    assert store.collect(max_bytes=0).removed == 1
    assert held(Store(tmp_path / "copy")) == ["k0@v"]


class TestFilesThatAPersonNames:
    """A link as the target: it is replaced, or refused; what it leads to stays."""

    @pytest.fixture
    def victim(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        yield victim
        assert victim.read_text() == "precious"

    def test_a_bundle(self, store, victim, tmp_path):
        path = tmp_path / "bundle.tar"
        path.symlink_to(victim)
        export_bundle(store, select(store), path)
        assert not path.is_symlink()

    def test_a_lock(self, victim, tmp_path):
        folder, lock = tmp_path / "locks", Lock.of_folder("sm_90a", {}, {})
        folder.mkdir()
        path = folder / lock_file("sm_90a", {})
        path.symlink_to(victim)
        assert write_lock(lock, path) == path
        assert not path.is_symlink()
        assert not (folder / MARKER).exists()

    def test_c_source(self, victim, tmp_path):
        from fusekit_cli.export_c import _write

        path = tmp_path / "out" / "kernels.c"
        path.parent.mkdir()
        path.symlink_to(victim)
        assert _write(path.parent, {"kernels.c": "int x;\n"}) == [str(path)]
        assert (path.is_symlink(), path.read_text()) == (False, "int x;\n")
        assert [path.name for path in path.parent.iterdir()] == ["kernels.c"]

    @pytest.mark.parametrize("name", ["key", "key.pub"])
    def test_a_key(self, victim, tmp_path, name):
        from fusekit.errors import UsageError

        (tmp_path / name).symlink_to(victim)
        with pytest.raises(UsageError, match="never overwritten"):
            generate(tmp_path / "key", "x")


def test_folders_are_opened_one_below_the_other(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("here")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for pinned in (False, True):
        folders = Folders(tmp_path)
        with folders.pinned() if pinned else folders.at():
            with folders.at("a", "b") as at:
                assert os.stat("file", dir_fd=at).st_size == 4
            for parts in (("link",), ("link", "b")):
                with pytest.raises(OSError, match="is a symbolic link"), folders.at(*parts):
                    pass
            with pytest.raises(NotADirectoryError), folders.at("a", "b", "file"):
                pass
            with pytest.raises(FileNotFoundError), folders.at("none"):
                pass
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(OSError, match="link"), folders.at("link", "b"):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


def test_what_a_link_hides_is_said_by_whoever_asks_for_it(tmp_path):
    store = whole_store(tmp_path / "store")
    link = plant(store.root, "names/f", tmp_path / "victim")
    assert store.listing("f/k0").problems[0].startswith(f"cannot list {link}: {link} is a symbolic link")
    with pytest.raises(IntegrityError, match="is a symbolic link"):
        store.variants("f/k0", "sm_90a")


PUSHED = [
    folder for folder in FOLDERS if folder.split("/")[0] in ("blobs", "entries", "names") or folder == "signatures"
]


@pytest.mark.parametrize("folder", PUSHED)
def test_a_push_into_a_folder_with_links(tmp_path, folder):
    """Whoever may write to the remote cannot lead a push elsewhere."""
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    whole_store(tmp_path / "remote")
    link = plant(tmp_path / "remote", folder, victim)
    shutil.rmtree(victim)
    victim.mkdir()
    with pytest.raises(StoreError, match=f"{link} is a symbolic link; a store follows no link"):
        push(store, select(store), Remote(str(tmp_path / "remote")), full=True)
    assert not list(victim.iterdir())


def test_a_push_over_links_in_the_place_of_files(tmp_path):
    store, victim, remote = whole_store(tmp_path / "store"), tmp_path / "victim", tmp_path / "remote"
    push(store, select(store), Remote(str(remote)))
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("precious")
    for number, path in enumerate(names_in(remote)):
        if path.name != MARKER:
            path.unlink()
            path.symlink_to(victim / ("folder", "file", "dangling")[number % 3])
    before = state(victim)
    push(store, select(store), Remote(str(remote)), full=True)
    assert state(victim) == before
    assert not [path for path in remote.rglob("*") if path.is_symlink()]
    assert not Store(remote).verify(full=True).bad

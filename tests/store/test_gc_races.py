"""Collection while others are in the way, and collections that are stopped."""

import threading
import time
from pathlib import Path

import pytest

from fusekit.share.push_pull import pull
from fusekit.share.remote import Remote
from fusekit.store import Store
from fusekit.store.marks import mark_path
from fusekit.store.publishing import Disk
from fusekit_cli.main import main
from tests.store.collecting import DAY, age, everything, fill, held
from tests.store.samples import build_entry, build_record


class Meddler(Disk):
    """Calls `meddle` before or after the first rename of a file below `top`."""

    def __init__(self, top: str, before: bool) -> None:
        self.top, self.before, self.meddle = f"/{top}/", before, lambda: None

    def replace(self, source: Path, target: Path, at: int | None = None) -> None:
        meddle = self.meddle if self.top in str(source) else (lambda: None)
        if meddle is self.meddle:
            self.meddle = lambda: None
        if self.before:
            meddle()
        super().replace(source, target, at)
        if not self.before:
            meddle()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("top", ["used", "names", "entries"])
def test_who_marks_an_entry_and_finds_it_keeps_it(tmp_path, top, before):
    """A reader comes at each point of an eviction; whatever he finds stays, with all that belongs to it."""
    store, entries = fill(tmp_path)
    disk = Meddler(top, before)
    loads = []
    disk.meddle = lambda: loads.append(Store(tmp_path).load(entries[0].key))
    report = Store(tmp_path, disk=disk).collect(max_age=350)
    assert len(loads) == 1
    if loads[0] is not None:
        assert (report.removed, report.in_use) == (0, 1)
        assert held(store) == ["k0@v", "k1@v", "k2@v", "k3@v"]
        assert store.load(entries[0].key) == loads[0]
    assert loads[0] is not None or (top, before) == ("entries", False)
    assert not [name for name in everything(tmp_path) if name.endswith(".tmp")]


def test_a_mark_that_comes_at_the_last_moment_where_there_was_none_holds(tmp_path):
    """It goes aside with the entry's names, and is seen there."""
    store, entries = fill(tmp_path)
    for entry in entries:
        mark_path(tmp_path, entry.key).unlink()
    disk = Meddler("used", before=True)
    disk.meddle = lambda: [store.load(entry.key) for entry in entries]
    report = Store(tmp_path, disk=disk).collect(max_age=50)
    assert (report.removed, report.in_use) == (0, 4)
    assert held(store) == ["k0@v", "k1@v", "k2@v", "k3@v"]


@pytest.mark.parametrize("command", ["pull", "import", "copy"])
def test_what_comes_in_stays_until_all_of_it_is_there(tmp_path, aside, command, monkeypatch):
    """A collection that wants everything gone comes before each name, and long enough after its entry."""
    store, publish_name, in_use = Store(tmp_path / "store"), Store.publish_name, []

    def publish(*arguments, **options):
        time.sleep(0.1)
        in_use.append(Store(store.root).collect(max_bytes=0).in_use)
        publish_name(*arguments, **options)

    monkeypatch.setattr(Store, "publish_name", publish)
    monkeypatch.setenv("FUSEKIT_STORES", str(aside / "other"))
    source = {"pull": [str(aside / "remote")], "import": [str(aside / "bundle.tar")], "copy": []}[command]
    assert main(["--store", str(store.root), command, *source]) == 0
    names = Store(aside / "other").names()
    assert len(in_use) == len(names) > 1
    assert min(in_use) >= 1
    assert [listed.record for listed in store.names()] == [listed.record for listed in names]
    assert not store.verify(full=True).bad
    assert not list((store.root / "leases").iterdir())


def test_a_lease_is_renewed_while_a_transfer_waits(tmp_path, aside, monkeypatch):
    """A cubin may take longer than a lease lasts."""
    monkeypatch.setattr("fusekit.share.transfer._WAIT_SECONDS", 0.01)
    monkeypatch.setattr("fusekit.store.marks._RENEW_SECONDS", 0.0)
    store, read, renewed = Store(tmp_path / "store"), Remote.read, []
    store.publish(*build_entry(9))

    def slow(remote, path, **limits):
        if path.startswith("blobs/"):
            (lease,) = (store.root / "leases").iterdir()
            before = lease.stat().st_mtime_ns
            time.sleep(0.2)
            renewed.append(lease.stat().st_mtime_ns > before)
        return read(remote, path, **limits)

    monkeypatch.setattr(Remote, "read", slow)
    pull(store, Remote(str(aside / "remote")))
    assert renewed
    assert all(renewed)


def test_collections_take_turns(tmp_path):
    """A second one waits; then it sees all names, also those that the first one put back."""
    store, entries = fill(tmp_path)
    second, waited = threading.Thread(target=lambda: Store(tmp_path).collect(max_bytes=0)), []
    disk = Meddler("entries", before=True)

    def meddle():
        store.load(entries[0].key)  # so the first one puts it back
        second.start()
        second.join(0.3)
        waited.append(second.is_alive())

    disk.meddle = meddle
    report = Store(tmp_path, disk=disk).collect(max_age=350)
    second.join()
    assert waited == [True]
    assert (report.removed, report.in_use) == (0, 1)
    assert not store.verify(full=True).bad


class Between(Disk):
    """Calls `first` before the first mark is moved and `then` after the first entry is."""

    def __init__(self, first, then) -> None:
        self.first, self.then = [first], [then]

    def replace(self, source: Path, target: Path, at: int | None = None) -> None:
        if "/used/" in str(source) and self.first:
            self.first.pop()()
        super().replace(source, target, at)
        if "/entries/" in str(source) and self.then:
            self.then.pop()()


@pytest.mark.parametrize("late", ["name", "load"])
def test_a_mark_that_goes_aside_with_its_entry_holds(tmp_path, late):
    """A builder finds an entry at the last moment, and needs it again when mark and entry are both aside."""
    store, entries = fill(tmp_path)
    (key, builder, done) = entries[0].key, Store(tmp_path), []

    def again():
        if late == "load":
            done.append(builder.load(key)[0])
        else:
            builder.publish_name(build_record(entries[0], "f/k0@v"), entries[0])
            done.append(entries[0])

    thread = threading.Thread(target=again)

    def start():
        thread.start()
        time.sleep(0.05)  # it looks while the collection is in the way

    report = Store(tmp_path, disk=Between(lambda: done.append(builder.present(key)), start)).collect(max_age=350)
    thread.join()
    assert done == [entries[0], entries[0]]
    assert (report.removed, report.in_use) == (0, 1)
    assert held(store) == ["k0@v", "k1@v", "k2@v", "k3@v"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("top", ["names", "entries", "blobs"])
def test_who_publishes_during_an_eviction_has_published(tmp_path, top, before):
    store, _ = fill(tmp_path)
    disk = Meddler(top, before)

    def publish():
        builder = Store(tmp_path)
        for seed in range(4):
            entry = builder.publish(*build_entry(seed, cubin=b"%d" % seed + b"x" * 1000))
            builder.publish_name(build_record(entry, f"f/k{seed}@v"))
            assert builder.load(entry.key) is not None

    disk.meddle = publish
    Store(tmp_path, disk=disk).collect(max_bytes=0)
    assert held(store) == ["k0@v", "k1@v", "k2@v", "k3@v"]


@pytest.mark.parametrize("before", [True, False])
def test_a_new_entry_keeps_a_cubin_that_was_about_to_go(tmp_path, before):
    store, entries = fill(tmp_path, 1)
    disk = Meddler("blobs", before)
    other, _ = build_entry(7, cubin=b"0" + b"x" * 1000)
    assert other.cubin_sha256 == entries[0].cubin_sha256

    def plant():  # as a builder that found the cubin there, and stopped before it could look again
        path = store.roots[0].entry_path(other.key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(other.to_bytes())

    disk.meddle = plant
    Store(tmp_path, disk=disk).collect(max_bytes=0)
    assert store.load(other.key) is not None
    assert not store.verify(full=True).bad


def test_a_name_that_means_another_kernel_meanwhile_stays(tmp_path):
    store, entries = fill(tmp_path)
    disk = Meddler("used", True)
    disk.meddle = lambda: Store(tmp_path).publish_name(build_record(entries[3], "f/k0@v"))
    Store(tmp_path, disk=disk).collect(max_age=350)
    assert held(store) == ["k0@v", "k1@v", "k2@v", "k3@v"]
    assert store.find_name("f/k0@v", "sm_90a").key == entries[3].key


class Stopper(Disk):
    """Stops for good at step `at`, as a kill or a power loss does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def _step(self) -> None:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt

    def write(self, path, data, at=None):
        self._step()
        super().write(path, data, at)

    def link(self, source, target, at=None):
        self._step()
        super().link(source, target, at)

    def replace(self, source, target, at=None):
        self._step()
        super().replace(source, target, at)

    def remove(self, path, at=None):
        self._step()
        super().remove(path, at)

    def sync(self, path, at=None):
        self._step()
        super().sync(path, at)


def test_a_collection_that_is_killed_at_any_step_leaves_a_store_that_is_whole(tmp_path):
    for at in range(200):
        root = tmp_path / str(at)
        store, _ = fill(root, 3)
        try:
            Store(root, disk=Stopper(at)).collect(max_age=150)
        except KeyboardInterrupt:
            held(store)
            # What it moved aside is its own, and this process is alive: it counts as a temporary of a running one.
            for left in root.rglob(".*.tmp"):
                age(left, 2 * DAY)
            store.collect(max_age=150)
            assert not [name for name in everything(root) if name.endswith(".tmp")]
        else:
            break
        assert held(store) == ["k2@v"]
    else:
        pytest.fail("more steps than expected")
    assert at > 20


def test_a_cubin_left_aside_that_an_entry_needs_is_put_back(tmp_path):
    store, entries = fill(tmp_path, 1)
    blob = store.roots[0].blob_path(entries[0].cubin_sha256)
    aside = blob.with_name(f".{blob.name}.0123456789ab-7-0123456789ab.tmp")
    blob.rename(aside)
    assert store.load(entries[0].key) is not None
    assert held(store) == ["k0@v"]
    age(aside, 2 * DAY)
    assert store.collect().temporaries == 0
    assert held(store) == ["k0@v"]
    assert not aside.exists()

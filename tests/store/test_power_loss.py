"""The power goes at every moment of a publication and of a collection; what is left is whole, what was done stays."""

import contextlib
import os
import random
import shutil
import time

import pytest

from fusekit.store import Store
from fusekit.store.publishing import Disk
from tests.store.power import PowerDisk
from tests.store.samples import build_entry, build_record


def publish(store, seed):
    entry, cubin = build_entry(seed)
    store.publish(entry, cubin)
    store.publish_name(build_record(entry, f"f/k@{seed}"))


def states(disk, target, tries):
    """The store after a loss of power: the least that must be left, and some of what may be."""
    for number in range(-1, tries):
        disk.after(target, None if number < 0 else random.Random(number))
        yield Store(target)
        shutil.rmtree(target)


def published(store):
    report = store.verify(full=True)
    assert not report.bad
    for listed in store.names():
        assert store.load(listed.record.key, mark=False) is not None
    return {listed.record.name for listed in store.names()}


def test_publishing_what_a_killed_process_left(tmp_path):
    """A process is killed at each moment; the next one publishes the same, then the power goes: its entry is there."""
    for stop in range(500):
        root = tmp_path / "store"
        disk = PowerDisk(root, stop)
        root.mkdir()
        killed = False
        try:
            publish(Store(root, disk=disk), 0)
        except KeyboardInterrupt:
            killed = True
        disk.stop = None
        publish(Store(root, disk=disk), 0)
        for left in states(disk, tmp_path / "left", 1):
            assert published(left) == {"f/k@0"}
        shutil.rmtree(root)
        if not killed:
            assert stop > 5
            return
    pytest.fail("the store never stopped publishing")


def test_publishing(tmp_path, soak):
    """Two kernels, the second one twice; the power goes at each moment."""
    for stop in range(500):
        root = tmp_path / "store"
        disk, done = PowerDisk(root, stop), set()
        root.mkdir()
        store = Store(root, disk=disk)
        try:
            for seed in (0, 1, 1):
                publish(store, seed)
                done.add(f"f/k@{seed}")
        except KeyboardInterrupt:
            pass
        for left in states(disk, tmp_path / "left", 100 if soak else 2):
            assert done <= published(left)
            # The next build carries on.
            for seed in (0, 1):
                publish(left, seed)
            assert published(left) == {"f/k@0", "f/k@1"}
        shutil.rmtree(root)
        if disk.moments < stop:
            break
    else:
        pytest.fail("more moments than expected")
    assert stop > 40


def test_a_cubin_that_somebody_else_left_unsynced(tmp_path):
    """A builder was killed after naming a cubin and before syncing it; whoever relies on it makes it safe first."""
    for stop in range(200):
        root = tmp_path / "store"
        root.mkdir()
        entry, cubin = build_entry(0)
        disk = PowerDisk(root)
        Store(root, disk=disk).publish(entry, cubin)
        layout = Store(root).roots[0]
        # The entry is gone, the cubin's name is there and is not safe.
        disk.remove(layout.entry_path(entry.key))
        disk.sync(layout.entry_path(entry.key).parent)
        disk.folders[layout.blob_path(entry.cubin_sha256).parent].safe.clear()
        disk.folders[layout.blob_path(entry.cubin_sha256).parent].pending = [
            dict(disk.folders[layout.blob_path(entry.cubin_sha256).parent].names)
        ]
        disk.stop = disk.moments + stop
        done = False
        try:
            Store(root, disk=disk).publish(entry, cubin)
            done = True
        except KeyboardInterrupt:
            pass
        for left in states(disk, tmp_path / "left", 4):
            assert not left.verify(full=True).bad
            assert not done or left.load(entry.key) is not None
        shutil.rmtree(root)
        if done:
            break
    else:
        pytest.fail("more moments than expected")


def test_collecting(tmp_path, soak):
    """Three of four kernels are evicted; the power goes at each moment."""
    for stop in range(500):
        root = tmp_path / "store"
        root.mkdir()
        disk = PowerDisk(root)
        store = Store(root, disk=disk)
        for seed in range(4):
            publish(store, seed)
        layout = store.roots[0]
        for seed in range(3):
            stamp = time.time() - 100
            os.utime(layout.entry_path(build_entry(seed)[0].key), (stamp, stamp))
            (root / "used").joinpath(build_entry(seed)[0].key[:2], build_entry(seed)[0].key).unlink()
        disk.stop = disk.moments + stop
        done = False
        with contextlib.suppress(KeyboardInterrupt):
            done = store.collect(max_age=50).removed == 3
        for left in states(disk, tmp_path / "left", 50 if soak else 3):
            assert "f/k@3" in published(left)
        shutil.rmtree(root)
        if done:
            break
    else:
        pytest.fail("more moments than expected")
    assert stop > 20


@pytest.mark.parametrize("fault", ["the cubin is not synced", "its directory is not synced", "the entry comes first"])
def test_the_model_finds_what_is_wrong(tmp_path, fault):
    """A store with one step missing fails these tests: they can see what they are there to see."""

    class Careless(PowerDisk):
        def write(self, path, data, at=None):
            if fault == "the cubin is not synced" and "blobs" in path.parts:
                Disk.write(self, path, data, at)
                from tests.store.power import Inode

                self._change(path.parent, {path.name: Inode(data)})
            else:
                super().write(path, data, at)

        def sync(self, path, at=None):
            if not (fault == "its directory is not synced" and "blobs" in path.parts):
                super().sync(path, at)

    damaged = False
    for stop in range(60):
        root = tmp_path / "store"
        root.mkdir()
        disk = Careless(root, stop)
        store = Store(root, disk=disk)
        try:
            entry, cubin = build_entry(0)
            if fault == "the entry comes first":
                store._publisher.claim(store.roots[0].entry_path(entry.key), entry.to_bytes())
            store.publish(entry, cubin)
        except KeyboardInterrupt:
            pass
        damaged = damaged or any(left.verify(full=True).bad for left in states(disk, tmp_path / "left", 6))
        shutil.rmtree(root)
    assert damaged

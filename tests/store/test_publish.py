"""Publishing: by one, by many at once, by some that are killed, over what is damaged."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.errors import IntegrityError, StoreError, UsageError
from fusekit.store import NameRecord, Store
from fusekit.store.publishing import Publisher
from tests.threads import at_once

RACER = Path(__file__).with_name("racer.py")


def start(root, number, count):
    return subprocess.Popen(
        [sys.executable, str(RACER), str(root), str(number), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_is_published_is_found(tmp_path, make_entry, make_record):
    store = Store(tmp_path)
    entry, cubin = make_entry()
    assert store.find_entry(entry.key) is None
    assert store.load(entry.key) is None
    assert store.publish(entry, cubin) == entry
    store.publish_name(make_record(entry))
    again = Store(tmp_path)
    assert again.find_entry(entry.key) == entry
    assert again.read_cubin(entry) == cubin
    assert again.load(entry.key) == (entry, cubin)
    assert again.find_name("quickstart/fc1@128x160-c2x1", "sm_90a") == make_record(entry)
    assert entry.arch == "sm_90a"


def test_opening_and_reading_touch_no_disk(tmp_path, make_entry):
    store = Store(tmp_path / "store")
    assert store.find_entry(make_entry()[0].key) is None
    assert store.find_name("a/b@c", "sm_90a") is None
    assert store.names() == []
    assert store.verify(full=True).checked == 0
    assert not (tmp_path / "store").exists()


def test_the_first_one_stands(tmp_path, make_entry):
    first, cubin = make_entry(seconds=1.0)
    second, other = make_entry(cubin=b"the same kernel, other bytes", seconds=2.0)
    assert first.key == second.key
    assert Store(tmp_path).publish(first, cubin) == first
    assert Store(tmp_path).publish(second, other) == first
    assert Store(tmp_path).load(first.key) == (first, cubin)


def test_two_keys_may_share_a_cubin(tmp_path, make_entry):
    store = Store(tmp_path)
    for seed in (1, 2):
        store.publish(*make_entry(seed, cubin=b"shared"))
    report = store.verify(full=True)
    assert (report.entries, report.blobs, report.bad) == (2, 1, ())


@pytest.mark.parametrize("change", [{"cubin_bytes": 1}, {"cubin_sha256": "0" * 64}, {"key": "0" * 64}])
def test_an_entry_must_describe_its_cubin_and_its_key(tmp_path, make_entry, change):
    from dataclasses import replace

    entry, cubin = make_entry()
    with pytest.raises(IntegrityError):
        Store(tmp_path / "store").publish(replace(entry, **change), cubin)
    assert not (tmp_path / "store").exists()


def test_launch_record_and_key_must_be_for_one_architecture(tmp_path, make_entry):
    from dataclasses import replace

    entry, cubin = make_entry()
    with pytest.raises(IntegrityError, match="sm_100a under a key for sm_90a"):
        Store(tmp_path).publish(replace(entry, launch=dict(entry.launch) | {"arch": "sm_100a"}), cubin)


def test_a_name_needs_its_entry(tmp_path, make_entry, make_record):
    entry, _ = make_entry()
    with pytest.raises(IntegrityError, match="publish the entry first"):
        Store(tmp_path).publish_name(make_record(entry))


BAD_NAMES = ["", "a", "a/b", "a/b@", "../b@c", "a/../b@c", "a/b@c/d", "a/b@c d", ".a/b@c", "a/b@\n"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_no_path(tmp_path, make_entry, make_record, name):
    entry, cubin = make_entry()
    store = Store(tmp_path)
    store.publish(entry, cubin)
    with pytest.raises(UsageError):
        store.publish_name(make_record(entry, name))
    with pytest.raises(UsageError):
        store.publish_name(make_record(entry, arch="../../x"))


def test_a_name_moves_to_a_new_key(tmp_path, make_entry, make_record):
    store = Store(tmp_path)
    for seed in (1, 2):
        entry, cubin = make_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(make_record(entry))
    assert store.find_name("quickstart/fc1@128x160-c2x1", "sm_90a").key == entry.key
    assert store.verify().names == 1


def test_processes_that_race_agree(tmp_path):
    count = 20
    racers = [start(tmp_path, number, count) for number in range(6)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    stood = [json.loads(racer.communicate()[0]) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert all(answer == stood[0] for answer in stood), "a loser did not take the winner's entry"
    store = Store(tmp_path)
    report = store.verify(full=True)
    assert (report.entries, report.names, report.blobs) == (count, count, count)
    assert (report.bad, report.orphans, report.temporaries) == ((), 0, 0)
    for key, seconds in stood[0].items():
        assert store.find_entry(key).seconds == seconds


def test_threads_that_race_agree(tmp_path, make_entry):
    store = Store(tmp_path)
    entries = [make_entry(seconds=float(number)) for number in range(8)]
    kept = at_once(8, lambda number: store.publish(*entries[number]).seconds)
    assert len(set(kept)) == 1


def test_a_builder_repairs(tmp_path, make_entry):
    store = Store(tmp_path)
    entry, cubin = make_entry()
    root = store.roots[0]
    for path in (root.blob_path(entry.cubin_sha256), root.entry_path(entry.key)):
        for damage in ("cut", "link", "missing"):
            store.publish(entry, cubin)
            path.unlink()
            if damage == "cut":
                path.write_bytes(b"{")
            elif damage == "link":
                path.symlink_to("/dev/zero")
            assert store.publish(entry, cubin) == entry
            assert Store(tmp_path).load(entry.key) == (entry, cubin)
            assert not store.verify(full=True).bad


def test_an_entry_whose_cubin_is_lost_is_replaced(tmp_path, make_entry):
    store = Store(tmp_path)
    first, cubin = make_entry()
    store.publish(first, cubin)
    store.roots[0].blob_path(first.cubin_sha256).unlink()
    second, other = make_entry(cubin=b"the same kernel, other bytes", seconds=2.0)
    assert store.publish(second, other) == second
    assert store.load(first.key) == (second, other)


def test_a_directory_in_the_place_of_a_file_is_said(tmp_path, make_entry):
    store = Store(tmp_path)
    entry, cubin = make_entry()
    store.publish(*make_entry(1))
    store.roots[0].entry_path(entry.key).mkdir(parents=True)
    with pytest.raises(IntegrityError, match="is a directory"):
        store.publish(entry, cubin)


def test_defaults_may_be_infinite(tmp_path, make_entry):
    store = Store(tmp_path)
    entry, cubin = make_entry()
    store.publish(entry, cubin)
    record = NameRecord("a/b@c", "sm_90a", entry.key, {}, {"act_limit": float("inf"), "act_alpha": 1.702, "margin": 3})
    store.publish_name(record)
    assert Store(tmp_path).find_name("a/b@c", "sm_90a") == record


def test_without_permission_to_write(unprivileged, make_entry):
    root = unprivileged / "store"
    entry, cubin = make_entry()
    other, other_cubin = make_entry(1)
    Store(root).publish(entry, cubin)
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            path.chmod(0o555)
    store = Store(root)
    with pytest.raises(StoreError, match=r"grant access to it, or name another store with --store"):
        store.publish(other, other_cubin)
    assert store.load(entry.key) == (entry, cubin)
    assert not store.verify(full=True).bad


def test_without_permission_to_read(unprivileged, make_entry):
    root = unprivileged / "store"
    entry, cubin = make_entry()
    store = Store(root)
    store.publish(entry, cubin)
    store.roots[0].entry_path(entry.key).chmod(0)
    with pytest.raises(StoreError, match="Permission denied"):
        store.find_entry(entry.key)
    assert len(store.verify().bad) == 1
    below = Store(unprivileged / "other", [root])
    copy = Store(unprivileged / "copy")
    copy.publish(entry, cubin)
    assert Store(below.root, [root, copy.root]).load(entry.key) == (entry, cubin)


def test_the_lock_is_held_by_one(tmp_path):
    pytest.importorskip("filelock")
    one, two = Store(tmp_path), Store(tmp_path)
    with one.lock("0" * 64) as held:
        assert held
        with two.lock("0" * 64, patience=0.05) as also:
            assert not also
        with two.lock("1" * 64, patience=0.05) as other:
            assert other
    with two.lock("0" * 64, patience=0.05) as held:
        assert held


def test_where_locks_do_not_work_nothing_stops(tmp_path, monkeypatch, make_entry):
    monkeypatch.setitem(sys.modules, "filelock", None)
    store = Store(tmp_path)
    entry, cubin = make_entry()
    with store.lock(entry.key) as held:
        assert not held
        assert store.publish(entry, cubin) == entry


def test_an_error_inside_the_lock_is_not_swallowed(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(OSError, match="inside"), store.lock("0" * 64):
        raise OSError("inside")
    with store.lock("0" * 64, patience=0.05) as held:
        assert held


def test_a_files_bytes_are_on_the_disk_before_its_name_and_that_before_it_counts(tmp_path, monkeypatch):
    steps, link = [], os.link

    def sync(descriptor):
        steps.append("bytes" if stat.S_ISREG(os.fstat(descriptor).st_mode) else "names")

    def named(*paths, **more):
        steps.append("name")
        link(*paths, **more)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", named)
    publisher = Publisher(tmp_path)
    publisher.admit()
    steps.clear()
    assert publisher.claim(tmp_path / "file", b"bytes")
    assert steps == ["bytes", "name", "names"]

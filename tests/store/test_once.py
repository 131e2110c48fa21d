"""One compilation per key, however many ask at once; and without working locks still one truth."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fusekit.store import Store, locks
from fusekit.store.publishing import Publisher
from tests.store.samples import build_entry
from tests.threads import at_once

ONCER = Path(__file__).with_name("oncer.py")
PROCESSES = 16


def race(root, count, locks, processes=PROCESSES):
    """How often each key was compiled when `processes` builders started at one moment on an empty store."""
    builders = [
        subprocess.Popen(
            [sys.executable, str(ONCER), str(root), str(count), str(number), locks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    for builder in builders:
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        builder.stdin.write("\n")
        builder.stdin.flush()
    for builder in builders:
        builder.communicate()
    assert [builder.returncode for builder in builders] == [0] * processes
    return Counter((root.parent / "compiled").read_text().split())


def whole(root, count):
    store = Store(root)
    report = store.verify(full=True)
    assert (report.entries, report.names, report.bad, report.temporaries) == (count, count, (), 0)
    assert all(store.load(listed.record.key) is not None for listed in store.names())


@pytest.mark.parametrize("locks", ["locks", "unless held"])
def test_sixteen_cold_processes_compile_each_key_once(tmp_path, soak, figure, locks):
    count = 200 if soak else 6
    compiled = race(tmp_path / "store", count, locks)
    assert compiled == {build_entry(number)[0].key: 1 for number in range(count)}
    whole(tmp_path / "store", count)
    if soak:
        figure(f"{PROCESSES} cold processes ({locks}), {count} keys: {compiled.total()} compilations")


@pytest.mark.parametrize("locks", ["none", "local"])
def test_without_locks_there_is_more_work_and_one_truth(tmp_path, soak, figure, locks):
    count = 100 if soak else 3
    compiled = race(tmp_path / "store", count, locks)
    assert set(compiled) == {build_entry(number)[0].key for number in range(count)}
    assert compiled.total() <= PROCESSES * count
    whole(tmp_path / "store", count)
    if soak:
        figure(f"the same with {locks} locks, {count} keys: {compiled.total()} compilations, one entry each")


def test_threads_of_one_process(tmp_path):
    store, built = Store(tmp_path), Counter()

    def build(_):
        for number in range(8):
            entry, cubin = build_entry(number)

            def make(entry=entry, cubin=cubin):
                built[entry.key] += 1
                return entry, cubin

            assert store.ensure(entry.key, make)[0] == entry

    at_once(8, build)
    assert built == {build_entry(number)[0].key: 1 for number in range(8)}
    assert not store.verify(full=True).bad


def test_what_is_there_is_not_made_again(tmp_path):
    store = Store(tmp_path)
    entry, cubin = build_entry()
    assert store.ensure(entry.key, lambda: (entry, cubin)) == (entry, True)
    assert store.ensure(entry.key, pytest.fail) == (entry, False)
    upper = Store(tmp_path / "upper", [tmp_path])
    assert upper.ensure(entry.key, pytest.fail) == (entry, False)
    assert not (tmp_path / "upper").exists()


def test_what_is_damaged_is_made_again(tmp_path):
    store = Store(tmp_path)
    entry, cubin = build_entry()
    store.publish(entry, cubin)
    store.roots[0].blob_path(entry.cubin_sha256).unlink()
    assert store.ensure(entry.key, lambda: (entry, cubin)) == (entry, True)
    assert store.load(entry.key) == (entry, cubin)


def test_a_lock_whose_file_is_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """A collection removes the lock between a builder's opening it and its holding it."""
    filelock = pytest.importorskip("filelock")
    path, publisher, lock, removed = tmp_path / "locks" / "key", Publisher(tmp_path), filelock.lock_descriptor, []

    def late(descriptor, blocking):
        if not removed:
            removed.append(path.unlink())
        return lock(descriptor, blocking=blocking)

    monkeypatch.setattr(filelock, "lock_descriptor", late)
    release = locks.acquire(path, publisher, 5.0)
    assert removed and path.exists()
    with pytest.raises(locks.HeldError):
        locks.acquire(path, publisher, 0)
    release()

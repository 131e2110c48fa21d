"""Builders, readers and collectors on one store at once; and builders and collectors that are killed at random."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from fusekit.store import Store
from tests.store.samples import build_entry, build_record

WORKER = Path(__file__).with_name("worker.py")


def start(role, root, count, seed):
    process = subprocess.Popen(
        [sys.executable, str(WORKER), role, str(root), str(count), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def stop(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return Counter(json.loads(out))


def test_readers_and_writers_run_during_collection(tmp_path, soak, figure):
    roles = ["builder", "builder", "reader", "reader", "collector", "collector"]
    did = {role: Counter() for role in roles}
    for seconds in (120,) if soak else (3, 10, 30):  # a busy machine takes longer to evict something
        workers = [(role, start(role, tmp_path, 40, seed)) for seed, role in enumerate(roles)]
        time.sleep(seconds)
        for role, worker in workers:
            did[role] += stop(worker)
        if did["collector"]["evicted"] and did["reader"]["loaded"]:
            break
    store = Store(tmp_path)
    assert not store.verify(full=True).bad
    assert did["collector"]["evicted"]
    assert did["reader"]["loaded"]
    assert did["builder"]["built"]
    store.collect(max_bytes=0)
    assert not [path for top in ("blobs", "entries", "names") for path in (tmp_path / top).rglob("*") if path.is_file()]
    if soak:
        totals = "; ".join(f"{role}: {dict(counts)}" for role, counts in did.items())
        figure(f"2 builders, 2 readers, 2 collectors, 120 s, nothing wrong: {totals}")


def test_killed_at_random(tmp_path, soak, figure):
    """Every round kills a builder, and sometimes a collector beside it, at a random moment."""
    rng = random.Random(7)
    rounds, count = (300, 60) if soak else (12, 60)
    left = Counter()
    for number in range(rounds):
        victims = [start("builder", tmp_path, count, number)]
        if number % 3 == 2:
            victims.append(start("collector", tmp_path, count, number))
        time.sleep(rng.uniform(0.0, 0.12))
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.communicate()
        store = Store(tmp_path)
        report = store.verify(full=True)
        assert not report.bad
        left.update(orphans=report.orphans, temporaries=report.temporaries)
        for listed in store.names():
            assert store.load(listed.record.key, mark=False) is not None
    # The next build carries on, and the next collection clears away what all of them left, but for the last moment's.
    time.sleep(0.2)
    store.collect()
    report = store.verify(full=True)
    assert (report.orphans, report.temporaries, report.bad) == (0, 0, ())
    for number in range(count):
        entry = store.publish(*build_entry(number, cubin=b"\x7fELF %d" % (number // 2) * 50))
        store.publish_name(build_record(entry, f"race/kernel@{number}"), entry)
    report = store.verify(full=True)
    assert (report.entries, report.names, report.bad) == (count, count, ())
    if soak:
        figure(f"{rounds} kills: verify --full clean after each; {dict(left)} were left lying, summed over the rounds")

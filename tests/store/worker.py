"""Processes for tests that let them run together: `worker.py ROLE ROOT COUNT SEED`, until killed or told to stop.

builder: publishes kernels 0 to COUNT in a random order, again and again, and must find what it published under its
lease. reader: loads a random part of what is listed. collector: evicts a random part. Each says on stdout, as JSON,
what it did when its stdin is closed, and fails with a traceback when something was not as promised.

Builders and readers rest between their rounds, at most for `REST` seconds: what is asked for without a pause is never
evicted, and then nobody would meet an eviction.
"""

import json
import random
import select
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the checkout, for `tests`

from fusekit.store import Store
from tests.store.samples import build_entry, build_record

REST = {"builder": 0.25, "reader": 0.25, "collector": 0.0}


def build(store: Store, count: int, rng: random.Random, did: Counter) -> None:
    with store.lease():
        for number in rng.sample(range(count), max(1, count // 4)):
            # Neighbours share a cubin: what one needs another may be about to lose.
            entry, cubin = build_entry(number, cubin=b"\x7fELF %d" % (number // 2) * 50)
            current, built = store.ensure(entry.key, lambda entry=entry, cubin=cubin: (entry, cubin))
            store.publish_name(build_record(current, f"race/kernel@{number}"), current)
            did["built" if built else "cached"] += 1
            # Under the lease it stays, whoever collects.
            assert store.load(current.key) == (entry, cubin), f"{current.key} was collected while it was in use"
            assert store.find_name(f"race/kernel@{number}", "sm_90a") is not None


def read(store: Store, count: int, rng: random.Random, did: Counter) -> None:
    for listed in rng.sample(names := list(store.names()), len(names) // 2):
        kernel = store.load(listed.record.key)  # wrong bytes and half entries raise
        did["loaded" if kernel is not None else "missed"] += 1


def collect(store: Store, count: int, rng: random.Random, did: Counter) -> None:
    report = store.collect(max_bytes=rng.randrange(1 + count * 900))
    did["evicted"] += report.removed
    did["in use"] += report.in_use
    did["orphans"] += report.orphans


def main(role: str, root: str, count: int, seed: int) -> None:
    act = {"builder": build, "reader": read, "collector": collect}[role]
    rng, did = random.Random(seed), Counter()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        act(Store(Path(root)), count, rng, did)
        did["rounds"] += 1
        time.sleep(rng.uniform(0, REST[role]))
    sys.stdout.write(json.dumps(did))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

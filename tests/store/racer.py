"""A publisher for tests that race or kill it: `racer.py ROOT NUMBER COUNT`; says what stood in the end for each key."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the checkout, for `tests`

from fusekit.store import Store
from tests.store.samples import build_entry, build_record


def main(root: str, number: int, count: int) -> None:
    store = Store(Path(root))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    stood = {}
    for seed in range(count):
        # As two builds of one key do, they differ in what is no part of the key.
        entry, cubin = build_entry(seed, seconds=float(number))
        stood[entry.key] = store.publish(entry, cubin).seconds
        store.publish_name(build_record(entry, f"race/kernel@{seed}"))
    sys.stdout.write(json.dumps(stood))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

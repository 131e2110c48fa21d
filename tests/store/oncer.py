"""A builder for tests that race: `oncer.py ROOT COUNT SEED LOCKS`; asks for COUNT kernels in an order of its own.

A compilation is a line in ROOT/../compiled. LOCKS: "locks"; "unless held": nobody waits for a lock, and what another
one is at is asked for again later; "none": there is no locking library; "local": locks that reach no other process, as
on a mount where flock stops at the host.
"""

import os
import random
import sys
import time
from collections import deque
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the checkout, for `tests`

from fusekit.store import Store
from tests.store.samples import build_entry, build_record


def main(root: Path, count: int, seed: int, locks: str) -> None:
    if locks == "none":
        sys.modules["filelock"] = None  # type: ignore[assignment]
    store = Store(root)
    if locks == "local":
        private = root.parent / f"locks-{seed}"
        private.mkdir()
        store = LocalLocks(root, private)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    order = deque(range(count))
    random.Random(seed).shuffle(order)
    ensure = store.ensure_unless_held if locks == "unless held" else store.ensure
    log = os.open(root.parent / "compiled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with store.lease():
        while order:
            number = order.popleft()

            def make(number: int = number):
                # Builds of one key differ in what is no part of it.
                entry, cubin = build_entry(number, seconds=float(seed))
                os.write(log, f"{entry.key}\n".encode())
                time.sleep(0.002)
                return entry, cubin

            result = ensure(build_entry(number)[0].key, make)
            if result is None:
                order.append(number)
                time.sleep(0.002)
                continue
            entry, _ = result
            store.publish_name(build_record(entry, f"race/kernel@{number}"), entry)
            assert store.load(entry.key) is not None


class LocalLocks(Store):
    """A store whose locks are private to this process."""

    def __init__(self, root: Path, private: Path) -> None:
        super().__init__(root)
        self._private = Store(private)

    def lock(self, key, patience=600.0):
        return self._private.lock(key, patience)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

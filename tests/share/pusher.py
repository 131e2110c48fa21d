"""A process that pushes its own build of some kernels: argv is the remote's URL, a store's folder, its builds' age."""

import dataclasses
import sys
from pathlib import Path

from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from tests.store.samples import build_entry, build_record

KERNELS = 12


def main() -> None:
    url, folder, age = sys.argv[1:]
    store = Store(Path(folder))
    for seed in range(KERNELS):
        # The same key, other bytes: a compiler that is not reproducible, or another day's measurement.
        entry, cubin = build_entry(seed, b"\x7fELF %d of %s" % (seed, age.encode()) * 400)
        entry = dataclasses.replace(entry, seconds=float(age))
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, f"quickstart/fc{seed}@a"))
    push(store, select(store), Remote(url))


if __name__ == "__main__":
    main()

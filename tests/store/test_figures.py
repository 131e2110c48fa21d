"""How fast a store of 10,000 kernels is. Only with --soak: prints figures, asserts none of them.

`--basetemp` decides on which file system: what is synced and removed costs what the disk takes for it.
"""

import os
import shutil
import subprocess
import sys
import time

import pytest

from fusekit.spec import find
from fusekit.store import NameRecord, Store
from fusekit.store.marks import mark_path
from tests.store.samples import build_entry

COUNT = 10_000
CUBIN = 40_000


@pytest.fixture(scope="module")
def store(request, tmp_path_factory, figure):
    if not request.config.getoption("--soak"):
        pytest.skip("figures are measured with --soak")
    store = Store(tmp_path_factory.mktemp("figures") / "store")
    spec = find(["quickstart/linear"])[0]
    publishing = []
    with store.lease():
        for number in range(COUNT):
            entry, cubin = build_entry(number, cubin=os.urandom(CUBIN))
            record = NameRecord(
                f"model{number % 20}/k{number // 100}@128x{number}-c2x1", "sm_90a", entry.key,
                spec.canonical(), spec.defaults(),
            )  # fmt: skip
            start = time.perf_counter()
            store.publish_name(record, store.publish(entry, cubin))
            publishing.append(time.perf_counter() - start)
    publishing.sort()
    figure(
        f"publishing one kernel of {CUBIN} bytes, synced, with its name: {publishing[COUNT // 2] * 1e3:.2f} ms median, "
        f"{publishing[COUNT * 99 // 100] * 1e3:.2f} ms in 99 of 100 cases"
    )
    return store


def best(function, times=5):
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def command(store, *arguments):
    subprocess.run([sys.executable, "-m", "fusekit", *arguments, "--store", str(store.root)],
                   stdout=subprocess.DEVNULL, check=True)  # fmt: skip


LOAD = """
import sys, time
from pathlib import Path
import fusekit.library
from fusekit.choice.variants import choose
from fusekit.store import Store
start = time.perf_counter()
store = Store(Path(sys.argv[1]))
record = choose([listed.record for listed in store.names(sys.argv[2])])
entry, cubin = store.load(record.key)
print(time.perf_counter() - start)
"""


@pytest.mark.parametrize("name", ["model3/k41@128x4103-c2x1", "model3/k41"])
def test_opening_and_loading_one(store, figure, name):
    def load():
        run = [sys.executable, "-c", LOAD, str(store.root), name]
        return float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    figure(f"opening a store of {COUNT} and loading {name}: {min(load() for _ in range(5)) * 1e3:.1f} ms")


def test_listing(store, figure):
    figure(f"`fusekit ls` of {COUNT}: {best(lambda: command(store, 'ls')):.2f} s")
    figure(f"`fusekit --version`: {best(lambda: command(store, '--version')):.2f} s of that is any command's")


def test_looking_for_nothing_to_do(store, figure):
    records = [listed.record for listed in store.names()][:2000]
    assert all(store.settled(record) is not None for record in records)
    taken = best(lambda: [store.settled(record) for record in records])
    figure(f"finding that 2000 kernels are there: {taken:.3f} s")


def test_verifying(store, figure):
    figure(f"`fusekit verify` of {COUNT}: {best(lambda: command(store, 'verify'), 1):.1f} s")
    figure(f"`fusekit verify --full` of {COUNT}: {best(lambda: command(store, 'verify', '--full'), 1):.1f} s")


def test_collecting(store, figure, tmp_path):
    entries = [path.name.removesuffix(".json") for path in store.roots[0].entry_files()]
    figure(f"`fusekit gc` of {COUNT} with nothing to do: {best(lambda: command(store, 'gc'), 2):.1f} s")
    for number, key in enumerate(entries):
        for path in (mark_path(store.root, key), store.roots[0].entry_path(key)):
            os.utime(path, (time.time() - number, time.time() - number))
    start = time.perf_counter()
    report = store.collect(max_age=COUNT / 2)
    figure(f"evicting {report.removed} of {COUNT}: {time.perf_counter() - start:.1f} s")
    assert not store.verify().bad
    half = tmp_path / "half"
    shutil.copytree(store.root, half)
    start = time.perf_counter()
    shutil.rmtree(half)
    figure(
        f"removing a copy of the other half, which is what the disk alone takes: {time.perf_counter() - start:.1f} s"
    )
    start = time.perf_counter()
    report = store.collect(max_bytes=0)
    figure(f"evicting the other {report.removed}: {time.perf_counter() - start:.1f} s")
    assert report.kept_bytes == 0

"""The time of a build, by past builds."""

from dataclasses import replace
from types import SimpleNamespace

from fusekit.compiler.build import Task
from fusekit.compiler.estimate import estimate
from tests.store.samples import build_entry, build_record


def publish(store, seed, name, op, seconds):
    entry, cubin = build_entry(seed, seconds=seconds)
    store.publish(entry, cubin)
    store.publish_name(replace(build_record(entry, name), spec={"op": op}))


def task(name, op, arch="sm_90a"):
    return Task(name, {}, (SimpleNamespace(full_name=name, op=op, arch=arch),), None)


def test_a_kernel_takes_as_long_as_before_or_as_others_of_its_operation(store, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    tasks = [task("a/known@x", "grouped-gemm"), task("a/new@x", "grouped-gemm"), task("a/other@x", "router-topk")]
    assert estimate(store, tasks) is None
    for seed, (name, op, seconds) in enumerate(
        [("a/known@x", "grouped-gemm", 9), ("b/p@x", "grouped-gemm", 5), ("b/q@x", "grouped-gemm", 1),
         ("b/r@x", "dense-gemm", 4), ("b/s@x", "dense-gemm", 4)]
    ):  # fmt: skip
        publish(store, seed, name, op, seconds)
    expected = estimate(store, tasks)
    assert expected.seconds == {"a/known@x": 9, "a/new@x": 5, "a/other@x": 4}
    assert expected.processes == 2
    assert expected.whole == 9  # half of 18, and the longest
    assert estimate(store, tasks, jobs=1).whole == 18
    assert estimate(store, [task("a/known@x", "grouped-gemm", "sm_100a")]).seconds == {"a/known@x": 5}
    assert estimate(store, []) is None

"""The checked mode on the GPU: what its kernel finds, next to a GEMM, in graphs, without a wait."""

import numpy as np
import pytest

from fusekit import NotBuiltError
from fusekit.library import Library
from fusekit.reference.offsets import first_wrong
from fusekit.runtime import DeviceArray
from fusekit.runtime.checked import CHECK, CheckedKernel

from .cases import Case
from .device import View
from .harness import faults, prepare
from .test_streams import captured

NAMES = ["whole-epilogue@128x128-c2x1", "dynamic-swiglu-concat@128x160-c2x1-dynamic", "wgrad-low@64x128-c2x1"]
GROUPS = [1, 2, 31, 32, 33, 127, 128, 129, 1000]
ROWS = 5000


@pytest.fixture(scope="module")
def checked(gpu):
    library = Library(gpu.library.store, gpu.driver, checked=True)
    try:
        library.find(CHECK)
    except NotBuiltError as error:
        pytest.skip(str(error))
    yield library
    library.close()


def wrong_offsets(groups, rng):
    """Ends that are right, and the same with one of them off in every way, at the first, the last and some group."""
    good = np.sort(rng.integers(0, ROWS + 1, groups)).astype(np.int32)
    yield good
    yield np.zeros(groups, np.int32)
    yield np.full(groups, ROWS, np.int32)
    for group in {0, groups - 1, int(rng.integers(groups))}:
        for value in (-1, -(2**31), ROWS + 1, 2**31 - 1, int(good[group]) - 1, 0):
            changed = good.copy()
            changed[group] = value
            yield changed
    yield rng.integers(-10, ROWS + 10, groups).astype(np.int32)


@pytest.mark.parametrize("groups", GROUPS)
def test_the_kernel_says_what_the_reference_says(gpu, checked, groups):
    kernel = checked.load(CHECK)
    offsets = DeviceArray(gpu.devices, (groups,), "i32")
    report = DeviceArray(gpu.devices, (8,), "i32")
    report.upload(np.full(8, 0, np.int32))
    before = np.zeros(8, np.int32)
    for values in wrong_offsets(groups, np.random.default_rng(groups)):
        offsets.upload(values)
        kernel(offsets=offsets, report=report, rows=ROWS)
        gpu.finish(f"the check of {values[:8]}")
        after = np.frombuffer(report.download(), np.int32)
        actual = first_wrong(values, ROWS)
        wanted = before.copy()
        if actual is not None:
            wanted[:6] = [before[0] + 1, *actual, ROWS, before[0] + 1]
        assert np.array_equal(after, wanted), (values, after, wanted)
        before = after.copy()
    kernel.unload()


@pytest.mark.parametrize("name", NAMES)
def test_a_checked_kernel_gives_the_same_and_has_no_problems(gpu, checked, specs, name):
    spec = specs[name]
    kernel = checked.load(spec.full_name)
    assert isinstance(kernel, CheckedKernel)
    prepared = prepare(spec, Case("checked", (70, 0, 33, 64), 2 * spec.tile[1], 72, spare=20))
    placed = gpu.arguments(prepared)
    kernel(**placed)
    gpu.finish(f"{name}, checked")
    gpu.download(prepared, placed)
    assert not faults(prepared)
    with gpu.stream() as stream:
        graph = captured(gpu, stream, kernel.bind(**placed))
        for _ in range(3):
            gpu.upload(prepared, placed)
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            gpu.finish(f"{name}, checked and replayed", stream)
            gpu.download(prepared, placed)
            assert not faults(prepared)
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")
    assert checked.problems() == []
    kernel.unload()


def test_what_a_graph_finds_in_one_of_its_replays_is_reported(gpu, checked, specs):
    """One row more than there are, which is memory all the same: nothing reads or writes what is not the test's."""
    spec = specs[NAMES[0]]
    kernel = checked.load(spec.full_name)
    prepared = prepare(spec, Case("beyond", (70, 0, 33, 64), 2 * spec.tile[1], 72, spare=20))
    placed = gpu.arguments(prepared)
    rows = prepared.arguments["x"].shape[0]
    offsets = placed["offsets"]
    assert isinstance(offsets, View)
    good = np.array([70, 70, 103, 167], np.int32)
    with gpu.stream() as stream:
        graph = captured(gpu, stream, kernel.bind(**placed))
        for ends in (good, np.array([70, 70, 103, rows + 1], np.int32), good, good):
            gpu.write(offsets.memory, offsets.offset, ends)
            gpu.driver.check(gpu.api.cuCtxSynchronize(), "cuCtxSynchronize")
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            gpu.finish("a checked replay", stream)
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")
    (problem,) = checked.problems()
    assert (problem.group, problem.begin, problem.end, problem.rows, problem.times) == (3, 103, rows + 1, rows, 1)
    assert checked.problems() == []
    kernel.unload()

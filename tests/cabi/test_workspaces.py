"""Workspaces and scratch of the C launcher: for each stream its own, from whichever thread."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from fusekit.abi import PointerParameter
from fusekit.cabi import Exported
from tests.threads import at_once

from .launcher import CUBIN, CUDA_ERROR, OK, Launcher, compile_shared, complete
from .recorder import STOCK_STEP, WORKSPACE, Recorder
from .samples import hand_written
from .test_launcher import usual

STOCK = 64


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Kernels with workspaces of 132 * 64 bytes, of 1 KiB, and of 1 MiB; and one with scratch of M * 1 KiB alone."""
    whole = hand_written()[-1].record
    base = replace(whole, scratch=0, parameters=tuple(item for item in whole.parameters if item.name != "partial"))
    sizes = {"middle": ("mul", "sm_count", 64), "small": 1000, "large": 1 << 20}
    records = {name: replace(base, workspace=size) for name, size in sizes.items()}
    records["scratch"] = replace(
        whole, workspace=0, workspace_zeroed=False, scratch=("mul", 1024, "M"),
        parameters=tuple(item for item in whole.parameters if item.name != "counters"),
    )  # fmt: skip
    kernels = [Exported(f"sample/{name}@1", record, CUBIN, {}) for name, record in records.items()]
    return compile_shared(tmp_path_factory.mktemp("c"), kernels, "demo"), kernels


def load(build, index, **changes):
    shared, kernels = build
    launcher = Launcher(shared, kernels, index, "demo", Recorder(kernels[index].record, **changes))
    assert launcher.load() == OK, str(launcher.error)
    return launcher


def workspace(launcher, launch, what="workspace"):
    """Its address in a launch, or that of the scratch."""
    order = sorted(launcher.record.parameters, key=lambda parameter: parameter.offset)
    at = next(index for index, item in enumerate(order) if isinstance(item, PointerParameter) and item.argument == what)
    return int.from_bytes(launch.parameters[at], "little")


def test_each_stream_has_its_own(build):
    launcher = load(build, 0)
    args = usual(launcher)
    streams = [77, 78, 0, 77, 1, 78, 99]
    for stream in streams:
        assert launcher.launch(args, stream) == OK, str(launcher.error)
    result = [workspace(launcher, launch) for launch in launcher.recorder.launches]
    by_stream = dict(zip(streams, result, strict=True))
    assert [by_stream[stream] for stream in streams] == result
    assert by_stream[0] == by_stream[1]  # two handles of the legacy default stream
    assert len({by_stream[stream] for stream in (0, 77, 78, 99)}) == 4
    size = -(-132 * 64 // 256) * 256
    assert all((address - WORKSPACE) % size == 0 for address in result)
    assert launcher.recorder.filled == [(WORKSPACE, (1 << 16) // size * size)]
    assert launcher.unload() == OK
    assert launcher.recorder.allocated == 0


def test_a_bound_launch_takes_that_of_the_stream(build):
    launcher = load(build, 0)
    status, bound = launcher.bind(usual(launcher))
    assert status == OK
    launcher.recorder.calls.clear()
    for stream in (77, 78, 77):
        assert launcher.run(bound, stream) == OK
    assert launcher.recorder.calls == ["cuLaunchKernelEx"] * 3  # no question, no allocation
    result = [workspace(launcher, launch) for launch in launcher.recorder.launches]
    assert result[0] == result[2] != result[1]
    launcher.free(bound)
    assert launcher.unload() == OK


def test_a_stock_that_is_used_up_is_followed_by_another(build):
    launcher = load(build, 1)
    args = usual(launcher)
    for stream in range(100, 100 + STOCK):
        assert launcher.launch(args, stream) == OK
    assert launcher.recorder.calls.count("cuMemAlloc_v2") == 1
    assert launcher.launch(args, 999) == OK
    assert launcher.recorder.calls.count("cuMemAlloc_v2") == 2
    assert launcher.launch(args, 100) == OK
    result = [workspace(launcher, launch) for launch in launcher.recorder.launches]
    assert len(set(result)) == STOCK + 1
    assert result[-1] == result[0]
    assert launcher.recorder.capture_mode == 0
    assert launcher.unload() == OK
    assert launcher.recorder.allocated == 0


def test_a_large_one_is_made_alone(build):
    launcher = load(build, 2)
    for stream in (100, 101):
        assert launcher.launch(usual(launcher), stream) == OK
    assert [size for _, size in launcher.recorder.filled] == [1 << 20] * 2
    launcher.recorder.fail["cuMemAlloc_v2"] = 2
    assert launcher.launch(usual(launcher), 102) == CUDA_ERROR
    assert "allocating a workspace failed" in str(launcher.error)
    assert len(launcher.recorder.launches) == 2
    del launcher.recorder.fail["cuMemAlloc_v2"]
    assert launcher.launch(usual(launcher), 102) == OK
    assert launcher.unload() == OK
    assert launcher.recorder.allocated == 0


def rows(launcher, count):
    """Arguments of `count` rows."""
    args = usual(launcher)
    args.m = count
    return args


def test_scratch_grows_with_the_largest_launch_of_a_stream(build):
    launcher = load(build, 3)
    allocated = []
    for stream, count in ((77, 96), (77, 4), (78, 96), (77, 3000), (77, 96), (77, 4000), (2, 8), (77, 5000)):
        assert launcher.launch(rows(launcher, count), stream) == OK, str(launcher.error)
        allocated.append(launcher.recorder.allocated)
    assert allocated == [1, 1, 2, 3, 3, 3, 4, 5]
    assert launcher.recorder.sizes == [2 << 20, 2 << 20, 4 << 20, 2 << 20, 6 << 20]  # the last half as much again
    result = [workspace(launcher, launch, "scratch") for launch in launcher.recorder.launches]
    assert result[0] == result[1] != result[2]
    assert result[3] == result[4] == result[5] != result[0]
    assert launcher.recorder.filled == []
    assert launcher.recorder.capture_mode == 0
    assert launcher.unload() == OK
    assert launcher.recorder.allocated == 0


def test_a_bound_launch_keeps_its_need_of_scratch(build):
    launcher = load(build, 3)
    status, bound = launcher.bind(rows(launcher, 3000))
    assert status == OK
    for stream in (77, 78, 77):
        assert launcher.run(bound, stream) == OK
    assert launcher.recorder.sizes == [4 << 20] * 2
    launcher.free(bound)
    launcher.recorder.fail["cuMemAlloc_v2"] = 2
    assert launcher.launch(rows(launcher, 3000), 99) == CUDA_ERROR
    assert "allocating a workspace failed" in str(launcher.error)
    assert launcher.unload() == OK
    assert launcher.recorder.allocated == 0


def test_threads_have_default_streams_of_their_own(build):
    """And many threads that meet in one stream find one workspace."""
    launcher = load(build, 1)
    args = usual(launcher)

    def work(number: int) -> None:
        for stream in (2, 500, 600 + number, 2):
            status, bound = launcher.bind(args)
            assert status == OK and launcher.run(bound, stream) == OK
            launcher.free(bound)

    at_once(12, work)
    by_stream: dict[int, set[int]] = {}
    for launch in launcher.recorder.launches:
        by_stream.setdefault(launch.stream, set()).add(workspace(launcher, launch))
    assert len(by_stream[500]) == 1
    assert len(by_stream[2]) == 12
    assert all(len(by_stream[600 + number]) == 1 for number in range(12))
    every = [address for addresses in by_stream.values() for address in addresses]
    assert len(every) == len(set(every)) == 25
    assert launcher.unload() == OK


@pytest.mark.parametrize(("index", "what"), [(1, "workspace"), (3, "scratch")])
def test_a_thread_has_nothing_of_one_that_ended(build, index, what):
    """Whose launches may be pending."""
    launcher = load(build, index)
    args = usual(launcher)

    def work() -> None:
        assert [launcher.launch(args, 2) for _ in range(2)] == [OK, OK]

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    result = [workspace(launcher, launch, what) for launch in launcher.recorder.launches]
    assert len(set(result)) == 4 and result[::2] == result[1::2]
    assert launcher.unload() == OK


def test_a_handle_for_each_device(build):
    """Grid, workspace and context are the device's; another one's context may be current."""
    shared, kernels = build
    recorder = Recorder(kernels[0].record, sm_counts={1: 100})
    handles = [Launcher(shared, kernels, 0, "demo", recorder) for _ in range(2)]
    for device, launcher in enumerate(handles):
        assert launcher.load(device) == OK, str(launcher.error)
    assert recorder.retained == 2
    recorder.contexts.append(0x1000)
    for launcher in handles:
        assert launcher.launch(usual(launcher), 0) == OK, str(launcher.error)
    assert recorder.contexts == [0x1000]
    assert [launch.grid[0] for launch in recorder.launches] == [132, 100]
    assert [launch.context for launch in recorder.launches] == [0x1000, 0x1001]
    # Seven of 8448 bytes fit into a stock, and ten of 6400.
    assert [size for _, size in recorder.filled] == [7 * 8448, 10 * 6400]
    assert [workspace(handles[0], launch) for launch in recorder.launches] == [WORKSPACE, WORKSPACE + STOCK_STEP]
    recorder.contexts.pop()
    assert [launcher.unload() for launcher in handles] == [OK, OK]
    assert (recorder.retained, recorder.allocated, recorder.loaded) == (0, 0, 0)


def test_what_loads_leaves_the_captures_of_other_threads_alone(build):
    launcher = load(build, 0)
    calls = launcher.recorder.calls
    first, last = (calls.index(name) for name in ("cuThreadExchangeStreamCaptureMode", "cuMemsetD8Async"))
    assert first < calls.index("cuLibraryLoadData") < calls.index("cuMemAlloc_v2") < last
    assert launcher.recorder.capture_mode == 0
    assert launcher.unload() == OK
    assert launcher.recorder.capture_mode == 0


def test_a_first_launch_may_be_one_that_is_captured(build):
    """Scratch; a workspace after the stock is used up; then a load, which is refused."""
    for index, streams in ((3, 1), (1, STOCK + 1)):
        launcher = load(build, index)
        launcher.recorder.capturing = True
        for stream in range(100, 100 + streams):
            assert launcher.launch(usual(launcher), stream) == OK, str(launcher.error)
        assert launcher.recorder.capture_mode == 0
        assert launcher.recorder.allocated == (1 if index == 3 else 2)
        launcher.recorder.capturing = False
        assert launcher.unload() == OK
    shared, kernels = build
    refused = Launcher(shared, kernels, 3, "demo", Recorder(kernels[3].record, capturing=True))
    assert refused.load() == CUDA_ERROR


@pytest.mark.parametrize("call", ["cuEventQuery", "cuStreamIsCapturing"])
def test_nothing_is_loaded_while_a_stream_is_captured(build, call):
    shared, kernels = build
    launcher = Launcher(shared, kernels, 0, "demo", Recorder(kernels[0].record, fail={call: 906}))
    assert launcher.load() == CUDA_ERROR
    assert "loading before the end of a stream's capture failed" in str(launcher.error)
    assert (launcher.error.cuda, launcher.recorder.loaded, launcher.recorder.retained) == (906, 0, 0)
    assert (launcher.recorder.capture_mode, launcher.recorder.contexts) == (0, [])


def test_a_cubin_of_cuda_13_needs_its_driver(tmp_path):
    base = hand_written()[-1]
    cubin = bytearray(CUBIN)
    cubin[8] = 8
    kernels = [Exported("sample/new@1", complete(base.record), bytes(cubin), {})]
    shared = compile_shared(tmp_path, kernels, "demo")
    launcher = Launcher(shared, kernels, 0, "demo", Recorder(kernels[0].record, version=12080))
    assert launcher.load() == 2  # NO_DRIVER
    assert "supports CUDA 12.8; the cubin is of CUDA 13's format" in str(launcher.error)

"""Loading, unloading, captures, threads, processes that fork or replace themselves, and the end of a process."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.errors import ArgumentError, DriverError, UsageError
from fusekit.layers.passes import Pass
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.runtime.memory import DeviceArray
from tests.runtime.fake import CUresult
from tests.runtime.samples import CUBIN, Torchlike, fake_for, load, record, tensors, with_workspace
from tests.threads import at_once


def test_loading_and_unloading_leaves_nothing(soak: bool) -> None:
    launch_record = with_workspace()
    fake = fake_for(launch_record)
    devices = Devices(Driver(fake))

    def cycle() -> None:
        kernel = Kernel(devices, "sample/fc1@1", launch_record, CUBIN, {"act_alpha": 1.0}, 0)
        kernel(**tensors(), stream=9)
        kernel.unload()
        fake.launches.clear()
        fake.encoded.clear()
        fake.calls.clear()

    cycle()
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(10_000 if soak else 300):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) < objects + 50
    assert (fake.loaded, fake.memory) == (0, {})


def test_a_copy_of_a_kernel_is_the_kernel() -> None:
    kernel, fake = load(record())
    for copied in (copy.copy(kernel), copy.deepcopy({"kernel": kernel})["kernel"]):
        assert copied is kernel
    kernel.unload()
    with pytest.raises(ArgumentError, match="was unloaded"):
        copied(**tensors())
    copied.unload()
    assert (fake.loaded, fake.calls.count("cuLibraryUnload")) == (0, 1)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda kernel: kernel, r"<Kernel sample/.*> cannot be .*; pickle its name, and load it there: library.load\("),
        (lambda kernel: kernel.bind(**tensors()), "<Launch of sample/.*> cannot be .*; bind its kernel again"),
        (lambda kernel: Pass([], {}, {}), "<.*Pass.*> cannot be .*; bind the pass of its layer again"),
        (lambda kernel: DeviceArray(kernel._devices, (4,), "f32"), "DeviceArray.* cannot be .*; make another one"),
    ],
)
def test_what_is_of_this_process_is_not_pickled(make: Any, remedy: str) -> None:
    handle = make(load(record())[0])
    with pytest.raises(UsageError, match=remedy):
        pickle.dumps(handle)
    if not isinstance(handle, Kernel):  # a copy would have the same memory
        with pytest.raises(UsageError, match="copied"):
            copy.copy(handle)


@pytest.mark.parametrize("function", ["cuStreamIsCapturing", "cuEventQuery"])
def test_loading_while_a_stream_is_captured_is_refused(function: str) -> None:
    launch_record = record()
    status = {
        "cuStreamIsCapturing": CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        "cuEventQuery": CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    }[function]
    fake = fake_for(launch_record, fail={function: status})
    with pytest.raises(DriverError, match=r"loading sample.* load every kernel, on every device .* before the capture"):
        load(launch_record, fake)
    assert fake.loaded == 0
    assert fake.stack == []


def test_a_first_launch_on_another_device_during_a_capture_is_refused() -> None:
    launch_record = record()
    fake = fake_for(launch_record, devices=2)
    kernel, _ = load(launch_record, fake)
    fake.fail["cuEventQuery"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    kernel(**tensors(), stream=9)  # its own device is ready
    there = {
        name: Torchlike(value.shape, value.dtype, value.address, device=1) if isinstance(value, Torchlike) else value
        for name, value in tensors().items()
    }
    with pytest.raises(DriverError, match="before the capture begins"):
        kernel(**there, stream=9)


def test_threads_that_load_at_once_keep_one_workspace_and_one_context() -> None:
    launch_record = with_workspace()
    fake = fake_for(launch_record, devices=2)
    kernel, _ = load(launch_record, fake)
    barrier = threading.Barrier(4)
    original = fake.cuKernelGetFunction

    def slow(handle: Any) -> Any:
        barrier.wait(10)  # all four are past the look-up
        return original(handle)

    fake.cuKernelGetFunction = slow  # type: ignore[method-assign]

    def work(number: int) -> None:
        there = {
            name: Torchlike(value.shape, value.dtype, value.address, device=1)
            if isinstance(value, Torchlike)
            else value
            for name, value in tensors().items()
        }
        fake.stream_contexts[20 + number] = 1001
        kernel(**there, stream=20 + number)

    at_once(4, work)
    assert len(fake.memory) == 2  # one a device
    scratch = {launched.parameters[8] for launched in fake.launches}
    assert len(scratch) == 4  # one a stream
    kernel.unload()
    assert fake.memory == {}


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns after every few instructions. Without a GIL they run at once anyway."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_launch_on_a_stream_each(switching: None) -> None:
    launch_record = with_workspace()
    kernel, fake = load(launch_record)
    count, times = 8, 100

    def work(number: int) -> None:
        """A call of the same shapes as the other threads', one of new shapes, a bound launch, in turn."""
        stream, base = 100 + number, (number + 1) << 32
        bound = kernel.bind(**lying(tensors(), base), cluster_margin=number)
        for time in range(times):
            kernel(**lying(tensors(), base), stream=stream)
            kernel(**lying(tensors(m=1 + number * times + time), base), stream=stream)
            bound(stream)

    at_once(count, work)
    assert len(fake.launches) == 3 * count * times
    workspaces = set()
    for stream in range(100, 100 + count):
        base, launches = (stream - 99) << 32, [launch for launch in fake.launches if launch.stream == stream]
        addresses = [[int.from_bytes(launch.parameters[at][:8], "little") for at in (0, 2, 3)] for launch in launches]
        assert addresses == [[base + 0x1000_0000, base + 0x3000_0004, base + 0x4000_0000]] * len(launches)
        rows = [int.from_bytes(launched.parameters[5], "little") for launched in launches]
        assert rows == [row for time in range(times) for row in (96, 1 + (stream - 100) * times + time, 96)]
        assert [launched.grid[0] for launched in launches] == [132, 132, 132 - 2 * (stream - 100)] * times
        (workspace,) = {launched.parameters[8] for launched in launches}
        workspaces.add(workspace)
    assert len(workspaces) == count


def lying(arguments: dict[str, Any], base: int) -> dict[str, Any]:
    """The same tensors, so many bytes further on."""
    return {
        name: replace(value, address=value.address + base) if isinstance(value, Torchlike) else value
        for name, value in arguments.items()
    }


ROOT = Path(__file__).parents[2]
FORK_AND_EXEC = """
import os, sys
from tests.runtime.samples import load, tensors
kernel, fake = load()
kernel(**tensors(), stream=9)
child = os.fork() if len(sys.argv) == 1 else None
if child == 0:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "replaced"])
if child is not None:
    kernel(**tensors(), stream=9)
    assert len(fake.launches) == 2
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("launched", len(fake.launches))
"""
EXIT = """
import atexit, threading
from tests.runtime.samples import load, tensors, with_workspace
from fusekit.runtime import DeviceArray
kernel, fake = load(with_workspace())
array = DeviceArray(kernel._devices, (1024,), "f32")
bound = kernel.bind(**tensors())
bound(9)
started = threading.Event()
def work():
    while True:
        kernel(**tensors(), stream=10)
        started.set()
threading.Thread(target=work, daemon=True).start()
started.wait()
atexit.register(lambda: (bound(9), print("launched late")))
"""


def ran(program: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_fork_that_replaces_the_process_launches_anew() -> None:
    assert ran(FORK_AND_EXEC) == "launched 1\n"


def test_a_process_ends_with_launches_open() -> None:
    assert ran(EXIT) == "launched late\n"


def in_child(queue: Any, action: Any) -> None:
    try:
        action()
        queue.put(("done", ""))
    except Exception as error:
        queue.put((type(error).__name__, str(error)))


@pytest.mark.parametrize("what", ["bound launch", "call", "load", "unload"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_after_the_driver_was_started_is_refused(what: str) -> None:
    kernel, fake = load()
    bound = kernel.bind(**tensors())
    actions = {
        "bound launch": lambda: bound(9),
        "call": lambda: kernel(**tensors(), stream=9),
        "load": lambda: Kernel(kernel._devices, "sample/fc1@1", record(), CUBIN, {}, 0),
        "unload": kernel.unload,
    }
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=in_child, args=(queue, actions[what]))
    process.start()
    kind, text = queue.get()
    process.join(10)
    assert kind == "DriverError"
    assert "forked after CUDA was initialised" in text and "spawn or forkserver" in text
    bound(9)  # the parent goes on
    assert len(fake.launches) == 1


def test_a_driver_that_was_not_initialised_says_what_a_fork_has_to_do_with_it() -> None:
    class NotInitialised(int):
        name = "CUDA_ERROR_NOT_INITIALIZED"

    launch_record = record()
    fake = fake_for(launch_record)
    fake.fail["cuInit"] = NotInitialised(3)  # type: ignore[assignment]
    fake.cuGetErrorName = lambda status: (CUresult.CUDA_SUCCESS, b"CUDA_ERROR_NOT_INITIALIZED")  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="does not survive a fork"):
        Driver(fake)


def test_unloaded_kernels_are_refused_in_every_form() -> None:
    kernel, _ = load()
    bound = kernel.bind(**tensors())
    kernel.unload()
    for action in (lambda: bound(9), lambda: kernel(**tensors()), lambda: kernel.bind(**tensors())):
        with pytest.raises(ArgumentError, match="unloaded; load it again"):
            action()


def test_a_kernel_that_cannot_be_made_ready_leaves_nothing() -> None:
    launch_record = with_workspace()
    fake = fake_for(launch_record)
    fake.cuKernelGetFunction = lambda kernel: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        load(launch_record, fake)
    assert (fake.loaded, fake.memory) == (0, {})

"""Threads, loading and unloading again and again, processes that fork or replace themselves, and their end."""

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusekit.library import Library

from .cases import Case
from .device import NOT_READY, Gpu
from .harness import faults, prepare

NAME = "whole-epilogue@128x128-c1x1"
THREADS, LAUNCHES = 8, 200
CYCLES = 10_000


@pytest.mark.parametrize("name", [NAME, "dynamic-whole-epilogue"])
def test_many_threads_launch_one_kernel_on_streams_of_their_own(gpu, specs, name):
    """A dynamic schedule keeps its counters in memory, which streams must not share."""
    spec = next(spec for key, spec in specs.items() if key.startswith(name))
    kernel = gpu.kernel(spec)
    prepared = [prepare(spec, Case(f"thread {n}", (90 + n, 0, 100), 2 * spec.tile[1], 72, spare=20 - n), n)
                for n in range(THREADS)]  # fmt: skip
    placed = [gpu.arguments(launch) for launch in prepared]
    gpu.driver.check(gpu.api.cuCtxSynchronize(), "cuCtxSynchronize")
    failures = []

    def work(number, stream):
        try:
            bound = kernel.bind(**placed[number])
            for index in range(LAUNCHES):
                if index % 2:
                    bound(stream)
                else:
                    kernel(**placed[number], stream=stream, cluster_margin=index % 5)
        except Exception as error:
            failures.append(error)

    flags = int(gpu.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    streams = [int(gpu.driver.check(gpu.api.cuStreamCreate(flags), "cuStreamCreate")) for _ in range(THREADS)]
    threads = [threading.Thread(target=work, args=item) for item in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number, stream in enumerate(streams):
        gpu.finish(f"thread {number}", stream)
        gpu.driver.check(gpu.api.cuStreamDestroy(stream), "cuStreamDestroy")
    for launch, arguments in zip(prepared, placed, strict=True):
        gpu.download(launch, arguments)
        assert not faults(launch), str(launch.case)


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_loading_and_unloading_holds_memory_flat(gpu, specs, soak, alone):
    """Ten thousand cycles with --soak, else some hundred; every tenth one launches."""
    from fusekit.abi import LaunchRecord
    from fusekit.runtime import Kernel

    spec = specs[NAME]
    record = gpu.library.find(spec.full_name)
    launch = prepare(spec, Case("small", (40, 30), 2 * spec.tile[1], 72))
    placed = gpu.arguments(launch)
    entry, cubin = gpu.library.store.load(record.key)
    launch_record = LaunchRecord.from_json(dict(entry.launch))

    def cycle(index):
        kernel = Kernel(gpu.devices, record.name, launch_record, cubin, record.defaults, 0, record.spec)
        if index % 10 == 0:
            kernel(**placed)
            gpu.finish("a launch between load and unload")
        kernel.unload()

    cycles = CYCLES if soak else 300
    for index in range(100):
        cycle(index)
    free, before = gpu.driver.check(gpu.api.cuMemGetInfo(), "cuMemGetInfo")[0], resident()
    for index in range(cycles):
        cycle(index)
    if alone:
        assert gpu.driver.check(gpu.api.cuMemGetInfo(), "cuMemGetInfo")[0] >= free
    grown = resident() - before
    assert grown < 8 << 20, f"{grown} bytes more after {cycles} cycles"
    again = launch.fresh()
    gpu.upload(again, placed)
    gpu.kernel(spec)(**placed)
    gpu.finish("after the cycles")
    gpu.download(again, placed)
    assert not faults(again)


def test_trim_waits_for_a_dropped_kernel_and_leaves_the_others(gpu, specs):
    from fusekit import open_library

    spec = specs[NAME]
    launch = prepare(spec, Case("small", (40, 30), 2 * spec.tile[1], 72))
    placed = gpu.arguments(launch)
    library = open_library()
    library._devices = gpu.devices
    kept = library.load(spec.full_name)
    library.load(spec.full_name)(**placed)  # its object is gone while the launch is pending
    assert library.trim() > 0
    assert {row.kernel for row in library.memory()} == {spec.full_name}
    gpu.download(launch, placed)
    assert not faults(launch)
    again = launch.fresh()
    gpu.upload(again, placed)
    kept(**placed)
    gpu.finish("after trim")
    gpu.download(again, placed)
    assert not faults(again)
    del kept
    assert library.trim() > 0
    assert library.memory() == []


def test_opening_and_closing_libraries_gives_contexts_back(gpu, specs):
    from fusekit import open_library

    name = specs[NAME].full_name
    for _ in range(20):
        library = open_library()
        library.load(name).unload()
        library.close()
    status, active = gpu.api.cuDevicePrimaryCtxGetState(gpu.devices.get(0).handle)[0::2]
    assert not status and active  # the fixture's own library still holds it


def use_after_fork(queue, library, name):
    try:
        library.load(name)
    except Exception as error:
        queue.put((type(error).__name__, str(error)))
    else:
        queue.put(("loaded", ""))


def open_after_fork(queue, name):
    from fusekit import open_library

    try:
        library = open_library()
        library.load(name)
    except Exception as error:
        queue.put((type(error).__name__, str(error)))
    else:
        queue.put(("loaded", ""))


@pytest.mark.parametrize("target", [use_after_fork, open_after_fork])
def test_a_fork_after_cuda_was_initialised_is_refused_clearly(gpu, specs, target):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    name = specs[NAME].full_name
    arguments = (queue, gpu.library, name) if target is use_after_fork else (queue, name)
    process = context.Process(target=target, args=arguments)
    process.start()
    kind, text = queue.get()
    process.join(30)
    assert kind == "DriverError"
    assert "fork" in text and "spawn or forkserver" in text
    assert gpu.library.load(name).unload() is None  # the parent goes on


FORK_FIRST = """
import os, sys
import fusekit, fusekit.runtime
library = fusekit.open_library()
child = os.fork()
kernel = library.load({name!r})
kernel.unload()
if not child:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_after_import_is_safe(gpu, specs):
    ran(FORK_FIRST.format(name=specs[NAME].full_name))


def ran(program):
    """What a process of its own prints."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]  # a fork beside CUDA's threads
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FORK_AND_EXEC = """
import os, sys
import fusekit
kernel = fusekit.open_library().load({name!r})
child = os.fork() if len(sys.argv) == 1 else None
if child == 0:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "replaced"])
kernel.unload()
if child is not None:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("loaded and unloaded")
"""


def test_a_fork_that_replaces_the_process_starts_cuda_anew(gpu, specs):
    assert ran(FORK_AND_EXEC.format(name=specs[NAME].full_name)) == "loaded and unloaded\n"


EXIT = """
import atexit, sys
import fusekit
from fusekit.spec import parse_file
from tests.gpu.cases import Case
from tests.gpu.conftest import MATRIX
from tests.gpu.device import Gpu
from tests.gpu.harness import prepare

spec = next(spec for spec in parse_file(MATRIX) if spec.full_name == {name!r})
library = fusekit.open_library()
gpu = Gpu(library, sys.exit)
with library.devices.active(library.devices.get(0)):
    placed = gpu.arguments(prepare(spec, Case("large", (4096, 4096), 16 * spec.tile[1], 4096)))
    flags = int(gpu.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stream = int(gpu.driver.check(gpu.api.cuStreamCreate(flags), "cuStreamCreate"))
bound = gpu.kernel(spec).bind(**placed)
for _ in range(500):
    bound(stream)
atexit.register(lambda: (bound(stream), print("pending:", int(gpu.api.cuStreamQuery(stream)[0]))))
"""


def test_a_process_ends_with_launches_open(gpu, specs):
    assert ran(EXIT.format(name=specs[NAME].full_name)) == f"pending: {NOT_READY}\n"


def test_workspaces_and_scratch_from_pytorchs_allocator(gpu, specs, torch):
    before = torch.cuda.memory_allocated()
    library = Library(gpu.library.store, gpu.driver, allocator="torch")
    other, spec = Gpu(library, gpu.give_up), specs["dswiglu-whole@128x160-c1x1-dynamic"]
    for _ in range(3):
        assert not other.trial(spec, Case("PyTorch's allocator", (90, 0, 100), 2 * spec.tile[1], 72, spare=20))
    used = sum(row.workspace + row.scratch for row in library.memory())
    assert 0 < used <= torch.cuda.memory_allocated() - before
    other.kernel(spec).unload()
    assert torch.cuda.memory_allocated() == before
    library.close()

"""Two GPUs in one process: code, workspaces and streams of each, from one thread and from two."""

import threading
from contextlib import contextmanager

import pytest

from fusekit import ArgumentError
from fusekit.runtime import DeviceArray

from .cases import Case
from .device import View
from .harness import Buffer, faults, prepare

NAMES = ["whole-epilogue@128x128-c2x1", "dynamic-swiglu-concat@128x160-c2x1-dynamic"]
LAUNCHES = 100


@pytest.fixture(autouse=True)
def two(gpu):
    if gpu.devices.count < 2:
        pytest.skip(f"{gpu.devices.count} GPU; this needs two")
    if gpu.devices.get(1).arch != gpu.devices.get(0).arch:
        pytest.skip("the second GPU is of another architecture")


def placed_on(gpu, prepared, device):
    """The launch's arguments in the memory of a device."""
    arguments = {}
    for name, value in prepared.arguments.items():
        if isinstance(value, Buffer):
            memory = DeviceArray(gpu.devices, (value.image.nbytes,), "u8", device)
            memory.upload(value.image)
            value = View(memory, value.guard, value.dtype, value.shape, value.strides)
        arguments[name] = value
    return arguments


@contextmanager
def stream_of(gpu, device):
    with gpu.devices.active(gpu.devices.get(device)), gpu.stream() as stream:
        yield stream


def finish(gpu, prepared, placed, device, stream=0):
    with gpu.devices.active(gpu.devices.get(device)):
        gpu.finish(f"a launch on device {device}", stream)
    gpu.download(prepared, placed)
    assert not faults(prepared)


def launch_of(spec, number):
    return prepare(spec, Case(f"launch {number}", (90 + number, 0, 100), 2 * spec.tile[1], 72, spare=20), number)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("current", [0, 1])
def test_launches_go_where_the_tensors_are(gpu, specs, name, current):
    """On streams of their own and on the default one, with the context of either device current."""
    kernel = gpu.kernel(specs[name])
    with stream_of(gpu, 0) as zero, stream_of(gpu, 1) as one, gpu.devices.active(gpu.devices.get(current)):
        before = int(gpu.driver.check(gpu.api.cuCtxGetCurrent(), "cuCtxGetCurrent"))
        for number, (device, stream) in enumerate([(0, zero), (1, one), (1, None), (0, None), (1, one)]):
            prepared = launch_of(specs[name], number)
            placed = placed_on(gpu, prepared, device)
            kernel(**placed, stream=stream)
            bound = kernel.bind(**placed)
            bound(stream)
            finish(gpu, prepared, placed, device, stream or 0)
            assert int(gpu.driver.check(gpu.api.cuCtxGetCurrent(), "cuCtxGetCurrent")) == before


def test_two_threads_drive_a_device_each(gpu, specs):
    spec = specs[NAMES[1]]
    kernel = gpu.library.load(spec.full_name)  # the second device is made ready by whoever comes first
    prepared = [launch_of(spec, device) for device in (0, 1)]
    placed = [placed_on(gpu, prepared[device], device) for device in (0, 1)]
    failures = []

    def work(device, stream):
        try:
            for _ in range(LAUNCHES):
                kernel(**placed[device], stream=stream)
        except Exception as error:
            failures.append(error)

    with stream_of(gpu, 0) as zero, stream_of(gpu, 1) as one:
        threads = [threading.Thread(target=work, args=pair) for pair in ((0, zero), (1, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for device, stream in ((0, zero), (1, one)):
            finish(gpu, prepared[device], placed[device], device, stream)
    kernel.unload()


def test_streams_and_tensors_of_the_wrong_device_are_named(gpu, specs):
    spec = specs[NAMES[0]]
    kernel = gpu.kernel(spec)
    here = [placed_on(gpu, launch_of(spec, 0), device) for device in (0, 1)]
    with stream_of(gpu, 0) as zero, pytest.raises(ArgumentError, match="not of the primary context of device 1"):
        kernel(**here[1], stream=zero)
    with pytest.raises(ArgumentError, match="the tensors of one launch are on one device"):
        kernel(**here[0] | {"x": here[1]["x"]})


def test_a_graph_on_the_second_device(gpu, specs):
    from .test_streams import captured

    for name in NAMES:
        prepared = launch_of(specs[name], 0)
        placed = placed_on(gpu, prepared, 1)
        bound = gpu.kernel(specs[name]).bind(**placed)
        with stream_of(gpu, 1) as stream:
            graph = captured(gpu, stream, bound)
            for _ in range(3):
                gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            finish(gpu, prepared, placed, 1, stream)
            gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")

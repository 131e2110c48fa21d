"""The C loader of bundles on the GPU: the bits that Python gives, streams at once, graphs, and every device."""

import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_void_p

import pytest

from fusekit.cabi import generate_loader
from fusekit.share.loader import export_bundle
from fusekit.share.selection import select
from tests.cabi.bundles import BundleLauncher, Loader, arguments, tensor
from tests.cabi.launcher import CUDA_ERROR, OK, Error, build

from .cases import Case
from .device import View
from .harness import differences, faults, prepare
from .test_streams import captured

KERNELS = [
    "whole-epilogue@128x128-c2x1",
    "swiglu-concat-cooperative@256x192-c2x1",
    "dynamic-swiglu-concat@128x160-c2x1-dynamic",
    "wgrad-cooperative@256x128-c2x1-dynamic",
    "dswiglu-interleaved@128x192-c1x2-dynamic",
    "dswiglu-whole@128x160-c1x1-dynamic",
]
DYNAMIC = KERNELS[2]
STREAMS, LAUNCHES = 6, 50


class Loaded(BundleLauncher):
    """A kernel of the bundle, loaded by the real driver."""

    def __init__(self, shared, bundle, kernel, device=0):
        super().__init__(shared, bundle, kernel, recorder=None, name=kernel.name)
        self.device = device
        assert self.load(device) == OK, str(self.error)

    def load(self, device=0):
        status = self.function("driver_open", POINTER(c_void_p), POINTER(Error))(byref(self.driver), byref(self.error))
        assert status == OK, str(self.error)
        status, bundle = self.loader.open(self.bundle)
        assert status == OK, str(self.error)
        types = c_void_p, c_void_p, c_char_p, c_int, POINTER(c_void_p), POINTER(Error)
        loaded = self.function("kernel_load", *types)
        status = loaded(self.driver, bundle, self.name.encode(), device, byref(self.kernel), byref(self.error))
        self.loader.close(bundle)
        return status

    def call(self, placed):
        """The arguments of a launch on what `Gpu.arguments` has placed."""
        tensors, scalars = [], {}
        for name, value in placed.items():
            if isinstance(value, View):
                address = value.memory.data_ptr() + value.offset
                tensors.append(tensor(name, address, value.dtype, value.shape, value.strides))
            else:
                scalars[name] = value
        return arguments(tensors, scalars)

    def __call__(self, stream=None):
        status = self.launch(self.args, stream or 0)
        assert status == OK, str(self.error)

    def on(self, placed):
        self.args = self.call(placed)
        return self


@pytest.fixture(scope="module")
def loader(gpu, specs, tmp_path_factory):
    """The compiled loader, and a bundle of the kernels."""
    folder = tmp_path_factory.mktemp("loader")
    shared = build(folder, generate_loader("demo"), "demo")
    names = [specs[name].full_name for name in KERNELS]
    export_bundle(gpu.library.store, select(gpu.library.store, names), folder / "kernels.tar")
    return shared, folder / "kernels.tar"


def test_the_bundle_is_whole(loader):
    shared, path = loader
    result = Loader(shared)
    status, bundle = result.open(path)
    assert (status, result.verify(bundle)) == (OK, OK), str(result.error)
    result.close(bundle)


def case(spec, number=0):
    return Case(f"case {number}", (90 + number, 0, 100, 33), 2 * spec.tile[1], 72, spare=20 - number)


@pytest.mark.parametrize("name", KERNELS)
def test_it_gives_the_bits_that_python_gives(gpu, specs, loader, name):
    spec = specs[name]
    first = prepare(spec, case(spec))
    second = first.fresh()
    placed = gpu.arguments(first)
    gpu.kernel(spec)(**placed)
    gpu.finish(f"{name} from Python")
    gpu.download(first, placed)
    again = gpu.arguments(second)
    kernel = Loaded(*loader, gpu.kernel(spec))
    kernel.on(again)()
    gpu.finish(f"{name} from C")
    gpu.download(second, again)
    assert not faults(first)
    assert not differences(first, second)
    assert kernel.unload() == OK


def test_streams_at_once_share_no_workspace(gpu, specs, loader):
    """One handle, a thread for each stream: a dynamic schedule whose counters were shared would give wrong rows."""
    spec = specs[DYNAMIC]
    kernel = Loaded(*loader, gpu.kernel(spec))
    prepared = [prepare(spec, case(spec, number), number) for number in range(STREAMS)]
    placed = [gpu.arguments(launch) for launch in prepared]
    calls = [kernel.call(arguments) for arguments in placed]
    flags = int(gpu.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    streams = [int(gpu.driver.check(gpu.api.cuStreamCreate(flags), "cuStreamCreate")) for _ in range(STREAMS)]
    statuses = []

    def work(number):
        statuses.extend(kernel.launch(calls[number], streams[number]) for _ in range(LAUNCHES))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {OK}, str(kernel.error)
    for number, stream in enumerate(streams):
        gpu.finish(f"stream {number} of {STREAMS}", stream)
        gpu.driver.check(gpu.api.cuStreamDestroy(stream), "cuStreamDestroy")
        gpu.download(prepared[number], placed[number])
        assert not faults(prepared[number])
    assert kernel.unload() == OK


@pytest.mark.parametrize("name", [KERNELS[0], DYNAMIC, KERNELS[-1]])
def test_a_graph_of_it_replays(gpu, specs, loader, name):
    spec = specs[name]
    kernel = Loaded(*loader, gpu.kernel(spec))
    prepared = prepare(spec, case(spec))
    placed = gpu.arguments(prepared)
    with gpu.stream() as stream:
        graph = captured(gpu, stream, kernel.on(placed))
        for _ in range(3):
            gpu.upload(prepared, placed)
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            gpu.finish(f"{name} replayed", stream)
            gpu.download(prepared, placed)
            assert not faults(prepared)
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")
    assert kernel.unload() == OK


def test_loading_during_a_capture_is_refused(gpu, specs, loader):
    """The question itself breaks the capture, as any call would that the driver refuses meanwhile."""
    kernel = gpu.kernel(specs[KERNELS[0]])  # Python's own handle, which is loaded now
    mode = gpu.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    with gpu.stream() as stream:
        gpu.driver.check(gpu.api.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        other = Loaded.__new__(Loaded)
        BundleLauncher.__init__(other, *loader, kernel)
        assert other.load() == CUDA_ERROR
        assert "before the end of a stream's capture" in str(other.error)
        gpu.api.cuStreamEndCapture(stream)
    assert Loaded(*loader, kernel).unload() == OK


def test_a_handle_for_each_device(gpu, specs, loader):
    if gpu.devices.count < 2:
        pytest.skip(f"{gpu.devices.count} GPU; this needs two")
    from .test_devices import placed_on

    spec = specs[DYNAMIC]
    handles = [Loaded(*loader, gpu.kernel(spec), device) for device in (0, 1)]
    for device in (1, 0, 1):  # whatever context is current: here that of device 0
        prepared = prepare(spec, case(spec, device), device)
        placed = placed_on(gpu, prepared, device)
        handles[device].on(placed)()
        with gpu.devices.active(gpu.devices.get(device)):
            gpu.finish(f"a launch on device {device}")
        gpu.download(prepared, placed)
        assert not faults(prepared)
    assert [handle.unload() for handle in handles] == [OK, OK]

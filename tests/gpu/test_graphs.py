"""A step of several kernels, captured once and replayed; what capture allows and what it refuses."""

import numpy as np
import pytest

from fusekit import DriverError, reference

from .cases import Case
from .harness import faults, prepare
from .test_streams import captured

GROUPS, ROWS, H, I = 5, 300, 128, 256  # noqa: E741 (the field's own name)
# Ends of the groups in one replay after another.
ENDS = np.array(
    [[60, 120, 180, 240, 300], [0, 0, 300, 300, 300], [1, 2, 3, 4, 5], [128, 257, 257, 257, 300], [0] * 5], np.int32
)
# With scratch for sums of gradients, and a workspace.
SUMS = ["dswiglu-dprob@128x128-c2x1", "dswiglu-whole@128x160-c1x1", "dswiglu-whole@128x160-c1x1-dynamic"]
FIRST, SECOND, THIRD = "swiglu-concat@128x128-c1x1", "identity@128x128-c1x1", "identity@128x160-c1x1"
REPLAYS = 10_000


class Step:
    """fc1 with SwiGLU, fc2, and another grouped GEMM, each reading what the one before wrote."""

    def __init__(self, gpu, specs):
        self.gpu, self.kernels = gpu, [gpu.kernel(specs[name]) for name in (FIRST, SECOND, THIRD)]
        generator = np.random.default_rng(3)

        def weights(*shape):
            values = generator.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            return (values.view(np.uint32) >> 16).astype(np.uint16)

        self.x = self.upload(weights(ROWS, H) + np.uint16(0), "bf16")
        self.w = [self.upload(weights(GROUPS, *shape), "bf16") for shape in ((2 * I, H), (H, I), (H, H))]
        self.y = [self.array((ROWS, width), "bf16") for width in (I, H, H)]
        self.offsets = self.array((GROUPS,), "i32")
        self.table = self.upload(ENDS, "i32")
        inputs = [self.x, *self.y]
        self.launches = [
            kernel.bind(x=inputs[index], w=self.w[index], offsets=self.offsets, y=self.y[index])
            for index, kernel in enumerate(self.kernels)
        ]

    def array(self, shape, dtype):
        from fusekit.runtime import DeviceArray

        return DeviceArray(self.gpu.devices, shape, dtype)

    def upload(self, values, dtype):
        array = self.array(values.shape, dtype)
        array.upload(np.ascontiguousarray(values))
        return array

    def __call__(self, stream):
        for launch in self.launches:
            launch(stream)

    def counts(self, index, stream):
        """Other counts, changed on the device in the stream's order."""
        gpu = self.gpu
        size = 4 * GROUPS
        source = self.table.data_ptr() + index % len(ENDS) * size
        gpu.driver.check(gpu.api.cuMemcpyDtoDAsync(self.offsets.data_ptr(), source, size, stream), "cuMemcpyDtoDAsync")

    def clear(self, stream):
        for array in self.y:
            self.gpu.driver.check(self.gpu.api.cuMemsetD8Async(array.data_ptr(), 0xFF, array.nbytes, stream), "memset")

    def results(self, stream):
        self.gpu.finish("the step", stream)
        return [bytes(array.download()) for array in self.y]


@pytest.fixture(scope="module")
def step(gpu, specs):
    return Step(gpu, specs)


def test_ten_thousand_replays_with_counts_changed_on_the_device(gpu, step, alone):
    with gpu.stream() as stream:
        wanted = []
        for index in range(len(ENDS)):
            step.counts(index, stream)
            step.clear(stream)
            step(stream)
            wanted.append(step.results(stream))
        assert len({results[0] for results in wanted}) == len(ENDS)  # the counts do change the results
        graph = captured(gpu, stream, step)
        free = gpu.driver.check(gpu.api.cuMemGetInfo(), "cuMemGetInfo")[0]
        for index in range(REPLAYS):
            step.counts(index, stream)
            looked_at = index % 1000 < len(ENDS)
            if looked_at:
                step.clear(stream)
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            if looked_at:
                assert step.results(stream) == wanted[index % len(ENDS)], f"replay {index}"
        gpu.finish("the last replay", stream)
        if alone:
            assert gpu.driver.check(gpu.api.cuMemGetInfo(), "cuMemGetInfo")[0] >= free
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")


class Counted:
    """The driver's functions, and the names of those that were called."""

    def __init__(self, api):
        self._api, self.names = api, []

    def __getattr__(self, name):
        result = getattr(self._api, name)
        if name.startswith("cu") and callable(result) and not isinstance(result, type):
            self.names.append(name)
        return result


def test_nothing_waits_and_nothing_is_allocated(gpu, step, alone):
    """The stream waits for a value that the host writes last: whatever waited for the stream would wait for ever.

    And the driver is asked for nothing but launches.
    """
    driver, api = gpu.driver, gpu.api
    gate = step.array((64,), "u8")
    gate.fill(0)
    arguments = {"x": step.x, "w": step.w[0], "offsets": step.offsets, "y": step.y[0]}
    step.kernels[0](**arguments)  # its signature has been seen
    step.counts(0, 0)
    gpu.finish("before")
    with gpu.stream() as stream, gpu.stream() as side:
        graph = captured(gpu, stream, step)
        wait = int(api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        driver.check(api.cuStreamWaitValue32(stream, gate.data_ptr(), 1, wait), "cuStreamWaitValue32")
        free = driver.check(api.cuMemGetInfo(), "cuMemGetInfo")[0]
        counted = driver.api = Counted(api)
        try:
            for _ in range(20):
                step(stream)
                step.kernels[0](**arguments, stream=stream)
                step.launches[0].update(y=step.y[0])(stream)
                driver.check(api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
        finally:
            driver.api = api
            pending = api.cuStreamQuery(stream)[0]
            held = driver.check(api.cuMemGetInfo(), "cuMemGetInfo")[0]
            driver.check(api.cuStreamWriteValue32(side, gate.data_ptr(), 1, 0), "cuStreamWriteValue32")
        gpu.finish("after the gate", stream)
        driver.check(api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")
    assert int(pending) == 600  # CUDA_ERROR_NOT_READY: all of it was queued after the gate
    assert not alone or held >= free
    assert set(counted.names) <= {"cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuStreamGetGreenCtx"}
    assert counted.names.count("cuLaunchKernelEx") == 20 * 5


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL"])
@pytest.mark.parametrize("blocking", [False, True])
def test_loading_during_a_capture_is_refused_with_the_remedy(gpu, specs, mode, blocking):
    api, check = gpu.api, gpu.driver.check
    name = specs[FIRST].full_name
    stream = int(check(api.cuStreamCreate(0 if blocking else 1), "cuStreamCreate"))
    kind = getattr(api.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
    check(api.cuStreamBeginCapture(stream, kind), "cuStreamBeginCapture")
    with pytest.raises(DriverError, match=r"load every kernel, on every device it runs on, before the capture begins"):
        gpu.library.load(name)
    api.cuStreamEndCapture(stream)
    gpu.library.load(name).unload()
    check(api.cuStreamDestroy(stream), "cuStreamDestroy")


def test_a_capture_of_another_thread_is_left_in_peace(gpu, specs, step):
    import threading

    name, failures = specs[FIRST].full_name, []

    def load():
        try:
            gpu.library.load(name).unload()
        except Exception as error:
            failures.append(error)

    with gpu.stream() as stream:
        check, api = gpu.driver.check, gpu.api
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        check(api.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        step(stream)
        graph = check(api.cuStreamEndCapture(stream), "cuStreamEndCapture")
        check(api.cuGraphDestroy(graph), "cuGraphDestroy")
    assert failures == []


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warmed-up"])
@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@pytest.mark.parametrize("name", SUMS)
def test_scratch_for_a_first_launch_that_is_captured(gpu, specs, name, mode, warm):
    """At once, and as PyTorch's recipe has it: warmed up in a side stream, captured in another."""
    spec = specs[name]
    prepared = prepare(spec, Case("captured", (90, 0, 100, 33), 2 * spec.tile[1], 72, spare=5))
    placed = gpu.arguments(prepared)
    kernel = gpu.library.load(spec.full_name)  # not the one of other tests, which has launched before
    launch = kernel.bind(**placed)
    with gpu.stream() as side, gpu.stream() as stream:
        for _ in range(3 if warm else 0):
            launch(side)
        gpu.finish("the warm-up", side)
        graph = captured(gpu, stream, launch, mode)
        for _ in range(3):
            again = prepared.fresh()
            launch(stream)
            gpu.finish("the stream of the capture", stream)
            gpu.upload(again, placed)
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, side), "cuGraphLaunch")
            gpu.finish(f"{name} replayed", side)
            gpu.download(again, placed)
            assert not faults(again), "\n".join(faults(again))
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")
    kernel.unload()


def test_a_graph_holds_what_was_captured(gpu, specs, step):
    """Updating a bound launch afterwards does not reach into a graph."""
    other = step.array(step.y[0].shape, "bf16")
    with gpu.stream() as stream:
        step.counts(0, stream)
        launch = step.kernels[0].bind(x=step.x, w=step.w[0], offsets=step.offsets, y=step.y[0])
        graph = captured(gpu, stream, launch)
        launch.update(y=other)
        other.fill(0)
        step.clear(stream)
        gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
        gpu.finish("the graph", stream)
        assert not any(other.download())
        first = bytes(step.y[0].download())
        launch(stream)
        gpu.finish("the updated launch", stream)
        assert bytes(other.download()) == first
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")


def test_results_are_right(gpu, specs, step):
    """The step's first kernel against the reference, so that equal bits mean right bits."""
    with gpu.stream() as stream:
        step.counts(3, stream)
        step(stream)
        gpu.finish("the step", stream)
    spec = specs[FIRST]
    inputs = {
        "x": np.frombuffer(step.x.download(), np.uint16).reshape(ROWS, H),
        "w": np.frombuffer(step.w[0].download(), np.uint16).reshape(GROUPS, 2 * I, H),
        "offsets": ENDS[3],
    }
    y = np.frombuffer(step.y[0].download(), np.uint16).reshape(ROWS, I)
    actual = reference.check(spec, inputs, {"y": y})
    assert all(result.ok for result in actual.values()), "\n".join(map(str, actual.values()))

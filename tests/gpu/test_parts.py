"""Launches on a part of a GPU: streams of green contexts, and a number of multiprocessors that the caller gives."""

from contextlib import closing, contextmanager

import numpy as np
import pytest

from fusekit import ArgumentError
from fusekit.bench.layer_trial import LayerTrial
from fusekit.plan.layer.program import BACKWARD, FORWARD

from .cases import Case
from .harness import differences, faults, prepare
from .test_streams import captured

KERNELS = ["whole-epilogue@128x128-c2x1", "dynamic-swiglu-concat@128x160-c2x1-dynamic", "wgrad-low@64x128-c2x1"]


@contextmanager
def green_context(gpu):
    """A green context with half of the multiprocessors, and how many it has."""
    api, check, device = gpu.api, gpu.driver.check, gpu.devices.get(0)
    kind = api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = check(api.cuDeviceGetDevResource(device.handle, kind), "cuDeviceGetDevResource")
    groups, count, _ = check(
        api.cuDevSmResourceSplitByCount(1, whole, 0, device.sm_count // 2), "cuDevSmResourceSplitByCount"
    )
    assert count == 1
    description = check(api.cuDevResourceGenerateDesc(groups, 1), "cuDevResourceGenerateDesc")
    flags = int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    green = check(api.cuGreenCtxCreate(description, device.handle, flags), "cuGreenCtxCreate")
    try:
        yield green, int(groups[0].sm.smCount)
    finally:
        check(api.cuGreenCtxDestroy(green), "cuGreenCtxDestroy")


@pytest.fixture
def half(gpu):
    """A stream with half of the multiprocessors, and how many it has."""
    flags = int(gpu.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    with green_context(gpu) as (green, count):
        stream = gpu.driver.check(gpu.api.cuGreenCtxStreamCreate(green, flags, 0), "cuGreenCtxStreamCreate")
        yield int(stream), count
        gpu.driver.check(gpu.api.cuStreamDestroy(stream), "cuStreamDestroy")


def many_tiles(spec):
    """More tiles than the device has multiprocessors, whatever the kernel's tile is."""
    return prepare(spec, Case("many tiles", (1500, 0, 1700), 16 * spec.tile[1], 200, spare=20))


def clusters(launch):
    """The blocks of a bound launch, in clusters."""
    return launch._plan.grid[0] // launch.kernel.record.cluster[0]


@pytest.mark.parametrize("name", KERNELS)
def test_a_green_context_gets_a_grid_of_its_own_and_the_same_bits(gpu, specs, half, name):
    stream, count = half
    device = gpu.devices.get(0)
    assert count < device.sm_count
    kernel, expected = gpu.kernel(specs[name]), many_tiles(specs[name])
    placed = gpu.arguments(expected)
    kernel(**placed)
    gpu.finish(f"{name} on the whole device")
    gpu.download(expected, placed)
    assert not faults(expected)
    launch = kernel.bind(**placed)
    for queue in (lambda: kernel(**placed, stream=stream), lambda: launch(stream), lambda: launch(stream)):
        run = expected.fresh()
        gpu.upload(run, placed)
        queue()
        gpu.finish(f"{name} in a green context", stream)
        gpu.download(run, placed)
        assert not faults(run) + differences(expected, run)
    size = kernel.record.cluster[0]
    assert clusters(launch) == count // size
    launch()
    gpu.finish(f"{name} on the whole device again")
    assert clusters(launch) == device.sm_count // size


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("count", [2, 13, 64])
def test_a_number_of_multiprocessors_limits_the_grid_and_changes_no_bit(gpu, specs, name, count):
    kernel, expected = gpu.kernel(specs[name]), many_tiles(specs[name])
    placed = gpu.arguments(expected)
    kernel(**placed)
    gpu.finish(f"{name} on the whole device")
    gpu.download(expected, placed)
    for margin in (0, 1):
        run = expected.fresh()
        gpu.upload(run, placed)
        launch = kernel.bind(**placed, sm_count=count, cluster_margin=margin)
        launch()
        gpu.finish(f"{name} on {count} multiprocessors")
        gpu.download(run, placed)
        assert not faults(run) + differences(expected, run)
        assert clusters(launch) == max(count // kernel.record.cluster[0] - margin, 1)


def test_a_graph_captured_in_a_green_context_has_its_grid(gpu, specs, half):
    stream, count = half
    kernel, expected = gpu.kernel(specs[KERNELS[0]]), many_tiles(specs[KERNELS[0]])
    placed = gpu.arguments(expected)
    launch = kernel.bind(**placed)
    graph = captured(gpu, stream, launch)
    assert clusters(launch) == count // kernel.record.cluster[0]
    gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
    gpu.finish("a graph in a green context", stream)
    gpu.download(expected, placed)
    assert not faults(expected)
    gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")


def test_a_default_stream_in_a_green_context_is_refused(gpu, specs):
    kernel, case = gpu.kernel(specs[KERNELS[0]]), many_tiles(specs[KERNELS[0]])
    placed = gpu.arguments(case)
    with green_context(gpu) as (green, _):
        context = gpu.driver.check(gpu.api.cuCtxFromGreenCtx(green), "cuCtxFromGreenCtx")
        with gpu.driver.inside(context), pytest.raises(ArgumentError, match="while a green context"):
            kernel(**placed, stream="legacy")
    kernel(**placed, stream="legacy")
    gpu.finish("the default stream of the device")
    gpu.download(case, placed)
    assert not faults(case)


@pytest.mark.parametrize("given", ["stream", "sm_count"])
def test_a_layer_on_a_part_gives_the_same_bits(gpu, half, given):
    name = "layers/qwen3"
    if not any(gpu.library.store.names(f"{name}.*")):
        pytest.skip(f"no kernels of layers.toml in {gpu.library}; build it there")
    settings = {"stream": half[0]} if given == "stream" else {"stream": 0, "sm_count": 20}
    with closing(LayerTrial(gpu.library, gpu.library.layer(name), 700, 1)) as trial:
        trial.launch()
        expected = {output: trial._download(output) for output in trial.outputs}
        for output in expected:
            trial.arrays[output].fill(0xEE)
        gpu.devices.synchronize(trial.device)
        memory = {"kept": trial.arrays["kept"], "scratch": trial.arrays["scratch"]}
        trial.layer.forward(**memory, **trial._arguments(FORWARD), **settings)
        trial.layer.backward(**memory, **trial._arguments(BACKWARD), **settings)
        gpu.finish(f"{name} on a part", settings["stream"])
        for output, value in expected.items():
            assert np.array_equal(trial._download(output), value), output

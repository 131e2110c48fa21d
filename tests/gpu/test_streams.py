"""Bound launches, streams, and graphs replayed with counts that only the device knows."""

import numpy as np
import pytest

from .cases import Case
from .harness import differences, faults, prepare

ROWS = 300
# Groups of one launch after another over the same memory: uneven, all in one, shifted, few, none.
COUNTS = [(70, 0, 33, 64, 0), (0, 0, 300, 0, 0), (1, 1, 1, 1, 1), (128, 129, 0, 0, 43), (0, 0, 0, 0, 0), (60,) * 5]

KERNELS = [
    "whole-epilogue@128x128-c2x1",
    "swiglu-concat-cooperative@256x192-c2x1",
    "identity-n-fp16@64x64-c1x2",
    "dynamic-identity@256x192-c1x2-dynamic",
    "dynamic-swiglu-concat@128x160-c2x1-dynamic",
    "wgrad-low@64x128-c2x1",
    "wgrad-cooperative@256x128-c2x1-dynamic",
    "dswiglu-interleaved@128x192-c1x2-dynamic",
    "dswiglu-interleaved@128x192-c1x2-dynamic",
]


def launches(spec):
    """One prepared launch for each of COUNTS, of equal shapes."""
    n = 2 * spec.tile[1]
    cases = [Case("-".join(map(str, sizes)), sizes, n, 72, spare=ROWS - sum(sizes)) for sizes in COUNTS]
    return [prepare(spec, case, seed) for seed, case in enumerate(cases)]


@pytest.mark.parametrize("name", KERNELS)
def test_graph_replays_with_other_counts(gpu, specs, name):
    spec = specs[name]
    prepared = launches(spec)
    placed = gpu.arguments(prepared[0])
    with gpu.stream() as stream:
        graph = captured(gpu, stream, gpu.kernel(spec).bind(**placed))
        for launch in prepared:
            gpu.upload(launch, placed)
            gpu.driver.check(gpu.api.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            gpu.finish(f"{name} replayed with {launch.case}", stream)
            gpu.download(launch, placed)
            assert not faults(launch), f"{launch.case}: " + "\n".join(faults(launch))
        gpu.driver.check(gpu.api.cuGraphExecDestroy(graph), "cuGraphExecDestroy")


def captured(gpu, stream, launch, mode="GLOBAL"):
    """An executable graph of one launch."""
    check, api = gpu.driver.check, gpu.api
    kind = getattr(api.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
    check(api.cuStreamBeginCapture(stream, kind), "cuStreamBeginCapture")
    launch(stream)
    graph = check(api.cuStreamEndCapture(stream), "cuStreamEndCapture")
    executable = check(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    check(api.cuGraphDestroy(graph), "cuGraphDestroy")
    return executable


@pytest.mark.parametrize("name", KERNELS)
def test_bound_launch_does_what_a_call_does(gpu, specs, name):
    spec = specs[name]
    called = launches(spec)[0]
    bound = called.fresh()
    placed = gpu.arguments(called)
    gpu.kernel(spec)(**placed)
    gpu.finish(f"{name} called")
    gpu.download(called, placed)
    again = gpu.arguments(bound)
    launch = gpu.kernel(spec).bind(**again)
    for _ in range(3):
        launch()
    gpu.finish(f"{name} bound")
    gpu.download(bound, again)
    assert not faults(bound)
    assert not differences(called, bound)


def test_two_streams_at_once_leave_room_for_each_other(gpu, specs):
    spec = specs["whole-epilogue@128x128-c1x1"]
    case = Case("half", (700, 0, 900), 6 * spec.tile[1], 200)
    prepared = [prepare(spec, case, seed) for seed in (0, 1)]
    placed = [gpu.arguments(launch) for launch in prepared]
    with gpu.stream() as one, gpu.stream() as other:
        for _ in range(4):
            for stream, arguments in zip((one, other), placed, strict=True):
                gpu.kernel(spec)(**arguments, stream=stream, cluster_margin=66)
        for stream in (one, other):
            gpu.finish("one of two launches at once", stream)
    for launch, arguments in zip(prepared, placed, strict=True):
        gpu.download(launch, arguments)
        assert not faults(launch)


def test_every_margin_gives_the_same_bits(gpu, specs):
    spec = specs["swiglu-interleaved@128x192-c2x1"]
    case = Case("margins", (300, 0, 500, 33), 4 * spec.tile[1], 136)
    first = prepare(spec, case)
    placed = gpu.arguments(first)
    results = []
    for margin in (0, 1, 13, 64, 65, 66, 131):
        launch = first.fresh()
        gpu.upload(launch, placed)
        gpu.kernel(spec)(**placed, cluster_margin=margin)
        gpu.finish(f"margin {margin}")
        gpu.download(launch, placed)
        results.append(launch)
    assert not faults(results[0])
    assert not [line for launch in results[1:] for line in differences(results[0], launch)]


def test_a_call_follows_the_device_of_its_tensors(gpu, specs):
    if gpu.devices.count < 2:
        pytest.skip(f"{gpu.devices.count} GPU; this needs two")
    from fusekit.runtime import DeviceArray

    from .device import View
    from .harness import Buffer

    spec = specs["whole-epilogue@128x128-c2x1"]
    prepared = launches(spec)[0]
    arguments = {}
    for name, value in prepared.arguments.items():
        if isinstance(value, Buffer):
            memory = DeviceArray(gpu.devices, (value.image.nbytes,), "u8", 1)
            memory.upload(value.image)
            value = View(memory, value.guard, value.dtype, value.shape, value.strides)
        arguments[name] = value
    gpu.kernel(spec)(**arguments)
    with gpu.devices.active(gpu.devices.get(1)):
        gpu.finish("a launch on device 1")
    gpu.download(prepared, arguments)
    assert not faults(prepared)
    assert np.array_equal(prepared.arguments["offsets"].array, prepared.inputs["offsets"])

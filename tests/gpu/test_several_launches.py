"""A record of two launches on the GPU: one call, one bound launch and one graph hold both, from Python and from C."""

import struct
from pathlib import Path

import pytest

from fusekit.abi import LaunchRecord
from fusekit.cabi import Exported, generate_loader
from fusekit.runtime import DeviceArray, Kernel
from tests.cabi.bundles import arguments, bundle_of, tensor
from tests.cabi.launcher import OK, build

from .test_c_loader import Loaded

ROWS = 1024


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The first launch writes n to x[0], the second one scale."""
    hostfunctions = pytest.importorskip("tests.compiler.hostfunctions", reason="the CuTe DSL is not installed")
    from fusekit.compiler.trace import compile_plan

    compiled = compile_plan(hostfunctions.plan(hostfunctions.two), Path(tmp_path_factory.mktemp("scratch")))
    return Exported("host/two@1", LaunchRecord.from_json(compiled.launch), compiled.cubin)


@pytest.fixture
def device(opened):
    result = opened.devices.get(0)
    with opened.devices.active(result):
        yield opened.devices


def first_of(devices, x):
    check, api = devices.driver.check, devices.driver.api
    check(api.cuCtxSynchronize(), "cuCtxSynchronize")
    return struct.unpack_from("<f", x.download())[0]


def nodes_of(devices, launch):
    """How many nodes a graph of `launch` has; it is replayed once."""
    check, api = devices.driver.check, devices.driver.api
    stream = int(check(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate"))
    check(
        api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture"
    )
    launch(stream)
    graph = check(api.cuStreamEndCapture(stream), "cuStreamEndCapture")
    count = api.cuGraphGetNodes(graph)[2]
    executable = check(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    check(api.cuGraphLaunch(executable, stream), "cuGraphLaunch")
    check(api.cuStreamSynchronize(stream), "cuStreamSynchronize")
    check(api.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
    check(api.cuGraphDestroy(graph), "cuGraphDestroy")
    check(api.cuStreamDestroy(stream), "cuStreamDestroy")
    return count


def test_from_python(device, exported):
    kernel = Kernel(device, exported.name, exported.record, exported.cubin, {}, 0)
    x = DeviceArray(device, (ROWS,), "f32")
    x.fill(0)
    kernel(x=x, n=7, scale=2.5)
    assert first_of(device, x) == 2.5
    bound = kernel.bind(x=x, n=7, scale=-3.0)
    assert nodes_of(device, bound) == 2
    assert first_of(device, x) == -3.0
    kernel.unload()


def test_from_c(device, exported, tmp_path):
    shared = build(tmp_path, generate_loader("demo"), "demo")
    kernel = Loaded(shared, bundle_of(tmp_path, [exported]), exported)
    x = DeviceArray(device, (ROWS,), "f32")
    x.fill(0)
    kernel.args = arguments([tensor("x", x.data_ptr(), "f32", (ROWS,))], {"n": 7, "scale": 2.5})
    kernel()
    assert first_of(device, x) == 2.5
    status, bound = kernel.bind(arguments([tensor("x", x.data_ptr(), "f32", (ROWS,))], {"n": 7, "scale": -3.0}))
    assert status == OK, str(kernel.error)
    assert nodes_of(device, lambda stream: kernel.run(bound, stream)) == 2
    assert first_of(device, x) == -3.0
    kernel.free(bound)
    assert kernel.unload() == OK

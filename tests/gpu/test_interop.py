"""Tensors and streams of PyTorch, CuPy and cuda.core, taken by protocol; each part needs its framework."""

from typing import ClassVar

import numpy as np
import pytest

from fusekit import reference

from .cases import Case
from .harness import faults, prepare

GROUPS, ROWS, N, K = 3, 200, 320, 136
BF16, FP16, DENSE = "swiglu-interleaved@128x160-c2x1", "identity-fp16@128x192-c1x2", "dense@128x128-c1x1"


def random_inputs(spec):
    grouped = spec.op == "grouped-gemm"
    return reference.make_inputs(spec, E=GROUPS if grouped else 1, M=ROWS, N=N, K=K, seed=4)


def assert_right(spec, inputs, outputs):
    actual = reference.check(spec, inputs, outputs)
    assert set(actual) == set(outputs)
    assert all(result.ok for result in actual.values()), "\n".join(map(str, actual.values()))


class OnlyDLPack:
    """A tensor that shows nothing but the DLPack protocol."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OnlyInterface:
    """A torch tensor that shows nothing but ``__cuda_array_interface__``; bfloat16, which it lacks, as two opaque
    bytes.
    """

    TYPESTRS: ClassVar = {
        "torch.bfloat16": ("<V2", 2),
        "torch.float16": ("<f2", 2),
        "torch.float32": ("<f4", 4),
        "torch.int32": ("<i4", 4),
    }

    def __init__(self, tensor):
        typestr, size = self.TYPESTRS[str(tensor.dtype)]
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
        }


def torch_tensors(torch, spec, inputs):
    """Inputs and NaN outputs as torch tensors on the GPU."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    tensors = {}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and value.dtype == np.uint16:
            tensors[name] = torch.from_numpy(value.view(np.int16)).cuda().view(kinds[spec.dtype])
        else:
            tensors[name] = torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value
    for name, (shape, dtype) in reference.output_shapes(spec, M=ROWS, N=N).items():
        tensors[name] = torch.full(shape, float("nan"), dtype=kinds[dtype], device="cuda")
    return tensors


def torch_outputs(torch, spec, tensors):
    return {
        name: tensors[name].view(torch.int16).cpu().numpy().view(np.uint16)
        for name in reference.output_shapes(spec, M=ROWS, N=N)
    }


@pytest.mark.parametrize("name", [BF16, FP16, DENSE])
@pytest.mark.parametrize("shown", [lambda tensor: tensor, OnlyDLPack, OnlyInterface], ids=["torch", "dlpack", "cai"])
def test_torch(gpu, specs, torch, name, shown):
    spec = specs[name]
    inputs = random_inputs(spec)
    tensors = torch_tensors(torch, spec, inputs)
    torch.cuda.synchronize()
    given = {key: shown(value) if isinstance(value, torch.Tensor) else value for key, value in tensors.items()}
    gpu.kernel(spec)(**given)
    gpu.finish(f"{name} on torch tensors")
    assert_right(spec, inputs, torch_outputs(torch, spec, tensors))


@pytest.mark.parametrize("how", ["given", "current", "bound"])
def test_torch_stream_orders_the_launch(gpu, specs, torch, how):
    """The inputs are copied in on the same stream, after enough work that an unordered launch would read NaN."""
    spec = specs[BF16]
    inputs = random_inputs(spec)
    tensors = torch_tensors(torch, spec, inputs)
    late = torch.full_like(tensors["x"], float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(tensors["x"])
        arguments = tensors | {"x": late}
        if how == "bound":
            gpu.kernel(spec).bind(**arguments)()
        else:
            gpu.kernel(spec)(**arguments, **({"stream": stream} if how == "given" else {}))
        copies = {name: tensors[name].clone() for name in reference.output_shapes(spec, M=ROWS, N=N)}
    gpu.finish(f"{BF16} on a torch stream", stream.cuda_stream)
    assert_right(spec, inputs, torch_outputs(torch, spec, copies))


def test_torch_slices_are_strided_views(gpu, specs, torch):
    spec = specs[BF16]
    inputs = random_inputs(spec)
    tensors = torch_tensors(torch, spec, inputs)
    wide = torch.full((ROWS, K + 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 32 : 32 + K] = tensors["x"]
    both = torch.full((ROWS, N // 2 + N), float("nan"), dtype=torch.bfloat16, device="cuda")
    tensors |= {"x": wide[:, 32 : 32 + K], "y": both[:, : N // 2], "preactivation": both[:, N // 2 :]}
    torch.cuda.synchronize()
    gpu.kernel(spec)(**tensors)
    gpu.finish(f"{BF16} on slices")
    outputs = {name: tensors[name].contiguous() for name in ("y", "preactivation")}
    assert_right(spec, inputs, torch_outputs(torch, spec, outputs))


def test_torch_graph(gpu, specs, torch):
    spec = specs[BF16]
    inputs = random_inputs(spec)
    tensors = torch_tensors(torch, spec, inputs)
    torch.cuda.synchronize()
    kernel = gpu.kernel(spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(**tensors, stream=torch.cuda.current_stream())
    offsets = reference.offsets_of([0, ROWS, 0])
    tensors["offsets"].copy_(torch.from_numpy(offsets))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(spec, inputs | {"offsets": offsets}, torch_outputs(torch, spec, tensors))


def test_torch_recipe_for_a_kernel_with_scratch(gpu, specs, torch):
    """Warmed up in a side stream, captured in a stream of PyTorch's own."""
    spec = specs["dswiglu-whole@128x160-c1x1"]
    prepared = prepare(spec, Case("recipe", (90, 0, 100, 33), 2 * spec.tile[1], 72))
    placed = gpu.arguments(prepared)
    kernel = gpu.library.load(spec.full_name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            kernel(**placed, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(**placed, stream=torch.cuda.current_stream())
    again = prepared.fresh()
    gpu.upload(again, placed)
    graph.replay()
    torch.cuda.synchronize()
    gpu.download(again, placed)
    assert not faults(again), "\n".join(faults(again))
    del graph
    kernel.unload()


def test_cupy(gpu, specs):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    spec = specs[FP16]
    inputs = random_inputs(spec)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = {
            name: cupy.asarray(value.view(np.float16) if value.dtype == np.uint16 else value)
            for name, value in inputs.items()
        }
        arrays["y"] = cupy.full((ROWS, N), cupy.nan, dtype=cupy.float16)
        gpu.kernel(spec)(**arrays, stream=stream)
    gpu.finish(f"{FP16} on cupy arrays", stream.ptr)
    assert_right(spec, inputs, {"y": arrays["y"].get().view(np.uint16)})


def test_cuda_core_stream(gpu, specs, torch):
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    spec = specs[DENSE]
    inputs = random_inputs(spec)
    tensors = torch_tensors(torch, spec, inputs)
    torch.cuda.synchronize()
    gpu.kernel(spec)(**tensors, stream=stream)
    stream.sync()
    assert_right(spec, inputs, torch_outputs(torch, spec, tensors))


def test_dlpacks_exchange_api_gives_the_current_stream(torch):
    from fusekit.runtime.work_stream import ATTRIBUTE, current_of

    if not hasattr(torch.Tensor, ATTRIBUTE):
        pytest.skip(f"PyTorch {torch.__version__} has no exchange API")
    framework, current = current_of(torch.zeros(4, device="cuda"))
    assert framework == "torch"
    assert current() == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert current() == side.cuda_stream

"""The CuTe DSL kernels of examples/cute on the GPU, against NumPy; through the cache, and adopted, against the DSL.

cd examples/cute && fusekit --store STORE build kernels.toml --allow-extern     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_own_kernel.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fusekit import ArgumentError, NotBuiltError
from fusekit.reference import decode, encode
from fusekit.runtime import DeviceArray
from tests.benchmarks import host


@pytest.fixture
def kernel(gpu):
    def load(name):
        try:
            return gpu.library.load(f"kernels/{name}")
        except NotBuiltError as error:
            pytest.skip(f"{error}; in examples/cute, with kernels.toml and --allow-extern")

    return load


@pytest.fixture
def place(gpu):
    """place(array, dtype) -> the array on the device; place(shape, dtype) -> an output, of which every bit is set."""

    def put(array, dtype):
        output = isinstance(array, tuple)
        device_array = DeviceArray(gpu.devices, array if output else array.shape, dtype)
        device_array.fill(0xFF)
        if not output:
            device_array.upload(encode(array, dtype))
        return device_array

    return put


def read(array):
    if array.dtype == "f32":
        return np.frombuffer(array.download(), np.float32).reshape(array.shape)
    return decode(np.frombuffer(array.download(), np.uint16).reshape(array.shape), array.dtype)


@pytest.mark.parametrize("n", [8, 2040, 2048, 2056, 1_000_008])
def test_fusion(gpu, kernel, place, n):
    rng = np.random.default_rng(n)
    x, residual = (decode(encode(rng.standard_normal(n), "bf16"), "bf16") for _ in range(2))
    y = place((n,), "bf16")
    kernel("silu-add")(x=place(x, "bf16"), residual=place(residual, "bf16"), y=y, scale=0.5)
    gpu.finish("silu-add")
    scaled = 0.5 * x.astype(np.float64)
    wanted = scaled / (1 + np.exp(-scaled)) + residual
    assert np.abs(read(y) - wanted).max() <= 2**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 255), (7, 1000), (300, 5001), (70_000, 33)])
def test_row_reduction_over_a_cluster(gpu, kernel, place, cluster, m, n):
    x = np.random.default_rng(m).standard_normal((m, n), dtype=np.float32)
    y = place((m,), "f32")
    kernel(f"square-sum@cluster{cluster}")(x=place(x, "f32"), y=y)
    gpu.finish("square-sum")
    np.testing.assert_allclose(read(y), (x.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 8), (128, 128, 64), (129, 136, 72), (1000, 520, 776), (4096, 2048, 1024)]
)
def test_persistent_gemm(gpu, kernel, place, m, n, k):
    rng = np.random.default_rng(m + n)
    a, b = (decode(encode(rng.standard_normal(shape), "bf16"), "bf16") for shape in ((m, k), (n, k)))
    c = place((m, n), "bf16")
    kernel("gemm")(a=place(a, "bf16"), b=place(b, "bf16"), c=c)
    gpu.finish("gemm")
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.linalg.norm(read(c) - wanted) / np.linalg.norm(wanted) < 4e-3


@pytest.mark.parametrize("n", [1, 255, 65_537, 50_000_000])
def test_a_sum_in_two_launches(gpu, kernel, place, n):
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    total, arrays = kernel("total"), {"x": place(x, "f32"), "y": place((1,), "f32")}
    result = []
    for launch in (total, lambda **arrays: total.bind(**arrays)()):
        launch(**arrays)
        gpu.finish("total")
        result.append(read(arrays["y"])[0])
    assert result[0] == result[1]
    assert abs(result[0] - x.sum(dtype=np.float64)) <= 1e-6 * np.abs(x).sum(dtype=np.float64)


def test_the_host_time_of_two_launches(kernel, figure):
    """The figure that the pages quote is a run's of its own: other tests may share the processor with this one."""
    kernel("total")
    document = host.measure("kernels/total", None, host.arrays)
    figure(f"kernels/total bound: {document['us']['bound']} us, {document['of bare']['bound']} of two bare launches")
    assert document["launches"] == 2
    assert document["of bare"]["bound"] < 1.5


def test_inside_jax(kernel):
    """In a process of its own; its outputs against JAX's own."""
    kernel("total")
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    probe = subprocess.run(
        [sys.executable, "-c", "import jax; assert jax.devices('cuda')"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"JAX does not work here: {probe.stderr.strip().splitlines()[-1]}")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("foreign_in_jax.py")], env=environment, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_does_not_fit_is_refused(kernel, place):
    with pytest.raises(ArgumentError, match="multiple of 8"):
        kernel("silu-add")(**{name: place((12,), "bf16") for name in ("x", "residual", "y")})


def test_the_cache_and_what_is_adopted_of_it_give_the_bits_of_the_dsl(gpu, tmp_path, monkeypatch):
    """Here alone a compiler is needed, and PyTorch for tensors that both take."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from cuda.bindings.driver import CUstream
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import from_dlpack

    import fusekit
    from examples.cute import fusion, gemm, rows
    from fusekit.config import Config
    from fusekit.cute.adopt import adopt
    from fusekit.store import Store

    torch.manual_seed(0)
    stream = torch.cuda.current_stream().cuda_stream
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    square = [torch.randn(520, 776, **bf16), torch.randn(136, 776, **bf16)]
    cases = (
        (fusion.arguments(), [torch.randn(4096, **bf16) for _ in range(2)], (4096,), torch.bfloat16, (Float32(0.5),)),
        (rows.arguments(4), [torch.randn(300, 5001, device="cuda")], (300,), torch.float32, ()),
        (gemm.arguments(), square, (520, 136), torch.bfloat16, (Int32(132),)),
    )
    for number, ((function, fakes), inputs, shape, dtype, rest) in enumerate(cases):
        monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path / str(number)))
        options = {"options": "--gpu-arch=sm_90a"}
        ways = cute.compile, fusekit.compile, fusekit.compile
        compiled = [compile_function(function, *fakes, **options) for compile_function in ways]
        assert compiled[2].fusekit_ir  # it is out of the store
        outputs = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(4)]
        for call, output in zip(compiled, outputs, strict=False):
            wrapped = [from_dlpack(item, assumed_align=16).mark_layout_dynamic() for item in (*inputs, output)]
            call(*wrapped, *rest, CUstream(stream))
        config = Config(store=tmp_path / str(number))
        store = Store.open(config)
        (found,) = (each.record for each in store.names())
        adopt(store, found, "own/kernel@base")
        kernel = fusekit.open_library(config).load("own/kernel")
        given = iter((*inputs, outputs[3], *(item.value for item in rest)))
        kernel(stream=stream, **{argument.name: next(given) for argument in kernel.record.arguments})
        torch.cuda.synchronize()
        assert not outputs[0].isnan().any()
        assert all(torch.equal(outputs[0], output) for output in outputs[1:])

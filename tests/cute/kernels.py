"""Kernels that the tests of the cache compile, and what they read."""

import dataclasses
import functools
import os

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute

SCALE = 2
MODE = os.environ.get("CACHE_MODE", "a")  # read at import
TABLE = {"f": lambda x: x * 3}
WIDTH = 32


class Base:
    K = 7


class Config:
    FACTOR = 5


@dataclasses.dataclass
class Options:
    bias: int = 1


@functools.lru_cache
def cached():
    return int(os.environ.get("CACHE_CACHED", "11"))


def late():
    return int(os.environ.get("CACHE_LATE", "13"))


def from_file():
    path = os.environ.get("CACHE_FILE")
    return int(open(path).read()) if path else 17  # noqa: PTH123


def operation(k):
    def add(x):
        return x + k

    return add


ADD = operation(19)


class Kernel(Base):
    def __init__(self):
        self.options = Options()

    @cute.kernel
    def device(self, x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        mode = 1 if cutlass.const_expr(MODE == "a") else 2
        value = SCALE + mode * 100 + Config.FACTOR * 1000 + self.K + cached() * 10000 + late() + from_file() * 1000000
        x[thread] = ADD(TABLE["f"](x[thread])) + cutlass.Int32(value + self.options.bias)

    @cute.jit
    def __call__(self, x: cute.Tensor):
        width = globals()["WI" + "DTH"]
        self.device(x).launch(grid=(1, 1, 1), block=(width, 1, 1))


@cute.kernel
def scaled(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int64):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(x):
        y[i] = x[i] * a + cutlass.Float32(n)


@cute.jit
def scale(
    x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int64, threads: cutlass.Constexpr, stream: CUstream
):
    blocks = (cute.size(x) + threads - 1) // threads
    scaled(x, y, a, n).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream)


@cute.jit
def twice(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32 = 2.0, n: cutlass.Int64 = 5):
    scaled(x, y, a, n).launch(grid=(1, 1, 1), block=(128, 1, 1))
    scaled(y, x, a, n).launch(grid=(2, 1, 1), block=(128, 1, 1))


def fake(extent=32, dtype=cutlass.Int32):
    return cute.runtime.make_fake_compact_tensor(dtype, (extent,), assumed_align=16)


def compile_kernel(options=None):
    return cute.compile(Kernel(), fake(), options=options)


def compile_scale(stream=0):
    tensors = (fake(cute.sym_int(), cutlass.Float32) for _ in range(2))
    return cute.compile(scale, *tensors, cutlass.Float32(1.0), cutlass.Int64(1), 128, CUstream(stream))

"""Kernels as a user of the CuTe DSL writes them, for specs with op = "extern"."""

from typing import NamedTuple

import cutlass
from cuda.bindings.driver import CUevent, CUstream
from cuda.bindings.runtime import cudaStream_t
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor, make_ptr
from cutlass.experimental import cuda as driver
from cutlass.utils import HardwareInfo

import fusekit

DEFAULT = CUstream(0)
Known = cutlass.Constexpr


class Options(NamedTuple):
    factor: cutlass.Float32
    sm_count: cutlass.Int32


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, rows: cutlass.Int32):
    column = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if column < x.shape[1]:
        for row in range(rows):
            y[row, column] = x[row, column] * factor


@cute.jit
def scale_twice(x: cute.Tensor, y: cute.Tensor, options: Options, stream: CUstream):
    grid = [cute.ceil_div(x.shape[1], 128), 1, 1]
    scale_kernel(x, y, options.factor, options.sm_count).launch(grid=grid, block=[128, 1, 1], stream=stream)
    scale_kernel(y, y, options.factor, options.sm_count).launch(grid=grid, block=[128, 1, 1], stream=stream)


@cute.kernel
def fill_kernel(y: cute.Tensor, memory: cute.Pointer, count: cutlass.Int64):
    column = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if column < y.shape[0]:
        y[column] = count.to(cutlass.Float32)


@cute.jit
def fill(y: cute.Tensor, memory: cute.Pointer, count: cutlass.Int64, clusters: cutlass.Constexpr, stream: CUstream):
    blocks = cutlass.min(cute.ceil_div(y.shape[0], 128), clusters)
    fill_kernel(y, memory, count).launch(grid=[blocks, 1, 1], block=[128, 1, 1], stream=stream)


@cute.jit
def fill_by_size(
    y: cute.Tensor, memory: cute.Pointer, count: cutlass.Int64, clusters: cutlass.Constexpr, stream: CUstream
):
    fill_kernel(y, memory, count).launch(grid=[1, 1, 1], block=[clusters, 1, 1], stream=stream)


def _matrix(rows, columns, dtype=cutlass.Float32):
    return make_fake_tensor(dtype, (rows, columns), (cute.sym_int64(divisibility=4), 1), assumed_align=16)


def twice(columns=0):
    """Two launches; a fixed number of columns, or any multiple of 4."""
    m, n = cute.sym_int(), columns or cute.sym_int(divisibility=4)
    options = Options(cutlass.Float32(1), cutlass.Int32(0))
    return scale_twice, (_matrix(m, n), _matrix(m, n)), {"options": options, "stream": CUstream(0)}


def halves():
    """y has extents of its own."""
    x, y = _matrix(cute.sym_int(), cute.sym_int(divisibility=8)), _matrix(cute.sym_int(), cute.sym_int(divisibility=4))
    return scale_twice, (x, y, Options(cutlass.Float32(1), cutlass.Int32(0)), CUstream(0))


def filled(clusters=4, by_size=False):
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    memory = make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=16)
    return (fill_by_size if by_size else fill), (y, memory, cutlass.Int64(0), clusters, CUstream(0))


class Compiling:
    """It compiles itself."""

    def __init__(self, clusters):
        self.clusters = clusters

    def compile(self, y, memory):
        return cute.compile(fill, y, memory, cutlass.Int64(0), self.clusters, CUstream(0), options="--opt-level 2")


def compiling():
    return fusekit.traced(Compiling(4).compile, *filled()[1][:2])


@cute.kernel
def window_kernel(window: cutlass.GridConstant[driver.TensorMap], y: cute.Tensor):
    column = cute.arch.thread_idx()[0]
    if column < y.shape[0]:
        y[column] = cutlass.Int32(column)


@cute.jit
def window(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, stream: CUstream):
    rows = cute.make_tensor(x.iterator, cute.make_layout((256, n + 1), stride=(1, 256)))
    tiled = driver.create_tensor_map_tiled_from_view(
        rows, box_dims=(256, 1), stride_order=(0, 1), swizzle=driver.TensorMapSwizzle.none
    )
    window_kernel(tiled, y).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def windowed():
    """A tensor map whose extent is a number that callers pass, and one more."""
    x = make_fake_tensor(cutlass.Uint16, (cute.sym_int(divisibility=256),), (1,), assumed_align=16)
    y = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=16)
    return window, (x, y, cutlass.Int32(1), CUstream(0))


@cute.kernel
def memories_kernel(y: cute.Tensor, first: cute.Tensor, second: cute.Tensor, third: cute.Tensor):
    column = cute.arch.thread_idx()[0]
    if column < y.shape[0]:
        y[column] = first[column] + second[column] + third[column] + cutlass.Float32(third.shape[0])


@cute.jit
def with_memories(y: cute.Tensor, first: cute.Tensor, second: cute.Tensor, third: cute.Tensor, stream: CUstream):
    memories_kernel(y, first, second, third).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def memories():
    """Three workspaces, the extent of one of them open."""
    y, third = (make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=16) for _ in range(2))
    first, second = (make_fake_tensor(cutlass.Float32, (128,), (1,), assumed_align=16) for _ in range(2))
    return with_memories, (y, first, second, third, CUstream(0))


def broken():
    raise RuntimeError("no luck")


def empty():
    return 3


def no_arguments():
    return empty, 3


def leaving():
    raise SystemExit(3)


def interrupted():
    raise KeyboardInterrupt


def twice_with_more(more=1):
    return twice()


@cute.kernel
def map_kernel(load: cute.CopyAtom):
    cute.nvgpu.cpasync.prefetch_descriptor(load)


class Mapped:
    """One tensor map, of tiles of 64 x 128; the type of its elements in shared memory may be another."""

    def __init__(self, internal):
        self.internal = internal

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: CUstream):
        cpasync = cute.nvgpu.cpasync
        layout = cute.make_layout((64, 128), stride=(128, 1))
        load, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, layout, (64, 128), internal_type=self.internal
        )
        map_kernel(load).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def mapped(element, internal=None, align=32):
    shape = cute.sym_int(), cute.sym_int(divisibility=128)
    strides = cute.sym_int64(divisibility=128), 1
    x = make_fake_tensor(getattr(cutlass, element), shape, strides, assumed_align=align)
    return Mapped(internal and getattr(cutlass, internal)), (x, CUstream(0))


class Narrow(Mapped):
    """The rows of its tensor map lie so far apart as a number of 32 bits says."""

    @cute.jit
    def __call__(self, x: cute.Tensor, rows: cutlass.Int32, stream: CUstream):
        cpasync = cute.nvgpu.cpasync
        view = cute.make_tensor(x.iterator, cute.make_layout((rows, 128), stride=(8 * rows * rows, 1)))
        layout = cute.make_layout((64, 128), stride=(128, 1))
        load, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, (64, 128))
        map_kernel(load).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def narrow():
    x = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=16)
    return Narrow(None), (x, cutlass.Int32(1), CUstream(0))


@cute.kernel
def encoded_kernel(load: cutlass.GridConstant[driver.TensorMap]):
    pass


@cute.jit
def encoded_host(x: cute.Tensor, stream: CUstream):
    rows, columns = x.shape
    load = driver.create_tensor_map_tiled(
        global_address=x.iterator.toint(), dtype=cutlass.Float16, global_dims=[columns, rows],
        global_strides=[columns * 2 // 16], box_dims=[64, 32], swizzle=driver.TensorMapSwizzle.s128b,
    )  # fmt: skip
    encoded_kernel(load).launch(grid=(rows // 32, 1, 1), block=(32, 1, 1), stream=stream)


def encoded():
    """A tensor map that host code has the driver encode."""
    shape = cute.sym_int64(divisibility=32), cute.sym_int64(divisibility=64)
    return encoded_host, (make_fake_tensor(cutlass.Float16, shape, (shape[1], 1), assumed_align=16), CUstream(0))


@cute.jit
def on_the_default_stream(y: cute.Tensor, wide: bool, stream: CUstream = DEFAULT):
    blocks = cutlass.Int32(1)
    if wide:
        blocks = cute.ceil_div(y.shape[0], 128)
    fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(grid=[blocks, 1, 1], block=[128, 1, 1])


@cute.jit
def without_stream(y: cute.Tensor, wide: bool):
    on_the_default_stream(y, wide)


def flagged(stream=False):
    """A truth value that is known at launch alone; `stream`: one is given, and is not launched on."""
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return (on_the_default_stream, (y, True, CUstream(0))) if stream else (without_stream, (y, True))


@cute.jit
def with_defaults(y: cute.Tensor, stream: CUstream = DEFAULT):
    fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def defaulted():
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return with_defaults, (y, CUstream(0))


@cute.jit
def volume(y: cute.Tensor, a: cutlass.Int32, b: cutlass.Int32, c: cutlass.Int32, stream: CUstream):
    count = cutlass.Int64(a * b * c)
    fill_kernel(y, y.iterator, count).launch(grid=[a, b, c], block=[128, 1, 1], stream=stream)


def volumes():
    """Three numbers of which the product has 32 bits, and a tensor of six extents."""
    shape = tuple(cute.sym_int() for _ in range(6))
    strides = (*(cute.sym_int64() for _ in range(5)), 1)
    y = make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)
    return volume, (y, cutlass.Int32(1), cutlass.Int32(1), cutlass.Int32(1), CUstream(0))


@cute.jit
def some_of(y: cute.Tensor, sizes: tuple, stream: CUstream):
    fill_kernel(y, y.iterator, sizes[0]).launch(grid=[sizes[1], 1, 1], block=[128, 1, 1], stream=stream)


def sized():
    """An integer that is an extent of a tensor, and one that is not."""
    n = cute.sym_int64(divisibility=4)
    y = make_fake_tensor(cutlass.Float32, (n,), (1,), assumed_align=4)
    return some_of, (y, (n, cute.sym_int()), CUstream(0))


@cute.jit
def configured(
    y: cute.Tensor, early: bool, threads: cutlass.Int64, shared: cutlass.Int32, priority: cutlass.Int32,
    stream: CUstream,
):  # fmt: skip
    """One launch or two."""
    cute.printf("%d threads", threads)
    fill_kernel(y, y.iterator, cutlass.Int64(priority)).launch(
        grid=[priority, 1, 1], block=[cutlass.Int32(threads), 1, 1], smem=shared, stream=stream, use_pdl=early
    )
    if early:
        fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def configuring(early=True):
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    numbers = cutlass.Int64(64), cutlass.Int32(1024), cutlass.Int32(1)
    return configured, (y, early, *numbers, CUstream(0))


def _blocks(what):
    device = HardwareInfo()
    count = device.get_device_multiprocessor_count
    ways = {
        "multiprocessors": lambda: count(),
        "even": lambda: count() // 2 * 2,
        "half": lambda: count() // 2,
        "clusters": lambda: device.get_max_active_clusters(2),
        "other clusters": lambda: device.get_max_active_clusters(4),
        "both": lambda: count() + device.get_max_active_clusters(2),
    }
    return ways[what]()


@cute.jit
def for_the_device(y: cute.Tensor, what: cutlass.Constexpr, stream: CUstream):
    """A persistent kernel that asks for its grid itself."""
    cluster = 2 if "clusters" in what else 1
    blocks = cluster * cutlass.min(_blocks(what), cute.ceil_div(y.shape[0], 128))
    fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(
        grid=[blocks, 1, 1], block=[128, 1, 1], cluster=[cluster, 1, 1], stream=stream
    )


def asking(what):
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return for_the_device, (y, what, CUstream(0))


@cute.jit
def of_so_many(y: cute.Tensor, clusters: cutlass.Constexpr, what: cutlass.Constexpr, stream: CUstream):
    """A persistent kernel that is given its clusters of two, as many examples of CUTLASS are."""
    blocks = 2 * cutlass.min(clusters, cute.ceil_div(y.shape[0], 128))
    if cutlass.const_expr(what is not None):
        blocks = cutlass.min(blocks, _blocks(what))
    fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(
        grid=[blocks, 1, 1], block=[128, 1, 1], cluster=[2, 1, 1], stream=stream
    )


def asking_itself(what="clusters", more=None):
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return of_so_many, (y, _blocks(what), more, CUstream(0))


@cute.jit
def four_blocks(y: cute.Tensor, shared: cutlass.Constexpr, stream: CUstream):
    fill_kernel(y, y.iterator, cutlass.Int64(0)).launch(
        grid=[1, 1, 1], block=[128, 1, 1], smem=shared, min_blocks_per_mp=4, stream=stream
    )


def dense(bytes=16 * 1024):
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return four_blocks, (y, bytes, CUstream(0))


@cute.jit
def from_a_round_address(y: cute.Tensor, stream: CUstream):
    fill_kernel(y, y.iterator.align(64) + 128, cutlass.Int64(0)).launch(
        grid=[1, 1, 1], block=[128, 1, 1], stream=stream
    )


def rounded():
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return from_a_round_address, (y, CUstream(0))


@cute.kernel
def choose_kernel(x: cute.Tensor, y: cute.Tensor, memory: cute.Tensor, value: cutlass.Constexpr):
    thread = cute.arch.thread_idx()[0]
    if x[thread]:
        memory[thread] = cutlass.Int32(value)
        y[thread] = memory[thread]


@cute.jit
def choose(stream: CUstream, value: "Known", **tensors: cute.Tensor):
    choose_kernel(tensors["x"], tensors["y"], tensors["memory"], value).launch(
        grid=[1, 1, 1], block=[32, 1, 1], stream=stream
    )


def chosen(dtype="Boolean"):
    """Tensors by `**`, of truth values too; an annotation as text, of a name that is another's."""
    x, y = (make_fake_tensor(item, (cute.sym_int(),), (1,)) for item in (getattr(cutlass, dtype), cutlass.Int32))
    memory = make_fake_tensor(cutlass.Int32, (32,), (1,))
    return choose, (CUstream(0), 7), {"x": x, "y": y, "memory": memory}


@cute.jit
def of_one_name(options: Options, options_factor: cutlass.Float32, stream: CUstream):
    pass


def clashing():
    return of_one_name, (Options(cutlass.Float32(1), cutlass.Int32(0)), cutlass.Float32(1), CUstream(0))


def plainly():
    """Numbers of Python, in the types that the host function states."""
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return fill, (y, make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=16), 7, 4, CUstream(0))


@cute.jit
def record_event(y: cute.Tensor, done: CUevent, stream: CUstream):
    fill_kernel(y, y.iterator, cutlass.Int64(1)).launch(
        grid=[1, 1, 1], block=[128, 1, 1], stream=stream, programmatic_event=done
    )


def recording():
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    return record_event, (y, CUevent(0), CUstream(0))


@cute.jit
def take_anything(y: cute.Tensor, what, stream: cudaStream_t):
    fill_kernel(y, y.iterator, cutlass.Int64(1)).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def anything(kind="None"):
    """An argument of a type that may be one that no record knows; the runtime's stream."""
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    what = {"None": None, "dict": {"a": y}, "set": {1}, "function": len}[kind]
    return take_anything, (y, what, cudaStream_t(0))


@cute.kernel
def copy_rows_kernel(x: cute.Tensor, y: cute.Tensor):
    row, column = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    y[row, column] = x[row, column]


@cute.jit
def copy_rows(x: cute.Tensor, y: cute.Tensor, stream: CUstream):
    copy_rows_kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[128, 1, 1], stream=stream)


def rows(bits=32):
    """Rows of 128, apart by a stride of so many bits; 0: a fixed one."""
    m = cute.sym_int()

    def matrix():
        stride = {0: 128, 32: cute.sym_int(), 64: cute.sym_int64()}[bits]
        return make_fake_tensor(cutlass.Float16, (m, 128), (stride, 1), assumed_align=2)

    return copy_rows, (matrix(), matrix(), CUstream(0))


@cute.jit
def map_by_sizes(x: cute.Pointer, m: cutlass.Int32, n: cutlass.Int32, stream: CUstream):
    n = cute.assume(n, divby=64)
    view = cute.make_tensor(x, cute.make_ordered_layout((m, n), order=(1, 0)))
    layout = cute.make_layout((64, 64), stride=(64, 1))
    load, _ = cute.nvgpu.cpasync.make_tiled_tma_atom(
        cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp(), view, layout, (64, 64)
    )
    map_kernel(load).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def mapped_by_sizes():
    """A tensor map over a pointer, as large as two numbers say."""
    x = make_ptr(cutlass.BFloat16, 0, cute.AddressSpace.gmem, assumed_align=128)
    return map_by_sizes, (x, cutlass.Int32(256), cutlass.Int32(256), CUstream(0))


@cute.kernel
def sum_kernel(y: cute.Tensor, a: cutlass.Int8, b: cutlass.Int16, c: cutlass.Uint8):
    y[0] = cutlass.Float32(a) + cutlass.Float32(b) + cutlass.Float32(c)


@cute.jit
def of_small_numbers(
    y: cute.Tensor, a: cutlass.Int8, b: cutlass.Int16, c: cutlass.Uint8, d: cutlass.Uint16, stream: CUstream
):
    sum_kernel(y, a, b, c).launch(grid=[cutlass.Int32(d), 1, 1], block=[32, 1, 1], stream=stream)


def small_numbers():
    """Integers of 8 and 16 bits."""
    y = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    numbers = cutlass.Int8(1), cutlass.Int16(2), cutlass.Uint8(3), cutlass.Uint16(4)
    return of_small_numbers, (y, *numbers, CUstream(0))

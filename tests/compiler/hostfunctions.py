"""Small host functions, each with one thing that a launch may be made of, for the tests of the reader."""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from fusekit.abi import Dim, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import HostScalar, HostStream, HostTensor, Signature, TracePlan

THREADS = 32


@cute.kernel
def store(x: cute.Tensor, value: cutlass.Int32):
    x[0] = cutlass.Float32(value)


@cute.kernel
def store_float(x: cute.Tensor, value: cutlass.Float32):
    x[0] = value


@cute.kernel
def store_wide(x: cute.Tensor, value: cutlass.Int64):
    x[0] = cutlass.Float32(cutlass.Int32(value))


@cute.kernel
def divide(x: cute.Tensor, divisor: cute.FastDivmodDivisor):
    block, _, _ = cute.arch.block_idx()
    quotient, rest = divmod(block, divisor)
    x[quotient] = cutlass.Float32(cutlass.Int32(rest))


@cute.jit
def tiles(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(grid=(cute.ceil_div(x.shape[0], 128), 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def fast_division(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    count = cute.ceil_div(x.shape[0], 128)
    divisor = cute.fast_divmod_create_divisor(count)
    divide(x, divisor).launch(grid=(count, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def branch(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    value = cutlass.Int32(0)
    if n > 5:
        if x.shape[0] % 3 == 0:  # noqa: SIM108
            value = n * 2
        else:
            value = n - x.shape[0]
    else:
        value = cute.ceil_div(x.shape[0], 64)
    store(x, value).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def floats(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store_float(x, scale * 1.4426950408889634 - 0.5).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def two(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
    store_float(x, scale).launch(
        grid=(cute.ceil_div(x.shape[0], 256), 1, 1), block=(2 * THREADS, 1, 1), cluster=(1, 1, 1), smem=4096,
        stream=stream,
    )  # fmt: skip


@cute.jit
def inside(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    half = cute.make_tensor(x.iterator + x.shape[0] // 2, cute.make_layout((1,)))
    store(half, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def cooperative(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(
        grid=(32, 1, 1), block=(THREADS, 1, 1), cluster=(16, 1, 1), cooperative=True, use_pdl=True, stream=stream
    )


@cute.jit
def overflow(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    wide = cutlass.Int64(x.shape[0] * x.shape[0])
    store_wide(x, wide).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def wide_number(x: cute.Tensor, n: cutlass.Int64, scale: cutlass.Float32, stream: cuda.CUstream):
    store_wide(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def either(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    if n > 5:
        wide = cutlass.Int64(x.shape[0] * n)
        store_wide(x, wide).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
    elif n > 0:
        store_float(x, scale).launch(
            grid=(4, 1, 1), block=(THREADS, 1, 1), cluster=(4, 1, 1), fallback_cluster=(2, 1, 1), stream=stream
        )


def same(function):
    return function


@same
@cute.kernel
def store_decorated(x: cute.Tensor, value: cutlass.Int32):
    x[0] = cutlass.Float32(value)


@cute.jit
def decorated(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store_decorated(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def loop(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    total = cutlass.Int32(1)
    for i in cutlass.range(n):
        total = total + i
    store(x, n).launch(grid=(total, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def store_double(x: cute.Tensor, value: cutlass.Float64, half: cutlass.BFloat16):
    x[0] = cutlass.Float32(value) + half.to(cutlass.Float32)


@cute.jit
def roots(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    rows = cutlass.Float64(x.shape[0])
    chosen = scale if scale > cutlass.Float32(n) else cute.math.rsqrt(cutlass.Float32(n) + scale)
    inverse = cutlass.Float64(1.0) / cute.math.sqrt(rows)
    store_double(x, inverse, chosen.to(cutlass.BFloat16)).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def next_power(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    power = cutlass.Int32(1)
    while power < n:
        power = power * 2
    store(x, n).launch(grid=(power, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def idle_loop(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    total = cutlass.Int32(1)
    for i in cutlass.range(n):
        total = total + i
    store(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def many(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    for _ in cutlass.range(n):
        store(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def float_grid(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(grid=(cutlass.Int32(scale * 4.0), 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def integers_of_floats(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    share = cutlass.Uint32(cute.math.ceil(scale * cutlass.Float32(x.shape[0])))
    wide = cutlass.Int64(cutlass.Float64(scale) * -3.0)
    if scale < 2.0:
        store_wide(x, wide).launch(grid=(cute.ceil_div(share, 128), 1, 1), block=(THREADS, 1, 1), stream=stream)
    small = cutlass.Int32(cutlass.Int16(cute.math.floor(scale)))
    store(x, small).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def sizes_of_floats(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    whole = cute.math.trunc(cute.math.absf(scale * 0.5))
    store_float(x, whole).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
    store(x, cutlass.Int32(whole) if whole < 1e6 else n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def with_events(x: cute.Tensor, ready: cuda.CUevent, begun: cuda.CUevent, stream: cuda.CUstream):
    store(x, cutlass.Int32(1)).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True, programmatic_event=ready,
        programmatic_event_trigger_at_block_start=1, launch_completion_event=begun, launch_completion_event_flags=1,
    )  # fmt: skip
    store(x, x.shape[0]).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, programmatic_event=begun)


def plan_with_events() -> TracePlan:
    """x [M] f32, and two events."""
    handles = tuple(ScalarArgument(name, "i64", None, 1, 2**63 - 1) for name in ("ready", "begun"))
    whole = plan(with_events)
    return replace(
        whole, arguments=(whole.arguments[0], cuda.CUevent(0), cuda.CUevent(0), cuda.CUstream(0)),
        host_arguments=(HostTensor("x"), HostScalar("ready"), HostScalar("begun"), HostStream()),
        signature=replace(whole.signature, arguments=(whole.signature.arguments[0], *handles)),
    )  # fmt: skip


@cute.jit
def power(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store_float(x, cute.math.exp2(scale)).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def other_stream(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def by_size(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    store(x, n).launch(grid=(1, 1, 1), block=(n, 2, 1), smem=4 * x.shape[0], stream=stream)


@cute.jit
def nothing(x: cute.Tensor, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream):
    pass


def plan(function) -> TracePlan:
    """x [M] f32, n i32, scale f32."""
    signature = Signature(
        arch="sm_90a",
        arguments=(
            TensorArgument("x", "output", "f32", ("M",), (1,), alignment=16),
            ScalarArgument("n", "i32"),
            ScalarArgument("scale", "f32"),
        ),
        dims=(Dim("M", divisor=4, minimum=4, maximum=2**30),),
    )
    fake = make_fake_tensor(cutlass.Float32, (cute.sym_int(divisibility=4),), (1,), assumed_align=16)
    return TracePlan(
        function,
        (fake, cutlass.Int32(1), cutlass.Float32(1.0), cuda.CUstream(0)),
        (HostTensor("x"), HostScalar("n"), HostScalar("scale"), HostStream()),
        signature,
    )


@cute.jit
def of_all_kinds(
    pair: tuple, width: cutlass.Constexpr, absent, n: cutlass.Int32, scale: cutlass.Float32, stream: cuda.CUstream
):
    first, second = pair
    store(first, n).launch(grid=(1, 1, 1), block=(width, 1, 1), stream=stream)
    store_float(second, scale).launch(grid=(1, 1, 1), block=(width, 1, 1), stream=stream)

"""y = silu(scale x) + residual, one pass over flat bf16 tensors."""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

THREADS = 256
VECTOR = 8  # bf16 in 16 bytes, what a thread loads at once


@cute.kernel
def _fuse(x: cute.Tensor, residual: cute.Tensor, y: cute.Tensor, scale: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < cute.size(x, mode=[1]):
        value = x[(None, index)].load().to(cutlass.Float32) * scale
        value = value / (1.0 + cute.math.exp(-value, fastmath=True))
        value = value + residual[(None, index)].load().to(cutlass.Float32)
        y[(None, index)].store(value.to(y.element_type))


@cute.jit
def silu_add(x: cute.Tensor, residual: cute.Tensor, y: cute.Tensor, scale: cutlass.Float32, stream: CUstream):
    """x, residual, y: bf16 [n], n a multiple of 8, 16-byte aligned."""
    vectors = tuple(cute.zipped_divide(tensor, (VECTOR,)) for tensor in (x, residual, y))
    blocks = cute.ceil_div(cute.size(vectors[0], mode=[1]), THREADS)
    _fuse(*vectors, scale).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def arguments():
    """What `cute.compile` takes: the callable, and fakes of its arguments."""
    n = cute.sym_int(divisibility=VECTOR)
    x, residual, y = (make_fake_tensor(cutlass.BFloat16, (n,), (1,), assumed_align=16) for _ in range(3))
    return silu_add, (x, residual, y, cutlass.Float32(1.0), CUstream(0))

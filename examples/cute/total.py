"""y[0] = sum of x, in two launches: every block sums a part of x, then one block sums the blocks' sums."""

import operator

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

THREADS = 256
WARPS = THREADS // 32
BLOCKS = 256


@cute.kernel
def _sum(x: cute.Tensor, sums: cute.Tensor):
    """Block b of B: sums[b] = x[b T + t] + x[(b + B) T + t] + ... over its T threads t, always in one order."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    total = Float32(0.0)
    for index in cutlass.range(block * THREADS + thread, x.shape[0], blocks * THREADS):
        total += x[index]
    total = cute.arch.warp_reduction(total, operator.add)
    this_warp = cute.arch.warp_idx()  # a shuffle, which all lanes must take part in
    of_warps = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
    if cute.arch.lane_idx() == 0:
        of_warps[this_warp] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            total += of_warps[warp]
        sums[block] = total


@cute.jit
def total(x: cute.Tensor, y: cute.Tensor, sums: cute.Tensor, stream: CUstream):
    """x: f32 [n]. y: f32 [1]. sums: f32 [BLOCKS], what the first launch leaves to the second."""
    _sum(x, sums).launch(grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    _sum(sums, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def arguments():
    """What `cute.compile` takes: the callable, and fakes of its arguments."""
    x, y, sums = (make_fake_tensor(Float32, (n,), (1,), assumed_align=4) for n in (cute.sym_int(), 1, BLOCKS))
    return total, (x, y, sums, CUstream(0))

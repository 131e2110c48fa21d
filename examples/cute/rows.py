"""y[m] = sum over n of x[m, n]^2: a cluster of blocks shares a row, and adds up in distributed shared memory."""

import operator

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

THREADS = 256
WARPS = THREADS // 32


class SquareSum:
    """Rows of any length. cluster: blocks that share a row, 1-8."""

    def __init__(self, cluster: int):
        self.cluster = cluster

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        """x: f32 [m, n], stride 1 in n. y: f32 [m]."""
        self.kernel(x, y).launch(
            grid=(self.cluster * x.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block // self.cluster
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = SmemAllocator()
        of_warps = smem.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        of_blocks = smem.allocate_tensor(Int32, cute.make_layout(self.cluster), byte_alignment=16)
        arrived = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

        total = Float32(0.0)
        for column in cutlass.range(rank * THREADS + thread, x.shape[1], self.cluster * THREADS):
            value = x[row, column]
            total += value * value
        total = cute.arch.warp_reduction(total, operator.add)
        if lane == 0:
            of_warps[warp] = total
        cute.arch.sync_threads()
        cute.arch.cluster_wait()  # the peers' barriers are there

        if thread == 0:
            total = Float32(0.0)
            for each in cutlass.range_constexpr(WARPS):
                total += of_warps[each]
            if rank == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, 4 * self.cluster)
            # The bits of this block's sum go to the first block's memory, and count there.
            cute.arch.store_async_dsmem(of_blocks.iterator + rank, total.bitcast(Int32), arrived, Int32(0))
            if rank == 0:
                cute.arch.mbarrier_wait(arrived, 0)
                total = Float32(0.0)
                for peer in cutlass.range_constexpr(self.cluster):
                    total += Int32(of_blocks[peer]).bitcast(Float32)
                y[row] = total


def arguments(cluster: int):
    """What `cute.compile` takes: the callable, and fakes of its arguments."""
    m, n = cute.sym_int(), cute.sym_int()
    x = make_fake_tensor(Float32, (m, n), (cute.sym_int64(), 1), assumed_align=4)
    y = make_fake_tensor(Float32, (m,), (1,), assumed_align=4)
    return SquareSum(cluster), (x, y, CUstream(0))

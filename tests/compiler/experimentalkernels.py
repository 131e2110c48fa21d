"""Kernels of cute.experimental, for specs with op = "extern"."""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute import experimental
from cutlass.cute.runtime import make_fake_tensor


@experimental.kernel(attributes={"lir.tma_update_mode": "smem"})
def gather_kernel(pointers: cute.Tensor, y: cute.Tensor):
    """Row b of each of the matrices [64, 64] at `pointers`, by one tensor map that is changed for each of them."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    layout = cute.make_layout((64, 64, 1), stride=(64, 1, 4096))
    tile = experimental.allocate(cutlass.Float16, cute.AddressSpace.smem, layout, alignment=1024)
    pipe = experimental.TMAToAsyncPipeline.create(
        num_stages=1, consumer=experimental.OperationTypeEnum.LD_SHARED, consumer_arv_count=96
    )
    for i in range(cute.size(pointers)):
        pointer = cute.make_ptr(cutlass.Float16, pointers[i], mem_space=cute.AddressSpace.gmem, assumed_align=16)
        if warp == 3:
            matrix = cute.make_tensor(pointer, layout=cute.make_layout((64, 64), stride=(64, 1)))
            token, stage = pipe.producer_acquire_and_get_stage()
            barrier = experimental.get_mbarrier(token)
            whole = cute.make_identity_layout((64, 64))
            experimental.tma_load(matrix, tile[None, None, stage], barrier, cta_v_map=whole)
            pipe.producer_commit_and_advance()
        if warp < 3:
            _, stage = pipe.consumer_wait_and_get_stage()
            if thread < 64:
                y[block, i, thread] = tile[block, thread, stage]
            pipe.consumer_release_and_advance()


@experimental.jit
def gather(pointers: cute.Tensor, y: cute.Tensor, stream: CUstream):
    for _ in cutlass.range_constexpr(2):
        gather_kernel(pointers, y).launch(
            grid=[cute.size(y, mode=[0]), 1, 1], block=[128, 1, 1], smem=128 << 10, stream=stream
        )


def gathered():
    n = cute.sym_int()
    pointers = make_fake_tensor(cutlass.Int64, (n,), (1,), assumed_align=16)
    y = make_fake_tensor(cutlass.Float16, (cute.sym_int(), n, 64), (cute.sym_int(64), 64, 1), assumed_align=16)
    return gather, (pointers, y, CUstream(0))

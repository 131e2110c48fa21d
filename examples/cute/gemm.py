"""c = a b^T on Hopper: persistent blocks, operands by TMA through a pipeline, warpgroup MMA, bf16 in and out.

Warp 4 loads: boxes of a [128, 64] and b [128, 64] into `STAGES` stages. Warps 0-3 are the MMA warpgroup: they multiply
a tile of 128 x 128 and store it. Every block takes the tiles `block`, `block + grid`, ...
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum, hopper_helpers

TILE = (128, 128, 64)
STAGES = 5
THREADS = 160
MMA_WARPS = 4
LOAD_WARP = 4


@cute.kernel
def _gemm(
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    mma: cute.TiledMma,
    smem_a: cute.ComposedLayout,
    smem_b: cute.ComposedLayout,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == LOAD_WARP:
        cpasync.prefetch_descriptor(load_a)
        cpasync.prefetch_descriptor(load_b)

    smem = SmemAllocator()
    s_a = smem.allocate_tensor(BFloat16, smem_a.outer, byte_alignment=1024, swizzle=smem_a.inner)
    s_b = smem.allocate_tensor(BFloat16, smem_b.outer, byte_alignment=1024, swizzle=smem_b.inner)
    stage_bytes = (TILE[0] + TILE[1]) * TILE[2] * BFloat16.width // 8
    stages = pipeline.PipelineTmaAsync.create(
        barrier_storage=smem.allocate_array(Int64, 2 * STAGES),
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, MMA_WARPS),
        tx_count=stage_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )

    # (tile rows, tile depth, row tiles, depth tiles)
    g_a = cute.local_tile(a, (TILE[0], TILE[2]), (None, None))
    g_b = cute.local_tile(b, (TILE[1], TILE[2]), (None, None))
    g_c = cute.local_tile(c, TILE[:2], (None, None))
    at = cute.local_tile(cute.make_identity_tensor(c.shape), TILE[:2], (None, None))
    one = cute.make_layout(1)
    to_a, from_a = cpasync.tma_partition(load_a, 0, one, cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2))
    to_b, from_b = cpasync.tma_partition(load_b, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2))
    depth = cute.size(g_a, mode=[3])
    row_tiles = cute.size(g_c, mode=[2])
    tiles = row_tiles * cute.size(g_c, mode=[3])

    if warp == LOAD_WARP:
        filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        for tile in cutlass.range(block, tiles, blocks):
            m, n = tile % row_tiles, tile // row_tiles
            for k in cutlass.range(depth):
                stages.producer_acquire(filling)
                full = stages.producer_get_barrier(filling)
                cute.copy(load_a, from_a[(None, m, k)], to_a[(None, filling.index)], tma_bar_ptr=full)
                cute.copy(load_b, from_b[(None, n, k)], to_b[(None, filling.index)], tma_bar_ptr=full)
                stages.producer_commit(filling)
                filling.advance()
        stages.producer_tail(filling)

    if warp < LOAD_WARP:
        thread_mma = mma.get_slice(thread)
        operand_a = mma.make_fragment_A(thread_mma.partition_A(s_a))
        operand_b = mma.make_fragment_B(thread_mma.partition_B(s_b))
        out = thread_mma.partition_C(g_c)
        where = thread_mma.partition_C(at)
        sums = cute.make_rmem_tensor(out.shape[:3], Float32)
        reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for tile in cutlass.range(block, tiles, blocks):
            m, n = tile % row_tiles, tile // row_tiles
            sums.fill(0.0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for _ in cutlass.range(depth):
                stages.consumer_wait(reading)
                warpgroup.fence()
                for step in cutlass.range_constexpr(cute.size(operand_a, mode=[2])):
                    part = (None, None, step, reading.index)
                    cute.gemm(mma, sums, operand_a[part], operand_b[part], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                stages.consumer_release(reading)
                reading.advance()
            to = out[(None, None, None, m, n)]
            coordinates = where[(None, None, None, m, n)]
            for i in cutlass.range_constexpr(cute.size(sums)):
                if cute.elem_less(coordinates[i], c.shape):
                    to[i] = sums[i].to(c.element_type)


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, blocks: Int32, stream: CUstream):
    """a [M, K], b [N, K], c [M, N]: bf16, row-major, rows 16-byte aligned. blocks: at most so many, one a SM."""
    mma = hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, TILE[1])
    )
    smem_a = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, TILE, BFloat16, STAGES)
    smem_b = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, TILE, BFloat16, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_a, view_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(smem_a, (None, None, 0)), (TILE[0], TILE[2]))
    load_b, view_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(smem_b, (None, None, 0)), (TILE[1], TILE[2]))
    tiles = cute.ceil_div(c.shape[0], TILE[0]) * cute.ceil_div(c.shape[1], TILE[1])
    _gemm(load_a, view_a, load_b, view_b, c, mma, smem_a, smem_b).launch(
        grid=(cutlass.min(blocks, tiles), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def arguments():
    """What `cute.compile` takes: the callable, and fakes of its arguments."""
    m, n, k = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    a, b, c = (
        make_fake_tensor(BFloat16, shape, (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        for shape in ((m, k), (n, k), (m, n))
    )
    return gemm, (a, b, c, Int32(1), CUstream(0))

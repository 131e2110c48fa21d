"""dbias of a backward epilogue whose dz is turned: what the fourth warpgroup adds up of each column of a block of 128
tokens, and the launch that adds up the blocks of each group.

The sums lie at the front of scratch memory, [P / 128, columns of dz] in float32, as the scales of the transpose do. A
thread of the second launch has four columns of a group.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Operand
from fusekit.kernels.gemm.parts import VECTOR, memory, sum_of_parts
from fusekit.kernels.gemm.sm90.scheduler import blocks_between
from fusekit.plan.quant import SIDE

THREADS = 128
WIDTH = THREADS * VECTOR  # columns of a block of threads


class BlockSums(Operand):
    def parameter(self, given):
        return memory(given)

    def front(self, given):
        columns, tokens = given.dz_t.shape
        return Int64(tokens // SIDE) * columns

    def then(self, given, groups, stream) -> None:
        columns, many = given.dz_t.shape[0], Int32(1) if groups is None else groups
        offsets = None if groups is None else given.offsets.iterator
        self.add_up(memory(given), given.dbias.iterator, offsets, given.dz_q.shape[0], columns).launch(
            grid=[many * ((columns + (WIDTH - 1)) // WIDTH), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add_up(self, sums, dbias, offsets, rows: Int32, columns: Int32):
        """A block has WIDTH columns of a group."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        across = ptx.divide(columns + (WIDTH - 1), WIDTH)
        group = ptx.divide(block, across)
        column = (block - group * across) * WIDTH + thread * VECTOR
        before, begin, end = Int32(0), Int32(0), rows
        if cutlass.const_expr(offsets is not None):
            before = blocks_between(offsets, rows, Int32(0), group, cute.arch.lane_idx())
            end = cutlass.min(offsets[group], rows)
            if group > 0:
                begin = cutlass.max(offsets[group - 1], 0)
        if column < columns:  # of which there is a multiple of VECTOR
            blocks = ptx.divide(cutlass.max(end - begin, 0) + (SIDE - 1), SIDE)
            first = sums.toint() + (Int64(before) * columns + column) * 4
            total = sum_of_parts(first, Int64(columns) * 4, blocks)
            for index in cutlass.range_constexpr(VECTOR):
                cute.arch.store(dbias + (Int64(group) * columns + column + index), Float32(total[index]))

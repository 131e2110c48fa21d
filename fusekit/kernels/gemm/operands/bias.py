"""A group's bias, added to the accumulators: float32 in shared memory, a row for each consumer warpgroup."""

import cutlass
from cutlass import Float32, Int32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Operand


def bias_barrier(warpgroup: Int32) -> Int32:
    """Named barrier of one consumer warpgroup."""
    return warpgroup + 3


class Bias(Operand):
    step = 2

    def parameter(self, given):
        return given.bias.iterator

    def begin(self, shared, warpgroup):
        tile_n = self.plan.tile[1]
        memory = cute.recast_ptr(shared.bias, dtype=Float32)
        return cute.make_tensor(memory + warpgroup * tile_n, cute.make_layout(tile_n))

    @cute.jit
    def prepare(self, tile, work, own):
        """The tile's bias into shared memory, zero beyond N."""
        tile_n, threads = self.plan.tile[1], self.plan.arch.warpgroup
        bias, n = work.operands.bias, work.extents.n
        cute.arch.barrier(barrier_id=bias_barrier(work.warpgroup), number_of_threads=threads)
        for step in cutlass.range_constexpr((tile_n + threads - 1) // threads):
            column = work.thread + step * threads
            if column < tile_n:
                source = self.column_of(column, tile.n_tile, work.extents.half_n)
                value = Float32(0.0)
                if source < n:
                    value = Float32(bias[cutlass.Int64(tile.group) * n + source])
                own[column] = value
        cute.arch.barrier(barrier_id=bias_barrier(work.warpgroup), number_of_threads=threads)

    def column_of(self, column: Int32, n_tile: Int32, half_n: Int32) -> Int32:
        """Column of the product in memory for column `column` of the tile."""
        tile_n = self.plan.tile[1]
        if self.plan.halved and self.plan.glu_layout == "concat":
            half = tile_n // 2
            side = ptx.divide(column, half)
            return n_tile * half + column - side * half + side * half_n
        return n_tile * tile_n + column

    def chunk(self, chunk: int, state):
        lane = cute.arch.lane_idx()
        return ptx.load_shared_f32x2(state.iterator.toint() + (chunk * 8 + (lane & 3) * 2) * 4)

    def accumulate(self, value, state, chunk, c: int):
        return value + chunk[c]

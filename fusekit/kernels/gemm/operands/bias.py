"""A group's bias, added to the accumulators: float32 in shared memory, a row for each consumer warpgroup."""

import cutlass
from cutlass import Float32, Int32, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.plan.gemm import COLUMNS


class Columns(DeviceOperand):
    """Numbers by group and column of the product, of which each tile has its own in shared memory."""

    name = "bias"  # of the parameter, and of the region

    def begin(self, shared, warpgroup):
        tile_n = self.plan.tile[1]
        memory = cute.recast_ptr(getattr(shared, self.name), dtype=Float32)
        return cute.make_tensor(memory + warpgroup * tile_n, cute.make_layout(tile_n))

    @cute.jit
    def fetch(self, tile, work, warp_state):
        """The tile's numbers into shared memory, zero beyond N."""
        tile_n, threads = self.plan.tile[1], self.plan.arch.warpgroup
        numbers, n = getattr(work.operands, self.name), work.extents.n
        barrier = work.warpgroup + self.plan.named_barrier(COLUMNS)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        for step in cutlass.range_constexpr((tile_n + threads - 1) // threads):
            column = work.thread + step * threads
            if column < tile_n:
                source = self.column_of(column, tile.n_tile, work.extents.half_n)
                value = Float32(0.0)
                if source < n:
                    value = Float32(numbers[cutlass.Int64(tile.group) * n + source])
                warp_state[column] = value
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

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


class Bias(Columns):
    step = 2

    def parameter(self, given):
        return given.bias.iterator

    def prepare(self, tile, work, warp_state) -> None:
        self.fetch(tile, work, warp_state)

    def accumulate(self, value, state, chunk, c: int):
        return value + chunk[c]

"""quantise with one scale a row: a warp reads its row twice, the second time from a cache."""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide
from fusekit.kernels.quantise import codes
from fusekit.plan.quantise import WARPS

COLUMNS = 16  # of a lane, at a time
AHEAD = 4  # pieces of a row that a warp has in flight


class QuantiseRows:
    """The kernel; calling it traces host function and device code."""

    def __init__(self, scales: str) -> None:
        self.scales = scales

    @cute.jit
    def __call__(self, x: cute.Tensor, x_q: cute.Tensor, x_s: cute.Tensor, stream: CUstream):
        """Launch. x [M, K]."""
        self.kernel(
            x.iterator, x_q.iterator, x_s.iterator, x.shape[0], x.shape[1], Int64(x.stride[0]), Int64(x_q.stride[0])
        ).launch(grid=[(x.shape[0] + (WARPS - 1)) // WARPS, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, x_q: cute.Pointer, x_s: cute.Pointer, rows: Int32, columns: Int32, x_stride: Int64,
        q_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        row = block * WARPS + cute.arch.make_warp_uniform(divide(thread, WARP))
        if row < rows:
            source = x.toint() + Int64(row) * x_stride * 2
            a = Float32(0.0)
            for first in cutlass.range(lane * COLUMNS, columns, WARP * COLUMNS * AHEAD, unroll=1):
                for most in codes.numbers(codes.largest(self.load(source, first, columns))):
                    a = codes.larger(a, most)
            for distance in cutlass.range_constexpr(5):
                a = codes.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
            scale, inverse = codes.scale_of(a, self.scales)
            lanes.store(x_s.toint() + Int64(row) * 4, [lanes.bits_of(scale)], 4, lane == 0)
            target = x_q.toint() + Int64(row) * q_stride
            for first in cutlass.range(lane * COLUMNS, columns, WARP * COLUMNS * AHEAD, unroll=1):
                words = self.load(source, first, columns)
                for piece in cutlass.range_constexpr(AHEAD):
                    own = words[piece * (COLUMNS // 2) : (piece + 1) * (COLUMNS // 2)]
                    numbers = [half for word in own for half in codes.halves(word)]
                    packed = [codes.four_codes(numbers[at : at + 4], inverse) for at in range(0, COLUMNS, 4)]
                    column = first + piece * (WARP * COLUMNS)
                    lanes.store(target + Int64(column), packed, 16, column < columns)

    def load(self, source: Int64, first: Int32, columns: Int32) -> list:
        """A lane's words of AHEAD pieces from column `first` on; zeros past the row's end."""
        words = []
        for piece in range(AHEAD):
            column = first + piece * (WARP * COLUMNS)
            at = source + Int64(column) * 2
            words += [*lanes.load(at, 16, column < columns), *lanes.load(at, 16, column < columns, 0, 16)]
        return words

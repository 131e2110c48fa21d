"""quantise with one scale a row: two warps have the row in registers, or read a long one twice."""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide
from fusekit.kernels.quantise import fp8
from fusekit.plan.quantise import WARPS

COLUMNS = 16  # of a thread, at a time
WORDS = COLUMNS // 2
SHARE = 2  # warps that share a row
ROWS = WARPS // SHARE  # of a thread block
PIECE = SHARE * WARP * COLUMNS
SHORT, LONG = 3, 7  # pieces of a row that its threads keep: 3072 and 7168 columns
AHEAD = 4  # those of a longer row that are in flight


class QuantiseRows:
    """The kernel; calling it traces host function and device code."""

    def __init__(self, scales: str) -> None:
        self.scales = scales

    @cute.jit
    def __call__(self, x: cute.Tensor, x_q: cute.Tensor, x_s: cute.Tensor, stream: CUstream):
        """Launch. x [M, K]."""
        self.kernel(
            x.iterator, x_q.iterator, x_s.iterator, x.shape[0], x.shape[1], Int64(x.stride[0]), Int64(x_q.stride[0])
        ).launch(grid=[(x.shape[0] + (ROWS - 1)) // ROWS, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, x_q: cute.Pointer, x_s: cute.Pointer, rows: Int32, columns: Int32, x_stride: Int64,
        q_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring."""
        shared = cutlass.memory.SmemAllocator().allocate(WARPS * 4, 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * ROWS + divide(thread, SHARE * WARP)
        longest, columns = columns, cutlass.select_(row < rows, columns, Int32(0))  # after the last row: nothing
        source, target = x.toint() + Int64(row) * x_stride * 2, x_q.toint() + Int64(row) * q_stride
        scale_target = (x_s.toint() + Int64(row) * 4, row < rows, shared, thread)
        if longest <= SHORT * PIECE:
            self.row(SHORT, source, target, scale_target, columns)
        elif longest <= LONG * PIECE:
            self.row(LONG, source, target, scale_target, columns)
        else:
            self.row_twice(source, target, scale_target, columns)

    @cute.jit
    def row(self, pieces: cutlass.Constexpr, source: Int64, target: Int64, scale_target, columns: Int32):
        """A row of at most so many pieces; what lies after its end costs no arithmetic."""
        first = (scale_target[-1] & (SHARE * WARP - 1)) * COLUMNS
        words = self.load(pieces, source, first, columns)
        inverse = self.scale(self.largest(words), *scale_target)
        for piece in cutlass.range_constexpr(pieces):
            if piece * PIECE < columns:
                part = words[piece * WORDS : (piece + 1) * WORDS]
                self.store(part, inverse, target, first + piece * PIECE, columns)

    @cute.jit
    def row_twice(self, source: Int64, target: Int64, scale_target, columns: Int32):
        """A longer row."""
        begin = (scale_target[-1] & (SHARE * WARP - 1)) * COLUMNS
        a = Float32(0.0)
        for first in cutlass.range(begin, columns, PIECE * AHEAD, unroll=1):
            a = fp8.larger(a, self.largest(self.load(AHEAD, source, first, columns)))
        inverse = self.scale(a, *scale_target)
        for first in cutlass.range(begin, columns, PIECE * AHEAD, unroll=1):
            words = self.load(AHEAD, source, first, columns)
            for piece in cutlass.range_constexpr(AHEAD):
                self.store(words[piece * WORDS : (piece + 1) * WORDS], inverse, target, first + piece * PIECE, columns)

    def largest(self, words: list) -> Float32:
        """Maximum of a thread's numbers."""
        return fp8.larger(*fp8.numbers(fp8.largest(words)))

    def scale(self, a: Float32, at: Int64, there, shared: Int32, thread: Int32) -> Float32:
        """The reciprocal of a row's scale, from a thread's largest number; stores the scale."""
        for distance in range(5):
            a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
        lanes.shared_store_u32(shared + divide(thread, WARP) * 4, lanes.bits_of(a))
        cute.arch.sync_threads()
        first = shared + divide(thread, SHARE * WARP) * (SHARE * 4)
        for warp in range(SHARE):
            a = fp8.larger(a, lanes.float_of(lanes.shared_load_u32(first + warp * 4)))
        scale, inverse = fp8.scale_of(a, self.scales)
        lanes.store(at, [lanes.bits_of(scale)], 4, there & ((thread & (SHARE * WARP - 1)) == 0))
        return inverse

    def store(self, words: list, inverse: Float32, target: Int64, column: Int32, columns: Int32) -> None:
        """A thread's FP8 values of one piece."""
        numbers = [half for word in words for half in fp8.halves(word)]
        packed = [fp8.four_values(numbers[first : first + 4], inverse) for first in range(0, COLUMNS, 4)]
        lanes.store(target + Int64(column), packed, 16, column < columns)

    def load(self, pieces: int, source: Int64, first: Int32, columns: Int32) -> list:
        """A thread's words of so many pieces from column `first` on; zeros past the row's end."""
        words = []
        for piece in range(pieces):
            column = first + piece * PIECE
            at = source + Int64(column) * 2
            words += [*lanes.load(at, 16, column < columns), *lanes.load(at, 16, column < columns, 0, 16)]
        return words

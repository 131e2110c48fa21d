"""moe-bias-bwd: the gradient of the second projection's bias, of rows that router weights multiply.

    grad_bias[e] = sum over the rows of expert e of row_scale[row] grad_y[token[row]]

A thread block has an expert and a line of its columns: a lane 16 bytes of them, a warp's access LINES rows. Lane by
lane, then over a warp, then over warps, a sum is in float32 and in the same order from launch to launch. Rows of other
experts are not read. Neighbouring blocks read the same columns, so that those of every token stay in L2.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.floats import fma
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, load_shared_f32, store_shared_f32

LINE = 128  # bytes of a row that a block sums
UNITS = LINE // 16  # lanes of a row
LINES = WARP // UNITS  # rows of a warp's access
DEPTH = 8  # accesses that are in flight at a time


class MoeBiasBackward:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, experts: int, dtype: str, warps: int) -> None:
        self.experts, self.dtype, self.warps = experts, dtype, warps
        self.size = DTYPES[dtype].bytes
        self.unit, self.columns = 16 // self.size, LINE // self.size

    @classmethod
    def of(cls, spec) -> "MoeBiasBackward":
        """The kernel of a spec."""
        return cls(spec.experts, spec.dtype, spec.warps)

    @cute.jit
    def __call__(
        self, grad_y: cute.Tensor, token: cute.Tensor, row_scale: cute.Tensor, offsets: cute.Tensor,
        grad_bias: cute.Tensor, stream: CUstream,
    ):  # fmt: skip
        """Launch."""
        columns = grad_y.shape[1]
        self.kernel(
            grad_y.iterator,
            token.iterator,
            row_scale.iterator,
            offsets.iterator,
            grad_bias.iterator,
            columns,
            Int64(grad_y.stride[0]) * self.size,
            Int64(grad_bias.stride[0]) * 4,
        ).launch(
            grid=[self.experts, (columns - 1) // self.columns + 1, 1], block=[self.warps * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, grad_y: cute.Pointer, token: cute.Pointer, row_scale: cute.Pointer, offsets: cute.Pointer,
        grad_bias: cute.Pointer, columns: Int32, stride: Int64, bias_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring; strides in bytes."""
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.warps * self.columns * 4, 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        expert, line, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        start = Int32(lanes.load(offsets.toint() + Int64(cutlass.max(expert - 1, 0)) * 4, 4, expert > 0)[0])
        end = Int32(lanes.load(offsets.toint() + Int64(expert) * 4, 4)[0])
        unit = lane & (UNITS - 1)
        first = line * self.columns + unit * self.unit
        place = grad_y.toint() + Int64(first) * self.size
        sums = cute.make_rmem_tensor((self.unit,), Float32)
        sums.fill(0.0)
        turn = LINES * DEPTH * self.warps
        for base in cutlass.range(start + warp * (LINES * DEPTH), end, turn, unroll=1):
            rows = [base + step * LINES + divide(lane, UNITS) for step in range(DEPTH)]
            tokens = [Int32(lanes.load(token.toint() + Int64(row) * 4, 4, row < end, -1)[0]) for row in rows]
            weights = [lanes.load(row_scale.toint() + Int64(row) * 4, 4, row < end)[0] for row in rows]
            loaded = [lanes.load(place + Int64(of) * stride, 16, (of >= 0) & (first < columns)) for of in tokens]
            for words, weight in zip(loaded, weights, strict=True):
                for index, value in enumerate(lanes.unpack(words, self.unit, self.dtype)):
                    sums[index] = fma(value, lanes.float_of(weight), sums[index])
        for index in cutlass.range_constexpr(self.unit):
            total = sums[index]
            for distance in (UNITS, 2 * UNITS):
                total = total + cute.arch.shuffle_sync_bfly(total, distance)
            if lane < UNITS:
                store_shared_f32(shared + (warp * self.columns + unit * self.unit + index) * 4, total)
        cute.arch.sync_threads()
        for column in cutlass.range(thread, self.columns, self.warps * WARP, unroll=1):
            total = Float32(0.0)
            for other in cutlass.range_constexpr(self.warps):
                total = total + load_shared_f32(shared + (other * self.columns + column) * 4)
            to = grad_bias.toint() + Int64(expert) * bias_stride + Int64(line * self.columns + column) * 4
            lanes.store(to, [lanes.bits_of(total)], 4, line * self.columns + column < columns)

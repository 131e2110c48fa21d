"""moe-gate, moe-gate-bwd: the factor of a shared expert's rows, and what its gradient gives.

    y[t] = sigmoid(x[t] . w)                                   forward
    grad_logits[t] = grad_y[t] scale[t] (1 - scale[t])          backward; scale: the y of the forward pass
    dx[t] = addend[t] + grad_logits[t] w

A warp has a token, a lane 16 bytes of its row at a time. Lane by lane, then over the warp, the product is summed in
float32 and in one order. The gradient of w is the sum over tokens that moe-bias-bwd computes for one expert whose rows
are all tokens: `token` and `offsets` say that to it.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.floats import fma
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide
from fusekit.kernels.router.scores import sigmoid


class MoeGate:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, dtype: str, warps: int) -> None:
        self.dtype, self.warps = dtype, warps
        self.size = DTYPES[dtype].bytes
        self.unit = 16 // self.size

    @classmethod
    def of(cls, spec) -> "MoeGate":
        """The kernel of a spec."""
        return cls(spec.dtype, spec.warps)

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: CUstream):
        """Launch."""
        rows, columns = x.shape
        self.kernel(x.iterator, w.iterator, y.iterator, rows, columns, Int64(x.stride[0]) * self.size).launch(
            grid=[(rows - 1) // self.warps + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, w: cute.Pointer, y: cute.Pointer, rows: Int32, columns: Int32, stride: Int64
    ):  # fmt: skip
        """See the module's docstring; stride of a row in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        token = block * self.warps + cute.arch.make_warp_uniform(divide(thread, WARP))
        if token < rows:
            place = x.toint() + Int64(token) * stride
            sums = cute.make_rmem_tensor((self.unit,), Float32)
            sums.fill(0.0)
            for first in cutlass.range(lane * self.unit, columns, WARP * self.unit, unroll=1):
                offset = Int64(first) * self.size
                factors = lanes.unpack(lanes.load(w.toint() + offset, 16), self.unit, self.dtype)
                values = lanes.unpack(lanes.load(place + offset, 16), self.unit, self.dtype)
                for index in cutlass.range_constexpr(self.unit):
                    sums[index] = fma(values[index], factors[index], sums[index])
            total = sums[0]
            for index in cutlass.range_constexpr(1, self.unit):
                total = total + sums[index]
            total = lanes.warp_sum(total)
            lanes.store(y.toint() + Int64(token) * 4, [lanes.bits_of(sigmoid(total))], 4, lane == 0)


class MoeGateBackward(MoeGate):
    """The kernel of one spec; calling it traces host function and kernel."""

    @cute.jit
    def __call__(
        self, grad_y: cute.Tensor, scale: cute.Tensor, w: cute.Tensor, addend: cute.Tensor, grad_logits: cute.Tensor,
        token: cute.Tensor, offsets: cute.Tensor, dx: cute.Tensor, stream: CUstream,
    ):  # fmt: skip
        """Launch."""
        rows, columns = addend.shape
        self.kernel(
            grad_y.iterator, scale.iterator, w.iterator, addend.iterator, grad_logits.iterator, token.iterator,
            offsets.iterator, dx.iterator, rows, columns, Int64(addend.stride[0]) * self.size,
            Int64(dx.stride[0]) * self.size,
        ).launch(grid=[rows // self.warps + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, grad_y: cute.Pointer, scale: cute.Pointer, w: cute.Pointer, addend: cute.Pointer,
        grad_logits: cute.Pointer, token: cute.Pointer, offsets: cute.Pointer, dx: cute.Pointer, rows: Int32,
        columns: Int32, stride: Int64, dx_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring; strides of a row in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        row = block * self.warps + cute.arch.make_warp_uniform(divide(thread, WARP))
        lanes.store(offsets.toint(), [rows], 4, (block == 0) & (thread == 0))
        if row < rows:
            place = Int64(row) * 4
            factor = lanes.float_of(lanes.load(scale.toint() + place, 4)[0])
            gradient = lanes.float_of(lanes.load(grad_y.toint() + place, 4)[0])
            gradient = gradient * (factor * (Float32(1.0) - factor))
            lanes.store(grad_logits.toint() + place, [lanes.bits_of(gradient)], 4, lane == 0)
            lanes.store(token.toint() + place, [row], 4, lane == 0)
            source = addend.toint() + Int64(row) * stride
            target = dx.toint() + Int64(row) * dx_stride
            for first in cutlass.range(lane * self.unit, columns, WARP * self.unit, unroll=1):
                offset = Int64(first) * self.size
                factors = lanes.unpack(lanes.load(w.toint() + offset, 16), self.unit, self.dtype)
                values = lanes.unpack(lanes.load(source + offset, 16), self.unit, self.dtype)
                sums = [fma(gradient, each, value) for each, value in zip(factors, values, strict=True)]
                lanes.store(target + offset, lanes.pack(sums, self.dtype), 16)

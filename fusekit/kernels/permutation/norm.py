"""rms-norm, rms-norm-bwd, rms-norm-wgrad: the norm of a row by its root mean square, and its gradients.

    sum[t] = x[t] + residual[t], rounded; x[t] without a residual
    y[t] = w * (sum[t] rstd[t]), rstd[t] = 1 / sqrt(mean of sum[t]^2 + eps)
    dx[t] = addend[t] + rstd[t] (w * dy[t] - sum[t] rstd[t]^2 (mean over h of w dy[t] sum[t]))
    dw = sum over t of dy[t] * sum[t] rstd[t]

With `rounded`, sum[t] rstd[t] is rounded before w multiplies it, as Llama's code does. A warp has a token in the
forward pass, a lane 16 bytes of its row at a time; a row is read twice, the second time from L2. A block of the
backward pass has TOKENS tokens: its warps sum their rows, then its threads go down the columns, so that what dw needs
is summed in registers, in one order; each block writes one row of `partial`, and rms-norm-wgrad sums these.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.floats import fma
from fusekit.kernels.inline import inline
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, load_shared_f32, store_shared_f32
from fusekit.plan.token_operation import NORM_TOKENS as TOKENS


def reciprocal_root(x: Float32) -> Float32:
    """1 / sqrt(x), within 2 units in the last place (PTX ISA, "rsqrt.approx")."""
    return inline(Float32, "rsqrt.approx.f32 {$w0}, {$r0};", x)


class RmsNorm:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, dtype: str, warps: int, residual: bool, rounded: bool) -> None:
        self.dtype, self.warps, self.residual, self.rounded = dtype, warps, residual, rounded
        self.size = DTYPES[dtype].bytes
        self.unit = 16 // self.size

    @classmethod
    def of(cls, spec) -> "RmsNorm":
        """The kernel of a spec."""
        return cls(spec.dtype, spec.warps, spec.residual, spec.rounded)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, residual, w: cute.Tensor, y: cute.Tensor, total, rstd: cute.Tensor, eps: Float32,
        stream: CUstream,
    ):  # fmt: skip
        """Launch; residual and total may be None."""
        rows, columns = x.shape
        more = None
        if cutlass.const_expr(self.residual):
            more = (residual.iterator, total.iterator, self.stride(residual), self.stride(total))
        self.kernel(
            x.iterator, w.iterator, y.iterator, rstd.iterator, more, rows, columns, self.stride(x), self.stride(y), eps
        ).launch(grid=[(rows - 1) // self.warps + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream)

    def stride(self, tensor) -> Int64:
        """Bytes of a row."""
        return Int64(tensor.stride[0]) * self.size

    def values(self, address: Int64) -> list:
        """The 16 bytes there, as float32."""
        return lanes.unpack(lanes.load(address, 16), self.unit, self.dtype)

    def in_dtype(self, values: list) -> list:
        """The values, rounded to the rows' type."""
        return lanes.unpack(lanes.pack(values, self.dtype), self.unit, self.dtype)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, w: cute.Pointer, y: cute.Pointer, rstd: cute.Pointer, more, rows: Int32,
        columns: Int32, x_stride: Int64, y_stride: Int64, eps: Float32,
    ):  # fmt: skip
        """See the module's docstring. more: None, or residual and total and the bytes of their rows."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        token = block * self.warps + cute.arch.make_warp_uniform(divide(thread, WARP))
        if token < rows:
            place = x.toint() + Int64(token) * x_stride
            beside, total = Int64(0), Int64(0)
            if cutlass.const_expr(self.residual):
                beside = more[0].toint() + Int64(token) * more[2]
                total = more[1].toint() + Int64(token) * more[3]
            squares = cute.make_rmem_tensor((self.unit,), Float32)
            squares.fill(0.0)
            for first in cutlass.range(lane * self.unit, columns, WARP * self.unit, unroll=2):
                offset = Int64(first) * self.size
                values = self.summed(place, beside, offset)
                if cutlass.const_expr(self.residual):
                    lanes.store(total + offset, lanes.pack(values, self.dtype), 16)
                for index in cutlass.range_constexpr(self.unit):
                    squares[index] = fma(values[index], values[index], squares[index])
            square = squares[0]
            for index in cutlass.range_constexpr(1, self.unit):
                square = square + squares[index]
            scale = reciprocal_root(lanes.warp_sum(square) / Float32(columns) + eps)
            lanes.store(rstd.toint() + Int64(token) * 4, [lanes.bits_of(scale)], 4, lane == 0)
            target = y.toint() + Int64(token) * y_stride
            for first in cutlass.range(lane * self.unit, columns, WARP * self.unit, unroll=2):
                offset = Int64(first) * self.size
                values = [value * scale for value in self.summed(place, beside, offset)]
                if cutlass.const_expr(self.rounded):
                    values = self.in_dtype(values)
                factors = self.values(w.toint() + offset)
                values = [value * factor for value, factor in zip(values, factors, strict=True)]
                lanes.store(target + offset, lanes.pack(values, self.dtype), 16)

    def summed(self, place: Int64, beside: Int64, offset: Int64) -> list:
        """What the norm is of."""
        values = self.values(place + offset)
        if cutlass.const_expr(self.residual):
            others = self.values(beside + offset)
            values = self.in_dtype([value + other for value, other in zip(values, others, strict=True)])
        return values


class RmsNormBackward(RmsNorm):
    """The kernel of one spec; calling it traces host function and kernel."""

    @classmethod
    def of(cls, spec) -> "RmsNormBackward":
        """The kernel of a spec."""
        return cls(spec.dtype, spec.warps, spec.addend, False)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, x: cute.Tensor, w: cute.Tensor, rstd: cute.Tensor, addend, dx: cute.Tensor,
        partial: cute.Tensor, stream: CUstream,
    ):  # fmt: skip
        """Launch; the addend may be None."""
        rows, columns = x.shape
        more = (addend.iterator, self.stride(addend)) if cutlass.const_expr(self.residual) else None
        self.kernel(
            dy.iterator, x.iterator, w.iterator, rstd.iterator, more, dx.iterator, partial.iterator, rows, columns,
            self.stride(dy), self.stride(x), self.stride(dx), Int64(partial.stride[0]) * 4,
        ).launch(grid=[(rows - 1) // TOKENS + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, dy: cute.Pointer, x: cute.Pointer, w: cute.Pointer, rstd: cute.Pointer, more, dx: cute.Pointer,
        partial: cute.Pointer, rows: Int32, columns: Int32, dy_stride: Int64, x_stride: Int64, dx_stride: Int64,
        partial_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring; strides of a row in bytes. more: None, or the addend and the bytes of its row."""
        shared = cutlass.memory.SmemAllocator().allocate(TOKENS * 8, 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        begin = block * TOKENS
        count = cutlass.min(rows - begin, TOKENS)
        for local in cutlass.range(warp, count, self.warps, unroll=1):
            token = Int64(begin + local)
            sums = cute.make_rmem_tensor((self.unit,), Float32)
            sums.fill(0.0)
            for first in cutlass.range(lane * self.unit, columns, WARP * self.unit, unroll=2):
                offset = Int64(first) * self.size
                factors = self.values(w.toint() + offset)
                gradients = self.values(dy.toint() + token * dy_stride + offset)
                values = self.values(x.toint() + token * x_stride + offset)
                for index in cutlass.range_constexpr(self.unit):
                    sums[index] = fma(gradients[index] * factors[index], values[index], sums[index])
            product = sums[0]
            for index in cutlass.range_constexpr(1, self.unit):
                product = product + sums[index]
            scale = lanes.float_of(lanes.load(rstd.toint() + token * 4, 4)[0])
            product = lanes.warp_sum(product) / Float32(columns) * (scale * scale * scale)
            if lane == 0:
                store_shared_f32(shared + local * 8, scale)
                store_shared_f32(shared + local * 8 + 4, product)
        cute.arch.sync_threads()
        for first in cutlass.range(thread * self.unit, columns, self.warps * WARP * self.unit, unroll=1):
            offset = Int64(first) * self.size
            factors = self.values(w.toint() + offset)
            weights = cute.make_rmem_tensor((self.unit,), Float32)
            weights.fill(0.0)
            for local in cutlass.range(count, unroll=2):
                token = Int64(begin + local)
                scale, product = load_shared_f32(shared + local * 8), load_shared_f32(shared + local * 8 + 4)
                gradients = self.values(dy.toint() + token * dy_stride + offset)
                values = self.values(x.toint() + token * x_stride + offset)
                results = [
                    fma(value, product * Float32(-1.0), gradient * factor * scale)
                    for value, gradient, factor in zip(values, gradients, factors, strict=True)
                ]
                if cutlass.const_expr(self.residual):
                    others = self.values(more[0].toint() + token * more[1] + offset)
                    results = [result + other for result, other in zip(results, others, strict=True)]
                lanes.store(dx.toint() + token * dx_stride + offset, lanes.pack(results, self.dtype), 16)
                for index in cutlass.range_constexpr(self.unit):
                    weights[index] = fma(gradients[index] * scale, values[index], weights[index])
            target = partial.toint() + Int64(block) * partial_stride + Int64(first) * 4
            for part in cutlass.range_constexpr(self.unit // 4):
                words = [lanes.bits_of(weights[4 * part + index]) for index in range(4)]
                lanes.store(target, words, 16, begin < rows, 16 * part)  # no row without tokens


class RmsNormWeights:
    """The kernel of one spec; calling it traces host function and kernel."""

    COLUMNS = WARP * 4  # of a block: 16 bytes a lane

    def __init__(self, dtype: str, warps: int) -> None:
        self.dtype, self.warps, self.size = dtype, warps, DTYPES[dtype].bytes

    @classmethod
    def of(cls, spec) -> "RmsNormWeights":
        """The kernel of a spec."""
        return cls(spec.dtype, spec.warps)

    @cute.jit
    def __call__(self, partial: cute.Tensor, dw: cute.Tensor, stream: CUstream):
        """Launch."""
        rows, columns = partial.shape
        self.kernel(partial.iterator, dw.iterator, rows, columns, Int64(partial.stride[0]) * 4).launch(
            grid=[(columns - 1) // self.COLUMNS + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, partial: cute.Pointer, dw: cute.Pointer, rows: Int32, columns: Int32, stride: Int64):
        """See the module's docstring; stride of a row in bytes."""
        shared = cutlass.memory.SmemAllocator().allocate(self.warps * self.COLUMNS * 4, 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        first = block * self.COLUMNS + lane * 4
        sums = cute.make_rmem_tensor((4,), Float32)
        sums.fill(0.0)
        for row in cutlass.range(warp, rows, self.warps, unroll=4):
            words = lanes.load(partial.toint() + Int64(row) * stride + Int64(first) * 4, 16, first < columns)
            for index, word in enumerate(words):
                sums[index] = sums[index] + lanes.float_of(word)
        for index in cutlass.range_constexpr(4):
            store_shared_f32(shared + ((warp * self.COLUMNS + lane * 4 + index) * 4), sums[index])
        cute.arch.sync_threads()
        if warp == 0:
            totals = []
            for index in cutlass.range_constexpr(4):
                total = Float32(0.0)
                for other in cutlass.range_constexpr(self.warps):
                    total = total + load_shared_f32(shared + ((other * self.COLUMNS + lane * 4 + index) * 4))
                totals.append(total)
            words = lanes.pack(totals, self.dtype)
            lanes.store(dw.toint() + Int64(first) * self.size, words, 4 * self.size, first < columns)

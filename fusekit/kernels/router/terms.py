"""router-split and router-sum: float32 weights in products of bf16 numbers.

    split   terms[n T + t] = bf16(w[t] - terms[t] - ... - terms[(n - 1) T + t]), n < terms
    sum     y[t] = x[t, 0] + x[t, 1] + ... + bias, where x[t, n] are the products with the n-th terms

Each term has 8 bits of a number's 24, so three of them are the number, unless it is below 2^-110. What is left of an
infinity is 0. The sum is float32's, the last term first: the smallest. Rows beyond those of the tensor of terms are not
written. A block splits a row, a warp sums a token's.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.floats import add, choose
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide
from fusekit.kernels.router.config import Row, vector_elements

PIECE = 8  # elements of a thread: 32 bytes of float32, 16 of bf16


class RouterSplit:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, terms: int, warps: int) -> None:
        self.terms, self.threads = terms, warps * WARP

    @classmethod
    def of(cls, spec) -> "RouterSplit":
        """The kernel of a spec."""
        return cls(spec.terms, spec.warps)

    @cute.jit
    def __call__(self, w: cute.Tensor, terms: cute.Tensor, stream: CUstream):
        """Launch."""
        self.kernel(
            w.iterator,
            terms.iterator,
            w.shape[0],
            terms.shape[0],
            w.shape[1],
            Int64(w.stride[0]) * 4,
            Int64(terms.stride[0]) * 2,
        ).launch(grid=[w.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, w: cute.Pointer, terms: cute.Pointer, rows: Int32, written: Int32, columns: Int32, w_stride: Int64,
        terms_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring."""
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        source = w.toint() + Int64(row) * w_stride
        target = terms.toint() + Int64(row) * terms_stride
        for first in cutlass.range(thread * PIECE, columns, self.threads * PIECE):
            start = source + Int64(first) * 4
            rest = [lanes.float_of(word) for at in (0, 16) for word in lanes.load(start, 16, offset=at)]
            for term in cutlass.range_constexpr(self.terms):
                words = lanes.pack(rest, "bf16")
                place = target + Int64(rows) * (term * terms_stride) + Int64(first) * 2
                lanes.store(place, words, 16, row + Int64(rows) * term < Int64(written))
                rest = [left(value, taken) for value, taken in zip(rest, lanes.unpack(words, PIECE, "bf16"))]  # noqa: B905


def left(value: Float32, taken: Float32) -> Float32:
    """value - taken, which has no rounding; 0 where that is no number."""
    rest = add(value, -taken)
    return choose(rest == rest, rest, Float32(0.0))


class RouterSum:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, experts: int, terms: int, bias: bool, warps: int) -> None:
        self.experts, self.terms, self.bias = experts, terms, bias
        self.warps, self.threads = warps, warps * WARP
        self.row = Row(experts, vector_elements(experts, 4))
        self.row_bytes = experts * 4

    @classmethod
    def of(cls, spec) -> "RouterSum":
        """The kernel of a spec."""
        return cls(spec.experts, spec.terms, spec.bias, spec.warps)

    @cute.jit
    def __call__(self, x: cute.Tensor, bias, y: cute.Tensor, stream: CUstream):
        """Launch; bias may be None."""
        tokens = x.shape[0]
        self.kernel(
            x.iterator, bias.iterator if cutlass.const_expr(self.bias) else None, y.iterator, tokens
        ).launch(grid=[(tokens - 1) // self.warps + 1, 1, 1], block=[self.threads, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(self, x: cute.Pointer, bias, y: cute.Pointer, tokens: Int32):
        """See the module's docstring."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        token = block * self.warps + cute.arch.make_warp_uniform(divide(thread, WARP))
        if token < tokens:
            row = Int64(token) * self.row_bytes + Int64(lane * self.row.vector * 4)
            source = x.toint() + Int64(token) * ((self.terms - 1) * self.row_bytes) + row
            added = bias.toint() + Int64(lane * self.row.vector * 4) if cutlass.const_expr(self.bias) else None
            for chunk in cutlass.range_constexpr(self.row.chunks):
                self.chunk(chunk, lane, source, added, y.toint() + row)

    def chunk(self, chunk: int, lane: Int32, source: Int64, added, target: Int64) -> None:
        """A lane's experts of one chunk. source, added, target: where its first of the row lie."""
        size, valid = self.row.vector * 4, self.row.valid(chunk, lane)
        offset = chunk * self.row.lanes * size
        sums: list = []
        for term in reversed(range(self.terms)):
            words = lanes.load(source, size, valid, 0, term * self.row_bytes + offset)
            values = [lanes.float_of(word) for word in words]
            sums = [add(total, value) for total, value in zip(sums, values, strict=True)] if sums else values
        if self.bias:
            words = lanes.load(added, size, valid, 0, offset)
            sums = [add(total, lanes.float_of(word)) for total, word in zip(sums, words, strict=True)]
        lanes.store(target, lanes.pack(sums, "f32"), size, valid, offset)

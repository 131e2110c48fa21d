"""moe-permute, moe-unpermute and their backward: rows of tokens to rows of experts and back.

    permute          y[inverse[t, k]] = x[t], and with weights row_scale[inverse[t, k]] = weights[t, k]
    permute of FP8 values: the same, and y_s[:, inverse[t, k]] = x_s[:, t]
    permute, scaled  y[inverse[t, k]] = weights[t, k] x[t]
    permute-bwd      grad_x[t] = sum over k of weights[t, k] grad_y[inverse[t, k]], in float32, in the order of k;
                     grad_weights[t, k] = x[t] . grad_y[inverse[t, k]]
    unpermute        y[t] = sum over k of weights[t, k] x[inverse[t, k]], in float32, in the order of k,
                     + addend0[t] + addend1[t], rounded once
    unpermute-bwd    grad_x[inverse[t, k]] = weights[t, k] grad_y[t]; grad_weights[t, k] = grad_y[t] . x[inverse[t, k]]

Without weights they are 1, permute is the backward of unpermute and the other way round. A choice with inverse -1 has
no row: it is not written, adds nothing, and its weight's gradient is 0. Rows that no choice has are left alone.

A warp takes a piece of a token's row, PIECE bytes, and all K rows of experts that belong to it: what is common to them
is read once, and every access is 16 bytes a lane, a whole line a warp. The backward takes a row piece by piece, since
its dot products run along it.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes, pdl
from fusekit.kernels.floats import choose, fma
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide
from fusekit.plan.quantise import SIDE

LINE = WARP * 16  # bytes of a warp's access
SUMMED = 16  # elements that a lane of the backward of permute holds of each row, and sums


class Permutation:
    """What the kernels share. lines: accesses of a warp that make a piece; scaled: permute multiplies by weights;
    pdl: unpermute begins early, see fusekit.kernels.pdl.
    """

    LINES = 4  # what a lane holds of a piece is in registers, K times

    @classmethod
    def of(cls, spec):
        """The kernel of a spec."""
        early = getattr(spec, "pdl", False)
        lines = SUMMED * DTYPES[spec.dtype].bytes // 16 if spec.op == "moe-permute-bwd" else cls.LINES
        return cls(spec.topk, spec.dtype, spec.weighted, spec.scaled, spec.addends, spec.warps, lines, early)

    def __init__(
        self, topk: int, dtype: str, weighted: bool, scaled: bool, addends: int, warps: int, lines: int,
        pdl: bool = False,
    ) -> None:  # fmt: skip
        self.topk, self.dtype, self.weighted, self.scaled, self.addends = topk, dtype, weighted, scaled, addends
        self.size, self.pdl = DTYPES[dtype].bytes, pdl
        self.warps, self.threads = warps, warps * WARP
        self.lines, self.piece = lines, lines * LINE
        self.slots = -(-topk // WARP)

    def grid(self, tokens: Int32, columns: Int32) -> list:
        """Blocks: a warp for each piece of each token; the pieces of a row are neighbours, and moved together."""
        return [((tokens - 1) // self.warps + 1) * ((columns * self.size - 1) // self.piece + 1), 1, 1]

    def place(self, row_bytes=None):
        """(token, lane, first byte of the lane's share of the row's piece); without row_bytes, of the first piece."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        if row_bytes is None:
            return block * self.warps + warp, lane, lane * 16
        pieces = divide(row_bytes - 1, self.piece) + 1
        tokens = divide(block, pieces)
        return tokens * self.warps + warp, lane, (block - tokens * pieces) * self.piece + lane * 16

    def per_choice(self, tensor: Int64, token: Int32, lane: Int32, fill: int) -> list:
        """Four bytes of choice `lane`, `lane` + 32, ... of the token; `fill` from K on."""
        row = tensor + Int64(token) * (self.topk * 4)
        return [
            lanes.load(row + (lane + slot * WARP) * 4, 4, lane + slot * WARP < self.topk, fill)[0]
            for slot in range(self.slots)
        ]

    def of_choice(self, values: list, choice: int):
        """Choice `choice`'s value in every lane."""
        return cute.arch.shuffle_sync(values[choice // WARP], choice % WARP)

    def load_piece(self, row: Int64, first: Int32, row_bytes: Int32, exists=None) -> list:
        """The lane's share of a piece, as words; zeros past the row's end, or where there is no row."""
        words: list = []
        for line in range(self.lines):
            valid = first + line * LINE < row_bytes
            if exists is not None:
                valid = valid & exists
            words += lanes.load(row + Int64(first), 16, valid, 0, line * LINE)
        return words

    def store_piece(self, row: Int64, first: Int32, row_bytes: Int32, words: list, exists) -> None:
        """The lane's share of a piece to a row that exists."""
        for line in range(self.lines):
            valid = (first + line * LINE < row_bytes) & exists
            lanes.store(row + Int64(first), words[4 * line : 4 * line + 4], 16, valid, line * LINE)

    def floats(self, words: list) -> list:
        """The elements of words."""
        return lanes.unpack(words, len(words) * 4 // self.size, self.dtype)

    def row_of(self, tensor: Int64, row: Int32, stride: Int64) -> Int64:
        """Where a row begins; stride in bytes; any place for row -1."""
        return tensor + Int64(cutlass.max(row, 0)) * stride


class MoePermute(Permutation):
    """The kernel of moe-permute; calling it traces host function and kernel."""

    LINES = 8

    @cute.jit
    def __call__(
        self, x: cute.Tensor, x_s, inverse: cute.Tensor, weights, y: cute.Tensor, y_s, row_scale, stream: CUstream
    ):
        """Launch; weights and scales may be None, row_scale is None unless it is to be written."""
        coded = cutlass.const_expr(self.dtype == "e4m3")
        self.kernel(
            x.iterator,
            (x_s.iterator, y_s.iterator, y_s.shape[1]) if coded else None,
            inverse.iterator,
            weights.iterator if cutlass.const_expr(self.weighted or self.scaled) else None,
            y.iterator,
            row_scale.iterator if cutlass.const_expr(self.weighted) else None,
            x.shape[0],
            x.shape[1] * self.size,
            Int64(x.stride[0]) * self.size,
            Int64(y.stride[0]) * self.size,
        ).launch(grid=self.grid(x.shape[0], x.shape[1]), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, scales, inverse: cute.Pointer, weights, y: cute.Pointer, row_scale, tokens: Int32,
        row_bytes: Int32, x_stride: Int64, y_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring. scales: with FP8 values, the scales of x, of y, and the rows of y."""
        token, lane, first = self.place(row_bytes)
        if token < tokens:
            rows = self.per_choice(inverse.toint(), token, lane, -1)
            words = self.load_piece(self.row_of(x.toint(), token, x_stride), first, row_bytes)
            if cutlass.const_expr(scales is not None):
                blocks = cutlass.select_(first < LINE, divide(row_bytes - 1, SIDE) + 1, 0)  # the first piece's warp's
                self.scales(*scales, rows, token, lane, tokens, blocks)
            if cutlass.const_expr(self.scaled):
                given = self.per_choice(weights.toint(), token, lane, 0)
            for choice in cutlass.range_constexpr(self.topk):
                row = Int32(self.of_choice(rows, choice))
                moved = words
                if cutlass.const_expr(self.scaled):
                    weight = lanes.float_of(Uint32(self.of_choice(given, choice)))
                    moved = lanes.pack([value * weight for value in self.floats(words)], self.dtype)
                self.store_piece(self.row_of(y.toint(), row, y_stride), first, row_bytes, moved, row >= 0)
            if cutlass.const_expr(self.weighted):
                given = self.per_choice(weights.toint(), token, lane, 0)
                for slot in cutlass.range_constexpr(self.slots):
                    use = (Int32(rows[slot]) >= 0) & (first < LINE)  # the first piece's warp writes them
                    lanes.store(row_scale.toint() + Int64(rows[slot]) * 4, [given[slot]], 4, use)

    @cute.jit
    def scales(
        self, given: cute.Pointer, permuted: cute.Pointer, all_rows: Int32, rows: list, token: Int32, lane: Int32,
        tokens: Int32, blocks: Int32,
    ):  # fmt: skip
        """Copies the scales of a token's row, [blocks, tokens], to each of its choices, [blocks, all_rows]."""
        for start in cutlass.range(0, blocks, WARP):
            block = start + lane
            word = lanes.load(given.toint() + (Int64(block) * tokens + token) * 4, 4, block < blocks)
            for choice in cutlass.range_constexpr(self.topk):
                row = Int32(self.of_choice(rows, choice))
                target = permuted.toint() + (Int64(block) * all_rows + row) * 4
                lanes.store(target, word, 4, (block < blocks) & (row >= 0))


class MoeUnpermute(Permutation):
    """The kernel of moe-unpermute; calling it traces host function and kernel."""

    LINES = 2  # more warps at a time, which the memory keeps busy

    @cute.jit
    def __call__(
        self, x: cute.Tensor, inverse: cute.Tensor, weights, addend0, addend1, y: cute.Tensor, stream: CUstream
    ):
        """Launch; weights and the addends may be None."""
        factors = weights.iterator if cutlass.const_expr(self.weighted) else None
        if cutlass.const_expr(self.addends > 0):
            given = (addend0, addend1)[: self.addends]
            factors = (factors, [(tensor.iterator, Int64(tensor.stride[0]) * self.size) for tensor in given])
        self.kernel(
            x.iterator,
            inverse.iterator,
            factors,
            y.iterator,
            y.shape[0],
            y.shape[1] * self.size,
            Int64(x.stride[0]) * self.size,
            Int64(y.stride[0]) * self.size,
        ).launch(grid=self.grid(y.shape[0], y.shape[1]), block=[self.threads, 1, 1], use_pdl=self.pdl, stream=stream)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, inverse: cute.Pointer, weights, y: cute.Pointer, tokens: Int32, row_bytes: Int32,
        x_stride: Int64, y_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring. weights: None, theirs, or (either, the addends and their strides)."""
        if cutlass.const_expr(self.pdl):
            pdl.begin()
        weights, addends = weights if cutlass.const_expr(self.addends > 0) else (weights, ())
        token, lane, first = self.place(row_bytes)
        if token < tokens:
            rows = self.per_choice(inverse.toint(), token, lane, -1)
            given = rows
            if cutlass.const_expr(self.weighted):
                given = self.per_choice(weights.toint(), token, lane, 0)
            sums = [Float32(0.0)] * (self.piece // WARP // self.size)
            for choice in cutlass.range_constexpr(self.topk):
                row = Int32(self.of_choice(rows, choice))
                words = self.load_piece(self.row_of(x.toint(), row, x_stride), first, row_bytes, row >= 0)
                if cutlass.const_expr(self.weighted):
                    weight = lanes.float_of(Uint32(self.of_choice(given, choice)))
                    weight = choose(row >= 0, weight, Float32(0.0))
                    sums = [fma(value, weight, total) for value, total in zip(self.floats(words), sums, strict=True)]
                else:
                    sums = [value + total for value, total in zip(self.floats(words), sums, strict=True)]
            for addend, stride in addends:
                words = self.load_piece(self.row_of(addend.toint(), token, stride), first, row_bytes)
                sums = [total + value for value, total in zip(self.floats(words), sums, strict=True)]
            result = lanes.pack(sums, self.dtype)
            self.store_piece(self.row_of(y.toint(), token, y_stride), first, row_bytes, result, token < tokens)


class MoeUnpermuteBackward(Permutation):
    """The kernel of moe-unpermute-bwd, and scaled of moe-permute-bwd; calling it traces host function and kernel.

    Either way a weight's gradient is the product of a token's row and an expert's row, and the other gradient comes of
    the rows that are a gradient themselves: the token's goes to every choice, or those of all choices add up.
    """

    @cute.jit
    def __call__(
        self, by_token: cute.Tensor, by_expert: cute.Tensor, inverse: cute.Tensor, weights: cute.Tensor,
        grad_x: cute.Tensor, grad_weights: cute.Tensor, stream: CUstream,
    ):  # fmt: skip
        """Launch; (by_token, by_expert) are (grad_y, x), or (x, grad_y) of moe-permute-bwd."""
        tokens = by_token.shape[0]
        self.kernel(
            by_token.iterator,
            by_expert.iterator,
            inverse.iterator,
            weights.iterator,
            grad_x.iterator,
            grad_weights.iterator,
            tokens,
            by_token.shape[1] * self.size,
            Int64(by_token.stride[0]) * self.size,
            Int64(by_expert.stride[0]) * self.size,
            Int64(grad_x.stride[0]) * self.size,
        ).launch(grid=[(tokens - 1) // self.warps + 1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, by_token: cute.Pointer, by_expert: cute.Pointer, inverse: cute.Pointer, weights: cute.Pointer,
        grad_x: cute.Pointer, grad_weights: cute.Pointer, tokens: Int32, row_bytes: Int32, token_stride: Int64,
        expert_stride: Int64, grad_stride: Int64,
    ):  # fmt: skip
        """See the module's docstring."""
        token, lane, start = self.place()
        if token < tokens:
            rows = self.per_choice(inverse.toint(), token, lane, -1)
            given = self.per_choice(weights.toint(), token, lane, 0)
            dots = cute.make_rmem_tensor((self.topk,), Float32)
            dots.fill(0.0)
            for piece in cutlass.range(0, row_bytes, self.piece):
                first = start + piece
                common = self.floats(
                    self.load_piece(self.row_of(by_token.toint(), token, token_stride), first, row_bytes)
                )
                sums = [Float32(0.0)] * len(common)
                for choice in cutlass.range_constexpr(self.topk):
                    row = Int32(self.of_choice(rows, choice))
                    weight = lanes.float_of(Uint32(self.of_choice(given, choice)))
                    source = self.row_of(by_expert.toint(), row, expert_stride)
                    values = self.floats(self.load_piece(source, first, row_bytes, row >= 0))
                    dot = dots[choice]
                    for value, other in zip(values, common, strict=True):
                        dot = fma(value, other, dot)
                    dots[choice] = dot
                    if cutlass.const_expr(self.scaled):
                        weight = choose(row >= 0, weight, Float32(0.0))
                        sums = [fma(value, weight, total) for value, total in zip(values, sums, strict=True)]
                    else:
                        result = lanes.pack([value * weight for value in common], self.dtype)
                        target = self.row_of(grad_x.toint(), row, grad_stride)
                        self.store_piece(target, first, row_bytes, result, row >= 0)
                if cutlass.const_expr(self.scaled):
                    result = lanes.pack(sums, self.dtype)
                    target = self.row_of(grad_x.toint(), token, grad_stride)
                    self.store_piece(target, first, row_bytes, result, token < tokens)
            target = grad_weights.toint() + Int64(token) * (self.topk * 4)
            for choice in cutlass.range_constexpr(self.topk):
                total = lanes.warp_sum(dots[choice])
                row = Int32(self.of_choice(rows, choice))
                total = choose(row >= 0, total, Float32(0.0))
                lanes.store(target, [lanes.bits_of(total)], 4, lane == choice % WARP, choice * 4)

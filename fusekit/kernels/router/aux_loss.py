"""moe-aux-loss and its backward: the load-balancing loss from scores and counts of choices.

    loss = c * sum over t, e of counts[e] scores[t, e],   c = coefficient * experts / (topk * total_tokens^2)
    grad_scores[t, e] = grad_loss * c * counts[e]

Forward: one cluster of eight blocks. Warp w of the cluster's 256 takes the tokens w, w + 256, ...; a lane adds up a
row's products in float32 and the rows in float64; the blocks' sums meet in the first one's shared memory and are added
in the order of their ranks. Backward: a warp loads the counts and writes several tokens' rows.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Float64, Int32, Int64, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, load_shared_v4
from fusekit.kernels.router.base import RouterKernel
from fusekit.kernels.router.config import RouterConfig

BLOCKS = 8
WARPS = 32
TOKENS = 8  # of a warp in the backward


def factor(config: RouterConfig, coefficient, total_tokens) -> Float64:
    """c above. On the device both are pointers; there less than 1 token counts as 1, as in a launch without tokens."""
    if config.on_device:
        coefficient = lanes.float_of(lanes.load(coefficient.toint(), 4)[0])
        total_tokens = cutlass.max(Int32(lanes.load(total_tokens.toint(), 4)[0]), 1)
    total = Float64(total_tokens)
    return Float64(coefficient) * Float64(float(config.experts) / config.topk) / (total * total)


class MoeAuxLoss(RouterKernel):
    """The forward kernel; calling it traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.blocks, self.threads = BLOCKS, WARPS * WARP
        self.counts_bytes = self.row.size * WARP * 4
        # counts[lanes' experts], then a float64 for each warp, then one for each block.
        self.shared_bytes = self.counts_bytes + (WARPS + BLOCKS) * 8

    @cute.jit
    def __call__(
        self, scores: cute.Tensor, counts: cute.Tensor, loss: cute.Tensor, coefficient, total_tokens, stream: CUstream
    ):
        """Launch; the scalars are numbers or tensors."""
        if cutlass.const_expr(self.config.on_device):
            coefficient, total_tokens = coefficient.iterator, total_tokens.iterator
        self.kernel(scores.iterator, counts.iterator, loss.iterator, coefficient, total_tokens, scores.shape[0]).launch(
            grid=[BLOCKS, 1, 1], block=[self.threads, 1, 1], cluster=[BLOCKS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, scores: cute.Pointer, counts: cute.Pointer, loss: cute.Pointer, coefficient, total_tokens, tokens: Int32
    ):
        """See the module's docstring."""
        config = self.config
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.shared_bytes, 16).toint()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        cute.arch.cluster_arrive()  # from the wait on, all blocks run, and their shared memory may be written
        for start in cutlass.range_constexpr(0, self.row.size * WARP, self.threads):
            expert = thread + start
            if expert < self.row.size * WARP:
                count = lanes.load(counts.toint() + Int64(expert) * 4, 4, expert < config.experts)[0]
                lanes.shared_store_u32(shared + expert * 4, lanes.bits_of(Float32(Int32(count))))
        cute.arch.sync_threads()
        total = Float64(0.0)
        for token in cutlass.range(block * WARPS + warp, tokens, BLOCKS * WARPS):
            row = self.address(scores, token, config.experts, DTYPES[config.out_dtype].bytes)
            values = lanes.load_row(row, self.row, lane, config.out_dtype)
            total += Float64(self.add_up(self.products(values, shared, lane)))
        for step in cutlass.range_constexpr(5):
            total += lanes.exchange_f64(total, 16 >> step)
        slots = shared + self.counts_bytes
        if lane == 0:
            lanes.shared_store_f64(slots + warp * 8, total)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if thread == 0:
            whole = Float64(0.0)
            for index in cutlass.range_constexpr(WARPS):
                whole += lanes.shared_load_f64(slots + index * 8)
            lanes.first_block_store_f64(slots + (WARPS + block) * 8, whole)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if block == 0 and thread == 0:
            whole = Float64(0.0)
            for index in cutlass.range_constexpr(BLOCKS):
                whole += lanes.shared_load_f64(slots + (WARPS + index) * 8)
            result = Float32(whole * factor(config, coefficient, total_tokens))
            lanes.store(loss.toint(), [lanes.bits_of(result)], 4)

    def products(self, values: list, shared: Int32, lane: Int32) -> list:
        """A lane's scores times the counts of their experts."""
        counts: list = []
        for chunk in range(self.row.chunks):
            address = shared + self.row.first(chunk, lane) * 4
            if self.row.vector % 4:
                counts += [lanes.shared_load_u32(address + place * 4) for place in range(self.row.vector)]
            else:
                for place in range(0, self.row.vector, 4):
                    counts += [Uint32(word) for word in load_shared_v4(address + place * 4)]
        return [value * lanes.float_of(count) for value, count in zip(values, counts, strict=True)]


class MoeAuxLossBackward(RouterKernel):
    """The backward kernel; calling it traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.shared_bytes = 0
        self.tokens_per_block = config.warps * TOKENS

    @cute.jit
    def __call__(
        self, counts: cute.Tensor, grad_loss: cute.Tensor, grad_scores: cute.Tensor, coefficient, total_tokens,
        stream: CUstream,
    ):  # fmt: skip
        """Launch; the scalars are numbers or tensors."""
        if cutlass.const_expr(self.config.on_device):
            coefficient, total_tokens = coefficient.iterator, total_tokens.iterator
        tokens = grad_scores.shape[0]
        self.kernel(
            counts.iterator, grad_loss.iterator, grad_scores.iterator, coefficient, total_tokens, tokens
        ).launch(grid=[self.grid(tokens), 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, counts: cute.Pointer, grad_loss: cute.Pointer, grad_scores: cute.Pointer, coefficient, total_tokens,
        tokens: Int32,
    ):  # fmt: skip
        """See the module's docstring."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        first = block * self.tokens_per_block + cute.arch.make_warp_uniform(divide(thread, WARP)) * TOKENS
        if first < tokens:
            given = Float64(lanes.float_of(lanes.load(grad_loss.toint(), 4)[0]))
            scale = Float32(given * factor(config, coefficient, total_tokens))
            result = [count * scale for count in self.counts(counts.toint(), lane)]
            for token in cutlass.range(first, cutlass.min(first + TOKENS, tokens)):
                row = self.address(grad_scores, token, config.experts, DTYPES[config.out_dtype].bytes)
                lanes.store_row(row, self.row, lane, result, config.out_dtype)

    def counts(self, counts: Int64, lane: Int32) -> list:
        """A lane's counts as floats."""
        words: list = []
        for chunk in range(self.row.chunks):
            start, width = counts + Int64(self.row.first(chunk, lane)) * 4, min(self.row.vector, 4) * 4
            for offset in range(0, self.row.vector * 4, width):
                words += lanes.load(start, width, self.row.valid(chunk, lane), 0, offset)
        return [Float32(Int32(word)) for word in words]

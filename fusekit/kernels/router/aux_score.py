"""router-aux-score and its backward: scores over all experts, for the load-balancing loss, and their own top K.

    softmax                 y = softmax(x)
    sigmoid, sqrtsoftplus   y = s / S, S = sum of s + 1e-20

Backward, from y itself and the sum: dx = y (g - sum g y) for softmax; else dx_j = (g_j - sum g y) s'(x_j) / S, where
s = y S and s' is a function of s. So y and, for the latter two, one float32 a token are all that is kept.

Forward: a warp a token, the row in registers; X logits in, X scores and X bytes of map (or X / 8) out. Backward: one to
four warps a token, two rows in registers.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import reciprocal_approx
from fusekit.kernels.router.base import RouterKernel
from fusekit.kernels.router.config import RouterConfig
from fusekit.kernels.router.routing_map import MapWriter
from fusekit.kernels.router.scores import EPSILON, exp_nonpositive, score, sqrtsoftplus_slope
from fusekit.kernels.router.select import TopK, value_of

LANE_ELEMENTS = 96  # of two rows together: more of them leave too few warps on an SM to keep memory busy


class RouterAuxScore(RouterKernel):
    """One configuration of the forward kernel; calling it traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.softmax = config.score_function == "softmax"
        self.select = TopK(self.row, config.topk)
        self.map = MapWriter(config)
        self.warp_bytes = self.select.shared_bytes + self.map.shared_bytes
        self.shared_bytes = config.warps * self.warp_bytes

    @cute.jit
    def __call__(self, logits: cute.Tensor, scores: cute.Tensor, score_sum, routing_map: cute.Tensor, stream: CUstream):
        """Launch; score_sum is None for softmax."""
        tokens = logits.shape[0]
        kernel = self.kernel(
            logits.iterator,
            scores.iterator,
            None if cutlass.const_expr(self.softmax) else score_sum.iterator,
            routing_map.iterator,
            tokens,
        )
        self.launch(kernel, tokens, stream)

    @cute.kernel
    def kernel(self, logits: cute.Pointer, scores: cute.Pointer, score_sum, routing_map: cute.Pointer, tokens: Int32):
        """See the module's docstring."""
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.shared_bytes, 16).toint()
        token, lane, place = self.token()
        if token < tokens:
            self.score((logits, scores, score_sum, routing_map), token, lane, shared + place * self.warp_bytes)

    @cute.jit
    def score(self, pointers, token: Int32, lane: Int32, shared: Int32):
        """One token."""
        config = self.config
        logits, scores, score_sum, routing_map = pointers
        words = shared + self.select.shared_bytes
        map_row = self.address(routing_map, token, self.map.row_bytes, 1)
        self.map.clear(map_row, words, lane)
        keys = self.load_keys(self.address(logits, token, config.experts, DTYPES[config.dtype].bytes), lane)
        largest = value_of(self.select.run(keys, shared, lane))
        for slot in cutlass.range_constexpr(self.select.chosen_slots):
            rank = lane + slot * WARP
            expert, _ = self.select.entry(shared, cutlass.min(rank, config.topk - 1))
            self.map.put(map_row, words, expert, rank < config.topk)
        self.map.finish(map_row, words, lane)

        if cutlass.const_expr(self.softmax):
            values = [exp_nonpositive(x - largest) for x in self.values(keys, lane)]
        else:
            values = [score(x, config.score_function) for x in self.values(keys, lane)]
        total = lanes.warp_sum(self.add_up(values))
        if cutlass.const_expr(not self.softmax):
            total += Float32(EPSILON)
            if lane == 0:
                self.put_element(self.address(score_sum, token, 1, 4), Int32(0), total, "f32", None)
        inverse = reciprocal_approx(total)
        values = [x * inverse for x in values]
        lanes.store_row(
            self.address(scores, token, config.experts, DTYPES[config.out_dtype].bytes),
            self.row, lane, values, config.out_dtype,
        )  # fmt: skip


class RouterAuxScoreBackward(RouterKernel):
    """One configuration of the backward kernel; calling it traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        row_lanes = WARP
        while config.experts * 2 > LANE_ELEMENTS * row_lanes and row_lanes < config.warps * WARP:
            row_lanes *= 2
        super().__init__(config, row_lanes, rows=2)
        self.softmax = config.score_function == "softmax"
        self.row_warps = row_lanes // WARP
        self.shared_bytes = config.warps * 4 if self.row_warps > 1 else 0

    @cute.jit
    def __call__(
        self, scores: cute.Tensor, score_sum, grad_scores: cute.Tensor, grad_logits: cute.Tensor, stream: CUstream
    ):
        """Launch; score_sum is None for softmax."""
        tokens = scores.shape[0]
        kernel = self.kernel(
            scores.iterator,
            None if cutlass.const_expr(self.softmax) else score_sum.iterator,
            grad_scores.iterator,
            grad_logits.iterator,
            tokens,
        )
        self.launch(kernel, tokens, stream)

    @cute.kernel
    def kernel(
        self, scores: cute.Pointer, score_sum, grad_scores: cute.Pointer, grad_logits: cute.Pointer, tokens: Int32
    ):
        """See the module's docstring."""
        shared = Int32(0)
        if cutlass.const_expr(self.row_warps > 1):
            allocator = cutlass.memory.SmemAllocator()
            shared = allocator.allocate(self.shared_bytes, 16).toint()
        token, lane, place = self.token()
        if token < tokens:
            self.differentiate((scores, score_sum, grad_scores, grad_logits), token, lane, place, shared)

    @cute.jit
    def differentiate(self, pointers, token: Int32, lane: Int32, place: Int32, shared: Int32):
        """One token."""
        config = self.config
        scores, score_sum, grad_scores, grad_logits = pointers
        size = DTYPES[config.out_dtype].bytes
        y = lanes.load_row(self.address(scores, token, config.experts, size), self.row, lane, config.out_dtype)
        g = lanes.load_row(self.address(grad_scores, token, config.experts, size), self.row, lane, config.out_dtype)
        if cutlass.const_expr(not self.softmax):
            total = self.element(self.address(score_sum, token, 1, 4), Int32(0), "f32", None)
            inverse = reciprocal_approx(total)
        dot = self.row_sum(self.add_up(a * b for a, b in zip(y, g, strict=True)), place, shared)
        if cutlass.const_expr(self.softmax):
            result = [a * (b - dot) for a, b in zip(y, g, strict=True)]
        else:
            s = [a * total for a in y]
            g = [(b - dot) * inverse for b in g]
            if cutlass.const_expr(config.score_function == "sigmoid"):
                slopes = [a * (Float32(1.0) - a) for a in s]
            else:
                slopes = [sqrtsoftplus_slope(a) for a in s]
            result = [b * slope for b, slope in zip(g, slopes, strict=True)]
        row = self.address(grad_logits, token, config.experts, DTYPES[config.dtype].bytes)
        lanes.store_row(row, self.row, lane, result, config.dtype)

    @cute.jit
    def row_sum(self, value: Float32, place: Int32, shared: Int32):
        """The sum over all lanes of the token, in the same order each time."""
        total = lanes.warp_sum(value)
        if cutlass.const_expr(self.row_warps > 1):
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            lanes.shared_store_u32(shared + warp * 4, lanes.bits_of(total))
            cute.arch.barrier(barrier_id=1 + place, number_of_threads=self.row_lanes)
            total = Float32(0.0)
            for index in cutlass.range_constexpr(self.row_warps):
                total += lanes.float_of(lanes.shared_load_u32(shared + (place * self.row_warps + index) * 4))
        return total

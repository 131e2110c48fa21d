"""router-topk-bwd: the gradient of the logits, from that of the probabilities or weights.

    softmax before the selection   dx_j = p_j (c g_j [chosen] - sum c g_i p_i)      p over all experts
    softmax after it               dx_j = p_j (c g_j - sum c g_i p_i), j chosen     p over the chosen
    sigmoid, sqrtsoftplus          dx_j = (c g_j - sum c g_i s_i / S) s'(x_j) / S, j chosen, S = sum s_i + 1e-20
                                   dx_j = c g_j s'(x_j) for K = 1

An addend [T, X] is added in float32, before the one rounding. Sums run over the chosen i; c is the scaling factor.
Nothing but the logits is kept from the forward pass. Only with `pre_softmax` is their whole row read: all else needs
the chosen experts' logits and gradients alone, which lane j loads for choice j and j + 32, and stores over a row of
zeros, or of the addend.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.floats import choose
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import reciprocal_approx
from fusekit.kernels.router.base import RouterKernel, negative_infinity
from fusekit.kernels.router.choices import Choices
from fusekit.kernels.router.config import RouterConfig
from fusekit.kernels.router.scores import EPSILON, exp_nonpositive, score, sigmoid_slope, sqrtsoftplus_slope


class RouterTopKBackward(RouterKernel):
    """One configuration of the kernel; calling it (through cute.compile) traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config, rows=1 + (config.addend and config.pre_softmax))
        self.choices = Choices(config.experts, config.topk, config.routing_map == "bits") if config.dense else None
        self.warp_bytes = self.choices.shared_bytes if config.dense else 0
        self.shared_bytes = config.warps * self.warp_bytes
        self.slots = -(-config.topk // WARP)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        routing_map,
        grad_probs,
        indices,
        grad_weights,
        addend,
        grad_logits: cute.Tensor,
        scaling_factor: Float32,
        stream: CUstream,
    ):
        """Launch. Operands that the configuration lacks are None."""
        tokens = logits.shape[0]
        dense = self.config.dense
        kernel = self.kernel(
            logits.iterator,
            routing_map.iterator if cutlass.const_expr(dense) else None,
            grad_probs.iterator if cutlass.const_expr(dense) else None,
            indices.iterator if cutlass.const_expr(not dense) else None,
            self.with_addend(grad_weights.iterator if cutlass.const_expr(not dense) else None, addend),
            grad_logits.iterator,
            scaling_factor,
            tokens,
        )
        self.launch(kernel, tokens, stream)

    @cute.kernel
    def kernel(
        self,
        logits: cute.Pointer,
        routing_map,
        grad_probs,
        indices,
        grad_weights,
        grad_logits: cute.Pointer,
        scaling: Float32,
        tokens: Int32,
    ):
        """See the module's docstring. grad_weights: None, theirs, or (either, the addend)."""
        grad_weights, addend = grad_weights if cutlass.const_expr(self.config.addend) else (grad_weights, None)
        shared = Int32(0)
        if cutlass.const_expr(self.config.dense):
            allocator = cutlass.memory.SmemAllocator()
            shared = allocator.allocate(self.shared_bytes, 16).toint()
        token, lane, place = self.token()
        if token < tokens:
            gradients = (routing_map, grad_probs, indices, grad_weights)
            row_shared = shared + place * self.warp_bytes
            self.differentiate(logits, gradients, grad_logits, addend, scaling, token, lane, row_shared)

    def with_addend(self, grad_weights, addend):
        """One parameter for both: a kernel without an addend has the parameters that it had before there were any."""
        return (grad_weights, addend.iterator) if self.config.addend else grad_weights

    @cute.jit
    def differentiate(
        self, logits, gradients, grad_logits, addend, scaling: Float32, token: Int32, lane: Int32, shared: Int32
    ):
        """One token."""
        config, size = self.config, DTYPES[self.config.grad_dtype].bytes
        logits_row = self.address(logits, token, config.experts, DTYPES[config.dtype].bytes)
        result_row = self.address(grad_logits, token, config.experts, size)
        if cutlass.const_expr(config.addend):
            addend_row = self.address(addend, token, config.experts, 4)
            added = lanes.load_row(addend_row, self.row, lane, "f32")
        if cutlass.const_expr(not config.pre_softmax):
            if cutlass.const_expr(config.addend):
                lanes.store_row(result_row, self.row, lane, added, config.grad_dtype)
            else:
                lanes.clear(result_row, config.experts * size, lane)
        else:
            values = lanes.load_row(logits_row, self.row, lane, config.dtype, negative_infinity(config.dtype))

        experts, valid, gradient = self.chosen(gradients, token, lane, shared)
        scaled = [g * scaling for g in gradient]
        if cutlass.const_expr(config.dense):
            cute.arch.sync_warp()
        x = [self.element(logits_row, e, config.dtype, use) for e, use in zip(experts, valid, strict=True)]

        if cutlass.const_expr(config.pre_softmax):
            largest = self.maximum_of(values)
            powers = [exp_nonpositive(value - largest) for value in values]
            inverse = reciprocal_approx(lanes.warp_sum(self.add_up(powers)))
            scores = [exp_nonpositive(value - largest) * inverse for value in x]
            dot = self.dot(scores, scaled, valid)
            row = [power * inverse * (dot * Float32(-1.0)) for power in powers]
            if cutlass.const_expr(config.addend):
                row = [value + more for value, more in zip(row, added, strict=True)]
            lanes.store_row(result_row, self.row, lane, row, config.grad_dtype)
            result = [p * (g - dot) for p, g in zip(scores, scaled, strict=True)]
        elif cutlass.const_expr(config.score_function == "softmax"):
            largest = self.maximum_of(self.where(valid, x, -float("inf")))
            powers = self.where(valid, [exp_nonpositive(value - largest) for value in x], 0.0)
            inverse = reciprocal_approx(lanes.warp_sum(self.add_up(powers)))
            scores = [power * inverse for power in powers]
            dot = self.dot(scores, scaled, valid)
            result = [p * (g - dot) for p, g in zip(scores, scaled, strict=True)]
        else:
            scores = self.where(valid, [score(value, config.score_function) for value in x], 0.0)
            if cutlass.const_expr(config.normalised):
                inverse = reciprocal_approx(lanes.warp_sum(self.add_up(scores)) + Float32(EPSILON))
                dot = self.dot([s * inverse for s in scores], scaled, valid)
                scaled = [(g - dot) * inverse for g in scaled]
            if cutlass.const_expr(config.score_function == "sigmoid"):
                slopes = [sigmoid_slope(value) for value in x]
            else:
                slopes = [sqrtsoftplus_slope(s) for s in scores]
            result = [g * slope for g, slope in zip(scaled, slopes, strict=True)]
        if cutlass.const_expr(config.addend):
            more = [self.element(addend_row, e, "f32", use) for e, use in zip(experts, valid, strict=True)]
            result = [value + other for value, other in zip(result, more, strict=True)]
        cute.arch.sync_warp()  # the row's other stores come first
        for slot in cutlass.range_constexpr(self.slots):
            self.put_element(result_row, experts[slot], result[slot], config.grad_dtype, valid[slot])

    def where(self, valid: list, values: list, otherwise: float) -> list:
        """The values of the choices that there are."""
        return [choose(use, value, Float32(otherwise)) for use, value in zip(valid, values, strict=True)]

    def dot(self, scores: list, scaled: list, valid: list) -> Float32:
        """The sum of scores * scaled over the choices."""
        return lanes.warp_sum(self.add_up(self.where(valid, [a * b for a, b in zip(scores, scaled, strict=True)], 0.0)))

    @cute.jit
    def chosen(self, gradients, token: Int32, lane: Int32, shared: Int32):
        """(experts, whether there is such a choice, its gradient) of a lane, for each of its slots."""
        config = self.config
        routing_map, grad_probs, indices, grad_weights = gradients
        if cutlass.const_expr(config.dense):
            map_row = self.address(routing_map, token, self.choices.row_bytes, 1)
            gradient_row = self.address(grad_probs, token, config.experts, DTYPES[config.out_dtype].bytes)
            count = self.choices.read(map_row, shared, lane)
        else:
            indices_row = self.address(indices, token, config.topk, 4)
            gradient_row = self.address(grad_weights, token, config.topk, 4)
        experts, valid, gradient = [], [], []
        for slot in cutlass.range_constexpr(self.slots):
            rank = lane + slot * WARP
            if cutlass.const_expr(config.dense):
                use = rank < count
                expert = Int32(lanes.shared_load_u32(shared + cutlass.min(rank, config.topk - 1) * 4))
                gradient.append(self.element(gradient_row, expert, config.out_dtype, use))
            else:
                there = rank < config.topk
                expert = Int32(lanes.load(indices_row + rank * 4, 4, there)[0])
                use = there & (expert >= 0) & (expert < config.experts)
                gradient.append(self.element(gradient_row, rank, "f32", there))
            experts.append(expert)
            valid.append(use)
        return experts, valid, gradient

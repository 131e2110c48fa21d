"""router-topk: the K best experts of every token and their weights.

A warp takes one token. It clears its row of the dense outputs first, so that these stores run while the logits are on
their way; finds the K best (select.py); and writes K elements over the zeros. What is per chosen expert (weights, sums
over the chosen) is done by lane j for rank j and rank j + 32, not over the whole row.

Bytes a token: X of the logits' type in; X probabilities and X bytes of map out (or X / 8), or 8 K in compact form.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.floats import choose
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import reciprocal_approx
from fusekit.kernels.router.base import RouterKernel, negative_infinity
from fusekit.kernels.router.config import RouterConfig
from fusekit.kernels.router.groups import GroupLimit
from fusekit.kernels.router.routing_map import MapWriter
from fusekit.kernels.router.scores import EPSILON, exp_nonpositive, score
from fusekit.kernels.router.select import TopK, key_of, value_of


class RouterTopK(RouterKernel):
    """One configuration of the kernel; calling it (through cute.compile) traces host function and kernel."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.select = TopK(self.row, config.topk)
        self.limit = GroupLimit(config, self.row) if config.num_groups else None
        self.list_bytes = max(self.select.shared_bytes, self.limit.shared_bytes if self.limit else 0)
        self.map = MapWriter(config)
        self.warp_bytes = self.list_bytes + (self.map.shared_bytes if config.dense else 0)
        self.shared_bytes = config.warps * self.warp_bytes

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        expert_bias,
        probs,
        routing_map,
        indices,
        weights,
        scaling_factor: Float32,
        stream: CUstream,
    ):
        """Launch. Operands that the configuration lacks are None."""
        tokens = logits.shape[0]
        dense = self.config.dense
        kernel = self.kernel(
            logits.iterator,
            expert_bias.iterator if cutlass.const_expr(self.config.expert_bias) else None,
            probs.iterator if cutlass.const_expr(dense) else None,
            routing_map.iterator if cutlass.const_expr(dense) else None,
            indices.iterator if cutlass.const_expr(not dense) else None,
            weights.iterator if cutlass.const_expr(not dense) else None,
            scaling_factor,
            tokens,
        )
        self.launch(kernel, tokens, stream)

    @cute.kernel
    def kernel(
        self, logits: cute.Pointer, expert_bias, probs, routing_map, indices, weights, scaling: Float32, tokens: Int32
    ):
        """See the module's docstring."""
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.shared_bytes, 16).toint()
        token, lane, place = self.token()
        if token < tokens:
            self.route(
                (logits, expert_bias, probs, routing_map, indices, weights),
                scaling,
                token,
                lane,
                shared + place * self.warp_bytes,
            )

    @cute.jit
    def route(self, pointers, scaling: Float32, token: Int32, lane: Int32, shared: Int32):
        """One token."""
        config = self.config
        logits, expert_bias, probs, routing_map, indices, weights = pointers
        logits_row = self.address(logits, token, config.experts, DTYPES[config.dtype].bytes)
        words = shared + self.list_bytes
        if cutlass.const_expr(config.dense):
            probs_row = self.address(probs, token, config.experts, DTYPES[config.out_dtype].bytes)
            lanes.clear(probs_row, config.experts * DTYPES[config.out_dtype].bytes, lane)
            map_row = self.address(routing_map, token, self.map.row_bytes, 1)
            self.map.clear(map_row, words, lane)
        values = lanes.load_row(logits_row, self.row, lane, config.dtype, negative_infinity(config.dtype))

        normaliser = None
        if cutlass.const_expr(config.pre_softmax):
            largest = self.maximum_of(values)
            normaliser = lanes.warp_sum(self.add_up(exp_nonpositive(x - largest) for x in values))
        keys = self.keys(values, expert_bias, shared, lane)
        self.select.run(keys, shared, lane)

        entries = [self.select.entry(shared, lane + slot * WARP) for slot in range(self.select.chosen_slots)]
        experts = [expert for expert, _ in entries]
        valid = [lane + slot * WARP < config.topk for slot in range(len(entries))]
        if cutlass.const_expr(config.expert_bias):
            # The key is that of the selection; the weight is made of the logit alone.
            chosen = [
                self.element(logits_row, expert, config.dtype, use) for expert, use in zip(experts, valid, strict=True)
            ]
        else:
            chosen = [value_of(key) for _, key in entries]
        if cutlass.const_expr(config.score_function == "softmax"):
            if cutlass.const_expr(not config.pre_softmax):
                largest = self.maximum_of(
                    [choose(use, x, Float32(-float("inf"))) for x, use in zip(chosen, valid, strict=True)]
                )
            scores = [exp_nonpositive(x - largest) for x in chosen]
        else:
            scores = [score(x, config.score_function) for x in chosen]
        scores = [choose(use, x, Float32(0.0)) for x, use in zip(scores, valid, strict=True)]
        if cutlass.const_expr(config.score_function == "softmax" and not config.pre_softmax):
            normaliser = lanes.warp_sum(self.add_up(scores))
        elif cutlass.const_expr(config.normalised):
            normaliser = lanes.warp_sum(self.add_up(scores)) + Float32(EPSILON)
        if cutlass.const_expr(normaliser is not None):
            scores = [x * reciprocal_approx(normaliser) for x in scores]
        scores = [x * scaling for x in scores]

        for slot in cutlass.range_constexpr(len(entries)):
            rank = lane + slot * WARP
            if cutlass.const_expr(config.dense):
                self.put_element(probs_row, experts[slot], scores[slot], config.out_dtype, valid[slot])
                self.map.put(map_row, words, experts[slot], valid[slot])
            else:
                indices_row = self.address(indices, token, config.topk, 4)
                weights_row = self.address(weights, token, config.topk, 4)
                lanes.store(indices_row + rank * 4, [Uint32(experts[slot])], 4, valid[slot])
                self.put_element(weights_row, rank, scores[slot], "f32", valid[slot])
        if cutlass.const_expr(config.dense):
            self.map.finish(map_row, words, lane)

    @cute.jit
    def keys(self, values, expert_bias, shared: Int32, lane: Int32):
        """What the selection compares: the logits' keys where the score is monotone in them, else the scores'."""
        config = self.config
        ranked = values
        if cutlass.const_expr(config.expert_bias):
            biases = lanes.load_row(expert_bias.toint(), self.row, lane, "f32")
            ranked = [score(x, config.score_function) + bias for x, bias in zip(values, biases, strict=True)]
        keys = self.existing([key_of(x) for x in ranked], lane)
        if cutlass.const_expr(self.limit is not None):
            if cutlass.const_expr(not config.expert_bias and config.score_function != "softmax"):
                ranked = [score(x, config.score_function) for x in values]
            elif cutlass.const_expr(config.pre_softmax):
                largest = self.maximum_of(values)
                ranked = [exp_nonpositive(x - largest) for x in values]
            keys = self.limit.run(keys, [key_of(x) for x in ranked], shared, lane)
        return keys

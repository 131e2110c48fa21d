"""moe-weights-bwd: the gradient of the router's weights from that of each row's weight.

    grad_weights[t, k] = dprob[inverse[t, k]] + addend[t, indices[t, k]]

The addend is optional, the sum a float32's. A choice without a row, of inverse -1, has gradient 0. A thread has a
choice.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.floats import add, choose
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide


class MoeWeightsBackward:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, experts: int, topk: int, addend: bool, warps: int) -> None:
        self.experts, self.topk, self.addend, self.threads = experts, topk, addend, warps * WARP

    @classmethod
    def of(cls, spec) -> "MoeWeightsBackward":
        """The kernel of a spec."""
        return cls(spec.experts, spec.topk, spec.addend, spec.warps)

    @cute.jit
    def __call__(
        self, dprob: cute.Tensor, inverse: cute.Tensor, indices, addend, grad_weights: cute.Tensor, stream: CUstream
    ):
        """Launch; indices and addend may be None."""
        choices = inverse.shape[0] * self.topk
        self.kernel(
            dprob.iterator,
            inverse.iterator,
            indices.iterator if cutlass.const_expr(self.addend) else None,
            addend.iterator if cutlass.const_expr(self.addend) else None,
            grad_weights.iterator,
            choices,
        ).launch(grid=[(choices - 1) // self.threads + 1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, dprob: cute.Pointer, inverse: cute.Pointer, indices, addend, grad_weights: cute.Pointer, choices: Int32
    ):
        """See the module's docstring."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        choice = block * self.threads + thread
        if choice < choices:
            place = Int64(choice) * 4
            row = Int32(lanes.load(inverse.toint() + place, 4)[0])
            there = row >= 0
            value = lanes.float_of(lanes.load(dprob.toint() + Int64(row) * 4, 4, there)[0])
            if cutlass.const_expr(self.addend):
                expert = Int32(lanes.load(indices.toint() + place, 4)[0])
                use = there & (expert >= 0) & (expert < self.experts)
                token = divide(choice, self.topk)
                source = addend.toint() + (Int64(token) * self.experts + Int64(expert)) * 4
                more = lanes.float_of(lanes.load(source, 4, use)[0])
                value = choose(there, add(value, more), Float32(0.0))
            lanes.store(grad_weights.toint() + place, [lanes.bits_of(value)], 4)

"""moe-probs: the weights of the chosen experts as a row of all experts.

    probs[t, indices[t, k]] = weights[t, k], every other element 0

An index outside [0, experts) is no expert. Of the choices of one expert by one token, the last counts. A warp takes a
token: it puts the weights into a row of zeros in shared memory, and writes that row once, in the widest stores that
keep rows aligned.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, load_shared_f32x4, store_shared_v4
from fusekit.kernels.router.config import Row, vector_elements


class MoeProbs:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, experts: int, topk: int, dtype: str, warps: int) -> None:
        self.experts, self.topk, self.dtype = experts, topk, dtype
        self.warps, self.threads = warps, warps * WARP
        self.row_bytes = experts * DTYPES[dtype].bytes
        self.row = Row(experts, vector_elements(experts, DTYPES[dtype].bytes))
        self.warp_bytes = self.row.size * WARP * 4
        self.words = min(4, self.row.vector)  # of an access of shared memory

    @classmethod
    def of(cls, spec) -> "MoeProbs":
        """That of a spec."""
        return cls(spec.experts, spec.topk, spec.out_dtype, spec.warps)

    @cute.jit
    def __call__(self, indices: cute.Tensor, weights: cute.Tensor, probs: cute.Tensor, stream: CUstream):
        """Launch."""
        tokens = indices.shape[0]
        self.kernel(indices.iterator, weights.iterator, probs.iterator, tokens).launch(
            grid=[(tokens - 1) // self.warps + 1, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, indices: cute.Pointer, weights: cute.Pointer, probs: cute.Pointer, tokens: Int32):
        """See the module's docstring."""
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.warps * self.warp_bytes, 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        token, own = block * self.warps + warp, shared + warp * self.warp_bytes
        if token < tokens:
            choices = Int64(token) * (self.topk * 4)
            zeros = [Uint32(0)] * self.words
            for address in self.places(own, lane):
                self.put(address, zeros)
            for first in cutlass.range_constexpr(0, self.topk, WARP):
                there = lane + first < self.topk
                at = choices + (lane + first) * 4
                expert = lanes.load(indices.toint() + at, 4, there, 0xFFFFFFFF)[0]
                weight = lanes.load(weights.toint() + at, 4, there)[0]
                same = lanes.match_any(expert)
                last = (same >> Uint32(lane)) == Uint32(1)
                use = last & (expert < Uint32(self.experts))
                cute.arch.sync_warp()
                lanes.shared_store_u32_if(own + Int32(expert) * 4, weight, use)
            cute.arch.sync_warp()
            values: list = []
            for address in self.places(own, lane):
                values += self.get(address)
            row = probs.toint() + Int64(token) * self.row_bytes
            lanes.store_row(row, self.row, lane, values, self.dtype)

    def places(self, own: Int32, lane: Int32) -> list:
        """Where a lane's share of the row lies in shared memory, access by access."""
        return [
            own + (self.row.first(chunk, lane) + word) * 4
            for chunk in range(self.row.chunks)
            for word in range(0, self.row.vector, self.words)
        ]

    def put(self, address: Int32, words: list) -> None:
        """An access's words to shared memory."""
        if self.words == 4:
            store_shared_v4(address, words)
        else:
            for place, word in enumerate(words):
                lanes.shared_store_u32(address + place * 4, word)

    def get(self, address: Int32) -> list:
        """An access of shared memory, as float32."""
        if self.words == 4:
            return list(load_shared_f32x4(address))
        return [lanes.float_of(lanes.shared_load_u32(address + place * 4)) for place in range(self.words)]

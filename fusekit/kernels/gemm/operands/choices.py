"""The choices of few tokens in the order of rows, by every CTA for itself, before its first tile.

A choice's row is the number of choices that come before it: those of experts with lower numbers, and those of its own
expert that have lower numbers themselves, as moe-index has it. All CTAs write the same numbers to global memory, and
each reads what it wrote.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, struct
from fusekit.plan.operands.choices import MOST


class Choices(DeviceOperand):
    def parameter(self, given):
        fields = [
            ("indices", given.indices.iterator),
            ("tokens", Int32(given.indices.shape[0])),
            ("inverse", given.inverse.iterator),
            ("offsets", given.offsets.iterator),
            ("token", given.index.iterator),
        ]
        return struct("Choices", fields)

    def view(self, parameter):
        return None

    def opening(self, operands, shared, extents) -> None:
        self.order(operands.choices, shared.choices.toint(), extents.groups, extents.rows)

    @cute.jit
    def order(self, given, memory: Int32, groups: Int32, rows: Int32):
        """All threads of a CTA."""
        thread, _, _ = cute.arch.thread_idx()
        topk = self.plan.spec.operands["choices"]
        count = given.tokens * topk
        if thread < MOST:
            found = lanes.load(given.indices.toint() + Int64(thread) * 4, 4, thread < count, 0xFFFFFFFF)[0]
            outside = found >= Uint32(groups)
            lanes.shared_store_u32(memory + thread * 4, cutlass.select_(outside, Uint32(0xFFFFFFFF), found))
        cute.arch.sync_threads()
        if thread < count:
            expert = lanes.shared_load_u32(memory + thread * 4)
            row = Int32(0)
            for place in cutlass.range(0, MOST, 4, unroll=1):
                for part, word in enumerate(ptx.load_shared_v4(memory + place * 4)):
                    other = Uint32(word)
                    row += Int32(other < expert) + Int32((other == expert) & (place + part < thread))
            there = (expert < Uint32(groups)) & (row < rows)
            token = ptx.divide(thread, topk)
            lanes.store(given.token.toint() + Int64(row) * 4, [Uint32(token)], 4, there)
            number = cutlass.select_(there, row, Int32(-1))
            lanes.store(given.inverse.toint() + Int64(thread) * 4, [Uint32(number)], 4)
        group = thread
        while group <= groups:  # after the last one, all choices that have an expert
            end = Int32(0)
            for place in cutlass.range(0, MOST, 4, unroll=1):
                for word in ptx.load_shared_v4(memory + place * 4):
                    end += Int32(Uint32(word) <= Uint32(group))
            end = cutlass.min(end, rows)
            lanes.store(given.offsets.toint() + Int64(group) * 4, [Uint32(end)], 4, group < groups)
            lanes.shared_store_u32_if(memory + MOST * 4, Uint32(end), group == groups)
            group += self.plan.threads
        cute.arch.sync_threads()
        row = Int32(lanes.shared_load_u32(memory + MOST * 4)) + thread
        while row < rows:  # no token has them
            lanes.store(given.token.toint() + Int64(row) * 4, [Uint32(0xFFFFFFFF)], 4)
            row += self.plan.threads
        cute.arch.sync_threads()

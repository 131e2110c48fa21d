"""moe-index: from the experts that tokens chose to the row order of grouped GEMMs, in one launch, without atomics.

Rows are choices sorted by expert, choices of one expert in the order of their numbers t * K + k (a stable sort). Every
cluster of eight blocks owns a few neighbouring experts; each of its 256 warps has a stretch of the choices, and reads
it twice. First it counts the cluster's own experts, and all experts before them. The blocks exchange their sums, which
gives every warp the first row of its choices of every expert. Then it numbers them. No cluster waits for another one,
and no order of execution shows in the result.

A choice outside [0, experts) belongs to no expert: its inverse is -1, and the rows end earlier. So it is with a choice
whose row would lie beyond the bound of a bounded order.
"""

from typing import NamedTuple

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, pdl
from fusekit.kernels.lanes import WARP

WARPS = 32  # of a block
CLUSTER = 8
BATCH = 8  # choices that a lane has in flight
MOST_CLUSTERS = 16  # so many are resident at a time: a block has 1024 threads


class More(NamedTuple):
    """Optional outputs next to the order: addresses of counts, of rows' tokens, of rows' weights with the
    router's, and of the rows that all choices want, with the bound; None for what it is not.
    """

    counts: object = None
    token: object = None
    weights: object = None
    row_scale: object = None
    wanted: object = None
    bound: object = None


class MoeIndex:
    """The kernel for a number of experts and choices a token; calling it traces host function and kernel.

    tokens: whether it writes each row's token. bounded: whether rows end at a launch's bound. pdl: whether it begins
    early, see fusekit.kernels.pdl.
    """

    def __init__(self, experts: int, topk: int, tokens: bool = False, bounded: bool = False, pdl: bool = False) -> None:
        self.experts, self.topk, self.tokens, self.bounded, self.pdl = experts, topk, tokens, bounded, pdl
        self.owned = -(-experts // MOST_CLUSTERS)  # experts of a cluster
        self.blocks = -(-experts // self.owned) * CLUSTER
        self.threads = WARPS * WARP
        # Words: counts[owned][warps], totals[owned][blocks], first rows [owned], below[warps], below[blocks], and for
        # tokens the end of the last row.
        self.totals = self.owned * WARPS * 4
        self.firsts = self.totals + self.owned * CLUSTER * 4
        self.below = self.firsts + self.owned * 4
        self.belows = self.below + WARPS * 4
        self.last = self.belows + CLUSTER * 4
        self.shared_bytes = self.last + 4 * tokens

    @classmethod
    def of(cls, spec) -> "MoeIndex":
        """The kernel of a spec."""
        return cls(spec.experts, spec.topk, spec.tokens, spec.bounded, getattr(spec, "pdl", False))

    @cute.jit
    def __call__(
        self, indices: cute.Tensor, weights, offsets: cute.Tensor, order: cute.Tensor, inverse: cute.Tensor, counts,
        token, row_scale, wanted, stream: CUstream,
    ):  # fmt: skip
        """Launch; weights, counts, token, row_scale and wanted may be None."""
        choices = indices.shape[0] * self.topk
        bound = order.shape[0] if cutlass.const_expr(self.bounded) else None
        given = (counts, token, weights, row_scale, wanted)
        more = More(*(None if tensor is None else tensor.iterator for tensor in given), bound)
        self.kernel(indices.iterator, offsets.iterator, order.iterator, inverse.iterator, choices, more).launch(
            grid=[self.blocks, 1, 1], block=[self.threads, 1, 1], cluster=[CLUSTER, 1, 1], use_pdl=self.pdl,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, indices: cute.Pointer, offsets: cute.Pointer, order: cute.Pointer, inverse: cute.Pointer, choices: Int32,
        more: More,
    ):  # fmt: skip
        """See the module's docstring."""
        if cutlass.const_expr(self.pdl):
            pdl.begin()
        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(self.shared_bytes, 16).toint()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        rank = block & (CLUSTER - 1)
        first = (block >> 3) * self.owned
        step = CLUSTER * WARPS * WARP * BATCH
        stretch = ((choices - 1) // step + 1) * (WARP * BATCH)  # of a warp, whole batches
        begin = cutlass.min((rank * WARPS + warp) * stretch, choices)
        end = cutlass.min(begin + stretch, choices)
        cute.arch.cluster_arrive()  # from the wait on, all blocks run, and their shared memory may be written
        for start in cutlass.range_constexpr(0, self.owned * WARPS, self.threads):
            if thread + start < self.owned * WARPS:
                lanes.shared_store_u32(shared + (thread + start) * 4, Uint32(0))
        cute.arch.sync_threads()
        self.count(indices.toint(), (begin, end, lane, warp), first, shared)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        self.hand_out(shared, lane, warp, rank)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            self.first_rows(offsets.toint(), more, first, shared, lane, rank)
        cute.arch.sync_threads()
        for expert in cutlass.range(warp, self.owned, WARPS):
            address = shared + (expert * WARPS + lane) * 4
            row = lanes.shared_load_u32(shared + self.firsts + expert * 4)
            lanes.shared_store_u32(address, lanes.shared_load_u32(address) + row)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.tokens):  # noqa: SIM102 - rows that are not there have no token
            if first + self.owned >= self.experts:
                row = Int32(lanes.shared_load_u32(shared + self.last)) + rank * self.threads + thread
                end_of_rows = more.bound if cutlass.const_expr(self.bounded) else choices
                if cutlass.const_expr(self.bounded):
                    lanes.store(more.wanted.toint(), [Uint32(row)], 4, (rank == 0) & (thread == 0))
                while row < end_of_rows:
                    lanes.store(more.token.toint() + Int64(row) * 4, [Uint32(0xFFFFFFFF)], 4, row < end_of_rows)
                    row += CLUSTER * self.threads
        pointers = (indices.toint(), order.toint(), inverse.toint())
        self.number(pointers, more, (begin, end, lane, warp), first, shared)

    def owns(self, place: Uint32, first: Int32):
        """Whether an expert, counted from the cluster's first, exists and is the cluster's."""
        return place < Uint32(cutlass.min(self.experts - first, self.owned))

    def batch(self, indices: Int64, base: Int32, end: Int32, lane: Int32) -> list:
        """The experts of a batch; place j of lane l is choice base + 32 j + l, and no expert past the end."""
        start = indices + Int64(base + lane) * 4
        no_expert = 0x7FFFFFFF
        return [
            lanes.load(start, 4, base + lane + WARP * place < end, no_expert, WARP * place * 4)[0]
            for place in range(BATCH)
        ]

    @cute.jit
    def count(self, indices: Int64, stretch, first: Int32, shared: Int32):
        """Counts the warp's choices of each owned expert, and of all before the first."""
        begin, end, lane, warp = stretch
        below = Int32(0)
        for base in cutlass.range(begin, end, WARP * BATCH):
            for expert in self.batch(indices, base, end, lane):
                below += Int32(expert < Uint32(first))
                place = expert - Uint32(first)
                lanes.shared_add_if(shared + Int32(place * WARPS + Uint32(warp)) * 4, self.owns(place, first))
        total = lanes.redux(Uint32(below), "add")
        if lane == 0:
            lanes.shared_store_u32(shared + self.below + warp * 4, total)

    @cute.jit
    def hand_out(self, shared: Int32, lane: Int32, warp: Int32, rank: Int32):
        """Sums the block's counts over its warps, and gives the sums to every block of the cluster."""
        for expert in cutlass.range(warp, self.owned, WARPS):
            address = shared + (expert * WARPS + lane) * 4
            count = Int32(lanes.shared_load_u32(address))
            lanes.shared_store_u32(address, Uint32(lanes.before(count, lane)))
            total = lanes.redux(Uint32(count), "add")
            lanes.cluster_store_u32(shared + self.totals + (expert * CLUSTER + rank) * 4, total, lane, lane < CLUSTER)
        if warp == 0:
            total = lanes.redux(lanes.shared_load_u32(shared + self.below + lane * 4), "add")
            lanes.cluster_store_u32(shared + self.belows + rank * 4, total, lane, lane < CLUSTER)

    @cute.jit
    def first_rows(self, offsets: Int64, more: More, first: Int32, shared: Int32, lane: Int32, rank: Int32):
        """The block's first row of each owned expert; the cluster's first block writes offsets and counts. One warp."""
        row = Int32(0)  # where the experts of this round begin
        for index in cutlass.range_constexpr(CLUSTER):
            row += Int32(lanes.shared_load_u32(shared + self.belows + index * 4))
        for start in cutlass.range(0, self.owned, WARP):
            expert = start + lane
            owned = expert < self.owned
            before, whole = Int32(0), Int32(0)  # choices in the blocks before this one, and in all
            table = shared + self.totals + cutlass.min(expert, self.owned - 1) * (CLUSTER * 4)
            for index in cutlass.range_constexpr(CLUSTER):
                count = Int32(cutlass.select_(owned, lanes.shared_load_u32(table + index * 4), Uint32(0)))
                before += cutlass.select_(index < rank, count, Int32(0))
                whole += count
            begin = row + lanes.before(whole, lane)
            lanes.shared_store_u32_if(shared + self.firsts + expert * 4, Uint32(begin + before), owned)
            exists = owned & (first + expert < self.experts) & (rank == 0)
            end = begin + whole
            if cutlass.const_expr(self.bounded):
                end = cutlass.min(end, more.bound)
            lanes.store(offsets + Int64(first + expert) * 4, [Uint32(end)], 4, exists)
            if cutlass.const_expr(more.counts is not None):
                lanes.store(more.counts.toint() + Int64(first + expert) * 4, [Uint32(whole)], 4, exists)
            row += Int32(lanes.redux(Uint32(whole), "add"))
        if cutlass.const_expr(self.tokens):
            lanes.shared_store_u32_if(shared + self.last, Uint32(row), lane == 0)

    @cute.jit
    def number(self, pointers, more: More, stretch, first: Int32, shared: Int32):
        """Gives the warp's choices of owned experts their rows, in order; the first cluster marks choices without an
        expert.
        """
        indices, order, inverse = pointers
        begin, end, lane, warp = stretch
        for base in cutlass.range(begin, end, WARP * BATCH):
            experts = self.batch(indices, base, end, lane)
            for index in cutlass.range_constexpr(BATCH):
                choice = base + lane + WARP * index
                place = experts[index] - Uint32(first)
                owned = self.owns(place, first)
                if cute.arch.vote_any_sync(owned):
                    same = Int32(lanes.match_any(cutlass.select_(owned, place, Uint32(0xFFFFFFFF))))
                    address = shared + Int32(cutlass.select_(owned, place, Uint32(0)) * WARPS + Uint32(warp)) * 4
                    row = Int32(lanes.shared_load_u32(address))
                    before = cute.arch.popc(same & ((Int32(1) << lane) - 1))
                    cute.arch.sync_warp()
                    next_row = Uint32(row + cute.arch.popc(same))
                    lanes.shared_store_u32_if(address, next_row, owned & (before == 0))
                    cute.arch.sync_warp()
                    if cutlass.const_expr(self.bounded):
                        beyond = owned & (row + before >= more.bound)
                        lanes.store(inverse + Int64(choice) * 4, [Uint32(0xFFFFFFFF)], 4, beyond)
                        owned = owned & (row + before < more.bound)
                    lanes.store(order + Int64(row + before) * 4, [Uint32(choice)], 4, owned)
                    lanes.store(inverse + Int64(choice) * 4, [Uint32(row + before)], 4, owned)
                    if cutlass.const_expr(self.tokens):
                        token = Uint32(choice) // Uint32(self.topk)
                        lanes.store(more.token.toint() + Int64(row + before) * 4, [token], 4, owned)
                    if cutlass.const_expr(more.weights is not None):
                        weight = lanes.load(more.weights.toint() + Int64(choice) * 4, 4, owned, 0)
                        lanes.store(more.row_scale.toint() + Int64(row + before) * 4, weight, 4, owned)
                outside = (experts[index] >= Uint32(self.experts)) & (choice < end) & (first == 0)
                lanes.store(inverse + Int64(choice) * 4, [Uint32(0xFFFFFFFF)], 4, outside)

"""moe-index: from the experts that tokens chose to the row order of grouped GEMMs, in one launch, without atomics.

Rows are choices sorted by expert, choices of one expert in the order of their numbers t * K + k (a stable sort). Every
cluster of eight blocks owns a few neighbouring experts; each of its 256 warps has a stretch of the choices, and reads
it twice. First it counts the cluster's own experts, and all experts before them. The blocks hand their sums to each
other, which gives every warp the first row of its choices of every expert. Then it numbers them. No cluster waits for
another one, and no order of execution shows in the result.

A choice outside [0, experts) belongs to nobody: its inverse is -1, and the rows end earlier. Where the tokens of rows
are asked for, too, the last cluster writes -1 for those that are not there.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP

WARPS = 32  # of a block
CLUSTER = 8
BATCH = 8  # choices that a lane has in flight
MOST_CLUSTERS = 16  # so many are resident at a time: a block has 1024 threads


class MoeIndex:
    """The kernel for a number of experts and choices a token; calling it traces host function and kernel.

    tokens: whether it says each row's token, too.
    """

    def __init__(self, experts: int, topk: int, tokens: bool = False) -> None:
        self.experts, self.topk, self.tokens = experts, topk, tokens
        self.owned = -(-experts // MOST_CLUSTERS)  # experts of a cluster
        self.blocks = -(-experts // self.owned) * CLUSTER
        self.threads = WARPS * WARP
        # Words: counts[owned][warps], totals[owned][blocks], first rows [owned], below[warps], below[blocks], and for
        # tokens the last row's end.
        self.totals = self.owned * WARPS * 4
        self.firsts = self.totals + self.owned * CLUSTER * 4
        self.below = self.firsts + self.owned * 4
        self.belows = self.below + WARPS * 4
        self.last = self.belows + CLUSTER * 4
        self.shared_bytes = self.last + 4 * tokens

    @cute.jit
    def __call__(
        self,
        indices: cute.Tensor,
        offsets: cute.Tensor,
        order: cute.Tensor,
        inverse: cute.Tensor,
        token,
        stream: CUstream,
    ):
        """Launch. token: None where nobody asks for it."""
        choices = indices.shape[0] * self.topk
        given = (indices.iterator, offsets.iterator, order.iterator, inverse.iterator, choices)
        if cutlass.const_expr(token is None):
            made = self.kernel(*given)
        else:
            made = self.kernel_with_tokens(*given, token.iterator)
        made.launch(grid=[self.blocks, 1, 1], block=[self.threads, 1, 1], cluster=[CLUSTER, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, indices: cute.Pointer, offsets: cute.Pointer, order: cute.Pointer, inverse: cute.Pointer, choices: Int32
    ):
        """See the module's docstring."""
        self.run(indices, offsets, order, inverse, choices, None)

    @cute.kernel
    def kernel_with_tokens(
        self,
        indices: cute.Pointer,
        offsets: cute.Pointer,
        order: cute.Pointer,
        inverse: cute.Pointer,
        choices: Int32,
        token: cute.Pointer,
    ):
        """The same, with the tokens of rows."""
        self.run(indices, offsets, order, inverse, choices, token)

    @cute.jit
    def run(self, indices, offsets, order, inverse, choices: Int32, token):
        """What a block does."""
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
            self.first_rows(offsets.toint(), first, shared, lane, rank)
        cute.arch.sync_threads()
        for expert in cutlass.range(warp, self.owned, WARPS):
            address = shared + (expert * WARPS + lane) * 4
            row = lanes.shared_load_u32(shared + self.firsts + expert * 4)
            lanes.shared_store_u32(address, lanes.shared_load_u32(address) + row)
        cute.arch.sync_threads()
        pointers = (indices.toint(), order.toint(), inverse.toint())
        if cutlass.const_expr(self.tokens):
            pointers = (*pointers, token.toint())
            if first + self.owned >= self.experts:
                row = Int32(lanes.shared_load_u32(shared + self.last)) + rank * self.threads + thread
                while row < choices:
                    lanes.store(pointers[3] + Int64(row) * 4, [Uint32(0xFFFFFFFF)], 4, row < choices)
                    row += CLUSTER * self.threads
        self.number(pointers, (begin, end, lane, warp), first, shared)

    def mine(self, place: Uint32, first: Int32):
        """Whether an expert, counted from the cluster's first, exists and is the cluster's."""
        return place < Uint32(cutlass.min(self.experts - first, self.owned))

    def batch(self, indices: Int64, base: Int32, end: Int32, lane: Int32) -> list:
        """The experts of a batch; place j of lane l is choice base + 32 j + l, and nobody's past the end."""
        start = indices + Int64(base + lane) * 4
        nobody = 0x7FFFFFFF
        return [
            lanes.load(start, 4, base + lane + WARP * place < end, nobody, WARP * place * 4)[0]
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
                lanes.shared_add_if(shared + Int32(place * WARPS + Uint32(warp)) * 4, self.mine(place, first))
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
    def first_rows(self, offsets: Int64, first: Int32, shared: Int32, lane: Int32, rank: Int32):
        """The block's first row of each owned expert; the cluster's first block writes the offsets. One warp."""
        row = Int32(0)  # where the experts of this round begin
        for index in cutlass.range_constexpr(CLUSTER):
            row += Int32(lanes.shared_load_u32(shared + self.belows + index * 4))
        for start in cutlass.range(0, self.owned, WARP):
            expert = start + lane
            owned = expert < self.owned
            mine, whole = Int32(0), Int32(0)  # choices in the blocks before this one, and in all
            table = shared + self.totals + cutlass.min(expert, self.owned - 1) * (CLUSTER * 4)
            for index in cutlass.range_constexpr(CLUSTER):
                count = Int32(cutlass.select_(owned, lanes.shared_load_u32(table + index * 4), Uint32(0)))
                mine += cutlass.select_(index < rank, count, Int32(0))
                whole += count
            begin = row + lanes.before(whole, lane)
            lanes.shared_store_u32_if(shared + self.firsts + expert * 4, Uint32(begin + mine), owned)
            exists = owned & (first + expert < self.experts) & (rank == 0)
            lanes.store(offsets + Int64(first + expert) * 4, [Uint32(begin + whole)], 4, exists)
            row += Int32(lanes.redux(Uint32(whole), "add"))
        if cutlass.const_expr(self.tokens):
            lanes.shared_store_u32_if(shared + self.last, Uint32(row), lane == 0)

    @cute.jit
    def number(self, pointers, stretch, first: Int32, shared: Int32):
        """Gives the warp's choices of owned experts their rows, in order; the first cluster marks nobody's choices."""
        indices, order, inverse = pointers[:3]
        begin, end, lane, warp = stretch
        for base in cutlass.range(begin, end, WARP * BATCH):
            experts = self.batch(indices, base, end, lane)
            for index in cutlass.range_constexpr(BATCH):
                choice = base + lane + WARP * index
                place = experts[index] - Uint32(first)
                mine = self.mine(place, first)
                if cute.arch.vote_any_sync(mine):
                    same = Int32(lanes.match_any(cutlass.select_(mine, place, Uint32(0xFFFFFFFF))))
                    address = shared + Int32(cutlass.select_(mine, place, Uint32(0)) * WARPS + Uint32(warp)) * 4
                    row = Int32(lanes.shared_load_u32(address))
                    before = cute.arch.popc(same & ((Int32(1) << lane) - 1))
                    cute.arch.sync_warp()
                    next_row = Uint32(row + cute.arch.popc(same))
                    lanes.shared_store_u32_if(address, next_row, mine & (before == 0))
                    cute.arch.sync_warp()
                    lanes.store(order + Int64(row + before) * 4, [Uint32(choice)], 4, mine)
                    if cutlass.const_expr(self.tokens):
                        token = Uint32(choice) // Uint32(self.topk)
                        lanes.store(pointers[3] + Int64(row + before) * 4, [token], 4, mine)
                    lanes.store(inverse + Int64(choice) * 4, [Uint32(row + before)], 4, mine)
                outside = (experts[index] >= Uint32(self.experts)) & (choice < end) & (first == 0)
                lanes.store(inverse + Int64(choice) * 4, [Uint32(0xFFFFFFFF)], 4, outside)

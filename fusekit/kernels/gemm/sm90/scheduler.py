"""Which tile a CTA computes next: one warp decides, everybody else in the CTA reads its ring.

The grid is persistent. A cluster tile is one CTA tile, or two of one group; the groups' cluster tiles are numbered one
group after the other, so a number is turned into (group, m, n) from the row offsets, read on the device: the host
never learns them. How a group's tiles are numbered and paired: raster.py.

Static: cluster c takes the numbers c, c + clusters, c + 2 clusters and so on; each CTA works them out for itself.
Dynamic: after its first, a cluster takes the next number from a counter in global memory. Tiles then begin in the order
of their numbers however long each takes, which balances the end and keeps neighbours together in L2. The cluster's
first CTA asks, and writes both rings.

The warp keeps 32 groups at a time in its lanes. A cluster's numbers only grow, so it moves forward through the groups
and never looks back.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from fusekit.kernels.dsl import extract_mlir_values, new_from_mlir_values
from fusekit.kernels.gemm.operands.base import Extents
from fusekit.kernels.gemm.sm90.raster import ALONG_M, Raster
from fusekit.kernels.ptx import (
    arrive_at,
    arrive_expecting,
    divide,
    load_below,
    load_shared_v4,
    mapped_address,
    modulo,
    store_async_v4,
    store_shared_v4,
)
from fusekit.plan.exchange import LOCAL_TOKENS
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.quant import SIDE

NO_TILE = -1  # instead of a group: the schedule has ended


def column_of(n_tile: Int32) -> Int32:
    """A tile's number along N, from the ring's word."""
    return n_tile & (ALONG_M - 1)


class TileRing:
    """The scheduler warp's ring of tiles in shared memory, guarded by one full and one empty barrier a slot.

    Arrive counts: full 1 (the scheduler); empty 1 of the load warp + 4 for each consumer warpgroup that reads the
    slot (one in ping-pong, which hands even slots to one and odd slots to the other; two in cooperative) + those of
    an operand that reads tiles. Where one scheduler serves a whole cluster, it writes every CTA's ring, and all their
    readers arrive at its empty barrier.
    """

    def __init__(self, plan: GemmPlan, slots, full, empty) -> None:
        self.plan = plan
        self.slots, self.full, self.empty = slots, full, empty
        self.shared = plan.ring_shared

    def __extract_mlir_values__(self) -> list:
        """Lets the DSL carry a ring through run-time control flow."""
        return [value for part in (self.slots, self.full, self.empty) for value in extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> "TileRing":
        """The ring again, from the values of `__extract_mlir_values__`."""
        parts = []
        for part in (self.slots, self.full, self.empty):
            count = len(extract_mlir_values(part))
            parts.append(new_from_mlir_values(part, values[:count]))
            values = values[count:]
        return TileRing(self.plan, *parts)

    @cute.jit
    def acquire(self, count: Int32):
        """Wait until the `count`-th tile may be written."""
        slot = modulo(count, self.plan.ring_slots)
        cute.arch.mbarrier_wait(self.empty + slot, (divide(count, self.plan.ring_slots) & 1) ^ 1)

    @cute.jit
    def put(self, count: Int32, tile, rank: Int32):
        """Publish the `count`-th tile of CTA `rank` (its own, where each CTA has a scheduler); one lane."""
        slot = modulo(count, self.plan.ring_slots)
        if cutlass.const_expr(self.shared):
            barrier = mapped_address((self.full + slot).toint(), rank)
            arrive_expecting(barrier, self.plan.slot_bytes)
            address = mapped_address(self.slots + slot * self.plan.slot_bytes, rank)
            for word in cutlass.range_constexpr(0, len(tile), 4):
                store_async_v4(address + word * 4, barrier, tile[word : word + 4])
        else:
            address = self.slots + slot * self.plan.slot_bytes
            for word in cutlass.range_constexpr(0, len(tile), 4):
                store_shared_v4(address + word * 4, tile[word : word + 4])
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def get(self, count: Int32):
        """Read the `count`-th tile; any number of lanes. Its words are those that the scheduler put."""
        slot = modulo(count, self.plan.ring_slots)
        cute.arch.mbarrier_wait(self.full + slot, divide(count, self.plan.ring_slots) & 1)
        words = ()
        for word in cutlass.range_constexpr(0, self.plan.slot_bytes // 4, 4):
            words = words + load_shared_v4(self.slots + (slot * self.plan.slot_bytes + word * 4))
        return words

    @cute.jit
    def free(self, count: Int32):
        """Give the slot back; one lane of each reading warp, after the warp has read it."""
        barrier = self.empty + modulo(count, self.plan.ring_slots)
        if cutlass.const_expr(self.shared):
            arrive_at(barrier.toint(), 0)
        else:
            cute.arch.mbarrier_arrive(barrier)


class Scheduler:
    """The scheduler warp's program for tiles of rows: (first row, end row of the group, tile along N, group).

    ALONG_M is added to the tile along N where the cluster's CTAs share w (raster.py).
    """

    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self.raster = Raster(plan)
        self.sentinels = 2 if plan.pingpong else 1  # each consumer warpgroup must see the end

    start = 0  # from which the loop of `publish` counts groups

    def group(self, counted: Int32) -> Int32:
        """The group that `publish` counts so."""
        return counted

    @cute.jit
    def run(self, ring: TileRing, offsets, extents: Extents, counters, rank: Int32):
        """Fill the ring until the cluster's tiles are over; all lanes of one warp.

        offsets: what the operands give as the `source` of the groups' rows. counters: two int32 of the workspace, zero
        between launches (dynamic schedule). rank: of the CTA in its cluster.
        """
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(ring.shared):
            if rank == 0:
                self.publish(ring, offsets, extents, counters, lane, lane < self.plan.cluster_size, lane)
        else:
            self.publish(ring, offsets, extents, counters, rank, lane == 0, lane)

    @cute.jit
    def publish(self, ring: TileRing, offsets, extents: Extents, counters, rank: Int32, writer, lane: Int32):
        """The loop of `run`; the lanes for which `writer` holds write the ring of CTA `rank` each."""
        tile_m = self.plan.tile[0]
        groups, rows, n, _, k = extents
        number = self.first_number()
        count = Int32(0)
        first = Int32(self.start)
        begin, end, last = self.groups_of_lanes(offsets, first, groups, rows, n, Int32(0), lane)
        chunk_end = cute.arch.shuffle_sync(last, 31)
        more = Boolean(True)
        while more:
            while number >= chunk_end and first + 32 < groups:
                first += 32
                begin, end, last = self.groups_of_lanes(offsets, first, groups, rows, n, chunk_end, lane)
                chunk_end = cute.arch.shuffle_sync(last, 31)
            more = number < chunk_end
            ring.acquire(count)
            if more:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(number >= last))
                group_begin = cute.arch.shuffle_sync(begin, owner)
                group_end = cute.arch.shuffle_sync(end, owner)
                m_tiles = divide(group_end - group_begin + (tile_m - 1), tile_m)
                local = number - (cute.arch.shuffle_sync(last, owner) - self.raster.count(m_tiles, n))
                m_tile, n_tile = self.raster.place(local, m_tiles, n, k, rank)
                if writer:
                    ring.put(count, (group_begin + m_tile * tile_m, group_end, n_tile, self.group(first) + owner), rank)
                count += 1
                number = self.next_number(counters, number, lane)
        self.finish(ring, (Int32(0), Int32(0), Int32(0), Int32(NO_TILE)), count, counters, rank, writer, lane)

    def first_number(self) -> Int32:
        """The cluster's first tile number."""
        block, _, _ = cute.arch.block_idx()
        return divide(block, self.plan.cluster_size)

    def clusters(self) -> Int32:
        """Clusters of the grid. Asked for anew each time: the scheduler warp has few registers."""
        grid, _, _ = cute.arch.grid_dim()
        return divide(grid, self.plan.cluster_size)

    @cute.jit
    def finish(self, ring: TileRing, sentinel, count: Int32, counters, rank: Int32, writer, lane: Int32):
        """Tell every reader that the schedule has ended; the slot of `count` is free already."""
        for extra in cutlass.range_constexpr(self.sentinels):
            if cutlass.const_expr(extra > 0):
                ring.acquire(count + extra)
            if writer:
                ring.put(count + extra, sentinel, rank)
        if cutlass.const_expr(self.plan.dynamic):
            self.reset(counters, lane)

    @cute.jit
    def groups_of_lanes(self, offsets, first: Int32, groups: Int32, rows: Int32, n: Int32, base: Int32, lane: Int32):
        """Rows [begin, end) of group first + lane, and the tile number at which that group ends."""
        begin, end = self.rows_of_lane(offsets, first, groups, rows, lane)
        tiles = Int32(0)
        if end > begin:
            tiles = self.raster.count(divide(end - begin + (self.plan.tile[0] - 1), self.plan.tile[0]), n)
        last = tiles
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(last, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                last += below
        return begin, end, last + base

    @cute.jit
    def rows_of_lane(self, offsets, first: Int32, groups: Int32, rows: Int32, lane: Int32):
        """Rows [begin, end) of group first + lane."""
        begin = Int32(0)
        end = Int32(0)
        if cutlass.const_expr(self.plan.grouped):
            group = first + lane
            if group < groups:
                end = cutlass.min(offsets[group], rows)  # rows beyond the buffer belong to no group
                if group > 0:
                    begin = cutlass.max(offsets[group - 1], 0)
        else:
            if lane == 0:
                end = rows
        return begin, end

    @cute.jit
    def next_number(self, counters, number: Int32, lane: Int32):
        """The cluster's next tile number: a fixed step ahead, or whatever is left first."""
        if cutlass.const_expr(self.plan.dynamic):
            taken = Int32(0)
            if lane == 0:
                taken = cute.arch.atomic_add(counters, Int32(1), sem="relaxed", scope="gpu")
            number = self.clusters() + cute.arch.shuffle_sync(taken, 0)
        else:
            number += self.clusters()
        return number

    @cute.jit
    def reset(self, counters, lane: Int32):
        """The last cluster to end leaves both counters at zero for the next launch."""
        if lane == 0:
            ended = cute.arch.atomic_add(counters + 1, Int32(1), sem="acq_rel", scope="gpu")
            if ended == self.clusters() - 1:
                cute.arch.store(counters, Int32(0))
                cute.arch.store(counters + 1, Int32(0))


class LocalRowsFirst(Scheduler):
    """Begins with the tiles that have only rows of the rank's own tokens, while others come (operands/arrivals.py).

    The first 32 groups are gone through three times: for those tiles, for the ones before them and for the ones after.
    A group's rows are in the order of their tokens' places, so those of the rank's own tokens lie together; in another
    order, tiles come in another order, too. A part begins at a whole tile of its group: the tiles are the same as
    without parts.
    """

    start = -64

    def group(self, counted: Int32) -> Int32:
        """As in `Scheduler`."""
        return cutlass.max(counted, 0)

    @cute.jit
    def rows_of_lane(self, source, first: Int32, groups: Int32, rows: Int32, lane: Int32):
        """As in `Scheduler`, of one of three parts where first is 0 or less."""
        tile_m = self.plan.tile[0]
        begin, end = Scheduler.rows_of_lane(self, source.offsets, self.group(first), groups, rows, lane)
        if first <= 0:
            end = cutlass.max(begin, end)  # no rows where offsets fall; else the part before `begin` would be one
            tokens = source.arrivals.toint() + LOCAL_TOKENS
            low, high = first_from(source.index, begin, end, (load_word(tokens), load_word(tokens + 4)))
            low = cutlass.min(begin + divide(cutlass.max(low - begin, 0) + (tile_m - 1), tile_m) * tile_m, end)
            if high < end:  # a last tile that is not full is the rank's own where all of its rows are
                high = begin + divide(cutlass.max(high - begin, 0), tile_m) * tile_m
            high = cutlass.max(high, low)
            if first == -64:
                begin, end = low, high
            elif first == -32:
                end = low
            else:
                begin = high
        return begin, end


class LocalRows(NamedTuple):
    """Pointers: the groups' ends, the place of each row's token, the window that has which are the rank's own."""

    offsets: Any
    index: Any
    arrivals: Any


@cute.jit
def first_from(index, begin: Int32, end: Int32, bounds: tuple):
    """For each of two bounds the first row in [begin, end) with index[row] >= bound; end where there is none.

    All lanes, each its own rows. The tiles wait for it, so it is as few loads after one another as registers allow.
    """
    low, low_end, high, high_end = begin, end, begin, end
    while cute.arch.vote_any_sync((low < low_end) | (high < high_end)):
        low, low_end = narrowed(index, low, low_end, bounds[0])
        high, high_end = narrowed(index, high, high_end, bounds[1])
    return low, high


def narrowed(index, begin: Int32, end: Int32, bound: Int32) -> tuple:
    """The third of [begin, end] that `bound` lies in, by two loads side by side."""
    third = divide(end - begin + 2, 3)
    until = cutlass.select_(third > 0, end, -1)
    first, row = begin, begin - 1
    for _ in range(2):  # with three, some kernels spill
        row = row + third
        below = (row < until) & (load_below(index, row, until) < bound)
        first = cutlass.select_(below, row + 1, first)
    return first, cutlass.select_(row < first, end, cutlass.min(first + third - 1, end))


class GroupScheduler(Scheduler):
    """The program for weight gradients: every group has the same tiles, and its rows are the reduction.

    A tile's words: first row, end row, tile along N, group, tile along M, stages that the operand pipeline has seen
    before it, and of factors with a column for each token the group's first block of 128; the last is zero.
    """

    @cute.jit
    def publish(self, ring: TileRing, offsets, extents: Extents, counters, rank: Int32, writer, lane: Int32):
        """As in `Scheduler`."""
        groups, rows, n, _, m = extents
        number = self.first_number()
        m_tiles = divide(m + (self.plan.tile[0] - 1), self.plan.tile[0])
        count = Int32(0)
        position = Int32(0)
        counted = Int32(0)  # groups, whose blocks are
        blocks = Int32(0)
        more = Boolean(True)
        while more:
            group = divide(number, self.raster.count(m_tiles, n))
            more = group < groups
            ring.acquire(count)
            if more:
                begin = Int32(0)
                end = rows
                if cutlass.const_expr(self.plan.grouped):
                    if group > 0:
                        begin = cutlass.max(offsets[group - 1], 0)
                    end = cutlass.max(cutlass.min(offsets[group], rows), begin)
                if cutlass.const_expr(self.plan.in_parts):
                    stages = divide(rows + (self.plan.tile_k - 1), self.plan.tile_k)
                    height = divide(stages + (groups - 1), groups) * self.plan.tile_k
                    begin = cutlass.min(group * height, rows)
                    end = cutlass.min(begin + height, rows)
                local = number - group * self.raster.count(m_tiles, n)
                m_tile, n_tile = self.raster.place(local, m_tiles, n, cutlass.max(end - begin, 1), rank)
                if cutlass.const_expr(self.plan.quant.coded_inputs and self.plan.grouped):
                    blocks += blocks_between(offsets, rows, counted, group, lane)
                    counted = group
                if writer:
                    ring.put(count, (begin, end, n_tile, group, m_tile, position, blocks, Int32(0)), rank)
                position += divide(end - begin + (self.plan.tile_k - 1), self.plan.tile_k)
                count += 1
                number = self.next_number(counters, number, lane)
        nothing = Int32(0)
        sentinel = (nothing, nothing, nothing, Int32(NO_TILE), nothing, nothing, nothing, nothing)
        self.finish(ring, sentinel, count, counters, rank, writer, lane)


@cute.jit
def blocks_between(offsets, rows: Int32, first: Int32, last: Int32, lane: Int32):
    """Blocks of 128 tokens of the groups from `first` on, before `last`."""
    blocks = Int32(0)
    for base in cutlass.range(first, last, 32, unroll=1):
        group = base + lane
        size = Int32(0)
        if group < last:
            size = cutlass.min(offsets[group], rows)
            if group > 0:
                size -= cutlass.max(offsets[group - 1], 0)
        blocks += add_up(divide(cutlass.max(size, 0) + (SIDE - 1), SIDE))
    return blocks


def add_up(count: Int32) -> Int32:
    """The sum over the warp, in every lane."""
    return cute.arch.inline_ptx(
        "redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[count]
    )


def load_word(address) -> Int32:
    """A word that an earlier launch wrote."""
    return cute.arch.inline_ptx("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32],
                                read_only_args=[address])  # fmt: skip


def scheduler(plan: GemmPlan) -> Scheduler:
    """The scheduler of a kernel for tiles of rows."""
    return (LocalRowsFirst if plan.local_rows_first else Scheduler)(plan)

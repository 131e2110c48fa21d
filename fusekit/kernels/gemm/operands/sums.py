"""Sums of gradients, fused into the backward epilogue: what dprob and dbias share. Bitwise repeatable.

Consumer warps add up what they have in registers, leave that in shared memory and go on. Idle warps of the load
warpgroup do the rest: fences and counters in global memory hold up nobody who computes. No floating-point atomics:
every part of a sum goes to scratch memory, whoever brings it arrives at a counter, and the last to arrive adds all
parts up, always in the same order.

A warpgroup has one box for what it leaves of a tile: `NOTE_WORDS` that say which tile it is, then what the operands
leave (dprob); a warp's sums of columns (dbias) lie in its staging boxes of y, which the next epilogue alone needs
again.

    full[wg]    4 arrivals (one a warp): all is left of the tile
    empty[wg]   1 arrival for each sum

Scratch, in 32-bit words, of any content before and after:

    row counters | column counters: blocks, groups | row parts [tiles along N, M] | column parts [pieces, columns of z]

The counters have to be zero before the first arrival. One warp of the grid clears them while the first main loops run:
the one that takes ticket 0, so that it is surely running. The others wait for the `READY` word. The words of the
workspace that say so are zero between launches; the last to finish leaves them so.

Groups begin at any row, so pieces of `piece` rows, a warpgroup's tile, from each group's first one on are numbered
row // piece + group: no two have one number, and those of a group follow each other. Blocks of pieces are numbered in
the same way.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Extents, Idle, Operand, Tile, Work
from fusekit.plan.gemm import CONSUMER_WARPGROUPS
from fusekit.plan.operands.sums import box_bytes

# Words of the workspace, behind the scheduler's two: see above.
TICKET, READY, FINISHED = 2, 3, 4
NO_TILE = -1  # in place of a group: there are no more


class Note(NamedTuple):
    """Which tile a box is of: the warpgroup's first row, the group's end row, tile along N, group."""

    row: Int32
    end: Int32
    n_tile: Int32
    group: Int32


def fresh(idle: Idle) -> Idle:
    """Extents of which nothing is worked out ahead of a loop: idle warps have few registers."""
    known = idle.extents
    groups, rows, n = ptx.fresh(known.groups), ptx.fresh(known.rows), ptx.fresh(known.n)
    return Idle(idle.operands, idle.shared, Extents(groups, rows, n, known.half_n, known.k), idle.ring, idle.warp)


class Summed(Operand):
    """A sum, that an idle warp adds up."""

    def bind(self, halves) -> None:
        self.sums = halves["sums"]

    def counters(self, extents: Extents) -> Int32:
        """How many counters it has."""
        raise NotImplementedError

    def parts(self, extents: Extents) -> Int64:
        """How many words its parts have."""
        raise NotImplementedError

    def open(self, idle: Idle) -> None:
        """What its warp does before the first piece."""

    def add(self, tile: Note, number: Int32, idle: Idle, barriers) -> None:
        """Add the CTA's `number`-th piece, which is of `tile`; the warp says when it has `taken` it."""
        raise NotImplementedError


class Sums(Operand):
    """Boxes, counters and scratch memory of all sums of a kernel."""

    step = 9  # when the others have left what they have

    def __init__(self, plan, told) -> None:
        super().__init__(plan, told)
        self.piece = plan.warpgroup_rows
        self.box_bytes = box_bytes(plan)
        self.first = plan.first_barrier("sums")

    def bind(self, halves) -> None:
        self.all = [half for half in halves.values() if isinstance(half, Summed)]
        adding = self.told.warps(self.plan)
        self.clearing = 3 if self.plan.quant.by_block else 2  # the warp that clears the counters
        self.of_warp = {warp: [] for warp in sorted({self.clearing, *adding})}
        for half in self.all:
            self.of_warp[half.told.warp if half.told.warp in adding else adding[0]].append(half)

    def barriers(self, shared):
        """Its barriers."""
        return shared.barriers + self.first

    # -- consumer warps -----------------------------------------------------------------------------------------------

    @cute.jit
    def ahead(self, tile: Tile, work: Work):
        """The box is free: what tile it is."""
        turn = tile.count >> 1 if cutlass.const_expr(self.plan.pingpong) else tile.count  # of the warpgroup
        warpgroup = work.warp_of_cta >> 2
        cute.arch.mbarrier_wait(self.barriers(work.shared) + (CONSUMER_WARPGROUPS + warpgroup), (turn & 1) ^ 1)
        note = (tile.row, tile.end, tile.n_tile, tile.group)
        ptx.store_shared_v4(work.shared.sums.toint() + warpgroup * self.box_bytes, note)

    @cute.jit
    def finish_tile(self, state, work: Work):
        """The warp has left all that it has of the tile."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.barriers(work.shared) + (work.warp_of_cta >> 2))

    @cute.jit
    def finish(self, count: Int32, work: Work):
        """There is no `count`-th tile."""
        if cute.arch.lane_idx() == 0:
            self.ahead(Tile(Int32(0), Int32(0), Int32(0), Int32(NO_TILE), count), work)
        self.finish_tile(None, work)

    # -- idle warps ---------------------------------------------------------------------------------------------------

    def assist(self, idle: Idle) -> None:
        """A warp clears the counters; then every warp adds up its sums."""
        barriers = self.barriers(idle.shared)
        for warp in self.of_warp:
            self.run(warp, idle, barriers)

    @cute.jit
    def run(self, warp: cutlass.Constexpr, idle: Idle, barriers):
        """What one warp does, piece after piece, until the tiles are over."""
        if idle.warp == warp:
            if cutlass.const_expr(warp == self.clearing):
                self.clear(idle)
            if cutlass.const_expr(len(self.of_warp[warp]) > 0):
                self.add_pieces(warp, idle, barriers)
            self.leave(idle.operands.workspace)

    @cute.jit
    def add_pieces(self, warp: cutlass.Constexpr, idle: Idle, barriers):
        """A piece after the other."""
        self.each(warp, "open", idle)
        self.ready(idle.operands.workspace)
        number = Int32(0)
        tile = self.note(barriers, idle.shared, number)
        while tile.group >= 0:
            self.each(warp, "add", tile, number, idle, barriers)
            number += 1
            tile = self.note(barriers, idle.shared, number)

    def each(self, warp: int, hook: str, *arguments) -> None:
        """Call a hook of every sum of a warp."""
        for half in self.of_warp[warp]:
            getattr(half, hook)(*arguments)

    @cute.jit
    def clear(self, idle: Idle):
        """Zero the counters, if nobody else does; one warp of each CTA."""
        workspace, scratch = idle.operands.workspace, idle.operands.scratch
        lane = cute.arch.lane_idx()
        ticket = Int32(0)
        if lane == 0:
            ticket = cute.arch.atomic_add(workspace + TICKET, Int32(1), sem="relaxed", scope="gpu")
        ticket = cute.arch.shuffle_sync(ticket, 0)
        if ticket == 0:
            words = self.counter_words(idle.extents)
            index = lane
            while index < words:
                cute.arch.store(scratch + index, Int32(0))
                index += 32
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.store(workspace + READY, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def ready(self, workspace):
        """Until the counters are zero."""
        while cute.arch.load(workspace + READY, Int32, sem="acquire", scope="gpu") == 0:
            pass
        cute.arch.sync_warp()

    @cute.jit
    def leave(self, workspace):
        """A warp has done its last; the last of all leaves the workspace as it was."""
        if cute.arch.lane_idx() == 0:
            _, _, none = cute.arch.block_idx()  # 0, which ptxas cannot know: else it keeps an address from `clear` on
            words = workspace + none
            blocks, _, _ = cute.arch.grid_dim()
            ended = cute.arch.atomic_add(words + FINISHED, Int32(1), sem="acq_rel", scope="gpu")
            if ended == blocks * len(self.of_warp) - 1:
                for word in cutlass.range_constexpr(TICKET, FINISHED + 1):
                    cute.arch.store(words + word, Int32(0))

    # -- for the programs ---------------------------------------------------------------------------------------------

    @cute.jit
    def note(self, barriers, shared, number: Int32) -> Note:
        """Which tile the CTA's `number`-th piece is of, when all of it is there. Pieces take turns over warpgroups."""
        warpgroup = number & 1
        cute.arch.mbarrier_wait(barriers + warpgroup, (number >> 1) & 1)
        return Note(*ptx.load_shared_v4(shared.sums.toint() + warpgroup * self.box_bytes))

    @cute.jit
    def taken(self, barriers, number: Int32):
        """The warp needs nothing more of the piece."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barriers + (CONSUMER_WARPGROUPS + (number & 1)))

    @cute.jit
    def arrive(self, counter, lane: Int32) -> Int32:
        """Say that this warp's part is there; how many were there before. What those wrote can be read then."""
        cute.arch.sync_warp()
        before = Int32(0)
        if lane == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.sync_warp()
        return before

    # -- scratch ------------------------------------------------------------------------------------------------------

    def tiles_n(self, n: Int32) -> Int32:
        """Tiles along N."""
        return ptx.divide(n + (self.plan.tile[1] - 1), self.plan.tile[1])

    def before(self, half: Summed) -> list[Summed]:
        """The sums whose counters and parts stand before those of `half`."""
        return self.all[: self.all.index(half)]

    def counters_before(self, half: Summed, extents: Extents) -> Int32:
        """The number of the first counter of `half`."""
        return total([other.counters(extents) for other in self.before(half)], Int32)

    def counter_words(self, extents: Extents) -> Int32:
        """How many counters there are, to a multiple of four; behind them the parts begin."""
        counts = [half.counters(extents) for half in reversed(self.all)]
        return (total(reversed(counts), Int32) + 3) & -4

    def parts_of(self, half: Summed, scratch, extents: Extents):
        """Where the parts of `half` begin, at a multiple of four words."""
        before = total([other.parts(extents) for other in self.before(half)], Int64)
        return cute.recast_ptr(scratch, dtype=Float32) + self.counter_words(extents) + ((before + 3) & -4)


def total(numbers, kind):
    """The sum of some numbers of a kind."""
    found = kind(0)
    for number in numbers:
        found = found + number
    return found

"""What dispatch and combine share: how ranks signal that rows may be sent, and that they have arrived.

Every rank launches the same operations on its windows (IPC buffers, symmetric memory) in the same order. A launch is
numbered by its epoch, a word of the window that only its own rank reads and writes, so a graph can be replayed. In
launch e

1. a rank writes e to the OPEN words of the others' windows when the launch begins: its own window may be written to,
   the launches before it in its stream have read what came;
2. a block that sends waits until all ranks have opened theirs for this launch, stores rows into their windows with
   ordinary 16-byte stores, and for each chunk of tokens writes e to its flag there, with release at system scope; a
   word of DRAWN holds which chunks blocks have taken;
3. a block that receives waits for the flags, with acquire at system scope.

A dispatch may be two launches of one number, on two streams, which both open the window. One sends all choices, and
after those of a block writes e to its choice flag (`choice_flags`). The other sends the rows; kernels that wait for the
flags of the rows they read run meanwhile. They may need all multiprocessors, so the launch of choices, which they
follow, does not end before every block of the other has begun and has read in EPOCH which launch it is. Where choices
that came before still hold, that launch sends nothing. Either way it ends when all ranks have begun: kernels that wait
for rows, and may leave no multiprocessor to others, do not wait for a rank that is behind because it needs one of those
others.

Which block does what is drawn by ticket: the first `blocks` to run are those that send. They wait for other ranks, and
of their own for the first block alone, which opens the window before it waits. Those that wait for rows come after
them. So it does not matter how many blocks run at a time, or in which order. The last block to leave counts the launch
as done. Where a launch has its number to itself, blocks that wait for rows leave before they wait, since no other block
needs them any more.

Each wait ends by a deadline. Then the first failure is kept in the STATUS words, nothing more is sent, and later
launches on this window wait for nothing.
"""

import cutlass
import cutlass.memory
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.exchange import shares, signals
from fusekit.kernels.lanes import WARP
from fusekit.kernels.permutation.permute import Permutation
from fusekit.kernels.ptx import divide
from fusekit.plan.exchange import (
    CHUNK,
    DONE,
    DRAWN,
    EPOCH,
    OPEN,
    OPENING,
    ROWS_DONE,
    ROWS_TICKET,
    SENDING,
    STATUS,
    TICKET,
    coded,
    parts,
    regions,
)
from fusekit.plan.quantise import SIDE

NANOSECONDS = 10**6  # of a millisecond


class Exchange(Permutation):
    """What the kernels share. blocks: those that send. apart: whether another launch has the same number and counts it
    as done. draws: whether they send rows, or gradients, a chunk after the other.
    """

    apart, draws = False, True

    @classmethod
    def of(cls, spec):
        """The kernel of a spec."""
        return cls(spec)

    def __init__(self, spec) -> None:
        super().__init__(spec.topk, spec.dtype, spec.weighted, False, spec.addends, spec.warps, self.LINES)
        self.ranks, self.blocks, self.gradients, self.wide = spec.ranks, spec.blocks, spec.gradients, spec.rows
        self.experts, self.local = spec.experts, spec.experts // spec.ranks
        self.index_bytes, self.weight_bytes = parts(vars(spec))
        self.coded = coded(vars(spec))

    def of_rank(self, windows: list, rank: Int32) -> Int64:
        """The window of a rank that only the device knows."""
        address = windows[0].toint()
        for index in range(1, self.ranks):
            address = cutlass.select_(rank == index, windows[index].toint(), address)
        return address

    def rows_at(self, tensor: cute.Tensor) -> tuple:
        """A tensor's pointer, and its row stride in bytes."""
        return tensor.iterator, Int64(tensor.stride[0]) * self.size

    def regions(self, capacity: Int32, row_bytes: Int32):
        """Where the parts of a window lie."""
        scales = Int64(divide(row_bytes - 1, SIDE) + 1) * 4 if self.coded else 0
        return regions(Int64(capacity), Int64(row_bytes), self.ranks, self.index_bytes, self.weight_bytes, scales)

    @cute.jit
    def arrive(self, window: Int64, thread: Int32):
        """(the block's turn, the launch's epoch, whether an earlier launch failed), in every thread; and what
        `shares` has in shared memory.
        """
        shared = cutlass.memory.SmemAllocator().allocate(16, 16).toint()
        drawing = cutlass.memory.SmemAllocator().allocate(shares.BYTES, 16).toint()
        if thread < shares.BYTES // 4:
            lanes.shared_store_u32(drawing + thread * 4, Uint32(0))
        if cutlass.const_expr(self.apart):
            if thread == 0:  # who has drawn has read which launch it is
                lanes.shared_store_u32(shared + 4, signals.load(window + EPOCH))
                lanes.shared_store_u32(shared, signals.add(window + ROWS_TICKET, 1))
        else:  # three warps, so that none waits for another one's word
            if thread == 0:
                lanes.shared_store_u32(shared, signals.draw(window + TICKET))
            if thread == WARP:
                lanes.shared_store_u32(shared + 4, signals.load(window + EPOCH))
        if thread == 2 * WARP:
            lanes.shared_store_u32(shared + 8, signals.load(window + STATUS))
        cute.arch.sync_threads()
        turn = Int32(lanes.shared_load_u32(shared))
        epoch = Int32(lanes.shared_load_u32(shared + 4)) + 1
        failed = Int32(lanes.shared_load_u32(shared + 8))
        return turn, epoch, failed, drawing

    @cute.jit
    def leave(self, window: Int64, thread: Int32, epoch: Int32, blocks: Int32):
        """Takes leave of the launch's other blocks; the last one to do so counts the launch as done."""
        cute.arch.sync_threads()
        if thread == 0:
            ended = Int32(signals.add(window + (ROWS_DONE if self.apart else DONE), 1)) + 1
            if ended == blocks:
                signals.store(window + (ROWS_TICKET if self.apart else TICKET), 0)
                signals.store(window + (ROWS_DONE if self.apart else DONE), 0)
                if cutlass.const_expr(self.draws):
                    signals.store(window + DRAWN, 0)
                    signals.store(window + (DRAWN + 4), 0)
                if cutlass.const_expr(not self.apart):
                    signals.store(window + EPOCH, epoch)

    @cute.jit
    def open(self, windows: list, rank: Int32, thread: Int32, epoch: Int32):
        """Writes `epoch` to this rank's place among the OPEN words of all windows."""
        if thread < self.ranks:
            signals.release(self.of_rank(windows, thread) + OPEN + Int64(rank) * 4, epoch)

    @cute.jit
    def opened(self, window: Int64, thread: Int32, epoch: Int32, deadline: Int64):
        """Waits until all ranks have written `epoch` or more: 1, or 0 where one has not in time."""
        came = Int32(1)
        if thread < self.ranks:
            came = signals.wait(window + OPEN + Int64(thread) * 4, epoch, deadline)
            signals.fail(window + STATUS, thread, OPENING, epoch, came == 0)
        return signals.every(came)

    @cute.jit
    def signal(self, windows: list, address: Int64, thread: Int32, epoch: Int32, targets: Uint32):
        """After all threads' stores: a flag at `address` of the windows of `targets`."""
        if (thread < self.ranks) & (((targets >> (thread & 31)) & 1) != 0):
            signals.release(self.of_rank(windows, thread) + address, epoch)

    def owners(self, indices: Int64, token: Int32, lane: Int32) -> Uint32:
        """The ranks of a token's experts, as bits, in every lane."""
        ranks = Uint32(0)
        for expert in self.per_choice(indices, token, lane, -1):
            bit = Uint32(1) << (expert // Uint32(self.local))
            ranks = ranks | cutlass.select_(expert < Uint32(self.experts), bit, Uint32(0))
        return signals.union(ranks)


def chunks(capacity: Int32) -> Int32:
    """Chunks of a rank's tokens."""
    return capacity // CHUNK


__all__ = ["CHUNK", "NANOSECONDS", "SENDING", "WARP", "Exchange", "chunks"]

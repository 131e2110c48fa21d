"""Which rows a warp sends: blocks draw chunks, and a block's warps draw their rows, so that none waits for another.

Multiprocessors do not get equal shares of a link. A block has the chunk of its turn first; from then on the warp that
draws the first row of a chunk draws the block's next chunk, from a word of the window that all blocks of the launch
draw from. The warp that sends the last row of a chunk raises its flag. Chunks are numbered by block, in the order in
which they were drawn; once a number has no chunk left, later ones have none either.

    shared memory    drawn: rows that warps have drawn; known: the last number whose chunk is known; from SLOT on, for
                     each of SLOTS numbers: its chunk; the rows sent of it and of those that had the slot before
"""

from cutlass import Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.exchange import signals
from fusekit.kernels.ptx import divide
from fusekit.plan.exchange import CHUNK

SLOTS, SLOT = 8, 8  # chunks that a block may be sending at once; bytes before the first, and of each
BYTES = SLOT + SLOTS * SLOT


def slot(shared: Int32, number: Int32) -> Int32:
    """Address of a number's slot."""
    return shared + SLOT + (number % SLOTS) * SLOT


@cute.jit
def draw(shared: Int32, counter: Int64, turn: Int32, blocks: Int32):
    """(slot, chunk, row): the next row of this block; the launch's chunks are those below its count.

    shared: BYTES of zeros at first. counter: address of the word that blocks draw from, 0 at first. turn: of `blocks`.
    """
    lane, drawn, chunk = cute.arch.lane_idx(), Int32(0), turn
    if lane == 0:
        drawn = Int32(signals.add_shared(shared))
    drawn = Int32(cute.arch.shuffle_sync(drawn, 0))
    number = divide(drawn, CHUNK)
    row = drawn - number * CHUNK
    if lane == 0:
        if row == 0:
            following = slot(shared, number + 1)
            signals.wait_shared(following + 4, divide(number + 1, SLOTS) * CHUNK)  # rows before it are all sent
            signals.wait_shared(shared + 4, number)  # numbers draw in their order
            lanes.shared_store_u32(following, signals.draw(counter) + blocks)
            signals.release_shared(shared + 4, number + 1)
        if number > 0:
            signals.wait_shared(shared + 4, number)
            chunk = Int32(lanes.shared_load_u32(slot(shared, number)))
    return slot(shared, number), Int32(cute.arch.shuffle_sync(chunk, 0)), row


@cute.jit
def sent(place: Int32):
    """After a row: 1 where it was the last of its chunk: all its rows come before what is then released."""
    cute.arch.sync_warp()
    last = Int32(0)
    if cute.arch.lane_idx() == 0:
        last = Int32((signals.add_shared(place + 4) & (CHUNK - 1)) == CHUNK - 1)
    last = Int32(cute.arch.shuffle_sync(last, 0))
    cute.arch.sync_warp()
    return last

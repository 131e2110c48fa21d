"""A token's chosen experts, read back from a routing map: a list in shared memory, in the order of lanes."""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP


class Choices:
    """Reads maps of `experts` bytes (any but 0 is a choice) or bits a token; each warp needs `shared_bytes`.

    A map may have fewer than `most` choices in a row, not more: what is over is left out.
    """

    def __init__(self, experts: int, most: int, bits: bool) -> None:
        self.experts, self.most, self.bits = experts, most, bits
        self.shared_bytes = most * 4
        self.row_bytes = -(-experts // 32) * 4 if bits else experts
        self.width = 4 if bits else next(width for width in (16, 8, 4, 2, 1) if experts % width == 0)
        self.count = self.row_bytes // self.width  # loads of a row
        self.step = 32 if bits else self.width  # experts of a load

    @cute.jit
    def read(self, row: Int64, shared: Int32, lane: Int32):
        """Lists the row's choices at `shared`; gives how many there are, `most` at most."""
        start = row + Int64(lane * self.width)
        masks = []
        for first in cutlass.range_constexpr(0, self.count, WARP):
            valid = lane + first < self.count if cutlass.const_expr(first + WARP > self.count) else None
            words = lanes.load(start, self.width, valid, 0, first * self.width)
            masks.append(self.mask(words, lane + first))
        count = Int32(0)
        for mask in masks:
            count += cute.arch.popc(Int32(mask))
        position = lanes.before(count, lane)
        for index in cutlass.range_constexpr(len(masks)):
            position = self.append(masks[index], (lane + index * WARP) * self.step, position, shared)
        total = Int32(lanes.redux(Uint32(count), "add"))
        cute.arch.sync_warp()
        return cutlass.min(total, self.most)

    def mask(self, words: list, index: Int32) -> Uint32:
        """The choices of one load as bits, the first expert's lowest."""
        if self.bits:
            if self.experts % 32 == 0:
                return words[0]
            last = Uint32((1 << self.experts % 32) - 1)
            return cutlass.select_(index == self.count - 1, words[0] & last, words[0])
        mask = Uint32(0)
        for place, word in enumerate(words):
            folded = word | (word >> 4)
            folded = folded | (folded >> 2)
            folded = (folded | (folded >> 1)) & Uint32(0x01010101)
            # The product moves the low bits of the four bytes next to each other, to the top.
            mask = mask | (((folded * Uint32(0x10204080)) >> 28) << (4 * place))
        return mask

    @cute.jit
    def append(self, mask: Uint32, first: Int32, position: Int32, shared: Int32):
        """Writes a lane's choices from `position` on; gives the next position."""
        while mask != 0:
            bit = cute.arch.popc(Int32(~mask & (mask - 1)))
            if position < self.most:
                lanes.shared_store_u32(shared + position * 4, Uint32(first + bit))
            position += 1
            mask = mask & (mask - 1)
        return position

"""The K largest of a row, by one warp, in time that hardly depends on K.

A value is compared as a key: an unsigned integer of the same order, in which -0 equals 0 and every NaN is the largest
of all. Key 0 stands for "no expert". The row never leaves the registers.

1. Every lane takes the maximum of each of a few groups of its keys. The K-th largest of these maxima is a lower bound
   of the K-th largest key, and a good one: few more than K keys reach it. A bisection over the maxima finds it, or a
   bound nearly as good, in a few steps.
2. The keys that reach the bound go to a list in shared memory, with the expert's number inverted in the low half, so
   that the larger of two entries is the better one: ties go to the lower number.
3. If the list would overflow (some lane has many large keys), the bisection goes on over all keys. If that ends on one
   value shared by too many, a second bisection, over expert numbers, finds how many of them are in.
4. An entry's rank is the count of larger entries; the first K are written back in order.

Steps 3 and 4 bound the work whatever the values are; nothing depends on the order in which lanes run.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.floats import add
from fusekit.kernels.inline import inline
from fusekit.kernels.lanes import WARP
from fusekit.kernels.router.config import Row

ENTRY_BYTES = 8


def key_of(x: Float32) -> Uint32:
    """The order-preserving key. Adding 0 turns -0 into 0 and every NaN into the canonical, positive one."""
    bits = lanes.bits_of(add(x, Float32(0.0)))
    text = (
        "{ .reg .b32 sign_; shr.s32 sign_, {$r0}, 31; or.b32 sign_, sign_, 0x80000000; xor.b32 {$w0}, {$r0}, sign_; }"
    )
    return inline(Uint32, text, bits)


def value_of(key: Uint32) -> Float32:
    """The value of a key."""
    text = (
        "{ .reg .b32 sign_; not.b32 sign_, {$r0}; shr.s32 sign_, sign_, 31; or.b32 sign_, sign_, 0x80000000;"
        " xor.b32 {$w0}, {$r0}, sign_; }"
    )
    return inline(Float32, text, key)


def count_keys(keys: list, bound: Uint32, test: str = "ge") -> Int32:
    """How many of a lane's keys are at least ("ge") or above ("gt") `bound`."""
    count = Int32(0)
    for key in keys:
        text = (
            f"{{ .reg .pred p_; setp.{test}.u32 p_, {{$r1}}, {{$r2}}; add.s32 {{$w0}}, {{$r0}}, 0;"
            " @p_ add.s32 {$w0}, {$w0}, 1; }"
        )
        count = inline(Int32, text, count, key, bound)
    return count


def greatest(keys: list) -> Uint32:
    """The largest of some keys."""
    largest = keys[0]
    for key in keys[1:]:
        largest = lanes.extreme("max", largest, key)
    return largest


class TopK:
    """The selection for rows laid out as `row`. Each warp needs `shared_bytes` of shared memory."""

    def __init__(self, row: Row, topk: int) -> None:
        self.row, self.topk = row, topk
        # Lane groups: enough for the bound to be tight. At most one key each.
        groups = 1
        while groups * WARP * 2 < 5 * topk and groups * 2 <= row.size:
            groups *= 2
        self.groups = groups
        self.most_slack = topk + topk // 4 + 1  # a bound that lets in no more than this is good enough
        self.capacity = 32 if topk <= 12 else 64 if topk <= 40 else 128
        self.shared_bytes = self.capacity * ENTRY_BYTES
        self.chosen_slots = -(-topk // WARP)  # chosen experts of a lane

    @cute.jit
    def run(self, keys, shared: Int32, lane: Int32):
        """Leaves the K best entries at `shared`, best first; gives the largest key of the row. Every lane calls it."""
        per_group = -(-self.row.size // self.groups)
        maxima = [greatest(keys[start : start + per_group]) for start in range(0, self.row.size, per_group)]
        low, high, largest = self.bound(maxima)
        count = count_keys(keys, low)
        total = lanes.redux(Uint32(count), "add")
        if total > self.capacity:
            while low < high and total > self.capacity:
                middle = low + ((high - low + 1) >> 1)
                reached = lanes.redux(Uint32(count_keys(keys, middle)), "add")
                if reached >= self.topk:
                    low = middle
                    total = reached
                else:
                    high = middle - 1
            count = count_keys(keys, low)
        crowded = Boolean(total > self.capacity)
        if crowded:
            total = Uint32(self.topk)
            self.list_with_ties(keys, low, shared, lane)
        else:
            self.list_all(keys, low, count, shared, lane)
        cute.arch.sync_warp()
        self.sort(Int32(total), shared, lane)
        return largest

    @cute.jit
    def bound(self, maxima):
        """(low, high, largest): at least K keys reach low, fewer than K exceed high, both found among the maxima."""
        largest = lanes.redux(greatest(maxima), "max")
        high = largest
        low = Uint32(1)
        if cutlass.const_expr(len(maxima) * WARP >= self.topk):
            least = maxima[0]
            for other in maxima[1:]:
                least = lanes.extreme("min", least, other)
            low = lanes.extreme("max", lanes.redux(least, "min"), Uint32(1))
        top = high
        while low < top:
            middle = low + ((top - low + 1) >> 1)
            reached = lanes.redux(Uint32(count_keys(maxima, middle)), "add")
            if reached >= self.topk:
                low = middle
                if reached <= self.most_slack:
                    top = middle
            else:
                top = middle - 1
        return low, high, largest

    def offset(self, position: int) -> int:
        """How far the expert at a position of a lane's keys lies from the lane's first."""
        chunk, place = divmod(position, self.row.vector)
        return chunk * self.row.lanes * self.row.vector + place

    @cute.jit
    def list_all(self, keys, low: Uint32, count: Int32, shared: Int32, lane: Int32):
        """Lists every key from `low` up."""
        address = shared + lanes.before(count, lane) * ENTRY_BYTES
        inverted = Uint32(0xFFFFFFFF) - Uint32(lane * self.row.vector)
        if count > 0:
            self.put(address, keys, inverted, low)

    @cute.jit
    def list_with_ties(self, keys, low: Uint32, shared: Int32, lane: Int32):
        """Lists the keys above `low` and, of those equal to it, as many of the lowest experts as make K in all."""
        above = lanes.redux(Uint32(count_keys(keys, low, "gt")), "add")
        first = Int32(0)
        last = Int32(self.row.experts - 1)  # the smallest expert number that lets in enough
        while first < last:
            middle = (first + last) >> 1
            reached = above + lanes.redux(Uint32(self.ties(keys, low, middle, lane)), "add")
            if reached >= self.topk:
                last = middle
            else:
                first = middle + 1
        count = count_keys(keys, low, "gt") + self.ties(keys, low, last, lane)
        first = lane * self.row.vector
        inverted, room = Uint32(0xFFFFFFFF) - Uint32(first), last - first
        address = shared + lanes.before(count, lane) * ENTRY_BYTES
        self.put(address, keys, inverted, low, room)

    def ties(self, keys, low: Uint32, last: Int32, lane: Int32) -> Int32:
        """How many of a lane's keys equal `low` and belong to experts up to `last`."""
        count, room = Int32(0), last - lane * self.row.vector
        for position, key in enumerate(keys):
            text = (
                f"{{ .reg .pred p_; setp.ge.s32 p_, {{$r3}}, {self.offset(position)};"
                " setp.eq.and.u32 p_, {$r1}, {$r2}, p_; add.s32 {$w0}, {$r0}, 0; @p_ add.s32 {$w0}, {$w0}, 1; }"
            )
            count = inline(Int32, text, count, key, low, room)
        return count

    def put(self, address: Int32, keys: list, inverted: Uint32, low: Uint32, room=None) -> None:
        """Writes the entries of a lane's keys from `low` up, from `address` on.

        inverted: the inverted number of the lane's first expert. With `room`, a key equal to `low` counts only if its
        expert lies no further than that from the lane's first.
        """
        for position, key in enumerate(keys):
            address = self.put_one(address, key, self.offset(position), inverted, low, room)

    def put_one(self, address: Int32, key: Uint32, offset: int, inverted: Uint32, low: Uint32, room) -> Int32:
        """Writes one entry, or none; gives the next address."""
        tests, arguments = "setp.ge.u32 p_, {$r1}, {$r3};", [address, key, inverted, low]
        if room is not None:
            tests = (
                f"setp.ge.s32 q_, {{$r4}}, {offset}; setp.ne.or.u32 q_, {{$r1}}, {{$r3}}, q_;"
                " setp.ge.and.u32 p_, {$r1}, {$r3}, q_;"
            )
            arguments.append(room)
        text = (
            f"{{ .reg .pred p_, q_; .reg .b32 low_; sub.u32 low_, {{$r2}}, {offset}; {tests}"
            # Two stores: one of a pair would tie up the register next to every key, all the time.
            " @p_ st.volatile.shared.b32 [{$r0}], low_; @p_ st.volatile.shared.b32 [{$r0} + 4], {$r1};"
            " add.s32 {$w0}, {$r0}, 0; @p_ add.s32 {$w0}, {$w0}, 8; }"
        )
        return inline(Int32, text, *arguments)

    @cute.jit
    def sort(self, total: Int32, shared: Int32, lane: Int32):
        """Orders the first `total` entries, best first, and keeps K of them."""
        slots = self.capacity // WARP
        entries = [lanes.shared_load_u64(shared + (lane + slot * WARP) * ENTRY_BYTES) for slot in range(slots)]
        ranks = cute.make_rmem_tensor((slots,), Int32)
        ranks.fill(0)
        for index in cutlass.range(total, unroll=4):
            other = lanes.shared_load_u64(shared + index * ENTRY_BYTES)
            for slot in cutlass.range_constexpr(slots):
                ranks[slot] = ranks[slot] + Int32(other > entries[slot])
        cute.arch.sync_warp()
        for slot in cutlass.range_constexpr(slots):
            if lane + slot * WARP < total and ranks[slot] < self.topk:
                lanes.shared_store_u64(shared + ranks[slot] * ENTRY_BYTES, entries[slot])
        cute.arch.sync_warp()

    def entry(self, shared: Int32, rank: Int32) -> tuple:
        """(expert, key) of the entry with this rank; any number for a rank from K on."""
        entry = lanes.shared_load_u64(shared + rank * ENTRY_BYTES)
        return Int32(Uint32(0xFFFFFFFF) - Uint32(entry)), Uint32(entry >> 32)

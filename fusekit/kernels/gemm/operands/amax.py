"""Amax of each group: a warp finds the maximum of its 16 rows, and raises the group's in memory.

After the rotation: a lane has two of a column's 16 tokens, so three steps of Sylvester's matrix are exchanges between
lanes, and the last one is its own. They come in the order of `fusekit.kernels.quantise.amax`, so bits are the same.
"""

from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand, struct
from fusekit.kernels.quantise import fp8
from fusekit.plan.operands.amax import names
from fusekit.plan.quantise import SIGNS

THREADS = 128  # of a block that clears
HIGHEST = 31  # bit of a float's sign
AT_ONCE = 8  # columns of a lane that are rotated together
NEGATIVE = sum((sign < 0) << token for token, sign in enumerate(SIGNS))


class Most:
    """Maxima of a warp's 16 rows so far: of each side, then of each side after the rotation."""

    def __init__(self, sides: int, rotated: bool, rows) -> None:
        self.sides, self.rotated = sides, rotated
        self.largest = cute.make_rmem_tensor((sides * (1 + rotated),), Float32)
        self.largest.fill(0.0)
        lane = cute.arch.lane_idx()
        self.there = [ptx.flag(rows.row + (lane >> 2) + r * 8 < rows.end) for r in range(2)]
        self.columns = 0  # of da that have been taken
        self.waiting = []  # for the rotation: (side, a column's two tokens)

    def take(self, words, columns: Int32, side: int) -> None:
        """Two columns of the lane's two rows, packed. columns: whether they are inside of the result."""
        words = [ptx.word_where(there & columns, word) for there, word in zip(self.there, words, strict=True)]
        self.raise_to(side, fp8.larger(*fp8.numbers(fp8.largest(words))))
        if self.rotated:
            self.waiting += [(side, [fp8.halves(word)[half] for word in words]) for half in range(2)]
            if len(self.waiting) >= AT_ONCE:
                self.rotate()

    def rotate(self) -> None:
        """What waits, step by step for all of it: exchanges take long, and so they overlap."""
        for side, value in zip(
            (side for side, _ in self.waiting), rotated([two for _, two in self.waiting]), strict=True
        ):
            self.raise_to(self.sides + side, value)
        self.waiting = []

    def raise_to(self, place: int, value) -> None:
        self.largest[place] = fp8.larger(self.largest[place], value)


class Amax(DeviceOperand):
    """step: after whatever changes the result."""

    step = 9

    def parameter(self, given):
        outputs = names(self.operand.name.partition("_")[0], self.plan)
        return struct("Largest", [(f"of_{index}", getattr(given, name).iterator) for index, name in enumerate(outputs)])

    def precede(self, given, groups, stream) -> None:
        outputs = self.parameter(given)
        count = (Int32(1) if groups is None else groups) * self.sides
        self.clear(outputs, count).launch(
            grid=[(count + (THREADS - 1)) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def clear(self, found, count: Int32):
        """Sets the numbers of all groups to zero."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < count:
            for each in found:
                each[index] = Float32(0.0)

    def start(self, tile, work, warp_state):
        return tile.group

    def most(self, rows) -> Most:
        return Most(self.sides, self.plan.quant.rht_amax, rows)

    @property
    def sides(self) -> int:
        """Numbers of a group."""
        return self.plan.sides if self.plan.backward else 1

    def store(self, most: Most, group: Int32, outputs) -> None:
        """Raises the group's numbers in memory; all lanes of a warp."""
        most.rotate()
        for kind, pointer in enumerate(outputs):
            for side in range(self.sides):
                a = most.largest[kind * self.sides + side]
                if kind:
                    a = fp8.rounded(fp8.multiply(a, Float32(0.25)))
                bits = lanes.redux(lanes.bits_of(a), "max")
                at = pointer.toint() + (Int64(group) * self.sides + side) * 4
                ptx.maximum_in_memory(at, bits, cute.arch.lane_idx() == 0)


class YAmax(Amax):
    def outputs(self, words, rows, work, state) -> None:
        width = work.extents.half_n if self.plan.halved else work.extents.n
        most, first = self.most(rows), rows.n_tile * self.plan.out_tile_n
        for chunk in range(self.plan.out_tile_n // 8):
            most.take(words[2 * chunk : 2 * chunk + 2], ptx.flag(first + chunk * 8 < width), 0)
        self.store(most, state, work.operands.y_amax)


class DzAmax(Amax):
    def rows(self, rows, work, state, acc):
        return self.most(rows), rows.n_tile * self.plan.tile[1], work.extents.n, state

    def take(self, row_state, first, second) -> None:
        """Takes a lane's two columns: (gate, up) of one and of the other, or the two."""
        most, column, n, _ = row_state
        there = ptx.flag(column + most.columns < n)
        most.columns += 8
        for side in range(self.sides):
            low, high = (0, 1) if self.sides == 1 else (side, side + 2)
            words = [ptx.pack_pair(row[low], row[high], self.dtype) for row in (first, second)]
            most.take(words, there, side)

    def rows_end(self, rows, row_state, work) -> None:
        most, _, _, group = row_state
        self.store(most, group, work.operands.dz_amax)


def rotated(columns: list) -> list:
    """The largest of |R v|, four times too large, that a lane has of each column, from tokens lane / 4 and lane / 4 +
    8.
    """
    token = cute.arch.lane_idx() >> 2
    values = [negated(value, Int32(NEGATIVE) >> (token + 8 * r)) for two in columns for r, value in enumerate(two)]
    for step in range(3):
        others = [cute.arch.shuffle_sync_bfly(value, 4 << step) for value in values]
        values = [other + negated(value, token >> step) for other, value in zip(others, values, strict=True)]
    return [
        fp8.larger(fp8.magnitude(first + second), fp8.magnitude(first - second))
        for first, second in zip(values[::2], values[1::2], strict=True)
    ]


def negated(value: Float32, bits: Int32) -> Float32:
    """`value`, negative where the lowest of `bits` is 1."""
    return lanes.float_of(lanes.bits_of(value) ^ (Uint32(bits) << HIGHEST))

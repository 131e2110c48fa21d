"""quantise by blocks of 128: rows, and in the same pass columns, or squares of tokens; or squares of a weight, in one
orientation or both.

A thread block takes a tile of 128 x 128 numbers; while that is on its way to shared memory, others compute. Rows: eight
threads have one, as two pieces of 16 bytes each. Columns: a thread has 32 rows of two; four threads share their largest
numbers. The transposed FP8 values take the tile's place in shared memory, so that a warp stores whole lines of 128
bytes. A row's 16-byte pieces are exchanged by its number, so that no two accesses of a warp meet in a bank; those of
transposed FP8 values by half the column's.

Transposed, group e begins at the next multiple of 128 after group e - 1, so that tile number t of all groups writes
tokens 128 t to 128 t + 127. What lies after a group's last row is zeros.

Where an index chooses the rows of x, shared memory holds the numbers of a tile's rows. They serve for STRIP tiles side
by side, one after the other, while the next one is on its way to the other half of shared memory. Thread blocks that
follow each other then have the same columns of other tiles, so that L2 holds those columns of every token until all
groups have read them. Where each row of x becomes several of x_q, shared memory holds theirs, `topk` for each; so x is
read once.

Float32 goes through registers, which round it to bf16 on its way to shared memory: AHEAD loads of a thread are under
way at a time. There is one tile in shared memory then.
"""

from typing import NamedTuple

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, load_shared_v4, store_shared_b32x2, store_shared_v4
from fusekit.kernels.quantise import fp8
from fusekit.plan.quantise import BF16, F32, SIDE, SQUARE, WARPS, WIDE

THREADS = WARPS * WARP
LINE = SIDE * 2  # bytes of a tile's row
TILE = SIDE * LINE
PIECES = LINE // 16  # of a row
ACROSS = 8  # threads that share a row
PAIRS = SIDE // 2  # of columns
COPIED = THREADS // PIECES  # rows that are copied at a time
TURNS = SIDE // COPIED
DEEP = SIDE * PAIRS // THREADS  # rows of a thread that has two columns
PARTS = SIDE // DEEP  # threads that share two columns
RESIDENT, FEWER = 4, 3  # thread blocks of a multiprocessor, at least; FEWER where registers or two tiles allow no more
STRIP = 3
GROUPS_PER_LANE = 4  # groups whose ends a lane reads at a time
AHEAD = 8


class Place(NamedTuple):
    """Where a tile is: its first row, the end of its rows, its number among all, its matrix."""

    row: Int32
    end: Int32
    number: Int32
    group: Int32


class QuantiseTiles:
    """The kernel; calling it traces host function and device code."""

    def __init__(
        self, dtype: str, blocks: str, scales: str, transpose: bool, transpose_blocks: str, rows: bool, groups: bool,
        gather: bool, topk: int,
    ) -> None:  # fmt: skip
        self.wide = dtype == WIDE
        self.square, self.scales, self.transpose = blocks == SQUARE, scales, transpose
        self.grouped, self.matrices = transpose and groups and not self.square, groups and self.square
        self.by_row, self.gather, self.topk = rows, gather, topk
        self.strip = STRIP if gather else 1
        self.resident = FEWER if gather or self.square or (transpose and scales == F32) else RESIDENT
        self.tiles = 1 if self.wide else min(self.strip, 2)  # in shared memory
        self.turned_square = transpose_blocks == SQUARE
        # Without rows, one group still has a block of zeros, for a weight gradient to read.
        self.never_empty = transpose and not groups and not self.square

    @cute.jit
    def __call__(self, x: cute.Tensor, index, offsets, x_q, x_s, x_t, x_ts, stream: CUstream):
        """Launch. x [M, K] (gathered, or with topk: [T, K]); for squares [E, N, K] or [N, K]. index: with topk, inverse
        [T, topk]. What it does without is None.
        """
        first = 1 if self.matrices else 0
        columns = x.shape[first + 1]
        rows = index.shape[0] if cutlass.const_expr(self.gather) else x.shape[first]
        groups = x.shape[0] if cutlass.const_expr(self.matrices) else Int32(1)
        tiles = (rows + (SIDE - 1)) // SIDE
        if cutlass.const_expr(self.never_empty):
            tiles = cutlass.max(tiles, 1)
        if cutlass.const_expr(self.matrices):
            tiles = tiles * groups
        if cutlass.const_expr(self.grouped):
            groups = offsets.shape[0]
            tiles = tiles + groups
        strips = (columns + (self.strip * SIDE - 1)) // (self.strip * SIDE)
        self.kernel(
            x.iterator,
            index.iterator if cutlass.const_expr(self.gather or self.topk) else None,
            offsets.iterator if cutlass.const_expr(self.grouped) else None,
            x_q.iterator if cutlass.const_expr(self.by_row) else None,
            x_s.iterator if cutlass.const_expr(self.by_row) else None,
            x_t.iterator if cutlass.const_expr(self.transpose) else None,
            x_ts.iterator if cutlass.const_expr(self.transpose) else None,
            groups,
            rows,
            columns,
            (x_q if cutlass.const_expr(self.topk) else x).shape[0] if cutlass.const_expr(self.indexed) else None,
            [Int64(stride) for stride in x.stride[:-1]],
            [Int64(stride) for stride in x_q.stride[:-1]] if cutlass.const_expr(self.by_row) else [],
            [Int64(stride) for stride in x_s.stride[:-1]] if cutlass.const_expr(self.by_row) else [],
            [Int64(stride) for stride in x_t.stride[:-1]] if cutlass.const_expr(self.transpose) else [],
        ).launch(
            grid=[strips * tiles, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=-1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, index, offsets, x_q, x_s, x_t, x_ts, groups: Int32, rows: Int32, columns: Int32, tokens,
        x_strides, q_strides, s_strides, t_strides,
    ):  # fmt: skip
        """See the module's docstring."""
        allocator = cutlass.memory.SmemAllocator()
        parts = self.tiles * TILE
        shared = allocator.allocate(parts + PARTS * PAIRS * 4 + SIDE * 4 * self.indexed, 128).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        strips = divide(columns + (self.strip * SIDE - 1), self.strip * SIDE)
        number = divide(block, strips)
        strip = block - number * strips
        if cutlass.const_expr(self.gather):
            blocks, _, _ = cute.arch.grid_dim()
            tiles = divide(blocks, strips)
            strip = divide(block, tiles)
            number = block - strip * tiles
        place = self.place(offsets, groups, rows, number, thread & 31)
        first = strip * self.strip
        last = cutlass.min(first + self.strip, divide(columns + (SIDE - 1), SIDE))
        chosen = shared + parts + PARTS * PAIRS * 4
        source, target, turned = (x.toint(), x_strides, chosen), None, None
        if cutlass.const_expr(self.by_row):
            target = (x_q.toint(), q_strides, x_s.toint(), s_strides, chosen)
        if cutlass.const_expr(self.transpose):
            turned = (x_t.toint(), t_strides, x_ts.toint())
        extents = (rows, columns)
        if (place.row < place.end) | self.never_empty:
            if cutlass.const_expr(self.indexed):
                self.choose(index, tokens, place, chosen, thread)
            if cutlass.const_expr(not self.wide):
                self.fetch(source, place, columns, first, shared, thread)
                cute.arch.cp_async_commit_group()
            for step in cutlass.range(first, last, unroll=1):
                tile = shared
                if cutlass.const_expr(self.wide):
                    self.fetch_rounded(source, place, columns, step, tile, thread)
                elif cutlass.const_expr(self.tiles == 1):
                    cute.arch.cp_async_wait_group(0)
                else:
                    tile = shared + ((step - first) & 1) * TILE
                    if step + 1 < last:
                        self.fetch(source, place, columns, step + 1, shared + ((step - first + 1) & 1) * TILE, thread)
                    cute.arch.cp_async_commit_group()
                    cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()
                self.tile(target, turned, place, extents, step, tile, shared + parts, thread)
                cute.arch.sync_threads()

    @property
    def indexed(self) -> int:
        """Numbers of rows that shared memory holds for each of a tile's."""
        return self.topk or int(self.gather)

    def place(self, offsets, groups: Int32, rows: Int32, number: Int32, lane: Int32) -> Place:
        """Tile `number`; one without rows where there are fewer."""
        if self.grouped:
            begin, end, group = rows_of(offsets, groups, rows, number, lane)
            return Place(begin, end, number, group)
        if self.square:
            per_matrix = divide(rows + (SIDE - 1), SIDE)
            matrix = divide(number, per_matrix)
            return Place((number - matrix * per_matrix) * SIDE, rows, number - matrix * per_matrix, matrix)
        return Place(number * SIDE, rows, number, Int32(0))

    @cute.jit
    def fetch(self, tensor, place: Place, columns: Int32, step: Int32, tile: Int32, thread: Int32):
        """Starts column block `step` on its way to `tile`; zeros where there is nothing."""
        x, strides, chosen = tensor
        if cutlass.const_expr(self.matrices):
            x = x + Int64(place.group) * strides[0] * 2
        piece, line = thread & (PIECES - 1), thread >> 4
        column = step * SIDE + piece * 8
        destination = tile + line * LINE + (piece ^ (line & 7)) * 16
        if cutlass.const_expr(self.gather):
            for turn in cutlass.range(TURNS, unroll=4):
                row = Int32(lanes.shared_load_u32(chosen + (line + turn * COPIED) * 4))
                source = x + (Int64(row) * strides[-1] + Int64(column)) * 2
                copy_async(destination + turn * COPIED * LINE, source, (row >= 0) & (column < columns))
        else:
            source = x + (Int64(place.row + line) * strides[-1] + Int64(column)) * 2
            for turn in cutlass.range(TURNS, unroll=2):
                row = turn * COPIED
                there = (place.row + line + row < place.end) & (column < columns)
                copy_async(destination + row * LINE, source + Int64(row) * strides[-1] * 2, there)

    @cute.jit
    def fetch_rounded(self, tensor, place: Place, columns: Int32, step: Int32, tile: Int32, thread: Int32):
        """Column block `step` of float32 to `tile`, a row by a warp; zeros where there is nothing."""
        x, strides, chosen = tensor
        if cutlass.const_expr(self.matrices):
            x = x + Int64(place.group) * strides[0] * 4
        four, line = thread & (WARP - 1), divide(thread, WARP)
        column = step * SIDE + four * 4
        target = tile + line * LINE + ((four >> 1) ^ (line & 7)) * 16 + (four & 1) * 8
        for part in cutlass.range(SIDE // (WARPS * AHEAD), unroll=1):
            first = part * (WARPS * AHEAD)
            words = [
                self.four(x, strides, place, chosen, line + (first + turn * WARPS), column, columns)
                for turn in range(AHEAD)
            ]
            for turn in cutlass.range_constexpr(AHEAD):
                pairs = lanes.pack(lanes.unpack(words[turn], 4, WIDE), BF16)
                store_shared_b32x2(target + (first + turn * WARPS) * LINE, *pairs)

    def four(self, x, strides, place: Place, chosen: Int32, tile_row: Int32, column: Int32, columns: Int32) -> list:
        """Four numbers of the tile's row `tile_row`, as they are."""
        row, there = place.row + tile_row, place.row + tile_row < place.end
        if self.gather:
            row = Int32(lanes.shared_load_u32(chosen + tile_row * 4))
            there = row >= 0
        address = x + (Int64(row) * strides[-1] + Int64(column)) * 4
        return lanes.load(address, 16, there & (column < columns))

    @cute.jit
    def choose(self, index, tokens: Int32, place: Place, chosen: Int32, thread: Int32):
        """Which rows of x the tile has, or of x_q its rows become, to shared memory; -1: none. tokens: their number."""
        per_row = self.indexed
        for first in cutlass.range_constexpr(0, SIDE * per_row, THREADS):
            number = first + thread
            inside = number < SIDE * per_row
            at = index.toint() + (Int64(place.row) * per_row + number) * 4
            (word,) = lanes.load(at, 4, inside & (number < (place.end - place.row) * per_row), fill=-1)
            there = Int32(word) < tokens
            lanes.shared_store_u32_if(chosen + number * 4, cutlass.select_(there, word, Uint32(0xFFFFFFFF)), inside)
        cute.arch.sync_threads()

    @cute.jit
    def tile(self, target, turned, place: Place, extents, step: Int32, tile: Int32, parts: Int32, thread: Int32):
        """Column block `step` of the rows of `place`, which lies at `tile`."""
        if cutlass.const_expr(self.square):
            words = self.columns_of(tile, thread)
            scale, inverse = self.of_square(words, parts, thread)
            self.store_square(target, turned, place, extents, step, scale, thread)
            if cutlass.const_expr(self.by_row):
                self.rows(target, place, extents, step, tile, inverse, thread)
            if cutlass.const_expr(self.transpose):
                if cutlass.const_expr(self.by_row):  # else all have read the tile
                    cute.arch.sync_threads()
                self.store_columns(words, (inverse, inverse), turned, place, extents, step, tile, thread)
        else:
            if cutlass.const_expr(self.by_row):
                self.rows(target, place, extents, step, tile, None, thread)
            if cutlass.const_expr(self.transpose):
                words = self.columns_of(tile, thread)
                if cutlass.const_expr(self.turned_square):
                    scale, inverse = self.of_square(words, parts, thread)
                    across = divide(extents[1] + (SIDE - 1), SIDE)
                    at = turned[2] + (Int64(place.number) * Int64(across) + Int64(step)) * 4
                    lanes.store(at, [lanes.bits_of(scale)], 4, thread == 0)
                    inverse = (inverse, inverse)
                else:
                    inverse = self.of_columns(words, turned, place, extents, step, parts, thread)
                self.store_columns(words, inverse, turned, place, extents, step, tile, thread)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def rows(self, target, place: Place, extents, step: Int32, tile: Int32, inverse, thread: Int32):
        """FP8 values of the rows, and their scales; inverse: of the scale of all, where there is one."""
        for turn in cutlass.range(SIDE * ACROSS // THREADS, unroll=1):
            tile_row = (thread >> 3) + turn * (THREADS // ACROSS)
            self.row(target, place, extents, step, tile + tile_row * LINE, tile_row, inverse, thread & 7)

    @cute.jit
    def row(self, target, place: Place, extents, step: Int32, line: Int32, tile_row: Int32, inverse, part: Int32):
        """One row, of which this thread has pieces `part` and `part` + 8."""
        x_q, strides, x_s, s_strides, chosen = target
        _, columns = extents
        words = [load_words(line + ((part + half * 8) ^ (tile_row & 7)) * 16) for half in range(2)]
        scale = None
        if cutlass.const_expr(inverse is None):
            a = fp8.larger(*fp8.numbers(fp8.largest([word for four in words for word in four])))
            for distance in cutlass.range_constexpr(3):
                a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
            scale, inverse = fp8.scale_of(a, self.scales)
        packed = [eight_values(four, inverse) for four in words]
        if cutlass.const_expr(self.matrices):
            x_q = x_q + Int64(place.group) * strides[0]
        for copy in cutlass.range_constexpr(max(self.topk, 1)):
            row = place.row + tile_row
            there = row < place.end
            if cutlass.const_expr(self.topk):
                row = Int32(lanes.shared_load_u32(chosen + (tile_row * self.topk + copy) * 4))
                there = row >= 0
            if cutlass.const_expr(scale is not None):
                at = x_s + (Int64(step) * s_strides[0] + Int64(row)) * 4
                lanes.store(at, [lanes.bits_of(scale)], 4, (part == 0) & there)
            for half in cutlass.range_constexpr(2):
                column = step * SIDE + (part + half * 8) * 8
                at = x_q + (Int64(row) * strides[-1] + Int64(column))
                lanes.store(at, packed[half], 8, there & (column < columns))

    # -- columns ------------------------------------------------------------------------------------------------------

    def columns_of(self, tile: Int32, thread: Int32) -> list:
        """DEEP rows of two columns of a thread."""
        pair, part = thread & (PAIRS - 1), divide(thread, PAIRS)
        start = tile + part * (DEEP * LINE) + (pair & 3) * 4
        return [lanes.shared_load_u32(start + row * LINE + ((pair >> 2) ^ (row & 7)) * 16) for row in range(DEEP)]

    @cute.jit
    def of_columns(self, words, turned, place: Place, extents, step: Int32, parts: Int32, thread: Int32):
        """Reciprocals of the scales of a thread's two columns; one of PARTS threads stores the scales."""
        pair, part = thread & (PAIRS - 1), divide(thread, PAIRS)
        lanes.shared_store_u32(parts + thread * 4, fp8.largest(words))
        cute.arch.sync_threads()
        most = lanes.shared_load_u32(parts + pair * 4)
        for other in cutlass.range_constexpr(1, PARTS):
            most = fp8.larger_pairs(most, lanes.shared_load_u32(parts + (other * PAIRS + pair) * 4))
        scales = [fp8.scale_of(a, self.scales) for a in fp8.numbers(most)]
        _, columns = extents
        column = step * SIDE + pair * 2
        at = turned[2] + (Int64(place.number) * Int64(columns) + Int64(column)) * 4
        lanes.store(at, [lanes.bits_of(scale) for scale, _ in scales], 8, (part == 0) & (column < columns))
        return [inverse for _, inverse in scales]

    def store_columns(self, words, inverse, turned, place: Place, extents, step: Int32, tile: Int32, thread: Int32):
        """The FP8 values of a thread's two columns, through `tile`, which is no longer read."""
        x_t, strides, _ = turned
        rows, columns = extents
        pair, part = thread & (PAIRS - 1), divide(thread, PAIRS)
        for side in range(2):
            for half in range(DEEP // 16):
                numbers = [fp8.halves(word)[side] for word in words[half * 16 : (half + 1) * 16]]
                packed = [fp8.four_values(numbers[four : four + 4], inverse[side]) for four in range(0, 16, 4)]
                store_shared_v4(
                    tile + (pair * 2 + side) * SIDE + ((part * (DEEP // 16) + half) ^ (pair & 7)) * 16, packed
                )
        cute.arch.sync_threads()
        if self.matrices:
            x_t = x_t + Int64(place.group) * strides[0]
        tile_row, piece = thread >> 3, thread & 7
        token = place.number * SIDE + piece * 16
        for turn in range(SIDE * ACROSS // THREADS):
            column = tile_row + turn * (THREADS // ACROSS)
            there = step * SIDE + column < columns
            if self.square:
                there = there & (token < rows)
            packed = load_words(tile + column * SIDE + (piece ^ ((column >> 1) & 7)) * 16)
            lanes.store(x_t + Int64(step * SIDE + column) * strides[-1] + Int64(token), packed, 16, there)

    # -- squares ------------------------------------------------------------------------------------------------------

    @cute.jit
    def of_square(self, words, parts: Int32, thread: Int32):
        """(scale, reciprocal) of the whole tile."""
        a = fp8.larger(*fp8.numbers(fp8.largest(words)))
        for distance in cutlass.range_constexpr(5):
            a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, 1 << distance))
        lanes.shared_store_u32_if(parts + (thread >> 5) * 4, lanes.bits_of(a), (thread & 31) == 0)
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            a = fp8.larger(a, lanes.float_of(lanes.shared_load_u32(parts + warp * 4)))
        return fp8.scale_of(a, self.scales)

    def store_square(self, target, turned, place: Place, extents, step: Int32, scale: Float32, thread: Int32) -> None:
        """The scale of a square, in each orientation."""
        down, across = (divide(extent + (SIDE - 1), SIDE) for extent in extents)
        group = Int64(place.group) * Int64(down) * Int64(across)
        if self.by_row:
            at = target[2] + (group + Int64(place.number) * Int64(across) + Int64(step)) * 4
            lanes.store(at, [lanes.bits_of(scale)], 4, thread == 0)
        if self.transpose:
            at = turned[2] + (group + Int64(step) * Int64(down) + Int64(place.number)) * 4
            lanes.store(at, [lanes.bits_of(scale)], 4, thread == 0)


@cute.jit
def rows_of(offsets, groups: Int32, rows: Int32, number: Int32, lane: Int32):
    """First row of tile `number` of all groups, the end of its group, and which that is."""
    begin, end, group_of, before, first, last = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    more = groups > 0
    while more:
        group = first + lane * GROUPS_PER_LANE
        ends = [end_of(offsets, group + index, groups) for index in range(GROUPS_PER_LANE)]
        below = cute.arch.shuffle_sync_up(ends[-1], 1, mask_and_clamp=0)
        starts = [cutlass.select_(lane == 0, last, below), *ends[:-1]]
        highs, lows = [cutlass.min(index, rows) for index in ends], [cutlass.max(index, 0) for index in starts]
        tiles = [divide(cutlass.max(high - low, 0) + (SIDE - 1), SIDE) for high, low in zip(highs, lows, strict=True)]
        until = before + lanes.before(tiles[0] + tiles[1] + tiles[2] + tiles[3], lane)
        candidate = (group, lows[0], highs[0], until)  # of the group that has the tile, if it is the lane's
        for index in cutlass.range_constexpr(1, GROUPS_PER_LANE):
            until = until + tiles[index - 1]
            other = (group + index, lows[index], highs[index], until)
            candidate = tuple(cutlass.select_(until <= number, b, a) for a, b in zip(candidate, other, strict=True))
        until = until + tiles[-1]
        owner = cute.arch.popc(cute.arch.vote_ballot_sync(until <= number))
        before, last = cute.arch.shuffle_sync(until, 31), cute.arch.shuffle_sync(ends[-1], 31)
        first += WARP * GROUPS_PER_LANE
        more = first < groups
        if owner < WARP:
            more = first < 0
            group_of, begin, end, until = [cute.arch.shuffle_sync(index, owner) for index in candidate]
            begin += (number - until) * SIDE
    return begin, end, group_of


def end_of(offsets: cute.Pointer, group: Int32, groups: Int32) -> Int32:
    """The end of a group, unclipped; 0 where there is none. L1 keeps it for the next thread block."""
    return cutlass.select_(group < groups, offsets[cutlass.min(group, groups - 1)], Int32(0))


def copy_async(destination: Int32, source: Int64, there) -> None:
    """16 bytes from global to shared memory; zeros unless they are there."""
    cute.arch.inline_ptx(
        "{ .reg .b32 size_; .reg .pred ok_; setp.ne.b32 ok_, {$r2}, 0; selp.b32 size_, 16, 0, ok_;"
        " cp.async.cg.shared.global [{$r0}], [{$r1}], 16, size_; }",
        read_only_args=[destination, source, Int32(there)],
    )


def eight_values(words: list, inverse) -> list:
    """Eight numbers times the reciprocal of their scale."""
    numbers = [number for word in words for number in fp8.halves(word)]
    return [fp8.four_values(numbers[:4], inverse), fp8.four_values(numbers[4:], inverse)]


def load_words(address: Int32) -> list:
    """Four words of shared memory, 16-byte aligned."""
    return [Uint32(word) for word in load_shared_v4(address)]

"""FP8 values of the rows of y or dz: each warp finds the largest of 128 columns of its 16 rows and stores them by
itself.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.floats import multiply
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.kernels.quantise import fp8
from fusekit.plan.quant import SIDE

CHUNKS = SIDE // 8  # of a block
WORDS = 2 * CHUNKS  # of a lane: two columns of two rows of each chunk


class Fp8Rows(NamedTuple):
    """Tensor map of FP8 values [M, N]; scales [ceil(N / 128), M], `stride` elements from row to row."""

    fp8: Any
    scales: cute.Pointer
    stride: Int64


class Fp8Output(DeviceOperand):
    """FP8 output of a result of which a warp has whole rows, 128 columns at a time."""

    step = 7

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.staging = kit.StagingBoxes(plan)

    def view(self, parameter):
        return Fp8Rows(descriptor_address(parameter.fp8), parameter.scales, parameter.stride)

    @cute.jit
    def block(
        self, words, box, extent, rows, target, first: cutlass.Constexpr, four: cutlass.Constexpr = False,
        whole: cutlass.Constexpr = False,
    ):  # fmt: skip
        """16 rows of a block. extent: (its first column, columns of the result); whole: all of it is inside them.

        words: (chunk, r) in order, two columns each; with `four`, of chunks of 16 columns, (chunk, r, c), four columns.
        """
        column, width = extent
        per_row = 4 if four else 2
        if cutlass.const_expr(not whole):
            there = [ptx.flag(column + chunk * (4 * per_row) < width) for chunk in range(len(words) // per_row)]
            words = [ptx.word_where(there[number // per_row], word) for number, word in enumerate(words)]
        pairs = [[word for number, word in enumerate(words) if number // (per_row // 2) % 2 == r] for r in range(2)]
        scales, inverses = self.scales_of(pairs)
        self.store_scales(scales, column, width, rows, target)
        if cutlass.const_expr(first):  # the boxes before have left
            self.staging.acquire_all()
        (write_four if four else write)(pairs, inverses, box)
        where = self.kit.ragged_place(column, rows.end - rows.row, rows.end)
        self.staging.send(box, target.fp8, where, False)

    def scales_of(self, pairs):
        """Scales of a lane's two rows, and their reciprocals."""
        return row_scales(pairs, self.plan.quant.scales)

    def store_scales(self, scales, column: Int32, width: Int32, rows, target) -> None:
        """Stores those of 16 rows of a block."""
        store_scales(scales, column, width, rows, target)


class YFp8(Fp8Output):
    def parameter(self, given):
        return coded_rows(self.kit, given.y_q, given.y_s)

    def outputs(self, words, rows, work, state) -> None:
        width = work.extents.half_n if self.plan.halved else work.extents.n
        for block in range(self.plan.out_tile_n // SIDE):
            column = rows.n_tile * self.plan.out_tile_n + block * SIDE
            part, box = words[block * WORDS : (block + 1) * WORDS], work.staging + block * (SIDE * self.kit.WARP_ROWS)
            self.block(part, box, (column, width), rows, work.operands.y_fp8, block == 0)


class DzFp8(Fp8Output):
    """FP8 output of dz: both halves, gates and ups, in their order in memory."""

    def parameter(self, given):
        return coded_rows(self.kit, given.dz_q, given.dz_s)

    def gradients(self, packed, rows, work) -> None:
        layout, tile_n, n = self.plan.glu_layout, self.plan.tile[1], work.extents.n
        words, count = in_order(packed[0], layout), self.plan.sides * tile_n // SIDE
        begin = self.plan.z_bytes if self.plan.turning else self.plan.warp_bytes - self.plan.fp8_bytes
        boxes = work.staging + begin
        for block in range(count):
            column = rows.n_tile * (self.plan.sides * tile_n) + block * SIDE
            if layout == "concat":  # gates of the tile, then ups
                side, inside = block // (count // 2), block % (count // 2) * SIDE
                column = rows.n_tile * tile_n + inside + (n if side else 0)
            part, box = words[block * WORDS : (block + 1) * WORDS], boxes + block * (SIDE * self.kit.WARP_ROWS)
            extent, four, whole = (column, n * self.plan.sides), layout == "interleaved", layout == "concat"
            self.block(part, box, extent, rows, work.operands.dz_fp8, block == 0, four, whole)


def coded_rows(kit, fp8_, scales) -> Fp8Rows:
    """The parameter."""
    descriptor = kit.ragged_map(kit.store_op(), fp8_, (SIDE, kit.WARP_ROWS))
    return Fp8Rows(descriptor, scales.iterator, Int64(scales.stride[0]))


def row_scales(pairs, rule: str):
    """Scales of a lane's two rows, and their reciprocals. The four lanes of a row share its numbers."""
    scales = []
    for words in pairs:
        a = fp8.larger(*fp8.numbers(fp8.largest(words)))
        for distance in (1, 2):
            a = fp8.larger(a, cute.arch.shuffle_sync_bfly(a, distance))
        scales.append(fp8.scale_of(a, rule))
    return tuple(zip(*scales, strict=True))


def store_scales(scales, column: Int32, width: Int32, rows, target) -> None:
    """Scales of the two rows of four lanes: the first lane stores one, the second the other."""
    lane = cute.arch.lane_idx()
    row = rows.row + (lane >> 2) + (lane & 1) * 8
    scale = ptx.choose(lane & 1, scales[1], scales[0])
    at = target.scales.toint() + (Int64(ptx.divide(column, SIDE)) * target.stride + Int64(row)) * 4
    lanes.store(at, [lanes.bits_of(scale)], 4, ((lane & 3) < 2) & (row < rows.end) & (column < width))


def write(pairs, inverses, box) -> None:
    """FP8 values into a box of 16 rows of 128, whose 16-byte units are exchanged by the row, as tensor maps have it."""
    lane = cute.arch.lane_idx()
    base = box.toint() + (lane & 3) * 2
    for chunk in range(CHUNKS):
        at = base + unit_place(lane >> 2, chunk // 2)
        for r in range(2):
            fp8_ = pair_of(pairs[r][chunk], of_chunk(inverses[r], chunk, CHUNKS))
            ptx.store_shared_u16(at, fp8_, chunk % 2 * 8 + r * (8 * SIDE))


def write_four(pairs, inverses, box) -> None:
    """The same where a lane has four columns of a chunk of 16."""
    lane = cute.arch.lane_idx()
    base = box.toint() + (lane & 3) * 4
    for chunk in range(CHUNKS // 2):
        at = base + unit_place(lane >> 2, chunk)
        for r in range(2):
            inverse = of_chunk(inverses[r], chunk, CHUNKS // 2)
            low, high = (pair_of(pairs[r][2 * chunk + c], inverse) for c in range(2))
            lanes.shared_store_u32(at + r * (8 * SIDE), low | (high << 16))


def of_chunk(inverses, chunk: int, chunks: int):
    """The reciprocal for chunk `chunk` of a row's: the only one, or one of several blocks'."""
    return inverses[chunk * len(inverses) // chunks] if isinstance(inverses, list) else inverses


def pair_of(word, inverse):
    """Two numbers as FP8 values."""
    low, high = fp8.halves(word)
    return fp8.two_values(multiply(low, inverse), multiply(high, inverse))


def unit_place(row, unit: int):
    """Where 16 FP8 values of a row are in a box, in bytes."""
    return row * SIDE + (row * 16 & 112 ^ unit * 16)


def in_order(steps, layout: str) -> list:
    """Words of a row's blocks, one block after the other. steps: of each unit, its steps, by side."""
    if layout == "concat":
        return [word for side in range(2) for unit in steps for step in unit for word in step[side]]
    return [word for unit in steps for side in range(len(unit[0])) for step in unit for word in step[side]]

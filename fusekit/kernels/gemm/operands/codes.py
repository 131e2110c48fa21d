"""Codes of the rows of y: each warp finds the largest of 128 columns of its 16 rows and stores them by itself."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.floats import multiply
from fusekit.kernels.gemm.operands.base import Operand
from fusekit.kernels.gemm.sm90.maps import ragged_map, store_op
from fusekit.kernels.gemm.sm90.staging import StagingBoxes
from fusekit.kernels.quantise import codes
from fusekit.plan.gemm import BIG, WARP_ROWS
from fusekit.plan.quant import SIDE

CHUNKS = SIDE // 8  # of a block
WORDS = 2 * CHUNKS  # of a lane: two columns of two rows of each chunk


class CodedRows(NamedTuple):
    """Tensor map of codes [M, N]; scales [ceil(N / 128), M], `stride` elements from row to row."""

    codes: Any
    scales: cute.Pointer
    stride: Int64


class YCodes(Operand):
    step = 7

    def __init__(self, plan, told) -> None:
        super().__init__(plan, told)
        self.staging = StagingBoxes(plan)

    def parameter(self, given):
        return coded_rows(given.y_q, given.y_s)

    def view(self, parameter):
        return CodedRows(ptx.descriptor_address(parameter.codes), parameter.scales, parameter.stride)

    def outputs(self, words, rows, work, state) -> None:
        width = work.extents.half_n if self.plan.halved else work.extents.n
        for block in range(self.plan.out_tile_n // SIDE):
            column = rows.n_tile * self.plan.out_tile_n + block * SIDE
            mine = words[block * WORDS : (block + 1) * WORDS]
            box = work.staging + block * (SIDE * WARP_ROWS)
            self.block(mine, box, column, width, rows, work.operands.y_codes, block == 0)

    @cute.jit
    def block(self, words, box, column: Int32, width: Int32, rows, target, first: cutlass.Constexpr):
        """16 rows of a block from column `column` on, of `width`. words: (chunk, r) in order, two columns each."""
        there = [ptx.flag(column + chunk * 8 < width) for chunk in range(CHUNKS)]
        words = [ptx.word_where(there[number // 2], word) for number, word in enumerate(words)]
        scales, inverses = row_scales(words, self.plan.quant.scales)
        store_scales(scales, column, width, rows, target)
        if cutlass.const_expr(first):  # the boxes before have left
            self.staging.acquire_all()
        write(words, inverses, box)
        self.staging.send(box, target.codes, place(column, rows), False)


def coded_rows(codes_, scales) -> CodedRows:
    """The parameter."""
    return CodedRows(ragged_map(store_op(), codes_, (SIDE, WARP_ROWS)), scales.iterator, Int64(scales.stride[0]))


def place(column: Int32, rows):
    """Coordinates of a box of codes."""
    return (column, BIG - (rows.end - rows.row), BIG, rows.end)


def row_scales(words, rule: str):
    """Scales of a lane's two rows, and their reciprocals. The four lanes of a row share its numbers."""
    found = []
    for r in range(2):
        a = codes.larger(*codes.numbers(codes.largest(words[r::2])))
        for distance in (1, 2):
            a = codes.larger(a, cute.arch.shuffle_sync_bfly(a, distance))
        found.append(codes.scale_of(a, rule))
    return tuple(zip(*found, strict=True))


def store_scales(scales, column: Int32, width: Int32, rows, target) -> None:
    """Of the two rows of four lanes: the first stores one, the second the other."""
    lane = cute.arch.lane_idx()
    row = rows.row + (lane >> 2) + (lane & 1) * 8
    scale = ptx.choose(lane & 1, scales[1], scales[0])
    at = target.scales.toint() + (Int64(ptx.divide(column, SIDE)) * target.stride + Int64(row)) * 4
    lanes.store(at, [lanes.bits_of(scale)], 4, ((lane & 3) < 2) & (row < rows.end) & (column < width))


def write(words, inverses, box) -> None:
    """Codes into a box of 16 rows of 128, whose 16-byte units are exchanged by the row, as tensor maps have it."""
    lane = cute.arch.lane_idx()
    row = lane >> 2
    base = box.toint() + (lane & 3) * 2
    for chunk in range(CHUNKS):
        at = base + unit_place(row, chunk // 2)
        for r in range(2):
            low, high = codes.halves(words[chunk * 2 + r])
            pair = codes.two_codes(multiply(low, inverses[r]), multiply(high, inverses[r]))
            ptx.store_shared_u16(at, pair, chunk % 2 * 8 + r * (8 * SIDE))


def unit_place(row, unit: int):
    """Where 16 codes of a row are in a box, in bytes."""
    return row * SIDE + (row * 16 & 112 ^ unit * 16)

"""Where FP8 values and numbers lie in shared memory, on plain integers in the place of registers."""

from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.operands import fp8_output as output
from fusekit.kernels.gemm.operands import turned

SIDE = 128


def swizzled(offset):
    """What a tensor map of 128-byte rows makes of an offset in a box: 16-byte units exchanged by the row."""
    return offset ^ (offset >> 7 & 7) << 4


def fragment(warp, lane, chunk, r):
    """(row, columns) of a lane's pair of outputs in a 64-row tile of eight warps (PTX ISA, "wgmma, D fragment")."""
    row, column = warp * 16 + (lane >> 2) + 8 * r, chunk * 8 + 2 * (lane & 3)
    return row, (column, column + 1)


def test_fp8_values_of_rows_lie_as_the_tensor_map_reads_them():
    result = {}
    for lane in range(32):
        for chunk in range(16):
            for r in range(2):
                row, columns = fragment(0, lane, chunk, r)
                at = output.unit_place(lane >> 2, chunk // 2) + (lane & 3) * 2 + chunk % 2 * 8 + r * 8 * SIDE
                result |= {at + side: (row, column) for side, column in enumerate(columns)}
    assert result == {swizzled(row * SIDE + column): (row, column) for row in range(16) for column in range(SIDE)}


def test_stores_of_fp8_values_meet_in_no_bank():
    for chunk in range(16):
        words = {output.unit_place(lane >> 2, chunk // 2) + (lane & 3) * 2 + chunk % 2 * 8 >> 2 for lane in range(32)}
        assert len({word % 32 for word in words}) == len(words) == 16


def turned_tile():
    """Shared memory, 16-bit element by element, as stmatrix with .trans leaves it: (token, column)."""
    memory = {}
    for warp in range(8):
        address = [
            turned.place((lane >> 4) * 8 + (lane & 7), warp * 2 + ((lane >> 3) & 1)) for lane in range(32)
        ]  # as `outputs` has it
        for pair in range(8):
            for matrix in range(4):
                chunk, r = 2 * pair + matrix // 2, matrix % 2
                for lane in range(32):  # of the matrix's row lane / 4, columns 2 (lane % 4) and the next
                    token, columns = fragment(warp, lane, chunk, r)
                    for column in columns:
                        at = address[8 * matrix + column % 8] + pair * 16 * turned.LINE + 2 * (token % 8)
                        memory[at] = (token, column)
    return memory


def test_the_idle_warp_finds_every_token_of_its_column():
    memory = turned_tile()
    assert len(memory) == SIDE * SIDE
    for column in range(SIDE):
        for unit in range(16):
            start = column // 32 * 32 * turned.LINE + turned.place(column % 32, unit)
            assert [memory[start + 2 * index] for index in range(8)] == [
                (unit * 8 + index, column) for index in range(8)
            ]


def test_units_of_neighbouring_columns_lie_in_different_banks():
    for unit in range(16):
        for first in range(0, 32, 8):
            assert len({turned.place(first + index, unit) // 16 % 8 for index in range(8)}) == 8
    # FP8 values of 16 tokens, in lines of 128 bytes.
    for slab in range(8):
        places = np.array([column * SIDE + (slab ^ (column & 7)) * 16 for column in range(32)])
        assert set(places) == {swizzled(column * SIDE + slab * 16) for column in range(32)}
        assert all(len(set(places[first : first + 8] // 16 % 8)) == 8 for first in range(0, 32, 8))


def steps_of(layout):
    """dz of a tile of 128 columns of da as the backward epilogue makes it: the column of dz in the tile's blocks."""
    if layout == "interleaved":
        chunks = [[16 * chunk + 2 * c for _ in range(2) for c in range(2)] for chunk in range(16)]
        return [[[chunk] for chunk in chunks[first : first + 4]] for first in range(0, 16, 4)]
    side_of = {
        "concat": lambda side, unit: side * 128 + unit * 32,
        "interleaved-32": lambda side, unit: unit * 64 + side * 32,
    }
    first_of = side_of.get(layout, lambda side, unit: unit * 32)
    return [
        [
            [[first_of(side, unit) + 16 * pair + 8 * chunk for chunk in range(2) for _ in range(2)]
             for side in range(1 if layout == "none" else 2)]
            for pair in range(2)
        ]
        for unit in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["concat", "interleaved-32", "interleaved", "none"])
def test_blocks_of_dz_are_in_order(layout):
    words = output.in_order(steps_of(layout), layout)
    if layout == "interleaved":  # (chunk of 16, r, c)
        assert words == [number // 4 * 16 + number % 2 * 2 for number in range(64)]
    else:  # (chunk of 8, r)
        assert words == [number // 2 * 8 for number in range(32 if layout == "none" else 64)]


def test_four_fp8_values_of_a_lane_lie_as_the_tensor_map_reads_them():
    result = {}
    for lane in range(32):
        for chunk in range(8):
            for r in range(2):
                at = output.unit_place(lane >> 2, chunk) + (lane & 3) * 4 + r * 8 * SIDE
                result |= {at + c: ((lane >> 2) + 8 * r, 16 * chunk + 4 * (lane & 3) + c) for c in range(4)}
    assert result == {swizzled(row * SIDE + column): (row, column) for row in range(16) for column in range(SIDE)}


def slab(layout):
    """A warp's 16 tokens of all columns, 16-bit element by element, as stmatrix with .trans leaves them."""
    words = output.in_order(steps_of(layout), layout)
    side_by_side, memory = layout == "interleaved", {}
    for pair in range(len(words) // 4):
        for matrix in range(4):
            for lane in range(32):  # of the matrix's row lane / 4, columns 2 (lane % 4) and the next
                r = matrix // 2 if side_by_side else matrix % 2
                first = words[4 * pair + matrix] + (4 if side_by_side else 2) * (lane & 3)
                for c in range(2):
                    there = 8 * matrix + 2 * (lane & 3) + c  # the lane that gives the address of this column
                    number, column = there >> 3, there & 7
                    half = number >> 1 if side_by_side else number & 1
                    if side_by_side:
                        column = (column >> 1) * 4 + (number & 1) * 2 + (column & 1)
                    else:
                        column = (number >> 1) * 8 + column
                    at = turned.slab_place(column, half) + pair * 16 * turned.SLAB + 2 * (lane >> 2)
                    memory[at] = (8 * r + (lane >> 2), first + c)
    return memory


@pytest.mark.parametrize("layout", ["concat", "interleaved-32", "interleaved", "none"])
def test_the_fourth_warpgroup_finds_every_token_of_its_column(layout):
    memory, columns = slab(layout), 128 if layout == "none" else 256
    assert len(memory) == 16 * columns
    for column in range(columns):
        for half in range(2):
            start = column // 32 * 32 * turned.SLAB + turned.slab_place(column % 32, half)
            assert [memory[start + 2 * index] for index in range(8)] == [
                (half * 8 + index, column) for index in range(8)
            ]


def test_units_of_a_slab_lie_in_different_banks():
    for half in range(2):
        for first in range(0, 32, 8):
            assert len({turned.slab_place(first + index, half) // 16 % 8 for index in range(8)}) == 8
    half_ = object.__new__(turned.DzTurned)
    half_.plan = SimpleNamespace(warp_bytes=14336)
    for slab in range(turned.SLABS):  # lines of 32 bytes; a tensor map exchanges their halves by four rows
        places = [half_.place_of_values(column, slab) for column in range(32)]
        lines = [(at := column * 32 + slab % 2 * 16) ^ (at >> 7 & 1) << 4 for column in range(32)]
        assert places == [slab // 2 * 2 * 14336 + at for at in lines]
        assert all(len({at // 16 % 8 for at in places[first : first + 8]}) == 8 for first in range(0, 32, 8))

"""One memory for what all launches of a pass are given: their tensor maps, then a cell for each value.

The driver takes each parameter from where its own address says. So launches that are given the same pointer or number
share a cell, and one call writes all addresses of a pass:

    tensor maps                     128 bytes each
    addresses of the tensor maps    8 bytes each, copied into the maps
    pointers                        8 bytes each
    numbers                         8 bytes each, little-endian: a shorter one is the begin
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fusekit.abi.parameters import TENSOR_MAP_BYTES
from fusekit.abi.tensormap import ADDRESS_AT
from fusekit.runtime.maps import MAP_ALIGNMENT, memory_of

if TYPE_CHECKING:
    from fusekit.runtime.launch_plan import Block, LaunchPlan

_WORD = 8


class Cells:
    """Where the parameters of a pass lie. Each is of a launch by number, at an offset among its parameters."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []
        self._pointers: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self._numbers: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)

    def add_map(self, launch: int, offset: int) -> int:
        """Where it begins in the memory."""
        self._maps.append((launch, offset))
        return TENSOR_MAP_BYTES * (len(self._maps) - 1)

    def add_pointer(self, launch: int, offset: int, value: Hashable) -> None:
        self._pointers[value].append((launch, offset))

    def add_number(self, launch: int, offset: int, value: Hashable) -> None:
        self._numbers[value].append((launch, offset))

    @property
    def addresses_at(self) -> int:
        """Where the addresses begin: of the tensor maps in order, then the pointers in order."""
        return TENSOR_MAP_BYTES * len(self._maps)

    @property
    def numbers_at(self) -> int:
        return self.addresses_at + _WORD * (len(self._maps) + len(self._pointers))

    def arena(self, parts: Sequence[tuple[LaunchPlan, Block]]) -> Arena:
        """A memory for these launches, which take their parameters from there from now on. Its tensor maps are theirs;
        the cells are still to be written.
        """
        size = self.numbers_at + _WORD * len(self._numbers)
        buffer = ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        start = -ctypes.addressof(buffer) % MAP_ALIGNMENT
        base = ctypes.addressof(buffer) + start
        memory = memoryview(buffer).cast("B")[start : start + size]
        maps = [tensor_map for _, block in parts for tensor_map in block.maps]
        for number, tensor_map in enumerate(maps):
            begin = TENSOR_MAP_BYTES * number
            memory[begin : begin + TENSOR_MAP_BYTES] = memory_of(tensor_map)
        places: dict[int, dict[int, int]] = defaultdict(dict)
        for number, (launch, offset) in enumerate(self._maps):
            places[launch][offset] = base + TENSOR_MAP_BYTES * number
        pointers_at = self.addresses_at + _WORD * len(self._maps)
        for number, users in enumerate([*self._pointers.values(), *self._numbers.values()]):
            for launch, offset in users:
                places[launch][offset] = base + pointers_at + _WORD * number
        for number, (plan, block) in enumerate(parts):
            block.point(plan, places[number], buffer)
        words, first = memory.cast("Q"), self.addresses_at // _WORD
        heads = words[ADDRESS_AT // _WORD : first : TENSOR_MAP_BYTES // _WORD]
        return Arena(memory, heads, words[first : first + len(maps)], [block.memory for _, block in parts])


class Arena(NamedTuple):
    """heads: the addresses in the tensor maps. given: those that are copied there. blocks: the memory of each launch,
    for what lies within structs.
    """

    memory: memoryview
    heads: memoryview
    given: memoryview
    blocks: Sequence[memoryview]

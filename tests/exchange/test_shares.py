"""How warps share out rows, shares.py as a state machine: each row is sent once, each chunk announced when it is there.

A warp is a generator that stops wherever another one may go on; what it yields must hold before it does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest

from fusekit.kernels.exchange import shares
from fusekit.kernels.exchange.shares import SLOT, SLOTS
from fusekit.plan.exchange import CHUNK
from tests.kernels.plain import plain

FAULTS = (
    "chunks take slots that are in use",
    "chunks become known in any order",
    "a chunk is announced by its last row",
)
Until = Callable[[], bool]


class Launch:
    """Blocks of warps that send `count` chunks, in an order that `seed` decides."""

    def __init__(self, blocks: int, warps: int, count: int, seed: int, fault: str = "", sizes=(CHUNK, SLOTS)) -> None:
        self.blocks, self.count, self.fault = blocks, count, fault
        self.rows, self.slots = sizes
        self.drawn, self.sent, self.announced = 0, Counter(), Counter()
        source, waiting = random.Random(seed), []
        for turn in range(blocks):
            block = Block(self)
            waiting += [(warp, next(warp)) for warp in (block.warp(turn) for _ in range(warps))]
        while waiting:
            able = [index for index, (_, until) in enumerate(waiting) if until()]
            assert able, "all warps wait"
            warp, _ = waiting.pop(source.choice(able))
            following = next(warp, None)
            waiting += [(warp, following)] if following else []
        rows = product(range(count), range(self.rows))
        assert self.sent == Counter(dict.fromkeys(rows, 1)) and self.announced == Counter(
            dict.fromkeys(range(count), 1)
        )


class Block:
    """Its words of shared memory."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.drawn, self.known = launch, 0, 0
        self.chunk, self.sent = [0] * launch.slots, [0] * launch.slots

    def warp(self, turn: int) -> Iterator[Until]:
        launch = self.launch
        while True:
            yield lambda: True
            number, row = divmod(self.drawn, launch.rows)
            self.drawn += 1
            if row == 0:
                after = (number + 1) % launch.slots
                free = (number + 1) // launch.slots * launch.rows
                if launch.fault != FAULTS[0]:
                    yield lambda after=after, free=free: self.sent[after] >= free
                if launch.fault != FAULTS[1]:
                    yield lambda number=number: self.known >= number
                self.chunk[after], launch.drawn = launch.blocks + launch.drawn, launch.drawn + 1
                yield lambda: True
                self.known = number + 1
            yield lambda number=number: self.known >= number
            slot = number % launch.slots
            chunk = self.chunk[slot] if number else turn
            if chunk >= launch.count:
                return
            yield lambda: True
            launch.sent[chunk, row] += 1
            yield lambda: True
            self.sent[slot] += 1
            last = row == launch.rows - 1 if launch.fault == FAULTS[2] else self.sent[slot] % launch.rows == 0
            if last:
                assert all(launch.sent[chunk, each] for each in range(launch.rows)), f"{chunk} is not all there"
                launch.announced[chunk] += 1


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("blocks", "warps"), [(1, 4), (2, 8), (3, 16), (2, 32)])
def test_every_row_is_sent_and_announced_once(blocks, warps, seed):
    Launch(blocks, warps, seed % 23, seed)
    Launch(blocks, min(warps, 8), seed % 23, seed, sizes=(4, 4))  # slots are used again and again


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found(fault):
    """In some of a few hundred orders."""
    for seed in range(300):
        try:
            Launch(2, 12, 20, seed, fault, sizes=(2, 2))
        except AssertionError:
            return
    pytest.fail(f"{fault}: not found")


def test_the_last_row_to_be_sent_tells_of_its_chunk():
    """Also of the chunk that has the slot next."""
    memory: Counter[int] = Counter()

    def add(address: int) -> int:
        memory[address] += 1
        return memory[address] - 1

    arch = SimpleNamespace(sync_warp=lambda: None, lane_idx=lambda: 0, shuffle_sync=lambda value, lane: value)
    device = plain(shares, cute=SimpleNamespace(arch=arch), signals=SimpleNamespace(add_shared=add))
    places = [device.slot(1000, number) for number in range(SLOTS)]
    assert places == list(range(1000 + SLOT, 1000 + SLOT * (SLOTS + 1), SLOT))
    assert device.slot(1000, SLOTS) == places[0]
    for _ in range(2):
        assert [device.sent(places[3]) for _ in range(CHUNK)] == [0] * (CHUNK - 1) + [1]
    assert memory == {places[3] + 4: 2 * CHUNK}

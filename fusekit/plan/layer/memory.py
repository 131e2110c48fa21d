"""Where the buffers of a pass lie: layouts, which are decided once, and then give places for any number of tokens.

The search for places runs for some numbers of tokens only. A layout keeps the order that the search gave: a buffer
begins where those end that lie below it and are needed at the same time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from fusekit.abi.layer_memory import Layout, Place, needs, padded
from fusekit.abi.layer_pass import SCRATCH

SLACK = 1.02  # what a layout may take where the search takes 1
NEAR = 1024  # two layouts in turn change at T tokens or T / 1024 away from it
PROBES = 8  # parts of the gap between two layouts that are looked at
Life = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Home:
    """Memory that others may have from step `since` to the one before `until`. output: it is lent by the caller."""

    name: str
    since: int
    until: int
    output: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """What layouts are decided for. at: the dim that their ranges are of. sizes, rooms: bytes of buffers and homes."""

    at: int
    sizes: Mapping[str, int]
    rooms: Mapping[str, int]
    _taken: dict[tuple[Place, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def takes(self, places: tuple[Place, ...]) -> float:
        """The bytes of scratch memory; infinity if a home has not enough."""
        if places not in self._taken:
            needed = needs(places, self.sizes)[1]
            rest = needed.pop(SCRATCH, 0)
            fits = all(end <= self.rooms[home] for home, end in needed.items())
            self._taken[places] = rest if fits else inf
        return self._taken[places]


Decided = tuple[Sample, tuple[Place, ...]]


def ladder(
    layout: Layout, lives: Mapping[str, Life], over: Mapping[str, str], homes: Sequence[Home],
    sample: Callable[[int], Sample], tokens: int,
) -> list[Layout]:  # fmt: skip
    """Layouts, few of them, of which the best for a sample takes at most `SLACK` times what a search for it takes.

    layout: one without places. lives: of buffers, first and last step. over: buffers that are written over others,
    whose lives are one, or over kept ones. tokens: a number to decide for, besides powers of two.
    """

    def decide(count: int) -> Decided:
        given = sample(count)
        return given, _search(lives, over, homes, given)

    even = {count: decide(count) for count in (0, tokens, *(1 << power for power in range(19)))}
    layouts = _ranges(layout, homes, even, decide)
    # Buffers that fill a home to the last byte do so for round numbers only.
    odd = {
        count: decide(count)
        for count in {0, *(each for count in even for each in (max(count - 1, 0) | 1, 9 * count // 8 | 1))}
    }
    if not all(_serves(layouts, *each) for each in odd.values()):
        layouts += _ranges(layout, homes, odd, decide)
    return layouts


def _serves(layouts: Sequence[Layout], sample: Sample, best: tuple[Place, ...]) -> bool:
    """Whether the best layout for a sample takes hardly more than the best places for it."""
    fit = (each.places for each in layouts if each.since <= sample.at <= each.until)
    takes = min(map(sample.takes, fit), default=inf)
    return takes <= SLACK * sample.takes(best)


def _ranges(
    layout: Layout, homes: Sequence[Home], samples: dict[int, Decided], decide: Callable[[int], Decided]
) -> list[Layout]:
    """Layouts for ranges; samples: by number of tokens."""
    while True:
        counts = sorted(samples)
        layouts, begin, turns = [], 0, list[int]()
        for places, end in _rungs([samples[count] for count in counts]):
            lends = {home.name for home in homes if home.output} & {place.home for place in places}
            since = samples[counts[begin - 1]][0].at + 1 if begin else 0
            until: float = inf
            if end < len(counts):
                after = samples[counts[end]][0]
                until = samples[counts[end - 1]][0].at if after.takes(places) < inf else after.at - 1
                low, gap = counts[end - 1], counts[end] - counts[end - 1]
                if gap > max(low // NEAR, 1):  # neither may fit between
                    turns += sorted({low + gap * part // PROBES for part in range(1, PROBES)} - {low})
            layouts.append(replace(layout, places=places, lends=frozenset(lends), since=since, until=until))
            begin = end
        between = {count: decide(count) for count in turns}
        more = {count: each for count, each in between.items() if not _serves(layouts, *each)}
        if not more:
            return layouts
        samples = samples | more


def _rungs(samples: Sequence[Decided]) -> list[tuple[tuple[Place, ...], int]]:
    """Places that serve as many samples in a row as any, each with the index of the first sample after them."""
    least = [sample.takes(places) for sample, places in samples]
    rungs: list[tuple[tuple[Place, ...], int]] = []
    begin = 0
    while begin < len(samples):
        best, end = samples[begin][1], begin
        for places in dict.fromkeys(found for _, found in samples[begin:]):
            at = begin
            while at < len(samples) and samples[at][0].takes(places) <= SLACK * least[at]:
                at += 1
            if at > end:
                best, end = places, at
        rungs.append((best, begin := end))
    return rungs


def _search(
    lives: Mapping[str, Life], over: Mapping[str, str], homes: Sequence[Home], sample: Sample
) -> tuple[Place, ...]:
    """The largest first, each in the smallest home that has room, at the lowest place that is free while it lives. What
    has no size here, but may have one in a call, lies in scratch memory, which has room for it.
    """
    sizes, rooms = sample.sizes, sample.rooms
    taken: dict[str, list[tuple[int, int, str]]] = {name: [] for name in (*(home.name for home in homes), SCRATCH)}
    kept = {name: first for name, first in over.items() if first in taken}
    for name, first in kept.items():
        taken[first].append((0, padded(sizes[name]), name))
    for name in sorted(lives.keys() - kept.keys(), key=lambda name: (-sizes[name], name)):
        first_step, last_step = lives[name]
        free = [home.name for home in homes if sizes[name] and home.since <= first_step and last_step < home.until]
        for home in (*sorted(free, key=lambda home: (rooms[home], home)), SCRATCH):
            begin, size = 0, padded(sizes[name])
            for low, high, other in taken[home]:
                if low < begin + size and begin < high and _meet(lives[other], lives[name]):
                    begin = high
            if home == SCRATCH or begin + sizes[name] <= rooms[home]:
                insort(taken[home], (begin, begin + size, name))
                break
    places = {place.buffer: place for home, buffers in taken.items() for place in _order(home, buffers, lives)}
    places |= {name: replace(places[first], buffer=name) for name, first in over.items() if first in places}
    return tuple(places.values())


def _order(home: str, taken: Iterable[tuple[int, int, str]], lives: Mapping[str, Life]) -> Iterator[Place]:
    """What lies in a home, from its begin on."""
    below: dict[str, set[str]] = {}
    for _, _, name in taken:
        below[name] = {other for other in below if _meet(lives[other], lives[name])}
        yield Place(name, home, tuple(sorted(below[name].difference(*(below[other] for other in below[name])))))


def _meet(one: Life, other: Life) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]

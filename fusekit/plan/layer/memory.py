"""Where the buffers of a pass lie: layouts, which are decided once, and then give places for any number of tokens.

The search for places runs for some numbers of tokens only. A layout keeps the order that the search gave: a buffer
begins where those end that lie below it and are needed at the same time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from fusekit.abi.layer_memory import ALIGNMENT, Layout, Place, padded
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


@dataclass(frozen=True, eq=False, slots=True)
class Arrangement:
    """Places that a search found, one object for all that are alike. rows: of each place its buffer, the numbers of the
    places at whose ends it may begin, and its home.
    """

    places: tuple[Place, ...]
    rows: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, places: tuple[Place, ...]) -> Arrangement:
        number = {place.buffer: index for index, place in enumerate(places)}
        return cls(places, tuple((p.buffer, tuple(number[name] for name in p.above), p.home) for p in places))


@dataclass(frozen=True, slots=True)
class Sample:
    """What layouts are decided for. at: the dim that their ranges are of. sizes, rooms: bytes of buffers and homes."""

    at: int
    sizes: Mapping[str, int]
    rooms: Mapping[str, int]
    _taken: dict[Arrangement, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def takes(self, found: Arrangement) -> float:
        """The bytes of scratch memory; infinity if a home has not enough."""
        taken = self._taken.get(found)
        if taken is None:
            taken = self._taken[found] = self._needs(found)
        return taken

    def _needs(self, found: Arrangement) -> float:
        """As `abi.layer_memory.needs`, but quicker: a layer asks thousands of times."""
        sizes, rooms, ends, most = self.sizes, self.rooms, list[int](), 0
        for name, above, home in found.rows:
            end = sizes[name]
            if above:
                end += max([ends[index] for index in above])
            ends.append(-(-end // ALIGNMENT) * ALIGNMENT)
            if home != SCRATCH:
                if end > rooms[home]:
                    return inf
            elif end > most:
                most = end
        return most


Decided = tuple[Sample, Arrangement]


def ladder(
    layout: Layout, lives: Mapping[str, Life], over: Mapping[str, str], homes: Sequence[Home],
    sample: Callable[[int], Sample], tokens: int,
) -> list[Layout]:  # fmt: skip
    """Layouts, few of them, of which the best for a sample takes at most `SLACK` times what a search for it takes.

    layout: one without places. lives: of buffers, first and last step. over: buffers that are written over others,
    whose lives are one, or over kept ones. tokens: a number to decide for, besides powers of two.
    """

    search = _Search(lives, over, homes)

    def decide(count: int) -> Decided:
        given = sample(count)
        return given, search.places(given)

    even = {count: decide(count) for count in (0, tokens, *(1 << power for power in range(19)))}
    layouts = _ranges(layout, homes, even, decide)
    # Buffers that fill a home to the last byte do so for round numbers only.
    odd = {
        count: decide(count)
        for count in {0, *(each for count in even for each in (max(count - 1, 0) | 1, 9 * count // 8 | 1))}
    }
    if not all(_serves(layouts, *each) for each in odd.values()):
        layouts += _ranges(layout, homes, odd, decide)
    return [each for _, each in layouts]


def _serves(rungs: Sequence[tuple[Arrangement, Layout]], sample: Sample, best: Arrangement) -> bool:
    """Whether the best layout for a sample takes hardly more than the best places for it."""
    most = SLACK * sample.takes(best)
    return any(sample.takes(found) <= most for found, each in rungs if each.since <= sample.at <= each.until)


def _ranges(
    layout: Layout, homes: Sequence[Home], samples: dict[int, Decided], decide: Callable[[int], Decided]
) -> list[tuple[Arrangement, Layout]]:
    """Layouts for ranges; samples: by number of tokens."""
    while True:
        counts = sorted(samples)
        layouts, begin, turns = [], 0, list[int]()
        for found, end in _rungs([samples[count] for count in counts]):
            lends = {home.name for home in homes if home.output} & {place.home for place in found.places}
            since = samples[counts[begin - 1]][0].at + 1 if begin else 0
            until: float = inf
            if end < len(counts):
                after = samples[counts[end]][0]
                until = samples[counts[end - 1]][0].at if after.takes(found) < inf else after.at - 1
                low, gap = counts[end - 1], counts[end] - counts[end - 1]
                if gap > max(low // NEAR, 1):  # neither may fit between
                    turns += sorted({low + gap * part // PROBES for part in range(1, PROBES)} - {low})
            placed = replace(layout, places=found.places, lends=frozenset(lends), since=since, until=until)
            layouts.append((found, placed))
            begin = end
        between = {count: decide(count) for count in turns}
        more = {count: each for count, each in between.items() if not _serves(layouts, *each)}
        if not more:
            return layouts
        samples = samples | more


def _rungs(samples: Sequence[Decided]) -> list[tuple[Arrangement, int]]:
    """Places that serve as many samples in a row as any, each with the index of the first sample after them."""
    most = [SLACK * sample.takes(found) for sample, found in samples]
    rungs: list[tuple[Arrangement, int]] = []
    begin = 0
    while begin < len(samples):
        best, end = samples[begin][1], begin
        for found in dict.fromkeys(found for _, found in samples[begin:]):
            at = begin
            while at < len(samples) and samples[at][0].takes(found) <= most[at]:
                at += 1
            if at > end:
                best, end = found, at
        rungs.append((best, begin := end))
    return rungs


class _Search:
    """The largest first, each in the smallest home that has room, at the lowest place that is free while it lives. What
    has no size here, but may have one in a call, lies in scratch memory, which has room for it.
    """

    def __init__(self, lives: Mapping[str, Life], over: Mapping[str, str], homes: Sequence[Home]) -> None:
        names = [home.name for home in homes]
        self._over, self._homes = over, [*names, SCRATCH]
        self._kept = {name: first for name, first in over.items() if first in self._homes}
        self._order = sorted(lives.keys() - self._kept.keys())
        self._meet = {name: {other for other in lives if _meet(lives[other], lives[name])} for name in lives}
        self._free = {
            name: {home.name for home in homes if home.since <= first and last < home.until}
            for name, (first, last) in lives.items()
        }
        self._found: dict[tuple[tuple[str, ...], ...], Arrangement] = {}

    def places(self, sample: Sample) -> Arrangement:
        sizes, rooms = sample.sizes, sample.rooms
        taken: dict[str, list[tuple[int, int, str]]] = {home: [] for home in self._homes}
        for name, first in self._kept.items():
            taken[first].append((0, padded(sizes[name]), name))
        smallest = sorted((rooms[home], home) for home in self._homes[:-1])
        for name in sorted(self._order, key=sizes.__getitem__, reverse=True):  # of one size, by name
            exact, free, meet = sizes[name], self._free[name] if sizes[name] else (), self._meet[name]
            size = padded(exact)
            for _, home in (*(smallest[bisect_left(smallest, (exact,)) :] if free else ()), (0, SCRATCH)):
                if home not in free and home != SCRATCH:
                    continue
                begin = 0
                for low, high, other in taken[home]:
                    if low < begin + size and begin < high and other in meet:
                        begin = high
                if home == SCRATCH or begin + exact <= rooms[home]:
                    insort(taken[home], (begin, begin + size, name))
                    break
        key = tuple([tuple([name for _, _, name in buffers]) for buffers in taken.values()])
        if key not in self._found:
            self._found[key] = self._arranged(dict(zip(taken, key, strict=True)))
        return self._found[key]

    def _arranged(self, homes: Mapping[str, tuple[str, ...]]) -> Arrangement:
        """homes: the buffers in each, by where they begin."""
        places = {place.buffer: place for home, buffers in homes.items() for place in self._above(home, buffers)}
        places |= {name: replace(places[first], buffer=name) for name, first in self._over.items() if first in places}
        return Arrangement.of(tuple(places.values()))

    def _above(self, home: str, buffers: Iterable[str]) -> Iterator[Place]:
        below: dict[str, set[str]] = {}
        for name in buffers:
            below[name] = self._meet[name].intersection(below)
            yield Place(name, home, tuple(sorted(below[name].difference(*(below[other] for other in below[name])))))


def _meet(one: Life, other: Life) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]

"""How much scratch memory is enough for passes of at most so many tokens.

More tokens need more memory in one layout, but a pass of fewer may find no layout as good: it is in another's range, or
its outputs have no room for what they lend memory to. So it takes a bound for all numbers between two: a layout is sure
there if its buffers fit by sizes that are straight lines, or else by the largest. Where the bound is more than what is
enough already, the half above and the half below are looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from fusekit.abi.expr import Expr, evaluate
from fusekit.abi.layer_memory import ALIGNMENT, Layout, needs, padded
from fusekit.abi.layer_pass import KEPT, SCRATCH, LayerBuffer
from fusekit.dtypes import DTYPES

if TYPE_CHECKING:
    from fusekit.abi.layer_record import LayerRecord

BOUNDS = 400  # that are looked at, before one that may be more than enough is taken


@dataclass(frozen=True, slots=True)
class Line:
    """A size at the fewest and at the most tokens of a span. straight: a straight line between. It never falls."""

    low: int
    high: int
    straight: bool

    @property
    def ceiling(self) -> tuple[int, int]:
        """A straight line that is nowhere below."""
        return (self.low if self.straight else self.high), self.high

    @property
    def floor(self) -> tuple[int, int]:
        """A straight line that is nowhere above."""
        return self.low, (self.high if self.straight else self.low)


def line(expr: Expr, env: Mapping[str, Line]) -> Line:
    """The value of an expression over a span. Of operators that round or choose, only constants are straight, and a
    maximum that is one operand all along.
    """
    if isinstance(expr, int):
        return Line(expr, expr, True)
    if isinstance(expr, str):
        return env[expr]
    operator, *rest = expr
    operands = [line(each, env) for each in rest]
    low, high = (evaluate((operator, *ends), {}) for ends in zip(*((o.low, o.high) for o in operands), strict=True))
    if operator in ("add", "sub", "mul"):
        moving = sum(each.low != each.high for each in operands)
        straight = all(each.straight for each in operands) and (operator != "mul" or moving <= 1)
    else:
        first = next((each for each in operands if (each.low, each.high) == (low, high)), None)
        others = [each for each in operands if each is not first]
        chosen = operator == "max" and first is not None and first.straight and all(o.low == o.high for o in others)
        straight = low == high or chosen
    return Line(low, high, straight)


def size_line(buffer: LayerBuffer, env: Mapping[str, Line]) -> Line:
    """The bytes of a buffer, of one element at least."""
    low = high = DTYPES[buffer.dtype].bytes
    straight, moving = True, 0
    for extent in buffer.shape:
        each = line(extent, env)
        moves = max(each.low, 1) != max(each.high, 1)
        moving += moves
        straight = straight and (not moves or (each.straight and each.low >= 1 and moving == 1))
        low, high = low * max(each.low, 1), high * max(each.high, 1)
    return Line(low, high, straight)


@dataclass
class Enough:
    """Scratch memory of the passes `which` of a record. asked: their outputs, all contiguous; None: any."""

    record: LayerRecord
    which: str
    asked: frozenset[str] | None
    in_place: bool
    limits: Mapping[str, int]
    _at: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        record, asked = self.record, self.asked
        self._layouts = record.layouts(self.which, asked, self.in_place)
        if asked is None:
            self._used = set(record.buffers)
        else:
            steps = record.passes[self.which].queued(asked, in_place=self.in_place)
            self._used = {name for step in steps for name in step.arguments.values()}.difference(asked)
            self._layouts = [each for each in self._layouts if each.lends <= asked]
        self._homes = {place.home for each in self._layouts for place in each.places} - {SCRATCH}

    def up_to(self, tokens: int) -> int:
        """What is enough for any number of tokens up to `tokens`; more only if that takes too long to find out."""
        ends = {0, tokens}
        if self.record.range_of == "T":
            turns = (turn for each in self._layouts for turn in (each.since - 1, each.until) if 0 < turn < tokens)
            ends |= {int(turn) for turn in turns}
        self._enough, self._left = max(map(self.at, ends)), BOUNDS
        for before, last in reversed([*pairwise(sorted(ends))]):
            self._look(before + 1, last)
        return self._enough

    def _look(self, first: int, last: int) -> None:
        """Raises what is enough to what is for any number from `first` to `last`, which has been looked at."""
        over = self.over(first, last, self._enough) if first < last else self.at(first)
        if over <= self._enough:
            return
        if self._left <= 0 and over < inf:
            self._enough = int(over)
            return
        self._left -= 1
        middle = (first + last) // 2
        self._enough = max(self._enough, self.at(middle))
        self._look(middle + 1, last)
        self._look(first, middle)

    def at(self, tokens: int) -> int:
        """What is needed for so many tokens."""
        if tokens not in self._at:
            record = self.record
            env = record.environment(tokens, **self.limits)
            if self.asked is not None:
                need = record.scratch(self.which, self.asked, env, self.asked, in_place=self.in_place)[1]
            else:
                need = record.any_scratch(self._layouts, env)
            self._at[tokens] = need
        return self._at[tokens]

    def over(self, first: int, last: int, enough: int) -> float:
        """Not less than what is needed for any number from `first` to `last`. A bound of `enough` is good enough."""
        env = {name: Line(value, value, True) for name, value in self.limits.items()}
        env["T"] = Line(first, last, True)
        for name, expr in self.record.dims.items():
            env[name] = line(expr, env)
        at = env[self.record.range_of]
        lines = {name: size_line(self.record.buffers[name], env) for name in self._used | self._homes}
        sizes = {name: lines[name].high for name in self._used}
        taken = [
            (padded(needs(each.places, sizes)[1].get(SCRATCH, 0)), number)
            for number, each in enumerate(self._layouts)
            if each.since <= at.high and at.low <= each.until
        ]
        if self.asked is None:
            return self._any_over(taken, lines, at, last - first, enough)
        for size, number in sorted(taken):
            each = self._layouts[number]
            if each.since <= at.low and at.high <= each.until and self._is_sure(each, lines, last - first):
                return size
        return inf

    def _any_over(
        self, taken: Iterable[tuple[int, int]], lines: Mapping[str, Line], at: Line, more: int, enough: int
    ) -> int:  # fmt: skip
        most, sure, before = 0, dict[int, bool](), list[int]()
        for size, number in taken:
            each = self._layouts[number]
            if size > max(most, enough):
                for index in before:
                    other = self._layouts[index]
                    if each.outputs == other.outputs and other.lends <= each.lends:
                        if index not in sure:
                            always = other.since <= at.low and at.high <= other.until
                            sure[index] = always and self._is_sure(other, lines, more)
                        if sure[index]:
                            break  # no call comes to those after it
                else:
                    most = size
            before.append(number)
        return most

    def _is_sure(self, layout: Layout, lines: Mapping[str, Line], more: int) -> bool:
        """Whether all homes have room from the fewest tokens of a span to `more` than those."""
        for end in (0, 1):
            ends: dict[str, int] = {}
            for place in layout.places:
                begin = max([ends[name] for name in place.above], default=0)
                size = lines[place.buffer] if place.buffer in self._used else Line(0, 0, True)
                last = begin + size.ceiling[end]
                if place.home != SCRATCH and last > self._room(place.home, lines, end, more):
                    return False
                ends[place.buffer] = last + _pad(size, more)
        return True

    def _room(self, home: str, lines: Mapping[str, Line], end: int, more: int) -> int:
        size = lines[home]
        if self.record.buffers[home].place == KEPT:
            return size.floor[end] + (_pad(size, more) if size.low == size.high else 0)
        return size.floor[end]


def _pad(size: Line, more: int) -> int:
    """The most bytes between a size and the next multiple of the alignment, over a span."""
    low, high = size.ceiling
    if low == high:
        return padded(low) - low
    whole = low % ALIGNMENT == 0 and (high - low) % (more * ALIGNMENT) == 0
    return 0 if whole else ALIGNMENT - 1


def enough_scratch(
    record: LayerRecord, which: str, tokens: int, asked: Collection[str] | None, in_place: bool,
    limits: Mapping[str, int],
) -> int:  # fmt: skip
    """The bytes that are enough for passes of at most so many tokens; see `LayerRecord.most_scratch`."""
    return Enough(record, which, None if asked is None else frozenset(asked), in_place, limits).up_to(tokens)

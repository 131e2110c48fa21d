"""Where the buffers of a pass lie, as an order: each begins where those below it end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from fusekit.abi.codec import RecordReader, string
from fusekit.abi.expr import Expr

ALIGNMENT = 256  # of a buffer within kept or scratch memory


def padded(size: int) -> int:
    """`size` rounded up to whole alignments."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Place:
    """buffer: its name. home: scratch memory, or the kept buffer or output in whose memory it lies. above: the buffers
    at whose ends it may begin; without any, it begins with the home.
    """

    buffer: str
    home: str
    above: tuple[str, ...]

    @property
    def begin(self) -> Expr:
        """Bytes from the home's begin; NAME.end is where another buffer ends, rounded up."""
        ends = [f"{name}.end" for name in self.above]
        return ("max", *ends) if len(ends) > 1 else ends[0] if ends else 0

    @classmethod
    def from_json(cls, value: Any, where: str) -> Place:
        reader = RecordReader(value, where)
        return cls(reader.string("buffer"), reader.string("home"), reader.array("above", string))


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of a pass's buffers. It is for callers that want some of `outputs`, with those of `lends` in contiguous
    memory; for dims from `since` to `until`; and only where no home needs more bytes than it has.

    lends: outputs that hold buffers until they are written. in_place: kept memory holds some, once it was read.
    """

    outputs: frozenset[str]
    lends: frozenset[str]
    in_place: bool
    places: tuple[Place, ...] = ()
    since: int = 0
    until: float = inf

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": sorted(self.outputs), "lends": sorted(self.lends), "in_place": self.in_place,
            "since": self.since, **({} if self.until == inf else {"until": int(self.until)}),
            "places": [{"buffer": p.buffer, "home": p.home, "above": list(p.above)} for p in self.places],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any, where: str) -> Layout:
        reader = RecordReader(value, where)
        return cls(
            frozenset(reader.array("outputs", string)), frozenset(reader.array("lends", string)),
            reader.boolean("in_place"), reader.array("places", Place.from_json), reader.integer("since"),
            reader.integer("until") if "until" in reader else inf,
        )  # fmt: skip


def needs(places: Iterable[Place], sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Where each buffer begins in its home, and the bytes that each home needs. sizes: of the buffers; one that no step
    needs takes nothing.
    """
    ends: dict[str, int] = {}
    begins: dict[str, int] = {}
    needed: dict[str, int] = {}
    for place in places:
        begin = begins[place.buffer] = max([ends[name] for name in place.above], default=0)
        end = begin + sizes.get(place.buffer, 0)
        needed[place.home] = max(needed.get(place.home, 0), end)
        ends[place.buffer] = padded(end)
    return begins, needed

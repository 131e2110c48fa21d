"""Events of a launch: what other streams may wait for before all of its blocks have ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fusekit.abi.codec import RecordReader
from fusekit.abi.expr import RecordError

PROGRAMMATIC, LAUNCH_COMPLETION = "programmatic", "launch_completion"
KINDS = (PROGRAMMATIC, LAUNCH_COMPLETION)


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """An event that the launch records.

    kind: "programmatic", once every block has triggered its dependents, "launch_completion", once every block has
    begun. argument: the i64 scalar that is its handle. flags: of cuEventRecordWithFlags. at_block_start: 1 where a
    programmatic event counts blocks when they begin.
    """

    kind: str
    argument: str
    flags: int = 0
    at_block_start: int = 0

    def to_json(self) -> dict[str, Any]:
        start = {"at_block_start": self.at_block_start} if self.kind == PROGRAMMATIC else {}
        return {"kind": self.kind, "argument": self.argument, "flags": self.flags, **start}

    @classmethod
    def from_json(cls, value: Any, where: str) -> LaunchEvent:
        reader = RecordReader(value, where)
        kind = reader.string("kind", KINDS)
        start = reader.integer("at_block_start") if kind == PROGRAMMATIC else 0
        event = cls(kind, reader.string("argument"), reader.integer("flags"), start)
        reader.end()
        return event


def check_events(events: Collection[LaunchEvent], handles: Collection[str], where: str) -> None:
    """Raises RecordError, naming the field, unless each kind occurs once at most. handles: the i64 scalars."""
    kinds = [event.kind for event in events]
    for index, event in enumerate(events):
        if event.kind not in KINDS or event.kind in kinds[:index]:
            raise RecordError(f"{where}[{index}].kind: {event.kind!r}; a launch has one each of {', '.join(KINDS)}")
        if event.argument not in handles:
            known = ", ".join(sorted(handles)) or "none"
            raise RecordError(f"{where}[{index}].argument: {event.argument!r}; it names an i64 scalar: {known}")
        for name, number, most in (("flags", event.flags, 2**31 - 1), ("at_block_start", event.at_block_start, 1)):
            if not 0 <= number <= most:
                raise RecordError(f"{where}[{index}].{name}: {number}; it must be 0 to {most}")

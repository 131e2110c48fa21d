"""The events that the processes of one `fusekit exec` write to one file, a line each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ABSENT = "it is not in the store"
"""Begins the reason of a miss that is none the next time."""
_MISS = "miss"
_HIT = "hit"
_NOT_STORED = "not-stored"
_WORDS = {_HIT: 3, _MISS: 4, _NOT_STORED: 4}
_NO_KEY = "-"
_REASON_BYTES = 600


def hit(report: Path | None, saved: float, key: str) -> None:
    """Add a hit that spared `saved` seconds. key: of the entry."""
    _add(report, f"{_HIT} {saved:.6f} {key}")


def miss(report: Path | None, key: str, why: str) -> None:
    """Add a miss. key: of the entry; empty if there will be none."""
    _add(report, f"{_MISS} 0 {key or _NO_KEY} {_line(why)}")


def not_stored(report: Path | None, key: str, why: str) -> None:
    """Add that what was compiled at a miss could not be stored."""
    _add(report, f"{_NOT_STORED} 0 {key} {_line(why)}")


def _line(text: str) -> str:
    return " ".join(text.split()).encode(errors="replace")[:_REASON_BYTES].decode(errors="ignore")


def _add(report: Path | None, line: str) -> None:
    """In one write: lines of processes do not mix."""
    if report is None:
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def counts(report: Path) -> tuple[int, int, float]:
    """(hits, misses, seconds saved) of the events in `report`."""
    events = _events(report)
    saved = [float(event[1]) for event in events if event[0] == _HIT]
    return len(saved), sum(event[0] == _MISS for event in events), sum(saved)


def keys(report: Path) -> frozenset[str]:
    """The entries that were hits, or are there after a miss."""
    return frozenset(event[2] for event in _events(report) if event[2] != _NO_KEY)


def troubles(report: Path) -> list[str]:
    """Why there were misses besides what the store lacked, or will be again: a line for those that could not be hits,
    and one for those that could not be stored.
    """
    events = _events(report)
    lasting = [event[3] for event in events if event[0] == _MISS and not event[3].startswith(ABSENT)]
    unstored = [event[3] for event in events if event[0] == _NOT_STORED]
    several = "; FUSEKIT_MISS=warn names all of them"
    return [
        f"{len(reasons)} {what}: {reasons[0]}{several if len(set(reasons)) > 1 else ''}"
        for what, reasons in (("could not be hits", lasting), ("could not be stored", unstored))
        if reasons
    ]


def _events(report: Path) -> list[list[str]]:
    try:
        lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the program has removed it
        return []
    events = (line.split(" ", 3) for line in lines)
    return [event for event in events if len(event) == _WORDS.get(event[0])]

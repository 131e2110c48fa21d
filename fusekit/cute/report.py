"""The events that the processes of one `fusekit exec` write to one file, a line each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MISS = "miss"
_HIT = "hit"


def add(report: Path | None, saved: float | None, key: str = "") -> None:
    """Add a hit that spared `saved` seconds, or a miss (None), in one write: lines of processes do not mix. key: of the
    entry.
    """
    if report is None:
        return
    line = f"{_MISS} 0 {key}" if saved is None else f"{_HIT} {saved:.6f} {key}"
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
    return len(saved), len(events) - len(saved), sum(saved)


def keys(report: Path) -> frozenset[str]:
    """The entries that were hits, or are there after a miss."""
    return frozenset(event[2] for event in _events(report) if event[2:])


def _events(report: Path) -> list[list[str]]:
    try:
        lines = report.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # the program has removed it
        return []
    return [words for line in lines if (words := line.split()) and words[0] in (_HIT, _MISS) and words[1:]]

"""The events that the processes of one `fusekit exec` write to one file, a line each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MISS = "miss"
_HIT = "hit"


def add(report: Path | None, saved: float | None) -> None:
    """Add a hit that spared `saved` seconds, or a miss (None), in one write: lines of processes do not mix."""
    if report is None:
        return
    line = _MISS if saved is None else f"{_HIT} {saved:.6f}"
    with contextlib.suppress(OSError):
        descriptor = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def counts(report: Path) -> tuple[int, int, float]:
    """(hits, misses, seconds saved) of the events in `report`."""
    try:
        lines = report.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # the program has removed it
        lines = []
    saved = [float(line.removeprefix(_HIT)) for line in lines if line.startswith(f"{_HIT} ")]
    return len(saved), lines.count(_MISS), sum(saved)

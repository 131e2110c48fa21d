"""How much memory the compile processes may take together, and each of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.8
"""Part of the memory that is free which a build may take."""
PROCESS_BYTES = 1 << 30
"""Kept for each compile process: it holds 0.3 GiB, of which the fork shares half, and the compiler needs room."""
RECYCLE_BYTES = 640 << 20
"""A process that holds more after a kernel is replaced by a fresh one."""


@dataclass(frozen=True, slots=True)
class Bound:
    """workers: how many processes; bytes: what each may take."""

    workers: int
    bytes: int


def bound(jobs: int, available: int | None = None) -> Bound:
    """`jobs` processes, or as many as fit into the memory that is `available` (bytes; None: asked of the system)."""
    free = int((available_bytes() if available is None else available) * SHARE)
    workers = max(1, min(jobs, free // PROCESS_BYTES))
    return Bound(workers, max(PROCESS_BYTES, free // workers))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: of the machine, or of the control group if that has fewer."""
    limits = [_mem_available(root)]
    version_2 = root / "sys/fs/cgroup"
    version_1 = root / "sys/fs/cgroup/memory"
    for folder, limit, usage in (
        (version_2, "memory.max", "memory.current"),
        (version_1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            limits.append(int((folder / limit).read_text()) - int((folder / usage).read_text()))
    return max(0, min(limits))


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # a kernel that does not report it

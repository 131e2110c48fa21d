"""What installed files hold, read once: the results are kept in the user's cache folder by each file's `stat`.

A file that is replaced keeps at most its size and the time of its last write: its inode or the time of its last change,
which no program can set, betrays it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_SETTLED = 2.0  # seconds: a younger file may be written once more within one tick of its file system's clock


def digest(path: str) -> str:
    """SHA-256 of the file `path`."""
    with open(path, "rb") as file:  # noqa: PTH123 - thousands of files
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_all(topic: str, paths: Iterable[str], read: Callable[[str], Any], folder: Path | None) -> dict[str, Any]:
    """Path -> `read(path)`, JSON, of each file that is there.

    topic: names what is kept, one for each `read` and set of files. folder: keeps it; None: all is read each time.
    """
    kept = None if folder is None else folder / f"{hashlib.sha256(topic.encode()).hexdigest()[:32]}.json"
    known = load(kept)
    rows: dict[str, list[Any]] = {}
    changed = False
    now = time.time()
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - thousands of files
            mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            row = known.get(path)
            if row is None or row[0] != mark:
                row = [mark, read(path)]
                changed = True
            if now - status.st_ctime < _SETTLED:
                row = [None, row[1]]
        except OSError:
            continue
        rows[path] = row
    if kept is not None and (changed or rows.keys() != known.keys()):
        save(kept, rows)
    return {path: row[1] for path, row in rows.items()}


def private(folder: Path | None) -> Path | None:
    """`folder`, made where it is missing; None where it cannot be made, or another user could write into it."""
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return folder
    return None


def load(path: Path | None) -> dict[str, Any]:
    """The rows that `save` wrote; none where they are damaged or missing."""
    if path is None:
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    sound = isinstance(table, dict) and all(isinstance(row, list) and len(row) == 2 for row in table.values())
    return table if sound else {}


def save(path: Path, rows: dict[str, list[Any]]) -> None:
    """Replaces `path` by rows of two parts."""
    with contextlib.suppress(OSError):  # what cannot be kept is read again
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(rows, file, separators=(",", ":"))
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

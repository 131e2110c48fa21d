"""Folders for compile processes below the system's temporary folder. A process that is killed leaves its own behind; a
later one of the same user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

ABANDONED_SECONDS = 3600.0
"""Younger folders are left alone: one that was just made is not locked yet."""
_NAME = re.compile(r"fusekit-(build|executor)-[a-z0-9_]{8}")


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder that is locked, by `flock`, as long as the process that made it lives. use: "build" or "executor"."""

    def __init__(self, use: str) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        super().__init__(prefix=f"fusekit-{use}-", ignore_cleanup_errors=True)
        self._held: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Removes the folder."""
        super().cleanup()
        if self._held is not None:
            os.close(self._held)
            self._held = None


def remove_abandoned(folder: Path) -> None:
    """Removes from `folder` what killed processes of this user left: folders with our names, of this user, an hour old,
    that no process has locked. Links are not followed.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        for name in names:
            with contextlib.suppress(OSError):
                _remove_abandoned(folder / name)


def _remove_abandoned(path: Path) -> None:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < ABANDONED_SECONDS:
            return
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)  # by descriptors: no link on the way or below is followed
    finally:
        os.close(held)

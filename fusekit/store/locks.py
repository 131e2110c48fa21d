"""Locks of builders. They save work and guarantee nothing: every answer of theirs may be wrong, and the store is right.

An advisory lock (flock) is held by an open file, so the system lets go of it when its holder dies. On many network
mounts it stops at the host: then two hosts may compile one kernel twice, and the first one's stands.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from fusekit.store.files import Publisher, store_error

PATIENCE = 600.0
"""Seconds that a builder waits for another one's kernel before he makes it himself."""


class HeldError(Exception):
    """Somebody else has the lock."""


def acquire(path: Path, publisher: Publisher, patience: float) -> Callable[[], None] | None:
    """Lock `path` and return what lets go of it; None where locks do not work. Raises HeldError if somebody held it for
    `patience` seconds, StoreError where not even the folder of locks can be made: nothing could be published either.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        return None
    publisher.directory(path.parent)
    with contextlib.suppress(OSError):
        # Whoever may write in the store may lock; the umask applies, as it does not to a mode given to the library.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    # A lock file that marks by its existence, the library's substitute, would outlive a killed builder.
    lock = FileLock(path, timeout=patience, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise HeldError from None
    except NotImplementedError:
        return None
    except OSError as error:
        if path.parent.exists():
            return None
        raise store_error(path, "lock", error) from error
    return lock.release


def discard(path: Path) -> bool:
    """Remove the lock file `path` unless somebody holds it; whether it was removed.

    It is held while it is removed, and a waiter that gets hold of a file without a name tries again.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        return False
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    with contextlib.suppress(Timeout, NotImplementedError, OSError), lock:
        path.unlink()
        return True
    return False

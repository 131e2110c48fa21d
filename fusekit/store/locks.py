"""Locks of builders and of collections. They guarantee nothing: every answer of theirs may be wrong. Those of builders
save work, and the store is right without them.

An advisory lock (flock) is held by an open file, so the system lets go of it when its holder dies. On many network
mounts it stops at the host: then two hosts may compile one kernel twice, and the first one's stands.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from fusekit.store.files import close, store_error
from fusekit.store.publishing import Publisher

PATIENCE = 600.0
"""Seconds that a builder waits for another one's kernel before he makes it himself, and a collection for another."""

_POLL_SECONDS = 0.05
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HeldError(Exception):
    """Somebody else has the lock."""


def acquire(path: Path, publisher: Publisher, patience: float) -> Callable[[], None] | None:
    """Lock `path` and return what lets go of it; None where locks do not work. Raises HeldError if somebody held it for
    `patience` seconds, StoreError where not even the folder of locks can be made: nothing could be published either.
    """
    try:
        import filelock  # noqa: F401
    except ImportError:
        return None
    publisher.directory(path.parent)
    deadline = time.monotonic() + patience
    while True:
        try:
            with publisher.at(path.parent) as at:
                # Whoever may write in the store may lock; the umask applies.
                descriptor = os.open(path.name, _FLAGS | os.O_CREAT, 0o666, dir_fd=at)
                held = _held(descriptor, path.name, at)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, FileNotFoundError) and not path.parent.exists():
                raise store_error(path, "lock", error) from error
            return None
        if held is not None:
            return held
        if time.monotonic() >= deadline:
            raise HeldError
        time.sleep(_POLL_SECONDS)


def discard(name: str, at: int, remove: bool = True) -> bool:
    """Remove the lock file `name` of the open folder `at` unless somebody holds it; whether it was, or without
    `remove` would be, removed.

    It is held while it is removed, and a waiter that gets hold of a file without a name tries again.
    """
    with contextlib.suppress(ImportError, OSError):
        release = _held(os.open(name, _FLAGS, dir_fd=at), name, at)
        if release is not None:
            try:
                if remove:
                    os.unlink(name, dir_fd=at)
                return True
            finally:
                release()
    return False


def _held(descriptor: int, name: str, at: int) -> Callable[[], None] | None:
    """Lock the open file `name` of the open folder `at`, and return what lets go of it; None where it is held by
    somebody else, or has lost its name. Closes `descriptor` then, or in letting go. OSError where locks do not work.
    """
    # The library is given a descriptor: by itself it would open a path, and follow what folders have become.
    from filelock import lock_descriptor, unlock_descriptor

    def release() -> None:
        with contextlib.suppress(OSError):  # closing it unlocks, too
            unlock_descriptor(descriptor)  # a child of this process has the descriptor, too
        close(descriptor)

    try:
        if lock_descriptor(descriptor, blocking=False):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=at, follow_symlinks=False)):
                    return release
    except BaseException:
        close(descriptor)
        raise
    close(descriptor)
    return None

"""Locks of builders and of collections. They only save work: the store is correct without them.

An advisory lock (flock) belongs to an open file, so the system releases it when its holder dies. On many network mounts
it does not reach other hosts: then two hosts may compile a kernel twice, and the first entry is kept.
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
"""Seconds that a builder waits for a kernel of another one before it builds it itself, and a collection for another."""

_POLL_SECONDS = 0.05
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HeldError(Exception):
    """Another process, or thread, holds the lock."""


def acquire(path: Path, publisher: Publisher, patience: float) -> Callable[[], None] | None:
    """Lock `path` and return the function that releases it; None if locks do not work. Raises HeldError if it was held
    for `patience` seconds, StoreError if the folder of locks cannot be made: nothing could be published either.
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
                # Who may write in the store may lock; the umask applies.
                descriptor = os.open(path.name, _FLAGS | os.O_CREAT, 0o666, dir_fd=at)
                release = _lock(descriptor, path.name, at)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, FileNotFoundError) and not path.parent.exists():
                raise store_error(path, "lock", error) from error
            return None
        if release is not None:
            return release
        if time.monotonic() >= deadline:
            raise HeldError
        time.sleep(_POLL_SECONDS)


def discard(name: str, at: int, remove: bool = True) -> bool:
    """Remove the lock file `name` of the open folder `at` unless it is held. Returns whether it was removed, or without
    `remove` would be.

    It is locked while it is removed, and a waiter that locks a file without a name tries again.
    """
    with contextlib.suppress(ImportError, OSError):
        release = _lock(os.open(name, _FLAGS, dir_fd=at), name, at)
        if release is not None:
            try:
                if remove:
                    os.unlink(name, dir_fd=at)
                return True
            finally:
                release()
    return False


def _lock(descriptor: int, name: str, at: int) -> Callable[[], None] | None:
    """Lock the open file `name` of the open folder `at`, and return the function that releases it; None if it is held,
    or has lost its name. Closes `descriptor` then, or on release. OSError if locks do not work.
    """
    # The library gets a descriptor: given a path it would follow links.
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

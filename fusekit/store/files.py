"""Reading files of a store: only plain files, checked before they are read. OSErrors become errors with a remedy.

Writing is `fusekit.store.publishing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from fusekit.errors import IntegrityError, SignatureError, StoreError

T = TypeVar("T")
AnyPath = Path | str
"""Listings read thousands of files, and building a `Path` costs as much as reading one."""

TEMPORARY_SUFFIX = ".tmp"

# O_NONBLOCK: opening a FIFO must not wait for a writer. O_NOFOLLOW: a link is never a part of a store.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# How often a file is opened again after ESTALE of a network file system: another host has replaced it.
_STALE_RETRIES = 4

_REMEDIES = {
    errno.EACCES: "grant access to it, or name another store with --store or FUSEKIT_STORE",
    errno.EPERM: "grant access to it, or name another store with --store or FUSEKIT_STORE",
    errno.EROFS: "the file system is read-only: list it in FUSEKIT_STORES and name a writable store with FUSEKIT_STORE",
    errno.ENOSPC: "free some space, or name another store with --store or FUSEKIT_STORE; what is there is intact",
    errno.EDQUOT: "free some quota, or name another store with --store or FUSEKIT_STORE; what is there is intact",
    errno.ENOTDIR: "a part of the path is a file; name another store with --store or FUSEKIT_STORE",
    errno.ELOOP: "a store follows no link below its own folder: remove it; the folder itself may be one",
    errno.ENOENT: "a directory of the store has vanished: check that its file system is still mounted",
    errno.ESTALE: "the network file system lost the file: try again, or remount it",
    errno.EIO: "the disk or the network file system failed: check it, then run `fusekit verify --full`",
}

# The same for a file outside a store, which the user names.
_FILE_REMEDIES = {
    errno.EACCES: "grant access to it, or choose another path",
    errno.EPERM: "grant access to it, or choose another path",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOSPC: "free some space, or choose another path; what is there is intact",
    errno.EDQUOT: "free some quota, or choose another path; what is there is intact",
    errno.ENOENT: "make its folder first, or choose another path",
}


def store_error(path: AnyPath, doing: str, error: OSError) -> StoreError:
    """StoreError for `error`, raised while `doing` something with `path`, with a remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the path and its file system, or name another store with --store")
    return StoreError(f"cannot {doing} {path}: {error.strerror or error}; {remedy}", path=str(path))


def file_error(path: Path, doing: str, error: OSError) -> StoreError:
    """As `store_error`, for a file that the user names."""
    remedy = _FILE_REMEDIES.get(error.errno or 0, "check the path and its file system, or choose another")
    return StoreError(f"cannot {doing} {path}: {error.strerror or error}; {remedy}", path=str(path))


def read_file(
    path: AnyPath, *, limit: int, exactly: int | None = None, at: int | None = None,
    owners: Collection[int] | None = None,
) -> bytes | None:  # fmt: skip
    """The bytes of the plain file at `path`, read once; None if there is none.

    limit: largest size accepted, in bytes. exactly: the only size accepted. at: descriptor of its folder; the rest of
    `path` is then only for messages. owners: ids of the users who alone may have written it; None: anybody. Raises
    `IntegrityError`, before anything is read, for a symbolic link, a FIFO, a directory, a device or a file of another
    size, `SignatureError` for a file that none of `owners` may have written, `StoreError` for a failing disk. ESTALE
    (another host replaced the file between look-up and read) is retried.
    """
    for _ in range(_STALE_RETRIES):
        try:
            return _read(path, limit, exactly, at, owners)
        except StoreError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno == errno.ESTALE):
                raise
    return _read(path, limit, exactly, at, owners)


def quietly(look: Callable[..., T], *arguments: Any) -> T | None:
    """The result of `look`; None if the file is damaged or cannot be read."""
    try:
        return look(*arguments)
    except (IntegrityError, StoreError):
        return None


def close(descriptor: int) -> None:
    """Close a file that was only read, or is synced: a failure does not matter, and the descriptor is gone anyway."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def revalidate(directory: Path) -> None:
    """Make a network file system look at `directory` again: opening it drops the cache of absent names."""
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _read(
    path: AnyPath, limit: int, exactly: int | None, at: int | None, owners: Collection[int] | None
) -> bytes | None:
    name = path if at is None else os.path.basename(path)  # noqa: PTH119 - of a string, too
    try:
        descriptor = os.open(name, READ, dir_fd=at)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_plain(path, "a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise _not_plain(path, "a socket or a device") from None
        if error.errno == errno.ENOTDIR:
            raise IntegrityError(
                f"{path}: a part of its path is no directory; a store has directories there; move what is there"
            ) from None
        raise store_error(path, "open", error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_plain(path, _kind(status.st_mode))
        if owners is not None and (status.st_uid not in owners or status.st_mode & _OTHERS_WRITE):
            raise SignatureError(
                f"{path} is of user {status.st_uid}, or others may write it, and it has machine code that this process"
                f" would run; if you trust them, set FUSEKIT_TRUSTED_USERS={status.st_uid} and take others' permission"
                " to write, or sign what is stored (FUSEKIT_SIGNING_KEY, FUSEKIT_TRUSTED_KEYS)"
            )
        if exactly is not None and status.st_size != exactly:
            raise _wrong_size(path, status.st_size, f"must have {exactly}")
        if status.st_size > limit:
            raise _wrong_size(path, status.st_size, f"may have at most {limit}")
        data = os.read(descriptor, status.st_size)
        while len(data) < status.st_size:  # a large file is read in pieces
            chunk = os.read(descriptor, status.st_size - len(data))
            if not chunk:
                raise _wrong_size(path, len(data), f"had {status.st_size} when it was opened")
            data += chunk
        return data
    except OSError as error:
        raise store_error(path, "read", error) from error
    finally:
        close(descriptor)


def size_of(path: AnyPath) -> int | None:
    """Size in bytes of the plain file at `path`; None if there is none. IntegrityError if it is not a plain file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(path, "look at", error) from error
    if not stat.S_ISREG(status.st_mode):
        raise _not_plain(path, _kind(status.st_mode))
    return status.st_size


def exists(path: Path) -> bool:
    """Whether there is anything at `path`, links followed; StoreError if that cannot be determined."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise store_error(path, "look at", error) from error
    return True


def is_writable(root: Path) -> bool:
    """Whether this process may write below `root`, or create it if it is missing. Writes nothing."""
    try:
        while not exists(root):
            root = root.parent
        return root.is_dir() and os.access(root, os.W_OK | os.X_OK)
    except StoreError:
        return False


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a socket or a device"


def _not_plain(path: AnyPath, kind: str) -> IntegrityError:
    return IntegrityError(f"{path} is {kind}; a store holds plain files only; remove it and build the kernel again")


def _wrong_size(path: AnyPath, size: int, rule: str) -> IntegrityError:
    return IntegrityError(f"{path} has {size} bytes; it {rule}; remove it and build the kernel again")

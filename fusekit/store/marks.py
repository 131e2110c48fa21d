"""Marks of last use, and leases of builds. Collection reads them; nothing else depends on them.

**A mark** is the file `used/<2 digits>/<key>`, whose time stamp is that of the last use; it is empty, or has a line for
each GPU that the entry ran on. A reader marks an entry
*first* and looks it up *then*; fusekit.store.gc explains why that order protects it. A mark works with `noatime` and is
one system call. On a read-only mount, a full disk or without permission it is omitted, and the entry counts as used
when it was last published or marked by another process.

**A lease** is a file under `leases/`, held while a build runs: what was published or marked since it was taken stays
until it is released. A killed process cannot release its lease: it ends when a process of the same host sees that its
owner is gone or, for other hosts, when it was not renewed for `LEASE_SECONDS`.

Neither is written through a symbolic link or a second hard link: see fusekit.store.folders.

Stamps are the file system's own (a touch), and are compared with stamps of the same file system only: the
clocks of hosts need not agree.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import threading
import time
from pathlib import Path

from fusekit.errors import IntegrityError, NoStoreError, StoreError
from fusekit.store import process
from fusekit.store.files import READ, AnyPath, close, read_file
from fusekit.store.folders import Folders
from fusekit.store.layout import LEASES, Node, walk
from fusekit.store.publishing import NEW, Publisher, touch

LEASE_SECONDS = 900
_RENEW_SECONDS = 60.0
_LEASE_LIMIT = 32
_RAN_BYTES = 4096  # of a mark
_MODE = 0o666  # who may write in the store may mark; the umask applies


def mark_path(root: Path, key: str) -> Path:
    return root / "used" / key[:2] / key


def mark(folders: Folders, key: str, entry: AnyPath) -> bool:
    """Mark the entry of `key`, whose file is `entry`, as used now. Returns whether it has a mark.

    Does nothing if there is no entry, or if no mark can be written.
    """
    try:
        at = folders.open("used", key[:2])  # no context manager: every load does this
        try:
            if touch(key, at):
                return True
            os.unlink(key, dir_fd=at)  # a second link to a file that may be anybody's
        finally:
            close(at)
    except FileNotFoundError:
        if not os.path.lexists(entry):
            return False
    except OSError:
        return False
    with contextlib.suppress(OSError):
        folders.make("used", key[:2])
        with folders.at("used", key[:2]) as at, contextlib.suppress(FileExistsError):
            os.close(os.open(key, NEW, _MODE, dir_fd=at))
        return True
    return False


def ran(folders: Folders, key: str) -> list[str]:
    """The lines of the mark of `key`: where the entry ran."""
    with contextlib.suppress(OSError, StoreError), folders.at("used", key[:2]) as at:
        descriptor = os.open(key, READ, dir_fd=at)
        try:
            return _lines(descriptor)
        finally:
            close(descriptor)
    return []


def note_run(folders: Folders, key: str, line: str) -> None:
    """Add a line to the mark of `key`. Nothing where it is there already, or the mark is missing, full, or cannot be
    written.
    """
    with contextlib.suppress(OSError, StoreError), folders.at("used", key[:2]) as at:
        descriptor = os.open(key, READ | os.O_RDWR | os.O_APPEND, dir_fd=at)
        try:
            text = f"{line}\n".encode()
            if line not in _lines(descriptor) and os.fstat(descriptor).st_size + len(text) <= _RAN_BYTES:
                os.write(descriptor, text)
        finally:
            close(descriptor)


def _lines(descriptor: int) -> list[str]:
    """Whole lines of printable text. OSError for what is no plain file of this store's own."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OSError(errno.EINVAL, "is not a plain file")
    text = os.pread(descriptor, _RAN_BYTES, 0).decode(errors="replace")
    return [line for line in text.split("\n")[:-1] if line and line.isprintable()]


class Lease:
    """A lease on the store of `publisher`, held until `release`. If its file cannot be written it protects nothing.

    The file is created once and stays open: a renewal never writes to another file that has taken its name.
    """

    def __init__(self, publisher: Publisher, *, make: bool = True) -> None:
        """make: create a missing root now; otherwise `renew(make=True)` does."""
        self._publisher = publisher
        self._began = 0
        self._writing = threading.Lock()
        self._descriptor: int | None = None
        self._renewed = -math.inf
        self.renew(make)

    def renew(self, make: bool = False) -> None:
        """Renew the lease; costs nothing within `_RENEW_SECONDS` of the last renewal."""
        with self._writing:
            late = time.monotonic() - self._renewed >= _RENEW_SECONDS
            if late and (make or os.path.lexists(self._publisher.root)):
                self._write()

    def release(self) -> None:
        if self._descriptor is not None:
            close(self._descriptor)
            self._descriptor = None
            with contextlib.suppress(OSError), self._publisher.at(self.path.parent) as at:
                self._publisher.disk.remove(self.path, at)

    def _write(self) -> None:
        self._renewed = time.monotonic()
        with contextlib.suppress(OSError):
            if self._descriptor is not None:
                os.utime(self._descriptor)
                if os.fstat(self._descriptor).st_nlink:
                    return
                close(self._descriptor)  # somebody removed it
                self._descriptor = None
            try:
                self._publisher.admit()
            except NoStoreError:
                raise
            except (StoreError, IntegrityError):
                return
            name = f"{process.owner(process.host())}-{os.urandom(6).hex()}"
            self.path = self._publisher.root / "leases" / name
            self._publisher.folders.make("leases")
            with self._publisher.folders.at("leases") as at:
                self._descriptor = os.open(name, NEW, _MODE, dir_fd=at)
            # The start, as the file system counts: the stamp of the file moves with every renewal.
            self._began = self._began or os.fstat(self._descriptor).st_mtime_ns
            os.write(self._descriptor, str(self._began).encode())


def leases(folders: Folders, now: int) -> tuple[int | None, list[Path]]:
    """Start of the oldest lease that is held, None if there is none; and the files of leases that have ended.

    now, result: nanoseconds as the file system counts them. Raises StoreError if they cannot be listed.
    """
    host, began, ended = process.host(), [], []
    for node in walk(folders, LEASES, status=True):
        if node.kind != "file" or node.status is None:
            continue
        stamp = node.status.st_mtime_ns
        if process.is_gone(node.path.name, host) or abs(now - stamp) > LEASE_SECONDS * 10**9:
            ended.append(node.path)
        else:
            began.append(_began(node, stamp))
    return min(began, default=None), ended


def _began(node: Node, default: int) -> int:
    try:
        return int(read_file(node.path, limit=_LEASE_LIMIT, at=node.at) or b"")
    except StoreError:
        return 0  # it may have begun at any time
    except (IntegrityError, ValueError):
        return default

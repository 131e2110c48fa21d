"""Who uses what: marks of last use, and leases of builds. Collection reads them; nothing else depends on them.

**A mark** is the empty file `used/<2 digits>/<key>`, whose time stamp is that of the last use. Whoever wants an entry
marks it *first* and looks *then*; see fusekit.store.gc for why that order protects it. A mark needs no access times
(`noatime`), is one system call, and is never waited for: on a read-only mount, a full disk or without permission it
is left out, and the entry counts as used when it was last published or marked by somebody else.

**A lease** is a file under `leases/`, held while a build runs: what was published or marked since it was taken stays
until it is given back. A process that was killed cannot give it back: its lease ends when its host finds it gone, or,
seen from elsewhere, when it was not renewed for `LEASE_SECONDS`.

Neither is written through a link, nor through a further name of a file: see fusekit.store.folders.

Stamps are the file system's own (a touch, not a time that a host names), and are only ever compared with other stamps
of the same file system: hosts need not agree on the time.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path

from fusekit.errors import IntegrityError, NoStoreError, StoreError
from fusekit.store import process
from fusekit.store.files import AnyPath, close, read_file
from fusekit.store.folders import Folders
from fusekit.store.layout import LEASES, Found, walk
from fusekit.store.publishing import NEW, Publisher, touch

LEASE_SECONDS = 900
_RENEW_SECONDS = 60.0
_LEASE_LIMIT = 32
_MODE = 0o666  # whoever may write in the store may mark; the umask applies


def mark_path(root: Path, key: str) -> Path:
    return root / "used" / key[:2] / key


def mark(folders: Folders, key: str, entry: AnyPath) -> bool:
    """Say that the entry of `key`, at `entry`, is wanted now; whether there is a mark now.

    Does nothing where there is no entry or it cannot be said.
    """
    try:
        at = folders.open("used", key[:2])  # no context manager: this is part of every launch's way
        try:
            if touch(key, at):
                return True
            os.unlink(key, dir_fd=at)  # a further name of a file that may be anybody's
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


class Lease:
    """A lease on the store of `publisher`, held until `release`. Where none can be written it protects nothing.

    The file is made once and stays open: no renewal writes to what lies at its name by then.
    """

    def __init__(self, publisher: Publisher, *, make: bool = True) -> None:
        """make: a root that is missing; else it waits for `renew` with that."""
        self._publisher = publisher
        self._began = 0
        self._writing = threading.Lock()
        self._descriptor: int | None = None
        self._renewed = -math.inf
        self.renew(make)

    def renew(self, make: bool = False) -> None:
        """Say that it is still held; costs nothing if that was said a moment ago."""
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
            # When it began, as the file system counts: the file's own stamp moves with every renewal.
            self._began = self._began or os.fstat(self._descriptor).st_mtime_ns
            os.write(self._descriptor, str(self._began).encode())


def leases(folders: Folders, now: int) -> tuple[int | None, list[Path]]:
    """When the oldest lease that is held began, None if there is none; and the leases that nobody holds any more.

    now, result: nanoseconds as the file system counts them. Raises StoreError where they cannot be listed.
    """
    host, began, ended = process.host(), [], []
    for found in walk(folders, LEASES, status=True):
        if found.kind != "file" or found.status is None:
            continue
        stamp = found.status.st_mtime_ns
        if process.is_gone(found.path.name, host) or abs(now - stamp) > LEASE_SECONDS * 10**9:
            ended.append(found.path)
        else:
            began.append(_began(found, stamp))
    return min(began, default=None), ended


def _began(found: Found, otherwise: int) -> int:
    try:
        return int(read_file(found.path, limit=_LEASE_LIMIT, at=found.at) or b"")
    except StoreError:
        return 0  # it may have begun at any time
    except (IntegrityError, ValueError):
        return otherwise

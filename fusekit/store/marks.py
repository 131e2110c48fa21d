"""Who uses what: marks of last use, and leases of builds. Collection reads them; nothing else depends on them.

**A mark** is the empty file `used/<2 digits>/<key>`, whose time stamp is that of the last use. Whoever wants an entry
marks it *first* and looks *then*; see fusekit.store.gc for why that order protects it. A mark needs no access times
(`noatime`), is one system call, and is never waited for: on a read-only mount, a full disk or without permission it
is left out, and the entry counts as used when it was last published or marked by somebody else.

**A lease** is a file under `leases/`, held while a build runs: what was published or marked since it was taken stays
until it is given back. A process that was killed cannot give it back: its lease ends when its host finds it gone, or,
seen from elsewhere, when it was not renewed for `LEASE_SECONDS`.

Stamps are the file system's own (a touch, not a time that a host names), and are only ever compared with other stamps
of the same file system: hosts need not agree on the time.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from fusekit.store import process
from fusekit.store.files import AnyPath, Disk, store_error

LEASE_SECONDS = 900
_RENEW_SECONDS = 60.0
_MODE = 0o666  # whoever may write in the store may mark; the umask applies


def mark_path(root: Path, key: str) -> Path:
    return Path(_mark(root, key))


def _mark(root: Path, key: str) -> str:
    return f"{root}/used/{key[:2]}/{key}"


def mark(root: Path, key: str, entry: AnyPath) -> bool:
    """Say that the entry of `key`, at `entry`, is wanted now; whether there is a mark now.

    Does nothing where there is no entry or it cannot be said.
    """
    path = _mark(root, key)
    with contextlib.suppress(OSError):
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            if not Path(entry).exists():
                return False
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE))
        return True
    return False


class Lease:
    """A lease on the store under `root`, held until `release`. Where none can be written it protects nothing."""

    def __init__(self, root: Path, disk: Disk) -> None:
        folder = root / "leases"
        self.path = folder / f"{process.owner(process.host())}-{os.urandom(6).hex()}"
        self._disk = disk
        self._began = 0
        self._write()

    def renew(self) -> None:
        """Say that it is still held; costs nothing if that was said a moment ago."""
        if time.monotonic() - self._renewed >= _RENEW_SECONDS:
            self._write()

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(self.path)

    def _write(self) -> None:
        self._renewed = time.monotonic()
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
            try:
                # When it began, as the file system counts: the file's own stamp moves with every renewal.
                self._began = self._began or os.fstat(descriptor).st_mtime_ns
                os.write(descriptor, str(self._began).encode())
            finally:
                os.close(descriptor)


def leases(root: Path, now: int) -> tuple[int | None, list[Path]]:
    """When the oldest lease that is held began, None if there is none; and the leases that nobody holds any more.

    now, result: nanoseconds as the file system counts them. Raises StoreError where they cannot be listed.
    """
    host, began, ended = process.host(), [], []
    try:
        listed = list(os.scandir(root / "leases"))
    except (FileNotFoundError, NotADirectoryError):
        return None, []
    except OSError as error:
        raise store_error(root / "leases", "list", error) from error
    for found in listed:
        path = Path(found.path)
        with contextlib.suppress(FileNotFoundError):
            status = found.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if process.is_gone(found.name, host) or abs(now - status.st_mtime_ns) > LEASE_SECONDS * 10**9:
                ended.append(path)
            else:
                began.append(_began(path, status.st_mtime_ns))
    return min(began, default=None), ended


def _began(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_bytes()[:32])
    except (OSError, ValueError):
        return otherwise

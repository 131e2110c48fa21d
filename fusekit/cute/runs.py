"""The folder of one run of `fusekit exec --with`, and what runs left behind that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fusekit.store import process

_PREFIX = "fusekit-with-"
_MARKER = ".fusekit-run"
"""A file in the folder: the boot and PID namespace of the run. It is locked while `exec` or the program's first process
runs.
"""
_PATIENCE = 5.0  # seconds for processes that end later than the program, and for what they write meanwhile
_PAUSE = 0.05
_MARKER_BYTES = 100
_UNKNOWN = "0" * 12  # a boot and PID namespace


class RunFolder:
    """A new folder below the one for temporary files, readable for this user alone. Raises OSError.

    lock: of its marker. The program inherits it.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        self.lock = -1
        self._links, self._parents = list[Path](), list[Path]()
        try:
            self.lock = os.open(self.path / _MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self.lock, process.host().encode())
            os.set_inheritable(self.lock, True)
        except BaseException:
            self.remove()
            raise

    def stand_for(self, other: Path) -> None:
        """Let the folder of another run lead to this one until `remove`: files that were compiled there have its path.
        One that a run uses now stays. Raises OSError where that cannot be.
        """
        if other == self.path or other in self._links:
            return
        if not (other.is_absolute() and other.name.startswith(_PREFIX)) or ".." in other.parts:
            raise OSError(f"{other} is no folder of a run")
        for parent in reversed(other.parents):
            if not parent.exists():
                parent.mkdir(0o700)
                self._parents.append(parent)
        with contextlib.suppress(FileNotFoundError):
            state = other.lstat()
            if state.st_uid != os.geteuid():
                raise OSError(f"{other} is another user's")
            if not stat.S_ISLNK(state.st_mode) or other.exists():
                return
            other.unlink()  # of a run that was killed
        with contextlib.suppress(FileExistsError):  # another run was faster
            other.symlink_to(self.path)
            self._links.append(other)

    def settle(self) -> None:
        """Wait until no process has the folder in its environment, for some seconds: where `exec` is not told of the
        end of what the program left behind, that is so.
        """
        end = time.monotonic() + _PATIENCE
        while any(_users(self.path)) and time.monotonic() < end:
            time.sleep(_PAUSE)

    def remove(self) -> str:
        """Remove the folder, also while something is still written into it. Why it stays; empty if it is gone."""
        if user := next(_users(self.path), 0):
            return f"process {user} uses it"
        self._unlink()
        end = time.monotonic() + _PATIENCE
        while not (gone := _removed(self.path)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
        return "" if gone else "it cannot be removed"

    def _unlink(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                if link.readlink() == self.path:
                    link.unlink()
        for parent in reversed(self._parents):
            with contextlib.suppress(OSError):  # others use it
                parent.rmdir()
        self._links, self._parents = [], []


def sweep() -> None:
    """Remove the folders of runs of this user that were killed, of whose processes none is left."""
    with contextlib.suppress(OSError):
        for found in os.scandir(tempfile.gettempdir()):
            if found.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep(Path(found.path))


def _sweep(folder: Path) -> None:
    state = folder.lstat()
    if stat.S_ISLNK(state.st_mode) and state.st_uid == os.geteuid():
        target = folder.readlink()
        if target.name.startswith(_PREFIX) and not os.path.lexists(target):  # see `stand_for`
            folder.unlink()
        return
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        return
    # Nobody else can have changed what is in it.
    lock = os.open(folder / _MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Processes of another PID namespace would not be seen.
        here = process.host()
        alone = here != _UNKNOWN and os.pread(lock, _MARKER_BYTES, 0) == here.encode()
        if alone and not any(_users(folder, deep=True)):
            _removed(folder)
    finally:
        os.close(lock)


def _removed(folder: Path) -> bool:
    """Remove `folder`, which is no link, as far as it can be. Whether nothing is left."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return True
    with contextlib.suppress(OSError):
        for *_, descriptor in os.fwalk(folder):  # the program may have protected some of it
            os.fchmod(descriptor, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def _users(folder: Path, *, deep: bool = False) -> Iterator[int]:
    """The other processes with `folder` in their environment; deep: or with a file of it as code."""
    path, own = os.fsencode(folder), str(os.getpid())
    kinds = ("environ", "maps") if deep else ("environ",)
    with contextlib.suppress(OSError):  # of another system
        for name in os.listdir("/proc"):  # noqa: PTH208 - thousands
            if name.isdecimal() and name != own and any(path in _read(f"/proc/{name}/{kind}") for kind in kinds):
                yield int(name)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:  # it has ended, or is of another user
        return b""

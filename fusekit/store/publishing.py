"""Writing files of a store: whole or absent.

Publishing writes a temporary file *in the directory of the target* (a rename across file systems is a copy), syncs it,
gives it its final name in one step and syncs the directory. After that the file survives a power loss; before it,
nobody sees it. Nothing here relies on locks, and nothing is read back to learn whether a step worked: a network file
system may show an old state for a while.

All of that happens in one open folder, reached through no link below the root (see fusekit.store.folders). A file at
the target's path is replaced and never written to, as it may be a link, or have a second hard link.

`Disk` holds the few system calls that change a disk, so that a test can record their order, make one of them fail, or
lose what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fusekit.errors import IntegrityError, StoreError, UsageError
from fusekit.store import process
from fusekit.store.files import READ, TEMPORARY_SUFFIX, close, exists, file_error, store_error
from fusekit.store.folders import DIRECTORY_MODE, Folders

FILE_MODE = 0o444  # published files never change; the umask still applies
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_LINKS = 40  # in a chain of links; no system follows more

# How often a file is written again if its temporary is removed meanwhile.
_WRITE_RETRIES = 3

# Errors of file systems that do not sync directories.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
# Errors of file systems without hard links.
_NO_HARD_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL})


class Disk:
    """The system calls that change a store, in the order of a publication.

    at: descriptor of the folder of `path`. If it is None, above the root, the whole path is used.
    """

    def make_directory(self, path: Path, at: int | None = None) -> bool:
        """Make one directory; False if it is there already."""
        try:
            os.mkdir(_in(path, at), DIRECTORY_MODE, dir_fd=at)
        except FileExistsError:
            return False
        return True

    def write(self, path: Path, data: bytes, at: int | None = None) -> None:
        """Create the file `path` with `data` and sync it: on return, the bytes are on the disk."""
        descriptor = os.open(_in(path, at), NEW, FILE_MODE, dir_fd=at)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path, at: int | None = None) -> None:
        """Add the name `target` to `source`; FileExistsError if that name is taken."""
        os.link(_in(source, at), _in(target, at), src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)

    def replace(self, source: Path, target: Path, at: int | None = None) -> None:
        """Rename `source` to `target`, in the same folder, in one step, replacing any file there."""
        os.replace(_in(source, at), _in(target, at), src_dir_fd=at, dst_dir_fd=at)

    def remove(self, path: Path, at: int | None = None) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_in(path, at), dir_fd=at)

    def sync(self, path: Path, descriptor: int | None = None) -> None:
        """Make a file's bytes, or a directory's names, survive a power loss. descriptor: used if it is given."""
        if descriptor is not None:
            _sync(descriptor)
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            if path.is_dir():
                return  # a directory that is writable and not readable cannot be synced
            raise
        try:
            _sync(descriptor)
        finally:
            close(descriptor)


def _in(path: Path, at: int | None) -> Path | str:
    return path if at is None else path.name


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno in _NO_DIRECTORY_SYNC and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise


class Publisher:
    """Writes files under one root. Its only state is which directories this process has made durable."""

    def __init__(self, root: Path, disk: Disk | None = None, admit: Callable[[Publisher], None] | None = None) -> None:
        """admit: called with this publisher before the first change below an existing root; may raise."""
        self.root = root
        self.disk = disk or Disk()
        self.folders = Folders(root)
        self._admit = admit
        self._durable: set[Path] = set()
        self._host = ""

    def claim(self, path: Path, data: bytes) -> bool:
        """Publish `data` as the new file `path`; False, without a change, if the name is taken.

        Of any number of processes exactly one gets True if the file system has hard links. Without hard links the last
        one wins, which is as correct.
        """
        return self._publish(path, data, self._link_or_rename)

    def put(self, path: Path, data: bytes) -> None:
        """Publish `data` as `path`, replacing any file of that name: for repairs, and records that may change."""
        self._publish(path, data, self._rename)

    def settle(self, path: Path) -> bool:
        """Sync a file that another process published and may not have synced yet; False if it is gone."""
        try:
            with self.at(path.parent) as at:
                descriptor = os.open(path.name, READ, dir_fd=at)
                try:
                    self.disk.sync(path, descriptor)
                finally:
                    close(descriptor)
                self._directory(path.parent)
                self.disk.sync(path.parent, at)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(path, "sync", error) from error

    def touch(self, path: Path, data: bytes) -> None:
        """Give the file `path` a new stamp, if it is there and may be changed. A file with a second hard link, which
        may be anybody's, is replaced by one with `data`, the bytes that it has.
        """
        with contextlib.suppress(OSError, StoreError), self.at(path.parent) as at:
            if not touch(path.name, at):
                self._place(path, data, self._rename, at)

    def directory(self, path: Path) -> None:
        """Make the directory `path`, and missing ones above it, and sync them."""
        try:
            self._directory(path)
            with self.at(path):
                pass  # no link
        except OSError as error:
            raise store_error(path, "make the directory", error) from error

    def admit(self) -> None:
        """Make the root if it is missing, and check that it is a store."""
        try:
            self._directory(self.root)
        except OSError as error:
            raise store_error(self.root, "write", error) from error

    def at(self, folder: Path) -> contextlib.AbstractContextManager[int]:
        """A descriptor of `folder`, an existing folder below the root."""
        return self.folders.at(*self.folders.parts(folder))

    def put_new(self, path: Path, data: bytes, at: int) -> None:
        """Publish `path`, a file in the root itself, unless it is there; `admit` calls this."""
        self._place(path, data, self._link_or_rename, at)

    def _publish(self, path: Path, data: bytes, name_it: Callable[[Path, Path, int], bool]) -> bool:
        for attempt in range(_WRITE_RETRIES):
            try:
                self._directory(path.parent)
                with self.at(path.parent) as at:
                    return self._place(path, data, name_it, at)
            except FileNotFoundError as error:
                # The directory that this process made, or the temporary, was removed: once more, from the top.
                if attempt + 1 == _WRITE_RETRIES:
                    raise store_error(path, "write", error) from error
                self._durable.clear()
            except OSError as error:
                raise store_error(path, "write", error) from error
        raise AssertionError("every attempt returns or raises")

    def _place(self, path: Path, data: bytes, name_it: Callable[[Path, Path, int], bool], at: int) -> bool:
        temporary = self.temporary(path)
        try:
            self.disk.write(temporary, data, at)
            named = name_it(temporary, path, at)
        finally:
            self.disk.remove(temporary, at)
        if named:
            self.disk.sync(path.parent, at)
        return named

    def temporary(self, path: Path) -> Path:
        """A temporary name in the folder of `path`, with its owner: no reader opens it, and a collection knows it."""
        self._host = self._host or process.host()
        # A file name has at most 255 bytes, and that of a kernel may be near it.
        return path.parent / f".{path.name[:160]}.{process.owner(self._host)}-{os.urandom(6).hex()}{TEMPORARY_SUFFIX}"

    def give(self, temporary: Path, path: Path) -> bool:
        """Rename `temporary` to `path`, in the same folder, unless that name is taken; `temporary` is removed
        anyway.
        """
        try:
            with self.at(path.parent) as at:
                named = self._link_or_rename(temporary, path, at)
                self.disk.remove(temporary, at)
                self.disk.sync(path.parent, at)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(path, "write", error) from error
        return named

    def _link_or_rename(self, temporary: Path, path: Path, at: int) -> bool:
        try:
            self.disk.link(temporary, path, at)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINK:
                raise
            return self._rename(temporary, path, at)
        return True

    def _rename(self, temporary: Path, path: Path, at: int) -> bool:
        try:
            self.disk.replace(temporary, path, at)
        except IsADirectoryError as error:
            raise IntegrityError(
                f"{path} is a directory; a store keeps a file there; remove it and try again"
            ) from error
        return True

    def _directory(self, path: Path) -> None:
        # Every process that publishes below a level syncs it once: another process may have just made it, and not have
        # synced it yet.
        if path in self._durable:
            return
        if path == self.root:
            self._make_root()
        else:
            self._directory(path.parent)
            with self.at(path.parent) as at:
                self.disk.make_directory(path, at)
                self.disk.sync(path.parent, at)
        self._durable.add(path)

    def _make_root(self) -> None:
        missing = []
        level = self.root
        while not level.is_dir():
            missing.append(level)
            level = level.parent
        for level in reversed(missing):
            self.disk.make_directory(level)
            self.disk.sync(level.parent)
        if self._admit is not None:
            self._admit(self)


def touch(name: str, at: int) -> bool:
    """Set the time stamp of the plain file `name` in the open folder `at` to now; False if it has a second hard link,
    which may be anybody's. OSError if there is none, or it may not be changed.
    """
    descriptor = os.open(name, READ, dir_fd=at)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        if status.st_nlink != 1:
            return False
        os.utime(descriptor)
    finally:
        close(descriptor)
    return True


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, new: bool = False) -> int:
    """Write `path`, a file that the user names, in one step, and sync it; returns its size in bytes. A link is
    replaced, not followed. UsageError if `path` exists and is not a plain file: a device, a folder, a link to an open
    stream.

    new: raise FileExistsError if `path` exists.
    """
    if new and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if exists(path) and not path.is_file():  # a rename would replace /dev/null, too
        raise UsageError(f"{path} is no plain file, and only one can be replaced; check the path")
    if _is_stream(path):
        raise UsageError(f"{path} is a link to an open stream, which would be replaced; name a file")
    temporary = path.with_name(f".fusekit-{os.getpid()}-{os.urandom(6).hex()}.tmp")  # of any name
    try:
        with os.fdopen(os.open(temporary, NEW, 0o666), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if not (new and _linked(temporary, path)):
            temporary.replace(path)
        Disk().sync(path.parent)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            raise
        raise file_error(path, "write", error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return size


def _is_stream(path: Path) -> bool:
    """Whether `path` is a link such as /dev/stdout, which all processes share."""
    at = os.path.abspath(path)  # noqa: PTH100 - follows no link
    for _ in range(_MOST_LINKS):
        if not os.path.islink(at):  # noqa: PTH114 - of text
            return False
        at = os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at)))  # noqa: PTH115, PTH118, PTH120
        if at.startswith("/proc/"):
            return True
    return True


def _linked(temporary: Path, path: Path) -> bool:
    """Link `path` to `temporary`; False if the file system has no hard links."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK:
            raise
        return False
    return True

"""Folders of a store, opened one component at a time: a link below the root is never followed.

Who may write in a store could replace a folder by a link at any moment, and so lead a builder or a collection
elsewhere. So every walk, write and removal opens the folder first, one component at a time, and then names files
relative to that descriptor. The root is chosen by the user, and may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fusekit.store.files import close

DIRECTORY_MODE = 0o777  # the process' umask applies

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Passing through a folder needs no permission to read it.
_THROUGH = _FOLDER | getattr(os, "O_PATH", 0)


class Folders:
    """Opens folders of the store at `root`. A folder is given by its parts: `("blobs", "sha256", "ab")`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pinned: dict[tuple[str, ...], int] | None = None

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Open the root, and the folders between it and files, once, and keep them open in the body."""
        self._pinned = {(): os.open(self.root, _THROUGH)}
        try:
            yield
        finally:
            for descriptor in self._pinned.values():
                close(descriptor)
            self._pinned = None

    def parts(self, folder: Path) -> tuple[str, ...]:
        """The parts of the absolute path of a folder below the root."""
        return folder.relative_to(self.root).parts

    @contextlib.contextmanager
    def at(self, *parts: str, listed: bool = False) -> Iterator[int]:
        """A descriptor of the folder `parts`, for `dir_fd`; it can be synced if this process may read the folder.

        listed: the folder will be read. OSError: it is missing, may not be entered or read, or is a link (ELOOP).
        """
        try:
            descriptor = self.open(*parts, flags=_FOLDER)
        except PermissionError:
            if listed:
                raise
            descriptor = self.open(*parts)  # a folder may be writable and not readable
        try:
            yield descriptor
        finally:
            close(descriptor)

    def open(self, *parts: str, flags: int = _THROUGH) -> int:
        """As `at`, for `dir_fd` only; the caller closes it."""
        if self._pinned is not None:
            above = self._keep(parts[:-1])
            return self._below(parts, above, flags) if parts else os.open(".", flags, dir_fd=above)
        if not parts:
            return os.open(self.root, flags)
        # The root and a folder in it take one call: only the last component must not be a link.
        last = len(parts) - 1
        descriptor = self._below(parts[:1], None, _THROUGH if last else flags)
        for depth in range(1, len(parts)):
            try:
                below = self._below(parts[: depth + 1], descriptor, flags if depth == last else _THROUGH)
            finally:
                close(descriptor)
            descriptor = below
        return descriptor

    def make(self, *parts: str) -> None:
        """Create the missing folders of `parts` below an existing root; does not sync."""
        for depth in range(len(parts)):
            with self.at(*parts[:depth]) as above, contextlib.suppress(FileExistsError):
                os.mkdir(parts[depth], DIRECTORY_MODE, dir_fd=above)

    def _keep(self, parts: tuple[str, ...]) -> int:
        assert self._pinned is not None
        if parts not in self._pinned:
            self._pinned[parts] = self._below(parts, self._keep(parts[:-1]), _THROUGH)
        return self._pinned[parts]

    def _below(self, parts: tuple[str, ...], above: int | None, flags: int) -> int:
        name = f"{self.root}/{parts[0]}" if above is None else parts[-1]
        try:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
        except NotADirectoryError as error:
            if is_link(name, above):
                raise link_error(self.root.joinpath(*parts)) from error
            raise


def is_link(name: str, at: int | None) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    return False


def link_error(path: Path) -> OSError:
    """The error for a link where a folder should be."""
    return OSError(errno.ELOOP, f"{path} is a symbolic link", str(path))


def printable(path: Path | str) -> str:
    """`path` for a message, escaped if it has characters that cannot be printed."""
    text = str(path)
    return text if text.isprintable() else ascii(text)

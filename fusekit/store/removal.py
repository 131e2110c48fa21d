"""Removing files while other processes use the store: move aside, look again, then remove or put back.

This is one half of the rule in fusekit.store.gc. Names are synced before their entries are removed, entries before
their cubins: after a power loss, too, every name points to an entry and every entry has its cubin.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fusekit.store import locks
from fusekit.store.files import store_error
from fusekit.store.marks import mark, mark_path
from fusekit.store.publishing import Publisher
from fusekit.store.scan import File, Item, Scan, State, mentioned_since, state_of

# Nothing is to be done with a file that is gone, or whose folder was replaced by a link or a file.
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

T = TypeVar("T")

Moved = dict[Path, Path]
"""Path of a file -> the path it was moved to."""


class Remover:
    """Removes files of a `scan` from the store of `publisher`, unless they changed or were marked since."""

    def __init__(self, publisher: Publisher, scan: Scan) -> None:
        self.root, self.publisher, self.scan = publisher.root, publisher, scan
        self._folders: set[Path] = set()  # of removed entries, not synced yet

    def entries(self, items: Sequence[Item]) -> set[str]:
        """Remove names, entries and marks of `items`; returns the keys of those that stay, with all their files.

        All names are invisible until all entries were checked: pass some hundred at a time, sorted by name, since each
        folder of names is synced once.
        """
        marks: dict[str, Path | None] = {}
        moved: dict[str, Moved] = {}
        for item in items:
            its_mark = mark_path(self.root, item.key)
            if self._state(its_mark) == (item.mark.state if item.mark else None):
                marks[item.key] = self._aside(its_mark)
                moved[item.key] = self._all_aside(name.path for name in item.names)
        self._sync(path.parent for files in moved.values() for path in files)
        for item in items:
            if item.key in moved:
                moved[item.key] |= self._all_aside([item.file.path])
        stay = {item.key for item in items if item.key not in moved}
        for item in items:
            if item.key in moved and self._wanted(item, moved[item.key], marks[item.key]):
                # The entry first: a name always points to an entry.
                for path, aside in reversed(moved[item.key].items()):
                    self.publisher.give(aside, path)
                mark(self.publisher.folders, item.key, item.file.path)
                stay.add(item.key)
        for key, files in moved.items():
            for left in (*files.values(), marks[key]):
                if left is not None:
                    self.remove(left)
        self._folders |= {item.file.path.parent for item in items}
        return stay

    def settle(self) -> None:
        """Sync the removal of entries: only then may their cubins be removed."""
        self._sync(self._folders)
        self._folders.clear()

    def blobs(self, digests: Iterable[str]) -> set[str]:
        """Remove blobs that no entry mentioned; returns those that an entry mentions now, which are put back."""
        self.settle()
        paths = {digest: self.scan.blobs[digest].path for digest in digests}
        moved = self._all_aside(paths.values())
        if not moved:
            return set()
        known = {item.file.path: item.file.state for item in self.scan.entries.values()}
        back = mentioned_since(self.publisher.folders, known, self.scan.blobs.keys()) & paths.keys()
        for digest, path in paths.items():
            if path in moved and digest in back:
                self.publisher.give(moved[path], path)
            elif path in moved:
                self.remove(moved[path])
        return back

    def unchanged(self, file: File) -> bool:
        """Remove `file`; False, without a change, if it changed since the scan or is gone."""
        aside = self._aside(file.path)
        if aside is None:
            return False
        if self._state(aside) != file.state:
            self.publisher.give(aside, file.path)
            return False
        self.remove(aside)
        return True

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        self._in(path.parent, "remove", path, lambda at: self.publisher.disk.remove(path, at))

    def lock(self, path: Path, remove: bool) -> bool:
        """Remove the lock file `path` unless it is held. Returns whether it was removed, or without `remove`
        would be.
        """
        with contextlib.suppress(OSError), self.publisher.at(path.parent) as at:
            return locks.discard(path.name, at, remove)
        return False

    def _in(self, folder: Path, doing: str, path: Path, step: Callable[[int], T]) -> T | None:
        """The result of `step` in the open `folder`; None if the folder, or the file that `step` needs, is gone."""
        try:
            with self.publisher.at(folder) as at:
                return step(at)
        except OSError as error:
            if error.errno in _NOTHING:
                return None
            raise store_error(path, doing, error) from error

    def _state(self, path: Path) -> State | None:
        """The state of `path` now; None if there is no file."""

        def look(at: int) -> State:
            return state_of(os.stat(path.name, dir_fd=at, follow_symlinks=False))

        return self._in(path.parent, "look at", path, look)

    def _wanted(self, item: Item, moved: Moved, its_mark: Path | None) -> bool:
        """Whether `item` was marked, or a file of it changed, since the scan."""
        if self._state(mark_path(self.root, item.key)) is not None:
            return True
        if its_mark is not None and (item.mark is None or self._state(its_mark) != item.mark.state):
            return True
        known = {file.path: file.state for file in (*item.names, item.file)}
        return any(self._state(aside) != known[path] for path, aside in moved.items())

    def _all_aside(self, paths: Iterable[Path]) -> Moved:
        return {path: aside for path in paths if (aside := self._aside(path)) is not None}

    def _aside(self, path: Path) -> Path | None:
        """Move `path` to a temporary name in its folder; None if it is gone."""
        aside = self.publisher.temporary(path)

        def move(at: int) -> Path:
            self.publisher.disk.replace(path, aside, at)
            return aside

        return self._in(path.parent, "remove", path, move)

    def _sync(self, folders: Iterable[Path]) -> None:
        for folder in set(folders):
            self._in(folder, "sync", folder, partial(self.publisher.disk.sync, folder))

"""Taking things out of a store while others use it: move aside, look again, remove or put back.

See fusekit.store.gc for the rule that this is one half of. Names are synced before entries go, entries before cubins
go: after a power loss too, no name leads nowhere and no entry lacks its cubin.
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

# What there is to be done with a file that is gone, or has a link or a file in the place of its folder.
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

T = TypeVar("T")

Moved = dict[Path, Path]
"""Where a file was -> where it lies aside."""


class Remover:
    """Removes from the store of `publisher` what `scan` found there, unless it changed or was asked for since."""

    def __init__(self, publisher: Publisher, scan: Scan) -> None:
        self.root, self.publisher, self.scan = publisher.root, publisher, scan
        self._folders: set[Path] = set()  # of entries that were removed and are not synced yet

    def entries(self, items: Sequence[Item]) -> set[str]:
        """Remove names, entries and marks of `items`; returns the keys of those that stay, with all they had.

        All names are out of sight until all entries were looked at: give it some hundred at a time, neighbours by
        name, since each folder of names is synced once.
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
                # The entry first: a name never leads nowhere.
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
        """Make sure that entries are gone for good: only then may their cubins go."""
        self._sync(self._folders)
        self._folders.clear()

    def blobs(self, digests: Iterable[str]) -> set[str]:
        """Remove blobs that no entry mentioned; returns those that one mentions by now, which are put back."""
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
        """Remove `file`; False, with it as it is, if it changed since the scan or is gone."""
        aside = self._aside(file.path)
        if aside is None:
            return False
        if self._state(aside) != file.state:
            self.publisher.give(aside, file.path)
            return False
        self.remove(aside)
        return True

    def remove(self, path: Path) -> None:
        """Remove one file if it is there."""
        self._in(path.parent, "remove", path, lambda at: self.publisher.disk.remove(path, at))

    def lock(self, path: Path, remove: bool) -> bool:
        """Remove the lock file `path` unless it is held; whether it was, or without `remove` would be, removed."""
        with contextlib.suppress(OSError), self.publisher.at(path.parent) as at:
            return locks.discard(path.name, at, remove)
        return False

    def _in(self, folder: Path, doing: str, path: Path, step: Callable[[int], T]) -> T | None:
        """What `step` gives in the open `folder`; None where that, or what `step` looks for, is gone."""
        try:
            with self.publisher.at(folder) as at:
                return step(at)
        except OSError as error:
            if error.errno in _NOTHING:
                return None
            raise store_error(path, doing, error) from error

    def _state(self, path: Path) -> State | None:
        """The state of `path` now; None where there is nothing."""

        def look(at: int) -> State:
            return state_of(os.stat(path.name, dir_fd=at, follow_symlinks=False))

        return self._in(path.parent, "look at", path, look)

    def _wanted(self, item: Item, moved: Moved, its_mark: Path | None) -> bool:
        """Whether somebody marked `item` or changed a file of it since it was looked at."""
        if self._state(mark_path(self.root, item.key)) is not None:
            return True
        if its_mark is not None and (item.mark is None or self._state(its_mark) != item.mark.state):
            return True
        known = {file.path: file.state for file in (*item.names, item.file)}
        return any(self._state(aside) != known[path] for path, aside in moved.items())

    def _all_aside(self, paths: Iterable[Path]) -> Moved:
        return {path: aside for path in paths if (aside := self._aside(path)) is not None}

    def _aside(self, path: Path) -> Path | None:
        """Move `path` to a temporary name beside it; None where it is gone."""
        aside = self.publisher.temporary(path)

        def move(at: int) -> Path:
            self.publisher.disk.replace(path, aside, at)
            return aside

        return self._in(path.parent, "remove", path, move)

    def _sync(self, folders: Iterable[Path]) -> None:
        for folder in set(folders):
            self._in(folder, "sync", folder, partial(self.publisher.disk.sync, folder))

"""Taking things out of a store while others use it: move aside, look again, remove or put back.

See fusekit.store.gc for the rule that this is one half of. Names are synced before entries go, entries before cubins
go: after a power loss too, no name leads nowhere and no entry lacks its cubin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fusekit.store.files import Publisher, store_error
from fusekit.store.layer import Layer
from fusekit.store.marks import mark, mark_path
from fusekit.store.scan import File, Item, Scan, State, digests_of, entry_states, state

Moved = dict[Path, Path]
"""Where a file was -> where it lies aside."""


class Remover:
    """Removes from one layer what `scan` found there, unless it changed or was asked for since."""

    def __init__(self, layer: Layer, publisher: Publisher, scan: Scan) -> None:
        self.layer, self.publisher, self.scan = layer, publisher, scan
        self._folders: set[Path] = set()  # of entries that were removed and are not synced yet

    def entries(self, items: Sequence[Item]) -> set[str]:
        """Remove names, entries and marks of `items`; returns the keys of those that stay, with all they had.

        All names are out of sight until all entries were looked at: give it some hundred at a time, neighbours by
        name, since each folder of names is synced once.
        """
        marks: dict[str, Path | None] = {}
        moved: dict[str, Moved] = {}
        for item in items:
            its_mark = mark_path(self.layer.root, item.key)
            if state(its_mark) == (item.mark.state if item.mark else None):
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
                mark(self.layer.root, item.key, item.file.path)
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
        back = self._mentioned_since() & paths.keys()
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
        if state(aside) != file.state:
            self.publisher.give(aside, file.path)
            return False
        self.remove(aside)
        return True

    def remove(self, path: Path) -> None:
        """Remove one file if it is there."""
        try:
            self.publisher.disk.remove(path)
        except OSError as error:
            raise store_error(path, "remove", error) from error

    def _wanted(self, item: Item, moved: Moved, its_mark: Path | None) -> bool:
        """Whether somebody marked `item` or changed a file of it since it was looked at."""
        if state(mark_path(self.layer.root, item.key)) is not None:
            return True
        if its_mark is not None and item.mark is not None and state(its_mark) != item.mark.state:
            return True
        known = {file.path: file.state for file in (*item.names, item.file)}
        return any(state(aside) != known[path] for path, aside in moved.items())

    def _mentioned_since(self) -> Collection[str]:
        """Every digest in an entry that is new, or was replaced, since the scan; of an unreadable one every blob's."""
        known: dict[Path, State] = {item.file.path: item.file.state for item in self.scan.entries.values()}
        changed = [path for path, now in entry_states(self.layer).items() if known.get(path) != now]
        mentioned: set[str] = set()
        for path in changed:
            digests = digests_of(path)
            mentioned |= self.scan.blobs.keys() if digests is None else digests
        return mentioned

    def _all_aside(self, paths: Iterable[Path]) -> Moved:
        return {path: aside for path in paths if (aside := self._aside(path)) is not None}

    def _aside(self, path: Path) -> Path | None:
        """Move `path` to a temporary name beside it; None where it is gone."""
        aside = self.publisher.temporary(path)
        try:
            self.publisher.disk.replace(path, aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(path, "remove", error) from error
        return aside

    def _sync(self, folders: Iterable[Path]) -> None:
        for folder in set(folders):
            try:
                self.publisher.disk.sync(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise store_error(folder, "sync", error) from error

"""A disk that loses power: what was not synced may be there, or not, or in part.

The model is the one that POSIX promises and no more. A file's bytes are safe once the file is synced; until then any
prefix may be on the disk. A name (made, linked, renamed or removed) is safe once its directory is synced; until then
each change of each directory may have reached the disk or not, in any combination. A rename is one change of a name
within a directory: the old one, the new one, or both may be seen, never none of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from fusekit.store.publishing import Disk


@dataclass
class Inode:
    data: bytes = b""
    synced: bytes | None = None  # what is safe; None: nothing, not even that it is empty


@dataclass
class Folder:
    names: dict[str, Inode] = field(default_factory=dict)  # as a running system sees it
    safe: dict[str, Inode] = field(default_factory=dict)
    pending: list[dict[str, Inode | None]] = field(default_factory=list)  # changes not synced; None: removed


class PowerDisk(Disk):
    """A `Disk` that records what would survive. `moments` counts the points at which the
    power may go; at number `stop` it goes.
    """

    def __init__(self, root: Path, stop: int | None = None) -> None:
        self.root, self.stop, self.moments = root, stop, 0
        self.folders: dict[Path, Folder] = {root: Folder()}
        self.directories: dict[Path, bool] = {root: True}  # directory -> whether its name is safe

    def moment(self) -> None:
        if self.moments == self.stop:
            raise KeyboardInterrupt
        self.moments += 1

    def make_directory(self, path: Path, at: int | None = None) -> bool:
        self.moment()
        created = super().make_directory(path, at)
        if created and path.is_relative_to(self.root):
            self.folders.setdefault(path, Folder())
            self.directories.setdefault(path, False)
        return created

    def write(self, path: Path, data: bytes, at: int | None = None) -> None:
        self.moment()
        inode = Inode(data)
        self._change(path.parent, {path.name: inode})
        self.moment()  # bytes and name are in memory, nothing is synced
        super().write(path, data, at)
        inode.synced = data
        self.moment()

    def link(self, source: Path, target: Path, at: int | None = None) -> None:
        self.moment()
        super().link(source, target, at)
        self._change(target.parent, {target.name: self.folders[source.parent].names[source.name]})

    def replace(self, source: Path, target: Path, at: int | None = None) -> None:
        self.moment()
        super().replace(source, target, at)
        inode = self.folders[source.parent].names[source.name]
        self._change(source.parent, {source.name: None, target.name: inode})

    def remove(self, path: Path, at: int | None = None) -> None:
        self.moment()
        existed = path.exists()
        super().remove(path, at)
        if existed:
            self._change(path.parent, {path.name: None})

    def sync(self, path: Path, descriptor: int | None = None) -> None:
        self.moment()
        super().sync(path, descriptor)
        if path in self.folders:
            folder = self.folders[path]
            folder.safe, folder.pending = dict(folder.names), []
            for child in self.directories:
                if child.parent == path:
                    self.directories[child] = True
        elif path.parent in self.folders:
            inode = self.folders[path.parent].names[path.name]
            inode.synced = inode.data

    def after(self, target: Path, rng: random.Random | None) -> None:
        """Write what one loss of power may leave below `target`; without `rng` the least that it must leave."""
        for path, folder in self.folders.items():
            parents = [parent for parent in (path, *path.parents) if parent in self.directories]
            if not all(self.directories[parent] or (rng is not None and rng.random() < 0.5) for parent in parents):
                continue
            folder_after = target / path.relative_to(self.root)
            folder_after.mkdir(parents=True, exist_ok=True)
            names = dict(folder.safe)
            for change in folder.pending:
                if rng is None or rng.random() < 0.5:
                    continue
                for name, inode in change.items():
                    # Of a rename that is caught half-way, both names may be seen.
                    if inode is None and (len(change) == 1 or rng.random() < 0.7):
                        names.pop(name, None)
                    elif inode is not None:
                        names[name] = inode
            for name, inode in names.items():
                data = inode.synced
                if data is None:
                    data = inode.data[: rng.randrange(len(inode.data) + 1)] if rng and inode.data else b""
                (folder_after / name).write_bytes(data)

    def _change(self, path: Path, change: dict[str, Inode | None]) -> None:
        folder = self.folders[path]
        folder.pending.append(change)
        for name, inode in change.items():
            if inode is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = inode

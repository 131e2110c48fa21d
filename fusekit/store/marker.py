"""Whether a folder is a store: the marker, a file at its root that says which format it has.

The marker is written before anything else, so that nobody can write, or collect, in a folder that is something else.
Older stores have none: they are known by what they hold, and get theirs at the next write.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from fusekit.errors import IntegrityError, NoStoreError, StoreError
from fusekit.store.documents import LIMIT, unseal
from fusekit.store.files import exists, read_file, revalidate, store_error
from fusekit.store.folders import Folders, said
from fusekit.store.layout import BLOBS, ENTRIES, MARKER, PARTS, ROOT, kind, strays, walk
from fusekit.store.publishing import Publisher

FORMAT = 1
"""Version of the layout of a store. A change by which an older fusekit would do harm raises it."""

DATA = f'{{"fusekit_store":{FORMAT}}}\n'.encode()
_MARKER_LIMIT = 4096
_TRIES = 64  # entries that are read to know a store by
# What a new file system, or one with snapshots, has at its root.
_NOT_COUNTED = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})


def check_format(root: Path, at: int | None = None) -> bool:
    """Whether the store at `root` has a marker. at: the root, open. Raises NoStoreError for one of a later format,
    IntegrityError for a file that is no marker, StoreError where it cannot be read.
    """
    path = root / MARKER
    data = read_file(path, limit=_MARKER_LIMIT, at=at)
    if data is None:
        return False
    try:
        version = json.loads(data)["fusekit_store"]
    except (ValueError, RecursionError, TypeError, KeyError):
        version = None
    if type(version) is not int or version < 1:
        raise IntegrityError(
            f"{path} is no marker of a store; it has the one line {DATA.decode().strip()}; if {root} is a store, write "
            "that line"
        )
    if version > FORMAT:
        raise NoStoreError(
            f"{root} is a store of format {version}, and this fusekit knows formats up to {FORMAT}; update fusekit, or "
            "name another store with --store or FUSEKIT_STORE",
            path=str(root),
        )
    return True


def absence(root: Path) -> str | None:
    """Why nothing can be found at `root`, in words: there is no folder, or a file, it is empty, it is something else.
    None for a store, and where that cannot be told.
    """
    try:
        if not exists(root):
            return f"there is no folder {said(root)}"
        if is_file(root):
            return f"{said(root)} is a file, and no store of fusekit"
        if check_format(root):
            return None
        folders = Folders(root)
        if is_empty(folders):
            return f"{said(root)} is empty"
        return None if is_known(folders) else f"{said(root)} is no store of fusekit"
    except (StoreError, IntegrityError):
        return None


def is_file(root: Path) -> bool:
    """Whether it is a file; not where that cannot be told."""
    return os.path.isfile(root)  # noqa: PTH113 - `Path.is_file` raises where nobody may look


def is_empty(folders: Folders) -> bool:
    """Whether a store may be made here: there is nothing, or what a file system has by itself."""
    return not _names(folders) - _NOT_COUNTED


def is_known(folders: Folders) -> bool:
    """Whether a folder without a marker is a store: an entry in it is whole, or all in it is what fusekit leaves there,
    and not cubins alone, which other stores of blobs file in the same way.
    """
    for tries, found in enumerate(each for each in walk(folders, ENTRIES) if each.kind == "file"):
        with contextlib.suppress(IntegrityError, StoreError):
            unseal(read_file(found.path, limit=LIMIT, at=found.at) or b"", found.path)
            return True
        if tries == _TRIES:
            break
    names = {name for name in _names(folders) - _NOT_COUNTED if kind(ROOT, name) != "temporary"}
    tops = {part.parts[0] for part in PARTS}
    return not names or (names <= tops and names != {BLOBS.parts[0]} and next(strays(folders), None) is None)


def admit(publisher: Publisher) -> None:
    """Make sure that the root of `publisher` is a store, or make one of an empty folder. Raises NoStoreError for any
    other.
    """
    if not check(publisher.folders):
        with publisher.folders.at() as at:
            publisher.put_new(publisher.root / MARKER, DATA, at)


def check(folders: Folders) -> bool:
    """Whether the root has a marker. Raises NoStoreError if it is neither a store nor empty."""
    root = folders.root
    with folders.at() as at:
        if check_format(root, at):
            return True
    if is_empty(folders) or is_known(folders):
        return False
    revalidate(root)  # another process may have made it a store meanwhile
    with folders.at() as at:
        if check_format(root, at):
            return True
    raise NoStoreError(
        f"{said(root)} is no store of fusekit, and not empty; nothing is written or removed there; name a store or an "
        f"empty folder with --store or FUSEKIT_STORE, or as the URL of a push, or, if it is a store, put the line "
        f"{DATA.decode().strip()} into {said(root / MARKER)}",
        path=str(root),
    )


def _names(folders: Folders) -> set[str]:
    try:
        with folders.at(listed=True) as descriptor:
            return set(os.listdir(descriptor))  # noqa: PTH208 - of an open folder
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise store_error(folders.root, "list", error) from error

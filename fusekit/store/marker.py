"""The marker: a file at the root of a store with its format.

The marker is written first, so that nothing is ever written or collected in a folder that is not a store. Older stores
have none: they are recognised by their files, and get a marker at the next write.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from fusekit.errors import IntegrityError, NoStoreError, StoreError
from fusekit.store.documents import LIMIT, unseal
from fusekit.store.files import exists, read_file, revalidate, store_error
from fusekit.store.folders import Folders, printable
from fusekit.store.layout import BLOBS, ENTRIES, MARKER, PARTS, ROOT, kind, strays, walk
from fusekit.store.publishing import Publisher

FORMAT = 1
"""Version of the layout of a store. A change by which an older fusekit would do harm raises it."""

DATA = f'{{"fusekit_store":{FORMAT}}}\n'.encode()
_MARKER_LIMIT = 4096
_TRIES = 64  # entries that are read to recognise a store
# What a new file system, or one with snapshots, has in its root folder.
_NOT_COUNTED = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})


def check_format(root: Path, at: int | None = None) -> bool:
    """Whether the store at `root` has a marker. at: the root, open. Raises NoStoreError for one of a later format,
    IntegrityError for a file that is not a marker, StoreError if it cannot be read.
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
            f"{path} is not a marker of a store, which has the one line {DATA.decode().strip()}; if {root} is a store, "
            "write that line"
        )
    if version > FORMAT:
        raise NoStoreError(
            f"{root} is a store of format {version}, and this fusekit knows formats up to {FORMAT}; update fusekit, or "
            "name another store with --store or FUSEKIT_STORE",
            path=str(root),
        )
    return True


def absence(root: Path) -> str | None:
    """Why there is no store at `root`, in words: no folder, a file, an empty folder, or something else. None for a
    store, and if that cannot be determined.
    """
    try:
        if not exists(root):
            return f"there is no folder {printable(root)}"
        if is_file(root):
            return f"{printable(root)} is a file, and no store of fusekit"
        if check_format(root):
            return None
        folders = Folders(root)
        if is_empty(folders):
            return f"{printable(root)} is empty"
        return None if is_known(folders) else f"{printable(root)} is no store of fusekit"
    except (StoreError, IntegrityError):
        return None


def is_file(root: Path) -> bool:
    """Whether `root` is a file; False if that cannot be determined."""
    return os.path.isfile(root)  # noqa: PTH113 - `Path.is_file` raises where nobody may look


def is_empty(folders: Folders) -> bool:
    """Whether a store may be created here: the folder has nothing but what a file system puts there."""
    return not _names(folders) - _NOT_COUNTED


def is_known(folders: Folders) -> bool:
    """Whether a folder without a marker is a store: it has a valid entry, or only files that fusekit writes, and not
    blobs alone, which other content-addressed stores file in the same way.
    """
    for tries, node in enumerate(node for node in walk(folders, ENTRIES) if node.kind == "file"):
        with contextlib.suppress(IntegrityError, StoreError):
            unseal(read_file(node.path, limit=LIMIT, at=node.at) or b"", node.path)
            return True
        if tries == _TRIES:
            break
    names = {name for name in _names(folders) - _NOT_COUNTED if kind(ROOT, name) != "temporary"}
    tops = {part.parts[0] for part in PARTS}
    return not names or (names <= tops and names != {BLOBS.parts[0]} and next(strays(folders), None) is None)


def admit(publisher: Publisher) -> None:
    """Check that the root of `publisher` is a store, or make an empty folder one. NoStoreError for other folders."""
    if not check(publisher.folders):
        with publisher.folders.at() as at:
            publisher.put_new(publisher.root / MARKER, DATA, at)


def check(folders: Folders) -> bool:
    """Whether the root has a marker. Raises NoStoreError if the folder is neither a store nor empty."""
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
        f"{printable(root)} is no store of fusekit, and not empty; nothing is written or removed there; name a store "
        f"or an empty folder with --store or FUSEKIT_STORE, or as the URL of a push, or, if it is a store, put the "
        f"line {DATA.decode().strip()} into {printable(root / MARKER)}",
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

"""The folders and file names of a store, and walking over them.

A file with another name, or one that is not a plain file in a plain folder, is not fusekit's: it is reported, never
opened and never removed. Folders are opened with `fusekit.store.folders`, so no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusekit.store.files import TEMPORARY_SUFFIX, store_error
from fusekit.store.folders import Folders
from fusekit.store.names import CANDIDATE, FOLDER, RECORD

_OWNER = r"[0-9a-f]{12}-[0-9]{1,10}-[0-9a-f]{12}"
_TEMPORARY = re.compile(rf"\.(.+)\.{_OWNER}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)
_CUT = 160  # characters of a name that a temporary keeps: see Publisher.temporary
_PAIR = re.compile(r"[0-9a-f]{2}")
_DIGEST = r"([0-9a-f]{2})/(\1[0-9a-f]{62})"


@dataclass(frozen=True, slots=True)
class Part:
    """A folder of a store. parts: its path; between: names of the folders between it and files, None if files are
    directly in it; ours: path, below it, of a file that fusekit writes.
    """

    parts: tuple[str, ...]
    between: re.Pattern[str] | None
    ours: re.Pattern[str]


BLOBS = Part(("blobs", "sha256"), _PAIR, re.compile(_DIGEST))
ENTRIES = Part(("entries",), _PAIR, re.compile(rf"{_DIGEST}\.json"))
NAMES = Part(("names",), FOLDER, RECORD)
CANDIDATES = Part(("candidates",), FOLDER, CANDIDATE)
SIGNATURES = Part(("signatures",), _PAIR, re.compile(rf"{_DIGEST}\.[0-9a-f]{{16}}"))
USED = Part(("used",), _PAIR, re.compile(_DIGEST))
LEASES = Part(("leases",), None, re.compile(_OWNER))
LOCKS = Part(("locks",), None, re.compile(r"[0-9a-f]{64}\.lock"))
LOCKED = Part(("locked",), None, re.compile(r"[0-9a-f]{32}\.json"))
TUNING = Part(("tuning",), None, re.compile(r"[a-z0-9_]{1,32}\.json"))
PARTS = (BLOBS, ENTRIES, NAMES, CANDIDATES, SIGNATURES, USED, LEASES, LOCKS, LOCKED, TUNING)

MARKER = "fusekit-store.json"
ROOT = Part((), None, re.compile(rf"{re.escape(MARKER)}|now"))
"""The root itself: a collection removes temporaries there, and ignores other files."""


@dataclass(slots=True)
class Node:
    """A file that a walk visits. kind: "file" or "temporary" (written by fusekit), "link" (where a folder should be) or
    "stray". at: descriptor of its open folder, valid until the walk continues. status: of files and temporaries, if
    requested.
    """

    kind: str
    path: Path
    at: int = -1
    status: os.stat_result | None = None


def walk(folders: Folders, part: Part, status: bool = False) -> Iterator[Node]:
    """The files in `part`, in no order. StoreError if a folder cannot be listed."""
    for depth in range(1, len(part.parts)):
        yield from _folder(folders, part, part.parts[:depth], status)
    yield from _folder(folders, part, part.parts, status)


def strays(folders: Folders) -> Iterator[Node]:
    """Files in the folders of a store that fusekit did not write: kinds "stray" and "link"."""
    for part in PARTS:
        yield from (node for node in walk(folders, part) if node.kind in ("stray", "link"))


def open_to_all(folders: Folders) -> list[Path]:
    """Folders of a store in which every user of the machine may write, and so add kernels."""
    writable: dict[Path, None] = {}
    below = [(), *((part.parts[:depth]) for part in PARTS for depth in range(1, len(part.parts) + 1))]
    for parts in dict.fromkeys(below):
        with contextlib.suppress(OSError), folders.at(*parts, listed=True) as at:
            path = folders.root.joinpath(*parts)
            if os.fstat(at).st_mode & stat.S_IWOTH:
                writable[path] = None
            with os.scandir(at) as listed:
                for child in listed if parts else ():
                    if child.is_dir(follow_symlinks=False) and child.stat(follow_symlinks=False).st_mode & stat.S_IWOTH:
                        writable[path / child.name] = None
    return sorted(writable)


def _folder(folders: Folders, part: Part, at: tuple[str, ...], status: bool) -> Iterator[Node]:
    """The files in the folder `at`, and below it, of the walk over `part`."""
    path = f"{folders.root}/{'/'.join(at)}"
    above = part.parts[len(at)] if len(at) < len(part.parts) else None  # the one folder that belongs here
    between = part.between if at == part.parts else None
    prefix = f"{at[-1]}/" if part.between is not None and above is None and between is None else ""
    below: list[str] = []
    try:
        with folders.at(*at, listed=True) as descriptor, os.scandir(descriptor) as listed:
            for child in listed:
                name = child.name
                if name == above:
                    continue
                if between is not None and between.fullmatch(name) and child.is_dir(follow_symlinks=False):
                    below.append(name)
                    continue
                what = "link" if between is not None and child.is_symlink() else "stray"
                if above is None and between is None and child.is_file(follow_symlinks=False):
                    what = kind(part, name, prefix)
                node = Node(what, Path(f"{path}/{name}"), descriptor)
                if status and what in ("file", "temporary"):
                    try:
                        node.status = child.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # gone since
                yield node
    except FileNotFoundError:
        return
    except NotADirectoryError:
        yield Node("stray", Path(path))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise store_error(path, "list", error) from error
        yield Node("link", Path(path))
    for name in below:
        yield from _folder(folders, part, (*at, name), status)


def kind(part: Part, name: str, prefix: str = "") -> str:
    """Kind of a plain file called `name` in the folder `prefix`/ of `part`: "file", "temporary" or "stray"."""
    if part.ours.fullmatch(prefix + name):
        return "file"
    if (match := _TEMPORARY.fullmatch(name)) and (
        part.ours.fullmatch(prefix + match[1]) or (part in (NAMES, CANDIDATES) and len(match[1]) == _CUT)
    ):
        return "temporary"
    return "stray"

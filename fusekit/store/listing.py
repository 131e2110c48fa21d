"""Searching over names, in every root of a store at once."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fusekit.errors import IntegrityError, OtherSchemaError, StoreError, is_glob
from fusekit.store import names
from fusekit.store.names import Brief, NameRecord
from fusekit.store.root import Root, first_good

T = TypeVar("T")

_PAUSES = (0.01, 0.05)  # seconds

SUMMARY = frozenset({"cubin_sha256", "bytes", "registers", "spill_bytes", "seconds", "launches", "entry_bytes"})
"""What the summary of a name record must have to be used."""


@dataclass(frozen=True, slots=True)
class NameListing:
    """A name record and the path of the root that has it."""

    record: NameRecord
    root: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """What a search over names found: good records, one for a name and architecture, and what was wrong with others."""

    names: tuple[NameListing, ...]
    problems: tuple[str, ...]


class Row(NamedTuple):  # of which a listing makes thousands, faster than dataclasses
    """A name and what it stands for. bytes: of the cubin; registers, spill_bytes: None where the entry has none;
    root: path of the one that has the name. part_of: `file/layer` of the layer of a model that it is a
    kernel of, None for others.
    """

    name: str
    arch: str
    key: str
    cubin_sha256: str
    bytes: int
    registers: int | None
    spill_bytes: int | None
    root: Path
    part_of: str | None

    @classmethod
    def of(cls, record: NameRecord | Brief, summary: Mapping[str, Any], root: Path) -> Row:
        """summary: of the entry that `record` stands for; see `Entry.summary`."""
        resources = summary["registers"], summary["spill_bytes"]
        whole = record.name.partition("@")[0].rpartition(".")[0] if names.is_of_layer(record) else None
        found = record.name, record.arch, record.key, summary["cubin_sha256"], summary["bytes"]
        return cls(*found, *resources, root, whole)


@dataclass(frozen=True, slots=True)
class Overview:
    """What the roots hold: rows by name and architecture, and what was wrong with what was left out. unlisted: whether
    that was a whole root.
    """

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    unlisted: bool = False


class _Problems(list[str]):
    unlisted = False  # whether a root could not be listed to its end


def search(roots: Sequence[Root], pattern: str, arch: str | None) -> Listing:
    """What `pattern` means: a file's stem, a kernel, a layer of a model, a full name, or a glob; sorted. Of several
    roots of the store that have a name the first one counts.
    """
    problems = _Problems()
    found = _search(roots, pattern, arch, Root.name, problems)
    return Listing(tuple(NameListing(record, root.path) for record, root in found), tuple(problems))


def recorded(root: Root, pattern: str, arch: str | None = None) -> list[tuple[str, str]]:
    """Full name and architecture of every record in `root` that `pattern` matches, damaged ones too; sorted. Reads
    none of them.
    """
    stem = pattern.partition("/")[0]
    found = []
    for folder, filename in root.name_files(None if is_glob(stem) else stem) if stem else ():
        with contextlib.suppress(IntegrityError):
            where = names.of_path(folder, filename)
            if names.matches(pattern, where[0]) and arch in (None, where[1]):
                found.append(where)
    return sorted(found)


def overview(roots: Sequence[Root], pattern: str, arch: str | None) -> Overview:
    """As `search`, with what the entries say, for people to look at: neither entries nor specs are taken apart."""
    problems = _Problems()
    rows = []
    for brief, root in _search(roots, pattern, arch, Root.brief, problems):
        try:
            told = _summary(roots, brief)
        except (IntegrityError, StoreError) as error:
            problems.append(str(error))
            continue
        if told is None:
            problems.append(f"{brief.name} for {brief.arch} stands for entry {brief.key}, which no root holds")
            continue
        rows.append(Row.of(brief, told, root.path))
    return Overview(tuple(rows), tuple(problems), problems.unlisted)


def _search(
    roots: Sequence[Root],
    pattern: str,
    arch: str | None,
    read: Callable[[Root, str, str], T | None],
    problems: _Problems,
) -> list[tuple[T, Root]]:
    for each in names.readings(pattern):
        found = _matching(roots, each, arch, read, problems)
        if found or problems:
            return found
    return []


def _matching(
    roots: Sequence[Root],
    pattern: str,
    arch: str | None,
    read: Callable[[Root, str, str], T | None],
    problems: _Problems,
) -> list[tuple[T, Root]]:
    stem, _, kernel = pattern.partition("/")
    if not is_glob(stem) and not names.is_part(stem):
        return []
    file = None if is_glob(stem) else stem
    # A folder may hold thousands of names: what cannot be meant is not even taken apart.
    exact = bool(kernel) and not is_glob(pattern)
    start = kernel + ("." if "@" in kernel else "@") if exact else re.split(r"[*?[]", kernel, maxsplit=1)[0]

    def look() -> list[tuple[T, Root]]:
        found: dict[tuple[str, str], tuple[T, Root]] = {}
        for root in roots:
            try:
                for folder, filename in root.name_files(file, start):
                    try:
                        where = names.of_path(folder, filename)
                        wanted = names.matches(pattern, where[0]) and arch in (None, where[1])
                        if wanted and where not in found and (record := read(root, *where)) is not None:
                            found[where] = record, root
                    except OtherSchemaError:
                        continue
                    except (IntegrityError, StoreError) as error:
                        problems.append(str(error))
            except StoreError as error:
                problems.append(str(error))
                problems.unlisted = True
        return [found[where] for where in sorted(found)]

    for pause in _PAUSES if exact else ():
        found = look()
        # Nothing of that name is to be seen: a collection may have it aside, to remove it or to put it back.
        if found or problems or not any(root.has_temporary_name(stem, start) for root in roots):
            return found
        time.sleep(pause)
    return look()


def _summary(roots: Sequence[Root], brief: Brief) -> Mapping[str, Any] | None:
    """The record's own copy, as long as a file of the size that the copy states lies in the entry's place; where it
    does not, or where an entry has to be signed, that itself is read. None where there is none; IntegrityError or
    StoreError where it cannot be.
    """

    def read(root: Root) -> Mapping[str, Any] | None:
        size = root.size_of_entry(brief.key)
        same = size is not None and size == brief.summary.get("entry_bytes")
        if same and brief.summary.keys() >= SUMMARY and root.trust is None:
            return brief.summary
        entry = None if size is None else root.entry(brief.key)
        return None if entry is None else entry.summary()

    return first_good(roots, read)

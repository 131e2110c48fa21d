"""Searching over names, in every root of a store at once."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fusekit.errors import IntegrityError, OtherSchemaError, SignatureError, StoreError, is_glob
from fusekit.store import names
from fusekit.store.entries import lowest_driver
from fusekit.store.files import quietly
from fusekit.store.names import Brief, NameRecord
from fusekit.store.root import Root, first_good

T = TypeVar("T")

_PAUSES = (0.01, 0.05)  # seconds

SUMMARY = frozenset({"cubin_sha256", "bytes", "registers", "spill_bytes", "seconds", "launches", "entry_bytes"})
"""Members that a summary of a name record needs to be used."""


@dataclass(frozen=True, slots=True)
class NameListing:
    """A name record and the path of the root that has it."""

    record: NameRecord
    root: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """The result of a search: good records, one for each name and architecture, and the problems of others. unsigned:
    of these, the records that no trusted key signed.
    """

    names: tuple[NameListing, ...]
    problems: tuple[str, ...]
    unsigned: tuple[str, ...] = ()


class Build(NamedTuple):
    """A build of a kernel. toolchain: label of its compiler. lowest_driver: CUDA version of the first driver that reads
    it, such as 13000. None: not recorded, by fusekit 0.1.
    """

    key: str
    cubin_sha256: str
    bytes: int
    toolchain: str | None
    lowest_driver: int | None

    @classmethod
    def of(cls, key: str, summary: Mapping[str, Any]) -> Build:
        """The build of `key`. summary: of its entry; see `Entry.summary`."""
        cubin_format = summary.get("cubin_format")
        lowest = None if cubin_format is None else lowest_driver(cubin_format)
        return cls(key, summary["cubin_sha256"], summary["bytes"], summary.get("toolchain"), lowest)


class Row(NamedTuple):  # a listing has thousands, and dataclasses are slower
    """A name and its kernel. bytes: of the cubin. registers, spill_bytes: None if the entry has none. root: path of the
    root that has the name. part_of: `file/layer` for a kernel or the record of a layer, else None. toolchain,
    lowest_driver: as in `Build`. candidates: the newest build of each other cubin format that computes the same.
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
    toolchain: str | None = None
    lowest_driver: int | None = None
    candidates: tuple[Build, ...] = ()

    @classmethod
    def of(cls, record: NameRecord | Brief, summary: Mapping[str, Any], root: Path) -> Row:
        """The row of `record`. summary: of its entry; see `Entry.summary`."""
        resources = summary["registers"], summary["spill_bytes"]
        whole = names.layer_of(record.name)
        if whole is None and names.is_of_layer(record):
            whole = record.name.partition("@")[0].rpartition(".")[0]
        kernel = record.name, record.arch, record.key, summary["cubin_sha256"], summary["bytes"]
        return cls(*kernel, *resources, root, whole, *Build.of(record.key, summary)[3:])


@dataclass(frozen=True, slots=True)
class Overview:
    """The kernels of all roots: rows by name and architecture, and problems of those that were left out. unlisted:
    whether a root could not be listed.
    """

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    unlisted: bool = False


class _Problems(list[str]):
    """unlisted: whether a root could not be listed to its end. unsigned: the problems of records without signature."""

    def __init__(self) -> None:
        super().__init__()
        self.unlisted = False
        self.unsigned: list[str] = []


def search(roots: Sequence[Root], pattern: str, arch: str | None, *, layers: bool = False) -> Listing:
    """The names that `pattern` matches: a file's stem, a kernel, a layer of a model, a full name or a glob; sorted. The
    first root that has a name counts. layers: with the records of layers.
    """
    problems = _Problems()
    records = _search(roots, pattern, arch, Root.name, problems, layers)
    listed = tuple(NameListing(record, root.path) for record, root in records)
    return Listing(listed, tuple(problems), tuple(problems.unsigned))


def recorded(root: Root, pattern: str, arch: str | None = None) -> list[tuple[str, str]]:
    """Full name and architecture of every record in `root` that `pattern` matches, damaged ones too; sorted. Reads no
    record.
    """
    stem = pattern.partition("/")[0]
    matching = []
    for folder, filename in root.name_files(None if is_glob(stem) else stem) if stem else ():
        with contextlib.suppress(IntegrityError):
            where = names.of_path(folder, filename)
            if names.matches(pattern, where[0]) and arch in (None, where[1]):
                matching.append(where)
    return sorted(matching)


def overview(roots: Sequence[Root], pattern: str, arch: str | None, *, layers: bool = False) -> Overview:
    """As `search`, with the summaries of entries, for display: neither entries nor specs are parsed."""
    problems = _Problems()
    rows = []
    for brief, root in _search(roots, pattern, arch, Root.brief, problems, layers):
        try:
            summary = _summary(roots, brief)
        except (IntegrityError, StoreError) as error:
            problems.append(str(error))
            continue
        if summary is None:
            problems.append(f"{brief.name} for {brief.arch} points to entry {brief.key}, which no root holds")
            continue
        rows.append(Row.of(brief, summary, root.path))
    if several := _several(roots, pattern):
        rows = [_with_candidates(roots, row) if (row.name, row.arch) in several else row for row in rows]
    return Overview(tuple(rows), tuple(problems), problems.unlisted)


def _several(roots: Sequence[Root], pattern: str) -> set[tuple[str, str]]:
    """Full name and architecture of each name with candidates, also where a root hides that of another."""
    stem = pattern.partition("/")[0]
    file = None if is_glob(stem) or not names.is_part(stem) else stem
    several: set[tuple[str, str]] = set()
    for root in roots:
        with contextlib.suppress(StoreError):
            for folder, filename in root.name_files(file, below="candidates"):
                with contextlib.suppress(IntegrityError):
                    several.add(names.of_candidate(folder, filename))
    return several


def _with_candidates(roots: Sequence[Root], row: Row) -> Row:
    try:
        record = first_good(roots, lambda root: root.name(row.name, row.arch))
    except (IntegrityError, StoreError):
        return row
    builds = [] if record is None else names.one_per_format(candidates(roots, record))[1:]
    summaries = [build for build in builds if build.summary.keys() >= SUMMARY]
    return row._replace(candidates=tuple(Build.of(build.key, build.summary) for build in summaries))


def candidates(roots: Sequence[Root], record: NameRecord) -> list[NameRecord]:
    """The builds of a name that compute what `record`, its last build, does, and `record` first; then those of the
    newest toolchain, and of one toolchain the last published. Builds of another spec are left out.
    """
    others: dict[str, NameRecord] = {}
    for root in roots:
        # Of the only root, the last build is `record`, or has become a candidate.
        head = quietly(root.name, record.name, record.arch) if len(roots) > 1 else None
        for candidate in ([head] if head else []) + root.candidates(record.name, record.arch, but=record.key):
            if candidate.key != record.key and not names.differences(candidate.spec, record.spec):
                others.setdefault(candidate.key, candidate)
    return [record, *names.newest(others.values())]


def _search(
    roots: Sequence[Root],
    pattern: str,
    arch: str | None,
    read: Callable[[Root, str, str], T | None],
    problems: _Problems,
    layers: bool = False,
) -> list[tuple[T, Root]]:
    for reading in names.readings(pattern):
        records = _matching(roots, reading, arch, read, problems, layers)
        if records or problems:
            return records
    return []


def _matching(
    roots: Sequence[Root],
    pattern: str,
    arch: str | None,
    read: Callable[[Root, str, str], T | None],
    problems: _Problems,
    layers: bool,
) -> list[tuple[T, Root]]:
    stem, _, kernel = pattern.partition("/")
    if not is_glob(stem) and not names.is_part(stem):
        return []
    file = None if is_glob(stem) else stem
    # A folder may hold thousands of names: those that cannot match are not parsed.
    exact = bool(kernel) and not is_glob(pattern)
    start = kernel + ("." if "@" in kernel else "@") if exact else re.split(r"[*?[]", kernel, maxsplit=1)[0]

    def look() -> list[tuple[T, Root]]:
        records: dict[tuple[str, str], tuple[T, Root]] = {}
        for root in roots:
            try:
                for folder, filename in root.name_files(file, start):
                    try:
                        where = names.of_path(folder, filename)
                        wanted = names.matches(pattern, where[0]) and arch in (None, where[1])
                        wanted = wanted and (layers or names.layer_of(where[0]) is None)
                        if wanted and where not in records and (record := read(root, *where)) is not None:
                            records[where] = record, root
                    except OtherSchemaError:
                        continue
                    except (IntegrityError, StoreError) as error:
                        problems.append(str(error))
                        if isinstance(error, SignatureError):
                            problems.unsigned.append(str(error))
            except StoreError as error:
                problems.append(str(error))
                problems.unlisted = True
        return [records[where] for where in sorted(records)]

    for pause in _PAUSES if exact else ():
        records = look()
        # If nothing has that name, a collection may have moved it aside, to remove it or to put it back.
        if records or problems or not any(root.has_temporary_name(stem, start) for root in roots):
            return records
        time.sleep(pause)
    return look()


def _summary(roots: Sequence[Root], brief: Brief) -> Mapping[str, Any] | None:
    """The summary in the record, if the entry's file has the size that it gives; otherwise, and if entries must be
    signed, that of the entry. None if there is no entry; IntegrityError or StoreError if it cannot be read.
    """

    def read(root: Root) -> Mapping[str, Any] | None:
        size = root.size_of_entry(brief.key)
        same = size is not None and size == brief.summary.get("entry_bytes")
        if same and brief.summary.keys() >= SUMMARY and root.trust is None:
            return brief.summary
        entry = None if size is None else root.entry(brief.key)
        return None if entry is None else entry.summary()

    return first_good(roots, read)

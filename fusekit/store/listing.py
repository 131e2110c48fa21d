"""Searching over names, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusekit.errors import IntegrityError, StoreError
from fusekit.store import names
from fusekit.store.layer import Layer
from fusekit.store.names import NameRecord


@dataclass(frozen=True, slots=True)
class NameListing:
    """A name record and the root of the layer it was found in."""

    record: NameRecord
    layer: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """What a search over names found: good records, one for a name and architecture, and what was wrong with others."""

    names: tuple[NameListing, ...]
    problems: tuple[str, ...]


def search(layers: Sequence[Layer], pattern: str, arch: str | None) -> Listing:
    """What `pattern` means: a file's stem, a kernel, a full name, or a glob; sorted. Of several layers that have a
    name the first one counts.
    """
    stem, _, kernel = pattern.partition("/")
    if not names.is_glob(stem) and not names.is_part(stem):
        return Listing((), ())
    file = None if names.is_glob(stem) else stem
    # A folder may hold thousands of names: what cannot be meant is not even taken apart.
    start = "" if names.is_glob(pattern) or not kernel else kernel + ("." if "@" in kernel else "@")
    found: dict[tuple[str, str], NameListing] = {}
    problems: list[str] = []
    for layer in layers:
        try:
            for folder, filename in layer.name_files(file, start):
                try:
                    where = names.of_path(folder, filename)
                    wanted = names.matches(pattern, where[0]) and arch in (None, where[1])
                    if wanted and where not in found and (record := layer.name(*where)) is not None:
                        found[where] = NameListing(record, layer.root)
                except (IntegrityError, StoreError) as error:
                    problems.append(str(error))
        except StoreError as error:
            problems.append(str(error))
    return Listing(tuple(found[where] for where in sorted(found)), tuple(problems))


def summary(layers: Sequence[Layer], record: NameRecord) -> dict[str, Any] | None:
    """What a listing shows of the entry that `record` stands for; None when no layer has that entry.

    The record's own copy, as long as a file of the size that the copy states lies in the entry's place; where it does
    not, the entry itself is read. Raises IntegrityError or StoreError when it cannot be.
    """
    problem: IntegrityError | StoreError | None = None
    for layer in layers:
        try:
            size = layer.size_of_entry(record.key)
            if size is not None and size == record.summary.get("entry_bytes"):
                return dict(record.summary)
            if size is not None and (entry := layer.entry(record.key)) is not None:
                return entry.summary()
        except (IntegrityError, StoreError) as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None

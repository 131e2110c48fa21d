"""The reports of a collection and of a removal."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Evicted:
    """An evicted entry. names: paths of its name records below `names` or `candidates`. bytes: freed with it. idle:
    seconds since its last use. reason: "age" or "size".
    """

    key: str
    names: tuple[str, ...]
    bytes: int
    idle: float
    reason: str


@dataclass(slots=True)
class CollectReport:
    """What a collection removed, or with `dry_run` would remove.

    removed, kept: numbers of entries. freed_bytes, kept_bytes: of all files. evicted: each removed entry. orphans:
    number of removed cubins that no entry mentions; temporaries, locks, signatures, marks (of no entry), leases:
    numbers of removed files. files: path below the root of every removed file. in_use: entries that policy would have
    evicted, but that are in use. strays: paths of files that are not fusekit's, which stay. unread: paths of documents
    that could not be read, so that what they may need stays. notes: what was not done, and why.
    """

    dry_run: bool
    removed: int = 0
    kept: int = 0
    freed_bytes: int = 0
    kept_bytes: int = 0
    orphans: int = 0
    temporaries: int = 0
    locks: int = 0
    signatures: int = 0
    marks: int = 0
    leases: int = 0
    in_use: int = 0
    evicted: list[Evicted] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DiscardReport:
    """Which names were removed, or with `dry_run` would be, and the files removed with them.

    names: (full name, architecture) of each. missing: names that are gone, or were replaced meanwhile. without_entry:
    names that pointed to no entry, or could not be read. shared: key -> the names that still point to its entry, which
    stays. in_use: keys of entries without a name that a build or a launch uses; a later collection removes them.
    may_be_needed: keys of entries that stay because a name that could not be read may point to them. cubins: number of
    cubins that stay because an entry that could not be read may need them. unread: paths of those documents. entries:
    number of removed entries. freed_bytes: of all files.
    """

    dry_run: bool
    names: list[tuple[str, str]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    shared: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    without_entry: list[tuple[str, str]] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    may_be_needed: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    cubins: int = 0
    entries: int = 0
    freed_bytes: int = 0

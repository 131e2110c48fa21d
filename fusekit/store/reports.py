"""What a collection and a removal say that they did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Evicted:
    """One entry that went. names: paths of its name records below the store; bytes: freed with it; idle: seconds
    since it was used; reason: "age" or "size".
    """

    key: str
    names: tuple[str, ...]
    bytes: int
    idle: float
    reason: str


@dataclass(slots=True)
class CollectReport:
    """What was done, or with `dry_run` would be.

    removed, kept: entries; freed_bytes, kept_bytes: of all files. evicted: each entry that went. orphans: cubins that
    no entry mentioned; temporaries, locks, signatures, marks (of no entry), leases: files. files: path below the store
    of every file that went. in_use: entries that policy would have evicted, but that are in use. strays: paths of what
    is not fusekit's, and was left alone. unread: paths of documents that could not be read, so that what they may need
    was left. notes: what was left undone, and why.
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
    """Which names were removed, or with `dry_run` would be, and what went with them.

    names: (full name, architecture). missing: those that are gone, or were replaced meanwhile. without_entry: those
    that stood for no entry that is there, or that could not be read. shared: key -> the names that still stand for its
    entry, so that it stays. in_use: keys of entries that no name stands for now and that a build or a launch uses: they
    stay for a collection. may_be_needed: keys of entries that stay because a name that could not be read may stand for
    them; cubins: how many stay because an entry that could not be read may need them; unread: paths of both. entries:
    that went. freed_bytes: of all files.
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

"""Selections: the name records, entries and signatures that leave a store together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusekit.errors import IntegrityError
from fusekit.store import names
from fusekit.store.entries import Entry
from fusekit.store.keys import sha256
from fusekit.store.names import NameRecord
from fusekit.store.store import Store


@dataclass(frozen=True, slots=True)
class Signed:
    """The exact bytes of a document, and the signatures over them, by key id."""

    data: bytes
    signatures: dict[str, bytes]

    @property
    def digest(self) -> str:
        return sha256(self.data)


@dataclass(frozen=True, slots=True)
class Step:
    """A name that is copied, or whose entry is. bytes: copied for it; the first name of an entry counts its bytes."""

    name: str
    arch: str
    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents to copy, each once. records: sorted by name and architecture. entries: sorted by key. candidates: of
    each name the newest build of each other cubin format that computes the same, sorted by name, architecture and key.
    left_out: why names are not in it that no trusted key signed.
    """

    records: tuple[tuple[NameRecord, Signed], ...]
    entries: tuple[tuple[Entry, Signed], ...]
    candidates: tuple[tuple[NameRecord, Signed], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def documents(self) -> tuple[Signed, ...]:
        """All of them."""
        return tuple(signed for _, signed in (*self.entries, *self.candidates, *self.records))

    def signed(self, store: Store) -> Selection:
        """The same, with the signatures of `store`'s signing key, if it has one, added."""
        return replace(
            self,
            records=tuple((record, _sign(store, "name", signed)) for record, signed in self.records),
            entries=tuple((entry, _sign(store, "entry", signed)) for entry, signed in self.entries),
            candidates=tuple((record, _sign(store, "name", signed)) for record, signed in self.candidates),
        )


def select(store: Store, patterns: Sequence[str] = (), arch: str | None = None) -> Selection:
    """The kernels of all roots of `store` that match `patterns` (names, files or globs), checked. Without patterns:
    everything, but where keys are trusted, what none of them signed is left out, unless nothing else is there.

    Raises NotBuiltError for a pattern without a match, IntegrityError if any file is damaged.
    """
    records: dict[tuple[str, str], NameRecord] = {}
    left_out: tuple[str, ...] = ()
    for pattern in patterns or ("*",):
        listing = store.listing(pattern, arch, layers=True)
        if not patterns and listing.names and listing.problems == listing.unsigned:
            left_out = listing.unsigned
        elif listing.problems:
            raise IntegrityError(f"{listing.problems[0]} ({len(listing.problems)} such; `fusekit verify` lists them)")
        if not listing.names and patterns:
            raise store.not_built(pattern, arch)
        records.update({(listed.record.name, listed.record.arch): listed.record for listed in listing.names})
    others = [build for record in records.values() for build in names.one_per_format(store.candidates(record))[1:]]
    entries: dict[str, Entry] = {}
    for record in (*records.values(), *others):
        for key in (record.key, *store.kernels_of(record)):
            if key not in entries:
                entry = store.find_entry(key)
                if entry is None:
                    raise IntegrityError(
                        f"{record.name} for {record.arch} points to entry {key}, which no root holds; a name "
                        "comes after its entry; build it again",
                        key=key,
                    )
                entries[key] = entry
    return Selection(
        tuple((records[where], _signed(store, records[where].to_bytes())) for where in sorted(records)),
        tuple((entries[key], _signed(store, entries[key].to_bytes())) for key in sorted(entries)),
        tuple((build, _signed(store, build.to_bytes())) for build in sorted(others, key=candidate_order)),
        left_out,
    )


def candidate_order(record: NameRecord) -> tuple[str, str, str]:
    """The order of candidates in a selection and in a bundle."""
    return record.name, record.arch, record.key[:12]


def sign_selection(store: Store, selection: Selection) -> None:
    """Check each cubin, then publish signatures of `store`'s signing key over every document of `selection`."""
    for entry, _ in selection.entries:
        store.read_cubin(entry)
    signed = selection.signed(store)
    for document in signed.documents:
        store.publish_signatures(document.data, document.signatures)


def sign_tuning(store: Store, check: Callable[[bytes, str, str], None], arch: str | None = None) -> list[str]:
    """Publish signatures of `store`'s signing key over its tuning tables (of `arch`, or all), after `check` has passed
    each; returns their architectures.
    """
    root, signer = store.roots[0], store.signer
    tables = {tuned: root.tuning(tuned) or b"" for tuned in root.tuned() if arch in (None, tuned)}
    for tuned, data in tables.items():
        check(data, str(root.tuning_path(tuned)), tuned)
    for data in tables.values():
        store.publish_signatures(data, {} if signer is None else signer.sign("tuning", data))
    return list(tables)


def _signed(store: Store, data: bytes) -> Signed:
    return Signed(data, store.signatures(data))


def _sign(store: Store, kind: str, signed: Signed) -> Signed:
    added = {} if store.signer is None else store.signer.sign(kind, signed.data)
    return replace(signed, signatures=dict(sorted((signed.signatures | added).items())))

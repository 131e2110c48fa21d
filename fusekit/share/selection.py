"""What is taken along when kernels leave a store: name records, their entries and cubins, and the signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusekit.errors import IntegrityError
from fusekit.store.entries import Entry
from fusekit.store.keys import sha256
from fusekit.store.names import NameRecord
from fusekit.store.store import Store


@dataclass(frozen=True, slots=True)
class Signed:
    """A document as it lies in a store: its exact bytes and what is signed over them, by key id."""

    data: bytes
    signatures: dict[str, bytes]

    @property
    def digest(self) -> str:
        return sha256(self.data)


@dataclass(frozen=True, slots=True)
class Step:
    """One name that moves, or whose entry does. bytes: of what moves for it; the first name of an entry has all."""

    name: str
    arch: str
    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents to carry on. records: in the order of names and architectures; entries: of keys; each once."""

    records: tuple[tuple[NameRecord, Signed], ...]
    entries: tuple[tuple[Entry, Signed], ...]

    def signed(self, store: Store) -> Selection:
        """The same, with the signature of `store`'s own key, if it has one, beside those that are there."""
        return Selection(
            tuple((record, _sign(store, "name", signed)) for record, signed in self.records),
            tuple((entry, _sign(store, "entry", signed)) for entry, signed in self.entries),
        )


def select(store: Store, patterns: Sequence[str] = (), arch: str | None = None) -> Selection:
    """What `patterns` (names, files or globs; none: everything) mean in `store`, every root, checked.

    Raises NotBuiltError for a pattern that means nothing there, IntegrityError for anything that is damaged: what is
    carried on is whole or not carried.
    """
    records: dict[tuple[str, str], NameRecord] = {}
    for pattern in patterns or ("*",):
        listing = store.listing(pattern, arch)
        if listing.problems:
            raise IntegrityError(f"{listing.problems[0]} ({len(listing.problems)} such; `fusekit verify` lists them)")
        if not listing.names and patterns:
            raise store.not_built(pattern, arch)
        records.update({(found.record.name, found.record.arch): found.record for found in listing.names})
    entries: dict[str, Entry] = {}
    for record in records.values():
        if record.key not in entries:
            entry = store.find_entry(record.key)
            if entry is None:
                raise IntegrityError(
                    f"{record.name} for {record.arch} stands for entry {record.key}, which no root holds; a name "
                    "comes after its entry; build it again",
                    key=record.key,
                )
            entries[record.key] = entry
    return Selection(
        tuple((records[where], _signed(store, records[where].to_bytes())) for where in sorted(records)),
        tuple((entries[key], _signed(store, entries[key].to_bytes())) for key in sorted(entries)),
    )


def sign_selection(store: Store, selection: Selection) -> None:
    """Publish the signature of `store`'s own key over every document of `selection`, once each cubin is checked."""
    for entry, _ in selection.entries:
        store.read_cubin(entry)
    signed = selection.signed(store)
    for _, document in (*signed.entries, *signed.records):
        store.publish_signatures(document.data, document.signatures)


def sign_tuning(store: Store, check: Callable[[bytes, str, str], None], arch: str | None = None) -> list[str]:
    """Publish the signature of `store`'s own key over its tuning tables (of `arch`, or all), once `check` has passed
    each; their architectures.
    """
    own, signer = store.roots[0], store.signer
    tables = {each: own.tuning(each) or b"" for each in own.tuned() if arch in (None, each)}
    for each, data in tables.items():
        check(data, str(own.tuning_path(each)), each)
    for data in tables.values():
        store.publish_signatures(data, {} if signer is None else signer.sign("tuning", data))
    return list(tables)


def _signed(store: Store, data: bytes) -> Signed:
    return Signed(data, store.signatures(data))


def _sign(store: Store, kind: str, signed: Signed) -> Signed:
    own = {} if store.signer is None else store.signer.sign(kind, signed.data)
    return replace(signed, signatures=dict(sorted((signed.signatures | own).items())))

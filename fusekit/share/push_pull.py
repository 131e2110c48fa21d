"""`push` and `pull`: copy what the other side lacks. See `fusekit.share.remote`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from fusekit.errors import FusekitError, IntegrityError, NotBuiltError
from fusekit.share.remote import Remote
from fusekit.share.selection import Selection, Signed
from fusekit.share.transfer import Notify, Progress, Report, Task, check_form, raised, twice
from fusekit.store import names
from fusekit.store.documents import LIMIT
from fusekit.store.entries import Entry
from fusekit.store.keys import sha256
from fusekit.store.names import NameRecord
from fusekit.store.root import RELATIVE
from fusekit.store.signature import Trust
from fusekit.store.store import Store
from fusekit.store.verify import Inspect

__all__ = ["Notify", "Progress", "Report", "Survey", "fetch", "pull", "push", "survey"]


def push(
    store: Store,
    selection: Selection,
    remote: Remote,
    full: bool = False,
    notify: Notify | None = None,
    *,
    dry_run: bool = False,
) -> Report:
    """Copy what `remote` lacks of `selection` to it, signed with the store's signing key, if it has one.

    An entry that is there with its cubin is kept. Without `full` it counts as whole if the sizes fit; with `full` all
    bytes there are read and checked, and damaged files are replaced. dry_run: nothing is written. Raises NoStoreError
    for a folder that is neither empty nor a store, StoreError if the remote fails.
    """
    return _Push(store, selection.signed(store), remote, full, notify, dry_run).run()


def pull(
    store: Store,
    remote: Remote,
    patterns: Sequence[str] = (),
    arch: str | None = None,
    notify: Notify | None = None,
    *,
    inspect: Inspect | None = None,
    dry_run: bool = False,
) -> Report:
    """Copy what the writable root lacks of `patterns` (names, files, globs; none: everything) from `remote`.

    Each entry is checked and published with its cubin as it arrives; names come last. What is damaged or not trusted,
    or refused by `inspect`, is listed in `Report.failed`, and the rest is copied. dry_run: only name records are read,
    and nothing is written. Raises NotBuiltError for a pattern without a match, StoreError if the remote or the store
    fails.
    """
    return _Pull(store, remote, notify, inspect).run(patterns, arch, dry_run)


def fetch(store: Store, remote: Remote, key: str) -> tuple[Entry, bytes, dict[str, bytes]] | None:
    """The entry of `key` of `remote` with its blob and signatures, checked as `store` requires; None if it is not
    there. Nothing is written. Raises IntegrityError if it is damaged or not trusted, StoreError if the remote fails.
    """
    reader = Reading(store.trust, remote, None, None)
    try:
        entry, _, signatures = reader.entry(key)
    except _AbsentError:
        return None
    return entry, reader.cubin(entry), signatures


class _AbsentError(IntegrityError):
    """The remote has no entry of a key."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The checked content of a remote. records: sorted by name and architecture. entries: by key. cubins: how many were
    checked. failed: (name, key or "", why) of what was refused.
    """

    records: tuple[NameRecord, ...]
    entries: Mapping[str, Entry]
    cubins: int = 0
    failed: tuple[tuple[str, str, str], ...] = ()


def survey(
    remote: Remote,
    trust: Trust | None = None,
    patterns: Sequence[str] = (),
    arch: str | None = None,
    *,
    entries: bool = False,
    cubins: bool | None = None,
    inspect: Inspect | None = None,
) -> Survey:
    """The name records of `remote` that match `patterns` (none: everything), and with `entries` their entries, checked
    as by `pull`. cubins: False checks that each cubin is there with its size (with its digest, if the server does not
    list); True checks digests. Writes nothing. Errors as for `pull`.
    """
    reader = Reading(trust, remote, None, inspect)
    matching = reader.records(patterns, arch)
    records = tuple(matching[where][0] for where in sorted(matching))
    failed = [(name, "", why) for name, why in reader.report.failed]
    good: dict[str, Entry] = {}
    sizes = remote.sizes("blobs") if cubins is False else {}

    def look(key: str) -> Entry:
        def take() -> Entry:
            entry = reader.entry(key)[0]
            if sizes:
                reader.check_size(entry, sizes)
            elif cubins is not None:  # a server that does not list gives no sizes
                reader.cubin(entry)
            return entry

        return twice(take)

    keys = sorted({record.key for record in records}) if entries or cubins is not None else []
    for key, outcome in reader.each(keys, look):
        if isinstance(outcome, FusekitError):
            failed += [(record.name, key, str(outcome)) for record in records if record.key == key]
        else:
            good[key] = outcome
    checked = {entry.cubin_sha256 for entry in good.values()} if cubins is not None else ()
    return Survey(records, good, len(checked), tuple(failed))


class _Push(Task):
    def __init__(
        self, store: Store, selection: Selection, remote: Remote, full: bool, notify: Notify | None, dry_run: bool
    ) -> None:
        super().__init__(store.trust, remote, notify)
        self.store = store
        self._selection = selection
        self._full = full
        self._write = (lambda path, data: None) if dry_run else remote.write
        self._sizes: dict[str, int | None] = {}

    def run(self) -> Report:
        self.remote.admit()
        self._sizes = self.list_signatures()
        for folder in ("blobs", "entries", "candidates", "names"):
            self._sizes |= self.remote.sizes(folder)
        entries, records, candidates = self._selection.entries, self._selection.records, self._selection.candidates
        total = len(entries) + len(candidates) + len(records)
        self.notify(0, total)
        done = 0
        for (entry, _), outcome in self.each(entries, lambda item: self._entry(*item)):
            done += 1
            self.count_entry(entry.key, raised(outcome))
            self.notify(done, total, entry.key[:12])
        for (record, _), outcome in self.each(candidates, lambda item: self._candidate(*item)):
            done += 1
            self.report.bytes += raised(outcome)
            self.notify(done, total, record.name)
        for (record, _), outcome in self.each(records, lambda item: self._last(*item)):
            done += 1
            moved = raised(outcome)
            self.report.bytes += moved
            self.count_name(record, moved > 0, moved)
            self.notify(done, total, record.name)
        self.report.steps.sort(key=lambda step: (step.name, step.arch))
        return self.report

    def _entry(self, entry: Entry, signed: Signed) -> int:
        """Bytes that were copied; 0 if the remote has it."""
        path = RELATIVE.entry_path(entry.key).as_posix()
        if path in self._sizes and self._is_whole(entry, signed, path):
            return 0
        moved = self._blob(entry)
        self._sign(signed)
        self._write(path, signed.data)
        return moved + len(signed.data)

    def _is_whole(self, entry: Entry, signed: Signed, path: str) -> bool:
        """Whether the entry that is there is whole. It may be of another build."""
        same_size = self._sizes[path] == len(signed.data)
        if same_size and not self._full and not signed.signatures:
            return self._has_size(RELATIVE.blob_path(entry.cubin_sha256).as_posix(), entry.cubin_bytes)
        try:
            document = self.document("entry", path)
            if document is None:
                return False
            theirs = Entry.from_bytes(document[0], self.remote.at(path), entry.key)
            if not self._whole_blob(theirs):
                return False
        except IntegrityError:
            return False
        if signed.signatures:
            # What this store signs must be there with its signature: it is added to the same bytes. Other bytes are
            # replaced, unless a key that this store trusts has signed them.
            if document[0] == signed.data:
                self._sign(signed)
            elif self.trust is None:
                return False
        return True

    def _whole_blob(self, entry: Entry) -> bool:
        path = RELATIVE.blob_path(entry.cubin_sha256).as_posix()
        if not self._full:
            return self._has_size(path, entry.cubin_bytes)
        data = self.remote.read(path, limit=entry.cubin_bytes, exactly=entry.cubin_bytes)
        return data is not None and sha256(data) == entry.cubin_sha256

    def _has_size(self, path: str, size: int) -> bool:
        return path in self._sizes and self._sizes[path] in (size, None)

    def _blob(self, entry: Entry) -> int:
        try:
            if self._whole_blob(entry):
                return 0
        except IntegrityError:
            pass  # of another size: replaced
        self._write(RELATIVE.blob_path(entry.cubin_sha256).as_posix(), self.store.read_cubin(entry))
        return entry.cubin_bytes

    def _sign(self, signed: Signed) -> None:
        for key_id, signature in signed.signatures.items():
            path = RELATIVE.signature_path(signed.digest, key_id).as_posix()
            if self._full or not self._has_size(path, len(signature)):
                self._write(path, signature)

    def _candidate(self, record: NameRecord, signed: Signed) -> int:
        return self._name(record, signed, names.candidate_path(record.name, record.arch, record.key))

    def _last(self, record: NameRecord, signed: Signed) -> int:
        """As `_name`; what the name pointed to there before, and a puller may need, stays a candidate."""
        path = RELATIVE.name_path(record.name, record.arch).as_posix()
        moved = 0
        if path in self._sizes:
            with suppress(IntegrityError):
                data = self.remote.read(path, limit=LIMIT)
                before = data and NameRecord.from_bytes(data, self.remote.at(path), record.name, record.arch)
                if data and before and before.key != record.key:
                    self._write(names.candidate_path(record.name, record.arch, before.key), data)
                    moved = len(data) + self._candidate(record, signed)
        return moved + self._name(record, signed, path)

    def _name(self, record: NameRecord, signed: Signed, path: str) -> int:
        if path in self._sizes and self._is_current(path, record, signed):
            self._sign(signed)
            return 0
        self._sign(signed)
        self._write(path, signed.data)
        return len(signed.data)

    def _is_current(self, path: str, record: NameRecord, signed: Signed) -> bool:
        """Whether the record that is there is this one. Its summary may be of another build."""
        try:
            data = self.remote.read(path, limit=LIMIT)
            if data is None or data == signed.data:
                return data is not None
            theirs = NameRecord.from_bytes(data, self.remote.at(path), record.name, record.arch)
        except IntegrityError:
            return False
        return theirs == record and not signed.signatures


class Reading(Task):
    """Reads and checks documents and cubins of a remote."""

    def __init__(self, trust: Trust | None, remote: Remote, notify: Notify | None, inspect: Inspect | None) -> None:
        super().__init__(trust, remote, notify)
        self.inspect = inspect

    def records(
        self, patterns: Sequence[str], arch: str | None
    ) -> dict[tuple[str, str], tuple[NameRecord, dict[str, bytes]]]:
        """The good name records that `patterns` match, with their signatures; problems go into the report."""
        wanted = self._wanted(patterns, arch)
        self.list_signatures()
        self.notify(0, len(wanted))
        records: dict[tuple[str, str], tuple[NameRecord, dict[str, bytes]]] = {}
        paths = [(where, RELATIVE.name_path(*where).as_posix()) for where in wanted]
        for (where, _), outcome in self.each(paths, lambda item: self._record(*item)):
            if isinstance(outcome, FusekitError):
                self.report.failed.append((where[0], str(outcome)))
            else:
                records[where] = outcome
        return records

    def _wanted(self, patterns: Sequence[str], arch: str | None) -> list[tuple[str, str]]:
        listed: set[tuple[str, str]] = set()
        for folder in _folders("names", patterns):
            for path in self.remote.sizes(folder):
                try:
                    listed.add(names.of_path(*path.removeprefix("names/").split("/", 1)))
                except (IntegrityError, TypeError):
                    continue  # not a name record
        wanted: set[tuple[str, str]] = set()
        archs: dict[str, set[str]] = {}
        for name, its_arch in listed:
            archs.setdefault(name, set()).add(its_arch)
        for pattern in patterns or ("*",):
            # Full names may be thousands: each is looked up.
            matching = [pattern] if names.is_full(pattern) else names.matching(pattern, archs)
            chosen = {(name, other) for name in matching for other in archs.get(name, ()) if arch in (None, other)}
            if not chosen and names.is_full(pattern) and arch is not None:
                chosen = {(pattern, arch)}  # a server that does not list is asked by name
            if not chosen:
                raise self._absent(pattern if patterns else "", arch)
            wanted |= chosen
        return sorted(wanted)

    def candidates(
        self, patterns: Sequence[str], last: Mapping[tuple[str, str], tuple[NameRecord, dict[str, bytes]]]
    ) -> list[tuple[NameRecord, dict[str, bytes]]]:
        """The newest candidate of each name in `last`, of each other cubin format, that computes the same, with its
        signatures; problems go into the report.
        """
        listed = []
        for folder in _folders("candidates", patterns):
            for path in sorted(self.remote.sizes(folder)):
                with suppress(IntegrityError, TypeError):
                    where = names.of_candidate(*path.removeprefix("candidates/").split("/", 1))
                    if where in last:
                        listed.append((where, path))
        candidates: dict[tuple[str, str], list[tuple[NameRecord, dict[str, bytes]]]] = {}
        for (where, _), outcome in self.each(listed, lambda item: self._record(*item)):
            if isinstance(outcome, FusekitError):
                self.report.failed.append((where[0], str(outcome)))
            elif not names.differences(outcome[0].spec, last[where][0].spec):
                candidates.setdefault(where, []).append(outcome)
        chosen = []
        for where, builds in sorted(candidates.items()):
            signatures = {record.key: signed for record, signed in builds}
            by_key = sorted((record for record, _ in builds), key=lambda record: record.key)
            kept = names.one_per_format([last[where][0], *names.newest(by_key)])[1:]
            chosen += [(record, signatures[record.key]) for record in kept]
        return chosen

    def _absent(self, pattern: str, arch: str | None) -> NotBuiltError:
        what = f"'{pattern}'" if pattern else "any kernel"
        what += f" for {arch}" if arch else ""
        return NotBuiltError(
            f"{self.remote.url} does not list {what}; a remote is what `fusekit push` filled, and a server that lists "
            "nothing is asked with a full name and --arch; check the URL and the name",
            name=pattern,
        )

    def record_at(self, where: tuple[str, str], path: str) -> tuple[NameRecord, dict[str, bytes]] | None:
        """The record of a name at `path`, with its signatures; None if there is none."""
        try:
            return self._record(where, path)
        except NotBuiltError:
            return None

    def _record(self, where: tuple[str, str], path: str) -> tuple[NameRecord, dict[str, bytes]]:
        def take() -> tuple[NameRecord, dict[str, bytes]]:
            document = self.document("name", path)
            if document is None:
                raise self._absent(*where)
            record = NameRecord.from_bytes(document[0], self.remote.at(path), *where)
            check_form(record.to_bytes(), document[0], self.remote.at(path))
            if self.inspect is not None:
                self.inspect.name(record)
            return record, document[1]

        return twice(take)

    def entry(self, key: str) -> tuple[Entry, int, dict[str, bytes]]:
        """The entry of `key`, its size in bytes and its signatures; IntegrityError if it is damaged."""
        path = RELATIVE.entry_path(key).as_posix()
        document = self.document("entry", path)
        if document is None:
            raise _AbsentError(f"{self.remote.at(path)} is missing, and a name there points to it; push it again")
        data, signatures = document
        entry = Entry.from_bytes(data, self.remote.at(path), key)
        check_form(entry.to_bytes(), data, self.remote.at(path))
        if self.inspect is not None:
            self.inspect.entry(entry, None)
        return entry, len(data), signatures

    def cubin(self, entry: Entry) -> bytes:
        """The cubin of `entry`; IntegrityError if it is damaged."""
        blob = RELATIVE.blob_path(entry.cubin_sha256).as_posix()
        cubin = self.remote.read(blob, limit=entry.cubin_bytes, exactly=entry.cubin_bytes)
        if cubin is None or sha256(cubin) != entry.cubin_sha256:
            what = "is missing" if cubin is None else f"has the digest {sha256(cubin)}, not that of its name"
            raise self._broken(blob, what)
        if self.inspect is not None:
            self.inspect.entry(entry, cubin)
        return cubin

    def check_size(self, entry: Entry, sizes: Mapping[str, int | None]) -> None:
        """Raises IntegrityError if the cubin of `entry` is not in `sizes`, those of all cubins, or has another size."""
        blob = RELATIVE.blob_path(entry.cubin_sha256).as_posix()
        if sizes.get(blob, -1) not in (None, entry.cubin_bytes):
            problem = f"has {sizes[blob]} bytes, not {entry.cubin_bytes}" if blob in sizes else "is missing"
            raise self._broken(blob, problem)

    def _broken(self, blob: str, what: str) -> IntegrityError:
        return IntegrityError(f"{self.remote.at(blob)} {what}; push it again with --full from a whole store")


def _folders(top: str, patterns: Sequence[str]) -> list[str]:
    """The folders of records below `top` that `patterns` need: without a glob, only those of their files."""
    stems = {pattern.partition("/")[0] for pattern in patterns}
    return [f"{top}/{stem}" for stem in sorted(stems)] if stems and all(map(names.is_part, stems)) else [top]


class _Pull(Reading):
    def __init__(self, store: Store, remote: Remote, notify: Notify | None, inspect: Inspect | None) -> None:
        super().__init__(store.trust, remote, notify, inspect)
        self.store = store.writable()  # kernels of a root below are copied, too

    def run(self, patterns: Sequence[str], arch: str | None, dry_run: bool) -> Report:
        records = self.records(patterns, arch)
        others = self.candidates(patterns, records)
        with nullcontext() if dry_run else self.store.lease(make=False):
            return self._take(records, others, dry_run)

    def _take(
        self,
        records: Mapping[tuple[str, str], tuple[NameRecord, dict[str, bytes]]],
        candidates: Sequence[tuple[NameRecord, dict[str, bytes]]],
        dry_run: bool,
    ) -> Report:
        summaries = {record.key: record for record, _ in (*candidates, *records.values())}
        keys, done = sorted(summaries), 0
        total = len(keys) + len(records)
        refused: set[str] = set()
        for key, moved in self.each(keys, lambda key: self._missing(summaries[key]) if dry_run else self._entry(key)):
            done += 1
            if isinstance(moved, FusekitError):
                refused.add(key)
                wanting = (record for record, _ in (*candidates, *records.values()) if record.key == key)
                self.report.failed += [(record.name, str(moved)) for record in wanting]
            else:
                self.count_entry(key, moved)
            self.notify(done, total, key[:12])
        for record, signatures in candidates:
            if record.key not in refused and not dry_run:
                self.store.publish_candidate(record, signatures)
        for where in sorted(records):
            record, signatures = records[where]
            done += 1
            if record.key not in refused:
                self._publish_name(record, signatures, dry_run)
            self.notify(done, total, record.name)
        self.report.failed.sort()
        if not dry_run:
            logging.getLogger("fusekit").info(
                "downloaded %d kernels, %d bytes, from %s into %s; there already: %d, refused: %d",
                self.report.entries, self.report.bytes, self.remote.url, self.store.root, self.report.skipped,
                len(self.report.failed),
            )  # fmt: skip
        return self.report

    def wait(self) -> None:
        self.store.renew()

    def _entry(self, key: str) -> int:
        """Bytes that were copied; 0 if the store has it."""
        if (present := self.store.present(key)) is not None:
            if self.inspect is not None:
                self.inspect.entry(present, None)
            return 0

        def take() -> int:
            entry, size, signatures = self.entry(key)
            cubin = self.cubin(entry)
            self.store.publish(entry, cubin, signatures)
            return size + len(cubin)

        return twice(take)

    def _missing(self, record: NameRecord) -> int:
        """Bytes that would be copied for the entry of `record`."""
        if self.store.present(record.key, mark=False) is not None:
            return 0
        summary = record.summary
        if {"bytes", "entry_bytes"} <= summary.keys():
            return int(summary["bytes"]) + int(summary["entry_bytes"])
        entry, size, _ = self.entry(record.key)
        return size + entry.cubin_bytes

    def _publish_name(self, record: NameRecord, signatures: dict[str, bytes], dry_run: bool) -> None:
        try:
            changed = self.store.roots[0].name(record.name, record.arch) != record
        except IntegrityError:
            changed = True
        if not dry_run:
            self.store.publish_name(record, signatures=signatures)
        self.count_name(record, changed)

"""`sync`: a store holds what a lock lists, from its roots and from remotes.

Entries are published as they come, names only when every entry is there: until then readers see what they saw before.
A sync that is stopped is continued by the next one, which finds what is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusekit.errors import FusekitError, IntegrityError, StoreError
from fusekit.share.push_pull import Reading
from fusekit.share.transfer import Notify, twice
from fusekit.store import names
from fusekit.store.files import quietly
from fusekit.store.lockfile import Build, Lock, Where
from fusekit.store.root import RELATIVE, Root
from fusekit.store.verify import Inspect

if TYPE_CHECKING:
    from fusekit.share.remote import Remote
    from fusekit.store import Entry, NameRecord, Store

Signed = tuple["NameRecord", dict[str, bytes] | None]
"""A record and the signatures over it; None: to be signed here."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a build is, or came from. bytes: copied."""

    name: str
    arch: str
    toolchain: str
    key: str
    origin: str
    bytes: int


@dataclass(slots=True)
class SyncReport:
    """sources: of every build that is there. missing: (name and architecture, build) of those that nothing has. names:
    how many now point to another build. problems: what a remote refused or had damaged, in words.
    """

    sources: list[Source] = field(default_factory=list)
    missing: list[tuple[Where, Build]] = field(default_factory=list)
    names: int = 0
    problems: list[str] = field(default_factory=list)


def sync(
    store: Store, lock: Lock, remotes: Mapping[str, Remote], inspect: Inspect, notify: Notify | None = None,
    compile: Callable[[Sequence[tuple[Where, Build]]], Mapping[str, str]] = lambda missing: {},
    records: Callable[[], Mapping[tuple[Where, str], NameRecord]] = dict, *, dry_run: bool = False,
) -> SyncReport:  # fmt: skip
    """Make the writable root of `store`, over its read-only roots, hold every build of `lock`, and no name of it point
    to another one.

    remotes: by name, asked in their order for what is missing. inspect: checks documents; the lock's checks are added.
    compile: publishes builds that no remote has, without names, and returns key -> its origin. records: by name,
    architecture and key, for builds that were compiled here. No name is published unless all is there.

    Raises IntegrityError for a lock that has expired or is older than one that was used here, and for a store that has
    another build of a listed key.
    """
    lock.check_current()
    store.remember(lock, write=not dry_run)
    with nullcontext() if dry_run else store.lease():
        return _Sync(store, lock, inspect, dry_run).run(remotes, notify, compile, records)


class _Sync:
    def __init__(self, store: Store, lock: Lock, inspect: Inspect, dry_run: bool) -> None:
        self.store, self.lock, self.dry_run = store, lock, dry_run
        self.target = store.writable()
        # A remote's name may point to a later build than the lock's, which lies there as a candidate.
        self.inspect = Inspect(pinned(lock, inspect).entry, inspect.name, inspect.tuning)
        self.report = SyncReport()
        self.origins: dict[str, tuple[str, int]] = {}  # key -> where it is, or came from, and bytes copied
        self.records: dict[tuple[Where, str], Signed] = {}  # from remotes
        self.builds = {build.key: build for builds in lock.kernels.values() for build in builds}

    def run(
        self, remotes: Mapping[str, Remote], notify: Notify | None,
        compile: Callable[[Sequence[tuple[Where, Build]]], Mapping[str, str]],
        records: Callable[[], Mapping[tuple[Where, str], NameRecord]],
    ) -> SyncReport:  # fmt: skip
        for key in self.builds:
            if (root := self._root_of(key)) is not None:
                self.origins[key] = (str(root.path), 0)
        for name, remote in remotes.items():
            try:
                self._from_remote(name, remote, notify)
            except StoreError as error:  # another one may answer
                self.report.problems.append(str(error))
        if (missing := self._missing()) and not self.dry_run:
            for key, origin in compile(missing).items():
                if self._root_of(key) is not None:
                    self.origins[key] = (origin, 0)
        self.report.missing = self._missing()
        if not self.report.missing:
            unnamed = [(where, build.key) for where, build in self._every() if self._signed(where, build.key) is None]
            known = records() if unnamed else {}
            self.records |= {item: (known[item], None) for item in unnamed if item in known}
            self._names()
        for where, builds in self.lock.kernels.items():
            for build in builds:
                if build.key in self.origins:
                    self.report.sources.append(Source(*where, build.toolchain, build.key, *self.origins[build.key]))
        return self.report

    def _missing(self) -> list[tuple[Where, Build]]:
        return [(where, build) for where, build in self._every() if build.key not in self.origins]

    def _every(self) -> list[tuple[Where, Build]]:
        return [(where, build) for where, builds in self.lock.kernels.items() for build in builds]

    def _signed(self, where: Where, key: str) -> Signed | None:
        """The record by which the name `where` points to `key`: of a root, or what came to be published."""
        here = self._record_of(where, key)
        return (here, self.store.signatures(here.to_bytes())) if here else self.records.get((where, key))

    def _root_of(self, key: str) -> Root | None:
        """The first root that has the entry of `key` as the lock lists it, with its cubin."""
        for root in self.store.roots:
            entry = quietly(root.entry, key)
            if entry is None or quietly(root.blob, entry.cubin_sha256, entry.cubin_bytes) is None:
                continue
            if quietly(self._checked, entry) is not None:
                return root
            if root is self.store.roots[0]:
                self.lock.check_entry(entry)  # a build of that key is kept: it is not replaced by another
        return None

    def _checked(self, entry: Entry) -> Entry:
        self.inspect.entry(entry, None)
        return entry

    def _from_remote(self, name: str, remote: Remote, notify: Notify | None) -> None:
        """Copy from `remote` the builds that no root has, and the records of names that point to them."""
        wanted = sorted({build.key for _, build in self._missing()})
        every = [(where, build.key) for where, build in self._every()]
        unnamed = [item for item in every if self._signed(*item) is None]
        if not wanted and not unnamed:
            return
        reader = _Reader(self.target, remote, notify, self.inspect)
        reader.list_signatures()

        def take(key: str) -> int:
            def once() -> int:
                entry, size, signatures = reader.entry(key)
                cubin = reader.cubin(entry)
                if not self.dry_run:
                    self.target.publish(entry, cubin, signatures)
                return size + len(cubin)

            return twice(once)

        present = remote.sizes("entries")
        known = [key for key in wanted if not present or RELATIVE.entry_path(key).as_posix() in present]
        for done, (key, moved) in enumerate(reader.each(known, take), start=1):
            reader.notify(done, len(known), key[:12])
            if isinstance(moved, FusekitError):
                self.report.problems.append(str(moved))
            else:
                self.origins[key] = (name, moved)

        def record(item: tuple[Where, str]) -> Signed | None:
            where, key = item
            paths = (names.candidate_path(*where, key), RELATIVE.name_path(*where).as_posix())
            for path in paths:
                if (signed := reader.record_at(where, path)) is not None and signed[0].key == key:
                    return signed
            return None

        for item, outcome in reader.each([item for item in unnamed if item[1] in self.origins], record):
            if isinstance(outcome, FusekitError):
                self.report.problems.append(str(outcome))
            elif outcome is not None:
                self.records[item] = outcome

    def _record_of(self, where: Where, key: str) -> NameRecord | None:
        """The record, in any root, by which the name `where` points to `key`."""
        for root in self.store.roots:
            for record in (quietly(root.name, *where), quietly(root.candidate, *where, key)):
                if record is not None and record.key == key:
                    return record
        return None

    def _names(self) -> None:
        """Publish the records that no root has. The last build of a name in the writable root is one of the lock."""
        published: list[Signed] = []
        for where, builds in self.lock.kernels.items():
            last = quietly(self.target.roots[0].name, *where)
            stale = last is not None and all(last.key != build.key for build in builds)
            before = len(published)
            for key in reversed(self.lock.keys(*where)):
                signed = self._signed(where, key)
                if signed is None:
                    raise IntegrityError(
                        f"{where[0]} for {where[1]}: the build {key[:12]} is there, and no record by which the name "
                        "points to it; push it again from the store where it was built",
                        key=key,
                    )
                if stale or (where, key) in self.records:
                    published.append(signed)
            self.report.names += len(published) > before
        for record, signatures in () if self.dry_run else published:
            self.store.publish_name(record, signatures=signatures)


class _Reader(Reading):
    def __init__(self, target: Store, remote: Remote, notify: Notify | None, inspect: Inspect) -> None:
        super().__init__(target.trust, remote, notify, inspect)
        self._target = target

    def wait(self) -> None:
        self._target.renew()


def pinned(lock: Lock, inspect: Inspect) -> Inspect:
    """`inspect`, and the checks that entries and names are those of `lock`."""

    def entry(built: Entry, cubin: bytes | None) -> None:
        lock.check_entry(built)
        inspect.entry(built, cubin)

    def name(record: NameRecord) -> None:
        lock.check_name(record)
        inspect.name(record)

    return Inspect(entry, name, inspect.tuning)

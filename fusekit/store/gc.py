"""Collection: evict what was used least recently, and clear away what nobody needs. Readers and writers carry on.

**The rule that keeps it safe**, without a lock and without a clock:

- *who wants a thing says so first, then looks whether it is there* (a reader or a builder marks an entry and then
  reads it; a publisher makes its entry visible and then looks whether the cubin it relies on is still there);
- *who removes a thing moves it aside first, then looks whether somebody said so*, and puts it back if so.

Whichever comes first, one of the two sees the other. So what somebody found stays; what he did not find is a miss, to
be built again. What is put back was out of sight for a moment: who marked it and does not see it looks again. A
reader that cannot mark (a read-only mount) may find an entry and then miss its cubin: it looks again, and sees the
miss.

Two collections at once could mislead each other: what one has aside, names above all, the other does not see, so it
might remove an entry whose name the first one puts back. So they take turns, as far as locks work there. Where they do
not, a name may be left that leads nowhere, which `verify` tells and the next build mends.

**Order.** Names go before their entry, an entry before its cubin, so at any moment, and after a kill at any moment,
no name leads nowhere and no entry lacks its cubin. What was moved aside and not removed is a temporary, for the next
collection, which puts a cubin back that an entry came to need meanwhile; until then readers find it where it lies.

**What is evicted**: first every entry that was not used for `max_age`, then the least recently used until cubins,
entries and names together have at most `max_bytes`. What a running build published or looked up stays (see
fusekit.store.marks). A cubin goes when the last entry that mentions it goes; names go with their entry.

A document that cannot be read may still need anything: while there is one, no cubin and no signature goes, and
while there is such a name, no entry is evicted.

**What is cleared away**: cubins that no entry mentions; temporaries whose writer is gone, or is of another host and
was last heard of `STALE_SECONDS` ago; signatures over what is gone; lock files, marks and leases that nobody holds or
needs. Damaged files stay: `verify` names them, a build mends them.

**What is never touched**: a folder that is no store (fusekit.store.marker); what has a name that fusekit does not give,
or is no plain file (fusekit.store.layout); what lies behind a link (fusekit.store.folders). The root is opened once,
and every file is removed relative to an open folder below it.

**Time** is the file system's: "now" is the stamp of a file made for that, also for a dry run, which goes by the host's
clock only where it may not write. A stamp in the future comes of a clock that
was wrong: what has no other counts as used now, and is marked so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from fusekit.errors import IntegrityError, StoreError, some
from fusekit.store import locks, marker, marks, process
from fusekit.store.files import exists, store_error
from fusekit.store.folders import said
from fusekit.store.keys import is_digest, sha256
from fusekit.store.names import of_path
from fusekit.store.publishing import Disk, Publisher
from fusekit.store.removal import Remover
from fusekit.store.reports import CollectReport, DiscardReport, Evicted
from fusekit.store.root import Root
from fusekit.store.scan import File, Item, Scan, scan

STALE_SECONDS = 3600
# Two changes within one tick of the file system's clock have one stamp: what is as young as this is not touched.
_TICK = 50_000_000
_SECOND = 10**9
_BATCH = 256
_TURN = sha256(b"collection")  # the name of its lock, which no kernel's key is
_NAMED = 5  # strangers' files in a note


def discard(root: Root, disk: Disk, unwanted: Collection[tuple[str, str]], *, dry_run: bool) -> DiscardReport:
    """Remove the name records `unwanted` (full name, architecture) from the store of `root`, the entries that no other
    name stands for, and the cubins that no other entry needs. Raises StoreError as `collect` does.
    """
    report = DiscardReport(dry_run)
    if unwanted:
        with _opened(root, disk, CollectReport(dry_run)) as collection:
            if collection is not None:
                collection.discard(unwanted, report)
    return report


def collect(root: Root, disk: Disk, *, max_bytes: int | None, max_age: float | None, dry_run: bool) -> CollectReport:
    """Collect the store of `root`. max_age: seconds. Raises StoreError for a store that cannot be read or written,
    NoStoreError for a folder that is none.
    """
    report = CollectReport(dry_run)
    with _opened(root, disk, report) as collection:
        if collection is not None:
            collection.run(max_bytes, max_age)
    return report


@contextlib.contextmanager
def _opened(root: Root, disk: Disk, report: CollectReport) -> Iterator[_Collection | None]:
    """The store of `root`, its root opened once, and scanned; None where there is nothing."""
    if not exists(root.path):
        yield None
        return
    if not root.path.is_dir():
        raise store_error(root.path, "collect", NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    publisher = Publisher(root.path, disk, marker.admit)
    try:
        with publisher.folders.pinned(), contextlib.ExitStack() as turns:
            if marker.is_empty(publisher.folders):
                yield None
                return
            if report.dry_run:
                marker.check(publisher.folders)
            else:
                publisher.admit()
                turns.enter_context(_alone(root, publisher))
            began = _now(publisher, report)
            found = scan(publisher.folders)
            yield _Collection(root, publisher, began, _now(publisher, report), found, report)
    except OSError as error:
        raise store_error(root.path, "collect", error) from error


@contextlib.contextmanager
def _alone(root: Root, publisher: Publisher) -> Iterator[None]:
    """While no other collection runs; beside it where locks do not work, or where it takes more than `PATIENCE`."""
    path, release = root.lock_path(_TURN), None
    with contextlib.suppress(locks.HeldError, StoreError):  # a full disk has no room for a lock, and needs collecting
        release = locks.acquire(path, publisher, locks.PATIENCE)
    try:
        yield
    finally:
        if release is not None:
            release()
            with contextlib.suppress(OSError), publisher.at(path.parent) as at:
                locks.discard(path.name, at)


def _names(files: Iterable[File]) -> Iterator[tuple[str, str]]:
    for file in files:
        with contextlib.suppress(IntegrityError):  # a strange file, which keeps what it mentions
            yield of_path(file.path.parent.name, file.path.name)


def _now(publisher: Publisher, report: CollectReport) -> int:
    try:
        return _stamp(publisher)
    except StoreError:
        if not report.dry_run:
            raise
        report.notes[:] = [f"{said(publisher.root)} cannot be written, so ages here are by this host's clock"]
        return time.time_ns()


def _stamp(publisher: Publisher) -> int:
    probe = publisher.temporary(publisher.root / "now")
    try:
        with publisher.folders.at() as at:
            publisher.disk.write(probe, b"", at)
            try:
                return os.stat(probe.name, dir_fd=at, follow_symlinks=False).st_mtime_ns
            finally:
                publisher.disk.remove(probe, at)
    except OSError as error:
        raise store_error(publisher.root, "collect in", error) from error


class _Collection:
    def __init__(
        self, root: Root, publisher: Publisher, began: int, now: int, found: Scan, report: CollectReport
    ) -> None:
        """began, now: before and after the scan `found`, as the file system counts."""
        self.root, self.publisher, self.scan, self.report = root, publisher, found, report
        self.began, self.now = began, now
        self.remover = Remover(publisher, found)
        # Read after the scan: a lease is taken before anything is marked under it.
        self.lease, self.ended = marks.leases(publisher.folders, now)
        self.gone: set[str] = set()  # digests of the documents that were evicted
        # How many entries need each blob.
        self.needed = Counter(digest for item in found.entries.values() for digest in item.digests & found.blobs.keys())
        self.total = found.other_bytes + sum(file.bytes for file in found.blobs.values())
        self.total += sum(item.bytes for item in found.entries.values())

    def run(self, max_bytes: int | None, max_age: float | None) -> None:
        report = self.report
        report.unread = self.unread()
        if report.unread:
            kernels = "no kernel is evicted, and " if self.scan.unread_names else ""
            report.notes.append(
                f"{some(report.unread, _NAMED)} cannot be read, so what it needs is not known: {kernels}no cubin and "
                "no signature is removed; `fusekit verify` says more"
            )
        if strays := self.scan.strays:
            report.strays = [said(path) for path in sorted(strays)]
            report.notes.append(f"not fusekit's, and left alone: {some(report.strays, _NAMED)}")
        self._temporaries()
        report.orphans = self._remove_blobs(self._orphans())
        unneeded: list[str] = []
        stay: set[str] = set()
        while not self.scan.unread_names and (victims := self._victims(max_bytes, max_age, stay, unneeded)):
            stay |= self._evict(victims, unneeded)
        self._remove_blobs(unneeded)
        self._signatures()
        self._leftovers()
        report.removed = len(report.evicted)
        report.kept = len(self.scan.entries)
        report.kept_bytes = self.total
        report.in_use = len(stay)

    def unread(self) -> list[str]:
        return [said(path) for path in self.scan.unread]

    def discard(self, unwanted: Collection[tuple[str, str]], report: DiscardReport) -> None:
        """Remove `unwanted` names, and what only they kept."""
        paths = {self.root.name_path(*name): name for name in unwanted}
        gone: set[Path] = set()
        victims: list[tuple[Item, str]] = []
        for item in list(self.scan.entries.values()):
            left = [file for file in item.names if file.path not in paths]
            if len(left) == len(item.names):
                continue
            if left:
                report.shared[item.key] = sorted(_names(left))
            elif self.scan.unread_names:
                report.may_be_needed.append(item.key)
            elif self._in_use(item):
                report.in_use.append(item.key)
            else:
                victims.append((item, "removed"))
                gone |= {file.path for file in item.names}
                continue
            for file in [file for file in item.names if file.path in paths]:
                if self._remove_name(file):
                    item.names.remove(file)
                    gone.add(file.path)
        unneeded: list[str] = []
        stay = self._evict(victims, unneeded)
        report.in_use += sorted(stay)
        gone -= {file.path for item, _ in victims if item.key in stay for file in item.names}
        known = {file.path for item in self.scan.entries.values() for file in item.names} | gone
        for path in paths.keys() - known:  # it leads nowhere, or is damaged
            if (loose := self.scan.loose.get(path)) is not None and self._remove_name(loose):
                gone.add(path)
                report.without_entry.append(paths[path])
        report.without_entry.sort()
        removed = self._remove_blobs(unneeded)
        if self.scan.unread:  # the cubin of an entry that could not be read stays as well
            unknown = [item for item, _ in victims if item.key not in stay and str(item.file.path) in self.scan.unread]
            report.cubins = len(unneeded) - removed + len(unknown)
        if report.may_be_needed or report.cubins or not gone.isdisjoint(map(Path, self.scan.unread)):
            report.unread = self.unread()
        self._signatures()
        report.names = sorted(paths[path] for path in gone)
        report.missing = sorted(paths[path] for path in paths.keys() - gone)
        report.entries, report.freed_bytes = len(self.report.evicted), self.report.freed_bytes

    def _remove_name(self, file: File) -> bool:
        if not self.report.dry_run and not self.remover.unchanged(file):
            return False
        self._gone(file.path)
        self._freed(file.bytes)
        return True

    # -- entries ------------------------------------------------------------------------------------------------------

    def _victims(
        self, max_bytes: int | None, max_age: float | None, stay: set[str], unneeded: list[str]
    ) -> list[tuple[Item, str]]:
        """What policy evicts, each with the reason; those it must leave in place are added to `stay`. unneeded: blobs
        that are there still and are about to go.
        """
        victims = []
        needed = self.needed.copy()
        total = self.total - sum(self.scan.blobs[digest].bytes for digest in unneeded)
        for item in sorted(self.scan.entries.values(), key=lambda item: (-self._idle(item), item.key)):
            old = max_age is not None and self._idle(item) > max_age
            if item.key in stay or not (old or (max_bytes is not None and total > max_bytes)):
                continue
            if self._in_use(item):
                stay.add(item.key)
                continue
            victims.append((item, "age" if old else "size"))
            total -= item.bytes
            for digest in item.digests & self.scan.blobs.keys():
                needed[digest] -= 1
                total -= 0 if needed[digest] else self.scan.blobs[digest].bytes
        return victims

    def _in_use(self, item: Item) -> bool:
        if self.lease is not None and item.stamp >= self.lease:
            return True
        # Whoever marks it again within the tick of the mark that was seen could not be told from that one.
        return self.began - _TICK < item.stamp <= self.now

    def _evict(self, victims: list[tuple[Item, str]], unneeded: list[str]) -> set[str]:
        """Evict `victims`; blobs that no entry needs any more are added to `unneeded`. Returns the keys that stay."""
        stay: set[str] = set()
        if not self.report.dry_run:
            by_name = sorted((item for item, _ in victims), key=lambda item: [name.path for name in item.names])
            for start in range(0, len(by_name), _BATCH):
                stay |= self.remover.entries(by_name[start : start + _BATCH])
        for item, reason in victims:
            if item.key in stay:
                continue
            del self.scan.entries[item.key]
            self.gone |= item.documents
            freed = item.bytes
            self._freed(freed)
            for digest in item.digests & self.scan.blobs.keys():
                self.needed[digest] -= 1
                if not self.needed[digest]:
                    freed += self.scan.blobs[digest].bytes
                    unneeded.append(digest)
            self._gone(*(name.path for name in item.names), item.file.path, *([item.mark.path] if item.mark else []))
            names = tuple(str(name.path.relative_to(self.root.path / "names")) for name in item.names)
            self.report.evicted.append(Evicted(item.key, names, freed, round(self._idle(item), 3), reason))
        return stay

    def _idle(self, item: Item) -> float:
        used = item.used(self.now)
        return 0.0 if used is None else (self.now - used) / _SECOND

    # -- blobs --------------------------------------------------------------------------------------------------------

    def _orphans(self) -> list[str]:
        """Blobs that no entry mentions. Those that came since a running build began may be about to get one."""
        young = self.began - _TICK if self.lease is None else min(self.lease, self.began - _TICK)
        return [d for d, file in self.scan.blobs.items() if not self.needed[d] and min(file.stamp, self.now) < young]

    def _remove_blobs(self, digests: list[str]) -> int:
        """Remove what no entry needs, unless that cannot be known; how many went."""
        if self.scan.unread:
            return 0
        stay = set() if self.report.dry_run else self.remover.blobs(digests)
        gone = [digest for digest in digests if digest not in stay]
        for digest in gone:
            blob = self.scan.blobs.pop(digest)
            self._gone(blob.path)
            self._freed(blob.bytes)
        return len(gone)

    def _gone(self, *paths: Path) -> None:
        self.report.files += [str(path.relative_to(self.root.path)) for path in paths]

    def _freed(self, count: int) -> None:
        self.report.freed_bytes += count
        self.total -= count

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _temporaries(self) -> None:
        host = process.host()
        for file in self.scan.temporaries:
            old = abs(self.now - file.stamp) > STALE_SECONDS * _SECOND
            if not (old or process.is_gone(file.path.name, host)) or self._restored(file):
                continue
            self.report.temporaries += 1
            self.report.freed_bytes += file.bytes
            self._remove(file.path)

    def _restored(self, file: File) -> bool:
        # A collection that was killed may have left aside the cubin of an entry that came to be in that moment.
        digest = file.path.name[1:65]
        if not (is_digest(digest) and file.path.parent == self.root.blob_path(digest).parent):
            return False
        if self.scan.unread:
            return True
        if digest in self.scan.blobs or not any(digest in item.digests for item in self.scan.entries.values()):
            return False
        return self.report.dry_run or self.publisher.give(file.path, self.root.blob_path(digest))

    def _signatures(self) -> None:
        """Signatures over what is no more. One is published before its document, with a new stamp if it was there
        already: so a young one may be waiting for that, and one that changed since the scan is put back.
        """
        if self.scan.unread:
            return
        for file in self.scan.signatures:
            digest = file.path.name[:64]
            old = self.began - file.stamp > STALE_SECONDS * _SECOND and (self.lease is None or file.stamp < self.lease)
            needed = digest not in self.gone and (digest in self.scan.documents or not old)
            if not needed and (self.report.dry_run or self.remover.unchanged(file)):
                self.report.signatures += 1
                self.report.freed_bytes += file.bytes
                self._gone(file.path)

    def _leftovers(self) -> None:
        evicted = {each.key for each in self.report.evicted}
        for file in self.scan.locks:
            # Where there is no entry it may be being made: such a lock is left until it is old.
            done = file.path.stem in evicted or file.path.stem in self.scan.entries
            old = abs(self.now - file.stamp) > STALE_SECONDS * _SECOND
            if (done or old) and self.remover.lock(file.path, remove=not self.report.dry_run):
                self.report.locks += 1
                self._gone(file.path)
        kept = self.scan.entries.keys() | evicted  # the marks of evicted ones are gone
        unneeded = [file.path for file in self.scan.marks if file.path.name not in kept]
        self.report.leases, self.report.marks = len(self.ended), len(unneeded)
        for path in (*self.ended, *unneeded):
            self._remove(path)
        if self.report.dry_run:
            return
        for item in self.scan.entries.values():
            if item.used(self.now) is None:
                self.remover.remove(marks.mark_path(self.root.path, item.key))
                marks.mark(self.publisher.folders, item.key, item.file.path)

    def _remove(self, path: Path) -> None:
        self._gone(path)
        if not self.report.dry_run:
            self.remover.remove(path)

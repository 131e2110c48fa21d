"""Collection: evict the least recently used kernels, and remove files that are not needed, while others read and write.

**The rule that makes it safe**, without a lock and without a clock:

- *a user first announces what it wants, then looks whether it is there* (a reader or a builder marks an entry and then
  reads it; a publisher makes its entry visible and then checks that the cubin it relies on is still there);
- *a collection first moves a file aside, then looks whether it was announced*, and puts it back if so.

Whichever comes first, one of the two sees the other. So a file that a user has read stays; one that it has not is a
miss, to be built again. A file that is put back was invisible for a moment: who marked it and does not see it looks
again. A reader that cannot mark (a read-only mount) may read an entry and then miss its cubin: it looks again, and
sees the miss.

Two collections at once could mislead each other: one does not see the names that the other has moved aside, and might
remove an entry whose name is put back. So they take turns, if locks work there. If they do not, a name may be left
without an entry, which `verify` reports and the next build fixes.

**Order.** Names are removed before their entry, an entry before its cubin. So at any moment, and after a kill at any
moment, every name points to an entry and every entry has its cubin. A file that was moved aside and not removed is a
temporary for the next collection, which puts a cubin back if an entry needs it by then; readers find it meanwhile.

**Evicted** are first all entries that were not used for `max_age`, then the least recently used until cubins, entries
and names together have at most `max_bytes`. What a running build published or looked up stays (see
fusekit.store.marks). A cubin is removed with the last entry that mentions it, names with their entry.

**Layers.** A use of a kernel counts for the layers that name it and for their kernels, and a layer is evicted before
its kernels: what a layer names stays as long as the layer.

**Candidates.** A use of a name's last build counts for the newest candidate of each other cubin format that computes
the same, and the other way round: of a name in use, one build of each format stays. If the last build goes and such a
candidate stays, the name points to that one.

A document that cannot be read may need anything: while there is one, no cubin and no signature is removed, and while
there is such a name, no entry is evicted.

**Removed as well** are cubins that no entry mentions; temporaries whose writer is gone, or is on another host and
changed them `STALE_SECONDS` ago; signatures over removed documents; lock files, marks and leases that nobody holds or
needs. Damaged files stay: `verify` reports them, a build fixes them.

**Never touched** are a folder that is not a store (fusekit.store.marker); a file whose name fusekit does not give, or
that is not a plain file (fusekit.store.layout); anything reached through a link (fusekit.store.folders). The root is
opened once, and every file is removed relative to an open folder below it.

**Time** is that of the file system: "now" is the stamp of a new file, also for a dry run, which uses the host's clock
only if it may not write. A stamp in the future comes from a wrong clock: an entry without another stamp counts as used
now, and is marked.
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
from fusekit.store.files import exists, quietly, store_error
from fusekit.store.folders import printable
from fusekit.store.keys import is_digest, sha256
from fusekit.store.layout import CANDIDATES
from fusekit.store.names import NameRecord, differences, newest, of_candidate, of_path, one_per_format
from fusekit.store.publishing import Disk, Publisher
from fusekit.store.removal import Remover
from fusekit.store.reports import CollectReport, DiscardReport, Evicted
from fusekit.store.root import Root
from fusekit.store.scan import File, Item, Scan, scan

STALE_SECONDS = 3600
# Two changes within one tick of the file system's clock have one stamp: files younger than this are not touched.
_TICK = 50_000_000
_SECOND = 10**9
_BATCH = 256
_TURN = sha256(b"collection")  # the name of its lock; no kernel has this key
_LISTED = 5  # paths in a note


def discard(root: Root, disk: Disk, unwanted: Collection[tuple[str, str]], *, dry_run: bool) -> DiscardReport:
    """Remove the name records `unwanted` (full name, architecture) from `root`, the entries that no other name points
    to, and the cubins that no other entry needs. Raises StoreError as `collect` does.
    """
    report = DiscardReport(dry_run)
    if unwanted:
        with _opened(root, disk, CollectReport(dry_run)) as collection:
            if collection is not None:
                collection.discard(unwanted, report)
    return report


def collect(root: Root, disk: Disk, *, max_bytes: int | None, max_age: float | None, dry_run: bool) -> CollectReport:
    """Collect `root`. max_age: seconds. Raises StoreError for a store that cannot be read or written, NoStoreError for
    a folder that is not a store.
    """
    report = CollectReport(dry_run)
    with _opened(root, disk, report) as collection:
        if collection is not None:
            collection.run(max_bytes, max_age)
    return report


@contextlib.contextmanager
def _opened(root: Root, disk: Disk, report: CollectReport) -> Iterator[_Collection | None]:
    """The opened and scanned `root`; None if there is nothing."""
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
            scanned = scan(publisher.folders)
            yield _Collection(root, publisher, began, _now(publisher, report), scanned, report)
    except OSError as error:
        raise store_error(root.path, "collect", error) from error


@contextlib.contextmanager
def _alone(root: Root, publisher: Publisher) -> Iterator[None]:
    """Wait until no other collection runs; continue anyway if locks do not work, or after `PATIENCE`."""
    path, release = root.lock_path(_TURN), None
    with contextlib.suppress(locks.HeldError, StoreError):  # a full disk has no room for a lock
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
        with contextlib.suppress(IntegrityError):  # not a name record; it keeps what it mentions
            yield (of_candidate if _is_candidate(file) else of_path)(file.path.parent.name, file.path.name)


def _is_candidate(file: File) -> bool:
    return file.path.parent.parent.name == CANDIDATES.parts[0]


def _now(publisher: Publisher, report: CollectReport) -> int:
    try:
        return _stamp(publisher)
    except StoreError:
        if not report.dry_run:
            raise
        report.notes[:] = [f"{printable(publisher.root)} cannot be written, so ages here are by this host's clock"]
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
        self, root: Root, publisher: Publisher, began: int, now: int, scanned: Scan, report: CollectReport
    ) -> None:
        """began, now: times before and after the scan, as the file system counts."""
        self.root, self.publisher, self.scan, self.report = root, publisher, scanned, report
        self.began, self.now = began, now
        self.remover = Remover(publisher, scanned)
        # Read after the scan: a lease is taken before anything is marked under it.
        self.lease, self.ended = marks.leases(publisher.folders, now)
        self.gone: set[str] = set()  # digests of evicted documents
        self.spare = self._spare()
        self.kernels = self._kernels()
        # How many entries need each blob.
        self.needed = Counter(
            digest for item in scanned.entries.values() for digest in item.digests & scanned.blobs.keys()
        )
        self.total = scanned.other_bytes + sum(file.bytes for file in scanned.blobs.values())
        self.total += sum(item.bytes for item in scanned.entries.values())

    def run(self, max_bytes: int | None, max_age: float | None) -> None:
        report = self.report
        report.unread = self.unread()
        if report.unread:
            kernels = "no kernel is evicted, and " if self.scan.unread_names else ""
            report.notes.append(
                f"{some(report.unread, _LISTED)} cannot be read, so what it needs is not known: {kernels}no cubin and "
                "no signature is removed; `fusekit verify` says more"
            )
        if strays := self.scan.strays:
            report.strays = [printable(path) for path in sorted(strays)]
            report.notes.append(f"not fusekit's, and not touched: {some(report.strays, _LISTED)}")
        self._temporaries()
        report.orphans = self._remove_blobs(self._orphans())
        unneeded: list[str] = []
        stay: set[str] = set()
        while not self.scan.unread_names and (victims := self._victims(max_bytes, max_age, stay, unneeded)):
            stay |= self._evict(victims, unneeded)
        self._promote()
        self._remove_blobs(unneeded)
        self._signatures()
        self._leftovers()
        report.removed = len(report.evicted)
        report.kept = len(self.scan.entries)
        report.kept_bytes = self.total
        report.in_use = len(stay)

    def unread(self) -> list[str]:
        return [printable(path) for path in self.scan.unread]

    def discard(self, unwanted: Collection[tuple[str, str]], report: DiscardReport) -> None:
        """Remove `unwanted` names, and the files that only they needed."""
        paths = {self.root.name_path(*name): name for name in unwanted}
        listed = [file for item in self.scan.entries.values() for file in item.names] + [*self.scan.loose.values()]
        candidates = {file.path: name for file in filter(_is_candidate, listed) for name in _names([file])}
        paths |= {path: name for path, name in candidates.items() if name in unwanted}
        gone: set[Path] = set()
        victims: list[tuple[Item, str]] = []
        needing: dict[str, list[File]] = {}  # names of layers that stay, by the keys of their kernels
        for layer, kernels in self.kernels.items():
            staying = [file for file in self.scan.entries[layer].names if file.path not in paths]
            for key in kernels:
                needing.setdefault(key, []).extend(staying)
        for item in list(self.scan.entries.values()):
            left = [file for file in item.names if file.path not in paths]
            if len(left) == len(item.names):
                continue
            left += needing.get(item.key, ())
            if left:
                report.shared[item.key] = sorted({*_names(left)})
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
        for path in paths.keys() - known:  # it points to no entry, or is damaged
            if (loose := self.scan.loose.get(path)) is not None and self._remove_name(loose):
                gone.add(path)
                report.without_entry.append(paths[path])
        report.without_entry = sorted({*report.without_entry})
        removed = self._remove_blobs(unneeded)
        if self.scan.unread:  # the cubin of an entry that could not be read stays, too
            unknown = [item for item, _ in victims if item.key not in stay and str(item.file.path) in self.scan.unread]
            report.cubins = len(unneeded) - removed + len(unknown)
        if report.may_be_needed or report.cubins or not gone.isdisjoint(map(Path, self.scan.unread)):
            report.unread = self.unread()
        self._signatures()
        report.missing = sorted({paths[path] for path in paths.keys() - gone})
        report.names = sorted({paths[path] for path in gone} - {*report.missing})
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
        """Entries that policy evicts, each with the reason; those that are in use are added to `stay`. unneeded: blobs
        that are going to be removed.
        """
        victims = []
        needed = self.needed.copy()
        total = self.total - sum(self.scan.blobs[digest].bytes for digest in unneeded)

        def order(item: Item) -> tuple[float, bool, str]:
            return -self._idle(item), item.key not in self.kernels, item.key  # a layer goes before its kernels

        for item in sorted(self.scan.entries.values(), key=order):
            old = max_age is not None and self._idle(item) > max_age
            if item.key in stay or not (old or (max_bytes is not None and total > max_bytes)):
                continue
            if self._in_use(item):
                stay |= {item.key, *self.kernels.get(item.key, ())}
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
        # A second mark within one tick of the first has the same stamp, and would not be noticed.
        return self.began - _TICK < item.stamp <= self.now

    def _evict(self, victims: list[tuple[Item, str]], unneeded: list[str]) -> set[str]:
        """Evict `victims`; blobs that no entry needs now are added to `unneeded`. Returns the keys that stay."""
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
            names = tuple("/".join(name.path.parts[-2:]) for name in item.names)
            self.report.evicted.append(Evicted(item.key, names, freed, round(self._idle(item), 3), reason))
        return stay

    def _idle(self, item: Item) -> float:
        used = item.used(self.now)
        return 0.0 if used is None else (self.now - used) / _SECOND

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _spare(self) -> dict[Path, list[NameRecord]]:
        """Path of each last build that has candidates -> of each other cubin format the newest that computes the same;
        these entries are `with_it`.
        """
        candidates: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for item in self.scan.entries.values():
            for file in filter(_is_candidate, item.names):
                for name in _names([file]):
                    candidates.setdefault(name, []).append((-file.stamp, item.key))
        spare: dict[Path, list[NameRecord]] = {}
        for name, builds in candidates.items():
            last = quietly(self.root.name, *name)
            if last is None:
                continue
            records = [quietly(self.root.candidate, *name, key) for _, key in sorted(builds)]
            same = [record for record in records if record and not differences(record.spec, last.spec)]
            first = one_per_format([last, *newest(same)])
            spare[self.root.name_path(*name)] = first[1:]
            items = [self.scan.entries[record.key] for record in first if record.key in self.scan.entries]
            for item in items:
                item.with_it += items
        return spare

    def _kernels(self) -> dict[str, list[str]]:
        """Key of each layer -> those of its kernels, which are `with_it`: a use of one is a use of all."""
        kernels: dict[str, list[str]] = {}
        for item in self.scan.entries.values():
            if named := sorted(item.digests & self.scan.entries.keys() - {item.key}):
                kernels[item.key] = named
        for layer, named in kernels.items():
            group = [self.scan.entries[key] for key in (layer, *named)]
            for item in group:
                item.with_it += group
        return kernels

    def _promote(self) -> None:
        """Let names whose last build was evicted point to the newest candidate that stays."""
        for path, records in self.spare.items():
            left = [record for record in records if record.key in self.scan.entries]
            if left and not self.report.dry_run and not exists(path):
                with contextlib.suppress(StoreError):  # a full disk; the next build gives the name
                    self.publisher.claim(path, left[0].to_bytes())

    # -- blobs --------------------------------------------------------------------------------------------------------

    def _orphans(self) -> list[str]:
        """Blobs that no entry mentions, except those since the start of a running build, whose entry may follow."""
        young = self.began - _TICK if self.lease is None else min(self.lease, self.began - _TICK)
        return [d for d, file in self.scan.blobs.items() if not self.needed[d] and min(file.stamp, self.now) < young]

    def _remove_blobs(self, digests: list[str]) -> int:
        """Remove blobs that no entry needs, unless a document could not be read; returns how many."""
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
        # A killed collection may have left aside the cubin of an entry that was published at that moment.
        digest = file.path.name[1:65]
        if not (is_digest(digest) and file.path.parent == self.root.blob_path(digest).parent):
            return False
        if self.scan.unread:
            return True
        if digest in self.scan.blobs or not any(digest in item.digests for item in self.scan.entries.values()):
            return False
        return self.report.dry_run or self.publisher.give(file.path, self.root.blob_path(digest))

    def _signatures(self) -> None:
        """Remove signatures over removed documents. A signature is published before its document, with a new stamp if
        it was there already: a young one may precede its document, and one that changed since the scan is put back.
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
        evicted = {kernel.key for kernel in self.report.evicted}
        for file in self.scan.locks:
            # Without an entry, a build may be running: such a lock stays until it is old.
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

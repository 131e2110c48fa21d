"""The reading half of a store: entries, cubins and names, each from the first root that has it good."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusekit.errors import IntegrityError, NotBuiltError, StoreError, is_glob, some
from fusekit.store import listing, marker, marks, names
from fusekit.store.entries import CUBIN_FORMAT, CUDA13, Entry, lowest_driver
from fusekit.store.files import exists, quietly, revalidate
from fusekit.store.keys import sha256
from fusekit.store.listing import Listing, NameListing, Overview
from fusekit.store.names import NameRecord
from fusekit.store.publishing import Publisher
from fusekit.store.root import Root, first_good
from fusekit.store.signature import Trust
from fusekit.store.verify import Inspect, VerifyReport, verify

if TYPE_CHECKING:
    from fusekit.store.lockfile import Lock

T = TypeVar("T")

# Seconds between attempts to read a file that should be there: a collection has moved it aside, or a network file
# system does not show it yet.
_PAUSES = (0.01, 0.05, 0.25, 1.0)


class _CubinMissingError(IntegrityError):
    """There is an entry, and no root has its cubin."""


class Lookup:
    """Finds kernels in `root` and then in `read_only`.

    A file that is missing, damaged or unreadable in one root is read from the next. The first error is raised only if
    no root has it good; None means that no root has it.

    trust: the keys of which one must have signed every document, in every root; None: only digests are checked.
    publisher: writes to `root`, where kernels that are looked up are marked as used.
    """

    def __init__(self, root: Path, read_only: Sequence[Path], trust: Trust | None, publisher: Publisher) -> None:
        self.root = root
        self.trust = trust
        self.project_lock: Lock | None = None
        self.roots = (Root(root, trust), *(Root(path, trust) for path in read_only if path != root))
        self.inspect: Callable[[Entry], None] = lambda entry: None
        self._publisher = publisher
        self._leases: list[marks.Lease] = []

    def tuning_tables(self, arch: str) -> list[tuple[Path, bytes]]:
        """(path, bytes) of every root's tuning table for `arch`, in the order of the roots.

        A table that cannot be read, or that no trusted key signed, is left out.
        """
        tables = [(root.tuning_path(arch), quietly(root.tuning, arch)) for root in self.roots]
        return [(path, data) for path, data in tables if data is not None]

    def find_entry(self, key: str) -> Entry | None:
        """The entry of `key`, checked: its digest, and that its fields give that key."""
        return self._first_good(lambda root: root.entry(key))

    def read_cubin(self, entry: Entry) -> bytes:
        """The cubin of `entry`, from the first root that has it whole; IntegrityError if none does."""
        cubin = self._first_good(lambda root: root.blob(entry.cubin_sha256, entry.cubin_bytes))
        if cubin is None:
            raise _CubinMissingError(
                f"the cubin {entry.cubin_sha256} of entry {entry.key} is in no root of the store; an entry is "
                "published after its cubin; build it again",
                key=entry.key,
            )
        return cubin

    def load(self, key: str, *, mark: bool = True) -> tuple[Entry, bytes] | None:
        """Entry and cubin of `key`, both checked. Marks the entry as used, unless `mark` is False.

        An entry that lost its cubin does not hide one in a lower root. If a cubin is missing, or an entry that has a
        mark, it is read again a few times: a collection may have moved it aside.
        """

        def read(root: Root) -> tuple[Entry, bytes] | None:
            entry = root.entry(key)
            return None if entry is None else (entry, self.read_cubin(entry))

        if self.project_lock is not None:
            self.project_lock.check_current()
        marked = mark and self._mark(key)
        for pause in _PAUSES:
            try:
                kernel = self._first_good(read)
                if kernel is not None or not (marked or (mark and self.roots[0].has_entry_aside(key))):
                    return kernel
            except _CubinMissingError:
                pass
            time.sleep(pause)
            for root in self.roots:
                revalidate(root.entry_path(key).parent)
                if (entry := quietly(root.entry, key)) is not None:
                    revalidate(root.blob_path(entry.cubin_sha256).parent)
        return self._first_good(read)

    def present(self, key: str, *, mark: bool = True) -> Entry | None:
        """The entry of `key`, if a root has it good, with its cubin. Marks it as used, unless `mark` is False.

        For builders, which treat damaged files as missing, and replace them.
        """

        def look() -> Entry | None:
            for root in self.roots:
                entry = quietly(root.entry, key)
                if entry is None or quietly(self.read_cubin, entry) is None:
                    continue
                with contextlib.suppress(IntegrityError):
                    self.inspect(entry)
                    return entry
            return None

        return self._patiently(key, look) if mark else look()

    def settled(self, record: NameRecord) -> Mapping[str, Any] | None:
        """The summary of the kernel of `record` (see `Entry.summary`) if it need not be built or published; marks it as
        used.

        That is so if the first root with that name has this very record, and a root has entry and cubin with the sizes
        in it. For builders with thousands of names: neither entry nor cubin is read. None means that `present` and
        `publish_name` must check.
        """
        self._mark(record.key)
        if self.trust is not None:  # then the entry's signature must be checked
            return None
        for root in self.roots:
            try:
                brief = root.brief(record.name, record.arch)
            except (IntegrityError, StoreError):
                return None
            if brief is not None:
                break
        else:
            return None
        if not brief.equals(record) or not brief.summary.keys() >= listing.SUMMARY:
            return None
        # Stamps of two roots come from two clocks.
        named = root.stamp_of_name(record.name, record.arch)
        settled = (
            other.is_settled(record.key, brief.summary, named if other is root else None) for other in self.roots
        )
        return brief.summary if any(settled) else None

    def signatures(self, data: bytes) -> dict[str, bytes]:
        """Key id -> signature, for every signature that a root has over the document `data`; unchecked."""
        digest, signatures = sha256(data), dict[str, bytes]()
        for root in self.roots:
            signatures |= root.signatures(digest)
        return signatures

    def find_name(self, name: str, arch: str) -> NameRecord | None:
        """The record of the full name `name` for `arch`; None if there is none."""

        def look() -> NameRecord | None:
            return self._first_good(lambda root: root.name(name, arch))

        file, kernel, variant = names.split(name)
        for pause in _PAUSES:
            record = look()
            start = f"{kernel}@{variant}.{arch}."
            if record is not None or not any(root.has_temporary_name(file, start) for root in self.roots):
                return record
            time.sleep(pause)
        return look()

    def kernels_of(self, record: NameRecord) -> tuple[str, ...]:
        """The keys of the kernels of the layer whose record has this name; none of the name of a kernel."""
        entry = self.find_entry(record.key) if names.layer_of(record.name) is not None else None
        return () if entry is None else tuple(entry.launch["kernels"])

    def candidates(self, record: NameRecord) -> list[NameRecord]:
        """The builds of a name: see `listing.candidates`."""
        return listing.candidates(self.roots, record)

    def lowest_driver(self, record: NameRecord) -> int:
        """The CUDA version, such as 13000, of the first driver that reads the cubin of `record`."""
        cubin_format = record.summary.get("cubin_format")
        if cubin_format is None:  # of fusekit 0.1
            entry = self.find_entry(record.key)
            cubin_format = 0 if entry is None else self.read_cubin(entry)[CUBIN_FORMAT]
        return lowest_driver(cubin_format)

    def readable(self, record: NameRecord, driver: int) -> NameRecord | None:
        """`record`, if a driver of that CUDA version reads its cubin; else with the key of the first candidate that it
        reads; None if there is none.
        """
        if driver >= CUDA13 or self.lowest_driver(record) <= driver:
            return record
        for other in self.candidates(record)[1:]:
            if self.lowest_driver(other) <= driver:
                return replace(record, key=other.key, summary=other.summary)
        return None

    def variants(self, name: str, arch: str) -> list[NameRecord]:
        """Records of every variant of the kernel `name` (`<file>/<kernel>`) for `arch`, sorted by name; empty if there
        are none, as for a layer of a model.
        """
        listing = self.listing(name, arch)
        if not listing.names and listing.problems:
            raise IntegrityError(listing.problems[0])
        return [listed.record for listed in listing.names if not listed.record.name.startswith(f"{name}.")]

    def names(self, pattern: str = "*", arch: str | None = None) -> list[NameListing]:
        """The names that `pattern` matches: a file's stem, a kernel, a layer of a model, a full name or a glob; sorted.
        Damaged ones are left out.
        """
        return list(self.listing(pattern, arch).names)

    def listing(self, pattern: str = "*", arch: str | None = None, *, layers: bool = False) -> Listing:
        """As `names`, with the problems of the records that were left out. layers: with the records of layers."""
        return listing.search(self.roots, pattern, arch, layers=layers)

    def recorded(self, pattern: str = "*", arch: str | None = None) -> dict[tuple[str, str], Path]:
        """Full name and architecture of every record that `pattern` matches, with the path of the first root that has
        it. Reads no record: a damaged one counts, too.
        """
        paths: dict[tuple[str, str], Path] = {}
        for reading in names.readings(pattern):
            for root in self.roots:
                for where in listing.recorded(root, reading, arch):
                    paths.setdefault(where, root.path)
            if paths:
                break
        return dict(sorted(paths.items()))

    def overview(self, pattern: str = "*", arch: str | None = None, *, layers: bool = False) -> Overview:
        """The kernels that `pattern` matches, with size and registers of each; see `Row`. layers: with the records of
        layers.
        """
        return listing.overview(self.roots, pattern, arch, layers=layers)

    def absent(self) -> tuple[str, ...]:
        """Why read-only roots are not stores, one text for each: most often a file system is not mounted."""
        return tuple(why for root in self.roots[1:] if (why := marker.absence(root.path)) is not None)

    def not_built(self, name: str, arch: str | None = None, detail: str = "") -> NotBuiltError:
        """The error for `name`, which no root has; it names the variants of its kernel that are there."""
        kernel, variant = name.partition("@")[::2]
        if variant and not detail and not is_glob(name):
            variants = sorted({listed.record.name for listed in self.names(kernel, arch)})
            detail = f"there are {some(variants)}" if variants else ""
        if self.project_lock is not None and not detail and self.recorded(name, arch):
            detail = f"{self.project_lock.path} does not list it"
        stored = (
            known for known, known_arch in self.recorded() if arch in (None, known_arch) and not names.layer_of(known)
        )
        return NotBuiltError.of(name, arch, detail, self.absent(), stored)

    def verify(self, full: bool = False, inspect: Inspect | None = None) -> VerifyReport:
        """Check every root: see `VerifyReport`. `full` also hashes every blob and runs `inspect` on every document."""
        return verify(self.roots, full, inspect)

    def renew(self, make: bool = False) -> None:
        """Renew the leases of this store; every look-up renews them, too. make: see `marks.Lease`."""
        for lease in self._leases:
            lease.renew(make)

    def ran(self, key: str) -> list[str]:
        """The GPUs that `note_run` was told of, from the writable root."""
        return marks.ran(self._publisher.folders, key)

    def note_run(self, key: str, gpu: str) -> None:
        """Note that the entry ran on a GPU of this name. Nothing where the writable root does not have it, or cannot be
        written.
        """
        if self._mark(key):
            marks.note_run(self._publisher.folders, key, gpu)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _first_good(self, read: Callable[[Root], T | None]) -> T | None:
        return first_good(self.roots, read)

    def _mark(self, key: str) -> bool:
        self.renew()
        root = self.roots[0]
        try:
            root.check()
        except StoreError:
            return False
        return marks.mark(self._publisher.folders, key, root.entry_file(key))

    def _patiently(self, key: str, look: Callable[[], T | None], marked: bool = False) -> T | None:
        """The result of `look` for the entry of `key`, which is marked first. If it has a mark and is missing, a
        collection may have moved it aside, and will see the mark: `look` is called again. marked: the caller has marked
        and read it before; that mark may be aside, too.
        """
        marked, root = self._mark(key) or marked, self.roots[0]
        for pause in _PAUSES:
            result = look()
            if result is not None or not marked or exists(root.entry_path(key)):
                return result
            if not root.has_entry_aside(key):
                break  # put back since, or gone
            time.sleep(pause)
        return look()

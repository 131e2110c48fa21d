"""The reading half of a store: entries, cubins and names, each from the first root that has it good."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fusekit.errors import IntegrityError, NotBuiltError, StoreError, is_glob, some
from fusekit.store import listing, marker, marks, names
from fusekit.store.entries import Entry
from fusekit.store.files import exists, quietly, revalidate
from fusekit.store.keys import sha256
from fusekit.store.listing import Listing, NameListing, Overview
from fusekit.store.names import NameRecord
from fusekit.store.publishing import Publisher
from fusekit.store.root import Root, first_good
from fusekit.store.signature import Trust
from fusekit.store.verify import Inspect, VerifyReport, verify

T = TypeVar("T")

# Seconds between the looks of who misses what should be there: a collection has it aside and is about to put it back
# or to remove it for good, or a network file system does not show it yet.
_PAUSES = (0.01, 0.05, 0.25, 1.0)


class _CubinMissingError(IntegrityError):
    """An entry is there and its cubin is in no root."""


class Lookup:
    """Finds kernels in `root` and then in `read_only`.

    A record that is missing, damaged or unreadable in one root is looked for in the next. Only when none has a good
    one is the first problem raised; None means that no root has anything of that name.

    trust: the keys of which one must have signed whatever is read, in every root; None: digests alone are checked.
    publisher: of `root`, where what is found is marked as used.
    """

    def __init__(self, root: Path, read_only: Sequence[Path], trust: Trust | None, publisher: Publisher) -> None:
        self.root = root
        self.trust = trust
        self.roots = (Root(root, trust), *(Root(path, trust) for path in read_only if path != root))
        self.inspect: Callable[[Entry], None] = lambda entry: None
        self._publisher = publisher
        self._leases: list[marks.Lease] = []

    def tuning_tables(self, arch: str) -> list[tuple[Path, bytes]]:
        """(path, bytes) of every root's tuning table for `arch`, in the order of the roots.

        One that cannot be read, or that none of the trusted keys signed, is left out.
        """
        found = [(root.tuning_path(arch), quietly(root.tuning, arch)) for root in self.roots]
        return [(path, data) for path, data in found if data is not None]

    def find_entry(self, key: str) -> Entry | None:
        """The entry of `key`, checked: its digest, its key fields, that it lies under its own key."""
        return self._first_good(lambda root: root.entry(key))

    def read_cubin(self, entry: Entry) -> bytes:
        """The cubin of `entry`, from whichever root has it whole; IntegrityError when none does."""
        cubin = self._first_good(lambda root: root.blob(entry.cubin_sha256, entry.cubin_bytes))
        if cubin is None:
            raise _CubinMissingError(
                f"the cubin {entry.cubin_sha256} of entry {entry.key} is in no root of the store; an entry is "
                "published after its cubin; build it again",
                key=entry.key,
            )
        return cubin

    def load(self, key: str, *, mark: bool = True) -> tuple[Entry, bytes] | None:
        """Entry and cubin of `key`, both checked, for use: it is marked as used now (not with `mark` False).

        An entry whose cubin is lost does not hide a lower root's entry that has its own. Where a cubin is missing, or
        an entry that has a mark, the look is repeated a few times: a collection may have it in its hands.
        """

        def read(root: Root) -> tuple[Entry, bytes] | None:
            entry = root.entry(key)
            return None if entry is None else (entry, self.read_cubin(entry))

        marked = mark and self._mark(key)
        for pause in _PAUSES:
            try:
                found = self._first_good(read)
                if found is not None or not (marked or (mark and self.roots[0].has_entry_aside(key))):
                    return found
            except _CubinMissingError:
                pass
            time.sleep(pause)
            for root in self.roots:
                revalidate(root.entry_path(key).parent)
                if (entry := quietly(root.entry, key)) is not None:
                    revalidate(root.blob_path(entry.cubin_sha256).parent)
        return self._first_good(read)

    def present(self, key: str, *, mark: bool = True) -> Entry | None:
        """The entry of `key`, if some root has it good and its cubin whole; marks it as used (not with `mark` False).

        For builders, to whom what is damaged is missing: they replace it.
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
        """The summary of the kernel of `record` (see `Entry.summary`) if nothing is left to do for it; marks it used.

        Nothing is, if the first root with that name has this very record, and one root has entry and cubin in the
        sizes that it states. For builders with thousands of names: neither entry nor cubin is read. None says only
        that `present` and `publish_name` have to look more closely.
        """
        self._mark(record.key)
        if self.trust is not None:  # then the entry's signature has to be looked at
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
        if not brief.says(record) or not brief.summary.keys() >= listing.SUMMARY:
            return None
        # Stamps of two roots are of two clocks.
        named = root.stamp_of_name(record.name, record.arch)
        settled = (each.is_settled(record.key, brief.summary, named if each is root else None) for each in self.roots)
        return brief.summary if any(settled) else None

    def signatures(self, data: bytes) -> dict[str, bytes]:
        """Key id -> signature, of every signature that a root has over the document `data`; unchecked."""
        digest, found = sha256(data), dict[str, bytes]()
        for root in self.roots:
            found |= root.signatures(digest)
        return found

    def find_name(self, name: str, arch: str) -> NameRecord | None:
        """The record of the full name `name` for `arch`."""

        def look() -> NameRecord | None:
            return self._first_good(lambda root: root.name(name, arch))

        file, kernel, variant = names.split(name)
        for pause in _PAUSES:
            found = look()
            start = f"{kernel}@{variant}.{arch}."
            if found is not None or not any(root.has_temporary_name(file, start) for root in self.roots):
                return found
            time.sleep(pause)
        return look()

    def variants(self, name: str, arch: str) -> list[NameRecord]:
        """Records of every variant of the kernel `name` (`<file>/<kernel>`) for `arch`, sorted by name; empty when
        none, as for a layer of a model.
        """
        found = self.listing(name, arch)
        if not found.names and found.problems:
            raise IntegrityError(found.problems[0])
        return [each.record for each in found.names if not each.record.name.startswith(f"{name}.")]

    def names(self, pattern: str = "*", arch: str | None = None) -> list[NameListing]:
        """What `pattern` means in this store: a file's stem, a kernel, a layer of a model, a full name or a glob;
        sorted. Damaged ones are left out.
        """
        return list(self.listing(pattern, arch).names)

    def listing(self, pattern: str = "*", arch: str | None = None) -> Listing:
        """As `names`, with what was wrong with the records that were left out."""
        return listing.search(self.roots, pattern, arch)

    def recorded(self, pattern: str = "*", arch: str | None = None) -> dict[tuple[str, str], Path]:
        """Full name and architecture of every record that `pattern` means, with the path of the first root that has
        it. Reads none of them: a damaged one counts, too.
        """
        found: dict[tuple[str, str], Path] = {}
        for each in names.readings(pattern):
            for root in self.roots:
                for where in listing.recorded(root, each, arch):
                    found.setdefault(where, root.path)
            if found:
                break
        return dict(sorted(found.items()))

    def overview(self, pattern: str = "*", arch: str | None = None) -> Overview:
        """What the roots hold of `pattern`, with size and registers of each kernel; see `Row`."""
        return listing.overview(self.roots, pattern, arch)

    def absent(self) -> tuple[str, ...]:
        """Of each read-only root that is no store, why: most often its file system is not mounted."""
        return tuple(why for root in self.roots[1:] if (why := marker.absence(root.path)) is not None)

    def not_built(self, name: str, arch: str | None = None, detail: str = "") -> NotBuiltError:
        """The error for `name`, which no root has: with the variants of its kernel that there are."""
        kernel, variant = name.partition("@")[::2]
        if variant and not detail and not is_glob(name):
            there = sorted({listed.record.name for listed in self.names(kernel, arch)})
            detail = f"there are {some(there)}" if there else ""
        return NotBuiltError.of(name, arch, detail, self.absent())

    def verify(self, full: bool = False, inspect: Inspect | None = None) -> VerifyReport:
        """Check every root: see `VerifyReport`. `full` hashes every blob too and has `inspect` look at documents."""
        return verify(self.roots, full, inspect)

    def renew(self, make: bool = False) -> None:
        """Say that the leases of this store are still held; every look-up says so, too. make: see `marks.Lease`."""
        for lease in self._leases:
            lease.renew(make)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _first_good(self, read: Callable[[Root], T | None]) -> T | None:
        return first_good(self.roots, read)

    def _mark(self, key: str) -> bool:
        self.renew()
        own = self.roots[0]
        try:
            own.check()
        except StoreError:
            return False
        return marks.mark(self._publisher.folders, key, own.entry_file(key))

    def _patiently(self, key: str, look: Callable[[], T | None], sure: bool = False) -> T | None:
        """What `look` finds of the entry of `key`, which is marked first. If it has a mark and is not there, a
        collection may have it aside at this moment, and will see the mark: then it is looked again. sure: who has
        marked and found it already; that mark may be aside, too, so that there is nothing to mark now.
        """
        wanted, own = self._mark(key) or sure, self.roots[0]
        for pause in _PAUSES:
            found = look()
            if found is not None or not wanted or exists(own.entry_path(key)):
                return found
            if not own.has_entry_aside(key):
                break  # put back since, or gone
            time.sleep(pause)
        return look()

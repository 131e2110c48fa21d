"""The layered store: one writable root over read-only ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fusekit.errors import FusekitError, IntegrityError, StoreError
from fusekit.store import names
from fusekit.store.entries import Entry
from fusekit.store.files import Disk, Publisher, store_error
from fusekit.store.keys import sha256
from fusekit.store.layer import Layer
from fusekit.store.names import NameRecord
from fusekit.store.verify import VerifyReport, verify

if TYPE_CHECKING:
    from fusekit.config import Config

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NameListing:
    """A name record and the root of the layer it was found in."""

    record: NameRecord
    layer: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """What a search over names found: good records, one for a name and architecture, and what was wrong with others."""

    names: tuple[NameListing, ...]
    problems: tuple[str, ...]


class Store:
    """Finds kernels in `root` and then in `layers`, and publishes into `root`. Opening one touches no disk.

    A record that is missing, damaged or unreadable in one layer is looked for in the next. Only when none has a good
    one is the first problem raised; None means that no layer has anything of that name.
    """

    def __init__(self, root: Path, layers: Sequence[Path] = (), *, disk: Disk | None = None) -> None:
        self.root = root
        self.layers = (Layer(root), *(Layer(path) for path in layers if path != root))
        self._publisher = Publisher(root, disk)

    @classmethod
    def open(cls, config: Config) -> Store:
        """The store that `config` names; it need not exist yet."""
        return cls(config.store, config.layers)

    # -- reading ------------------------------------------------------------------------------------------------------

    def find_entry(self, key: str) -> Entry | None:
        """The entry of `key`, checked: its digest, its key fields, that it lies under its own key."""
        return self._first_good(lambda layer: layer.entry(key))

    def read_cubin(self, entry: Entry) -> bytes:
        """The cubin of `entry`, from whichever layer has it whole; IntegrityError when none does."""
        cubin = self._first_good(lambda layer: layer.blob(entry.cubin_sha256, entry.cubin_bytes))
        if cubin is None:
            raise IntegrityError(
                f"the cubin {entry.cubin_sha256} of entry {entry.key} is in no store layer; an entry is published "
                "after its "
                "cubin; build it again",
                key=entry.key,
            )
        return cubin

    def load(self, key: str) -> tuple[Entry, bytes] | None:
        """Entry and cubin of `key`. An entry whose cubin is lost does not hide a lower layer's entry that has its
        own.
        """

        def read(layer: Layer) -> tuple[Entry, bytes] | None:
            entry = layer.entry(key)
            return None if entry is None else (entry, self.read_cubin(entry))

        return self._first_good(read)

    def find_name(self, name: str, arch: str) -> NameRecord | None:
        """The record of the full name `name` for `arch`."""
        return self._first_good(lambda layer: layer.name(name, arch))

    def variants(self, name: str, arch: str) -> list[NameRecord]:
        """Records of every variant of the kernel `name` (`<file>/<kernel>`) for `arch`, sorted by name; empty when
        none.
        """
        listing = self.listing(name, arch)
        if not listing.names and listing.problems:
            raise IntegrityError(listing.problems[0])
        return [found.record for found in listing.names]

    def names(self, pattern: str = "*", arch: str | None = None) -> list[NameListing]:
        """What `pattern` means in this store: a file's stem, a kernel, a full name, or a glob; sorted. Damaged ones
        left out.
        """
        return list(self.listing(pattern, arch).names)

    def listing(self, pattern: str = "*", arch: str | None = None) -> Listing:
        """As `names`, with what was wrong with the records that were left out."""
        stem = pattern.partition("/")[0]
        if not names.is_glob(stem) and not names.is_part(stem):
            return Listing((), ())
        file = None if names.is_glob(stem) else stem
        found: dict[tuple[str, str], NameListing] = {}
        problems: list[str] = []
        for layer in self.layers:
            try:
                for folder, filename in layer.name_files(file):
                    try:
                        where = names.of_path(folder, filename)
                        wanted = names.matches(pattern, where[0]) and arch in (None, where[1])
                        if wanted and where not in found and (record := layer.name(*where)) is not None:
                            found[where] = NameListing(record, layer.root)
                    except (IntegrityError, StoreError) as error:
                        problems.append(str(error))
            except StoreError as error:
                problems.append(str(error))
        return Listing(tuple(found[where] for where in sorted(found)), tuple(problems))

    def verify(self, full: bool = False) -> VerifyReport:
        """Check every layer: see `VerifyReport`. `full` hashes every blob too."""
        return verify(self.layers, full)

    # -- writing ------------------------------------------------------------------------------------------------------

    def publish(self, entry: Entry, cubin: bytes) -> Entry:
        """Publish `cubin` and then `entry` into the writable store; returns the entry that is there afterwards.

        Where another process was first with that key, its entry stands and is returned, if it and its cubin are
        whole; if not, this one takes its place. Raises `IntegrityError` for an entry that does not describe `cubin`,
        `StoreError` for a disk that fails: what was published before is untouched, and no reader sees half of this.
        """
        data = entry.to_bytes()
        if (sha256(cubin), len(cubin)) != (entry.cubin_sha256, entry.cubin_bytes):
            raise IntegrityError(
                f"entry {entry.key} names a cubin {entry.cubin_sha256} of {entry.cubin_bytes} bytes, but "
                f"{sha256(cubin)} of "
                f"{len(cubin)} bytes was given; both are published as one; pass the entry's own cubin",
                key=entry.key,
            )
        if (winner := self._winner(entry.key)) is not None:
            return winner
        self._publish_blob(entry.cubin_sha256, cubin)
        path = self.layers[0].entry_path(entry.key)
        if not self._publisher.claim(path, data):
            if (winner := self._winner(entry.key)) is not None:
                return winner
            self._publisher.put(path, data)
        return entry

    def publish_name(self, record: NameRecord) -> None:
        """Publish `record` over what its name stood for. Its entry must be in a layer already: a name never leads
        nowhere.
        """
        data = record.to_bytes()
        if self.find_entry(record.key) is None:
            raise IntegrityError(
                f"{record.name} would stand for entry {record.key}, which is in no store layer; names come after "
                "entries; "
                "publish the entry first",
                key=record.key,
            )
        own = self.layers[0]
        try:
            if own.name(record.name, record.arch) == record:
                return
        except IntegrityError:
            pass  # a damaged record is replaced
        self._publisher.put(own.name_path(record.name, record.arch), data)

    @contextlib.contextmanager
    def lock(self, key: str, patience: float = 600.0) -> Iterator[bool]:
        """Hold the lock of `key`, so that others need not do the same work; True when it is held.

        Only ever a saving: where locks do not work, or nobody lets go for `patience` seconds, the body runs without
        it (False), and publishing is as right as with it.
        """
        lock = self._acquire(key, patience)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _first_good(self, read: Callable[[Layer], T | None]) -> T | None:
        problem: FusekitError | None = None
        for layer in self.layers:
            try:
                found = read(layer)
            except (IntegrityError, StoreError) as error:
                problem = problem or error
            else:
                if found is not None:
                    return found
        if problem is not None:
            raise problem
        return None

    def _winner(self, key: str) -> Entry | None:
        # An entry in the writable store that is good together with its cubin, made durable: whoever wrote it may have
        # been killed before it synced.
        own = self.layers[0]
        try:
            entry = own.entry(key)
            if entry is None or own.blob(entry.cubin_sha256, entry.cubin_bytes) is None:
                return None
        except IntegrityError:
            return None
        self._publisher.settle(own.blob_path(entry.cubin_sha256))
        self._publisher.settle(own.entry_path(key))
        return entry

    def _publish_blob(self, digest: str, data: bytes) -> None:
        own = self.layers[0]
        path = own.blob_path(digest)
        if self._publisher.claim(path, data):
            return
        try:
            if own.blob(digest, len(data)) is not None:
                self._publisher.settle(path)
                return
        except IntegrityError:
            pass  # a damaged blob is replaced: these bytes have the digest of its name
        self._publisher.put(path, data)

    def _acquire(self, key: str, patience: float) -> Callable[[], None] | None:
        try:
            from filelock import FileLock, Timeout
        except ImportError:
            return None
        path = self.layers[0].lock_path(key)
        self._publisher.directory(path.parent)
        lock = FileLock(path, timeout=patience)
        try:
            lock.acquire()
        except (Timeout, NotImplementedError):
            return None
        except OSError as error:
            if path.parent.exists():
                return None
            raise store_error(path, "lock", error) from error
        return lock.release

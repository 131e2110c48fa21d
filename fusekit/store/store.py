"""The store: one writable root over read-only ones. `fusekit.store.lookup` is its reading half."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusekit.errors import IntegrityError, SignatureError, StoreError
from fusekit.store import marker, marks, names
from fusekit.store.documents import check_readable
from fusekit.store.entries import Entry
from fusekit.store.files import exists, quietly, read_file
from fusekit.store.installed import installed_roots
from fusekit.store.keys import sha256
from fusekit.store.locks import PATIENCE, HeldError, acquire
from fusekit.store.lookup import Lookup
from fusekit.store.names import NameRecord
from fusekit.store.publishing import Disk, Publisher
from fusekit.store.reports import CollectReport, DiscardReport
from fusekit.store.signature import SIGNATURE_BYTES, SigningKey, Trust, read_signing_key

if TYPE_CHECKING:
    from fusekit.config import Config
    from fusekit.store.lockfile import Lock

_MEMORY = 4096  # bytes of a remembered serial
Make = Callable[[], tuple[Entry, bytes]]


class Store(Lookup):
    """Reads kernels from `root` and then from `read_only`, as `Lookup` does, and publishes into `root`. Opening a store
    touches no disk.

    trust: the keys of which one must have signed every document, in every root; None: only digests are checked.
    signing_key: file of the private key that signs what is built and exported here; read at its first use.
    """

    def __init__(
        self,
        root: Path,
        read_only: Sequence[Path] = (),
        *,
        trust: Trust | None = None,
        signing_key: Path | None = None,
        disk: Disk | None = None,
    ) -> None:
        super().__init__(root, read_only, trust, Publisher(root, disk, marker.admit))
        self._signing_key = signing_key

    @classmethod
    def open(cls, config: Config) -> Store:
        """The store of `config`, which need not exist yet, over its read-only roots and those of installed wheels."""
        roots = (*config.read_only_roots, *installed_roots())
        return cls(config.store, roots, trust=Trust.of(config), signing_key=config.signing_key)

    def inspecting(self, inspect: Callable[[Entry], None]) -> Store:
        """A copy that treats entries for which `inspect` raises IntegrityError as missing, so that builders replace
        them.
        """
        store = copy.copy(self)
        store.inspect = inspect
        return store

    def keeping_to(self, lock: Lock) -> Store:
        """A copy that reads only what `lock` lists. Raises IntegrityError if it has expired, or is older than one that
        was used with the writable root.
        """
        lock.check_current()
        self.remember(lock, make=False)
        store = copy.copy(self)
        store.project_lock = lock
        store.roots = tuple(dataclasses.replace(root, lock=lock) for root in self.roots)
        return store

    def keeping_to_owners(self, owners: frozenset[int]) -> Store:
        """A copy that reads only documents that users with the ids `owners` wrote, or, if it has trusted keys, that one
        of these signed.
        """
        store = copy.copy(self)
        if self.trust is None:
            store.roots = tuple(dataclasses.replace(root, owners=owners) for root in self.roots)
        return store

    def remember(self, lock: Lock, *, make: bool = True, write: bool = True) -> None:
        """Remember the serial of `lock` in the writable root. IntegrityError if a higher one is remembered, or another
        lock of that serial. make: create a missing store; without it, a root that cannot be written remembers nothing.
        write: False only checks.
        """
        from fusekit.store.lockfile import check_seen

        path = self.roots[0].locked_path(lock.id)
        now = check_seen(lock, read_file(path, limit=_MEMORY), path)
        if now is None or not write or not (make or exists(self.root)):
            return
        try:
            self._publisher.put(path, now)
        except StoreError:
            if make:
                raise

    def writable(self) -> Store:
        """The writable root alone, as a store to be filled. Raises NoStoreError if its folder is not a store, before
        anything is read or sent for it.
        """
        self.check_writable()
        return Store(self.root, trust=self.trust, signing_key=self._signing_key, disk=self._publisher.disk)

    # -- writing ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def signer(self) -> SigningKey | None:
        """The private key in the file `signing_key`; None without one."""
        return None if self._signing_key is None else read_signing_key(self._signing_key)

    def sign(self, kind: str, data: bytes) -> dict[str, bytes]:
        """The signature of `signing_key` over the document `data` of `kind`, as `publish` takes it; empty without a
        key.

        Raises `SignatureError` if the store would not trust it: what is published must be readable.
        """
        signatures = {} if self.signer is None else self.signer.sign(kind, data)
        if self.trust is not None:
            try:
                self.trust.check(kind, data, signatures, kind)
            except SignatureError:
                trusted = ", ".join(key.id for key in self.trust.keys)
                by = f"by {self.signer.public.id}" if self.signer is not None else "by nobody"
                raise SignatureError(
                    f"documents of this process would be signed {by}, and {self.root} holds only what {trusted} "
                    "signed; name the private key with --sign or FUSEKIT_SIGNING_KEY, or build without "
                    "FUSEKIT_TRUSTED_KEYS"
                ) from None
        return signatures

    def publish(self, entry: Entry, cubin: bytes, signatures: Mapping[str, bytes] | None = None) -> Entry:
        """Publish `cubin` and then `entry` into the writable root; returns the entry that is there afterwards.

        If another process was first with that key, its entry is kept and returned, if it and its cubin are whole;
        otherwise this one replaces it. signatures: key id -> signature over the bytes of the entry; None: `signing_key`
        signs. Raises `IntegrityError` for an entry that does not describe `cubin` or that the store does not trust,
        `StoreError` for a failing disk: what was published before is untouched, and no reader sees a part of this.
        """
        data = entry.to_bytes()
        check_readable(data, f"entry {entry.key}")
        signatures = self._vouched("entry", data, signatures, f"entry {entry.key}")
        if (sha256(cubin), len(cubin)) != (entry.cubin_sha256, entry.cubin_bytes):
            raise IntegrityError(
                f"entry {entry.key} names a cubin {entry.cubin_sha256} of {entry.cubin_bytes} bytes, but "
                f"{sha256(cubin)} of {len(cubin)} bytes was given; both are published as one; pass the entry's own "
                "cubin",
                key=entry.key,
            )
        self.renew(make=True)
        self._mark(entry.key)
        if (winner := self._winner(entry.key)) is not None:
            return winner
        self._publish_blob(entry.cubin_sha256, cubin)
        self.publish_signatures(data, signatures)
        root = self.roots[0]
        path = root.entry_path(entry.key)
        if not self._publisher.claim(path, data):
            if (winner := self._winner(entry.key)) is not None:
                return winner
            self._publisher.put(path, data)
        if not quietly(root.has_cubin, entry):
            # A cubin that was there before was collected before the new entry was visible.
            self._publish_blob(entry.cubin_sha256, cubin)
        return entry

    def publish_name(
        self, record: NameRecord, entry: Entry | None = None, signatures: Mapping[str, bytes] | None = None
    ) -> None:
        """Publish `record`, with a summary of its entry, as the last build of its name. What its name pointed to before
        stays a candidate.

        Its entry must be in a root already: a name always points to an entry. Who has just read or published it may
        pass it as `entry`, which saves reading it. signatures: over the bytes of the record, as for `publish`.
        """
        known = entry if entry is not None and entry.key == record.key else None

        def look() -> Entry | None:
            present = known is not None and any(quietly(root.size_of_entry, record.key) for root in self.roots)
            return known if present else self.find_entry(record.key)

        entry = self._patiently(record.key, look, marked=True)
        if entry is None:
            raise IntegrityError(
                f"{record.name} would point to entry {record.key}, which is in no root of the store; names come after "
                "entries; publish the entry first",
                key=record.key,
            )
        if not record.summary:
            record = dataclasses.replace(record, summary=entry.summary())
        root, data = self.roots[0], record.to_bytes()
        check_readable(data, f"name record {record.name}")
        path = root.name_path(record.name, record.arch)
        with contextlib.suppress(IntegrityError):  # a damaged record, or one without a trusted signature, is replaced
            root.name(record.name, record.arch)
            # A record that a lower root has is not copied.
            current = self._first_good(lambda root: root.name(record.name, record.arch))
            if current is not None and current == record and current.summary == record.summary:
                self.publish_signatures(data, signatures or {})
                # Younger than an entry that was repaired: see `settled`.
                self._publisher.touch(path, data)
                with contextlib.suppress(StoreError):  # read-only
                    self._publisher.settle(path)  # its writer may have been killed before it synced
                return
        self.publish_signatures(data, self._vouched("name", data, signatures, record.name))
        if quietly(root.name, record.name, record.arch) is None and self._publisher.claim(path, data):
            return
        before = quietly(root.name, record.name, record.arch)  # who was first, else, may be replaced with no copy
        if before is not None and before.key != record.key:
            for build in (before, record):
                self.publish_candidate(build)
        self._publisher.put(path, data)

    def publish_candidate(self, record: NameRecord, signatures: Mapping[str, bytes] | None = None) -> None:
        """Publish `record`, whose entry is in a root, as a candidate of its name. signatures: as for `publish_name`;
        those of its bytes that are there stay.
        """
        data = record.to_bytes()
        if signatures is not None:
            self.publish_signatures(data, self._vouched("name", data, signatures, record.name))
        root, key = self.roots[0], record.key
        self._publisher.put(root.path / names.candidate_path(record.name, record.arch, key), data)

    def ensure(self, key: str, make: Make, patience: float = PATIENCE) -> tuple[Entry, bool]:
        """The entry of `key`, and whether `make` was called for it: looked up, and if it is missing looked up again
        under its lock, built and published. Of any number of callers one builds it if locks work; if they do not,
        several may, and the first entry is kept. patience: as for `lock`.
        """
        if (entry := self.present(key)) is not None:
            return entry, False
        with self.lock(key, patience):
            return self._build_if_missing(key, make)

    def ensure_unless_held(self, key: str, make: Make) -> tuple[Entry, bool] | None:
        """As `ensure`, but returns None at once while another process builds it."""
        if (entry := self.present(key)) is not None:
            return entry, False
        try:
            release = acquire(self.roots[0].lock_path(key), self._publisher, 0)
        except HeldError:
            return None
        try:
            return self._build_if_missing(key, make)
        finally:
            if release is not None:
                release()

    def adopt(self, record: NameRecord) -> bool:
        """Copy the kernel of `record`, with its name and the newest candidate of each other cubin format, from a lower
        root into the writable one; False if it is there already. Nothing else copies from a lower root.
        """
        kernel = self.load(record.key)
        if kernel is None:
            raise IntegrityError(f"{record.name} points to entry {record.key}, which no root holds; build it again")
        target = self.writable()
        with target.lease():
            copied = self._copy(target, kernel, record)
            for other in names.one_per_format(self.candidates(record))[1:]:
                there = quietly(target.roots[0].candidate, other.name, other.arch, other.key) == other
                if there and target.present(other.key) is not None:
                    continue
                if (kernel := self.load(other.key)) is not None:
                    target.publish(*kernel, self.signatures(kernel[0].to_bytes()))
                    target.publish_candidate(other, self.signatures(other.to_bytes()))
                    copied = True
        return copied

    def _copy(self, target: Store, kernel: tuple[Entry, bytes], record: NameRecord) -> bool:
        named = quietly(target.roots[0].name, record.name, record.arch)
        if target.present(record.key) is not None and named == record:
            return False
        entry = target.publish(*kernel, self.signatures(kernel[0].to_bytes()))
        if entry != kernel[0]:  # another build of the key was there: the summary must be of that one
            record = dataclasses.replace(record, summary={})
        target.publish_name(record, entry, self.signatures(record.to_bytes()))
        return True

    def collect(
        self, *, max_bytes: int | None = None, max_age: float | None = None, dry_run: bool = False
    ) -> CollectReport:
        """Evict kernels of the writable root that were not used for `max_age` seconds, then the least recently used
        until it has at most `max_bytes`, and remove files that are not needed: see fusekit.store.gc.
        """
        from fusekit.store.gc import collect

        return collect(self.roots[0], self._publisher.disk, max_bytes=max_bytes, max_age=max_age, dry_run=dry_run)

    def discard(self, unwanted: Collection[tuple[str, str]], *, dry_run: bool = False) -> DiscardReport:
        """Remove names (full name, architecture) from the writable root, with the entries and cubins that no other name
        there needs. Lower roots are not changed.
        """
        from fusekit.store.gc import discard

        return discard(self.roots[0], self._publisher.disk, unwanted, dry_run=dry_run)

    def publish_tuning(self, arch: str, data: bytes) -> Path:
        """Publish the tuning table `data` for `arch` into the writable root, replacing the table there, signed if there
        is a `signing_key`; returns its path. SignatureError if the store would not trust it.
        """
        path = self.roots[0].tuning_path(arch)
        self.publish_signatures(data, self.sign("tuning", data))
        self._publisher.put(path, data)
        return path

    def publish_signatures(self, data: bytes, signatures: Mapping[str, bytes]) -> None:
        """Publish signatures (key id -> 64 bytes) over the document `data` into the writable root."""
        # Before their document, so that a visible document is signed. Ed25519 is deterministic: a file that is there
        # already is the same, or forged. It gets a new stamp, so that no collection removes it meanwhile.
        root, digest = self.roots[0], sha256(data)
        for key_id, signature in signatures.items():
            path = root.signature_path(digest, key_id)
            while not self._publisher.claim(path, signature):
                current = quietly(functools.partial(read_file, limit=SIGNATURE_BYTES), path)
                if current != signature:
                    self._publisher.put(path, signature)
                self._publisher.touch(path, signature)
                if path.exists():
                    break

    @contextlib.contextmanager
    def lock(self, key: str, patience: float = PATIENCE) -> Iterator[bool]:
        """Hold the lock of `key`, so that other builders need not do the same work; yields whether it is held.

        It only saves work: if locks do not work, or it is not released for `patience` seconds, the body runs without
        it (False), and publishing is as correct as with it.
        """
        try:
            release = acquire(self.roots[0].lock_path(key), self._publisher, patience)
        except HeldError:
            release = None
        try:
            yield release is not None
        finally:
            if release is not None:
                release()

    @contextlib.contextmanager
    def lease(self, *, make: bool = True) -> Iterator[None]:
        """While this is held, collection keeps what was published or looked up since it was taken. make: create a
        missing store now; otherwise when something is published.
        """
        lease = marks.Lease(self._publisher, make=make)
        self._leases.append(lease)
        try:
            yield
        finally:
            self._leases.remove(lease)
            lease.release()

    def check_writable(self) -> None:
        """Raises NoStoreError if the writable root is a folder that is not a store; changes nothing."""
        with contextlib.suppress(OSError):
            marker.check(self._publisher.folders)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _build_if_missing(self, key: str, make: Make) -> tuple[Entry, bool]:
        if (entry := self.present(key)) is not None:
            return entry, False
        return self.publish(*make()), True

    def _winner(self, key: str) -> Entry | None:
        # The entry in the writable root, if it and its cubin are good, made durable: its writer may have been killed
        # before it synced.
        root = self.roots[0]
        try:
            entry = root.entry(key)
            if entry is None or root.blob(entry.cubin_sha256, entry.cubin_bytes) is None:
                return None
            self.inspect(entry)
        except IntegrityError:
            return None
        durable = self._publisher.settle(root.blob_path(entry.cubin_sha256))
        return entry if self._publisher.settle(root.entry_path(key)) and durable else None

    def _vouched(
        self, kind: str, data: bytes, signatures: Mapping[str, bytes] | None, what: str
    ) -> Mapping[str, bytes]:
        if signatures is None:
            return self.sign(kind, data)
        if self.trust is not None:
            self.trust.check(kind, data, signatures, what)
        return signatures

    def _publish_blob(self, digest: str, data: bytes) -> None:
        root = self.roots[0]
        path = root.blob_path(digest)
        if self._publisher.claim(path, data):
            return
        try:
            if root.blob(digest, len(data)) is not None and self._publisher.settle(path):
                return
        except IntegrityError:
            pass  # a damaged blob is replaced: these bytes have the digest of its name
        self._publisher.put(path, data)

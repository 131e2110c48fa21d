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
from fusekit.store import marker, marks
from fusekit.store.documents import check_readable
from fusekit.store.entries import Entry
from fusekit.store.files import quietly, read_file
from fusekit.store.keys import sha256
from fusekit.store.locks import PATIENCE, HeldError, acquire
from fusekit.store.lookup import Lookup
from fusekit.store.names import NameRecord
from fusekit.store.publishing import Disk, Publisher
from fusekit.store.reports import CollectReport, DiscardReport
from fusekit.store.signature import SIGNATURE_BYTES, SigningKey, Trust, read_signing_key

if TYPE_CHECKING:
    from fusekit.config import Config

Make = Callable[[], tuple[Entry, bytes]]


class Store(Lookup):
    """Finds kernels in `root` and then in `read_only`, as `Lookup` does, and publishes into `root`. Opening a store
    touches no disk.

    trust: the keys of which one must have signed whatever is read, in every root; None: digests alone are checked.
    signing_key: file of the private key that signs what is built and exported here; read when it is first used.
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
        """The store that `config` names; it need not exist yet."""
        trust = None if config.trusted_keys is None else Trust(config.trusted_keys)
        return cls(config.store, config.read_only_roots, trust=trust, signing_key=config.signing_key)

    def inspecting(self, inspect: Callable[[Entry], None]) -> Store:
        """This store, to which entries are missing for which `inspect` raises IntegrityError: builders replace them."""
        store = copy.copy(self)
        store.inspect = inspect
        return store

    def writable(self) -> Store:
        """The writable store alone, without the roots below it, for who is about to fill it. Raises NoStoreError where
        that is a folder that is no store, before anything is read or sent for it.
        """
        self.check_writable()
        return Store(self.root, trust=self.trust, signing_key=self._signing_key, disk=self._publisher.disk)

    # -- writing ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def signer(self) -> SigningKey | None:
        """The private key that `signing_key` names; None where none does."""
        return None if self._signing_key is None else read_signing_key(self._signing_key)

    def sign(self, kind: str, data: bytes) -> dict[str, bytes]:
        """This store's own signature over the document `data` of `kind`, as `publish` takes it; empty without a key.

        Raises `SignatureError` when the store would not trust it: nothing is to be published that cannot be read.
        """
        signatures = {} if self.signer is None else self.signer.sign(kind, data)
        if self.trust is not None:
            try:
                self.trust.check(kind, data, signatures, kind)
            except SignatureError:
                trusted = ", ".join(key.id for key in self.trust.keys)
                by = f"by {self.signer.public.id}" if self.signer is not None else "by nobody"
                raise SignatureError(
                    f"what is made here would be signed {by}, and {self.root} is to hold only what {trusted} signed; "
                    "name the private key of that with --sign or FUSEKIT_SIGNING_KEY, or build without "
                    "FUSEKIT_TRUSTED_KEYS"
                ) from None
        return signatures

    def publish(self, entry: Entry, cubin: bytes, signatures: Mapping[str, bytes] | None = None) -> Entry:
        """Publish `cubin` and then `entry` into the writable store; returns the entry that is there afterwards.

        Where another process was first with that key, its entry stands and is returned, if it and its cubin are
        whole; if not, this one takes its place. signatures: over the entry's bytes, key id -> signature; the store's
        own key signs when none are given. Raises `IntegrityError` for an entry that does not describe `cubin` or that
        the store does not trust, `StoreError` for a disk that fails: what was published before is untouched, and no
        reader sees half of this.
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
        own = self.roots[0]
        path = own.entry_path(entry.key)
        if not self._publisher.claim(path, data):
            if (winner := self._winner(entry.key)) is not None:
                return winner
            self._publisher.put(path, data)
        if not quietly(own.has_cubin, entry):
            # A cubin that lay there before was collected before its new entry could be seen.
            self._publish_blob(entry.cubin_sha256, cubin)
        return entry

    def publish_name(
        self, record: NameRecord, entry: Entry | None = None, signatures: Mapping[str, bytes] | None = None
    ) -> None:
        """Publish `record`, with a summary of its entry, over what its name stood for.

        Its entry must be in a root already: a name never leads nowhere. Who has just read or published it may pass
        it as `entry`, which saves reading it here. signatures: over the record's bytes, as for `publish`.
        """
        known = entry if entry is not None and entry.key == record.key else None

        def look() -> Entry | None:
            there = known is not None and any(quietly(root.size_of_entry, record.key) for root in self.roots)
            return known if there else self.find_entry(record.key)

        entry = self._patiently(record.key, look, sure=True)
        if entry is None:
            raise IntegrityError(
                f"{record.name} would stand for entry {record.key}, which is in no root of the store; names come after "
                "entries; publish the entry first",
                key=record.key,
            )
        if not record.summary:
            record = dataclasses.replace(record, summary=entry.summary())
        own, data = self.roots[0], record.to_bytes()
        check_readable(data, f"name record {record.name}")
        with contextlib.suppress(IntegrityError):  # a damaged record, or one of a stranger, is replaced
            own.name(record.name, record.arch)
            # One that a lower root has is not copied.
            there = self._first_good(lambda root: root.name(record.name, record.arch))
            if there is not None and there == record and there.summary == record.summary:
                self.publish_signatures(data, signatures or {})
                path = own.name_path(record.name, record.arch)
                # Younger than an entry that was repaired: see `settled`.
                self._publisher.touch(path, data)
                with contextlib.suppress(StoreError):  # read-only
                    self._publisher.settle(path)  # whoever placed it may have been killed before it synced
                return
        self.publish_signatures(data, self._vouched("name", data, signatures, record.name))
        self._publisher.put(own.name_path(record.name, record.arch), data)

    def ensure(self, key: str, make: Make, patience: float = PATIENCE) -> tuple[Entry, bool]:
        """The entry of `key`, and whether `make` had to be called for it: looked up, and if it is missing looked up
        once more under its lock, made and published. However many ask at once, one of them makes it, where locks
        work; where they do not, some more do, and the first one's stands. patience: as of `lock`.
        """
        if (entry := self.present(key)) is not None:
            return entry, False
        with self.lock(key, patience):
            return self._made(key, make)

    def ensure_unless_held(self, key: str, make: Make) -> tuple[Entry, bool] | None:
        """As `ensure`, but None at once while somebody else makes it: there may be other things to do."""
        if (entry := self.present(key)) is not None:
            return entry, False
        try:
            release = acquire(self.roots[0].lock_path(key), self._publisher, 0)
        except HeldError:
            return None
        try:
            return self._made(key, make)
        finally:
            if release is not None:
                release()

    def adopt(self, record: NameRecord) -> bool:
        """Copy the kernel of `record` from a lower root into the writable store, with its name; False when all of it
        is there already. The only way in which anything comes up from a lower root.
        """
        found = self.load(record.key)
        if found is None:
            raise IntegrityError(f"{record.name} stands for entry {record.key}, which no root holds; build it again")
        own = self.writable()
        with own.lease():
            return self._adopt(own, found, record)

    def _adopt(self, own: Store, found: tuple[Entry, bytes], record: NameRecord) -> bool:
        if own.present(record.key) is not None and quietly(own.roots[0].name, record.name, record.arch) == record:
            return False
        entry = own.publish(*found, self.signatures(found[0].to_bytes()))
        if entry != found[0]:  # another build of the key lay there: the name's summary is to be of that one
            record = dataclasses.replace(record, summary={})
        own.publish_name(record, entry, self.signatures(record.to_bytes()))
        return True

    def collect(
        self, *, max_bytes: int | None = None, max_age: float | None = None, dry_run: bool = False
    ) -> CollectReport:
        """Shrink the writable store to `max_bytes`, remove what was not used for `max_age` seconds, and clear away
        what nobody needs: see fusekit.store.gc.
        """
        from fusekit.store.gc import collect

        return collect(self.roots[0], self._publisher.disk, max_bytes=max_bytes, max_age=max_age, dry_run=dry_run)

    def discard(self, unwanted: Collection[tuple[str, str]], *, dry_run: bool = False) -> DiscardReport:
        """Remove names (full name, architecture) from the writable store, with the entries and cubins that nothing else
        there needs. Lower roots are left alone.
        """
        from fusekit.store.gc import discard

        return discard(self.roots[0], self._publisher.disk, unwanted, dry_run=dry_run)

    def publish_tuning(self, arch: str, data: bytes) -> Path:
        """Publish the tuning table `data` for `arch` into the writable store, in place of the one there, signed with
        the store's own key if it has one; its path. SignatureError where the store would not trust it.
        """
        path = self.roots[0].tuning_path(arch)
        self.publish_signatures(data, self.sign("tuning", data))
        self._publisher.put(path, data)
        return path

    def publish_signatures(self, data: bytes, signatures: Mapping[str, bytes]) -> None:
        """Publish signatures (key id -> 64 bytes) over the document `data` into the writable store."""
        # Before their document: one that can be seen is signed. Ed25519 is deterministic, so a file that is there
        # already is the same, or was planted. It gets a new stamp, so that no collection takes it meanwhile.
        own, digest = self.roots[0], sha256(data)
        for key_id, signature in signatures.items():
            path = own.signature_path(digest, key_id)
            while not self._publisher.claim(path, signature):
                there = quietly(functools.partial(read_file, limit=SIGNATURE_BYTES), path)
                if there != signature:
                    self._publisher.put(path, signature)
                self._publisher.touch(path, signature)
                if path.exists():
                    break

    @contextlib.contextmanager
    def lock(self, key: str, patience: float = PATIENCE) -> Iterator[bool]:
        """Hold the lock of `key`, so that others need not do the same work; True when it is held.

        Only ever a saving: where locks do not work, or nobody lets go for `patience` seconds, the body runs without
        it (False), and publishing is as right as with it.
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
        """While this is held, collection leaves alone what was published or looked up since it was taken. make: the
        store, if there is none, now; else when something is published.
        """
        lease = marks.Lease(self._publisher, make=make)
        self._leases.append(lease)
        try:
            yield
        finally:
            self._leases.remove(lease)
            lease.release()

    def check_writable(self) -> None:
        """Raises NoStoreError where the writable store is a folder that is none; changes nothing."""
        with contextlib.suppress(OSError):
            marker.check(self._publisher.folders)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _made(self, key: str, make: Make) -> tuple[Entry, bool]:
        if (entry := self.present(key)) is not None:
            return entry, False
        return self.publish(*make()), True

    def _winner(self, key: str) -> Entry | None:
        # An entry in the writable store that is good together with its cubin, made durable: whoever wrote it may have
        # been killed before it synced.
        own = self.roots[0]
        try:
            entry = own.entry(key)
            if entry is None or own.blob(entry.cubin_sha256, entry.cubin_bytes) is None:
                return None
            self.inspect(entry)
        except IntegrityError:
            return None
        durable = self._publisher.settle(own.blob_path(entry.cubin_sha256))
        return entry if self._publisher.settle(own.entry_path(key)) and durable else None

    def _vouched(
        self, kind: str, data: bytes, signatures: Mapping[str, bytes] | None, what: str
    ) -> Mapping[str, bytes]:
        if signatures is None:
            return self.sign(kind, data)
        if self.trust is not None:
            self.trust.check(kind, data, signatures, what)
        return signatures

    def _publish_blob(self, digest: str, data: bytes) -> None:
        own = self.roots[0]
        path = own.blob_path(digest)
        if self._publisher.claim(path, data):
            return
        try:
            if own.blob(digest, len(data)) is not None and self._publisher.settle(path):
                return
        except IntegrityError:
            pass  # a damaged blob is replaced: these bytes have the digest of its name
        self._publisher.put(path, data)

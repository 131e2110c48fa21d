"""The common part of `push` and `pull`: parallel steps, their report, documents with signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from fusekit.errors import FusekitError, IntegrityError, SignatureError
from fusekit.share.remote import Remote
from fusekit.share.selection import Step
from fusekit.store.documents import LIMIT
from fusekit.store.keys import sha256
from fusekit.store.names import NameRecord
from fusekit.store.root import RELATIVE
from fusekit.store.signature import Trust, is_key_id, read_signatures

_WAIT_SECONDS = 60.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Progress:
    """Entries and names done so far, their total, bytes copied so far, and the last item."""

    done: int
    total: int
    bytes: int
    what: str = ""


@dataclass(slots=True)
class Report:
    """Result of a push or pull; with `dry_run`, of what would be copied.

    entries: number that were copied, with their cubins. skipped: entries that were there already. names: number that
    were written. bytes: copied in all. failed: (name or key, why) of what could not be copied. steps: what was copied,
    by name.
    """

    entries: int = 0
    skipped: int = 0
    names: int = 0
    bytes: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


Notify = Callable[[Progress], None]


class Task:
    """A push or pull."""

    def __init__(self, trust: Trust | None, remote: Remote, notify: Notify | None) -> None:
        self.trust = trust
        self.remote = remote
        self.report = Report()
        self._notify = notify or (lambda _: None)
        self._signatures: dict[str, set[str]] = {}
        self._moved: dict[str, int] = {}  # key -> bytes, until a name counts them

    def each(self, items: Sequence[T], step: Callable[[T], R]) -> Iterator[tuple[T, R | FusekitError]]:
        """Run `step` on every item, several at a time. An IntegrityError is the result of its item; other errors are
        raised. Ctrl-C waits only for steps that have begun.
        """
        pool = ThreadPoolExecutor(max_workers=min(self.remote.parallel, len(items)) or 1)
        try:
            futures = {pool.submit(step, item): item for item in items}
            waiting: Set[Future[R]] = futures.keys()
            while waiting:
                done, waiting = wait(waiting, _WAIT_SECONDS, FIRST_COMPLETED)
                self.wait()
                for future in done:
                    error = future.exception()
                    if error is None:
                        yield futures[future], future.result()
                    elif isinstance(error, IntegrityError):
                        yield futures[future], error
                    else:
                        raise error
        finally:
            pool.shutdown(cancel_futures=True)

    def wait(self) -> None:
        """Called repeatedly while steps run."""

    def notify(self, done: int, total: int, what: str = "") -> None:
        self._notify(Progress(done, total, self.report.bytes, what))

    def count_entry(self, key: str, moved: int) -> None:
        """Count an entry. moved: bytes copied, 0 if it was there already."""
        self.report.entries += moved > 0
        self.report.skipped += moved == 0
        self.report.bytes += moved
        self._moved[key] = moved

    def count_name(self, record: NameRecord, changed: bool, moved: int = 0) -> None:
        self.report.names += changed
        moved += self._moved.pop(record.key, 0)
        if changed or moved:
            self.report.steps.append(Step(record.name, record.arch, record.key, moved))

    def list_signatures(self) -> dict[str, int | None]:
        """Sizes of the remote's signatures, by path; remembers which documents they are for."""
        sizes = self.remote.sizes("signatures")
        for path in sizes:
            of, _, key_id = path.rpartition("/")[2].partition(".")
            if is_key_id(key_id):
                self._signatures.setdefault(of, set()).add(key_id)
        return sizes

    def signatures(self, digest: str) -> dict[str, bytes]:
        """Key id -> signature, for those of the remote over the document of SHA-256 `digest`."""
        wanted = self._signatures.get(digest, set())
        if self.trust is not None:  # a server that does not list is asked by name
            wanted = wanted | {key.id for key in self.trust.keys}
        paths = ((key_id, RELATIVE.signature_path(digest, key_id).as_posix()) for key_id in sorted(wanted))
        return read_signatures(paths, self.remote.read)

    def document(self, kind: str, path: str) -> tuple[bytes, dict[str, bytes]] | None:
        """A document of the remote and its signatures; with a trust, SignatureError unless it is signed."""
        data = self.remote.read(path, limit=LIMIT)
        if data is None:
            return None
        signatures = self.signatures(sha256(data))
        if self.trust is not None:
            self.trust.check(kind, data, signatures, self.remote.at(path))
        return data, signatures


def raised(outcome: T | FusekitError) -> T:
    if isinstance(outcome, FusekitError):
        raise outcome
    return outcome


def twice(take: Callable[[], T]) -> T:
    """The result of `take`, which is called again if the bytes were damaged; not if no trusted key signed them."""
    try:
        return take()
    except SignatureError:
        raise
    except IntegrityError:
        return take()


def check_form(canonical: bytes, data: bytes, where: str) -> None:
    """Raises IntegrityError unless `data` is the canonical form of its document."""
    if canonical != data:
        raise IntegrityError(f"{where} is in another form than a store writes; push it again")

"""What `push` and `pull` have in common: steps in parallel, their report, documents with signatures."""

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
from fusekit.store.root import SHELL
from fusekit.store.signature import Trust, is_key_id, read_signatures

_WAIT_SECONDS = 60.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: entries and names done, of how many, and the bytes moved so far; what came last."""

    done: int
    total: int
    bytes: int
    what: str = ""


@dataclass(slots=True)
class Report:
    """entries: that moved, with their cubins. skipped: that were there already. names: that were written. bytes: moved,
    of everything. failed: (name or key, why) of what could not be moved while the rest was. steps: what moved, by name.
    With `dry_run` all of it is what would move.
    """

    entries: int = 0
    skipped: int = 0
    names: int = 0
    bytes: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


Notify = Callable[[Progress], None]


class Exchange:
    def __init__(self, trust: Trust | None, remote: Remote, notify: Notify | None) -> None:
        self.trust = trust
        self.remote = remote
        self.report = Report()
        self._notify = notify or (lambda _: None)
        self._signatures: dict[str, set[str]] = {}
        self._moved: dict[str, int] = {}  # key -> bytes, until a name is told

    def each(self, items: Sequence[T], step: Callable[[T], R]) -> Iterator[tuple[T, R | FusekitError]]:
        """`step` on every item, several at a time; what one raises is its answer, but for a disk or a network that
        fails. Ctrl-C waits for what has begun only.
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
        """Called again and again while steps run."""

    def tell(self, done: int, total: int, what: str = "") -> None:
        self._notify(Progress(done, total, self.report.bytes, what))

    def count_entry(self, key: str, moved: int) -> None:
        """`moved`: bytes; 0 for one that was there already."""
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
        """The sizes of the remote's signatures, by path; remembers which documents have which."""
        sizes = self.remote.sizes("signatures")
        for path in sizes:
            of, _, key_id = path.rpartition("/")[2].partition(".")
            if is_key_id(key_id):
                self._signatures.setdefault(of, set()).add(key_id)
        return sizes

    def signatures(self, digest: str) -> dict[str, bytes]:
        """What the remote has signed over the document of SHA-256 `digest`."""
        wanted = self._signatures.get(digest, set())
        if self.trust is not None:  # a server that does not list is asked by name
            wanted = wanted | {key.id for key in self.trust.keys}
        paths = ((key_id, SHELL.signature_path(digest, key_id).as_posix()) for key_id in sorted(wanted))
        return read_signatures(paths, self.remote.read)

    def document(self, kind: str, path: str) -> tuple[bytes, dict[str, bytes]] | None:
        """A document of the remote and its signatures; with a trust, refused here unless they are good."""
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
    """Bytes that came damaged are asked for once more; those that nobody trusted has signed are not."""
    try:
        return take()
    except SignatureError:
        raise
    except IntegrityError:
        return take()


def check_form(written: bytes, found: bytes, where: str) -> None:
    if written != found:
        raise IntegrityError(f"{where} is in another form than the one that a store writes; push it again")

"""Compile processes that a process keeps from kernel to kernel: to import the compiler costs more than most kernels.

They are ended when what they have imported may no longer be what is installed, when nothing was compiled for a minute,
and with their owner, also where that is killed: their servers end when their sockets do. A fork of the owner closes its
copies of those sockets, and starts processes of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from fusekit.compiler.foreign import search_path
from fusekit.compiler.memory import bound
from fusekit.compiler.options import environment
from fusekit.compiler.pool import ForkServer, Team, Worker
from fusekit.compiler.scratch import Scratch
from fusekit.compiler.toolchain import distributions
from fusekit.compiler.worker import Done, Job

IDLE_SECONDS = 60.0


class Processes:
    """As many compile processes as threads use at once. stamp: of what they import; jobs: that share the memory."""

    def __init__(self, stamp: str, jobs: int) -> None:
        self.stamp, self.jobs = stamp, jobs
        self.users, self.old = 0, False
        self.guard = threading.Lock()
        self.idle: threading.Timer | None = None
        self._folder = Scratch("executor")
        self._server = ForkServer(Path(self._folder.name), bound(jobs).bytes)
        self._workers: queue.LifoQueue[Worker] = queue.LifoQueue()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Worker]:
        """A compile process for one thread."""
        try:
            worker = self._workers.get_nowait()
        except queue.Empty:
            worker = self._server.worker()
        try:
            yield worker
        finally:
            self._workers.put(worker)

    def stop(self) -> None:
        """Ends the processes at once, also while they work. The next kernel has new ones."""
        self.old = True
        self._server.close()

    def close(self) -> None:
        """Ends the processes, and removes their folder."""
        self.stop()
        self._folder.cleanup()

    def forget(self) -> None:
        """In a fork of the owner, to which they do not belong."""
        self._server.forget()
        self._folder.forget()


_CHANGE = threading.RLock()


@functools.cache
def _all() -> list[Processes]:
    """Those of this process that are not closed; old ones only wait for their users."""
    os.register_at_fork(before=_CHANGE.acquire, after_in_parent=_CHANGE.release, after_in_child=_forget)
    atexit.register(end, at_once=True)
    return []


@contextlib.contextmanager
def own(jobs: int) -> Iterator[Processes]:
    """The compile processes of this process, which import what is installed now."""
    with _CHANGE:
        stamp = stamp_of()
        _retire(keep=stamp)
        found = next((each for each in _all() if not each.old and (each.stamp, each.jobs) == (stamp, jobs)), None)
        if found is None:
            found = Processes(stamp, jobs)
            _all().append(found)
        if found.idle is not None:
            found.idle.cancel()
        found.users += 1
    try:
        yield found
    finally:
        with _CHANGE:
            found.users -= 1
            if not found.users:
                found.idle = threading.Timer(IDLE_SECONDS, _end_idle, [found])
                found.idle.daemon = True
                found.idle.start()
            _close_old()


@contextlib.contextmanager
def one() -> Iterator[Team]:
    """One of the compile processes of this process, for a build, with all the memory that is free."""
    with own(1) as processes, processes.borrow() as worker:
        compiler = _Busy(worker)
        yield [compiler], lambda: processes.stop() if compiler.busy else None


class _Busy:
    """A compile process that says whether it works."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.busy = worker, False

    def compile(self, job: Job) -> Done:
        self.busy = True
        try:
            return self._worker.compile(job)
        finally:
            self.busy = False


def end(*, at_once: bool = False) -> None:
    """Ends the compile processes of this process, and those in use when their users are done; the next kernel has new
    ones.
    """
    with _CHANGE:
        _retire(at_once=at_once)


def stamp_of() -> str:
    """Of all that decides what a compile process imports: every source of fusekit and the toolchain, as they are
    installed now, the search path and the environment. No time of a file is trusted.
    """
    outside = [distributions(), search_path(), environment(Path())]
    digest = hashlib.sha256(json.dumps(outside, sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        with contextlib.suppress(OSError):  # gone meanwhile
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _retire(keep: str = "", at_once: bool = False) -> None:
    for each in _all():
        each.old = each.old or each.stamp != keep
        each.users = 0 if at_once else each.users
    _close_old()


def _close_old() -> None:
    for each in [each for each in _all() if each.old and not each.users]:
        if each.idle is not None:
            each.idle.cancel()
        _all().remove(each)
        each.close()


def _end_idle(processes: Processes) -> None:
    with _CHANGE:
        processes.old = processes.old or not processes.users
        _close_old()


def _forget() -> None:
    for each in _all():
        each.forget()
    _all().clear()
    _CHANGE.release()

"""Building on an executor's processes instead of this machine's own.

Any `concurrent.futures.Executor` will do: its processes need fusekit with the `build` extra, in the same version and
with the same toolchain, and nothing else. They do not see the store. Each kernel is sent there, compiled in a compile
process of that machine, and its bytes come back to the builder, who alone publishes.

A process compares the key fields of what it is about to compile with those of its own installation, and refuses what
differs: no cluster of mixed versions can fill one key with two kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from pathlib import Path
from typing import Any, TypeVar

from fusekit.compiler.identity import key_fields_for
from fusekit.compiler.memory import bound
from fusekit.compiler.options import has_lineinfo
from fusekit.compiler.pool import ForkServer, Team, Worker
from fusekit.compiler.scratch import Scratch
from fusekit.compiler.toolchain import distributions
from fusekit.compiler.worker import Done, Job
from fusekit.errors import BuildError, FusekitError, ToolchainError, UsageError, install

T = TypeVar("T")

IN_FLIGHT = 64
"""Kernels that are given to an executor at a time, unless the caller says."""
CONNECT_SECONDS = 15.0
WORKER_SECONDS = 300.0
"""How long kernels wait for a cluster's first worker, or its next one, unless the caller says."""
SILENT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_DASK = "dask://"


@contextlib.contextmanager
def remotes(executor: Executor, count: int) -> Iterator[Team]:
    """`count` kernels in flight on `executor`, which is left open."""
    team = [Remote(executor) for _ in range(count)]

    def stop() -> None:
        for remote in team:
            remote.stop()

    yield team, stop


class Remote:
    """Compiles on `executor`, one kernel at a time: as many of these as kernels may be in flight."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._future: Future[Done | FusekitError] | None = None
        self._stopped = False
        self._guard = threading.Lock()

    def compile(self, job: Job) -> Done:
        """As a compile process does; BuildError when the executor loses the job, naming it."""
        try:
            with self._guard:
                if self._stopped:
                    raise BuildError(f"{job.name}: the build was stopped", name=job.name)
                self._future = self._executor.submit(compile_here, job)
            result = self._future.result()
        except FusekitError:
            raise
        except CancelledError:
            why = (
                f"{job.name}: the build was stopped"
                if self._stopped
                else f"the executor gave up {job.name}, as one does whose scheduler is gone; it was not compiled; look "
                "at the executor's own logs, and build it again"
            )
            raise BuildError(why, name=job.name) from None
        except Exception as error:
            raise BuildError(
                f"the executor lost {job.name} ({type(error).__name__}: {error}); it was not compiled; look at the "
                "executor's own logs, and build it again",
                name=job.name,
            ) from error
        if isinstance(result, FusekitError):
            raise result
        return result

    def stop(self) -> None:
        """Takes the job back, as far as the executor can."""
        with self._guard:
            self._stopped = True
            if self._future is not None:
                self._future.cancel()


def compile_here(job: Job) -> Done | FusekitError:
    """Runs in an executor's process: compiles `job` there, in a child that sees no GPU. Any number of threads may."""
    try:
        with _processes() as processes:
            with processes.guard:  # several threads of CPython 3.11 cannot parse at once
                _same_identity(job)
            with processes.borrow() as worker:
                done = worker.compile(job)
        if _stamp() != processes.stamp:
            raise BuildError(
                f"the sources or the toolchain of the executor's process changed while {job.name} was compiled; run the"
                " build again",
                name=job.name,
            )
        return done
    except FusekitError as error:
        return error


@contextlib.contextmanager
def connect(
    url: str, *, note: Callable[[str], None] = lambda text: None, worker_seconds: float = WORKER_SECONDS
) -> Iterator[Executor]:
    """The executor that `url` names: `dask://host:port` is a Dask scheduler's.

    note: called when the cluster has had no worker for some seconds. worker_seconds: for how long kernels wait for a
    worker, at the start or later; then they fail with a ToolchainError, which ends a build.
    """
    if not url.startswith(_DASK) or not url.removeprefix(_DASK):
        raise UsageError(f"executor '{url}'; it must be dask://host:port, the address of a Dask scheduler")
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(f"executor '{url}' needs the package distributed; {install('dask')}") from None
    address = f"tcp://{url.removeprefix(_DASK)}"
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"no Dask scheduler answers at {url} within {CONNECT_SECONDS:.0f} s ({error}); start one with `dask "
            "scheduler`, or check the address"
        ) from error
    remedy = f"start one with `dask worker {address}`, where the same fusekit is installed"
    attended = _Attended(client.get_executor(pure=False), lambda: len(client.nthreads()))
    with _silenced("distributed.client"), client, attended as executor:
        executor.attend(
            worker_seconds,
            lambda: note(f"the Dask scheduler at {url} has no worker; waiting up to {worker_seconds:.0f} s; {remedy}"),
            ToolchainError(f"the Dask scheduler at {url} had no worker for {worker_seconds:.0f} s; {remedy}"),
        )
        yield executor


@contextlib.contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """Silences `logger` in the block: a build reports a lost scheduler in one message."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Attended(Executor):
    """`executor`, whose futures do not wait for ever where it has no workers. workers: their number."""

    def __init__(self, executor: Executor, workers: Callable[[], int]) -> None:
        self._executor, self._workers = executor, workers
        self._waiting: set[Future[Any]] = set()
        self._over = threading.Event()

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        future = self._executor.submit(function, *arguments, **options)
        outer: Future[T] = Future()
        self._waiting.add(outer)
        outer.add_done_callback(self._waiting.discard)
        outer.add_done_callback(lambda _: future.cancel())  # which does nothing to one that is done
        future.add_done_callback(functools.partial(_hand_on, outer))
        return outer

    def __exit__(self, *raised: object) -> None:
        self._over.set()

    def attend(self, seconds: float, say: Callable[[], None], error: Exception) -> None:
        """From now on `say` is called once when a job has waited for a worker for some time; after `seconds`
        all that waits fails with `error`.
        """
        threading.Thread(target=self._attend, args=(seconds, say, error), daemon=True).start()

    def _attend(self, seconds: float, say: Callable[[], None], error: Exception) -> None:
        since, warned = time.monotonic(), False
        while not self._over.wait(min(_LOOK_SECONDS, seconds)):
            try:
                alone = bool(self._waiting) and not self._workers()
            except Exception:  # the scheduler itself is gone, which its futures report
                return
            now = time.monotonic()
            since = since if alone else now
            if now - since >= min(SILENT_SECONDS, seconds) and not warned:
                warned = True
                say()
            if now - since >= seconds:
                for future in [*self._waiting]:
                    with contextlib.suppress(InvalidStateError):  # it came at this moment
                        future.set_exception(error)


def _hand_on(outer: Future[T], future: Future[T]) -> None:
    with contextlib.suppress(InvalidStateError):  # given up at this moment
        if future.cancelled():
            outer.cancel()
        elif (error := future.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(future.result())


class _Processes:
    """The compile processes of one executor's process: as many as its threads use at once. stamp: of what they have
    imported.
    """

    def __init__(self, stamp: str) -> None:
        self.stamp, self.process = stamp, os.getpid()
        self.users, self.old = 0, False
        self.guard = threading.Lock()
        self._folder = Scratch("executor")
        self._server = ForkServer(Path(self._folder.name), bound(os.cpu_count() or 1).bytes)
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Worker]:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._server.worker()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self._server.close()
        self._folder.cleanup()


_CHANGE = threading.Lock()


@functools.cache
def _kept() -> list[_Processes]:
    """The compile processes of this process: one set at most."""
    return []


@contextlib.contextmanager
def _processes() -> Iterator[_Processes]:
    """The compile processes of this process, kept from job to job, as the import of the compiler costs more than a
    kernel. They end with this process, or when what they have imported is no longer what is installed.
    """
    with _CHANGE:
        kept, stamp = _kept(), _stamp()
        if kept and kept[0].process != os.getpid():  # a fork does not use its parent's sockets
            kept.clear()
        if kept and kept[0].stamp != stamp:
            kept[0].old = True
            _close_old(kept.pop())
        if not kept:
            kept.append(_Processes(stamp))
        processes = kept[0]
        processes.users += 1
    try:
        yield processes
    finally:
        with _CHANGE:
            processes.users -= 1
            _close_old(processes)


def _close_old(processes: _Processes) -> None:
    if processes.old and not processes.users:
        processes.close()


def _stamp() -> str:
    """A digest of every source of fusekit and of the toolchain, as installed now: no time of a file is trusted."""
    digest = hashlib.sha256(json.dumps(distributions(), sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        with contextlib.suppress(OSError):  # gone meanwhile
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _same_identity(job: Job) -> None:
    if job.fields is None:
        return
    here = key_fields_for(job.spec, lineinfo=has_lineinfo(job.fields))
    odd = [label for label in sorted({*job.fields, *here}) if job.fields.get(label) != here.get(label)]
    if odd:
        raise BuildError(
            f"the executor's process would compile {job.name} from something else: {', '.join(odd)} "
            f"{'differs' if len(odd) == 1 else 'differ'} there; a key means one kernel; install the same fusekit "
            "and the same toolchain",
            name=job.name,
        )

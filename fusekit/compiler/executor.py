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
import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path

from fusekit.compiler.identity import key_fields_for
from fusekit.compiler.memory import bound
from fusekit.compiler.pool import ForkServer, Team, Worker
from fusekit.compiler.worker import Done, Job
from fusekit.errors import BuildError, FusekitError, UsageError

IN_FLIGHT = 64
"""Kernels that are given to an executor at a time, unless the caller says."""
CONNECT_SECONDS = 15.0
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
            raise BuildError(f"{job.name}: the build was stopped", name=job.name) from None
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
        with _FIRST:
            own = _own(os.getpid())
        with own.guard:  # several threads of CPython 3.11 cannot parse at once
            _same_identity(job)
        with own.borrow() as worker:
            return worker.compile(job)
    except FusekitError as error:
        return error


@contextlib.contextmanager
def connect(url: str) -> Iterator[Executor]:
    """The executor that `url` names: `dask://host:port` is a Dask scheduler's."""
    if not url.startswith(_DASK) or not url.removeprefix(_DASK):
        raise UsageError(f"executor '{url}'; it must be dask://host:port, the address of a Dask scheduler")
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(f"executor '{url}' needs the package distributed; pip install 'fusekit[dask]'") from None
    try:
        client = Client(f"tcp://{url.removeprefix(_DASK)}", timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"no Dask scheduler answers at {url} within {CONNECT_SECONDS:.0f} s ({error}); start one with `dask "
            "scheduler`, or check the address"
        ) from error
    with client:
        executor: Executor = client.get_executor(pure=False)
        yield executor


class _Processes:
    """The compile processes of one executor's process: as many as its threads use at once."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="fusekit-executor-", ignore_cleanup_errors=True)
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


_FIRST = threading.Lock()  # threads that ask at once would each make one: `cache` lets them


@functools.cache
def _own(process: int) -> _Processes:
    # Kept from job to job, as the import of the compiler costs more than a kernel; ends with the executor's process. By
    # its id, so that a fork of that process does not share its parent's sockets.
    return _Processes()


def _same_identity(job: Job) -> None:
    if job.fields is None:
        return
    here = key_fields_for(job.spec)
    odd = [label for label in sorted({*job.fields, *here}) if job.fields.get(label) != here.get(label)]
    if odd:
        raise BuildError(
            f"the executor's process would compile {job.name} from something else: {', '.join(odd)} "
            f"{'differs' if len(odd) == 1 else 'differ'} there; a key stands for one kernel; install the same fusekit "
            "and the same toolchain",
            name=job.name,
        )

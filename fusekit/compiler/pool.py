"""Compile processes and the threads that feed them.

Each process is a plain child that speaks over a socket: it does not import the caller's main module, as
multiprocessing's would, so a build needs no ``__main__`` guard. It runs in a scratch folder and in a session of its
own, so that Ctrl-C reaches the parent alone, which then ends it.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fusekit.compiler.worker import Done, Job
from fusekit.errors import BuildError, FusekitError, ToolchainError

T = TypeVar("T")
R = TypeVar("R")

# Arguments: the socket, then the entries of sys.path, so that the child finds what the parent would.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from fusekit.compiler.worker import serve; serve(int(sys.argv[1]))"
_LOG_TAIL = 2000
_PATIENCE = 10.0


class Worker:
    """One compile process, started on the first job and again after it died. A context manager."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._log = scratch / "worker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._closed = False
        self._guard = threading.Lock()

    def compile(self, job: Job) -> Done:
        """Compiles and proves one kernel; raises what went wrong there, or BuildError when the process dies of it."""
        connection = self._start()
        try:
            connection.send(job)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(job) from error
        if isinstance(answer, FusekitError):
            raise answer
        assert isinstance(answer, Done)
        return answer

    def close(self) -> None:
        """Ends the process at once. Safe to call from any thread, while `compile` waits in another."""
        with self._guard:
            self._closed = True
            self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> Connection[Any, Any]:
        with self._guard:
            if self._closed:
                raise BuildError("the build was stopped")
            if self._connection is not None:
                return self._connection
            if not sys.executable:
                raise ToolchainError(
                    "this Python does not know its own executable; a build starts processes; use another"
                )
            ours, theirs = socket.socketpair()
            paths = [str(Path(entry).absolute()) for entry in sys.path]
            with theirs, self._log.open("wb") as log:
                command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), *paths]
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], cwd=self._scratch, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            self._connection = Connection(ours.detach())
            return self._connection

    def _end(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return None
        process.kill()
        code = process.wait()
        # After the kill: the thread that waits on it has seen the end of the stream by then.
        connection.close()
        return code

    def _died(self, job: Job) -> BuildError:
        process = self._process
        # It hung up, so it is about to end by itself; its own exit code says more than that of a kill.
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
        with self._guard:
            if self._closed:
                return BuildError(f"{job.name}: the build was stopped", name=job.name)
            code = self._end()
        said = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip() if self._log.exists() else ""
        tail = f"; its last words: {said}" if said else ""
        return BuildError(f"the compile process died of {job.name} ({_cause(code)}){tail}", name=job.name)


def run(
    items: Sequence[T], workers: int, task: Callable[[Worker, T], R]
) -> Generator[tuple[T, R | Exception], None, None]:
    """Runs `task` on every item, each on one of `workers` threads with a compile process of its own.

    Yields (item, result or what `task` raised) as they finish. Closing the iterator, or an exception such as Ctrl-C in
    the caller's thread, ends all processes; a task that is beyond compiling is given time to finish.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    finished: queue.SimpleQueue[tuple[T, R | Exception]] = queue.SimpleQueue()
    stopped = threading.Event()

    def feed(worker: Worker) -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((item, task(worker, item)))
            except Exception as error:
                finished.put((item, error))

    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fusekit-build-", ignore_cleanup_errors=True))
        )
        processes: list[Worker] = []
        threads: list[threading.Thread] = []
        for index in range(min(workers, len(items))):
            scratch = folder / str(index)
            scratch.mkdir()
            processes.append(Worker(scratch))
            threads.append(threading.Thread(target=feed, args=(processes[-1],), daemon=True))
        try:
            for thread in threads:
                thread.start()
            for _ in items:
                yield finished.get()
        finally:
            stopped.set()
            for process in processes:
                process.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(_PATIENCE)


def _cause(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"

"""Compile processes and the threads that feed them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fusekit.compiler.digests import private
from fusekit.compiler.foreign import search_path
from fusekit.compiler.memory import PROCESS_BYTES, RECYCLE_BYTES, bound
from fusekit.compiler.options import environment
from fusekit.compiler.scratch import Scratch
from fusekit.compiler.worker import Answer, Done, Job, unusable
from fusekit.config import compiler_cache
from fusekit.errors import BuildError, FusekitError, ToolchainError

T = TypeVar("T")
R = TypeVar("R")

# Run by its text, as all that it imports afterwards is.
_BOOT = "import sys; exec(compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec'))"
_LOG_TAIL = 2000
_PATIENCE = 10.0
_FAREWELL = 2.0
_PAUSE = 0.1
HOMES = 4  # servers of foreign modules that are kept for the next kernel
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class Compiler(Protocol):
    """What compiles one kernel at a time: a process of this machine, or an executor's."""

    def compile(self, job: Job) -> Done:
        """Compiles and proves one kernel; raises what went wrong there, or BuildError when its process dies of it."""


class PostponedError(Exception):
    """Raised by a task of `run` that must be retried later: another process works on it."""


class ForkServer:
    """The process that compile processes are forked from, started when the first is needed; `close` ends it.

    folder: for scratch files and logs. memory: bytes that each process may take; recycle: bytes after which it is
    replaced. home: that of foreign kernels (see `Job`), whose processes have an environment and a search path of their
    own; the module is imported before the fork.
    """

    def __init__(
        self, folder: Path, memory: int = PROCESS_BYTES, recycle: int = RECYCLE_BYTES,
        home: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self._home = home
        self._homes: dict[tuple[str, ...], tuple[str, ForkServer]] = {}  # with the digest of what is imported there
        self.recycle = recycle
        self._folder = folder
        self._log = folder / "server.log"
        self._workers = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.closed = False
        self._users = 0
        self._guard = threading.Lock()

    def worker(self) -> Worker:
        """One more compile process, forked when it gets its first kernel."""
        with self._guard:
            scratch = self._folder / f"worker-{self._workers}"
            self._workers += 1
        scratch.mkdir()
        return Worker(self, scratch)

    def fork(self, scratch: Path, log: Path) -> tuple[Connection[Any, Any], io.FileIO]:
        """A new compile process: the connection to it, and the end of the pipe that receives its exit code."""
        ours, theirs = socket.socketpair()
        status, tells = os.pipe()
        module = None if self._home is None else self._home[0]
        request = json.dumps({"scratch": str(scratch), "memory": self.memory, "module": module}).encode()
        try:
            with log.open("wb") as logged, self._guard:
                descriptors = [theirs.fileno(), logged.fileno(), tells]
                try:
                    socket.send_fds(self._running(), [request], descriptors)
                except OSError:  # the server was killed: another one does as well
                    self._end()
                    socket.send_fds(self._running(), [request], descriptors)
        except BaseException:
            ours.close()
            os.close(status)
            raise
        finally:
            theirs.close()
            os.close(tells)
        return Connection(ours.detach()), io.FileIO(status)

    @contextlib.contextmanager
    def at(self, job: Job) -> Iterator[ForkServer]:
        """The server for `job`. Foreign modules have one each, so that what they change reaches no other kernel, and
        another one when their sources have changed. Few unused ones are kept.
        """
        if job.home is None:
            yield self
            return
        foreign = {label: value for label, value in (job.fields or {}).items() if label.startswith("foreign.")}
        digest = json.dumps(foreign, sort_keys=True)
        with self._guard:
            if self.closed:
                raise BuildError("the build was stopped")
            known, server = self._homes.pop(job.home, (None, None))
            if server is None or known != digest:
                if server is not None:
                    server.close()
                self._make_room()
                folder = Path(tempfile.mkdtemp(prefix="home-", dir=self._folder))
                server = ForkServer(folder, self.memory, self.recycle, job.home)
            self._homes[job.home] = digest, server  # after those that were used before
            server._users += 1
        try:
            yield server
        finally:
            with self._guard:
                server._users -= 1

    def _make_room(self) -> None:
        """Ends servers that have not been used for longest, each of which may hold a framework."""
        idle = [home for home, (_, server) in self._homes.items() if not server._users]
        for home in idle[: max(0, len(self._homes) - HOMES + 1)]:
            self._homes.pop(home)[1].close()

    def crash(self) -> BuildError | ToolchainError | None:
        """The error for a server that ended by itself, which can only happen while it imports."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if self._process is None else self._process.wait(_FAREWELL)
        if self._home is None:
            return unusable(f"its process died of it ({_cause(code)})") if code and -code in _CRASHES else None
        if code is None:
            return None
        return BuildError(f"importing {self._home[0]} ends the process ({_cause(code)}){_last_words(self._log)}")

    def close(self) -> None:
        """Ends the server and all its processes at once. Safe to call while they work."""
        with self._guard:
            self.closed = True
            for _, server in self._homes.values():
                server.close()
            self._end()

    def _running(self) -> socket.socket:
        if self.closed:
            raise BuildError("the build was stopped")
        if self._control is not None:
            return self._control
        if not sys.executable:
            raise ToolchainError("this Python does not know its own executable; a build starts processes; use another")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arch = None if self._home is None else self._home[1]
        variables = dict(variable.split("=", 1) for variable in (self._home or ())[2:])
        paths = [str(Path(entry).absolute()) for entry in (sys.path if arch is None else search_path())]
        with theirs, self._log.open("ab") as log:
            kept = private(compiler_cache())
            start = [str(Path(__file__).with_name("fresh.py")), str(theirs.fileno()), "" if kept is None else str(kept)]
            command = [sys.executable, "-P", "-c", _BOOT, *start, *paths]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], cwd=self._folder, env=environment(self._folder, arch) | variables,
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._control = ours
        return ours

    def _end(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if process is None or control is None:
            return
        control.close()  # upon which it ends its processes and itself
        try:
            process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:  # still importing, or stuck
            # The group is the server's own: it was started as a session, and is not reaped before the wait.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Worker:
    """One compile process of a fork server. It is replaced after it died, and when it has grown too large."""

    def __init__(self, server: ForkServer, scratch: Path) -> None:
        self._server = server
        self._scratch = scratch
        self._log = scratch.with_suffix(".log")
        self._connection: Connection[Any, Any] | None = None
        self._status: io.FileIO | None = None

    def compile(self, job: Job) -> Done:
        """Compiles and proves one kernel; raises what went wrong there, or BuildError when the process dies of it."""
        with self._server.at(job) as server:
            return self._compile(job, server)

    def _compile(self, job: Job, server: ForkServer) -> Done:
        if server is not self._server:
            self.hang_up()
        if self._connection is None:
            self._connection, self._status = server.fork(self._scratch, self._log)
        try:
            self._connection.send(job)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(job, server) from error
        assert isinstance(answer, Answer)
        if server is not self._server or answer.memory > server.recycle:
            self.hang_up()  # what the source of a foreign kernel leaves in a module reaches no other kernel
        if isinstance(answer.result, FusekitError):
            raise answer.result
        return answer.result

    def hang_up(self) -> None:
        """Lets the process go: it ends once it has nothing to do."""
        for end in (self._connection, self._status):
            if end is not None:
                end.close()
        self._connection = self._status = None

    def _died(self, job: Job, server: ForkServer) -> FusekitError:
        # It hung up, so it is about to end by itself; its own exit code is more useful than that of a kill.
        code = None
        if self._status is not None and not server.closed and select.select([self._status], [], [], _PATIENCE)[0]:
            status = self._status.read(16)
            code = int(status) if status else None
        self.hang_up()
        if server.closed:
            return BuildError(f"{job.name}: the build was stopped", name=job.name)
        if code is None and (crash := server.crash()) is not None:
            return crash
        words = f"the compile process died of {job.name} ({_cause(code)})"
        if job.home is not None and code is not None and code >= 0:
            words += "; a source returns what cute.compile takes, and ends no process"
        return BuildError(f"{words}{_last_words(self._log)}", name=job.name)


Team = tuple[Sequence[Compiler], Callable[[], None]]
"""What compiles, and a function that ends it at once, from any thread."""


@contextlib.contextmanager
def processes(jobs: int) -> Iterator[Team]:
    """`jobs` compile processes of one fork server, or as many as the memory holds; all gone afterwards."""
    limits = bound(jobs)
    with Scratch("build") as folder, contextlib.closing(ForkServer(Path(folder), limits.bytes)) as server:
        workers = [server.worker() for _ in range(limits.workers)]
        try:
            yield workers, server.close
        finally:
            server.close()
            for worker in workers:
                worker.hang_up()


def run(
    items: Sequence[T], compilers: Sequence[Compiler], task: Callable[[Compiler, T], R], stop: Callable[[], None]
) -> Generator[tuple[T, R | Exception], None, None]:
    """Runs `task` on every item, each on a thread of its own for one of `compilers`.

    Yields (item, result or what `task` raised) as they finish; what is postponed comes after the others. Closing the
    iterator, or an exception such as Ctrl-C in the caller's thread, calls `stop`, which ends what compiles; a task that
    is beyond compiling is given time to finish.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    finished: queue.SimpleQueue[tuple[T, R | Exception]] = queue.SimpleQueue()
    stopped = threading.Event()

    def feed(compiler: Compiler) -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((item, task(compiler, item)))
            except PostponedError:
                waiting.put(item)
                stopped.wait(_PAUSE)  # where nothing else is left this asks now and then
            except Exception as error:
                finished.put((item, error))

    threads = [threading.Thread(target=feed, args=(compiler,), daemon=True) for compiler in compilers[: len(items)]]
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            yield finished.get()
    finally:
        stopped.set()
        stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_PATIENCE)


def _last_words(log: Path) -> str:
    text = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"; its last words: {text}" if text else ""


def _cause(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"

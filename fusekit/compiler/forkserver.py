"""One process that has imported the compiler, and forks a compile process whenever one is asked for.

Importing the DSL takes a second or two and a hundred megabytes; a fork shares both. multiprocessing's own fork server
is not used because it imports the caller's main module, so that every script that builds would need a ``__main__``
guard; this one imports the same thing for everybody.

The server and what it forks are a session of their own, so Ctrl-C reaches only the caller. When its socket ends,
because the caller is done or was killed, the server ends every process that it forked, and then itself.

A request is one message: the scratch folder, the limit of memory and what to import before the fork as JSON, with three
descriptors: the socket that the new process works on, its log, and a pipe that the server writes the exit status to.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

from fusekit.compiler.reads import Watch
from fusekit.compiler.worker import COMPILER, serve
from fusekit.plan.operations import OPERATIONS

MESSAGE_BYTES = 1 << 16
_PLANNERS = sorted({row.modules[0] for row in OPERATIONS.values()})
_PRELOADED = (*COMPILER, "fusekit.compiler.trace", *_PLANNERS)


def main(descriptor: int, cache: str = "") -> None:
    """Serve requests on the socket `descriptor` until the other end hangs up. cache: folder of the files' digests."""
    control = socket.socket(fileno=descriptor)
    for module in _PRELOADED:
        # What cannot be imported is reported by the compile process that needs it.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(module)
    _Server(control, Path(cache) if cache else None).run()
    os._exit(0)  # to take all that was imported down would take more than half a second, which the caller waits for


class _Server:
    def __init__(self, control: socket.socket, cache: Path | None) -> None:
        self._control, self._cache = control, cache
        self._watch: Watch | None = None
        self._pipes: dict[int, int] = {}  # process -> where its exit status goes
        self._imported: set[str] = set()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._control:
                    message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 3)
                    if not message:  # the caller is done, or gone
                        self._end()
                        return
                    self._fork(json.loads(message), *descriptors)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, MESSAGE_BYTES)
            self._reap()

    def _fork(self, request: dict[str, Any], work: int, log: int, status: int) -> None:
        self._import(request["module"])
        child = os.fork()
        if child == 0:
            try:
                self._become_worker(request, work, log, status)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        self._pipes[child] = status
        os.close(work)
        os.close(log)

    def _import(self, module: str | None) -> None:
        if module is not None and module not in self._imported:
            self._imported.add(module)
            self._watch = self._watch or Watch.start()
            with contextlib.suppress(BaseException):  # reported by the compile process, which imports it again
                importlib.import_module(module)

    def _become_worker(self, request: dict[str, Any], work: int, log: int, status: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (*self._pipes.values(), self._wake, self._woken, status):
            os.close(descriptor)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(request["scratch"])
        tempfile.tempdir = request["scratch"]  # what the DSL leaves when it is killed goes with the rest
        limit = request["memory"]
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        serve(work, self._cache, self._watch)

    def _end(self) -> None:
        # Waited for as well: process 1 of a container may not do it.
        for child in self._pipes:
            os.kill(child, signal.SIGKILL)
        for child in self._pipes:
            os.waitpid(child, 0)

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            pipe = self._pipes.pop(process, None)
            if pipe is not None:
                with contextlib.suppress(OSError):  # no client waits for it any more
                    os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(pipe)

"""Fork servers that are forked themselves, from one process that has imported the compiler: the import takes longer
than a kernel of the tests. Each becomes what it would be if it was started; one with another environment or path is
started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_BOOT = f"""
import sys
fresh, servers = {{"__name__": "fresh"}}, {{"__name__": "servers"}}
for space, path in ((fresh, sys.argv[1]), (servers, {__file__!r})):
    space["__file__"] = path
    exec(compile(open(path, encoding="utf-8").read(), path, "exec"), space)
descriptor, folder = fresh["prepare"]()
from fusekit.compiler import forkserver
servers["serve"](forkserver, descriptor, folder)
"""
_MESSAGE = 1 << 20


def serve(forkserver: Any, descriptor: int, folder: str) -> None:
    """Imports what a server imports, and forks one for each request: its variables and current folder, as JSON, its
    socket and its log.
    """
    server = forkserver._Server

    class Forks:
        def __init__(self, control: socket.socket, cache: Path | None) -> None:
            self.control, self.cache = control, cache

        def run(self) -> None:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE, 2)
                if not message:
                    return
                child = os.fork()
                if child == 0:
                    become(json.loads(message), *descriptors, self)
                for each in descriptors:
                    os.close(each)
                self.control.send(str(child).encode())

    def become(request: dict[str, Any], control: int, log: int, forks: Forks) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        forks.control.close()
        os.setsid()
        for each in (1, 2):
            os.dup2(log, each)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        os.chdir(request["folder"])
        server(socket.socket(fileno=control), forks.cache).run()
        os._exit(0)

    forkserver._Server = Forks
    forkserver.main(descriptor, folder)


class Popen:
    """In place of subprocess.Popen in fusekit.compiler.pool; `close` ends what is forked from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of: tuple[Any, ...] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __call__(self, command: list[str], **options: Any) -> Any:
        (descriptor,) = options["pass_fds"]
        variables = {name: value for name, value in options["env"].items() if name != "TMPDIR"}
        kind = (*command[:5], *command[6:], *sorted(variables.items()))
        self._of = self._of or kind
        if self._of != kind:
            return subprocess.Popen(command, **options)
        if self._control is None:
            self._start(command, options)
        request = {"environment": options["env"], "folder": str(options["cwd"])}
        socket.send_fds(self._control, [json.dumps(request).encode()], [descriptor, options["stdout"].fileno()])
        return _Forked(int(self._control.recv(64)))

    def _start(self, command: list[str], options: dict[str, Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = [*command[:3], _BOOT, command[4], str(theirs.fileno()), *command[6:]]
        with theirs:
            environment = options["env"] | {"TMPDIR": str(self._folder)}
            self._process = subprocess.Popen(
                boot, pass_fds=[theirs.fileno()], cwd=self._folder, env=environment, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()


class _Forked:
    """A server that is no child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None

    def wait(self, timeout: float | None = None) -> int:
        if self._descriptor is not None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork server", timeout or 0)
            os.close(self._descriptor)
            self._descriptor = None
        return 0

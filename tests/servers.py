"""Processes that are forked from one that has imported what they need, as the import takes longer than what they do:
the fork servers of builds, and `python -m fusekit`. Each becomes what it would be if it was started, and one with
another path or environment is started. Imports the standard library alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

_MESSAGE = 1 << 20
SETTINGS = {"PATH": "/usr/bin:/bin"}
"""All that commands have of variables, before a test adds its own."""
ANEW = "COMPILED_ANEW"
"""The variable with which a command compiles kernels that were compiled before."""
_LOAD = f"""
import sys
def load(path):
    space = {{"__name__": "loaded", "__file__": path}}
    exec(compile(open(path, encoding="utf-8").read(), path, "exec"), space)
    return space
servers = load({__file__!r})
"""
_COMPILER = f'{_LOAD}servers["serve_compiler"](load(sys.argv[1])["prepare"])'
_COMMANDS = f'{_LOAD}servers["serve_commands"]()'
_NO_KIND = ("TMPDIR", "PYTHONDONTWRITEBYTECODE")
# What decides how Python starts, and so cannot be set after it has.
_OF_THE_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "OPENBLAS_")


def _bind(path: Path) -> socket.socket:
    """A listening socket at `path`, whose folder's name may be longer than that of a socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    listener.listen()
    return listener


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    return connection


def _loop(listener: socket.socket, owner: int, become: Callable[..., NoReturn]) -> None:
    """Fork for each request, which is JSON and descriptors, until the process `owner` ends. Return in the forks."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _wait(listener, owner)
        connection, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 4)
        if message and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(owner)
            become(json.loads(message), connection, *descriptors)
        for each in descriptors:
            os.close(each)
        connection.close()


def _fork(connection: socket.socket, *descriptors: int) -> None:
    """Return in a child; this process sends its number and its exit code, and ends with it."""
    child = os.fork()
    if child:
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(child).encode())
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    connection.close()


def _wait(listener: socket.socket, owner: int) -> None:
    if owner in select.select([listener, owner], [], [])[0]:
        os._exit(0)


def _enter(request: Mapping[str, Any], *descriptors: int) -> None:
    """Take over variables, folder and search path of the request, and `descriptors` as 0, 1, 2 or the last of them."""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    os.chdir(request["folder"])
    sys.path[:] = request["paths"]
    for number, descriptor in enumerate(descriptors, 3 - len(descriptors)):
        os.dup2(descriptor, number)
        os.close(descriptor)


def serve_compiler(prepare: Callable[[], tuple[int, str]]) -> None:
    """Import what a fork server of builds imports, when the first is asked for; then fork them."""
    owner = os.pidfd_open(int(sys.argv.pop()))
    listener = socket.socket(fileno=int(sys.argv[2]))
    _wait(listener, owner)
    listener.detach()
    descriptor, folder = prepare()
    from fusekit.compiler import forkserver

    server = forkserver._Server

    class Forks:
        def __init__(self, control: socket.socket, cache: Path | None) -> None:
            self.control, self.cache = control, cache

        def run(self) -> None:
            _share()
            _loop(self.control, owner, self.become)

        def become(self, request: dict[str, Any], connection: socket.socket, control: int, log: int) -> NoReturn:
            _fork(connection, control, log)
            os.setsid()
            if "program" in request:
                _enter(request, control, log)
                sys.argv[:] = ["-c", *request["arguments"]]
                exec(request["program"], {"__name__": "__main__"})
                _end(0)
            _enter(request, os.dup(log), log)
            if request["kept"]:
                _keep(Path(request["kept"]))
            server(socket.socket(fileno=control), self.cache).run()
            os._exit(0)

    forkserver._Server = Forks  # type: ignore[misc,assignment]
    forkserver.main(descriptor, folder)


def _keep(folder: Path) -> None:
    """Compile no kernel of which `folder` has the compiled form, by all that its key is made of."""
    from filelock import FileLock

    from fusekit.compiler import worker
    from fusekit.store import key_of

    compiled = worker._compiled

    def look_up(job: worker.Job, cache: Path | None) -> Any:
        if job.fields is None or job.home is not None:
            return compiled(job, cache)
        kept = folder / f"compiled-{key_of(dict(job.fields))}"
        with FileLock(f"{kept}.lock"):
            if kept.exists():
                worker._same_spec(job)
                return pickle.loads(kept.read_bytes())
            done = compiled(job, cache)
            if isinstance(done, worker.Done):
                kept.write_bytes(pickle.dumps(done))
            return done

    worker._compiled = look_up


def serve_commands() -> None:
    """Import the commands, when the first is asked for; then fork `python -m fusekit`."""
    listener, folder, owner = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], os.pidfd_open(int(sys.argv[3]))
    _wait(listener, owner)
    from fusekit.compiler import new_extern, pool
    from fusekit_cli.main import COMMANDS, cli

    for name in COMMANDS:
        cli.get_command(None, name)  # type: ignore[arg-type]
    for module in (
        "fusekit.compiler.build",
        "fusekit.share.remote",
        "cryptography.hazmat.primitives.asymmetric.ed25519",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    pool.subprocess = subprocess_of(Path(folder), keep=True)  # type: ignore[attr-defined]
    new_extern.subprocess = SimpleNamespace(run=run_of(Path(folder)))  # type: ignore[attr-defined]
    os.fsync = lambda descriptor: None  # as in conftest.py

    def become(request: dict[str, Any], connection: socket.socket, *descriptors: int) -> NoReturn:
        _fork(connection, *descriptors)
        _enter(request | {"paths": [request["folder"], *sys.path[1:]]}, *descriptors)
        sys.argv[:] = ["fusekit", *request["arguments"]]
        try:
            runpy.run_module("fusekit", run_name="__main__", alter_sys=True)
            sys.exit()
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                _end(ended.code or 0)
            raise

    _share()
    _loop(listener, owner, become)


def _share() -> None:
    """Memory of now stays shared with forks: no collection of theirs touches it."""
    gc.collect()
    gc.freeze()


def _end(code: int) -> None:
    """End as the interpreter does, without freeing each object; return where output cannot be written."""
    with contextlib.suppress(OSError):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def start(path: Path, command: Sequence[str], owner: int, **options: Any) -> None:
    """Start what listens at `path` and ends with the process `owner`. command: "{}" is its socket."""
    with _bind(path) as listener:
        line = [str(listener.fileno()) if argument == "{}" else argument for argument in (*command, str(owner))]
        subprocess.Popen(
            line, pass_fds=[listener.fileno()], cwd=path.parent, start_new_session=True, stdin=subprocess.DEVNULL,
            **options,
        )  # fmt: skip


def start_compiler(folder: Path, variables: Mapping[str, str], fresh: Path, cache: Path | None, owner: int) -> None:
    """What the builds of all tests fork their servers from. variables: those of a fork server."""
    command = [sys.executable, "-P", "-c", _COMPILER, str(fresh), "{}", str(cache or ""), *sys.path]
    kept = dict(variables) | {"TMPDIR": str(folder)}
    with (folder / "compiler.log").open("ab") as log:
        start(folder / _kind(command[4], command[6], kept), command, owner, env=kept, stdout=log, stderr=log)
    (folder / "paths").write_text(json.dumps(sys.path))


def _kind(fresh: str, cache: str, variables: Mapping[str, str]) -> str:
    rows = sorted(f"{name}={value}" for name, value in variables.items() if name not in _NO_KIND)
    return hashlib.sha256("\0".join((sys.executable, fresh, cache, str(os.geteuid()), *rows)).encode()).hexdigest()[:16]


def _same_packages(paths: Sequence[str], here: Sequence[str]) -> bool:
    """Whether what was imported along `here` would be the same along `paths`."""
    roots = tuple(f"{prefix}/lib" for prefix in (sys.prefix, sys.base_prefix))
    installed = [[each for each in some if each.startswith(roots)] for some in (paths, here)]
    other = [Path(each) for each in paths if each not in here]
    shadows = any((each / name).exists() for each in other for name in ("fusekit", "cutlass", "numpy", "llvmlite"))
    return installed[0] == installed[1] and not shadows and not any(list(each.glob("*.dist-info")) for each in other)


def subprocess_of(folder: Path, *, keep: bool = False) -> Any:
    """What `fusekit.compiler.pool` has as `subprocess`, to fork from what `start_compiler` started in `folder`. keep: a
    kernel that was compiled once is not compiled again.
    """

    def popen(command: list[str], **options: Any) -> Any:
        path = folder / _kind(command[4], command[6], options["env"])
        here = json.loads((folder / "paths").read_text())
        if not path.exists() or not _same_packages(command[7:], here):
            return subprocess.Popen(command, **options)
        request = {"environment": options["env"], "folder": str(options["cwd"]), "paths": command[7:]}
        request["kept"] = str(folder) if keep and not os.environ.get(ANEW) else ""
        (control,) = options["pass_fds"]
        connection = _connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [control, options["stdout"].fileno()])
        return _Forked(connection)

    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


def run_of(folder: Path) -> Callable[..., Any]:
    """What `fusekit.compiler.new_extern` has as `subprocess.run`: its program runs in a fork of a fork server."""
    from fusekit.compiler import pool
    from fusekit.compiler.digests import private
    from fusekit.config import compiler_cache

    def run(command: list[str], **options: Any) -> Any:
        program, arguments = command[3], command[4:]
        fresh = Path(pool.__file__).with_name("fresh.py")
        path = folder / _kind(str(fresh), str(private(compiler_cache()) or ""), options["env"])
        if not path.exists() or not _same_packages(arguments[1:], json.loads((folder / "paths").read_text())):
            return subprocess.run(command, **options)
        request = {"environment": options["env"], "folder": str(options["cwd"]), "paths": arguments[1:]}
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2))
            connection = stack.enter_context(_connect(path))
            message = json.dumps(request | {"program": program, "arguments": arguments}).encode()
            socket.send_fds(connection, [message], [out.fileno(), err.fileno()])
            code = _Forked(connection).wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    return run


class _Forked:
    """A process that is no child of this one."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = int(connection.recv(64))
        self._connection: socket.socket | None = connection
        self._code = 0

    def wait(self, timeout: float | None = None) -> int:
        if self._connection is not None:
            self._connection.settimeout(timeout)
            try:
                self._code = int(self._connection.recv(64) or -signal.SIGKILL)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout or 0) from None
            self._connection.close()
            self._connection = None
        return self._code


class Commands:
    """Runs `python -m fusekit` as a fork of what is started once in `folder`, that of `start_compiler`."""

    def __init__(self, folder: Path, environment: Mapping[str, str], owner: int) -> None:
        self._environment = dict(environment)
        self._path = folder / "commands"
        if self._path.exists():
            return
        command = [sys.executable, "-c", _COMMANDS, "{}", str(folder)]
        with (folder / "commands.log").open("ab") as log:
            start(self._path, command, owner, env=self._environment, stdout=log, stderr=log)

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, stdin: str, timeout: float
    ) -> tuple[int, str, str]:
        """The exit code, stdout and stderr."""
        changed = {name for name, value in env.items() if self._environment.get(name) != value}
        if any(name.startswith(_OF_THE_START) for name in changed | (self._environment.keys() - env.keys())):
            done = subprocess.run(
                [sys.executable, "-m", "fusekit", *arguments], env=env, cwd=cwd, input=stdin, capture_output=True,
                text=True, timeout=timeout, check=False,
            )  # fmt: skip
            return done.returncode, done.stdout, done.stderr
        request = {"arguments": list(arguments), "environment": dict(env), "folder": os.path.realpath(cwd)}
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
            files[0].write(stdin)
            files[0].seek(0)
            connection = stack.enter_context(_connect(self._path))
            socket.send_fds(connection, [json.dumps(request).encode()], [file.fileno() for file in files])
            command = _Forked(connection)
            try:
                code = command.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(command.pid, signal.SIGKILL)
                raise
            for file in files[1:]:
                file.seek(0)
            return code, files[1].read(), files[2].read()

"""`fusekit exec`: run a program whose CuTe DSL kernels come from the store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusekit.errors import UsageError
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.config import CuteConfig
    from fusekit.cute.carried import Carriage

_PR_SET_CHILD_SUBREAPER = 36
_SI_USER = 0
_RENEW_SECONDS = 60.0
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as of a shell
_PASSED_ON = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
)  # fmt: skip


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[--] CMD...")
@click.option(
    "--level",
    type=click.Choice(["1", "2"]),
    default="2",
    help="2: trace each time (default). 1: leave the trace out where all that it read is as it was.",
)
@click.option(
    "--with",
    "packages",
    default="",
    metavar="PACKAGE,...",
    help="Carry the caches of triton, deepgemm, inductor in the store as well.",
)
@click.option("--records", is_flag=True, help="Afterwards adopt what was used: see `fusekit adopt`.")
@common
def command(session: Session, program: tuple[str, ...], level: str, packages: str, records: bool) -> int:
    """Run CMD; what its processes compile with the CuTe DSL comes from the store, and goes there if it is missing.

    CMD need not be changed: `fusekit exec -- python serve.py`. The line on stderr at the end counts over all processes
    that it started, and comes when the last of them has ended. FUSEKIT_MISS=warn reports each compilation with its
    reason, FUSEKIT_MISS=error refuses it. What the store has is machine code, which is loaded only from root, the
    caller and FUSEKIT_TRUSTED_USERS, or signed. The exit code is that of CMD. With --with, what the store has of the
    caches of those packages is laid out for CMD in a folder of its own, and what is new there is stored at the end.
    """
    if not program:
        raise UsageError("there is no program to run; name one: fusekit exec -- python serve.py")
    if session.json:
        raise UsageError("exec leaves stdout to the program; leave --json out, or put it behind the program's name")
    return execute(session, program, {}, int(level), records=records, packages=_packages(packages))


def _packages(text: str) -> tuple[str, ...]:
    """The packages that `--with` names."""
    from fusekit.cute.packages import PACKAGES

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in PACKAGES:
            known = ",".join(PACKAGES)
            raise UsageError(f"--with {text}: {name} is not known; it takes one or more of these: --with {known}")
    return names


def execute(
    session: Session, program: tuple[str, ...], variables: Mapping[str, str], level: int = 2, *, records: bool = False,
    packages: Sequence[str] = (),
) -> int:  # fmt: skip
    """Run `program` with `variables` in its environment and the store behind its DSL. records: adopt what it used.
    packages: whose caches are carried. Returns the exit code.
    """
    import fusekit.cute
    from fusekit.config import CuteConfig, exec_environment
    from fusekit.cute.report import counts, keys, troubles

    cute = replace(CuteConfig.from_environment(session.config), level=level)
    with _report(session) as report, _lease(cute) as renew, _carried(session, cute, packages, program) as carried:
        environment = exec_environment(
            cute, Path(fusekit.cute.__file__).parent / "startup", report, carries=bool(packages)
        )
        environment |= {**variables, **carried.variables}
        try:
            status = _run(program, environment, renew)
        except FileNotFoundError:
            session.error(f"there is no program {program[0]}; {_instead(program[0]) or 'check the name, and PATH'}")
            return _NOT_FOUND
        except OSError as error:
            remedy = _instead(program[0]) or "check its permissions"
            session.error(f"{program[0]} cannot be run: {error.strerror}; {remedy}")
            return _NOT_EXECUTABLE
        also = carried.store() if _ended() is None else ""
        if report is not None:
            hits, misses, saved = counts(report)
            session.note(f"fusekit: {hits} hits, {misses} misses, {saved:.1f} s saved{also}")
            for trouble in troubles(report):
                session.note(f"fusekit: {trouble}")
            if records:
                _adopt(session, cute, keys(report))
    if os.WIFSIGNALED(status):
        _die(os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _instead(word: str) -> str:
    """How to run what `word` is meant to be, if it is no program but looks like something else."""
    if word.endswith(".py"):
        return f"give it to Python: fusekit exec -- python {word}"
    if " " in word:
        return f"give a command as several words: fusekit exec -- {word}"
    if "=" in word:
        return f"variables are set before fusekit: {word} fusekit exec -- CMD"
    return ""


def _adopt(session: Session, cute: CuteConfig, used: frozenset[str]) -> None:
    """Make kernels of the entries `used`. A failure is a line on stderr: the program has ended as it has."""
    try:
        from fusekit.cute.adopt import adopt_all
        from fusekit.cute.blobs import open_store
        from fusekit.store.entries import HOST_OBJECT

        store = open_store(cute)
        records = [each.record for each in store.names()]
        found = [each for each in records if each.key in used and HOST_OBJECT in each.spec]
        done, failed = adopt_all(store, found)
    except Exception as error:
        session.note(f"fusekit: nothing is adopted: {type(error).__name__}: {error}")
        return
    for each in done:
        session.note(f"fusekit: adopted as {each.name}")
    for name, reason in failed.items():
        session.note(f"fusekit: {name} is not adopted: {reason}")


@contextlib.contextmanager
def _report(session: Session) -> Iterator[Path | None]:
    """A file for the events of all processes; None where none can be written."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="fusekit-exec-")
    except OSError as error:
        session.note(f"fusekit: hits and misses are not counted: {error.strerror}")
        yield None
        return
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108


@contextlib.contextmanager
def _lease(cute: CuteConfig) -> Iterator[Callable[[], None]]:
    """What the program uses stays in the store while it runs. Yields what keeps the lease."""
    with contextlib.ExitStack() as held:
        renewals: list[Callable[[], None]] = []
        with contextlib.suppress(Exception):  # the program runs without it
            from fusekit.store import Store

            store = Store.open(cute.config)
            held.enter_context(store.lease(make=False))
            renewals.append(store.renew)

        def renew() -> None:
            for step in renewals:
                step()

        yield renew


@contextlib.contextmanager
def _carried(session: Session, cute: CuteConfig, packages: Sequence[str], program: Sequence[str]) -> Iterator[Carriage]:
    """The caches of `packages` for a run of `program`, which are removed afterwards if no process is left."""
    from fusekit.config import program_environment
    from fusekit.cute.carried import Carriage

    carried = Carriage(cute, packages, program, program_environment())

    def note() -> None:
        for trouble in carried.troubles:
            session.note(f"fusekit: {trouble}")
        carried.troubles.clear()

    note()
    try:
        yield carried
    finally:
        if _ended() is None:
            carried.remove()
        note()


def _run(program: tuple[str, ...], environment: Mapping[str, str], renew: Callable[[], None]) -> int:
    """Run `program` and wait for it and for all that it started; `renew` is called now and then. Returns its status as
    `os.wait` gives it.
    """
    # Processes whose parent ends become children of this one, which so can wait for them.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no status is kept
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    try:
        main = os.posix_spawnp(
            program[0], program, environment, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
        )
        return _wait(main, renew)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(main: int, renew: Callable[[], None]) -> int:
    status = None
    while True:
        while (ended := _ended()) is not None and ended[0]:
            if ended[0] == main:
                status = ended[1]
        if ended is None:
            return 0 if status is None else status
        info = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD), _RENEW_SECONDS)
        if info is None:
            with contextlib.suppress(Exception):
                renew()
            continue
        if info.si_signo == signal.SIGCHLD:
            continue
        if status is not None:
            return status  # only what `program` left behind is waited for
        # What a terminal sends, it sends to the program as well.
        if info.si_code == _SI_USER:
            with contextlib.suppress(ProcessLookupError):
                os.kill(main, info.si_signo)


def _ended() -> tuple[int, int] | None:
    """(process, status) of a child that has ended, (0, 0) if there are others, None if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None


def _die(number: int, kill: Callable[[int, int], None] = os.kill) -> None:
    """End as the program did: a shell sees the signal."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    kill(os.getpid(), number)

"""The entry point: the group of verbs, each imported when it is called, and what becomes of errors.

A verb's return value, if it is an int, is the exit code: 0 done, 1 what was asked failed, 2 usage or spec error, 3
not in the store, 4 no usable GPU or driver; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from keyword import iskeyword

import click

import fusekit
from fusekit.errors import FusekitError, SpecWarning
from fusekit_cli.options import Session, common
from fusekit_cli.terminal import ClosedPipeError, answering, open_streams

STOPS = (signal.SIGTERM, signal.SIGHUP)

# What `--help` shows; a verb's own file is only imported when it is called.
VERBS = {
    "new": "Write a spec file for a model, or for a kernel of yours.",
    "build": "Compile what the store lacks; needs no GPU.",
    "ls": "List what the store holds.",
    "show": "Show one entry whole.",
    "explain": "Say why a kernel would be built, or would not.",
    "verify": "Check the store against its digests.",
    "gc": "Evict what was used least recently.",
    "rm": "Remove names, and the kernels that only they kept.",
    "copy": "Copy from read-only roots into the writable store.",
    "lock": "Compare the store with the cache manifests, or write them.",
    "export": "Write kernels to one file, a bundle, or as C source.",
    "import": "Publish what a bundle holds.",
    "push": "Move kernels to a folder or an object store.",
    "pull": "Move kernels from there into the store.",
    "key": "Make keys, and sign what is in the store.",
    "run": "Launch a kernel from the store on made-up tensors.",
    "bench": "Compare kernels with other libraries; tune.",
    "doctor": "Say what this machine can do.",
    "schema": "Print the JSON Schema of spec files.",
}


class LazyGroup(click.Group):
    """A group whose commands are modules of this package, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = import_module(f"fusekit_cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(fusekit.__version__, prog_name="fusekit", message="%(prog)s %(version)s")
@common
def cli(session: Session) -> None:
    """Kernels compiled ahead of time from specs, kept in a store, launched without the compiler.

    A name is FILE/KERNEL@VARIANT; FILE, FILE/KERNEL and globs work wherever a name does.
    """


class Stopped(KeyboardInterrupt):
    """A signal asks for the end. signal: which."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """While this lasts, `STOPS` end a command as Ctrl-C does, so that it clears away what is its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for each in taken:  # a second one would disturb the clearing away
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    # A signal that is ignored, as by nohup, stays so.
    taken = [each for each in STOPS if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv`'s without `arguments`; returns the exit code. Errors are one message on
    stderr.
    """
    gc.set_threshold(100_000)  # a command is short: modules and syntax trees stay to its end
    open_streams()
    session = Session()
    try:
        with _stoppable(), answering(), warnings.catch_warnings():
            warnings.simplefilter("always", SpecWarning)
            warnings.showwarning = session.warn
            code = cli.main(arguments, prog_name="fusekit", obj=session, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt) as error:
        stop = error.__cause__ if isinstance(error, click.Abort) else error  # click makes the one of the other
        by = stop.signal if isinstance(stop, Stopped) else signal.SIGINT
        session.error(f"interrupted ({by.name}); what was published stays, the same command carries on")
        return 128 + by
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        session.say(shown.getvalue().rstrip("\n"))
        return error.exit_code
    except ClosedPipeError:
        return 128 + signal.SIGPIPE
    except Exception as error:
        if session.debug:
            import traceback

            session.say(traceback.format_exc().rstrip())
        session.error(_message(error))
        return error.exit_code if isinstance(error, FusekitError) else 1


def _message(error: Exception) -> str:
    if isinstance(error, FusekitError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {error or 'the machine has no more'}; take a smaller problem, such as fewer --rows"
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return (
            f"{where}{error.strerror}; the system refuses what a command needs; check the path, its file system and the"
            " current folder"
        )
    return f"{type(error).__name__}: {error}; this is a defect of fusekit; --debug shows where it happened"


if __name__ == "__main__":
    sys.exit(main())

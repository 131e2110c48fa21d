"""The entry point: the group of commands, each imported when it is called, and error handling.

The return value of a command, if it is an int, is the exit code: 0 done, 1 the operation failed, 2 usage or spec error,
3 not in the store, 4 no usable GPU or driver; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
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

# The list of `--help`; the module of a command is only imported when it is called.
COMMANDS = {
    "init": "Write a project file, fusekit.toml.",
    "new": "Write a spec file for a model, or for a kernel of yours.",
    "specs": "List the packaged layers and kernels, with their sizes.",
    "build": "Compile what the store lacks; needs no GPU.",
    "ls": "List the kernels in the store.",
    "show": "Show an entry in full.",
    "diff": "Compare two kernels: spec, resources, instructions.",
    "report": "Write a page of HTML about a store, a bundle or a wheel.",
    "explain": "Show why a kernel would be built, or would not.",
    "verify": "Check the store against its digests.",
    "gc": "Evict the least recently used kernels.",
    "rm": "Remove names, and kernels without another name.",
    "copy": "Copy from read-only roots into the writable store.",
    "lock": "Compare the store with a lock, or write it.",
    "sync": "Make the store hold what fusekit.lock lists.",
    "export": "Write kernels to one file, a bundle, or as C source.",
    "import": "Publish the kernels of a bundle.",
    "push": "Copy kernels to a folder or an object store.",
    "pull": "Copy kernels from there into the store.",
    "key": "Create keys, and sign the kernels in the store.",
    "run": "Launch a kernel from the store on random inputs.",
    "exec": "Run a program whose CuTe DSL kernels come from the store.",
    "adopt": "Make kernels with names of what exec compiled.",
    "warm": "Fill the store with what programs or models compile.",
    "bench": "Compare kernels with other libraries; tune.",
    "doctor": "Report what this machine can do.",
    "schema": "Print the JSON Schema of spec files.",
    "help": "Show the help of a command.",
}


class LazyGroup(click.Group):
    """A group whose commands are modules of this package, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = import_module(f"fusekit_cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(fusekit.__version__, prog_name="fusekit", message="%(prog)s %(version)s")
@common
def cli(session: Session) -> None:
    """Kernels compiled ahead of time from specs, kept in a store, launched without the compiler.

    A name is FILE/KERNEL@VARIANT; FILE, FILE/KERNEL and globs work wherever a name does.
    """


class Stopped(KeyboardInterrupt):
    """A signal ends the command. signal: which."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """In the body, `STOPS` end a command as Ctrl-C does, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for handled in numbers:  # a second one would disturb the clean-up
            signal.signal(handled, signal.SIG_IGN)
        raise Stopped(number)

    # A signal that is ignored, as with nohup, stays ignored.
    numbers = [number for number in STOPS if signal.getsignal(number) is signal.SIG_DFL]
    for handled in numbers:
        signal.signal(handled, stop)
    try:
        yield
    finally:
        for handled in numbers:
            signal.signal(handled, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`arguments`, or that of `sys.argv`); returns the exit code. An error is one message on
    stderr.
    """
    gc.set_threshold(100_000)  # a command is short: modules and syntax trees live to its end
    open_streams()
    session = Session()
    try:
        with _stoppable(), answering(), warnings.catch_warnings():
            warnings.simplefilter("always", SpecWarning)
            warnings.showwarning = session.warn
            code = cli.main(arguments, prog_name="fusekit", obj=session, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt) as error:
        stop = error.__cause__ if isinstance(error, click.Abort) else error  # click wraps KeyboardInterrupt in Abort
        if isinstance(stop, EOFError):  # and this one, which half a file of byte code is answered with
            return _failed(session, stop)
        by = stop.signal if isinstance(stop, Stopped) else signal.SIGINT
        session.error(f"interrupted ({by.name}); what was published stays, and the same command continues")
        return 128 + by
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        session.say(shown.getvalue().rstrip("\n"))
        return error.exit_code
    except ClosedPipeError:
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _failed(session, error)


def _failed(session: Session, error: Exception) -> int:
    if session.debug:
        import traceback

        session.say("".join(traceback.format_exception(error)).rstrip())
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
            f"{where}{error.strerror}; the system refused an operation; check the path, its file system and the"
            " current folder"
        )
    return f"{type(error).__name__}: {error}; this is a defect of fusekit; --debug shows where it happened"


if __name__ == "__main__":
    sys.exit(main())

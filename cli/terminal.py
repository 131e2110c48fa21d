"""Safe output on a terminal: no control characters from a name, a path or a spec, and no message of megabytes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

from fusekit.errors import FusekitError

MESSAGE_CHARACTERS = 8000
"""Longest message on stderr; a longer one loses its middle."""

# C0 but tab and newline, DEL, C1, separators of lines, marks that change the direction of text, halves of surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class AnswerError(FusekitError):
    """The output could not be written to stdout."""


class ClosedPipeError(Exception):
    """The reader closed stdout. (Click turns a BrokenPipeError into another exit code.)"""


def printable(text: str) -> str:
    r"""`text` with control characters as their Python escapes, such as \x1b; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def inline(text: str) -> str:
    """`text` for one line of a table or a tree."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def message(text: str) -> str:
    """`text` for stderr: printable, and shortened in the middle if it is very long."""
    if len(text) > MESSAGE_CHARACTERS:
        head, tail = MESSAGE_CHARACTERS * 3 // 4, MESSAGE_CHARACTERS // 4
        text = f"{text[:head]} [... {len(text) - head - tail} characters left out ...] {text[-tail:]}"
    return printable(text)


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Ignore errors of writing to stderr: they change neither the output nor the exit code."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            sys.stderr.close()  # or Python tries again at exit, and changes the exit code
        sys.stderr = None


def open_streams() -> None:
    """Open standard streams that were closed, so that no file of a store gets the descriptor to which errors are
    written. Standard input is then empty, and writing to stdout fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


class _Stdout(io.TextIOWrapper):
    def write(self, text: str) -> int:
        with writing():
            super().write(printable(text))
        return len(text)

    def write_drawn(self, text: str) -> None:
        """Write `text` unchanged."""
        with writing():
            super().write(text)

    def flush(self) -> None:
        with writing():
            super().flush()


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turn errors of writing to stdout into AnswerError or ClosedPipeError."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipeError from error
    except OSError as error:
        raise AnswerError(
            f"cannot write the answer to stdout: {error.strerror}; the command itself is done; check where stdout leads"
        ) from error


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """In the body, escape control characters on stdout, and raise `AnswerError` if it cannot be written."""
    before = sys.stdout
    buffer = getattr(before, "buffer", None)
    if buffer is None:  # closed, or a stand-in
        yield
        return
    before.flush()
    encoding = "utf-8" if (before.encoding or "ascii").lower() in ("ascii", "ansi_x3.4-1968") else before.encoding
    sys.stdout = stdout = _Stdout(buffer, encoding, "backslashreplace", line_buffering=before.isatty())
    try:
        yield
        stdout.flush()
    except (AnswerError, ClosedPipeError):
        with contextlib.suppress(OSError):
            buffer.close()  # or Python tries again at exit, and changes the exit code
        raise
    finally:
        sys.stdout = before
        with contextlib.suppress(OSError, ValueError):
            stdout.detach()

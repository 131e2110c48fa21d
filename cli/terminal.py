"""What may reach a terminal: no control character of a name, a path or a spec, and no message of megabytes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

from fusekit.errors import FusekitError

MESSAGE_CHARACTERS = 8000
"""Of a message on stderr, at most; what is longer loses its middle."""

# C0 but tab and newline, DEL, C1, separators of lines, marks that change the direction of text, halves of surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class AnswerError(FusekitError):
    """Stdout does not take the answer."""


class ClosedPipeError(Exception):
    """Whoever read stdout has seen enough. (Click makes an exit code of its own of a BrokenPipeError.)"""


def printable(text: str) -> str:
    r"""`text` with control characters as their Python escapes, such as \x1b; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def inline(text: str) -> str:
    """`text` for one line of a table or a tree."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def message(text: str) -> str:
    """`text` for stderr: printable, and shortened in its middle where it is very long."""
    if len(text) > MESSAGE_CHARACTERS:
        head, tail = MESSAGE_CHARACTERS * 3 // 4, MESSAGE_CHARACTERS // 4
        text = f"{text[:head]} [... {len(text) - head - tail} characters left out ...] {text[-tail:]}"
    return printable(text)


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """For what is written to stderr: one that takes nothing changes no answer and no exit code."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            sys.stderr.close()  # or Python tries once more when it ends, and exits as it likes
        sys.stderr = None


def open_streams() -> None:
    """Open standard streams that were closed, so that no file of a store gets the number to which others write errors.
    Standard input is empty then, and stdout takes nothing.
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
        """Writes `text` as it is."""
        with writing():
            super().write(text)

    def flush(self) -> None:
        with writing():
            super().flush()


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """While bytes go to stdout: says so where it does not take them."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipeError from error
    except OSError as error:
        raise AnswerError(
            f"cannot write the answer to stdout: {error.strerror}; what was asked for is done all the same; look at "
            "where stdout leads"
        ) from error


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """While this lasts, what is printed is made printable, and an `AnswerError` says that stdout does not take it."""
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
            buffer.close()  # or Python tries once more when it ends, and exits as it likes
        raise
    finally:
        sys.stdout = before
        with contextlib.suppress(OSError, ValueError):
            stdout.detach()

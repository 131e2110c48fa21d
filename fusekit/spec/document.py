"""A spec file's bytes to its TOML document, within bounds: what is no spec file is refused before it costs time.

| bound | |
|---|---|
| `MAX_BYTES` | bytes of a file |
| `MAX_DEPTH` | brackets within brackets |
| `MAX_PARTS` | parts of a dotted key |
"""

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from fusekit.errors import SpecError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_PARTS = 16

# Strings, to the end of the text where they are not closed, and comments: dots and brackets mean nothing in them.
_PROSE = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|\'\'\'.*?(?:\'{3,5}|\Z)|"(?:[^"\\\n]|\\[^\n])*"?|\'[^\'\n]*\'?|#[^\n]*',
    re.DOTALL,
)


def read(path: Path) -> str:
    """The text of a spec file. Raises SpecError for what is no regular file, is too large, or is not UTF-8."""
    data = b""
    try:
        # Not blocking: opening a pipe would wait for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                raise SpecError(f"{path}: cannot be read: it is no regular file; write the spec into one first")
            if status.st_size <= MAX_BYTES:
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(MAX_BYTES + 1) or b""
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise SpecError(f"{path}: there is no such file; give the path of a spec file, or a packaged name") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give the path of a readable spec file") from error
    except ValueError as error:  # a zero byte in the path
        raise SpecError(f"{str(path)!r}: cannot be a path: {error}; give the path of a spec file") from None
    _check_size(max(len(data), status.st_size), str(path))
    return decode(data, str(path))


def decode(data: bytes, source: str) -> str:
    """The text of a spec file's bytes. Raises SpecError for what is not UTF-8."""
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{source}: byte {error.start} is not UTF-8, which TOML is written in; save it as UTF-8"
        ) from None


def parse(text: str, source: str) -> dict[str, Any]:
    """The document of a spec file's text. Raises SpecError."""
    _check_size(len(text), source)
    _check_nesting(text, source)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{source}: not TOML: {error}; see toml.io for the syntax") from None
    except (ValueError, OverflowError):  # Python's own bound on the digits of a number
        raise SpecError(
            f"{source}: a number has thousands of digits; numbers of a spec are at most 2147483647"
        ) from None


def _check_size(size: int, source: str) -> None:
    if size > MAX_BYTES:
        raise SpecError(
            f"{source}: {size} bytes; a spec file has at most {MAX_BYTES}; split it, or sweep lists of values instead"
        )


def _check_nesting(text: str, source: str) -> None:
    """Deep brackets and long dotted keys take more than linear time to read, and every reader's stack."""
    bare = _PROSE.sub(lambda prose: "s" + "\n" * prose[0].count("\n"), text)
    depth = 0
    for match in re.finditer(r"[\[{]+|[\]}]+", bare):
        depth += len(match[0]) if match[0][0] in "[{" else -len(match[0])
        if depth > MAX_DEPTH:
            raise SpecError(
                f"{source}: line {_line(bare, match)}: more than {MAX_DEPTH} brackets in one another; a spec needs 4"
            )
        depth = max(depth, 0)
    for match in re.finditer(r"[^=\[\]{},\n]+", bare):
        if match[0].count(".") >= MAX_PARTS:
            raise SpecError(
                f"{source}: line {_line(bare, match)}: a key of more than {MAX_PARTS} parts; a spec needs 3"
            )


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1

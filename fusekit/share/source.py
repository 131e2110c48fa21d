"""Sources of a bundle or of names: a file, standard input, a URL, a remote."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fusekit.errors import StoreError, UsageError

STDIN = "-"
_SUFFIXES = (".tar", ".fkb")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Stream:
    """A bundle that is read as a stream. where: its name in messages. open: starts at its first byte. retry: runs a
    step, again after an error that may pass.
    """

    where: str
    open: Callable[[], Iterator[bytes]]
    retry: Callable[[Callable[[], None]], None] = lambda step: step()


Source = Path | Stream


def check_url(text: str) -> str:
    """`text`; UsageError for an incomplete URL, which would be taken for a path."""
    if match := re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", text, re.IGNORECASE):
        raise UsageError(
            f"{match[1]}:/...: a URL has two slashes after {match[1]}: and then the name of a server; write "
            f"{match[1]}://HOST/..., or ./ in front of a path"
        )
    if re.fullmatch(r"https?://[/?#]*", text, re.IGNORECASE):
        raise UsageError(f"{text} names no server; write the whole URL, such as https://host/kernels")
    return text


def bundle_source(text: str, stdin: BinaryIO) -> Source:
    """The bundle `text`: `-` (`stdin` is read), a URL, or the path of a file."""
    if text == STDIN:
        if stdin.isatty():
            raise UsageError("standard input is a terminal; a bundle is read from a pipe or a file; redirect it")
        return Stream("standard input", lambda: iter(lambda: stdin.read(_PIECE), b""))
    if "://" not in check_url(text):
        return Path(text).absolute()
    from fusekit.share.remote import Remote

    remote = Remote(text)

    def pieces() -> Iterator[bytes]:
        import logging

        logging.getLogger("fusekit").info("downloading %s", remote.url)
        try:
            yield from remote.stream("", remote.bounds.total_bytes)
        except FileNotFoundError:
            raise StoreError("there is no such file") from None

    return Stream(remote.url, pieces, lambda step: remote.attempt("", "read", step))


def is_bundle(text: str) -> bool:
    """Whether `text` is a bundle and not a remote: `-`, a file, or a URL whose suffix or first bytes are
    those of one.
    """
    if text == STDIN:
        return True
    if "://" not in check_url(text):
        return not os.path.isdir(text)  # noqa: PTH112 - False for a path that cannot be looked at, too
    from fusekit.share.remote import Remote, hidden_url

    if hidden_url(text).endswith(_SUFFIXES):
        return True
    remote = Remote(text)
    try:
        with contextlib.closing(remote.stream("", 1 << 10)) as pieces:
            return next(pieces, b"").startswith(b"bundle.json")
    except Exception:
        return False  # a folder; listing it reports its errors


@contextlib.contextmanager
def spooled(source: Stream, head: int, length: Callable[[BinaryIO, int], int]) -> Iterator[BinaryIO]:
    """A temporary file with the bytes of `source`: first `head` bytes, then as many as `length` gives (called with the
    file and its size), and at most one piece more. So an endless stream is not read.
    """

    def fill() -> None:
        spool.seek(0)
        spool.truncate()
        pieces, have = source.open(), 0
        try:
            have = _copy(pieces, spool, have, head)
            _copy(pieces, spool, have, length(spool, have))
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    with _temporary_file() as spool:
        source.retry(fill)
        yield spool


def _copy(pieces: Iterator[bytes], spool: BinaryIO, have: int, most: int) -> int:
    spool.seek(0, os.SEEK_END)
    while have <= most and (piece := next(pieces, b"")):
        try:
            spool.write(piece)
            spool.flush()
        except OSError as error:
            raise _unkept(error) from error
        have += len(piece)
    return have


def _temporary_file() -> BinaryIO:
    try:
        return tempfile.TemporaryFile(prefix="fusekit-bundle-")
    except OSError as error:  # no folder takes one
        raise _unkept(error) from error


def _unkept(error: OSError) -> StoreError:
    where = tempfile.tempdir or "a temporary file"
    return StoreError(
        f"cannot keep a bundle in {where}: {error.strerror or error}; a stream is kept there while "
        "it is checked; free some space, or name another folder with TMPDIR"
    )

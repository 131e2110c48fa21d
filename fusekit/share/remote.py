"""Remotes: the files of a store on anything that fsspec reaches, in the layout of a store.

    file:///shared/kernels   s3://bucket/kernels   gs://bucket/kernels   https://host/kernels (read-only)   memory://x

A push copies `blobs/`, `signatures/`, `entries/`, `names/`, in this order: a puller sees a name only when its kernel is
there, and a push after a broken one copies only the rest. Cubins and entries are never changed. If two push the same
key, the entry that is there is kept if it is whole; if both write at once either is correct, as in a store. A name
points to the entry that was pushed last.

Nothing that is read is trusted: each document is checked as in a store, each cubin against its entry, and with trusted
keys each signature before anything is parsed. After a failed connection a step is tried again, with growing pauses.
Bytes and time are limited: `fusekit.share.bounds`.

A folder of this machine is written as a store, by `Publisher`, so that no link in it leads a push elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from fusekit.errors import FusekitError, IntegrityError, StoreError, UsageError, install
from fusekit.share.bounds import FOLDER_DEPTH, Bounds, within
from fusekit.share.source import check_url
from fusekit.share.web import Web
from fusekit.store import marker
from fusekit.store.files import exists, store_error
from fusekit.store.publishing import Publisher

T = TypeVar("T")

ATTEMPTS = 5
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 10.0
PARALLEL = 16

# Here a write is atomic, and a rename is a copy. Elsewhere a file gets its name once it is complete.
_OBJECT_STORES = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2", "hf", "gdrive"}
)
_TEMPORARY = ".tmp"
_PIECE = 8 << 20
# Statuses of a web server that does not list its folders.
_UNLISTED = frozenset({403, 404, 405})
# Client errors that may pass at another try.
_PASSING = frozenset({408, 425, 429})
# Errors that another try does not change.
_FINAL = (
    FusekitError, FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError,
    NotImplementedError, ImportError, TypeError, ValueError, KeyError, AttributeError,
)  # fmt: skip


# Errors of libraries of object stores, which need not be installed: there are no credentials to try again with.
_NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
    "ProfileNotFound", "DefaultCredentialsError", "RefreshError", "ClientAuthenticationError",
})  # fmt: skip


class Remote:
    """The files below an fsspec URL. Paths are relative to it, with '/'.

    attempts: how often a step is tried. pause: seconds after the first failure, doubled after each further one.
    """

    def __init__(
        self, url: str, *, attempts: int = ATTEMPTS, pause: float = FIRST_PAUSE, bounds: Bounds | None = None
    ) -> None:
        self.url = hidden_url(url)
        self.bounds = bounds or Bounds()
        self._attempts = attempts
        self._pause = pause
        self._fs, root = _filesystem(url, self.bounds.grace)
        self._root = root.rstrip("/")
        self._lists_itself = _lists_itself(self._fs)
        self._directories: set[str] = set()
        self._taken = 0
        self._guard = threading.Lock()
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._whole = bool(protocols & _OBJECT_STORES)
        self._web = Web(self._fs, self.bounds) if protocols & {"http", "https"} else None
        self._here = bool(protocols & {"memory", "file", "local"})
        local = bool(protocols & {"file", "local"})
        self._publisher = Publisher(Path(self._root or "/"), admit=marker.admit) if local else None
        # Other file systems may have one connection, with one request at a time.
        self.parallel = PARALLEL if self._fs.async_impl or self._here else 1

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Path -> size in bytes (None if not known) of the plain files below `folder`; empty if there are none.

        A server that does not list counts as empty. StoreError for a listing beyond the bounds.
        """

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            if self._lists_itself:
                try:
                    return self._within(
                        self.bounds.listing_seconds, lambda: self._fs.find(self._full(folder), detail=True)
                    )
                except FileNotFoundError:
                    return {}
            return self._walk(self._full(folder))

        below = f"{self._full(folder)}/"
        files = self.attempt(folder, "list", find)
        self._bound_entries(len(files))
        return {
            f"{folder}/{path}": info.get("size")
            for full, info in files.items()
            if info.get("type", "file") == "file" and not full.endswith(_TEMPORARY)
            for path in [unquote(full).removeprefix(unquote(below))]
            if not path.startswith("/") and ".." not in path.split("/")
        }

    def read(self, path: str, *, limit: int, exactly: int | None = None) -> bytes | None:
        """The bytes of the file `path`; None if there is none. limit: largest size in bytes; exactly: the only size.

        Never reads more than that, whatever size the server reports. IntegrityError for another size.
        """
        most = limit if exactly is None else exactly

        def take() -> bytes | None:
            try:
                return b"".join(self.stream(path, most))
            except FileNotFoundError:
                return None

        data = self.attempt(path, "read", take)
        if data is not None and (len(data) > most or (exactly is not None and len(data) != exactly)):
            actual = f"more than {most}" if len(data) > most else str(len(data))
            rule = f"must have {exactly}" if exactly is not None else f"may have at most {limit}"
            raise IntegrityError(f"{self.at(path)} has {actual} bytes; it {rule}; push it again from a whole store")
        return data

    def stream(self, path: str, most: int) -> Generator[bytes, None, None]:
        """The bytes of the file `path` in pieces, ending soon after `most` of them. FileNotFoundError if it
        is missing.
        """
        full = self._full(path)
        pieces = self._pieces(full, most) if self._web is None else self._web.stream(full, most)
        with contextlib.closing(pieces) as chunks:
            for chunk in chunks:
                with self._guard:
                    self._taken += len(chunk)
                if self._taken > self.bounds.total_bytes:
                    raise StoreError(
                        f"more than {self.bounds.total_bytes} bytes were read, which is the limit of one command"
                    )
                yield chunk

    def _pieces(self, full: str, most: int) -> Generator[bytes, None, None]:
        begun = time.monotonic()
        info = self._within(self.bounds.grace, lambda: self._fs.info(full))
        if info.get("type", "file") != "file":
            raise IntegrityError(f"{hidden(full)} is no plain file; a store holds nothing else; remove it there")
        with self._within(self.bounds.grace, lambda: self._fs.open(full, "rb")) as file:
            taken = 0
            while taken <= most:
                left = min(_PIECE, most + 1 - taken)
                until = begun + self.bounds.seconds(taken + left)
                chunk: bytes = self._within(until - time.monotonic(), functools.partial(file.read, left))
                if not chunk:
                    return
                taken += len(chunk)
                yield chunk

    def admit(self) -> None:
        """Raises NoStoreError for a local folder that is neither empty nor a store, StoreError for what is not a
        folder.
        """
        if self._publisher is not None and exists(self._publisher.root):
            try:
                marker.check(self._publisher.folders)
            except OSError as error:  # a file, or a folder that may not be entered
                raise store_error(self._publisher.root, "push to", error) from error

    def write(self, path: str, data: bytes) -> None:
        """Write `data` to the file `path`, atomically, replacing what is there."""
        full = self._full(path)

        def put() -> None:
            if self._publisher is not None:
                _publish(self._publisher, path, data)
                return
            send = self.bounds.seconds(len(data))
            if self._whole:
                self._within(send, lambda: self._fs.pipe_file(full, data))
                return
            folder, _, name = full.rpartition("/")
            self._within(send, lambda: self._directory(folder))
            temporary = f"{folder}/.{name}.{os.getpid()}-{os.urandom(6).hex()}{_TEMPORARY}"
            try:
                self._within(send, lambda: self._fs.pipe_file(temporary, data))
                self._within(send, lambda: self._fs.mv(temporary, full))
            except BaseException:
                with contextlib.suppress(Exception):  # a temporary that stays does no harm
                    self._within(self.bounds.grace, lambda: self._fs.rm_file(temporary))
                raise

        self.attempt(path, "write", put)

    def at(self, path: str) -> str:
        """The URL of `path`, for messages; of the remote itself if `path` is empty."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    def _walk(self, top: str) -> dict[str, Any]:
        # fsspec's walk skips folders that it cannot list, so a broken connection would give a short listing.
        files: dict[str, Any] = {}
        folders, seen = [(top, 1)], 0
        until = time.monotonic() + self.bounds.listing_seconds
        while folders:
            folder, depth = folders.pop()
            for info in self._listing(folder, until):
                seen += 1
                name = info["name"].rstrip("/")
                if info["type"] != "directory":
                    files[name] = info
                elif depth < FOLDER_DEPTH and name.startswith(f"{folder.rstrip('/')}/"):
                    folders.append((name, depth + 1))
            self._bound_entries(seen)
            if time.monotonic() > until:
                raise StoreError(f"the listing takes more than {self.bounds.listing_seconds:g} s, which is the limit")
        return files

    def _listing(self, folder: str, until: float) -> list[dict[str, Any]]:
        try:
            if self._web is not None:
                return self._web.list(folder, until)
            return self._within(until - time.monotonic(), lambda: self._fs.ls(folder, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []  # gone since it was listed
        except Exception as error:
            if _status(error) in _UNLISTED:
                return []
            raise

    def _bound_entries(self, count: int) -> None:
        if count > self.bounds.listing_entries:
            raise StoreError(f"the listing has more than {self.bounds.listing_entries} files and folders, the limit")

    def _within(self, seconds: float, step: Callable[[], T]) -> T:
        return step() if self._here or self._web is not None else within(max(seconds, 0.0), step)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _directory(self, folder: str) -> None:
        with self._guard:
            if folder in self._directories:
                return
        self._fs.makedirs(folder, exist_ok=True)
        with self._guard:
            self._directories.add(folder)

    def attempt(self, path: str, doing: str, step: Callable[[], T]) -> T:
        """The result of `step`, which is tried again after errors that may pass. `doing` and `path` are for
        the error.
        """
        from tenacity import (
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            stop_after_delay,
            wait_exponential,
            wait_random,
        )

        retrying = Retrying(
            retry=retry_if_exception(lambda error: not _is_final(error)),
            stop=stop_after_attempt(self._attempts) | stop_after_delay(self.bounds.patience),
            wait=wait_exponential(multiplier=self._pause, max=LONGEST_PAUSE) + wait_random(0, self._pause),
            reraise=True,
        )
        try:
            return retrying(step)
        except (IntegrityError, UsageError):
            raise
        except Exception as error:
            times = retrying.statistics.get("attempt_number", 1)
            tries = "" if _is_final(error) or times == 1 else f", {times} times"
            cause = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}".rstrip(": ")
            raise StoreError(
                f"cannot {doing} {self.at(path)}{tries}: {hidden(cause)[:1000]}; check the URL, the network and your "
                "permissions; what was copied stays, and the same command continues",
                path=self.at(path),
            ) from error


def _publish(publisher: Publisher, path: str, data: bytes) -> None:
    """Publish `data` as `path` below the publisher's root. Raises errors that may pass as OSError."""
    try:
        publisher.put(publisher.root / path, data)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno != errno.ELOOP:
            raise cause from None
        raise


def _is_final(error: BaseException) -> bool:
    status = _status(error)
    refused = status is not None and 400 <= status < 500 and status not in _PASSING
    if any(kind.__name__ in _NO_CREDENTIALS for kind in type(error).__mro__):
        return True
    return refused or isinstance(error, _FINAL) or not isinstance(error, Exception)


def _status(error: BaseException) -> int | None:
    """The HTTP status of `error`, if it is from a web server."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _lists_itself(filesystem: Any) -> bool:
    """Whether it has its own recursive listing, as object stores have, and not fsspec's walk over folders."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind = type(filesystem)
    if filesystem.async_impl:
        return kind._find is not AsyncFileSystem._find
    return kind.find is not AbstractFileSystem.find


def hidden(text: str, url: str = "") -> str:
    """`text`, a message with URLs, without user names, passwords and queries, which may hold a signature. url: one that
    may be in it as it was typed.
    """
    return _URL.sub(_bare, text.replace(url, hidden_url(url)) if url else text)


def hidden_url(url: str) -> str:
    """`hidden` for a single URL, whose password may have any characters."""
    return _URL.sub(_bare, re.sub(r"\s", "%20", url))


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")


def _bare(match: re.Match[str]) -> str:
    try:
        parts = urlsplit(match[0])
        _ = parts.port  # ValueError if a password has / or ?
    except ValueError:
        return f"{match[0].partition('://')[0]}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _filesystem(url: str, seconds: float) -> tuple[Any, str]:
    if not url:
        raise UsageError("the URL is empty; a remote is a folder or a URL such as s3://bucket/kernels; give one")
    check_url(url)
    try:
        import tenacity  # noqa: F401 - fails here, before anything is copied
        from fsspec.core import url_to_fs
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise StoreError(f"remotes need the package {package}; {install('remote')}") from None
    shown = hidden_url(url)
    try:
        # Some connect at once, without a timeout.
        filesystem, root = within(seconds, lambda: url_to_fs(url))
    except ImportError as error:
        raise UsageError(
            f"{shown}: {hidden(str(error), url)}; each kind of URL has its fsspec plugin; install it"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{shown}: {hidden(str(error), url)}; a remote is a folder or a URL that fsspec knows; check it"
        ) from None
    except Exception as error:
        why = hidden(str(error), url)[:1000]
        raise StoreError(f"{shown} cannot be opened ({type(error).__name__}: {why}); check it", path=shown) from error
    return filesystem, root

"""Reading from a web server that may be hostile.

fsspec opens the session, but reads whole answers of any size. Here every answer is read in pieces, within `Bounds`. An
answer that is compressed, although that was not requested, is refused: it could expand to any size.
"""

from __future__ import annotations

import contextlib
import html
import math
import re
import time
from collections.abc import Callable, Generator
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from fusekit.errors import StoreError
from fusekit.share.bounds import Bounds

_CHUNK = 1 << 20
# Its parts are bounded, so that no page takes longer than its length.
_LINK = re.compile(rb"""<a\s[^<>]{0,500}?href\s*=\s*["']([^"'<>\s]{1,2000})["']""", re.IGNORECASE)


class Web:
    """A web server, reached through fsspec's HTTP file system."""

    def __init__(self, filesystem: Any, bounds: Bounds) -> None:
        self._fs = filesystem
        self._bounds = bounds

    def stream(self, url: str, limit: int, until: float = math.inf) -> Generator[bytes, None, None]:
        """The body of `url` in pieces, ending soon after `limit` bytes or at the time `until` (as of `time.monotonic`).

        Raises FileNotFoundError if it is missing, TimeoutError for a server that is silent or slow, StoreError for a
        compressed answer, and the errors of aiohttp for a failed connection.
        """
        begun, taken = time.monotonic(), 0
        answer = self._wait(self._begin, url)
        try:
            while taken <= limit:
                chunk = self._wait(answer.content.read, _CHUNK)
                if not chunk:
                    return
                taken += len(chunk)
                yield chunk
                now = time.monotonic()
                if now > min(until, begun + self._bounds.seconds(taken)):
                    raise TimeoutError(f"only {taken} bytes came in {now - begun:.0f} s")
        finally:
            self._wait(self._end, answer)

    def list(self, folder: str, until: float) -> list[dict[str, Any]]:
        """The files and folders in `folder` that its page links to, in the form of fsspec's `ls`. FileNotFoundError if
        it is missing.
        """
        base, page = folder.rstrip("/") + "/", bytearray()
        with contextlib.closing(self.stream(base, self._bounds.listing_bytes, until)) as chunks:
            for chunk in chunks:
                page += chunk
        if len(page) > self._bounds.listing_bytes:
            raise StoreError(f"the listing has more than {self._bounds.listing_bytes} bytes, the limit")
        host, below = urlsplit(base).netloc, unquote(urlsplit(base).path)
        names = set()
        for match in _LINK.finditer(page):
            try:
                link = urlsplit(urljoin(base, html.unescape(match[1].decode("utf-8", "replace"))))
            except ValueError:
                continue
            name = unquote(link.path).removeprefix(below)
            if link.netloc in (host, host.rpartition("@")[2]) and unquote(link.path) == below + name:
                names.add(name)
        return [
            {"name": base + name.rstrip("/"), "size": None, "type": "directory" if name.endswith("/") else "file"}
            for name in names
            if name.rstrip("/") not in ("", ".", "..") and "/" not in name[:-1]
        ]

    async def _begin(self, url: str) -> Any:
        import aiohttp

        silence = self._bounds.silence
        session = await self._fs.set_session()
        answer = await session.get(
            self._fs.encode_url(url),
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
            **self._fs.kwargs,
        )
        try:
            if answer.status == 404:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise StoreError(f"the answer is compressed ({encoding[:40]!r}), which was not requested")
        except BaseException:
            answer.close()
            raise
        return answer

    async def _end(self, answer: Any) -> None:
        answer.close()

    def _wait(self, step: Callable[..., Any], *arguments: Any) -> Any:
        from fsspec.asyn import sync

        try:
            # A redirect, or an interim answer, restarts the timeout of the server: `grace` is for all of them.
            return sync(self._fs.loop, step, *arguments, timeout=self._bounds.grace)
        except TimeoutError:
            raise TimeoutError(f"nothing came for {self._bounds.silence:g} s") from None

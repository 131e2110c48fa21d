"""Which cache answers the calls that the DSL compiles."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusekit.cute.cache import Cache


class _Thread(threading.local):
    cache: Cache | None = None


class Scope:
    """One for the DSL of a process. everywhere: answers all threads, after `fusekit.cute.install`."""

    def __init__(self) -> None:
        self.everywhere: Cache | None = None
        self._thread = _Thread()

    @property
    def cache(self) -> Cache | None:
        """What answers this thread; None: the DSL compiles, as without fusekit."""
        return self._thread.cache or self.everywhere

    @contextlib.contextmanager
    def here(self, cache: Cache) -> Iterator[None]:
        """In the block `cache` answers this thread."""
        before, self._thread.cache = self._thread.cache, cache
        try:
            yield
        finally:
            self._thread.cache = before

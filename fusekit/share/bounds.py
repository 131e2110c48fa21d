"""Limits on the bytes that are read from a remote, and on the time that they may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FOLDER_DEPTH = 3
"""Levels of folders of a store, counted from `blobs`, `entries`, `names` or `signatures`. Deeper ones are not listed.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the use of one remote.

    silence: seconds without a byte after which a server is given up. grace (seconds), rate (bytes per second): an
    answer of n bytes may take `grace` + n / `rate` seconds. patience: seconds after which a failed step is not tried
    again. listing_bytes: of one page of a web server's listing. listing_entries, listing_seconds: of all folders
    together. total_bytes: of everything that one command reads.
    """

    silence: float = 30.0
    grace: float = 60.0
    rate: float = 16 << 10
    patience: float = 120.0
    listing_bytes: int = 16 << 20
    listing_entries: int = 250_000
    listing_seconds: float = 600.0
    total_bytes: int = 64 << 30

    def seconds(self, size: int) -> float:
        """Seconds that an answer of `size` bytes may take."""
        return self.grace + size / self.rate


def within(seconds: float, step: Callable[[], T]) -> T:
    """The result of `step`, which runs in a thread; TimeoutError after `seconds`, and the thread is abandoned.

    For libraries without a timeout: there is no other way to stop them.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(step())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError(f"not done within {seconds:.1f} s")
    return result.result()

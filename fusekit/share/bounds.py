"""How much is taken from a remote, and how long is waited for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FOLDER_DEPTH = 3
"""Levels of folders that a store has below `blobs`, `entries`, `names` or `signatures`, itself included. Deeper ones
hold nothing of a store, and are not looked into."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """silence: seconds after which a server that sends nothing is given up. grace, rate: an answer of n bytes may take
    `grace` + n / `rate` seconds (bytes per second). patience: seconds after which a failed step is not tried again.
    listing_bytes: of one page of a web server's listing; listing_entries, listing_seconds: of all folders together.
    total_bytes: of everything that one command reads.
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
        """How long an answer of `size` bytes may take."""
        return self.grace + size / self.rate


def within(seconds: float, step: Callable[[], T]) -> T:
    """What `step` returns or raises; TimeoutError after `seconds`, which leaves its thread behind.

    For libraries that wait without end: there is no other way to stop them.
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

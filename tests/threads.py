"""Threads that begin at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(number)` gives in each of so many threads, which wait for each other first. Raises what one raised."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))

"""A mapping that forgets what was not used for long. To look up a known key costs what it costs in a dict."""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """Keeps the `size` entries used last, and at most twice as many.

    There are two generations: when the young one is full, it becomes the old one, and what is looked up there comes
    back. Entries come in by `remember` alone. Threads may share it: one that meets another's change of generation makes
    a value again at worst.

    remembered: how many entries came in, for counters.
    """

    __slots__ = ("old", "remembered", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.remembered = size, 0
        self.old: dict[K, V] = {}

    def __missing__(self, key: K) -> V:
        value = self.old[key]
        self._put(key, value)
        return value

    def remember(self, key: K, value: V) -> None:
        """Adds an entry, as the one used last."""
        self.remembered += 1
        self._put(key, value)

    def _put(self, key: K, value: V) -> None:
        if len(self) >= self.size:
            self.old = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self.old = {}

    def get(self, key: K, default: Any = None) -> Any:
        """As that of a dict; counts as a use."""
        try:
            return self[key]
        except KeyError:
            return default

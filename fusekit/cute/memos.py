"""What memoised functions remember, and which recorded traces have computed it."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusekit.cute.digest import DIGITS, UnnamedError
from fusekit.cute.values import Walk, digest

if TYPE_CHECKING:
    from fusekit.cute.recorder import Record

NO_NAME = "?"


def remembered(function: Any) -> dict[str, str]:
    """What a memoised function remembers: digest of the arguments -> digest of the result (`NO_NAME`: it has none)."""
    return {key: _named(results) for key, results in _results(function).items()}


def ties(function: Any, known: Iterable[Walk]) -> dict[str, list[str]]:
    """Digest of the arguments -> which objects of its result are in each of `known`, for what a memoised function
    remembers.
    """
    found = {}
    for key, results in _results(function).items():
        walk = Walk()
        with contextlib.suppress(UnnamedError):
            walk(results)
            found[key] = [common(walk, each) for each in known]
    return found


def common(first: Walk, second: Walk) -> str:
    """A digest of which objects are in both."""
    both = sorted((first.places[each], second.places[each]) for each in first.places.keys() & second.places.keys())
    return hashlib.sha256(repr(both).encode()).hexdigest()[:DIGITS]


def _named(results: list[Any]) -> str:
    try:
        named = {digest(result) for result in results}
    except UnnamedError:
        return NO_NAME
    return named.pop() if len(named) == 1 else NO_NAME


def _results(function: Any) -> dict[str, list[Any]]:
    """Digest of the arguments -> results for all that have it: equal objects may be others."""
    if not function.cache_info().currsize:
        return {}
    parts = gc.get_referents(function)
    caches = [each for each in parts if type(each) is dict and each is not vars(function)]
    if len(caches) != 1 or len(caches[0]) != function.cache_info().currsize:
        raise UnnamedError(f"what {function.__qualname__} remembers cannot be read")
    results = dict[str, list[Any]]()
    for key, result in list(caches[0].items()):
        if function.cache_parameters()["maxsize"] is not None:
            at = next((index for index, each in enumerate(parts) if each is key), None)
            if at is None:
                raise UnnamedError(f"what {function.__qualname__} remembers cannot be read")
            result = parts[at + 1]
        results.setdefault(digest(list(key) if isinstance(key, list) else key), []).append(result)
    return results


@dataclass(frozen=True, eq=False)
class Proof:
    """A trace that was recorded. fields: of its key, without what is of its call alone. record: the code that ran and
    what it read. manifest: says when it holds.
    """

    fields: Mapping[str, str]
    record: Record
    manifest: Mapping[str, Any]


class Proofs:
    """Which recorded trace has computed what a memoised function of this process remembers.

    A later trace finds the result, so what it was computed from is not recorded with that trace. Where the result is
    not there, as after a trace that was left out, it would be computed: to the same, if what the first trace read is
    as it was.
    """

    def __init__(self) -> None:
        self._results: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, Proof]]] = weakref.WeakKeyDictionary()

    def add(self, function: Any, results: Mapping[str, str], proof: Proof) -> None:
        """Note that the trace of `proof` computed `results`, digests by those of the arguments."""
        self._results.setdefault(function, {}).update({key: (result, proof) for key, result in results.items()})

    def find(self, function: Any, results: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, Proof]:
        """The proofs of those of `results` that traces with these `fields` computed."""
        known = self._results.get(function, {})
        return {
            key: known[key][1]
            for key, result in results.items()
            if key in known and known[key][0] == result and known[key][1].fields == fields
        }

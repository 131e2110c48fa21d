"""A strict reader of JSON objects: every value is taken by name and type, and a member that is left over is an error.

Errors are RecordError and begin with the path of the field, so that the error for a damaged or foreign record names the
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fusekit.abi.expr import Expr, RecordError, freeze, validate

T = TypeVar("T")

MAX_ITEMS = 1024
"""Most entries of an array or object, expressions aside. The launcher in C takes fewer of most."""


class RecordReader:
    """Takes the members of one JSON object. `where` is the object's own path, empty for the document."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{where or 'launch record'}: {describe(value)}; it must be an object")
        self._left = dict(value)
        self._where = where

    def path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str) -> Any:
        try:
            return self._left.pop(key)
        except KeyError:
            raise RecordError(f"{self.path(key)}: missing; the field is required") from None

    def string(self, key: str, allowed: Sequence[str] | None = None) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            raise RecordError(f"{self.path(key)}: {describe(value)}; it must be a string")
        if allowed is not None and value not in allowed:
            raise RecordError(f"{self.path(key)}: {value!r}; it must be one of {', '.join(allowed)}")
        return value

    def integer(self, key: str) -> int:
        return integer(self.take(key), self.path(key))

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise RecordError(f"{self.path(key)}: {describe(value)}; it must be true or false")
        return value

    def expr(self, key: str) -> Expr:
        value = self.take(key)
        validate(value, self.path(key))
        return freeze(value)

    def array(self, key: str, item: Callable[[Any, str], T]) -> tuple[T, ...]:
        value = self.take(key)
        if not isinstance(value, list):
            raise RecordError(f"{self.path(key)}: {describe(value)}; it must be an array")
        _few(value, self.path(key))
        return tuple(item(element, f"{self.path(key)}[{index}]") for index, element in enumerate(value))

    def mapping(self, key: str, item: Callable[[Any, str], T]) -> dict[str, T]:
        value = self.take(key)
        if not isinstance(value, dict):
            raise RecordError(f"{self.path(key)}: {describe(value)}; it must be an object")
        _few(value, self.path(key))
        return {name: item(element, f"{self.path(key)}.{name}") for name, element in value.items()}

    def end(self) -> None:
        if self._left:
            first = min(self._left)
            raise RecordError(f"{self.path(first)}: unknown field; remove it or use a fusekit that knows it")


def _few(value: Any, where: str) -> None:
    if len(value) > MAX_ITEMS:
        raise RecordError(f"{where}: {len(value)} entries; it has at most {MAX_ITEMS}")


def integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecordError(f"{where}: {describe(value)}; it must be an integer")
    return value


def string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{where}: {describe(value)}; it must be a string")
    return value


def expression(value: Any, where: str) -> Expr:
    validate(value, where)
    return freeze(value)


def describe(value: Any) -> str:
    """A value and its JSON type, short enough for a message."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    kind = "null" if value is None else names.get(type(value), type(value).__name__)
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} is {kind}"

"""What a trace leaves on the objects that it was called with: kernels note their tiles, stages and the like."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusekit.cute.digest import UnnamedError
from fusekit.cute.libraries import is_library_module
from fusekit.cute.values import digest

_PLAIN = (bool, int, float, str, type(None))


class _OfTheTraceError(Exception):
    """A value of the DSL, which has no meaning when the trace has ended."""


class Effects:
    """The attributes of objects, before a trace."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._objects = [each for each in arguments if _may_change(each)]
        self._before = [dict(vars(each)) for each in self._objects]
        self._digests = [{name: _digest(value) for name, value in each.items()} for each in self._before]

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """The objects with the attributes that they had."""
        now = [dict(vars(each)) for each in self._objects]
        try:
            self._set(self._before)
            yield
        finally:
            self._set(now)

    def _set(self, states: list[dict[str, Any]]) -> None:
        for each, state in zip(self._objects, states, strict=True):
            vars(each).clear()
            vars(each).update(state)

    def changes(self) -> list[dict[str, Any]]:
        """Attribute -> its new value as JSON types, of each object. Values of the trace are left out. Raises
        UnnamedError for others that cannot be kept, and for attributes that are gone.
        """
        return [self._changed(*each) for each in zip(self._objects, self._before, self._digests, strict=True)]

    def _changed(self, owner: Any, before: dict[str, Any], digests: dict[str, str]) -> dict[str, Any]:
        changes = {}
        if missing := before.keys() - vars(owner).keys():
            raise UnnamedError(f"the trace removes the attribute {min(missing)}")
        for name, value in vars(owner).items():
            if name in before and (value is before[name] or _digest(value) == digests[name] != ""):
                continue
            try:
                changes[name] = _encoded(value)
            except _OfTheTraceError:
                if name in before and before[name] is not None:
                    raise UnnamedError(f"the trace changes the attribute {name}") from None
        return changes


def apply(arguments: Sequence[Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Give the objects in `arguments` the attributes that a trace gave them. Raises UnnamedError for a class that is
    not there.
    """
    objects = [each for each in arguments if _may_change(each)]
    decoded = [{name: _decoded(value) for name, value in each.items()} for each in changes]
    for each, state in zip(objects, decoded, strict=True):
        vars(each).update(state)


def _may_change(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and not is_library_module(type(value).__module__)


def _digest(value: Any) -> str:
    try:
        return digest(value)
    except UnnamedError:
        return ""


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list):
        return [kind.__name__, [_encoded(each) for each in value]]
    if kind is dict:
        return ["dict", [[_encoded(key), _encoded(each)] for key, each in value.items()]]
    if isinstance(value, type):
        return (
            ["class", value.__module__, value.__qualname__]
            if _resolved(value.__module__, value.__qualname__) is value
            else _refuse(value)
        )
    if isinstance(value, enum.Enum) or "__members__" in dir(kind):
        member = getattr(kind, value.name, None)
        if member == value and _resolved(kind.__module__, kind.__qualname__) is kind:
            return ["member", kind.__module__, kind.__qualname__, value.name]
    return _refuse(value)


def _refuse(value: Any) -> Any:
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__.startswith("cutlass."):
        raise _OfTheTraceError
    raise UnnamedError(f"the trace leaves a {kind.__module__}.{kind.__qualname__} on an argument")


def _resolved(module: str, name: str) -> Any:
    resolved: Any = sys.modules.get(module)
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    return resolved


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind in ("tuple", "list"):
        items = [_decoded(each) for each in parts[0]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in parts[0]}
    resolved = _resolved(parts[0], parts[1])
    if resolved is None:
        raise UnnamedError(f"{parts[0]}.{parts[1]} is not there")
    return resolved if kind == "class" else getattr(resolved, parts[2])

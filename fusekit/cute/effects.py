"""What a trace leaves on the objects that it was called with: kernels note their tiles, stages and the like.

Plain data and objects that hold it are given to the arguments of a later call whose trace is left out. Values of the
DSL have no meaning when the trace has ended: in their place is a `LeftOut`.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fusekit.cute.digest import UnnamedError
from fusekit.cute.kinds import is_plain_object
from fusekit.cute.leftout import LeftOut
from fusekit.cute.libraries import DSL, is_library_module
from fusekit.cute.values import digest

_PLAIN = (bool, int, float, str, type(None))
_ALONE = 2
"""References to an object that one container alone has, seen by `sys.getrefcount(container[key])`."""


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

    def changes(self) -> list[list[Any]]:
        """[attribute, its new value as JSON types] of each object, in their order. Raises UnnamedError for what cannot
        be kept, and for attributes that are gone.
        """
        return [self._changed(*each) for each in zip(self._objects, self._before, self._digests, strict=True)]

    def _changed(self, owner: Any, before: dict[str, Any], digests: dict[str, str]) -> list[Any]:
        if missing := before.keys() - vars(owner).keys():
            raise UnnamedError(f"the trace removes the attribute {min(missing)}")
        now = vars(owner)
        same = {
            name for name, known in digests.items() if now[name] is before[name] or known == _digest(now[name]) != ""
        }
        owned = type(owner).__name__
        return [[name, _encoded(now, name, f"{owned}.{name}")] for name in list(now) if name not in same]


def apply(arguments: Sequence[Any], changes: Sequence[Sequence[Any]]) -> None:
    """Give the objects in `arguments` the attributes that a trace gave them. Raises UnnamedError for a class that is
    not there.
    """
    objects = [each for each in arguments if _may_change(each)]
    decoded = [{name: _decoded(value) for name, value in each} for each in changes]
    for each, state in zip(objects, decoded, strict=True):
        vars(each).update(state)


def _may_change(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and not is_library_module(type(value).__module__)


def _digest(value: Any) -> str:
    try:
        return digest(value)
    except UnnamedError:
        return ""


def _encoded(container: Any, key: Any, place: str) -> Any:
    """`container[key]` as JSON types. place: its name, for errors."""
    # Nobody else may see what changes in it later: what a later call gets is another one.
    alone = sys.getrefcount(container[key]) <= _ALONE
    value = container[key]
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or (kind is list and alone):
        return [kind.__name__, [_encoded(value, index, place) for index in range(len(value))]]
    if kind is dict and alone:
        keys = list(value)
        return ["dict", [[_encoded(keys, at, place), _encoded(value, each, place)] for at, each in enumerate(keys)]]
    if isinstance(value, type) and _resolved(value.__module__, value.__qualname__) is value:
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, enum.Enum) or "__members__" in dir(kind):
        member = getattr(kind, value.name, None)
        if member == value and _resolved(kind.__module__, kind.__qualname__) is kind:
            return ["member", kind.__module__, kind.__qualname__, value.name]
    name = value if isinstance(value, type) else kind
    if name.__module__.startswith(f"{DSL}."):
        return ["of the trace", place]
    if alone and is_plain_object(value) and _resolved(kind.__module__, kind.__qualname__) is kind:
        state = vars(value)
        attributes = [[each, _encoded(state, each, f"{place}.{each}")] for each in list(state)]
        return ["object", kind.__module__, kind.__qualname__, attributes]
    others = "" if alone else ", which is elsewhere as well"
    raise UnnamedError(f"the trace leaves a {name.__module__}.{name.__qualname__} on an argument{others}")


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
    if kind == "of the trace":
        return LeftOut(parts[0])
    resolved = _resolved(parts[0], parts[1])
    if resolved is None:
        raise UnnamedError(f"{parts[0]}.{parts[1]} is not there")
    if kind == "object":
        new = object.__new__(resolved)
        vars(new).update({name: _decoded(each) for name, each in parts[2]})
        return new
    return resolved if kind == "class" else getattr(resolved, parts[2])

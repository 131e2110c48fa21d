"""What is known of classes, functions and objects of each kind."""

from __future__ import annotations

import abc
import collections
import functools
import logging
import operator
import re
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

from fusekit.cute.bytecode import MOST_KEPT, kept
from fusekit.cute.digest import UnnamedError
from fusekit.cute.libraries import DSL, is_library, is_library_module, is_unsteady
from fusekit.cute.stamps import stamp

BASES: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PLAIN = frozenset({bool, int, float, str, tuple, list})
_WORD = 8  # bytes of a pointer
_OF_WRAPPERS = frozenset(
    {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "__dict__", "__annotate__", "cache_parameters", "func", "lock"}
)
_HEAP_TYPE = 1 << 9  # of `__flags__`: made at run time
_OF_LOGGERS = frozenset({"name", "level", "parent", "manager", "handlers", "filters", "_cache"})


@functools.cache
def slots_in(kind: type) -> list[Any]:
    """The descriptors of what instances have in slots: by their names a subclass may hide them."""
    return [
        each
        for base in kind.__mro__
        if base not in BASES
        for name, each in vars(base).items()
        if name not in ("__dict__", "__weakref__") and _is_own(base, name, each)
    ]


@functools.cache
def slots_of(kind: type) -> tuple[list[tuple[str]], Any]:
    """(names of slots, each in a tuple, what gets all of them of an object)."""
    slots = slots_in(kind)
    if is_library_class(kind):  # there are many such objects, and nobody changes their classes
        names = [each.__name__ for each in slots]
        return [(name,) for name in names], operator.attrgetter(*names, "__class__") if names else None
    return [(each.__name__,) for each in slots], lambda value: [each.__get__(value) for each in slots]


@functools.cache
def hides(kind: type) -> bool:
    """Whether instances may have state that is neither in attributes nor in slots, nor in that of the classes in
    `BASES`.
    """
    for each in kind.__mro__:
        if each in BASES or each in (object, collections.OrderedDict):
            continue
        if type(each).__module__ == "nanobind" or type(each).__name__ == "pybind11_type":
            return True
        base: Any = each.__base__
        own = [name for name, member in vars(each).items() if _is_own(each, name, member)]
        more = len(own) + (each.__dictoffset__ > 0) + (each.__weakrefoffset__ > 0)
        if base.__itemsize__ == 0 and each.__basicsize__ > base.__basicsize__ + _WORD * more:
            return True
        if type(vars(each).get("__dict__", _GETS)) not in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return True
    return False


def _is_own(kind: type, name: str, member: Any) -> bool:
    return type(member) is types.MemberDescriptorType and member.__objclass__ is kind and member.__name__ == name


_GETS = vars(type)["__dict__"]


def is_library_class(kind: Any) -> bool:
    """Whether a class counts by the version of a library: it is found there, not only named after it, as classes are
    that functions of a library make.
    """
    return _is_library_class(kind)


@functools.cache
def _is_library_class(kind: Any) -> bool:
    if not isinstance(kind.__module__, str):  # of a class in C
        return True
    if not is_library_module(kind.__module__):
        return False
    found: Any = sys.modules.get(kind.__module__)
    if found is None or not kind.__flags__ & _HEAP_TYPE or "<locals>" in kind.__qualname__:
        return True
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found is kind or kind.__module__ not in _MAKERS


_MAKERS = frozenset({"abc", "builtins", "collections", "dataclasses", "enum", "functools", "types", "typing"})
"""Modules of functions that make classes, which are then named after them."""


def plain(value: Any, base: Any) -> Any:
    """`value` as an object of `base`, whatever its class makes of that."""
    if issubclass(base, dict):
        ordered: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return dict(ordered.items(value))
    if base in (tuple, list, set, frozenset):
        return base(base.__iter__(value))
    if base is bytes:
        return bytes.__getitem__(value, slice(None))
    return {int: int.__int__, float: float.__float__, str: str.__str__, complex: complex.__pos__}[base](value)


def check_steady(function: Any) -> None:
    """Raises UnnamedError for a function by another name that the same code would not be let call by its name."""
    name, module = function.__name__, str(getattr(function, "__module__", None) or "builtins")
    if is_unsteady(name) and is_library_module(module) and module.partition(".")[0] != DSL:
        raise UnnamedError(f"{name} of {module} is at hand")
    if isinstance(function, types.BuiltinFunctionType) and not is_library_module(module):
        raise UnnamedError(f"what {name} of {module} does is not seen")


def stateless(kind: type) -> bool:
    """Whether instances are like `object()`: of classes in Python, without members of their own."""
    return kind is not object and kind.__basicsize__ == object.__basicsize__


def is_plain_object(value: Any) -> bool:
    """Whether all that `value` holds is in its attributes, `object.__new__` makes another one of its class, and nobody
    sees when it goes.
    """
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and not hasattr(kind, "__del__")
        and not weakref.getweakrefcount(value)
        and hasattr(value, "__dict__")
        and not is_library_class(kind)
        and not slots_in(kind)
        and not hides(kind)
        and not isinstance(value, (type, *BASES))
    )


def marks(value: Any) -> Mapping[str, Any]:
    """What a program has put on a wrapper of a function."""
    return {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in _OF_WRAPPERS}


def registered(kind: abc.ABCMeta) -> list[type]:
    """The classes that count as subclasses of an abstract one because a program said so."""
    known = [reference() for reference in abc._get_dump(kind)[0]]  # type: ignore[attr-defined]
    return sorted((each for each in known if each is not None), key=lambda each: (each.__module__, each.__qualname__))


def level(logger: logging.Logger) -> tuple[Any, ...]:
    """What decides whether a logger takes a message, and to whom it gives it: its level or that of a parent, the least
    of all, its handlers, its filters.
    """
    given = [[type(each).__qualname__ for each in group] for group in (logger.handlers, logger.filters)]
    return logger.getEffectiveLevel(), logger.manager.disable, *given


def of_logger(logger: logging.Logger) -> dict[str, Any]:
    """What else a program has put on a logger."""
    return {name: each for name, each in vars(logger).items() if name not in _OF_LOGGERS}


def text_of(value: Any) -> str:
    """What an annotation is written as."""
    kind = type(value)
    # Which do not change.
    steady = kind.__module__ == "typing" or kind in (types.GenericAlias, types.UnionType)
    return _steady_text(value) if steady else _ADDRESS.sub("", repr(value))


@kept
def _steady_text(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def documentation(value: Any) -> str | None:
    if type(value) is str:
        return value if "0x" not in value else _ADDRESS.sub("", value)
    return None if value is None else text_of(value)


def annotation(value: Any) -> Any:
    """What of an annotation is compared: its text, or itself if objects or classes of a program are in it."""
    return value if isinstance(value, (str, type)) or _holds(value) else text_of(value)


def evaluated(text: str, space: dict[str, Any]) -> Any:
    """The value of an annotation that is text, as the DSL finds it; the text if it has none."""
    try:
        # Where there are none, `eval` would put builtins into it.
        return eval(_compiled(text), space if "__builtins__" in space else dict(space))
    except Exception:
        return text


@functools.lru_cache(maxsize=MOST_KEPT)
def _compiled(text: str) -> types.CodeType:
    return compile(text, "<frozen annotation>", "eval")


@kept
def _holds(value: Any) -> bool:
    if isinstance(value, type) and not isinstance(value, types.GenericAlias):
        return not is_library_class(value)
    if hasattr(value, "__metadata__"):
        return True
    parts = [getattr(value, name, None) for name in ("__origin__", "__args__", "__bound__", "__constraints__")]
    if parts == [None] * len(parts):
        return not is_library_class(type(value))
    return any(
        _holds(each) for part in parts for each in (part if isinstance(part, tuple) else (part,)) if each is not None
    )


def put_into(kind: type) -> list[tuple[str, Any]]:
    """What a program may have put into a class of a library, as it has been told from what came with it."""
    members = _members_of(kind)
    if members.changed():
        members.look()
    return members.found


class _Members:
    """The members of a class, as they were when they were looked at. found: those that a program may have put there."""

    def __init__(self, kind: type) -> None:
        self._space = vars(kind)
        self._stamp = stamp(self._space)
        self.look()

    def look(self) -> None:
        self._mark = self._stamp.value
        members = list(self._space.items())
        self._functions = [each for _, each in members if type(each) is types.FunctionType]
        self._codes = [each.__code__ for each in self._functions]
        self.found = [
            (name, each)
            for name, each in members
            if (type(each) is types.FunctionType and not is_library(each.__code__.co_filename))
            or (type(each) in _PLAIN and not name.startswith("__"))
        ]

    def changed(self) -> bool:
        return self._mark != self._stamp.value or self._codes != [each.__code__ for each in self._functions]


_members_of = kept(_Members)

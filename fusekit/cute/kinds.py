"""What is known of classes, functions and objects of each kind."""

from __future__ import annotations

import abc
import functools
import logging
import operator
import types
import weakref
from collections.abc import Mapping
from typing import Any

from fusekit.cute.digest import UnnamedError
from fusekit.cute.libraries import DSL, UNSTEADY, is_library_module

BASES: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)
_WORD = 8  # bytes of a pointer
_OF_WRAPPERS = frozenset(
    {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "__dict__", "__annotate__", "cache_parameters"}
)


@functools.cache
def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    hidden = [
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
    ]
    return [name for name in hidden if name not in ("__dict__", "__weakref__")]


@functools.cache
def slots_of(kind: type) -> tuple[list[tuple[str]], Any]:
    """(names of slots, each in a tuple, what gets all of them of an object)."""
    names = _slots(kind)
    return [(name,) for name in names], operator.attrgetter(*names, "__class__") if names else None


@functools.cache
def hides(kind: type) -> bool:
    """Whether instances may have state that is neither in attributes nor in slots."""
    return any(
        type(each).__module__ == "nanobind"
        or type(each).__name__ == "pybind11_type"
        or (each.__base__ is object and each.__basicsize__ > object.__basicsize__ + _WORD * (len(_slots(each)) + 2))
        for each in kind.__mro__
        if each not in BASES
    )


def check_steady(function: Any) -> None:
    """Raises UnnamedError for a function by another name that the same code would not be let call by its name."""
    name, module = function.__name__, str(getattr(function, "__module__", None) or "builtins")
    if name in UNSTEADY and is_library_module(module) and module.partition(".")[0] != DSL:
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
        and not is_library_module(kind.__module__)
        and not _slots(kind)
        and not hides(kind)
        and not isinstance(value, (type, *BASES))
    )


def marks(value: Any) -> Mapping[str, Any]:
    """What a program has put on a wrapper of a function."""
    return {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in _OF_WRAPPERS}


def registered(kind: abc.ABCMeta) -> list[str]:
    """The names of the classes that count as subclasses of an abstract one because a program said so."""
    known = [reference() for reference in abc._get_dump(kind)[0]]  # type: ignore[attr-defined]
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in known if each is not None)


def level(logger: logging.Logger) -> tuple[int, int, bool]:
    """What decides whether a logger takes a message: its level or that of a parent, the least of all, if it is on."""
    return logger.getEffectiveLevel(), logger.manager.disable, logger.disabled

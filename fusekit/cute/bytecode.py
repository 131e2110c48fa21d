"""What code names: globals, attributes, imports; and whether what it does can be seen in that."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from fusekit.cute.digest import UnnamedError
from fusekit.cute.libraries import is_unsteady

# Names of what computes names, so that what is read of a module cannot be seen in the code.
COMPUTES = frozenset({
    "globals", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "getmembers", "dir",
    "getattr_static", "f_globals", "__globals__", "__builtins__",
})  # fmt: skip

_IMPORTS = frozenset(
    {"import_module", "__import__", "reload", "find_spec", "modules", "module_from_spec", "resolve_name", "getmodule"}
)

_EVALUATES = frozenset(
    {"eval", "exec", "compile", "execfile", "runpy", "FunctionType", "CodeType", "marshal", "id", "hash"}
)

# Where functions and classes are from that do the like, whatever code calls them.
HOMES = frozenset({
    "builtins", "operator", "_operator", "inspect", "importlib", "importlib.util", "importlib._bootstrap",
    "_frozen_importlib", "pkgutil", "runpy", "marshal", "types",
})  # fmt: skip

_GLOBAL_OPERATIONS = frozenset({
    "LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS",
})  # fmt: skip

MOST_KEPT = 20_000
_Value = TypeVar("_Value")
_Result = TypeVar("_Result")

_WORDS = re.compile(r"[^\W\d]\w*")

_STORE_OPERATIONS = frozenset({"STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR"})

_DELETE_OPERATIONS = frozenset({"DELETE_GLOBAL", "DELETE_NAME", "DELETE_ATTR"})


RECORDED = frozenset({"getattr", "hasattr"})
"""Builtins that are replaced while a trace is recorded, so that what they read by their own names is seen."""

_BY_NAME = COMPUTES | RECORDED | _IMPORTS | _EVALUATES


def reads_by_name(function: Any) -> str:
    """The name of a function or class of Python if it gives or runs what the code that calls it does not name."""
    name = str(getattr(function, "__name__", ""))
    if str(getattr(function, "__module__", None) or "builtins") not in HOMES:
        return ""
    return name if name in _BY_NAME else ""


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _names_of(code: CodeType, operations: frozenset[str]) -> frozenset[str]:
    """The names that `operations` in `code` and the functions in it are given."""
    return frozenset(
        instruction.argval
        for each in nested(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in operations
    )


def kept(function: Callable[[_Value], _Result]) -> Callable[[_Value], _Result]:
    """`function`, which remembers what it gave for each object: code and annotations are slow to hash."""
    known: dict[int, tuple[_Value, _Result]] = {}  # with the object, whose address stays its own for that

    @functools.wraps(function)
    def call(value: _Value) -> _Result:
        if (found := known.get(id(value))) is not None:
            return found[1]
        result = function(value)
        if len(known) >= MOST_KEPT:
            known.clear()
        known[id(value)] = value, result
        return result

    return call


@kept
def code_digest(code: CodeType) -> tuple[str, frozenset[CodeType]]:
    """(the digest of `code` and of the functions in it, all of these)."""
    parts: list[Any] = [
        code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable,
        code.co_qualname,
    ]  # fmt: skip
    codes = frozenset({code})
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            text, more = code_digest(constant)
            codes |= more
            parts.append(text)
        else:
            parts.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest(), codes


@functools.lru_cache(maxsize=MOST_KEPT)
def global_names(code: CodeType) -> frozenset[str]:
    """The globals and builtins that `code` and the functions in it name."""
    return _names_of(code, _GLOBAL_OPERATIONS)


@functools.lru_cache(maxsize=MOST_KEPT)
def attribute_names(code: CodeType) -> frozenset[str]:
    """The names that may be attributes of a module in `code`: all names, strings for `getattr`, words of formats."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            # All words of a format: its fields may have attributes.
            names.update(_WORDS.findall(constant) if "{" in constant else [constant] if constant.isidentifier() else [])
        elif isinstance(constant, CodeType):
            names |= attribute_names(constant)
        elif isinstance(constant, tuple):
            names.update(each for each in constant if isinstance(each, str) and each.isidentifier())
    return frozenset(names)


@functools.lru_cache(maxsize=MOST_KEPT)
def computes_names(code: CodeType) -> bool:
    """Whether `code` reads attributes by names that are not in it, but for `getattr` and `hasattr`."""
    return any(bool(COMPUTES.intersection(each.co_names)) for each in nested(code))


@functools.lru_cache(maxsize=MOST_KEPT)
def stored_names(code: CodeType) -> frozenset[str]:
    """The globals and attributes that `code` and the functions in it assign to."""
    return _names_of(code, _STORE_OPERATIONS) | ({"setattr"} & _names_alone(code))


@functools.lru_cache(maxsize=MOST_KEPT)
def deleted_names(code: CodeType) -> frozenset[str]:
    """The globals and attributes that `code` and the functions in it delete."""
    return _names_of(code, _DELETE_OPERATIONS) | ({"delattr"} & _names_alone(code))


@functools.lru_cache(maxsize=MOST_KEPT)
def why_unsteady(code: CodeType) -> str:
    names = _names_alone(code)
    if bad := frozenset(name for name in names if is_unsteady(name)):
        return f"{code.co_qualname} names {min(bad)}"
    if bad := _EVALUATES & (global_names(code) | ({"FunctionType", "CodeType"} & names)):
        return f"{code.co_qualname} names {min(bad)}"
    if bad := _IMPORTS & names - ({"modules"} if "sys" not in names else set()):
        return f"{code.co_qualname} imports what {min(bad)} is given"
    return ""


def check_names(code: CodeType, names: frozenset[str]) -> None:
    if why := why_unsteady(code):
        raise UnnamedError(why)


def _names_alone(code: CodeType) -> frozenset[str]:
    """The names in `code` and the functions in it, without strings."""
    return frozenset(name for each in nested(code) for name in each.co_names)


def imports(code: CodeType, space: dict[str, Any]) -> Iterator[str]:
    """The imported modules that `code` imports when it runs."""
    package = space.get("__package__") or ""
    for name, level in _import_names(code):
        base = name
        if level:
            try:
                base = importlib.util.resolve_name("." * level + name, package)
            except ImportError:
                continue
        parts = base.split(".")
        for count in range(1, len(parts) + 1):
            if ".".join(parts[:count]) in sys.modules:
                yield ".".join(parts[:count])
        for name in attribute_names(code):  # from package import module
            if f"{base}.{name}" in sys.modules:
                yield f"{base}.{name}"


@functools.lru_cache(maxsize=MOST_KEPT)
def _import_names(code: CodeType) -> tuple[tuple[str, int], ...]:
    imports = []
    for each in nested(code):
        instructions = [item for item in dis.get_instructions(each) if item.opname not in ("CACHE", "EXTENDED_ARG")]
        for at, item in enumerate(instructions):
            if item.opname == "IMPORT_NAME":
                level = instructions[at - 2].argval if at >= 2 else 0
                imports.append((item.argval, level if isinstance(level, int) else 0))
    return tuple(imports)

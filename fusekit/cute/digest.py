"""Digests of Python objects that take part in a compilation, for keys. Imports the standard library alone."""

from __future__ import annotations

import hashlib
from types import CodeType, FunctionType, ModuleType
from typing import Any

DIGITS = 24
"""Of digests in what is kept of a trace."""

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class UnnamedError(Exception):
    """Something takes part in a compilation for which no key has a name."""


def _sorted(constant: Any) -> Any:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def digest_of(value: Any) -> str:
    """A digest of plain values, of objects made of them, and of functions by their code and what that reads."""
    digest, seen = hashlib.sha256(), dict[int, int]()
    keep = []

    def put(*parts: Any) -> None:
        digest.update(repr(parts).encode("utf-8", "surrogatepass"))

    def code(value: CodeType) -> None:
        put(value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_flags)
        for constant in value.co_consts:
            if isinstance(constant, CodeType):
                code(constant)
            else:
                put(type(constant).__name__, _sorted(constant))

    def walk(value: Any) -> None:
        if type(value) in _SIMPLE:
            put(type(value).__name__, value)
            return
        if id(value) in seen:
            put("again", seen[id(value)])
            return
        seen[id(value)] = len(seen)
        keep.append(value)
        kind = type(value)
        if isinstance(value, FunctionType):
            home = str(value.__globals__.get("__name__"))
            put("function", home, value.__qualname__)
            code(value.__code__)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            walk([value.__defaults__, value.__kwdefaults__, cells])
            if not home.startswith("cutlass."):
                reads = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
                walk({name: read for name, read in reads.items() if not isinstance(read, ModuleType | type)})
        elif isinstance(value, type | ModuleType):
            put("named", getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
        elif isinstance(value, list | tuple):
            put(kind.__module__, kind.__qualname__, len(value))
            for item in value:
                walk(item)
        elif isinstance(value, set | frozenset):
            put("set", _sorted(frozenset(value)))
        elif isinstance(value, dict):
            put("dict", len(value))
            for key in sorted(value, key=repr):
                walk(key)
                walk(value[key])
        elif kind.__module__.startswith("tvm_ffi") and kind.__name__ == "dtype":
            put("dtype", str(value))
        elif isinstance(value, staticmethod | classmethod):
            walk(value.__func__)
        elif kind.__module__ == "builtins" and callable(value):
            put("builtin", value.__qualname__)
        elif hasattr(value, "__dict__") and kind.__module__.startswith("cutlass."):
            put("object", kind.__module__, kind.__qualname__)
            walk(vars(value))
        else:
            raise UnnamedError(f"{kind.__module__}.{kind.__qualname__} has no name for a key")

    walk(value)
    return digest.hexdigest()

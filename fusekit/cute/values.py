"""Digests of values with all that they hold: code, defaults and closures of functions, members of classes."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import os
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fusekit.cute.bytecode import global_names, nested, reads_by_name
from fusekit.cute.digest import UnnamedError
from fusekit.cute.leftout import LeftOut
from fusekit.cute.libraries import DSL, UNSTEADY, is_library, is_library_module

DIGITS = 24

_MOST_NODES = 50_000

_LARGEST_ARRAY = 1 << 20  # bytes

SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))

_SIMPLE = frozenset(SIMPLE)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)

NAMED = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip

_SKIPPED_MEMBERS = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__annotations__", "__firstlineno__",
    "__static_attributes__", "__orig_bases__", "__parameters__", "__annotations_cache__", "__annotate_func__",
})  # fmt: skip

# What the DSL notes on functions.
_DSL_MARKS = re.compile(
    r"_dsl_\w+|_original_code|_decorator_location|_preprocess\w*|__pyir\w*|_decorator_kind|__wrapped__"
    r"|set_name_prefix|_name_options_cache"
)

_BASES: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)
_WORD = 8  # bytes of a pointer
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


_SEQUENCES = frozenset({list, tuple, collections.deque})
_TABLES = frozenset({dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType})


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])


class Walk:
    """A digest of values. Objects that occur twice are told apart from equal ones.

    nodes: objects in the values. codes: the code of all functions in them. functions: (code, globals) of these.
    modules: those in the values. memos: memoised functions. by_name: names of functions in them that read by names.
    """

    def __init__(self) -> None:
        self._parts, self._memo, self._keep = list[Any](), dict[int, int](), list[Any]()
        self.nodes = 0
        self.codes: set[CodeType] = set()
        self.functions: list[tuple[CodeType, dict[str, Any]]] = []
        self.modules: dict[str, ModuleType] = {}
        self.memos: list[Any] = []
        self.by_name: set[str] = set()

    def hexdigest(self) -> str:
        return hashlib.sha256(repr(self._parts).encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]

    def put(self, *parts: Any) -> None:
        """Add plain values."""
        self._parts.append(parts)

    def __call__(self, value: Any) -> None:
        kind = type(value)
        if kind in _SIMPLE:
            self._parts.append((kind.__name__, value))
            return
        if (before := self._memo.get(id(value))) is not None:
            self._parts.append(("again", before))
            return
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise UnnamedError("a value holds too many objects")
        self._memo[id(value)] = len(self._memo)
        self._keep.append(value)
        if kind is FunctionType:
            self._function(value)
        elif kind in _SEQUENCES:
            self._sequence(kind.__name__, value)
        elif kind is dataclasses.Field:  # there are many
            self._parts.append(("object",))
            self._class(kind)
            self._state(kind, value)
        elif isinstance(value, enum.Enum):
            self.put("enum", value.name)
            self._class(kind)
            if not is_library_module(kind.__module__):
                self._members("attributes", vars(value))
        elif kind in (set, frozenset):
            self.put(kind.__name__, sorted(self._apart(item) for item in list(value)))
        elif kind in _TABLES:
            self._table(kind.__name__, value)
            if kind is collections.defaultdict:
                self(value.default_factory)
        elif isinstance(value, type):
            self._class(value, new=True)
        elif isinstance(value, ModuleType):
            self.put("module", value.__name__)
            self.modules[value.__name__] = value
            if sys.modules.get(value.__name__) is not value:
                raise UnnamedError(f"the module {value.__name__} is not in sys.modules")
        elif kind is CodeType:
            self._code(value)
        else:
            self._other(kind, value)

    def _apart(self, value: Any) -> str:
        if type(value) in _SIMPLE:
            return f"{type(value).__name__} {value!r}"
        walk = Walk()
        walk(value)
        self.codes |= walk.codes
        self.functions += walk.functions
        self.modules |= walk.modules
        self.memos += walk.memos
        self.by_name |= walk.by_name
        return walk.hexdigest()

    def _sequence(self, label: str, values: Iterable[Any]) -> None:
        values = list(values)
        parts = self._parts
        parts.append((label, len(values)))
        for value in values:
            kind = type(value)
            if kind in _SIMPLE:
                parts.append((kind.__name__, value))
            else:
                self(value)

    def _table(self, label: str, table: Mapping[Any, Any]) -> None:
        # The order counts: code may iterate.
        items = list(table.items())
        parts = self._parts
        parts.append((label, len(items)))
        for key, value in items:
            kind = type(key)
            if kind in _SIMPLE:
                parts.append((kind.__name__, key))
            else:
                self(key)
            self(value)

    def _members(self, label: str, table: Mapping[str, Any]) -> None:
        parts = self._parts
        items = sorted(table.items(), key=_name)
        parts.append((label, len(items)))
        for key, value in items:
            parts.append((str(key),))
            kind = type(value)
            if kind in _SIMPLE:
                parts.append((kind.__name__, value))
                continue
            try:
                self(value)
            except UnnamedError as error:
                raise UnnamedError(f"{key}: {error}") from None

    def _class(self, value: type, *, new: bool = False) -> None:
        self.put("class", value.__module__, value.__qualname__)
        self._at_hand(value)
        if is_library_module(value.__module__) or (not new and id(value) in self._memo):
            return
        if not new:
            self._memo[id(value)] = len(self._memo)
            self._keep.append(value)
        self._sequence("bases", value.__bases__)
        self(type(value))
        members = {
            name: member
            for name, member in list(vars(value).items())
            if name not in _SKIPPED_MEMBERS and not isinstance(member, _DESCRIPTORS)
        }
        self._members("members", members)
        self._annotations(value)

    def _annotations(self, owner: Any) -> None:
        """Dataclasses and the DSL read them."""
        annotations = vars(owner).get("__annotations__") if isinstance(owner, type) else owner.__annotations__
        self._members("annotations", {name: _annotation(each) for name, each in (annotations or {}).items()})

    def _at_hand(self, function: Any) -> None:
        if name := reads_by_name(function):
            self.by_name.add(name)

    def _code(self, code: CodeType) -> None:
        text, codes = _code_digest(code)
        self.codes |= codes
        self.put("code", text)

    def _function(self, value: FunctionType) -> None:
        self.put("function", value.__module__, value.__qualname__)
        _check_steady(value)
        self._at_hand(value)
        marks = vars(value)
        code = marks.get("_original_code", value.__code__)
        if not is_library(code.co_filename):
            self._code(code)
            space = value.__globals__
            self.functions.append((code, space))
            if value.__code__ is not code:  # as the DSL has rewritten it
                self.codes |= set(nested(value.__code__))
                self.functions.append((value.__code__, space))
            if vars(sys.modules.get(str(space.get("__name__"))) or NOTHING) is not space:
                # No module, so no place to find it again: what is read of it is part of the function.
                names = sorted(global_names(code) & space.keys())
                self._members("space", {name: space[name] for name in names})
            self._annotations(value)
        self(value.__defaults__)
        self(value.__kwdefaults__)
        if "__wrapped__" in marks:
            self(marks["__wrapped__"])
        if marks and not is_library(code.co_filename):
            rest = {name: mark for name, mark in marks.items() if not _DSL_MARKS.fullmatch(name)}
            if rest:
                self._members("marks", rest)
        if "_cute_dsl_name_options" in marks:
            self.put(repr(marks["_cute_dsl_name_options"]))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            self.put("cell", name)
            try:
                content = cell.cell_contents
            except ValueError:
                self.put("empty")
                continue
            self(content)

    def _other(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if kind is LeftOut:
            raise UnnamedError(f"{value!r} has no name for a key")
        if kind is types.MethodType:
            self.put("method")
            self(value.__func__)
            self(value.__self__)
        elif kind in (staticmethod, classmethod):
            self.put(name)
            self(value.__func__)
        elif kind is property:
            self._sequence("property", (value.fget, value.fset, value.fdel))
        elif kind is functools.partial or kind is functools.partialmethod:
            self._sequence(name, (value.func, value.args, value.keywords))
        elif kind is functools._lru_cache_wrapper:
            self.put("memoised")
            self(value.__wrapped__)
            self.memos.append(value)
        elif kind is functools.cached_property:
            self._sequence(name, (value.func, value.attrname))
        elif kind is functools.singledispatchmethod or name == "singledispatch":
            raise UnnamedError("functions that dispatch by type have no name for a key")
        elif kind in (range, slice):
            self.put(name, repr(value))
        elif isinstance(value, NAMED):
            _check_steady(value)
            self._at_hand(value)
            self.put("builtin", getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__))
            bound = getattr(value, "__self__", None)
            if bound is not None and not isinstance(bound, ModuleType):
                self(bound)
        elif module == "os" and name == "_Environ":
            self.put("environment")  # what is read of it is recorded
        elif name == "_tuplegetter":
            self.put(name, value.__reduce__()[1][0])
        elif kind is re.Pattern:
            self.put("pattern", value.pattern, value.flags)
        elif isinstance(value, os.PathLike) and module.startswith("pathlib"):
            self.put("path", name, os.fspath(value))
        elif module in ("typing", "types") or name in ("GenericAlias", "UnionType"):
            self._generic(kind, value)
        elif module == "logging" and name in ("Logger", "RootLogger"):
            self.put("logger", value.name)
        elif module.partition(".")[0] in ("torch", "numpy"):
            self._array(kind, value)
        elif name in ("CUstream", "Stream") and module.startswith("cuda"):
            self.put("stream")
        elif name in ("CUevent", "cudaEvent_t") and module.startswith("cuda"):
            self.put("event")
        elif module == DSL or module.startswith(f"{DSL}."):
            self._of_the_dsl(kind, value)
        else:
            self._object(kind, value)

    def _generic(self, kind: type, value: Any) -> None:
        if kind is types.SimpleNamespace:
            self._members("namespace", vars(value))
            return
        text = _ADDRESS.sub("", repr(value))
        self.put(kind.__module__, kind.__qualname__, text)
        for part in getattr(value, "__args__", ()):
            self(part)

    def _array(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if name in ("dtype", "device", "Size", "layout", "memory_format") or name.endswith("DType"):
            self.put(module, name, repr(value))
        elif name == "FakeTensor" or (name in ("Tensor", "Parameter") and value.device.type == "meta"):
            self.put(
                "fake", str(value.dtype), tuple(map(int, value.shape)), tuple(map(int, value.stride())),
                str(value.device),
            )  # fmt: skip
        elif module == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            if value.nbytes > _LARGEST_ARRAY:
                raise UnnamedError(f"an array of {value.nbytes} bytes is too large for a key")
            self.put("array", value.dtype.str, value.shape, value.strides, hashlib.sha256(value.tobytes()).digest())
        else:
            raise UnnamedError(f"{module}.{name} has no name for a key")

    def _of_the_dsl(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if module.startswith(f"{DSL}._mlir"):
            raise UnnamedError(f"{module}.{name} has no name for a key")
        self.put("dsl", module, name)
        # Their types are in the key, as MLIR types.
        if name == "_Tensor":
            self.put(value._assumed_align, value._use_32bit_stride)
            return
        if name == "_Pointer":
            self(value._dtype)
            self.put(str(value._addr_space), value._assumed_align)
            return
        self._state(kind, value)

    def _object(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if module in ("_thread", "weakref", "_weakref", "_contextvars", "threading", "_io", "_asyncio", "_ctypes"):
            raise UnnamedError(f"{module}.{name} has no name for a key")
        self.put("object")
        self._class(kind)
        for base in _BASES:
            if isinstance(value, base):
                plain: Any = base(value)
                self(plain) if base is not set and base is not frozenset else self.put(sorted(map(self._apart, plain)))
                break
        else:
            if not hasattr(value, "__dict__") and not _slots(kind) and not _stateless(kind):
                raise UnnamedError(f"{module}.{name} has no name for a key")
        self._state(kind, value)

    def _state(self, kind: type, value: Any) -> None:
        if _hides(kind):
            raise UnnamedError(f"{kind.__module__}.{kind.__qualname__} has state that only C code sees")
        self._members("attributes", getattr(value, "__dict__", {}))
        parts = self._parts
        for slot in _slots(kind):
            member = getattr(value, slot, NOTHING)
            if member is not NOTHING:
                parts.append((slot,))
                part = type(member)
                if part in _SIMPLE:
                    parts.append((part.__name__, member))
                    continue
                try:
                    self(member)
                except AttributeError as error:  # of what it holds
                    raise UnnamedError(f"{slot}: {error}") from None


class _Nothing:
    pass


NOTHING = _Nothing()


@functools.lru_cache(maxsize=20_000)
def _code_digest(code: CodeType) -> tuple[str, frozenset[CodeType]]:
    """(the digest of `code` and of the functions in it, all of these)."""
    parts: list[Any] = [
        code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable,
    ]  # fmt: skip
    codes = frozenset({code})
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            text, more = _code_digest(constant)
            codes |= more
            parts.append(text)
        else:
            parts.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest(), codes


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
def _hides(kind: type) -> bool:
    """Whether instances may have state that is neither in attributes nor in slots."""
    return any(
        type(each).__module__ == "nanobind"
        or type(each).__name__ == "pybind11_type"
        or (each.__base__ is object and each.__basicsize__ > object.__basicsize__ + _WORD * (len(_slots(each)) + 2))
        for each in kind.__mro__
        if each not in _BASES
    )


def _check_steady(function: Any) -> None:
    """Raises UnnamedError for a function by another name that the same code would not be let call by its name."""
    name, module = function.__name__, str(getattr(function, "__module__", None) or "builtins")
    if name in UNSTEADY and is_library_module(module) and module.partition(".")[0] != DSL:
        raise UnnamedError(f"{name} of {module} is at hand")
    if isinstance(function, types.BuiltinFunctionType) and not is_library_module(module):
        raise UnnamedError(f"what {name} of {module} does is not seen")


def _stateless(kind: type) -> bool:
    """Whether instances are like `object()`: of classes in Python, without members of their own."""
    return kind is not object and kind.__basicsize__ == object.__basicsize__


def _annotation(value: Any) -> Any:
    return value if isinstance(value, (str, type)) else _ADDRESS.sub("", repr(value))


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
        and not _hides(kind)
        and not isinstance(value, (type, *_BASES))
    )


def digest(value: Any) -> str:
    """The digest of one value. Raises UnnamedError."""
    walk = Walk()
    walk(value)
    return walk.hexdigest()

"""Digests of values with all that they hold: code, defaults and closures of functions, members of classes."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import hashlib
import marshal
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fusekit.cute.bytecode import HOMES, MOST_KEPT, code_digest, global_names, kept, nested, reads_by_name
from fusekit.cute.digest import UnnamedError
from fusekit.cute.kinds import BASES, check_steady, hides, level, marks, registered, slots_of, stateless
from fusekit.cute.leftout import LeftOut
from fusekit.cute.libraries import DSL, UNSTEADY, is_library, is_library_module

DIGITS = 24

_MOST_NODES = 50_000

_LARGEST_ARRAY = 1 << 20  # bytes

SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))

_SIMPLE = frozenset(SIMPLE) - {type(NotImplemented)}
_HOMES = HOMES | {None}
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

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_FORMAT = 2  # of marshal: the last one in which equal values have equal bytes

_SEQUENCES = frozenset({list, tuple, collections.deque})
_TABLES = frozenset({dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType})


def _sorted(names: Iterable[Any]) -> list[Any]:
    try:
        return sorted(names)
    except TypeError:
        return sorted(names, key=str)


class Walk:
    """A digest of values. Objects that occur twice are told apart from equal ones.

    places: id of each object -> the number of those before it. nodes: objects in the values. codes: the code of all
    functions in them. functions: (code, globals) of these. modules: those in the values. memos: memoised functions.
    by_name: names of functions in them that read by names.
    """

    def __init__(self) -> None:
        # Plain values are themselves, names too, where they are counted; all else is in tuples.
        self._parts, self.places, self._keep = list[Any](), dict[int, int](), list[Any]()
        self.nodes = 0
        self.codes: set[CodeType] = set()
        self.functions: list[tuple[CodeType, dict[str, Any]]] = []
        self.modules: dict[str, ModuleType] = {}
        self.memos: list[Any] = []
        self.by_name: set[str] = set()

    def hexdigest(self) -> str:
        try:
            return hashlib.sha256(marshal.dumps(self._parts, _FORMAT)).hexdigest()[:DIGITS]
        except ValueError:
            raise UnnamedError("something in a value has a name of a type of its own") from None

    def put(self, *parts: Any) -> None:
        """Add plain values."""
        self._parts.append(parts)

    def __call__(self, value: Any) -> None:
        kind = type(value)
        if kind in _SIMPLE:
            self._parts.append(value)
            return
        if (before := self.places.get(id(value))) is not None:
            self._parts.append(("again", before))
            return
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise UnnamedError("a value holds too many objects")
        self.places[id(value)] = len(self.places)
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
            self._set(kind.__name__, value)
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

    def _set(self, label: str, values: Iterable[Any]) -> None:
        values = list(values)
        plain = [value for value in values if type(value) in _SIMPLE]
        self.put(label, sorted(f"{type(value).__name__} {value!r}" for value in plain))
        # Their order is no part of it.
        self._sequence("others", sorted((value for value in values if type(value) not in _SIMPLE), key=digest))

    def _sequence(self, label: str, values: Iterable[Any]) -> None:
        values = list(values)
        parts = self._parts
        parts.append((label, len(values)))
        for value in values:
            if type(value) in _SIMPLE:
                parts.append(value)
            else:
                self(value)

    def _table(self, label: str, table: Mapping[Any, Any]) -> None:
        # The order counts: code may iterate.
        items = list(table.items())
        parts = self._parts
        parts.append((label, len(items)))
        for key, value in items:
            if type(key) in _SIMPLE:
                parts.append(key)
            else:
                self(key)
            self(value)

    def _members(self, label: str, table: Mapping[str, Any], names: list[str] | None = None) -> None:
        parts = self._parts
        names = _sorted(table) if names is None else names
        parts.append((label, len(names)))
        for key in names:
            value = table[key]
            parts.append(key if type(key) is str else ("key", repr(key)))
            if type(value) in _SIMPLE:
                parts.append(value)
                continue
            try:
                self(value)
            except UnnamedError as error:
                raise UnnamedError(f"{key}: {error}") from None

    def _class(self, value: type, *, new: bool = False) -> None:
        self.put("class", value.__module__, value.__qualname__, None if new else self.places.get(id(value)))
        if value.__module__ in HOMES:
            self._at_hand(value)
        if isinstance(value, abc.ABCMeta) and (new or id(value) not in self.places):
            self.put("registered", registered(value))
        if is_library_module(value.__module__) or (not new and id(value) in self.places):
            return
        if not new:
            self.places[id(value)] = len(self.places)
            self._keep.append(value)
        self._sequence("bases", value.__bases__)
        self(type(value))
        space = vars(value)
        names = [
            name
            for name in _sorted(space)
            if name not in _SKIPPED_MEMBERS and not isinstance(space[name], _DESCRIPTORS)
        ]
        self.put(value.__name__, _documentation(space.get("__doc__")))
        self._members("members", space, names)
        self._annotations(space.get("__annotations__"))

    def _annotations(self, annotations: Any) -> None:
        """Dataclasses and the DSL read them."""
        table = {name: _annotation(each) for name, each in annotations.items()} if annotations else {}
        self._members("annotations", table)

    def _at_hand(self, function: Any) -> None:
        if name := reads_by_name(function):
            self.by_name.add(name)

    def _code(self, code: CodeType) -> None:
        text, codes = code_digest(code)
        self.codes |= codes
        self.put("code", text)

    def _function(self, value: FunctionType) -> None:
        parts, module, own = self._parts, value.__module__, value.__code__
        parts.append(("function", module, value.__qualname__, value.__name__))
        if value.__name__ in UNSTEADY:
            check_steady(value)
        if module in _HOMES:
            self._at_hand(value)
        marks = vars(value)
        code = marks.get("_original_code", own)
        of_a_library = is_library(code.co_filename)
        if not of_a_library:
            self._code(code)
            space = value.__globals__
            self.functions.append((code, space))
            if own is not code:  # as the DSL has rewritten it
                self.codes |= set(nested(own))
                self.functions.append((own, space))
            if vars(sys.modules.get(str(space.get("__name__"))) or NOTHING) is not space:
                # No module, so no place to find it again: what is read of it is part of the function.
                self._members("space", space, sorted(global_names(code) & space.keys()))
            self._annotations(value.__annotations__)
            if value.__doc__ is not None and value.__doc__ not in code.co_consts[:1]:
                self.put("doc", _documentation(value.__doc__))
        self(value.__defaults__)
        self(value.__kwdefaults__)
        if marks:
            if "__wrapped__" in marks:
                self(marks["__wrapped__"])
            if not of_a_library:
                rest = {name: mark for name, mark in marks.items() if not _is_dsl_mark(name)}
                if rest:
                    self._members("marks", rest)
            if "_cute_dsl_name_options" in marks:
                self.put(repr(marks["_cute_dsl_name_options"]))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            parts.append(("cell", name))
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
            self._members("marks", marks(value))
        elif value is NotImplemented:
            self.put("NotImplemented")
        elif kind is property:
            self._sequence("property", (value.fget, value.fset, value.fdel))
        elif kind is functools.partial or kind is functools.partialmethod:
            self._sequence(name, (value.func, value.args, value.keywords))
            self._members("marks", marks(value))
        elif kind is functools._lru_cache_wrapper:
            self.put("memoised")
            self(value.__wrapped__)
            self._members("marks", marks(value))
            self.memos.append(value)
        elif kind is functools.cached_property:
            self._sequence(name, (value.func, value.attrname))
        elif kind is functools.singledispatchmethod or name == "singledispatch":
            raise UnnamedError("functions that dispatch by type have no name for a key")
        elif kind in (range, slice):
            self.put(name, repr(value))
        elif isinstance(value, NAMED):
            check_steady(value)
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
            self.put("logger", value.name, level(value))
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
        self.put(kind.__module__, kind.__qualname__, _text(value))
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
        for base in BASES:
            if isinstance(value, base):
                plain: Any = base(value)
                self(plain)
                break
        else:
            if not hasattr(value, "__dict__") and not slots_of(kind)[0] and not stateless(kind):
                raise UnnamedError(f"{module}.{name} has no name for a key")
        self._state(kind, value)

    def _state(self, kind: type, value: Any) -> None:
        if hides(kind):
            raise UnnamedError(f"{kind.__module__}.{kind.__qualname__} has state that only C code sees")
        self._members("attributes", getattr(value, "__dict__", {}))
        slots, get = slots_of(kind)
        if not slots:
            return
        try:
            members: Any = get(value)
        except AttributeError:
            members = [getattr(value, slot, NOTHING) for (slot,) in slots]
        parts = self._parts
        for slot, member in zip(slots, members, strict=False):
            if member is not NOTHING:
                parts.append(slot)
                if type(member) in _SIMPLE:
                    parts.append(member)
                    continue
                try:
                    self(member)
                except AttributeError as error:  # of what it holds
                    raise UnnamedError(f"{slot[0]}: {error}") from None


class _Nothing:
    pass


NOTHING = _Nothing()


def _text(value: Any) -> str:
    """What an annotation is written as."""
    kind = type(value)
    # Which do not change.
    steady = kind.__module__ == "typing" or kind in (types.GenericAlias, types.UnionType)
    return _steady_text(value) if steady else _ADDRESS.sub("", repr(value))


@kept
def _steady_text(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


@functools.lru_cache(maxsize=MOST_KEPT)
def _is_dsl_mark(name: str) -> bool:
    return _DSL_MARKS.fullmatch(name) is not None


def _documentation(value: Any) -> str | None:
    if type(value) is str:
        return value if "0x" not in value else _ADDRESS.sub("", value)
    return None if value is None else _text(value)


def _annotation(value: Any) -> Any:
    return value if isinstance(value, (str, type)) else _text(value)


def digest(value: Any) -> str:
    """The digest of one value. Raises UnnamedError."""
    walk = Walk()
    walk(value)
    return walk.hexdigest()

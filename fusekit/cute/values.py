"""Digests of values with all that they hold: code, defaults and closures of functions, members of classes."""

from __future__ import annotations

import abc
import collections
import copyreg
import dataclasses
import enum
import functools
import hashlib
import marshal
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fusekit.cute.arrays import array
from fusekit.cute.bytecode import HOMES, MOST_KEPT, code_digest, global_names, nested, reads_by_name
from fusekit.cute.digest import DIGITS, UnnamedError
from fusekit.cute.kinds import (
    BASES,
    annotation,
    check_steady,
    documentation,
    evaluated,
    hides,
    is_library_class,
    level,
    marks,
    of_logger,
    plain,
    put_into,
    registered,
    slots_in,
    slots_of,
    stateless,
    text_of,
)
from fusekit.cute.leftout import LeftOut
from fusekit.cute.libraries import DSL, is_library, is_unsteady
from fusekit.cute.state import STATES

_MOST_NODES = 50_000

SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))

_SIMPLE = frozenset(SIMPLE) - {type(NotImplemented), float}
_ORDERED = frozenset({bool, int, float})  # whose order in a set is the same in each process
_HOMES = HOMES | {None}
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)

NAMED = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip

_SKIPPED_MEMBERS = frozenset({
    "__doc__", "__module__", "_abc_impl", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__orig_bases__", "__parameters__", "__annotations_cache__", "__annotate_func__",
})  # fmt: skip

# What the DSL notes on functions.
_DSL_MARKS = re.compile(
    r"_dsl_\w+|_original_code|_decorator_location|_preprocess\w*|__pyir\w*|_decorator_kind|__wrapped__"
    r"|set_name_prefix|_name_options_cache"
)

_FORMAT = 2  # of marshal: the last one in which equal values have equal bytes

_FIXED_HANDLES = range(3)  # of a stream: the null, the legacy and the per-thread one
_SEQUENCES = frozenset({list, tuple, collections.deque})
_TABLES = frozenset({dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType})


class Walk:
    """A digest of values. Objects that occur twice are told apart from equal ones.

    places: id of each object -> the number of those before it. nodes: objects in the values. codes: the code of all
    functions in them. functions: (code, globals) of these. modules: those in the values. memos: memoised functions.
    by_name: names of functions in them that read by names. typed: ids of tensors and streams whose types are in the
    key.
    """

    def __init__(self) -> None:
        # Plain values are themselves, names too, where they are counted; all else is in tuples.
        self._parts, self.places, self._keep = list[Any](), dict[int, int](), list[Any]()
        self._spaces = dict[int, int]()
        self.typed = frozenset[int]()
        self._abstract: list[tuple[str, list[type]]] | None = None
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
        if kind is float and value == value:  # another one is equal to itself alone
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
            if kind is collections.deque:
                self.put(value.maxlen)
        elif kind is float:
            self._parts.append(value)
        elif kind is dataclasses.Field:  # there are many
            self._parts.append(("object",))
            self._class(kind)
            self._state(kind, value)
        elif isinstance(value, enum.Enum):
            self.put("enum", value.name, repr(value._value_) if value.name is None or "|" in value.name else None)
            self._class(kind)
            if not is_library_class(kind):
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
        known = [value for value in values if type(value) in _SIMPLE or type(value) is float]
        texts = [f"{type(value).__name__} {value!r}" for value in known]
        self.put(label, texts if _ORDERED.issuperset(map(type, values)) else sorted(texts))
        # Their order is no part of it: it may be another one in each process.
        others = [value for value in values if type(value) not in _SIMPLE and type(value) is not float]
        self._sequence("others", sorted(others, key=digest))

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
        names = list(table) if names is None else names  # code may iterate
        parts.append((label, len(names)))
        for key in names:
            value = table[key]
            if type(key) is str:
                parts.append(key)
            else:
                self(key)
            if type(value) in _SIMPLE:
                parts.append(value)
                continue
            try:
                self(value)
            except UnnamedError as error:
                raise UnnamedError(f"{key}: {error}") from None

    def _class(self, value: type, *, new: bool = False) -> None:
        module = value.__module__ if isinstance(value.__module__, str) else ""  # some classes in C have none
        self.put("class", module, value.__qualname__, None if new else self.places.get(id(value)))
        if module in HOMES:
            self._at_hand(value)
        if isinstance(value, abc.ABCMeta) and (new or id(value) not in self.places):
            self._sequence("registered", registered(value))
        if is_library_class(value) and (new or id(value) not in self.places):
            self._put_into(value)
        if is_library_class(value) or (not new and id(value) in self.places):
            return
        if not new:
            self.places[id(value)] = len(self.places)
            self._keep.append(value)
        self._sequence("bases", value.__bases__)
        self._known_to_libraries(value)
        self(type(value))
        space = vars(value)
        names = [
            name
            for name, member in space.items()
            if name not in _SKIPPED_MEMBERS
            and not (isinstance(member, _DESCRIPTORS) and member.__objclass__ is value and member.__name__ == name)
        ]
        self._sequence("generic", map(annotation, space.get("__orig_bases__", ())))
        self.put(value.__name__, documentation(space.get("__doc__")))
        self._members("members", space, names)
        self._annotations(space.get("__annotations__"))

    def _known_to_libraries(self, value: type) -> None:
        """What a program has told the standard library of its class."""
        if self._abstract is None:
            self._abstract = [(each.__name__, registered(each)) for each in (Sequence, Mapping, Set)]
        known = [name for name, classes in self._abstract if value in classes]
        copied = copyreg.dispatch_table.get(value)
        if known or copied is not None:
            self.put(known, getattr(copied, "__qualname__", ""))

    def _put_into(self, value: type) -> None:
        """What a program may have put into a class of a library."""
        for name, member in put_into(value):
            self.put(name)
            self(member)

    def _annotations(self, annotations: Any, space: dict[str, Any] | None = None) -> None:
        """Dataclasses and the DSL read them. space: globals of their function, which those that are text name."""
        known = annotations if type(annotations) is dict else {}
        table = {name: annotation(each) for name, each in known.items()}
        if space is not None:
            texts = {name: each for name, each in table.items() if type(each) is str and type(known[name]) is str}
            if texts:
                table["evaluated"] = {name: annotation(evaluated(each, space)) for name, each in texts.items()}
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
        if is_unsteady(value.__name__):
            check_steady(value)
        if module in STATES:
            self.put(STATES[module]())
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
            self._annotations(value.__annotations__, space)
            if value.__doc__ is not None and value.__doc__ not in code.co_consts[:1]:
                self.put("doc", documentation(value.__doc__))
        self(value.__defaults__)
        self(value.__kwdefaults__)
        if marks:
            if "__wrapped__" in marks:
                self(marks["__wrapped__"])
            rest = {name: mark for name, mark in marks.items() if not _is_dsl_mark(name)}
            if rest:
                self._members("marks", rest)
            if "_cute_dsl_name_options" in marks:
                self.put(repr(marks["_cute_dsl_name_options"]))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            # What is put into a cell by one function is seen by all that have it.
            parts.append(("cell", name, self.places.setdefault(id(cell), len(self.places))))
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
        elif isinstance(value, (staticmethod, classmethod)):
            self.put(name)
            self._class(kind)
            self(value.__func__)
            self._members("marks", marks(value))
        elif value is NotImplemented:
            self.put("NotImplemented")
        elif kind is property:
            self._sequence("property", (value.fget, value.fset, value.fdel))
            self.put(documentation(value.__doc__))
        elif kind is functools.partial or kind is functools.partialmethod:
            self._sequence(name, (value.func, value.args, value.keywords))
            self._members("marks", marks(value))
        elif kind is functools._lru_cache_wrapper:
            self.put("memoised")
            self(value.__wrapped__)
            self._members("marks", marks(value))
            self.memos.append(value)
        elif kind is functools.cached_property:
            self._sequence(name, (value.func,))
            self._members("attributes", marks(value))
        elif kind is functools.singledispatchmethod or name == "singledispatch":
            raise UnnamedError("functions that dispatch by type have no name for a key")
        elif kind in (range, slice):
            self._sequence(name, (value.start, value.stop, value.step))
        elif isinstance(value, NAMED):
            check_steady(value)
            if (state := STATES.get(str(getattr(value, "__module__", "")))) is not None:
                self.put(state())
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
        elif is_library_class(kind) and (module in ("typing", "types") or name in ("GenericAlias", "UnionType")):
            self._generic(kind, value)
        elif module == "logging" and name in ("Logger", "RootLogger"):
            self.put("logger", value.name, level(value))
            self._members("attributes", of_logger(value))
        elif module.partition(".")[0] in ("torch", "numpy"):
            self.put(*array(kind, value))
        elif name in ("CUstream", "Stream") and module.startswith("cuda"):
            self._handle("stream", value)
        elif name in ("CUevent", "cudaEvent_t") and module.startswith("cuda"):
            self._handle("event", value)
        elif (module == DSL or module.startswith(f"{DSL}.")) and is_library_class(kind):
            self._of_the_dsl(kind, value)
        else:
            self._object(kind, value)

    def _generic(self, kind: type, value: Any) -> None:
        if kind is types.SimpleNamespace:
            self._members("namespace", vars(value))
            return
        self.put(kind.__module__, kind.__qualname__, text_of(value))
        if kind is types.DynamicClassAttribute:
            self._sequence("property", (value.fget, value.fset, value.fdel))
        for name in ("__args__", "__origin__", "__metadata__", "__bound__", "__constraints__", "__supertype__"):
            part = getattr(value, name, None)
            for each in part if type(part) is tuple else (part,):
                self(each)

    def _handle(self, label: str, value: Any) -> None:
        if id(value) in self.typed:
            self.put(label)
        elif int(value) in _FIXED_HANDLES:
            self.put(label, int(value))
        else:
            raise UnnamedError(f"a {label} that is no argument of its own has no name for a key")

    def _of_the_dsl(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if module.startswith(f"{DSL}._mlir"):
            raise UnnamedError(f"{module}.{name} has no name for a key")
        self.put("dsl", module, name)
        # Types of arguments are in the key, as MLIR types.
        if name == "_Tensor":
            if id(value) not in self.typed:
                raise UnnamedError("a tensor that is no argument of its own has no name for a key")
            self.put(value._assumed_align, value._use_32bit_stride)
            return
        if name == "_Pointer":
            self(value._dtype)
            self.put(str(value._addr_space), value._assumed_align)
            return
        self._base(value)
        self._state(kind, value)

    def _object(self, kind: type, value: Any) -> None:
        module, name = kind.__module__, kind.__qualname__
        if module in ("_thread", "weakref", "_weakref", "_contextvars", "threading", "_io", "_asyncio", "_ctypes"):
            raise UnnamedError(f"{module}.{name} has no name for a key")
        self.put("object")
        self._class(kind)
        if not (self._base(value) or hasattr(value, "__dict__") or slots_of(kind)[0] or stateless(kind)):
            raise UnnamedError(f"{module}.{name} has no name for a key")
        self._state(kind, value)

    def _base(self, value: Any) -> bool:
        """What a number, text or container of another class holds as such. Whether it is one."""
        for base in BASES:
            if isinstance(value, base):
                self(plain(value, base))
                return True
        return False

    def _state(self, kind: type, value: Any) -> None:
        if hides(kind):
            raise UnnamedError(f"{kind.__module__}.{kind.__qualname__} has state that only C code sees")
        parts = self._parts
        space = getattr(value, "__dict__", None)
        if space is not None:
            parts.append(self._spaces.setdefault(id(space), len(self._spaces)))  # objects may share it
            self._members("attributes", space)
        slots, get = slots_of(kind)
        if not slots:
            return
        try:
            members: Any = get(value)
        except AttributeError:
            members = [_slot(each, value) for each in slots_in(kind)]
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


@functools.lru_cache(maxsize=MOST_KEPT)
def _is_dsl_mark(name: str) -> bool:
    return _DSL_MARKS.fullmatch(name) is not None


def _slot(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return NOTHING


def digest(value: Any) -> str:
    """The digest of one value. Raises UnnamedError."""
    walk = Walk()
    walk(value)
    return walk.hexdigest()

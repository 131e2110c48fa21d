"""What `cute.compile` is given, as data: fake tensors, numbers, and callables that can be imported.

One call becomes a JSON table, from which the same call is made in another process:

    source    "package.module:name": the host function, or the class of the object that is called
    fakes     its positional arguments; `keywords`: those by name
    symbols   name -> { divisor, bits }: the symbolic integers in the tensors; one name is one integer
    state     attributes of the object that is called; `method`: its method, where that is not `__call__`
    options   what of the compile options changes the cubin

An argument is a number, a string or a truth value as it is, or a table: a tensor
`{ tensor = "BFloat16", shape = ["s0", 4096], stride = ["s1", 1], align = 16 }`, `{ number = "Float32", value = 1.0 }`,
`{ pointer = "Float32", align = 4 }`, `{ float = "-inf" }`, `{ stream = true }`, `{ none = true }`,
`{ name = "module:name" }` for a class, a function or the member of an enumeration,
`{ lambda = "lambda x: x + 1", module = "module" }` with the names of that module,
`{ closure = "module:outer", place = "inner", free = { .. } }` for a function made inside the function `outer` (`jit`:
with `cute.jit` around it, `state`: its attributes),
`{ object = "module:class", state = { .. } }`, and `tuple`, `list`, `dict` of such.
"""

from __future__ import annotations

import enum
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any

from fusekit.compiler import closures, dsl, lambdas
from fusekit.compiler.intercept import Traced
from fusekit.errors import BuildError

FAKES = "fakes"
"""The param that says that a spec's source is the host function itself, and what it is traced with."""

_EXTENT = re.compile(r"\?(?:\{([^}]*)\})?|\d+")
_DIVISOR = re.compile(r"div=(\d+)")
_PLAIN = type("Plain", (), {}).__basicsize__  # bytes of an instance that has nothing but a `__dict__`
_GENERIC = "gmem"  # the memory space of a fake tensor that names none


@dataclass(slots=True)
class CallWriter:
    """Writes the values of one call. symbols: those met so far; none has a name of `taken`, the host's parameters."""

    symbols: dict[str, dict[str, int]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    _names: dict[int, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _inside: list[Any] = field(default_factory=list)
    taken: frozenset[str] = frozenset()

    def value(self, value: Any, where: str) -> Any:
        """`value` as data. where: its name, for messages. Raises BuildError for what cannot be made again."""
        if isinstance(value, enum.Enum):
            return {"name": f"{self._importable(type(value), where)}.{value.name}"}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(value)}
        if isinstance(value, bool | int | float | str):
            return value
        if value is None:
            return {"none": True}
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": [self.value(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        if isinstance(value, list):
            return {"list": [self.value(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [[self.value(key, where), self.value(value[key], f"{where}[{key!r}]")] for key in value]}
        if isinstance(value, type) or inspect.isfunction(value) or isinstance(_owner(value), ModuleType):
            written = self._lambda(value, where) or self._closure(value, where)
            return written or {"name": self._importable(value, where)}
        return self._of_the_dsl(value, where) or self.object(value, where)

    def object(self, value: Any, where: str) -> dict[str, Any]:
        """An instance of an importable class, by its attributes."""
        kind: Any = type(value)
        if hasattr(value, "_fields"):  # a named tuple
            name = self._importable(kind, where)
            return {"object": name, "items": [self.value(item, f"{where}.{at}") for at, item in _fields(value)]}
        if not _is_its_attributes(value):
            raise BuildError(
                f"{where} is {_described(value)}, which is more than attributes that a file could hold; make it inside"
                " a function of a module, and name that as the source"
            )
        if any(value is outer for outer in self._inside):
            raise BuildError(
                f"{where} is inside itself, which a file cannot hold; make it inside a function of a module, and name"
                " that as the source"
            )
        name = self._importable(kind, where)
        self._inside.append(value)
        state = {at: self.value(item, f"{where}.{at}") for at, item in vars(value).items()}
        self._inside.pop()
        return {"object": name, "state": state}

    def _lambda(self, value: Any, where: str) -> dict[str, Any] | None:
        """A lambda that its text and its module make again, in another process too."""
        text = lambdas.text_of(value) if inspect.isfunction(value) and value.__module__ != "__main__" else None
        if text is None:
            return None
        self.modules.add(value.__module__)
        return {"lambda": text, "module": value.__module__}

    def _closure(self, value: Any, where: str) -> dict[str, Any] | None:
        """A function made inside a function of a module: its code is that module's, its free variables are data."""
        inner = closures.inner_of(value) if inspect.isfunction(value) and value.__module__ != "__main__" else None
        if inner is None or inner.__globals__ is not vars(_module(inner.__module__)):
            return None
        name = f"{inner.__module__}:{inner.__qualname__.partition('.<locals>')[0]}"
        try:
            place = closures.place_of(inner, resolve(name))
        except BuildError:  # made by a function that is itself under another name
            return None
        free = closures.free_of(inner)
        if place is None or free is None:
            return None
        if any(inner is outer for outer in self._inside):
            raise BuildError(f"{where} is inside itself, which a file cannot hold; make it a function of a module")
        self.modules.add(inner.__module__)
        self._inside.append(inner)
        written: dict[str, Any] = {"closure": name, "place": place}
        tables = {"free": free, "state": closures.attributes_of(value)}
        for key, table in tables.items():
            if table or key == "free":
                written[key] = {at: self.value(item, f"{where}.{at}") for at, item in table.items()}
        self._inside.pop()
        return written if inner is value else {**written, "jit": True}

    def _of_the_dsl(self, value: Any, where: str) -> dict[str, Any] | None:
        import cutlass
        from cutlass import cute
        from cutlass.cute.typing import SymInt

        kind = type(value).__name__
        if kind == "_FakeTensor":
            return self._tensor(
                value.element_type, value.memspace, dsl.alignment(value), value.shape, value.stride, self._symbol
            )
        if isinstance(value, cute.Tensor):
            return self._real(value, where)
        if isinstance(value, SymInt):
            return {"symbol": self._symbol(value)}
        if isinstance(value, cutlass.Numeric):
            if not isinstance(value.value, bool | int | float):
                raise BuildError(
                    f"{where} is {_described(value)}: a value of a trace that runs; compile it from outside"
                )
            return {"number": type(value).__name__, "value": self.value(value.value, where)}
        if kind == "_Pointer":
            return {"pointer": value.dtype.__name__, "align": dsl.alignment(value), "memory": value.memspace.name}
        if kind.endswith("Stream") or kind == "CUstream":
            return {"stream": True}
        if kind in ("CUevent", "cudaEvent_t"):
            return {"event": True}
        if hasattr(value, "__dlpack__"):
            from cutlass.cute.runtime import from_dlpack

            # What the DSL itself makes of a tensor of NumPy, PyTorch or JAX.
            return self._real(from_dlpack(value).mark_layout_dynamic(), where)
        return None

    def _real(self, tensor: Any, where: str) -> dict[str, Any]:
        """A tensor with an address, by its layout: an extent that is dynamic there is a symbol of its own."""
        text = dsl.type_text(tensor)
        match = re.search(r'"\(([^()]*)\):\(([^()]*)\)"', text)
        if match is None:
            raise BuildError(f"{where} has the layout {text}, which is nested; compile it with a fake tensor")
        shape, stride = ([_extent(item) for item in _EXTENT.finditer(part)] for part in match.groups())
        align = dsl.alignment(tensor) or max(1, tensor.element_type.width // 8)
        return self._tensor(tensor.element_type, tensor.memspace, align, shape, stride, self._fresh)

    def _tensor(self, dtype: Any, memory: Any, align: int, shape: Any, stride: Any, named: Any) -> dict[str, Any]:
        table = {
            "tensor": dtype.__name__,
            "shape": [item if isinstance(item, int) else named(item) for item in shape],
            "stride": [item if isinstance(item, int) else named(item) for item in stride],
            "align": align,
        }
        return table if memory.name == _GENERIC else {**table, "memory": memory.name}

    def _symbol(self, symbol: Any) -> str:
        """The name of a symbolic integer: one object is one symbol."""
        name = self._names.get(id(symbol))
        if name is None:
            self._kept.append(symbol)
            name = self._names[id(symbol)] = self._fresh((symbol.divisibility, symbol.width))
        return name

    def _fresh(self, facts: tuple[int, int]) -> str:
        name = next(name for number in count() if (name := f"s{number}") not in {*self.symbols, *self.taken})
        divisor, bits = facts
        self.symbols[name] = {"divisor": divisor, "bits": bits}
        return name

    def _importable(self, value: Any, where: str) -> str:
        name = importable(value, where)
        self.modules.add(name.partition(":")[0])
        return name


@dataclass(frozen=True, slots=True)
class CallReader:
    """Makes the values that a `CallWriter` wrote. symbols: the table of them."""

    symbols: Mapping[str, Any]

    @classmethod
    def of(cls, table: Mapping[str, Mapping[str, int]]) -> CallReader:
        from cutlass.cute.typing import SymInt

        known = {
            name: SymInt(facts.get("bits", 32), divisibility=facts.get("divisor", 1), symbol=name)
            for name, facts in table.items()
        }
        return cls(known)

    def value(self, data: Any) -> Any:
        """The value of a table. Raises BuildError for one that this version does not know, or a name that cannot be
        imported.
        """
        if not isinstance(data, Mapping):
            return data
        kind = next((kind for kind in _MAKERS if kind in data), None)
        if kind is None:
            raise BuildError(f"fakes: a table with the keys {', '.join(data)}; it has one of {', '.join(_MAKERS)}")
        return _MAKERS[kind](self, data)

    def values(self, items: Any) -> list[Any]:
        return [self.value(item) for item in items]

    def tensor(self, data: Mapping[str, Any]) -> Any:
        from cutlass.cute.runtime import make_fake_tensor

        shape, stride = (tuple(self._extent(item) for item in data[key]) for key in ("shape", "stride"))
        return make_fake_tensor(
            _dtype(data["tensor"]), shape, stride, memspace=_memory(data), assumed_align=data["align"]
        )

    def pointer(self, data: Mapping[str, Any]) -> Any:
        from cutlass.cute.runtime import make_ptr

        return make_ptr(_dtype(data["pointer"]), 0, _memory(data), assumed_align=data["align"])

    def object(self, data: Mapping[str, Any]) -> Any:
        type_ = resolve(data["object"])
        if "items" in data:
            return type_(*self.values(data["items"]))
        instance = object.__new__(type_)
        for name, item in data["state"].items():
            object.__setattr__(instance, name, self.value(item))
        return instance

    def function(self, data: Mapping[str, Any]) -> Any:
        return lambdas.rebuilt(data["lambda"], vars(_module(data["module"])))

    def closure(self, data: Mapping[str, Any]) -> Any:
        module = data["closure"].partition(":")[0]
        free = {name: self.value(item) for name, item in data["free"].items()}
        names = vars(_module(module))
        function = closures.rebuilt(resolve(data["closure"]), data["place"], free, names, data.get("jit", False))
        for name, item in data.get("state", {}).items():
            setattr(function, name, self.value(item))
        return function

    def stream(self, data: Mapping[str, Any]) -> Any:
        from cuda.bindings.driver import CUstream

        return CUstream(0)

    def event(self, data: Mapping[str, Any]) -> Any:
        from cuda.bindings.driver import CUevent

        return CUevent(0)

    def _extent(self, item: int | str) -> Any:
        if isinstance(item, int):
            return item
        if item not in self.symbols:
            raise BuildError(f"fakes: extent {item!r} is no symbol; symbols are {', '.join(self.symbols)}")
        return self.symbols[item]


_MAKERS: dict[str, Callable[[CallReader, Mapping[str, Any]], Any]] = {
    "tensor": CallReader.tensor,
    "pointer": CallReader.pointer,
    "stream": CallReader.stream,
    "event": CallReader.event,
    "object": CallReader.object,
    "number": lambda reader, data: _dtype(data["number"])(reader.value(data["value"])),
    "float": lambda reader, data: float(data["float"]),
    "symbol": lambda reader, data: reader.symbols[data["symbol"]],
    "none": lambda reader, data: None,
    "name": lambda reader, data: resolve(data["name"]),
    "lambda": CallReader.function,
    "closure": CallReader.closure,
    "tuple": lambda reader, data: tuple(reader.values(data["tuple"])),
    "list": lambda reader, data: reader.values(data["list"]),
    "dict": lambda reader, data: {reader.value(key): reader.value(item) for key, item in data["dict"]},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `cute.compile` as data: `source` and `params` of a spec. modules: every module that it names."""

    source: str
    params: dict[str, Any]
    modules: frozenset[str]


def write(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: str = "") -> Call:
    """`cute.compile(function, *args, **kwargs)` as data. Raises BuildError, in words, for what cannot be."""
    writer = CallWriter()
    params: dict[str, Any] = {}
    if inspect.ismethod(function):
        params["method"] = function.__name__
        function = function.__self__
    if inspect.isfunction(function):
        source = writer._importable(function, "the function")
    else:
        held = writer.object(function, "self")
        source = held["object"]
        params |= {key: held[key] for key in ("state", "items") if key in held}
    names = list(_parameters(function))
    writer.taken = frozenset(names)
    params[FAKES] = [
        writer.value(item, names[index] if index < len(names) else f"argument {index}")
        for index, item in enumerate(args)
    ]
    if kwargs:
        params["keywords"] = {name: writer.value(item, name) for name, item in kwargs.items()}
    if writer.symbols:
        params["symbols"] = {
            name: {key: value for key, value in facts.items() if (key, value) not in (("divisor", 1), ("bits", 32))}
            for name, facts in writer.symbols.items()
        }
    if options:
        params["options"] = options
    return Call(source, params, frozenset(writer.modules))


def read(source: str, params: Mapping[str, Any]) -> Traced:
    """The call that `write` wrote. Imports the module of `source`, and the DSL. Raises BuildError for what is none."""
    try:
        return _read(source, params)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BuildError(
            f"source {source}: params.{FAKES} and what belongs to them cannot be read ({type(error).__name__}:"
            f" {error}); capture the call again"
        ) from error


def _read(source: str, params: Mapping[str, Any]) -> Traced:
    reader = CallReader.of(params.get("symbols", {}))
    function = resolve(source)
    if "state" in params or "items" in params:
        function = reader.object({"object": source, **params})
    if "method" in params:
        function = getattr(function, params["method"])
    keywords = {name: reader.value(item) for name, item in params.get("keywords", {}).items()}
    return function, tuple(reader.values(params[FAKES])), keywords


def importable(value: Any, where: str) -> str:
    """`module:name` of a class or function that another process can import. Raises BuildError with what to do."""
    module, name = value.__module__, value.__qualname__
    text = f"{where} is {module}.{name}"
    if module == "__main__":
        raise BuildError(
            f"{text}, of the script that runs: another process cannot import it; move it to a module of its own and"
            " import it from there"
        )
    try:
        imported = resolve(f"{module}:{name}")
    except BuildError:
        raise BuildError(
            f"{text}, which its module has not under that name, as nothing that is made inside a function: another"
            " process cannot import it; write a function of a module that makes it from plain values and returns"
            " (callable, fakes), and name that as the source"
        ) from None
    if imported is not value and inspect.unwrap(imported) is not inspect.unwrap(value):
        raise BuildError(
            f"{text}, but that name gives something else there; give it a name of its own in its module, and use that"
        )
    return f"{module}:{name}"


def resolve(name: str) -> Any:
    """The object called `module:name`. Raises BuildError where there is none."""
    module, _, path = name.partition(":")
    value = _module(module)
    try:
        for part in path.split("."):
            value = getattr(value, part)
    except AttributeError as error:
        raise BuildError(f"{name} cannot be imported ({error}); put its module on Python's path") from error
    return value


def _module(name: str) -> Any:
    try:
        return sys.modules.get(name) or import_module(name)
    except (ImportError, AttributeError) as error:
        raise BuildError(f"{name} cannot be imported ({error}); put its module on Python's path") from error


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _is_its_attributes(value: Any) -> bool:
    """Whether a new instance with the same `__dict__` is the same. A class in C, or slots, keep more."""
    kind: Any = type(value)
    return kind.__basicsize__ <= _PLAIN and kind.__new__ is object.__new__ and hasattr(value, "__dict__")


def _fields(value: Any) -> list[tuple[str, Any]]:
    return list(zip(value._fields, value, strict=True))


def _extent(match: re.Match[str]) -> Any:
    """An extent in the text of a layout: a number, or (divisor, bits) of a dynamic one."""
    if not match[0].startswith("?"):
        return int(match[0])
    facts = match[1] or ""
    divisor = _DIVISOR.search(facts)
    return int(divisor[1]) if divisor else 1, 64 if "i64" in facts else 32


def _dtype(name: str) -> Any:
    import cutlass

    type_ = getattr(cutlass, name, None)
    if not isinstance(type_, type):
        raise BuildError(f"fakes: {name!r} is no type of the CuTe DSL")
    return type_


def _memory(data: Mapping[str, Any]) -> Any:
    from cutlass import cute

    return getattr(cute.AddressSpace, data.get("memory", _GENERIC))


def _owner(value: Any) -> Any:
    """What a function in C belongs to: its module, or the object of a bound method."""
    return value.__self__ if inspect.isbuiltin(value) else None


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__} {text if len(text) <= 60 else text[:57] + '...'}"

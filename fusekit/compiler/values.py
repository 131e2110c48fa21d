"""The values of modules that a captured call reaches, as the program has left them: compared with a fresh import.

A compile process imports modules anew. So a spec holds what the code of the call reads of the modules of kernels:
numbers, texts, collections of them, attributes of classes, functions under other names. A name that its module's source
binds once, to a literal that is its value, is left out: the source is in the key.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import enum
import hashlib
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fusekit.compiler.closures import code_of
from fusekit.compiler.foreign import KEYED_BY_VERSION, Foreign
from fusekit.errors import BuildError

VALUES = "values"
"""The param of a captured spec that holds them."""

_LONG = 200  # characters of a value that a spec shows
_MISSING = object()


def reached(called: tuple[Any, ...], foreign: Foreign, *, literals: bool = False) -> dict[str, Any]:
    """`module:name` -> its value as JSON, of what the callables and objects of `called` lead to. literals: also of
    names that their source binds to that value.
    """
    walk = _Walk(foreign, literals)
    names = -1
    while names != len(walk.names):  # an attribute counts where any code reads one of its name
        names = len(walk.names)
        walk.begin()
        for value in called:
            walk.inside(value)
    return dict(sorted(walk.forms.items()))


def check(called: tuple[Any, ...], there: Mapping[str, Any], foreign: Foreign) -> None:
    """Raises BuildError where a value of a fresh import is not the one that was captured."""
    here, shown = reached(called, foreign), reached(called, foreign, literals=True)
    for label in sorted({*there, *here}):
        fresh = shown.get(label, _MISSING) if label in there else here[label]
        given, imported = (_text(value) for value in (there.get(label, _MISSING), fresh))
        if given != imported:
            raise BuildError(
                f"{label.replace(':', '.')} is {given} in the program that compiles, and {imported} after a fresh"
                " import, as in a compile process; give the function the value as an argument, or compile with"
                " cute.compile"
            )


class _Walk:
    def __init__(self, foreign: Foreign, literals: bool) -> None:
        self._foreign, self._literals = foreign, literals
        self.forms: dict[str, Any] = {}
        self.names: set[str] = set()
        self._seen: set[int] = set()
        self._looked: set[str] = set()
        self._counted: dict[str, bool] = {}

    def begin(self) -> None:
        """Forgets where it has been, but for the names that it met."""
        self.forms.clear()
        self._seen.clear()
        self._looked.clear()

    def inside(self, value: Any) -> None:
        """What the code of a callable, or of an object's class, reads."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if inspect.ismethod(value):
            value = value.__self__
        if isinstance(value, type):
            self._class(value)
        elif inspect.isfunction(inspect.unwrap(value) if callable(value) else value):
            self._function(inspect.unwrap(value))
        elif isinstance(value, tuple | list):
            for item in value:
                self.inside(item)
        else:
            self._class(type(value))

    def _function(self, function: Any) -> None:
        code = code_of(function)
        if code is None or not self._counts(function.__module__):
            return
        for inner in _codes(code):
            self.names |= {*inner.co_names}
            for name in inner.co_names:
                if name in function.__globals__ and not hasattr(builtins, name):
                    self._value(function.__module__, name, function.__globals__[name])
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._nested(value)

    def _class(self, kind: Any) -> None:
        for base in kind.__mro__:
            if not self._counts(base.__module__):
                continue
            for name, value in list(vars(base).items()):
                member = getattr(value, "__func__", getattr(value, "fget", value))
                if callable(member) and inspect.isfunction(inspect.unwrap(member)):
                    self.inside(member)
                elif name in self.names and not name.startswith("__"):
                    self._value(base.__module__, f"{base.__qualname__}.{name}", value)

    def _value(self, module: str, name: str, value: Any) -> None:
        label = f"{module}:{name}"
        if label in self._looked:
            return
        self._looked.add(label)
        if isinstance(value, ModuleType):
            if self._counts(value.__name__):
                for attribute in sorted(self.names & vars(value).keys()):
                    self._value(value.__name__, attribute, vars(value)[attribute])
        else:
            self._nested(value)
        form = _form(value)
        if form is _MISSING or form == {"name": label} or (not self._literals and _is_as_bound(module, name, value)):
            return
        self.forms[label] = form

    def _nested(self, value: Any) -> None:
        for item in value if isinstance(value, tuple | list) else (value,):
            if callable(item) or self._counts(type(item).__module__):
                self.inside(item)

    def _counts(self, module: str | None) -> bool:
        """Whether a module is one of kernels: of no distribution, or of one that requires the DSL, or using it."""
        if module not in self._counted:
            self._counted[module or ""] = self._is_of_kernels(module or "")
        return self._counted[module or ""]

    def _is_of_kernels(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top in KEYED_BY_VERSION or top in sys.stdlib_module_names or module not in sys.modules:
            return False
        owners = self._foreign.owned(top)
        values = list(vars(sys.modules[module]).values())
        uses = any(isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "cutlass" for value in values)
        return uses or not owners or any(self._foreign.on_dsl(owner) for owner in owners)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _form(value: Any, depth: int = 4) -> Any:
    """A value as JSON that is the same in every process; `_MISSING` of what has no such form."""
    if value is None:
        return {"none": True}
    if isinstance(value, str) and len(value) > _LONG:
        return {"text": hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()}
    if isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, enum.Enum):
        return {"name": f"{type(value).__module__}:{type(value).__qualname__}.{value.name}"}
    if isinstance(value, ModuleType):
        return {"name": value.__name__}
    if isinstance(value, type) or inspect.isroutine(value):
        function = inspect.unwrap(value)
        return {"name": f"{function.__module__}:{function.__qualname__}"}
    if depth and isinstance(value, tuple | list | dict | set | frozenset | bytes):
        return _collection(value, depth)
    return _MISSING


def _collection(value: Any, depth: int) -> Any:
    if isinstance(value, bytes):
        parts: Any = value.hex()
    elif isinstance(value, dict):
        parts = [[_form(key, depth - 1), _form(item, depth - 1)] for key, item in value.items()]
        parts = [pair for pair in parts if _MISSING not in pair]
    else:
        parts = [form for element in value if (form := _form(element, depth - 1)) is not _MISSING]
        parts = parts if isinstance(value, tuple | list) else sorted(parts, key=json.dumps)
    kind = next(kind.__name__ for kind in type(value).__mro__ if kind in (tuple, list, dict, set, frozenset, bytes))
    text = json.dumps(parts, sort_keys=True)
    return {kind: parts if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest()}


def _is_as_bound(module: str, name: str, value: Any) -> bool:
    """Whether the module's source binds a name once, to what is its value: a literal, or what an import gives."""
    literals, imports = _bindings(module, getattr(sys.modules.get(module), "__file__", None) or "")
    if name in literals:
        return type(literals[name]) is type(value) and repr(literals[name]) == repr(value)
    if name not in imports:
        return False
    base, original = imports[name]
    if isinstance(value, ModuleType):
        return value.__name__ in (base, f"{base}.{original}", base.partition(".")[0] if not original else base)
    where = str(getattr(inspect.unwrap(value) if callable(value) else value, "__module__", None))
    top = base.partition(".")[0]
    if top in KEYED_BY_VERSION or top in sys.stdlib_module_names:
        return where.partition(".")[0] in (
            KEYED_BY_VERSION if top in KEYED_BY_VERSION else {*sys.stdlib_module_names, "None"}
        )
    return f"{where}.".startswith(f"{base}.") and getattr(value, "__name__", "") == original


@cache
def _bindings(module: str, file: str) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """(name -> literal, name -> (module, name there or "")) of what a file binds once; of classes as `Class.name`."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}, {}
    count = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            count[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.Import | ast.ImportFrom):
            count.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            count[node.name] += 1
    literals: dict[str, Any] = {}
    imports: dict[str, tuple[str, str]] = {}
    package = module.split(".") if Path(file).name == "__init__.py" else module.split(".")[:-1]

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
                with contextlib.suppress(ValueError, TypeError):
                    if count[target.id] == 1:
                        literals[f"{prefix}{target.id}"] = ast.literal_eval(node.value)
            elif isinstance(node, ast.Import):
                imports.update({alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in node.names})
            elif isinstance(node, ast.ImportFrom):
                around = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*around, *([node.module] if node.module else [])])
                imports.update({alias.asname or alias.name: (base, alias.name) for alias in node.names})
            elif isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")

    look(tree.body, "")
    return literals, {name: bound for name, bound in imports.items() if count[name] == 1}


def _text(form: Any) -> str:
    return "what its source says" if form is _MISSING else json.dumps(form, sort_keys=True)

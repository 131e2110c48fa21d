"""What code reads: the values of the globals and of the attributes of modules that it names."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fusekit.cute.bytecode import (
    COMPUTES,
    RECORDED,
    attribute_names,
    check_names,
    computes_names,
    global_names,
    imports,
)  # fmt: skip
from fusekit.cute.digest import DIGITS, UnnamedError
from fusekit.cute.files import ABSENT
from fusekit.cute.kinds import is_library_class
from fusekit.cute.libraries import is_library, is_library_module
from fusekit.cute.memos import remembered
from fusekit.cute.state import STATES
from fusekit.cute.values import NAMED, NOTHING, SIMPLE, Walk, digest

_PLAIN = (bool, int, float, str, bytes)

Root = tuple[str, str]
"""The name of a module, and of a global in it."""


class Reads:
    """What codes read: `values` of globals and attributes of modules, `modules`, `libraries`; `memos`: the memoised
    functions in each value, with what they remember. objects: what each value holds, as in `Walk.places`.

    add: takes codes. settle: follows what they read until nothing is new. Without `strict` a value without a name is
    None, and the code of all functions that are reached counts as run.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.attributes = {"__getattr__"}  # of a module, which is called for names that it lacks
        self.values: dict[Root, str | None] = {}
        self.memos: dict[Root, list[tuple[Any, dict[str, str]]]] = {}
        self.objects: dict[Root, dict[int, int]] = {}
        self.modules: dict[str, ModuleType] = {}
        self.libraries: dict[str, ModuleType] = {}
        self.codes: set[CodeType] = set()
        self.computes = ""
        self._nodes = 0
        self._seen: set[tuple[int, int]] = set()
        self._keep: list[Any] = []
        self._wanted: dict[Root, None] = {}
        self._elsewhere: list[CodeType] = []

    def add(self, code: CodeType, space: dict[str, Any]) -> None:
        mark = (id(code), id(space))
        if mark in self._seen:
            return
        self._seen.add(mark)
        self._keep.append((code, space))
        names = attribute_names(code)
        if self.strict:
            check_names(code, names)
        if not self.computes and computes_names(code):
            self.computes = code.co_qualname
        self.attributes |= names
        name = str(space.get("__name__"))
        module = sys.modules.get(name)
        if module is None or vars(module) is not space:
            if global_names(code) & space.keys():
                self._elsewhere.append(code)
            return
        self._reach(module)
        for each in global_names(code):
            self._wanted[name, each] = None
        for imported in imports(code, space):
            self._reach(sys.modules[imported])

    def walked(self, walk: Walk) -> None:
        """Add what a walk has met."""
        self.codes |= walk.codes
        self._by_name(walk.by_name, "an argument")
        for module in walk.modules.values():
            self._reach(module)
        if not self.strict:
            for code, space in walk.functions:
                self.add(code, space)

    def _by_name(self, names: set[str], place: str) -> None:
        if names & (COMPUTES | RECORDED):
            self.computes = self.computes or place
        if self.strict and (others := names - COMPUTES - RECORDED):
            raise UnnamedError(f"{min(others)} is at hand in {place}")

    def _reach(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self.modules or name in self.libraries:
            return
        if sys.modules.get(name) is not module:
            if self.strict:
                raise UnnamedError(f"the module {name} is not in sys.modules")
            return
        if is_library_module(name):
            self.libraries[name] = module
        else:
            self.modules[name] = module

    def settle(self, most: float = float("inf")) -> None:
        """Read values, until nothing is new, or they have more than `most` objects."""
        while self._nodes < most:
            before = len(self.attributes), len(self.modules), len(self.libraries), self.computes
            for name, module in list(self.modules.items()):
                if self.strict and type(module) is not ModuleType:
                    raise UnnamedError(f"{name} is a module of another kind")
                space = vars(module)
                for each in list(space) if self.computes else self.attributes & space.keys():
                    if not (self.computes and each.startswith("__") and each not in self.attributes):
                        self._wanted[name, each] = None
            for module in list(self.libraries.values()):
                for each in self.attributes & vars(module).keys():
                    if isinstance(vars(module)[each], ModuleType):
                        self._reach(vars(module)[each])
            wanted, self._wanted = [root for root in self._wanted if root not in self.values], {}
            for root in wanted:
                if self._nodes < most:
                    self._value(root)
            after = len(self.attributes), len(self.modules), len(self.libraries), self.computes
            if not wanted and after == before:
                return

    def _value(self, root: Root) -> None:
        walk = Walk()
        try:
            self.values[root] = self._digest(root, walk)
        except (UnnamedError, RecursionError) as error:
            if self.strict:
                why = f", which counts whole, as {self.computes} computes names" if self.computes else ""
                raise UnnamedError(f"{root[0]}:{root[1]}{why}: {error}") from None
            self.values[root] = None
        self._nodes += walk.nodes
        self.objects[root] = walk.places
        self._keep.append(walk)
        # By its own name it is seen in the code, or recorded, unless a module has kept it.
        module, name = root
        if name not in RECORDED or name not in vars(sys.modules[module]):
            walk.by_name.discard(name)
        self._by_name(walk.by_name, f"{module}:{name}")
        walk.by_name.clear()
        self.walked(walk)

    def _digest(self, root: Root, walk: Walk) -> str:
        value = read(root)
        if value is NOTHING:
            return ABSENT
        walk(value)
        if walk.memos:
            self.memos[root] = [(each, remembered(each)) for each in walk.memos]
        return walk.hexdigest()

    def of_libraries(self) -> dict[str, str]:
        """The digests of the modules of libraries."""
        return {
            name: libraries_digest(module, self.attributes, whole=bool(self.computes))
            for name, module in self.libraries.items()
        }

    def check(self, ran: Iterable[CodeType]) -> None:
        """Raises UnnamedError unless each code that ran is in a value that was read."""
        for code in ran:
            if code.co_name == "<module>":
                raise UnnamedError(f"{code.co_filename} is imported while it traces")
            if code not in self.codes:
                raise UnnamedError(
                    f"{code.co_qualname} in {code.co_filename} is called from somewhere that no value shows"
                )


def read(root: Root) -> Any:
    """The value of a global or builtin; `NOTHING` if there is none."""
    space = vars(sys.modules[root[0]])
    return space[root[1]] if root[1] in space else vars(builtins).get(root[1], NOTHING)


def cannot_change(root: Root) -> bool:
    """Whether the value of a global stays, if no code assigns to it."""
    value = read(root)
    if isinstance(value, type):
        return is_library_module(value.__module__)
    return value is NOTHING or isinstance(value, (*SIMPLE, ModuleType, *NAMED))


def libraries_digest(module: ModuleType, attributes: set[str], *, whole: bool) -> str:
    """What of a library's module is not its version's: plain values, and functions that others put there."""
    space = vars(module)
    walk = Walk()
    if module.__name__ in STATES:
        walk.put(STATES[module.__name__]())
    for name in sorted(set(space) if whole else attributes & space.keys()):
        value = space[name]
        if name.startswith("__") or value is sys.modules:  # code that names this one is not served
            continue
        if type(value) in _PLAIN:
            walk.put(name, value)
        elif isinstance(value, tuple) and type(value) is not tuple and is_library_module(type(value).__module__):
            walk.put(name, repr(value))  # as `sys.flags`
        elif type(value) is tuple or (name in attributes and type(value) in (list, dict, set)):
            with contextlib.suppress(UnnamedError):
                walk.put(name, digest(value))
        elif isinstance(value, FunctionType) and not is_library(value.__code__.co_filename):
            walk.put(name)
            walk(value)
        elif name in attributes:
            walk.put(name, type(value).__qualname__, str(getattr(value, "__qualname__", "")))
            kind = type(value)
            if isinstance(value, (FunctionType, type)) or (
                kind.__module__ in sys.modules and not is_library_class(kind)
            ):
                with contextlib.suppress(UnnamedError):
                    walk(value)
    return walk.hexdigest()


def names_digest(module: ModuleType, attributes: set[str], computes: bool) -> str:
    names = {*(attributes & vars(module).keys()), type(module).__qualname__}
    if computes:
        names |= {name for name in vars(module) if not name.startswith("__")}
    return hashlib.sha256("\0".join(sorted(names)).encode()).hexdigest()[:DIGITS]


def shared(values: Sequence[Mapping[int, int]]) -> str:
    """A digest of which objects are in more than one of `values`, each as in `Walk.places`: code may compare them."""
    once, twice = set[int](), set[int]()
    for places in values:
        twice |= places.keys() & once
        once |= places.keys()
    found = {each: list[tuple[int, int]]() for each in twice}
    for at, places in enumerate(values):
        for each in places.keys() & twice:
            found[each].append((at, places[each]))
    return hashlib.sha256(repr(sorted(found.values())).encode()).hexdigest()[:DIGITS]

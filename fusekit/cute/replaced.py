"""What other packages have put into the CuTe DSL, which takes part in what it compiles."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, ModuleType
from typing import Any

from fusekit.cute.digest import UnnamedError
from fusekit.cute.kinds import is_library_class
from fusekit.cute.libraries import is_library
from fusekit.cute.stamps import stamp
from fusekit.cute.values import digest

_ROOT = "cutlass"
_NO_CALLABLES = frozenset({bool, int, float, str, tuple, list, dict, type(None), ModuleType, GetSetDescriptorType})
_CONSTANTS = (bool, int, float, str, tuple)
_TABLES = (list, dict, set)


# The half of the DSL that runs after the trace. What replaces a part of the other half shows in the IR.
_BACK = (
    "cutlass.base_dsl.compile_backend", "cutlass.base_dsl.compiler", "cutlass.base_dsl.dsl", "cutlass.base_dsl.export",
    "cutlass.base_dsl.env_manager", "cutlass.base_dsl.jit_executor", "cutlass.base_dsl.tvm_ffi_builder",
    "cutlass.cutlass_dsl", "cutlass.cute.export",
)  # fmt: skip
# Whose parts the DSL imports, or change nothing that is compiled.
_NEUTRAL = frozenset({
    "cutlass", "fusekit", "typing_extensions", "nanobind", "numpy", "torch", "cuda", "tvm_ffi",
    *sys.stdlib_module_names,
})  # fmt: skip


class _Module:
    """A module of the DSL with its classes, as it was when it was read."""

    def __init__(self, name: str, module: Any, root: str) -> None:
        self.module = module
        spaces: list[Mapping[str, Any]] = [vars(module)]
        self.stamps = [stamp(vars(module))]  # before it is read
        self.parts = _parts(name, vars(module), root)
        self.constants: dict[str, Any] = {}
        self._tables: list[Any] = []
        written = not name.startswith(f"{_ROOT}._mlir.")  # the others are generated, and many
        for label, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                spaces.append(vars(value))
                self.stamps.append(stamp(spaces[-1]))
                self.parts |= _parts(f"{name}.{value.__qualname__}", spaces[-1], root)
                if written:
                    self._note(f"{name}.{value.__qualname__}", spaces[-1])
            elif label.isupper() and type(value) in _CONSTANTS and written:
                self.constants[f"{name}.{label}"] = value
        values = [each for space in spaces for each in list(space.values())] if written else []
        self._functions = [each for each in map(_function, values) if type(each) is FunctionType]
        self._codes = [each.__code__ for each in self._functions]
        self._spaces = spaces  # whose addresses the stamps have
        self._marks = [stamp.value for stamp in self.stamps]
        self._held = [each.copy() for each in self._tables]

    def _note(self, place: str, space: Mapping[str, Any]) -> None:
        for label, value in list(space.items()):
            if label.startswith("_"):
                continue
            if type(value) in _TABLES:
                self._tables.append(value)
                if type(value) is dict:  # the DSL adds classes of its own for types that it meets
                    value = {kind: each for kind, each in value.items() if not _is_adapter(kind, each)}
                with contextlib.suppress(UnnamedError):
                    self.constants[f"{place}.{label}"] = digest(value)
            elif type(value) in _CONSTANTS:
                self.constants[f"{place}.{label}"] = value

    def changed(self) -> bool:
        """Whether it is other than when it was read."""
        return (
            self._marks != [stamp.value for stamp in self.stamps]
            or self._codes != [each.__code__ for each in self._functions]
            or self._held != self._tables
        )


class Replaced:
    """What other packages have put into the DSL. A module is read again when it, or one of its classes, has changed."""

    def __init__(self) -> None:
        self._modules: dict[str, _Module] = {}
        self._constants = ""
        self._stamp: Any = None  # of sys.modules
        self._seen: tuple[Any, list[tuple[str, ModuleType]]] = None, []

    def functions(self, dsl: Any, *, again: bool = True) -> dict[str, Any]:
        """Place -> function that is not the DSL's, in the half that runs after the trace. Without `again` its modules
        are as they were in the last call. Raises UnnamedError for a callable that is no function.
        """
        return self._parts(dsl, _BACK, (FunctionType, type), again=again)

    def anywhere(self, dsl: Any) -> dict[str, Any]:
        """Place -> callable that is not the DSL's, in all of it, and under "constants" a digest of its constants, which
        other packages may replace. Raises UnnamedError for another callable than a function or a partial one.
        """
        parts = self._parts(dsl, (f"{_ROOT}.",), (FunctionType, type, functools.partial))
        if not self._constants:
            constants = dict[str, Any]()
            for _, module in sorted(self._modules.items()):
                constants |= module.constants
            self._constants = digest(constants)
        return {**parts, "constants": self._constants}

    def _parts(
        self, dsl: Any, begins: tuple[str, ...], kinds: tuple[type, ...], *, again: bool = True
    ) -> dict[str, Any]:
        import cutlass

        root = f"{Path(cutlass.__file__).parent}{os.sep}"
        parts = dict[str, Any]()
        for place, owner in (("dsl", dsl), ("compiler", dsl.compiler_provider)):
            parts |= _parts(
                place, {name: each for name, each in vars(owner).items() if hasattr(type(owner), name)}, root
            )
        for name, module in self._of_the_dsl():
            if not f"{name}.".startswith(begins):
                continue
            known = self._modules.get(name)
            if known is None or known.module is not module or (again and known.changed()):
                known = self._modules[name] = _Module(name, module, root)
                self._constants = ""
            parts |= known.parts
        for part in parts.values():
            if not isinstance(part, kinds):
                name = type(part).__qualname__
                raise UnnamedError(f"a part of the DSL is replaced by a {name}, which no key can name")
        return parts

    def _of_the_dsl(self) -> list[tuple[str, ModuleType]]:
        """The modules of the DSL that are imported."""
        if self._stamp is None:
            self._stamp = stamp(sys.modules)
        mark = id(sys.modules), self._stamp.value
        if self._seen[0] != mark:
            begin = f"{_ROOT}."
            found = [(name, each) for name, each in list(sys.modules.items()) if f"{name}.".startswith(begin)]
            self._seen = mark, [(name, each) for name, each in found if each is not None]
        return self._seen[1]


def _parts(place: str, space: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Place -> callable that is not the DSL's, of a namespace and of what that wraps."""
    return {
        f"{place}.{label}{'.__wrapped__' * depth}": function
        for label, value in list(space.items())
        if not _is_original(value, root)
        for depth, function in enumerate(_foreign(value, root))
    }


def _is_adapter(kind: Any, value: Any) -> bool:
    return isinstance(kind, type) and isinstance(value, type) and is_library_class(value)


def _function(value: Any) -> Any:
    kind = type(value)
    return value.fget if kind is property else value.__func__ if kind in (staticmethod, classmethod) else value


def _is_original(value: Any, root: str) -> bool:
    """Whether `value` is plainly of the DSL: nearly all are."""
    kind = type(value)
    if kind is property:
        value = value.fget
    elif kind is staticmethod or kind is classmethod:
        value = value.__func__
    elif isinstance(value, type):
        return not _is_foreign(value.__module__)
    elif kind in _NO_CALLABLES:
        return True
    return type(value) is FunctionType and not value.__dict__ and value.__code__.co_filename.startswith(root)


def _foreign(value: Any, root: str) -> Iterator[Any]:
    """What of `value`, and of what it wraps, others than the DSL have written."""
    while value is not None:
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            home = str(value.__globals__.get("__name__", ""))
            path = value.__code__.co_filename
            if not path.startswith(root) and (_is_foreign(home) or not (path.startswith("<") or is_library(path))):
                yield value
        else:
            home = str((value if isinstance(value, type) else type(value)).__module__)
            if isinstance(value, functools.partial) or home.startswith("unittest.mock") or _is_foreign(home):
                yield value
        value = None if isinstance(value, type) else getattr(value, "__wrapped__", None)


@functools.cache
def _is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return not (top in _NEUTRAL or top.startswith("namedtuple_"))

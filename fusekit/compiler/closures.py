"""A function that is made inside a function, as data: where its code is, and the values of its free variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from fusekit.compiler import dsl

_LOCALS = "<locals>"


def inner_of(function: Any) -> FunctionType | None:
    """The function itself, without the DSL's `jit` around it; None where data cannot express the rest: another
    decorator, default values, or globals that are not its module's.
    """
    inner: Any = inspect.unwrap(function)
    plain = inspect.isfunction(inner) and _LOCALS in inner.__qualname__
    if not plain or inner.__defaults__ or inner.__kwdefaults__ or (inner is not function and not is_jit(function)):
        return None
    return inner  # type: ignore[no-any-return]


def is_jit(function: Any) -> bool:
    """Whether that is what `cute.jit`, without options, makes of a function."""
    from cutlass import cute

    return dsl.jit_marks(function) == dsl.jit_marks(cute.jit(lambda: None)) and hasattr(function, "__wrapped__")


def attributes_of(function: Any) -> dict[str, Any]:
    """What a program has set on a function; the DSL's own begin with one underscore."""
    internal = {"__wrapped__", "set_name_prefix"}
    return {
        name: value
        for name, value in vars(function).items()
        if name not in internal and (name.startswith("__") or not name.startswith("_"))
    }


def free_of(inner: FunctionType) -> dict[str, Any] | None:
    """Its free variables by name; None where one has no value yet."""
    try:
        return {
            name: cell.cell_contents
            for name, cell in zip(code_of(inner).co_freevars, inner.__closure__ or (), strict=True)
        }
    except ValueError:
        return None


def place_of(inner: FunctionType, outer: Any) -> str | None:
    """Where its code is in the code of `outer`, the function of the module around it: names, and #2 for the second of
    a name. None where it is not there, as in a module that was changed.
    """
    names = inner.__qualname__.split(f".{_LOCALS}", 1)[1].replace(f".{_LOCALS}", "").strip(".").split(".")
    return next((path for path, code in _below(code_of(outer), names) if code is code_of(inner)), None)


def rebuilt(outer: Any, place: str, free: Mapping[str, Any], names: dict[str, Any], jit: bool) -> Callable[..., Any]:
    """The function at `place` in `outer`. names: of its module. Raises ValueError where there is none with such free
    variables.
    """
    parts = [part.partition("#")[0] for part in place.split(".")]
    code = dict(_below(code_of(outer), parts)).get(place)
    if code is None or set(code.co_freevars) != free.keys():
        raise ValueError(f"{place} with {', '.join(free) or 'no free variables'} is not in {outer.__qualname__}")
    function: Any = FunctionType(code, names, None, None, tuple(CellType(free[name]) for name in code.co_freevars))
    function.__module__, function.__qualname__ = outer.__module__, f"{outer.__qualname__}.{_LOCALS}.{'.'.join(parts)}"
    if not jit:
        return function  # type: ignore[no-any-return]
    from cutlass import cute

    return cute.jit(function)  # type: ignore[no-any-return]


def code_of(function: Any) -> Any:
    """The code as it was compiled, which the DSL replaces when it traces a function; None of what has none."""
    return dsl.original_code(inspect.unwrap(getattr(function, "__func__", function)))


def _below(code: Any, names: list[str]) -> list[tuple[str, CodeType]]:
    """(place, code) of everything below `code` that these names lead to."""
    if code is None or not names:
        return []
    alike = [
        inner_code
        for inner_code in code.co_consts
        if isinstance(inner_code, CodeType) and inner_code.co_name == names[0]
    ]
    codes = []
    for number, inner_code in enumerate(alike, 1):
        place = names[0] if number == 1 else f"{names[0]}#{number}"
        rest = _below(inner_code, names[1:])
        codes += [(place, inner_code)] if len(names) == 1 else [(f"{place}.{path}", inner) for path, inner in rest]
    return codes

"""Calls of a foreign kernel's source: what it returns is what `cute.compile` takes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fusekit.compiler import fakes
from fusekit.compiler.leaves import host_callable
from fusekit.errors import BuildError, FusekitError
from fusekit.spec import ExternSpec


def call_source(source: str, params: Mapping[str, Any], arch: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the function `source` ("module:function") returns for `params`: host function, arguments, keywords.

    With fakes among the params the source is the host function itself (see `fusekit.compiler.fakes`).
    """
    if fakes.FAKES in params:
        return fakes.read(source, params)
    module_name, _, name = source.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise BuildError(
            f"source {source}: there is no module {error.name!r}; install what has it, or fix the source"
        ) from None
    except BaseException as error:
        raise BuildError(f"source {source}: importing {module_name} failed: {_described(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BuildError(f"source {source}: {module_name} has no function {name}; fix the source")
    takes = inspect.signature(function).parameters
    given = {"arch": arch, **params} if "arch" in takes else dict(params)
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        known = ", ".join(takes) or "none"
        raise BuildError(f"source {source}: {error}; its arguments are {known}; fix params") from None
    try:
        call = function(**given)
    except FusekitError:
        raise
    except BaseException as error:
        raise BuildError(f"source {source} raised {_described(error)}") from error
    if not _is_call(call):
        raise BuildError(
            f"source {source} returned {type(call).__name__}; it must return (function, arguments) or (function,"
            " arguments, keywords), as cute.compile takes them"
        )
    return call[0], tuple(call[1]), dict(call[2]) if len(call) == 3 else {}


def call_lifted(spec: ExternSpec, lifted: Mapping[str, int]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The source's answer with `lifted` for its own arguments of those names, or for those of the host function."""
    if not lifted:
        return call_source(spec.source, spec.params, spec.arch)
    module_name, _, name = spec.source.partition(":")
    call_source(spec.source, spec.params, spec.arch)  # whose errors are told first
    takes = inspect.signature(getattr(sys.modules[module_name], name)).parameters
    taken = {key: value for key, value in lifted.items() if key in takes}
    function, arguments, keywords = call_source(spec.source, {**spec.params, **taken}, spec.arch)
    rest = {key: value for key, value in lifted.items() if key not in taken}
    if not rest:
        return function, arguments, keywords
    bound = inspect.signature(host_callable(function)).bind(*arguments, **keywords)
    for key in rest:
        if key not in bound.arguments or isinstance(bound.arguments[key], bool | type(None)):
            raise BuildError(
                f"lift.{key}: neither {spec.source} nor its host function takes an integer of this name; the host"
                f" function is given {', '.join(bound.arguments)}"
            )
    bound.arguments.update(rest)
    return function, bound.args, bound.kwargs


def _is_call(call: Any) -> bool:
    """Whether it is (function, arguments), or (function, arguments, keywords)."""
    if not isinstance(call, Sequence) or len(call) not in (2, 3) or not callable(call[0]):
        return False
    return (
        isinstance(call[1], Sequence)
        and not isinstance(call[1], str)
        and all(isinstance(item, Mapping) for item in call[2:])
    )


def _described(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""Listening to the DSL: the one place that every call of `cute.compile` goes through, however it was imported, and the
one that every call of a host function goes through.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fusekit.compiler import dsl
from fusekit.errors import BuildError

Traced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The host function, its positional fake arguments, its keyword ones."""

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[[], None] | None]
"""Is told of a call before it is compiled (an object of the DSL that has the options, arguments, keywords); what it
returns is called after.
"""


class _Caught(BaseException):
    """Ends a call of `cute.compile` that is not to compile."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced


class _Ear:
    """Replaces the method `name` of the class `owner` while there are listeners."""

    guard = threading.Lock()

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.original = owner, name, getattr(owner, name)
        self.listeners: list[Listener] = []

    @classmethod
    def add(cls, owner: Any, name: str, listener: Listener) -> _Ear:
        with cls.guard:
            existing = getattr(getattr(owner, name), "fusekit_ear", None)
            ear = existing if isinstance(existing, cls) else cls(owner, name)
            ear.listeners.append(listener)
            if ear is not existing:
                ear._install()
            return ear

    def remove(self, listener: Listener) -> None:
        with self.guard:
            self.listeners.remove(listener)
            # Where other code has replaced the function meanwhile, this one stays below and does nothing more.
            if not self.listeners and getattr(getattr(self.owner, self.name), "fusekit_ear", None) is self:
                setattr(self.owner, self.name, self.original)

    def _install(self) -> None:
        original, listeners = self.original, self.listeners

        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            callbacks = [
                listener(instance, args, kwargs) for listener in list(listeners)
            ]  # before: a trace changes objects
            result = original(instance, *args, **kwargs)
            for after in callbacks:
                if after is not None:
                    after()
            return result

        call.fusekit_ear = self  # type: ignore[attr-defined]
        setattr(self.owner, self.name, call)


@contextmanager
def listening(listener: Listener, *, direct: bool = False) -> Iterator[None]:
    """Calls `listener` for every call of `cute.compile` in the `with` block, by any thread. Imports the DSL.

    direct: also of every host function that is called without it, as of the call of `cute.compile` that would compile
    the same.
    """
    compiled, called = dsl.call_hooks()

    def hear(instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
        return None if kwargs.get("compile_only") or dsl.is_tracing() else listener(instance, _called(*args), kwargs)

    with ExitStack() as heard:
        for (owner, name), hook in ((compiled, listener), (called, hear))[: 1 + direct]:
            heard.callback(_Ear.add(owner, name, hook).remove, hook)
        yield


def _called(function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """What `cute.compile` is given of a call: of a method its object, or the bound method."""
    name = function.__name__
    if args and inspect.unwrap(getattr(type(args[0]), name, None) or _called) is function:
        return (args[0] if name == "__call__" else getattr(args[0], name), *args[1:])
    return (function, *args)


def traced(compile_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traced:
    """What `compile_function(*args, **kwargs)` would give `cute.compile` first; nothing is compiled.

    For the source of a spec with `op = "extern"`, where an object or a package compiles its kernels itself.

    Parameters
    ----------
    compile_function : callable
        It calls `cute.compile`, however deep inside.
    *args, **kwargs
        What it takes.

    Returns
    -------
    tuple
        The host function, its positional arguments and its keyword arguments, as a source returns them.

    Raises
    ------
    BuildError
        If it does not call `cute.compile`.
    """
    from cuda.bindings.driver import CUstream

    def catch(compiler: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        function, *rest = (CUstream(0) if "Stream" in type(item).__name__ else item for item in given)
        raise _Caught((function, tuple(rest), {key: named[key] for key in named if key != "options"}))

    try:
        with listening(catch):
            compile_function(*args, **kwargs)
    except _Caught as caught:
        return caught.traced
    raise BuildError(f"{compile_function.__qualname__} compiled nothing: cute.compile was not called")

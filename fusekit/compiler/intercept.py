"""Listening to `cute.compile`: the one place that every call of it goes through, however it was imported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusekit.errors import BuildError, ToolchainError

Traced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The host function, its positional fake arguments, its keyword ones."""

Listener = Callable[[Any, tuple[Any, ...], dict[str, Any]], Callable[[], None] | None]
"""Is told of a call before it is compiled (the DSL's compiler object, arguments, keywords); what it returns is called
after.
"""


class _Caught(BaseException):
    """Ends a call of `cute.compile` that is not to compile."""

    def __init__(self, found: Traced) -> None:
        self.found = found


class _Ear:
    """Stands for `CompileCallable.__call__` while anybody listens."""

    guard = threading.Lock()

    def __init__(self, owner: Any) -> None:
        self.owner, self.original = owner, owner.__call__
        self.listeners: list[Listener] = []

    @classmethod
    def add(cls, listener: Listener) -> _Ear:
        owner = _callable_class()
        with cls.guard:
            found = getattr(owner.__call__, "fusekit_ear", None)
            ear = found if isinstance(found, cls) else cls(owner)
            ear.listeners.append(listener)
            if ear is not found:
                ear._install()
            return ear

    def remove(self, listener: Listener) -> None:
        with self.guard:
            self.listeners.remove(listener)
            # Where somebody else has replaced the function meanwhile, this one stays below and does nothing more.
            if not self.listeners and getattr(self.owner.__call__, "fusekit_ear", None) is self:
                self.owner.__call__ = self.original

    def _install(self) -> None:
        original, listeners = self.original, self.listeners

        def call(compiler: Any, *args: Any, **kwargs: Any) -> Any:
            told = [listener(compiler, args, kwargs) for listener in list(listeners)]  # before: a trace changes objects
            made = original(compiler, *args, **kwargs)
            for after in told:
                if after is not None:
                    after()
            return made

        call.fusekit_ear = self  # type: ignore[attr-defined]
        self.owner.__call__ = call


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` is told of every call of `cute.compile` in the `with` block, by any thread. Imports the DSL."""
    ear = _Ear.add(listener)
    try:
        yield
    finally:
        ear.remove(listener)


def traced(compile_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traced:
    """What `compile_function(*args, **kwargs)` would give `cute.compile` first; nothing is compiled.

    Raises BuildError where it does not call that.
    """
    from cuda.bindings.driver import CUstream

    def catch(compiler: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        function, *rest = (CUstream(0) if "Stream" in type(item).__name__ else item for item in given)
        raise _Caught((function, tuple(rest), {key: named[key] for key in named if key != "options"}))

    try:
        with listening(catch):
            compile_function(*args, **kwargs)
    except _Caught as caught:
        return caught.found
    raise BuildError(f"{compile_function.__qualname__} compiled nothing: cute.compile was not called")


def _callable_class() -> Any:
    try:
        from cutlass.base_dsl.compiler import CompileCallable
    except ImportError as error:
        raise ToolchainError(f"the CuTe DSL cannot be imported ({error}); pip install 'fusekit[build]'") from error
    return CompileCallable

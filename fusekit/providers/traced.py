"""What a function would give `cute.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Traced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The host function, its positional fake arguments, its keyword ones."""


class _Caught(BaseException):
    def __init__(self, found: Traced) -> None:
        self.found = found


def traced(compile_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traced:
    from cuda.bindings.driver import CUstream
    from cutlass import cute

    def catch(function: Callable[..., Any], *given: Any, options: str = "", **named: Any) -> Any:
        raise _Caught((function, tuple(CUstream(0) if "Stream" in type(x).__name__ else x for x in given), named))

    original = cute.compile
    cute.compile = catch
    try:
        compile_function(*args, **kwargs)
    except _Caught as caught:
        return caught.found
    finally:
        cute.compile = original
    raise RuntimeError("nothing compiled")

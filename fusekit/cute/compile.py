"""`fusekit.compile`: `cute.compile`, from the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fusekit.config import CuteConfig
from fusekit.errors import ToolchainError, install


def compile(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As `cute.compile`: the DSL traces, and what it would compile is taken from the store, or compiled and published.

    It is the cache of `fusekit exec` for one call: the same keys, names and rules, and what one has stored the other
    finds. The calls of other code, on this and other threads, are not changed. No GPU is needed.

    Parameters
    ----------
    function : callable
        A `cute.jit` function, method or object.
    *args, **kwargs
        As for `cute.compile`, `options` among them.

    Returns
    -------
    The DSL's own object, called as what `cute.compile` returns.

    Raises
    ------
    ToolchainError
        The DSL is not installed.
    NotBuiltError
        The store lacks it, with FUSEKIT_MISS=error.
    UsageError
        A variable of fusekit's has a value that it cannot have.

    Notes
    -----
    The configuration is that of the environment (`FUSEKIT_STORE`, `FUSEKIT_MISS`, `FUSEKIT_VERIFY`, ...). If the store
    cannot be used, the DSL compiles. `fusekit adopt` makes of what is stored kernels that are launched without the DSL.

    Examples
    --------
        compiled = fusekit.compile(scale, x, y, cutlass.Float32(1.0), stream)  # as cute.compile
        compiled(x, y, 2.0, stream)  # its result
    """
    try:
        from cutlass import cute
    except ImportError as error:
        raise ToolchainError(f"the CuTe DSL cannot be imported ({error}); {install('build')}") from error
    from fusekit.cute import dsl

    config = CuteConfig.from_environment()
    with dsl.patch().here(_cache(config)):
        return cute.compile(function, *args, **kwargs)


@cache
def _cache(config: CuteConfig) -> Any:
    # One for each store: what is read of the machine is read once.
    from fusekit.cute.cache import Cache

    return Cache(config)

"""A persistent cache for what any program compiles with the CuTe DSL.

`fusekit exec -- python program.py` starts a program with it; `fusekit.cute.install()` turns it on in one that runs. The
DSL traces as before. What follows, from the IR to machine code, is read from the store: the DSL's own host object,
which the DSL loads. Whatever goes wrong here, the DSL compiles as it would have.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

_DSL = "cutlass"


def install() -> None:
    """Take what the CuTe DSL compiles in this process from the store, and put there what is missing.

    For the processes that this one starts, use `fusekit exec`. The configuration is that of the environment
    (`FUSEKIT_STORE`, `FUSEKIT_MISS`, ...). Called again, it does nothing.
    """
    if _DSL in sys.modules:
        _patch()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _patch() -> None:
    """Patch the DSL, which has been imported. A failure leaves it as it is, with a line on stderr, or is an error with
    FUSEKIT_MISS=error.
    """
    try:
        from fusekit.cute import dsl

        if dsl.is_there():
            from fusekit.config import CuteConfig
            from fusekit.cute.cache import Cache

            cache = Cache(CuteConfig.from_environment())
            scope = dsl.patch()
            scope.everywhere = scope.everywhere or cache
    except Exception as error:
        from fusekit.config import refuses_misses

        if refuses_misses():
            raise
        sys.stderr.write(f"fusekit: the cache is off: {type(error).__name__}: {error}\n")


class _Finder:
    """Patches the DSL when it is imported."""

    def __init__(self) -> None:
        self.busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _DSL or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if module.__name__ == _DSL:  # a loader may have several modules
                _patch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

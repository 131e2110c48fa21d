"""fusekit: GPU kernels compiled ahead of time from declarative specs, launched without the compiler.

    kernel = fusekit.load("quickstart/moe-fc1")
    kernel(x=x, w=w, offsets=offsets, y=y)

`load` and `open_library` need cuda-bindings; `build`, `capture`, `compile` and `traced` need the `build` extra. They
and `Config` are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from fusekit.errors import (
    ArchMismatchError,
    ArgumentError,
    BuildError,
    CapacityError,
    CheckFailedError,
    DriverError,
    FusekitError,
    IntegrityError,
    NoStoreError,
    NotBuiltError,
    OtherSchemaError,
    PeerTimeoutError,
    ProofError,
    SignatureError,
    SpecError,
    StoreError,
    ToolchainError,
    UsageError,
)

if TYPE_CHECKING:
    from fusekit.compiler.build import build
    from fusekit.compiler.capture import capture
    from fusekit.compiler.intercept import traced
    from fusekit.config import Config
    from fusekit.cute.compile import compile
    from fusekit.library import load, open_library

__version__ = "0.2.0"

__all__ = [
    "ArchMismatchError",
    "ArgumentError",
    "BuildError",
    "CapacityError",
    "CheckFailedError",
    "Config",
    "DriverError",
    "FusekitError",
    "IntegrityError",
    "NoStoreError",
    "NotBuiltError",
    "OtherSchemaError",
    "PeerTimeoutError",
    "ProofError",
    "SignatureError",
    "SpecError",
    "StoreError",
    "ToolchainError",
    "UsageError",
    "__version__",
    "build",
    "capture",
    "compile",
    "load",
    "open_library",
    "traced",
]


_HOMES = {
    "load": "library", "open_library": "library", "build": "compiler.build", "capture": "compiler.capture",
    "compile": "cute.compile", "traced": "compiler.intercept", "Config": "config",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"fusekit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fusekit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

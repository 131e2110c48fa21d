"""Which compiler is installed, read from the package metadata, and how it is called; imports none of it."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

from fusekit.errors import ToolchainError

_FAMILY = "nvidia-cutlass-dsl"


def distributions() -> dict[str, str]:
    """Name -> version of every installed distribution of the CuTe DSL, sorted.

    Its CUDA 12 and CUDA 13 libraries are distributions of their own and make different cubins, so each one counts.
    Raises ToolchainError when the DSL is not installed.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # The folder's name tells as much as the metadata in it, which take a millisecond to read.
        folder = getattr(getattr(distribution, "_path", None), "name", None)
        if folder is not None and not _normal(folder).startswith(_FAMILY):
            continue
        name = _normal(distribution.name or "")
        if name.startswith(_FAMILY):
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    if _FAMILY not in found:
        raise ToolchainError(f"{_FAMILY} is not installed; a build needs the CuTe DSL; pip install 'fusekit[build]'")
    return dict(sorted(found.items()))


def compile_options(arch: str) -> str:
    """The DSL's option string: what of it decides the cubin, and is part of the key."""
    return f"--gpu-arch={arch} --keep-cubin"


def describe(versions: dict[str, str]) -> dict[str, Any]:
    """The entry's `toolchain`: `versions` (from `distributions`) and what else took part, for people who look it up."""
    import fusekit

    return {
        "distributions": versions,
        "fusekit": fusekit.__version__,
        "llvmlite": _version("llvmlite"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

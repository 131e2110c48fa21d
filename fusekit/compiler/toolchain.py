"""Which compiler is installed, read from the package metadata; imports none of it."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fusekit.errors import ToolchainError, install

SUPPORTED = "4.8"
"""The version of the CuTe DSL that fusekit is made for, as the extra `build` has it."""
_FAMILY = "nvidia-cutlass-dsl"
_CUDA_LIBRARY = re.compile(rf"{_FAMILY}-libs-cu(\d+)")  # the compiler itself, as of one major version of CUDA
_LOADED = "cutlass._mlir._mlir_libs._cutlass_ir"  # the module that the DSL loads one of them as


def distributions() -> dict[str, str]:
    """Name -> version of every installed distribution of the CuTe DSL that takes part in a build, sorted.

    Its CUDA 12 and CUDA 13 libraries are distributions of their own and make different cubins. Where several are
    installed the DSL loads one, and that one is named: the newest that the driver supports, or the newest of all
    where there is no driver. Raises ToolchainError when the DSL is not installed, or none of its libraries fits the
    driver.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # The folder's name tells as much as the metadata in it, which take a millisecond to read.
        folder = getattr(getattr(distribution, "_path", None), "name", None)
        if folder is not None and not normal(folder).startswith(_FAMILY):
            continue
        name = normal(distribution.name or "")
        if name.startswith(_FAMILY):
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    if _FAMILY not in found:
        raise ToolchainError(f"{_FAMILY} is not installed; a build needs the CuTe DSL; {install('build')}")
    unused = _unused_libraries(found)
    return {name: found[name] for name in sorted(found) if name not in unused}


def check_loaded(versions: dict[str, str]) -> None:
    """Raises ToolchainError where the library that the DSL has loaded in this process is not of `versions`."""
    module = sys.modules.get(_LOADED)
    match = re.match(r"_cutlass_ir\.cu(\d+)\.", Path(getattr(module, "__file__", None) or "").name)
    if match is not None and f"{_FAMILY}-libs-cu{match[1]}" not in versions:
        listed = ", ".join(versions)
        raise ToolchainError(
            f"the CuTe DSL has loaded its library of CUDA {match[1]}, and the installed distributions that a key names "
            f"are {listed}; what is compiled would be filed under another compiler; reinstall {_FAMILY}"
        )


def describe(versions: dict[str, str]) -> dict[str, Any]:
    """The entry's `toolchain`: `versions` (from `distributions`) and what else took part, for people who look it up."""
    import fusekit

    return {
        "distributions": versions,
        "fusekit": fusekit.__version__,
        "llvmlite": version("llvmlite"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _unused_libraries(found: dict[str, str]) -> set[str]:
    """The CUDA libraries of `found` that the DSL leaves aside."""
    libraries = {int(match[1]): name for name in found if (match := _CUDA_LIBRARY.fullmatch(name))}
    if len(libraries) < 2:
        return set()
    driver = _driver_major()
    fitting = [major for major in libraries if driver is None or major <= driver]
    if not fitting:
        listed = ", ".join(f"cu{major}" for major in sorted(libraries))
        raise ToolchainError(
            f"{_FAMILY} has libraries for {listed}, and the driver here supports CUDA {driver}; the DSL loads none of "
            "them; install the library for this driver, or update the driver"
        )
    return set(libraries.values()) - {libraries[max(fitting)]}


def _driver_major() -> int | None:
    """The major version of CUDA that the driver supports, asked as the DSL does; None where there is no driver."""
    found = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return None if failed else found.value // 1000


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version(name: str, absent: str = "") -> str:
    """That of an installed distribution; `absent` where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent

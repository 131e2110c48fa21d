"""Which compiler is installed, read from the package metadata; imports none of it."""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from fusekit.compiler.digests import digest, private, read_all
from fusekit.compiler.dsl import LIBRARY
from fusekit.config import compiler_cache
from fusekit.errors import ToolchainError, install

SUPPORTED = "4.8"
"""The version of the CuTe DSL that fusekit is made for, as the extra `build` has it."""
_FAMILY = "nvidia-cutlass-dsl"
_CUDA_LIBRARY = re.compile(rf"{_FAMILY}-libs-cu(\d+)")  # the compiler itself, as of one major version of CUDA
IMPORTED = (".py", ".pyc", *EXTENSION_SUFFIXES)


def distributions(cache: Path | None = None) -> dict[str, str]:
    """Name -> version of every installed distribution of the CuTe DSL that takes part in a build, sorted.

    Where a file is not that of the wheel, or no wheel's files are imported, a digest of what differs is a part of the
    version: `4.8.1+local.0123...`. cache: keeps the digests of files; default: the user's folder. The DSL's CUDA 12 and
    CUDA 13 libraries are distributions of their own and make different cubins. Where several are installed the DSL
    loads one, and that one is named: the newest that the driver supports, or the newest of all where there is no
    driver. Raises ToolchainError when the DSL is not installed, or none of its libraries fits the driver.
    """
    installed: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        # The folder's name tells as much as the metadata in it, which take a millisecond to read.
        folder = getattr(getattr(distribution, "_path", None), "name", None)
        if folder is not None and not normal(folder).startswith(_FAMILY):
            continue
        name = normal(distribution.name or "")
        if name.startswith(_FAMILY):
            installed.setdefault(name, distribution)  # the first on the path is the one that is imported
    if _FAMILY not in installed:
        raise ToolchainError(f"{_FAMILY} is not installed; a build needs the CuTe DSL; {install('build')}")
    used = installed.keys() - _unused_libraries(installed)
    local = _local(installed, used, compiler_cache() if cache is None else cache)
    return {name: f"{installed[name].version}{local.get(name, '')}" for name in sorted(used)}


def check_loaded(versions: dict[str, str]) -> None:
    """Raises ToolchainError where the library that the DSL has loaded in this process is not of `versions`."""
    module = sys.modules.get(LIBRARY)
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


def _local(installed: Mapping[str, metadata.Distribution], used: Set[str], cache: Path | None) -> dict[str, str]:
    """What is added to the versions of the distributions whose files are not those of their wheels."""
    recorded: dict[str, dict[str, str]] = {}  # distribution -> path -> SHA-256
    names: dict[str, str] = {}  # path -> what it is called wherever it is installed
    roots = {root for root in [_import_root()] if root}
    for package, distribution in installed.items():
        base = os.path.realpath(str(distribution.locate_file("")))
        recorded[package] = {}
        for name, value in _record(distribution):
            path = f"{base}/{name}"
            recorded[package][path], names[path] = value, name
            if "/" in name:
                roots.add(f"{base}/{name.partition('/')[0]}")
    wanted = {path: digest for package in used for path, digest in recorded[package].items()}
    extra: dict[str, str] = {}
    for root in sorted(roots):
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for file in files:
                path = f"{folder}/{file}"
                if path not in names and file.endswith(IMPORTED):
                    extra[path] = f"{Path(root).name}{path.removeprefix(root)}"
    here = read_all(_FAMILY, [*wanted, *extra], digest, private(cache))
    odd: dict[str, list[str]] = {package: [] for package in used}
    for package in used:
        for path, value in recorded[package].items():
            if here.get(path) != value:
                odd[package].append(f"{names[path]} {here.get(path, 'missing')}")
    odd[_FAMILY] += [f"{extra[path]} {here[path]}" for path in extra if path in here]
    suffixes = {}
    for package, lines in odd.items():
        if lines:
            text = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]
            suffixes[package] = f"{'.' if '+' in installed[package].version else '+'}local.{text}"
    return suffixes


def _record(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """(name, SHA-256) of the files of a wheel that an import may reach, as its RECORD has them."""
    for line in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if len(line) < 2 or line[0].startswith(("/", "..")) or line[0].partition("/")[0].endswith(".dist-info"):
            continue
        kind, _, value = line[1].partition("=")
        if kind == "sha256" and "__pycache__/" not in line[0]:
            yield line[0], base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _import_root() -> str | None:
    """The folder that `import cutlass` would run; imports nothing."""
    spec = importlib.util.find_spec("cutlass") if "cutlass" not in sys.modules else sys.modules["cutlass"].__spec__
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return os.path.realpath(folders[0]) if folders else None


def _unused_libraries(names: Iterable[str]) -> set[str]:
    """The CUDA libraries of `names` that the DSL leaves aside."""
    libraries = {int(match[1]): name for name in names if (match := _CUDA_LIBRARY.fullmatch(name))}
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
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version(name: str, absent: str = "") -> str:
    """The version of an installed distribution; `absent` where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent

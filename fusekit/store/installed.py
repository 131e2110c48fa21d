"""Stores in installed wheels: read-only roots of every library. `fusekit export --wheel` writes such wheels.

A wheel has the entry point `NAME = MODULE` of the group `fusekit.stores`; the store is the folder `store` of the
package MODULE, which is not imported. The files are read as they lie: importlib.metadata would take longer than all of
`fusekit ls`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

GROUP = "fusekit.stores"
STORE = "store"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def installed_roots() -> tuple[Path, ...]:
    """The stores of the installed wheels, in the order of sys.path and of their names; looked for once in a process."""
    return _roots(tuple(folder for folder in sys.path if os.path.isabs(folder)))  # noqa: PTH117 - text, and often


@cache
def _roots(folders: tuple[str, ...]) -> tuple[Path, ...]:
    roots: dict[str, Path] = {}
    for folder in folders:
        try:
            with os.scandir(folder) as listed:
                packages = sorted(child.path for child in listed if child.name.endswith(".dist-info"))
        except OSError:
            continue
        for package in packages:
            for module in _modules(package):
                root = Path(folder, *module.split("."), STORE)
                if root.is_dir():
                    roots.setdefault(module, root)
    return tuple(roots.values())


def _modules(package: str) -> Iterator[str]:
    """The modules of the entry points of a package's metadata."""
    try:
        lines = Path(package, "entry_points.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    section = ""
    for line in lines:
        if line.startswith("["):
            section = line.strip()
        elif section == f"[{GROUP}]" and _MODULE.fullmatch(module := line.partition("=")[2].strip()):
            yield module

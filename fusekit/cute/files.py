"""Digests of files and of variables of the environment."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from fusekit.cute.digest import DIGITS, UnnamedError

ABSENT = "-"


@functools.lru_cache(maxsize=10_000)
def _read(path: str, mark: Any) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:DIGITS]


def file_digest(path: str) -> str:
    """The digest of the file at `path`; `ABSENT` without one. Read again when it changed."""
    try:
        status = os.stat(path)  # noqa: PTH116
        return _read(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
    except OSError:
        return ABSENT


def source_digest(module: ModuleType) -> str:
    """The digest of a module's file, or of what its loader gives; `ABSENT` for a package without one."""
    path = getattr(module, "__file__", None)
    if not path:
        return ABSENT
    if os.path.isfile(path):  # noqa: PTH113
        return file_digest(path)
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    try:
        return hashlib.sha256(loader.get_data(path)).hexdigest()[:DIGITS]  # type: ignore[union-attr]
    except Exception:
        raise UnnamedError(f"the file of {module.__name__} cannot be read") from None


def secret(value: str | None) -> str | None:
    """What is kept of the value of a variable of the environment."""
    return None if value is None else hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]


def variable_digest(name: str) -> str | None:
    """What would be kept of the value that a variable of the environment has now."""
    return secret(os.environ.get(name))

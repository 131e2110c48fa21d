"""Whether a dict has changed since it was read."""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_MAPPING, _VERSION = 16, 24  # places of a proxy's dict, and of a dict's version


class _Never:
    """A stamp that differs each time it is read."""

    @property
    def value(self) -> object:
        return object()


def stamp(space: Mapping[str, Any]) -> Any:
    """What has another `value` after each change of the dict `space`, or of that in a proxy."""
    if type(space) not in (dict, MappingProxyType) or not _has_versions():
        return _Never()
    address = id(space) if type(space) is dict else ctypes.c_size_t.from_address(id(space) + _MAPPING).value
    return ctypes.c_uint64.from_address(address + _VERSION)


@functools.cache
def _has_versions() -> bool:
    """Whether dicts have versions (PEP 509), as CPython's have until 3.13: to compare all values takes long."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info < (3, 14):
        return False
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    kind = type("Kind", (), {"member": 1})
    proxy = vars(kind)
    version = ctypes.c_uint64.from_address(ctypes.c_size_t.from_address(id(proxy) + _MAPPING).value + _VERSION)
    seen = [version.value]
    for name in ("member", "other"):
        setattr(kind, name, 2)
        seen.append(version.value)
    return len(set(seen)) == len(seen)

"""Names of compile entries, so that they are listed, copied and removed as kernels are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fusekit.store import Entry, NameRecord
from fusekit.store.entries import HOST_DIGITS, HOST_OBJECT

_LENGTH = 80


def record_of(entry: Entry, function: Callable[..., Any] | None) -> NameRecord:
    """The name record of `entry`: `<package>/<function>@<digits of its key>`. function: the host function, as it was
    decorated; None if the DSL does not tell.
    """
    module = str(getattr(function, "__module__", None) or "unknown")
    label = str(getattr(function, "__qualname__", None) or "function").replace("<locals>.", "")
    name = f"{_part(module.partition('.')[0])}/{_part(label.removesuffix('.__call__'))}@{entry.key[:HOST_DIGITS]}"
    return NameRecord(name, entry.arch, entry.key, {HOST_OBJECT: {"module": module, "function": label}}, {})


def _part(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:_LENGTH] or "function"

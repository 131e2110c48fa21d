"""Names: how people find an entry, which is filed under a key.

A full name is `<spec file stem>/<kernel>@<variant>`. A name record says which key it stands for on one architecture,
with the whole spec and the defaults of its run-time arguments: many names may stand for one entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fusekit.errors import IntegrityError, UsageError
from fusekit.store.documents import damaged, members, seal, unseal
from fusekit.store.keys import is_digest

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_FULL_NAME = re.compile(rf"({_PART})/({_PART})@({_PART})")
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
_MEMBERS = {"schema": int, "name": str, "arch": str, "key": str, "spec": dict, "defaults": dict, "summary": dict}

SCHEMA = 2
"""Version of the name record. 2: with a summary of its entry."""


@dataclass(frozen=True, slots=True)
class NameRecord:
    """What one full name stands for on one architecture.

    name: full name. arch: such as `sm_90a`. key: the entry's. spec: the canonical spec. defaults: run-time scalars
    and launch options by name; a float may be infinite, which is the string "inf" on the disk. summary: what a
    listing shows of the entry (see `Entry.summary`), so that it need not read it; publishing fills it in. It is a
    copy and never the truth: nothing is loaded by it.
    """

    name: str
    arch: str
    key: str
    spec: Mapping[str, Any]
    defaults: Mapping[str, float | int]
    summary: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def to_bytes(self) -> bytes:
        """The record as a file's bytes; UsageError for a name or an architecture that cannot be a file name."""
        split(self.name)
        check_arch(self.arch)
        defaults = {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in self.defaults.items()}
        document = {
            "schema": SCHEMA,
            "name": self.name,
            "arch": self.arch,
            "key": self.key,
            "spec": dict(self.spec),
            "defaults": defaults,
            "summary": dict(self.summary),
        }
        return seal(document, f"name record {self.name}")

    @classmethod
    def from_bytes(cls, data: bytes, path: Path, name: str, arch: str) -> NameRecord:
        """The record in `data`, read from `path`, where the one of `name` for `arch` belongs; else IntegrityError."""
        document = unseal(data, path)
        members(document, _MEMBERS, path)
        if document["schema"] != SCHEMA:
            raise damaged(path, f"has schema {document['schema']}, where this fusekit reads {SCHEMA}")
        if (document["name"], document["arch"]) != (name, arch):
            raise damaged(path, f"is the record of {document['name']} for {document['arch']}")
        if not is_digest(document["key"]):
            raise damaged(path, f"has the key {document['key']!r}")
        defaults = document["defaults"]
        for label, value in defaults.items():
            if value in ("inf", "-inf"):
                defaults[label] = float(value)
            elif type(value) not in (int, float):
                raise damaged(path, f"has the default {label} = {value!r}, which is no number")
        return cls(name, arch, document["key"], document["spec"], defaults, document["summary"])


def split(name: str) -> tuple[str, str, str]:
    """File, kernel and variant of a full name; UsageError for anything else."""
    match = _FULL_NAME.fullmatch(name)
    if match is None:
        raise UsageError(
            f"{name!r} is no full kernel name; it is <file>/<kernel>@<variant>, each of letters, digits, '.', '_' "
            "and '-'; "
            "`fusekit ls` shows those in the store"
        )
    file, kernel, variant = match.groups()
    return file, kernel, variant


def is_full(name: str) -> bool:
    """True for `<file>/<kernel>@<variant>`."""
    return _FULL_NAME.fullmatch(name) is not None


def is_part(text: str) -> bool:
    """True for what may be the file, the kernel or the variant of a name."""
    return re.fullmatch(_PART, text) is not None


def check_arch(arch: str) -> str:
    """`arch`, if it has the form of an architecture; else UsageError."""
    if _ARCH.fullmatch(arch) is None:
        raise UsageError(f"{arch!r} is no architecture; one is of lower-case letters, digits and '_', such as sm_90a")
    return arch


def is_glob(pattern: str) -> bool:
    """True when `pattern` has a wildcard, so that it may match any number of names."""
    return any(character in pattern for character in "*?[")


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` means the full name `name`: itself, its kernel (`file/kernel`), its file, or a glob over one
    of them.
    """
    kernel = name.partition("@")[0]
    forms = (name, kernel, kernel.partition("/")[0])
    if is_glob(pattern):
        return any(fnmatchcase(form, pattern) for form in forms)
    return pattern in forms


def record_path(name: str, arch: str) -> Path:
    """Where the record of `name` for `arch` lies, relative to a store's root."""
    file, kernel, variant = split(name)
    return Path("names", file, f"{kernel}@{variant}.{check_arch(arch)}.json")


def of_path(file: str, filename: str) -> tuple[str, str]:
    """Full name and architecture of the record `names/<file>/<filename>`; IntegrityError where none may have that
    path.
    """
    stem, _, arch = filename.removesuffix(".json").rpartition(".")
    name = f"{file}/{stem}"
    if not filename.endswith(".json") or not is_full(name) or _ARCH.fullmatch(arch) is None:
        raise IntegrityError(f"names/{file}/{filename} is no name record; only those may lie there; remove it")
    return name, arch

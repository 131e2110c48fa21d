"""Names: how people find an entry, which is stored under a key.

A full name is `<spec file stem>/<kernel>@<variant>`. A name record gives its key for one architecture, the whole spec
and the defaults of its run-time arguments. Many names may point to one entry.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fusekit.errors import IntegrityError, UsageError, is_glob
from fusekit.store.documents import check_schema, damaged, members, seal, unseal
from fusekit.store.files import AnyPath
from fusekit.store.keys import canonical_json, is_digest, sha256

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_FULL_NAME = re.compile(rf"({_PART})/({_PART})@({_PART})")
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
FOLDER = re.compile(_PART)
RECORD = re.compile(rf"{_PART}/{_PART}@{_PART}\.[a-z0-9_]{{1,32}}\.json")
"""Folder and path of a record below `names`."""
CANDIDATE = re.compile(rf"{_PART}/{_PART}@{_PART}\.[a-z0-9_]{{1,32}}\.[0-9a-f]{{12}}\.json")
"""Path of a record below `candidates`: with the first digits of its key."""
_MEMBERS = {"schema": int, "name": str, "arch": str, "key": str, "spec": dict, "defaults": dict, "summary": dict}

_COUNTS = frozenset({"bytes", "entry_bytes", "registers", "spill_bytes", "launches", "cubin_format"})
_OPTIONAL = frozenset({"registers", "spill_bytes", "launches", "cubin_format"})  # None if the entry does not give it

# Of a spec: for people, for benchmarks; and the table of a layer, of which each kernel has its own share.
_TEXT = frozenset({"summary", "problem", "layer", "inputs"})

_LAYER = ".layer@record"

SCHEMA = 2
"""Version of the name record. 2: with a summary of its entry."""

# A written record, as far as a listing needs it: canonical JSON has one order of members.
_BRIEF = re.compile(
    rb'\{"arch":"([a-z0-9_]+)","defaults":(\{(?:"[^"\\]*":(?:-?[0-9][0-9.e+-]*|"-?inf"),?)*\}),'
    rb'("digest":"([0-9a-f]{64})",)"key":"([0-9a-f]{64})",'
    rb'"name":"([^"\\]+)","schema":%d,"spec":(\{.*\}),"summary":(\{[^{}]*\})\}\n' % SCHEMA,
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class NameRecord:
    """The entry that one full name points to on one architecture.

    name: full name. arch: such as `sm_90a`. key: of the entry. spec: the canonical spec. defaults: run-time scalars
    and launch options by name; a float may be infinite, which is the string "inf" on disk. summary: what a listing
    shows of the entry (see `Entry.summary`), so that it need not read it; publishing fills it in. It is a copy:
    nothing is loaded by it.
    """

    name: str
    arch: str
    key: str
    spec: Mapping[str, Any]
    defaults: Mapping[str, float | int]
    summary: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def to_bytes(self) -> bytes:
        """The bytes of its file; UsageError for a name or an architecture that cannot be a file name."""
        split(self.name)
        check_arch(self.arch)
        document = {
            "schema": SCHEMA,
            "name": self.name,
            "arch": self.arch,
            "key": self.key,
            "spec": dict(self.spec),
            "defaults": _finite(self.defaults),
            "summary": dict(self.summary),
        }
        return seal(document, f"name record {self.name}")

    @classmethod
    def from_bytes(cls, data: bytes, path: AnyPath, name: str, arch: str) -> NameRecord:
        """The record in `data`, read from `path`; IntegrityError unless it is the record of `name` for `arch`."""
        document = unseal(data, path)
        check_schema(document, SCHEMA, path)
        members(document, _MEMBERS, path)
        if not is_summary(document["summary"]):
            raise damaged(path, "has a summary of wrong types; it holds a digest, sizes, counts and seconds")
        if (document["name"], document["arch"]) != (name, arch):
            raise damaged(path, f"is the record of {document['name']} for {document['arch']}")
        if not is_digest(document["key"]):
            raise damaged(path, f"has the key {document['key']!r}")
        defaults = document["defaults"]
        for label, value in defaults.items():
            if value in ("inf", "-inf"):
                defaults[label] = float(value)
            elif type(value) not in (int, float):
                raise damaged(path, f"has the default {label} = {value!r}, which is not a number")
        return cls(name, arch, document["key"], document["spec"], defaults, document["summary"])


class Brief(NamedTuple):
    """A `NameRecord` whose spec was not parsed: parsing takes most of the time of reading one.

    spec, defaults: canonical JSON.
    """

    name: str
    arch: str
    key: str
    spec: bytes
    defaults: bytes
    summary: Mapping[str, Any]

    @classmethod
    def from_bytes(cls, data: bytes, path: AnyPath, name: str, arch: str) -> Brief:
        """As `NameRecord.from_bytes`: digest, name and architecture are checked in the same way."""
        match = _BRIEF.fullmatch(data)
        if match is not None and (match[6].decode(), match[1].decode()) == (name, arch):
            sealed = data[: match.start(3)] + data[match.end(3) : -1]
            with contextlib.suppress(ValueError):  # the full parser, below, gives the error
                if sha256(sealed) == match[4].decode() and is_summary(summary := json.loads(match[8])):
                    return cls(name, arch, match[5].decode(), match[7], match[2], summary)
        return cls.of(NameRecord.from_bytes(data, path, name, arch))

    @classmethod
    def of(cls, record: NameRecord) -> Brief:
        """What reading `record` would give."""
        spec = canonical_json(record.spec, "spec").encode()
        defaults = canonical_json(_finite(record.defaults), "defaults").encode()
        return cls(record.name, record.arch, record.key, spec, defaults, record.summary)

    def equals(self, record: NameRecord) -> bool:
        """Whether `record` is this one, apart from summaries."""
        other = Brief.of(record)
        return (self.name, self.arch, self.key) == (other.name, other.arch, other.key) and (
            (self.spec, self.defaults) == (other.spec, other.defaults)
        )


def is_summary(summary: Mapping[str, Any]) -> bool:
    """Whether the members that are in `Entry.summary` have their types."""
    for label, value in summary.items():
        if label in _COUNTS:
            fits = (type(value) is int and 0 <= value < 2**63) or (value is None and label in _OPTIONAL)
        elif label == "cubin_sha256":
            fits = is_digest(value)
        elif label == "toolchain":
            fits = value is None or isinstance(value, str)
        else:
            fits = label != "seconds" or value is None or (type(value) in (int, float) and 0 <= value < math.inf)
        if not fits:
            return False
    return True


def _finite(defaults: Mapping[str, float | int]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in defaults.items()}


def split(name: str) -> tuple[str, str, str]:
    """File, kernel and variant of a full name; UsageError for anything else."""
    match = _FULL_NAME.fullmatch(name)
    if match is None:
        raise UsageError(
            f"{name!r} is not a full kernel name, which is <file>/<kernel>@<variant>, each of letters, digits, '.', "
            "'_' and '-'; `fusekit ls` shows those in the store"
        )
    file, kernel, variant = match.groups()
    return file, kernel, variant


def is_full(name: str) -> bool:
    """True for `<file>/<kernel>@<variant>`."""
    return _FULL_NAME.fullmatch(name) is not None


def is_part(text: str) -> bool:
    """True for a valid file, kernel or variant of a name."""
    return re.fullmatch(_PART, text) is not None


def check_arch(arch: str) -> str:
    """`arch`, if it has the form of an architecture; UsageError otherwise."""
    if _ARCH.fullmatch(arch) is None:
        raise UsageError(f"{arch!r} is not an architecture, which has lower-case letters, digits, '_'; such as sm_90a")
    return arch


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches the full name `name`: equal to it, its kernel (`file/kernel`) or its file, or a glob
    over one of them.
    """
    if pattern == "*":
        return True
    kernel = name.partition("@")[0]
    forms = (name, kernel, kernel.partition("/")[0])
    if is_glob(pattern):
        return any(fnmatchcase(form, pattern) for form in forms)
    return pattern in forms


def layer_record(layer: str) -> str:
    """The full name of the record of a layer, `file/layer`: it is one of the names that `file/layer` means."""
    return f"{layer}{_LAYER}"


def layer_of(name: str) -> str | None:
    """The layer whose record has the full name `name`; None for the name of a kernel."""
    return name.removesuffix(_LAYER) if name.endswith(_LAYER) else None


def is_of_layer(record: NameRecord | Brief) -> bool:
    """Whether `record` is of a kernel of a layer of a model."""
    return b'"layer":{' in record.spec if isinstance(record.spec, bytes) else bool(record.spec.get("layer"))


def readings(pattern: str) -> tuple[str, ...]:
    """`pattern`, and the pattern to try if no name matches it: `file/layer` matches the layer's kernels, which are
    called `file/layer.part`.
    """
    kernel = pattern.partition("/")[2]
    return (pattern, f"{pattern}.*") if kernel and "@" not in pattern and not kernel.endswith("*") else (pattern,)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The full names among `names` that `pattern`, which may be a layer, matches."""
    known = [*names]
    return next(filter(None, ([name for name in known if matches(form, name)] for form in readings(pattern))), [])


def record_path(name: str, arch: str) -> str:
    """Path of the record of `name` for `arch`, relative to a root."""
    split(name)
    return f"names/{name}.{check_arch(arch)}.json"


def candidate_path(name: str, arch: str, key: str) -> str:
    """Path of the record of `name` for `arch` that points to `key`, as a candidate, relative to a root."""
    split(name)
    return f"candidates/{name}.{check_arch(arch)}.{key[:12]}.json"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys in which two specs of one name differ and that reach the kernel; if none does, both compute the same."""
    return tuple(key for key in sorted({*before, *now}) if key not in _TEXT and before.get(key) != now.get(key))


def newest(candidates: Iterable[NameRecord]) -> list[NameRecord]:
    """`candidates`, those of the newest toolchain first; those of one toolchain keep their order."""

    def version(record: NameRecord) -> list[int]:
        return [int(part) for part in re.findall(r"[0-9]+", record.summary.get("toolchain") or "")]

    return sorted(candidates, key=version, reverse=True)


def one_per_format(records: Iterable[NameRecord]) -> list[NameRecord]:
    """The first of `records` of each cubin format."""
    first: dict[int | None, NameRecord] = {}
    for record in records:
        first.setdefault(record.summary.get("cubin_format"), record)
    return [*first.values()]


def of_candidate(file: str, filename: str) -> tuple[str, str]:
    """As `of_path`, for `candidates/<file>/<filename>`."""
    stem, _, digits = filename.removesuffix(".json").rpartition(".")
    if not filename.endswith(".json") or re.fullmatch(r"[0-9a-f]{12}", digits) is None:
        raise IntegrityError(f"candidates/{file}/{filename} is not a name record; only those belong there; remove it")
    return of_path(file, f"{stem}.json")


def of_path(file: str, filename: str) -> tuple[str, str]:
    """Full name and architecture of the record `names/<file>/<filename>`; IntegrityError if no record has
    such a path.
    """
    stem, _, arch = filename.removesuffix(".json").rpartition(".")
    name = f"{file}/{stem}"
    if not filename.endswith(".json") or not is_full(name) or _ARCH.fullmatch(arch) is None:
        raise IntegrityError(f"names/{file}/{filename} is not a name record; only those belong there; remove it")
    return name, arch

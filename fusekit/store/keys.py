"""Keys: what a compiled kernel is stored under.

A key is a SHA-256 over *labelled fields*: everything that can change the cubin or its launch record, and nothing
else. Each field goes into the hash as label and payload, both preceded by their length, so that two different sets of
fields never give the same bytes. The entry holds the fields with the key, so that a miss can be explained field by
field, and an entry that was moved to another key is detected.

In a key: the schema version, the canonical device spec, the architecture, every toolchain distribution with its
version, the compile options, the digest of each source file that takes part. Never in a key: a path of this machine,
a time, an object's address, a pickle, the order of a dict.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache

from fusekit.errors import FusekitError, install

SCHEMA = 1
"""Version of the key fields, raised when their meaning changes: every key is then another."""

_KEY = re.compile(r"[0-9a-f]{64}")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_DOMAIN = b"fusekit-store-key\0"
_EXACT = frozenset({str, int, bool, type(None)})  # types whose JSON form is exact


def is_digest(text: object) -> bool:
    """True for 64 lower-case hexadecimal digits: the form of every key and digest in a store."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def sha256(data: bytes) -> str:
    """SHA-256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object, what: str = "value") -> str:
    """The canonical JSON text of `value`: keys sorted, no spaces, ASCII, finite numbers.

    what: name of the value in errors. Raises `FusekitError` for a value without an exact form in JSON: NaN, infinity, a
    key that is not a string, other types. Any form guessed for those (`repr`, pickle) could give two different kernels
    one key.
    """
    if type(value) in _EXACT:
        return _scalar(value)
    _require_json(value, what)
    return _ENCODER.encode(value)


@functools.lru_cache(maxsize=4096, typed=True)
def _scalar(value: str | int | bool | None) -> str:
    return _ENCODER.encode(value)


def key_fields(
    *,
    device_spec: Mapping[str, object],
    arch: str,
    toolchain: Mapping[str, str],
    options: str,
    sources: Mapping[str, str],
) -> dict[str, str]:
    """The labelled fields of one kernel's key, in the order in which they are hashed.

    `device_spec`: what decides the cubin, JSON types only; one field per top-level entry, `spec.<name>`.
    `arch`: target architecture such as `sm_90a`. `toolchain`: distribution -> version, not empty; `toolchain.<name>`.
    `options`: the compiler's option string. `sources`: path relative to the package -> SHA-256 of the file; not
    empty; `source.<path>`. Raises `FusekitError` for a value without a canonical form.
    """
    common = common_fields(arch=arch, toolchain=toolchain, options=options, sources=sources)
    return with_spec(common, device_spec)


def common_fields(
    *, arch: str, toolchain: Mapping[str, str], options: str, sources: Mapping[str, str]
) -> dict[str, str]:
    """The fields that all kernels of one family and architecture share; arguments as for `key_fields`."""
    if not toolchain:
        raise FusekitError(
            f"no toolchain distribution was given; a key names each with its version; {install('build')}"
        )
    if not sources:
        raise FusekitError("no source file was given; a key holds the digest of each one of the kernel; pass them")
    fields = {"schema": str(SCHEMA), "arch": arch, "options": options}
    for name, version in toolchain.items():
        if not version:
            raise FusekitError(f"toolchain distribution {name!r} has no version; a key needs one; reinstall it")
        fields[f"toolchain.{name}"] = version
    for path, digest in sources.items():
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            raise FusekitError(f"source {path!r}; a key takes paths relative to the package, with '/'; strip the rest")
        if not is_digest(digest):
            raise FusekitError(f"source {path!r} has digest {digest!r}; it must be a SHA-256 in lower-case hexadecimal")
        fields[f"source.{path}"] = digest
    return fields


def with_spec(common: Mapping[str, str], device_spec: Mapping[str, object]) -> dict[str, str]:
    """All fields of one kernel: the `common_fields` of its family and its own."""
    if not device_spec:
        raise FusekitError("the device spec is empty; a key needs it; pass KernelSpec.device_spec()")
    fields = dict(common)
    for name, value in device_spec.items():
        fields[f"spec.{name}"] = canonical_json(value, f"device spec field {name!r}")
    return dict(sorted(fields.items()))


def key_of(fields: Mapping[str, str]) -> str:
    """The key of a set of labelled fields: 64 hexadecimal digits, whatever the order of the mapping."""
    parts = [_DOMAIN, len(fields).to_bytes(8, "little")]
    for label in sorted(fields):
        payload = fields[label]
        if not (isinstance(label, str) and isinstance(payload, str)):
            raise FusekitError(
                f"key field {label!r} holds {payload!r}; labels and payloads are strings; convert it first"
            )
        parts += (_sized(label), _sized(payload))
    return sha256(b"".join(parts))


@lru_cache(maxsize=4096)  # thousands of kernels share all but a few of their fields
def _sized(text: str) -> bytes:
    payload = text.encode("utf-8", "surrogatepass")  # every str has a form, each its own
    return len(payload).to_bytes(8, "little") + payload


def _require_json(value: object, what: str) -> None:
    # Subclasses (IntEnum, numpy scalars) are refused. Members of these types need no call: there are very many.
    if type(value) in _EXACT:
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise FusekitError(f"{what} is {value}; JSON has only finite numbers; write it as null or as a string")
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if type(item) not in _EXACT:
                _require_json(item, f"{what}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise FusekitError(f"{what} has the key {key!r}; JSON keys are strings; convert it first")
            if type(item) not in _EXACT:
                _require_json(item, f"{what}.{key}")
        return
    raise FusekitError(
        f"{what} is a {type(value).__name__}; only str, int, float, bool, None, list and dict have a fixed form; "
        "convert it"
    )

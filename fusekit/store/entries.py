"""Entries: the data of one compiled kernel, stored under its key.

An entry is one file, so cubin digest, launch record and resources are always of one build. It is written after its
cubin: a visible entry is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.errors import IntegrityError
from fusekit.store.documents import check_schema, damaged, members, seal, unseal
from fusekit.store.files import AnyPath
from fusekit.store.keys import canonical_json, is_digest, key_of, sha256

SCHEMA = 1
"""Version of the entry's document. No part of a key: a newer form of an entry leaves keys as they are."""
KIND, HOST_OBJECT, DEPENDENCIES = "kind", "host-object", "dependencies"
"""The key field, and its values, of an entry whose blob is not a cubin: what `fusekit exec` keeps of a program's own
compilation, and of what its trace read. `launch` has that under the same name."""
HOST_DIGITS = 16
"""Of its key, in the name of a host object."""
CARRIED = "carried"
"""The value of that field of what `fusekit exec --with` keeps of another cache. `launch` has under it what that is."""
OF_PROGRAMS = frozenset({HOST_OBJECT, DEPENDENCIES, CARRIED})
"""The values of entries that are of no kernel: they have no launch record."""
ADOPTED = "spec.adopted"
"""The key field of a kernel that was made of such an entry: its key, as JSON. The kernel is launched without that."""
LAYER = "layer"
"""The value of that field of a layer's entry, whose blob is its record (fusekit.abi.layer_record). `launch` has the
keys of its kernels."""
CUBIN_LIMIT = 1 << 30
"""Largest cubin accepted, in bytes."""
CUBIN_FORMAT = 8
"""Offset of a cubin's format: EI_ABIVERSION of its ELF header."""
_CUDA13_FORMAT, CUDA13, _CUDA12 = 8, 13000, 12040
_FAMILY = "nvidia-cutlass-dsl"
_PLAIN = ("base", "core")  # parts of every installation, named only if their version differs

_MEMBERS = {
    "schema": int,
    "key": str,
    "fields": dict,
    "cubin": dict,
    "launch": dict,
    "resources": dict,
    "proof": dict,
    "toolchain": dict,
    "seconds": float,
}


def of_program(spec: Mapping[str, Any]) -> str | None:
    """HOST_OBJECT or CARRIED, if the `spec` of a name record is of such an entry; None of a kernel."""
    return next((kind for kind in (HOST_OBJECT, CARRIED) if kind in spec), None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel.

    key: 64 hexadecimal digits, the hash of `fields`. fields: the labelled key fields. cubin_sha256, cubin_bytes:
    digest and size of the cubin, which is the blob of that digest. launch: the launch record as JSON. resources:
    registers, spill_bytes and shared memory, read from the cubin. proof: what was compared. toolchain: names and
    versions of the compiler. seconds: time to compile and prove it.
    """

    key: str
    fields: Mapping[str, str]
    cubin_sha256: str
    cubin_bytes: int
    launch: Mapping[str, Any]
    resources: Mapping[str, Any]
    proof: Mapping[str, Any]
    toolchain: Mapping[str, Any]
    seconds: float

    @property
    def arch(self) -> str:
        """The architecture the cubin is for, such as `sm_90a`."""
        return self.fields["arch"]

    @property
    def launch_sha256(self) -> str:
        """The SHA-256 of the launch record's canonical JSON."""
        return sha256(canonical_json(self.launch, f"launch record of {self.key}").encode())

    def summary(self) -> dict[str, Any]:
        """The columns of a listing: cubin_sha256, bytes (of the cubin), registers, spill_bytes, seconds, launches (that
        were proved), entry_bytes (size of the entry's file), toolchain (its label) and cubin_format. A value that the
        entry lacks is None.
        """
        distributions = self.toolchain.get("distributions")
        return {
            "cubin_sha256": self.cubin_sha256,
            "bytes": self.cubin_bytes,
            "registers": self.resources.get("registers"),
            "spill_bytes": self.resources.get("spill_bytes"),
            "seconds": self.seconds,
            "launches": self.proof.get("launches"),
            "entry_bytes": len(self.to_bytes()),
            "toolchain": toolchain_label(distributions) if isinstance(distributions, Mapping) else None,
            "cubin_format": self.resources.get("cubin_format"),
        }

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON types, without the digest."""
        return {
            "schema": SCHEMA,
            "key": self.key,
            "fields": dict(self.fields),
            "cubin": {"sha256": self.cubin_sha256, "bytes": self.cubin_bytes},
            "launch": dict(self.launch),
            "resources": dict(self.resources),
            "proof": dict(self.proof),
            "toolchain": dict(self.toolchain),
            "seconds": float(self.seconds),
        }

    def to_bytes(self) -> bytes:
        """The bytes of its file. Raises `IntegrityError` if its parts contradict each other."""
        document = self.to_json()
        _check(document, self.key, f"entry {self.key}")
        return seal(document, f"entry {self.key}")

    @classmethod
    def from_bytes(cls, data: bytes, path: AnyPath, key: str) -> Entry:
        """The entry in `data`, read from `path`. Raises `IntegrityError` unless it is the entry of `key`."""
        document = unseal(data, path)
        check_schema(document, SCHEMA, path)
        members(document, _MEMBERS, path)
        _check(document, key, path)
        return cls(
            key=key,
            fields=document["fields"],
            cubin_sha256=document["cubin"]["sha256"],
            cubin_bytes=document["cubin"]["bytes"],
            launch=document["launch"],
            resources=document["resources"],
            proof=document["proof"],
            toolchain=document["toolchain"],
            seconds=document["seconds"],
        )


def lowest_driver(cubin_format: int) -> int:
    """The CUDA version, such as 13000, of the first driver that reads cubins of `cubin_format`."""
    return CUDA13 if cubin_format >= _CUDA13_FORMAT else _CUDA12


def toolchain_label(toolchain: Mapping[str, str]) -> str:
    """A toolchain (distribution -> version) as part of a file name: `cutlass-dsl-4.8.1-cu12`."""
    version = toolchain.get(_FAMILY, "none")
    parts = [f"cutlass-dsl-{version}"]
    for name, installed in sorted(toolchain.items()):
        part = name.removeprefix(f"{_FAMILY}-").removeprefix("libs-")
        if name != _FAMILY and (installed != version or part not in _PLAIN):
            parts.append(part if installed == version else f"{part}-{installed}")
    return "-".join(parts)


def _check(document: dict[str, Any], key: str, path: AnyPath) -> None:
    try:
        if document["key"] != key:
            raise damaged(path, f"is the entry of key {document['key']}, not of {key}")
        fields = document["fields"]
        if not all(type(value) is str for value in fields.values()) or "arch" not in fields:
            raise damaged(path, "has key fields that are not strings, or no field 'arch'")
        if key_of(fields) != key:
            raise damaged(path, f"has key fields whose key is {key_of(fields)}, not {key}")
        cubin = document["cubin"]
        if set(cubin) != {"sha256", "bytes"} or not is_digest(cubin["sha256"]):
            raise damaged(path, f"names its cubin by {cubin!r}")
        if type(cubin["bytes"]) is not int or not 0 < cubin["bytes"] <= CUBIN_LIMIT:
            raise damaged(path, f"has a cubin of {cubin['bytes']!r} bytes, where 1 to {CUBIN_LIMIT} are allowed")
        if fields.get(KIND) == LAYER:
            kernels = document["launch"].get("kernels")
            if not isinstance(kernels, list) or not all(map(is_digest, kernels)):
                raise damaged(path, "is of a layer, and has no keys of its kernels")
        counts = ("registers", "spill_bytes", "cubin_format")
        for table, label in (*(("resources", label) for label in counts), ("proof", "launches")):
            count = document[table].get(label)
            if count is not None and (type(count) is not int or count < 0):
                raise damaged(path, f"has {label} {count!r}, which is not a count")
        if document["seconds"] < 0:
            raise damaged(path, f"has seconds {document['seconds']!r}, which is not a time")
        arch = document["launch"].get("arch", fields["arch"])
        if arch != fields["arch"]:
            raise damaged(path, f"has a launch record for {arch} under a key for {fields['arch']}")
    except IntegrityError as error:
        error.key = key
        raise

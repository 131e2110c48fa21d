"""The form in which the store keeps what a compilation gave: an entry, and one blob with its parts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fusekit.config import CuteConfig
from fusekit.cute.dsl import Artifact
from fusekit.cute.processor import cpu
from fusekit.errors import IntegrityError
from fusekit.share.bounds import Bounds
from fusekit.store import Entry, Store
from fusekit.store.entries import HOST_OBJECT
from fusekit.store.keys import sha256

if TYPE_CHECKING:
    from fusekit.share.remote import Remote

TOOLCHAIN = "toolchain."
"""Begins the labels of key fields that are versions of distributions."""
ARGUMENTS = "arguments"
_LENGTH = 8  # bytes
_BOUNDS, _ATTEMPTS = Bounds(silence=5.0, grace=10.0, patience=10.0), 2
"""Of a remote: a program does not wait longer than it would compile."""


def open_store(cute: CuteConfig) -> Store:
    """The store of `cute`, without entries of others: a host object is machine code, and so is what is made of its IR.
    They are run for nobody whose programs would not be.
    """
    return Store.open(cute.config).keeping_to_owners(frozenset({0, os.geteuid()}) | cute.trusted_users)


def open_remote(cute: CuteConfig) -> Remote:
    """The remote of `cute`, which is not waited for as long as by a command that copies."""
    from fusekit.share.remote import Remote

    return Remote(cute.remote, attempts=_ATTEMPTS, bounds=_BOUNDS)


def machine_fields() -> dict[str, str]:
    """The key fields that all calls of this process share. Raises ToolchainError without the DSL."""
    from fusekit.compiler.toolchain import check_loaded, distributions

    versions = distributions()
    check_loaded(versions)
    fields = {f"{TOOLCHAIN}{name}": version for name, version in versions.items()}
    fields["python"] = ".".join(platform.python_version_tuple()[:2])
    # The host object is compiled for this processor.
    fields["host"] = f"{platform.system()} {platform.machine()} {sha256(cpu().encode())}"
    return fields


def packed(
    key: str, fields: Mapping[str, str], artifact: Artifact, arguments: Mapping[str, Any], seconds: float
) -> tuple[Entry, bytes]:
    """An entry and its blob: the length of a table, the table of the parts' sizes as JSON, the parts. arguments: of
    `fusekit.cute.arguments`.
    """
    parts = {"host": artifact.host, "ir": artifact.ir, **artifact.files}
    table = json.dumps({name: len(data) for name, data in parts.items()}).encode()
    blob = b"".join((len(table).to_bytes(_LENGTH, "little"), table, *parts.values()))
    launch = {HOST_OBJECT: {**artifact.facts, ARGUMENTS: arguments}}
    versions = {name.removeprefix(TOOLCHAIN): value for name, value in fields.items() if name.startswith(TOOLCHAIN)}
    toolchain = {"python": platform.python_version(), "machine": platform.machine(), "distributions": versions}
    return Entry(key, fields, sha256(blob), len(blob), launch, {}, {}, toolchain, seconds), blob


def unpacked(blob: bytes, entry: Entry) -> Artifact:
    """What is in a blob."""
    begin = _LENGTH + int.from_bytes(blob[:_LENGTH], "little")
    parts = {}
    for name, size in json.loads(blob[_LENGTH:begin]).items():
        parts[name] = blob[begin : begin + size]
        begin += size
    if begin != len(blob):
        raise IntegrityError(f"entry {entry.key} has a host object of another size than its table says")
    return Artifact(parts.pop("host"), parts.pop("ir"), parts, entry.launch[HOST_OBJECT])

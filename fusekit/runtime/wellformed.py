"""Whether what a store holds can be used: what its digests cannot tell.

A digest says that bytes are as they were written, and anybody can write bytes with the right digest. The store checks
the types of what it reads itself. What it only keeps (launch records, specs, tuning tables) is checked here, by the
same functions when it is imported, pulled, verified and loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusekit.abi import LaunchRecord, RecordError
from fusekit.errors import IntegrityError
from fusekit.runtime.tuning import Tuning
from fusekit.store import Entry, NameRecord
from fusekit.store.verify import Inspect

_TEXTS = frozenset(
    {"op", "file", "kernel", "summary", "arch", "dtype", "out_dtype", "schedule", "mainloop", "glu_layout", "b_major",
     "alpha"}
)  # fmt: skip
_COUNTS = frozenset({"warps", "experts", "topk", "cluster_margin"})
_PAIRS = frozenset({"tile", "cluster"})


def launch_record(entry: Entry) -> LaunchRecord:
    """The launch record of `entry`; IntegrityError for one that no launcher could use."""
    try:
        return LaunchRecord.from_json(dict(entry.launch))
    except RecordError as error:
        raise IntegrityError(f"entry {entry.key}: launch record: {error}", key=entry.key) from error


def check_entry(entry: Entry) -> None:
    """Raises IntegrityError unless `entry` has a launch record, of the architecture of its key."""
    record = launch_record(entry)
    if record.arch != entry.arch:
        raise IntegrityError(
            f"entry {entry.key} is for {entry.arch}, its launch record for {record.arch}; build it again", key=entry.key
        )


def check_name(record: NameRecord) -> None:
    """Raises IntegrityError where a member of the spec of `record` that launching looks at is of another type."""
    for label, value in record.spec.items():
        if not _fits(label, value):
            raise IntegrityError(
                f"name record {record.name}: its spec has {label} = {repr(value)[:80]}, which that cannot be; remove "
                "it and build the kernel again",
                key=record.key,
            )


def _fits(label: str, value: Any) -> bool:
    if label in _TEXTS:
        return isinstance(value, str)
    if label in _COUNTS:
        return _is_count(value)
    if label in _PAIRS:
        return isinstance(value, list) and len(value) == 2 and all(_is_count(item) and item > 0 for item in value)
    if label == "problem":
        return value is None or (isinstance(value, Mapping) and all(map(_is_count, value.values())))
    if label == "activation":
        texts = [value.get(key, "") for key in ("kind", "approximate")] if isinstance(value, Mapping) else [value, None]
        return all(isinstance(text, str) for text in texts)
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_tuning(data: bytes, path: str, arch: str) -> None:
    Tuning.from_bytes(data, path, arch)


WELLFORMED = Inspect(check_entry, check_name, _check_tuning)

"""Checks that a store's entries can be used, which digests do not show: anybody can write bytes with the right digest.

The store checks the types of what it reads. What it only keeps (launch records, specs, tuning tables) is checked here,
by the same functions at import, pull, verify and load.
"""

from __future__ import annotations

from fusekit.abi import LaunchRecord, RecordError
from fusekit.abi.elf import check_cubin
from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import IntegrityError
from fusekit.store import Entry, NameRecord
from fusekit.store.documents import parse
from fusekit.store.entries import CARRIED, HOST_DIGITS, HOST_OBJECT, KIND, LAYER, OF_PROGRAMS
from fusekit.store.verify import Inspect


def launch_record(entry: Entry) -> LaunchRecord:
    """The launch record of `entry`; IntegrityError for one that no launcher could use, as for a host object."""
    if entry.fields.get(KIND) == HOST_OBJECT:
        raise IntegrityError(
            f"entry {entry.key} is a host object, which has no launch record; it is loaded by a program that compiles "
            f"it: fusekit exec -- PROGRAM; to launch it by a name: fusekit adopt '*@{entry.key[:HOST_DIGITS]}'",
            key=entry.key,
        )
    if entry.fields.get(KIND) == CARRIED:
        raise IntegrityError(
            f"entry {entry.key} is of the cache of another package, which has no launch records; that package loads it:"
            " fusekit exec --with PACKAGE -- PROGRAM",
            key=entry.key,
        )
    try:
        return LaunchRecord.from_json(dict(entry.launch))
    except RecordError as error:
        remedy = "" if "rebuild" in str(error) else "; build it again"  # of another schema it says so itself
        raise IntegrityError(f"entry {entry.key}: launch record: {error}{remedy}", key=entry.key) from error


def layer_record(entry: Entry, document: bytes) -> LayerRecord:
    """The record of a layer in `document`, the blob of `entry`; IntegrityError for one that no launcher could use."""
    try:
        record = LayerRecord.from_json(parse(document))
        keys = {key for ladder in record.ladders for _, key in ladder if key is not None}
        if record.arch != entry.arch or not keys == record.kernels.keys() == {*entry.launch["kernels"]}:
            raise ValueError("it names other kernels than its entry, or is for another architecture")
    except (RecordError, ValueError) as error:
        raise IntegrityError(f"entry {entry.key}: layer record: {error}; build it again", key=entry.key) from error
    return record


def check_entry(entry: Entry, cubin: bytes | None = None) -> None:
    """Raises IntegrityError unless `entry` has a launch record, of the architecture of its key, and of its `cubin`
    where that is at hand. What `fusekit exec` keeps has none.
    """
    if entry.fields.get(KIND) in OF_PROGRAMS:
        return
    if entry.fields.get(KIND) == LAYER:
        if cubin is not None:
            layer_record(entry, cubin)
        return
    record = launch_record(entry)
    if cubin is not None:
        check_cubin(cubin, [step.symbol for step in record.launches], f"entry {entry.key}")
    if record.arch != entry.arch:
        raise IntegrityError(
            f"entry {entry.key} is for {entry.arch}, its launch record for {record.arch}; build it again", key=entry.key
        )


def _check_tuning(data: bytes, path: str, arch: str) -> None:
    from fusekit.choice.tuning import Tuning

    Tuning.from_bytes(data, path, arch)


def _check_name(record: NameRecord) -> None:
    from fusekit.choice.variants import check_name

    check_name(record)


WELLFORMED = Inspect(check_entry, _check_name, _check_tuning)

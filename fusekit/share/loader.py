"""The member of a bundle for the C loader, after all that Python reads.

It has the flat records, the directory, zeros up to a whole block, and the footer, so that a loader reads it from the
end of the file. The directory gives offset, size and digest of each record and each cubin of the bundle, and the footer
the digest of the directory, which so covers everything that can be loaded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fusekit.abi import LaunchRecord, RecordError
from fusekit.abi.layer_record import LayerRecord
from fusekit.cabi import flat
from fusekit.cabi.layout import CANDIDATE, LAYER_ROW, MAGIC, VERSION
from fusekit.errors import UsageError
from fusekit.share import bundle as form
from fusekit.share.selection import Selection
from fusekit.store import Entry, Store
from fusekit.store.documents import parse
from fusekit.store.entries import KIND, LAYER
from fusekit.store.names import NameRecord


def export_bundle(store: Store, selection: Selection, path: Path) -> form.Transfer:
    """As `fusekit.share.bundle.export_bundle`, with the member for the C loader. A kernel beyond the limits of that
    loader is listed there with the reason, and loads in Python.
    """
    documents = {
        entry.key: store.read_cubin(entry) for entry, _ in selection.entries if entry.fields.get(KIND) == LAYER
    }
    return form.export_bundle(store, selection, path, lambda before: member(selection, before, documents))


def member(
    selection: Selection, before: Mapping[str, int], documents: Mapping[str, bytes] = MappingProxyType({})
) -> tuple[bytes, str]:
    """The loader's member for `selection`; see `derived`."""
    entries = {entry.key: entry for entry, _ in selection.entries}
    names, candidates = (
        [(record, entries[record.key]) for record, _ in signed] for signed in (selection.records, selection.candidates)
    )
    return derived(names, candidates, before, documents)


def derived(
    names: Sequence[tuple[NameRecord, Entry]], candidates: Sequence[tuple[NameRecord, Entry]],
    before: Mapping[str, int], documents: Mapping[str, bytes] = MappingProxyType({}), *, in_place: bool = True,
) -> tuple[bytes, str]:  # fmt: skip
    """The member and the SHA-256 of its directory, derived from names and entries in the bundle's order. candidates:
    earlier builds of the names. before: digest of each cubin -> how many bytes before the member it begins. documents:
    of layers, by key; without them layers are for Python alone. in_place: False for the member that fusekit 0.2 wrote.
    """
    kernels = [*names, *candidates]
    records = [_record(named, entry, in_place) for named, entry in kernels]
    places: dict[str, int] = {}
    for index, (_, entry) in enumerate(kernels):
        if not records[index][1]:
            places.setdefault(entry.key, index)
    for index, (named, entry) in enumerate(names):
        if entry.key in documents:
            records[index] = _layer(named, documents[entry.key], places)
    left = size = sum(len(data) for data, _ in records)
    rows = []
    for index, ((named, entry), (data, problem)) in enumerate(zip(kernels, records, strict=True)):
        arch = flat.of_arch(named.arch) | ({} if index < len(names) else {"major": CANDIDATE})
        rows.append({
            **arch, "name": named.name, "problem": problem, **_place("record", left, data),
            "cubin_before": size + before[entry.cubin_sha256], "cubin_bytes": entry.cubin_bytes,
            "cubin_digest": _words(bytes.fromhex(entry.cubin_sha256)),
        })  # fmt: skip
        left -= len(data)
    directory = flat.encode("the bundle", "directory", [{"kernels": rows}])
    digest = hashlib.sha256(directory)
    footer = {"magic": MAGIC, "version": VERSION, "bytes": len(directory), "digest": _words(digest.digest())}
    end = len(flat.encode("", "footer", [footer]))
    padding = form.padding(size + len(directory) + end)
    footer["before"] = len(directory) + padding + end
    content = [*(data for data, _ in records), directory, bytes(padding), flat.encode("", "footer", [footer])]
    return b"".join(content), digest.hexdigest()


def _record(named: NameRecord, entry: Entry, in_place: bool) -> tuple[bytes, str]:
    """The flat record and no problem, or no bytes and the problem."""
    try:
        launch = LaunchRecord.from_json(dict(entry.launch))
        launch.check_complete()
        if launch.arch != named.arch:
            raise UsageError(f"its launch record is for {launch.arch}")
        return flat.record(named.name, launch, named.defaults, in_place=in_place), ""
    except (RecordError, UsageError, ValueError, OverflowError, struct.error) as error:
        return b"", str(error).removeprefix(f"{named.name}: ")[:200]


def _layer(named: NameRecord, document: bytes, places: Mapping[str, int]) -> tuple[bytes, str]:
    """The row of each kernel of a layer, and the flat record; or no bytes and the problem."""
    try:
        record = LayerRecord.from_json(parse(document))
        keys = sorted({key for ladder in record.parts.values() for _, key in ladder if key is not None})
        if missing := [record.kernels[key].name for key in keys if key not in places]:
            raise UsageError(f"{missing[0]} is not in the bundle as C loads it")
        data = flat.layer(record, keys)
    except (RecordError, UsageError, ValueError, LookupError, OverflowError, struct.error) as error:
        return b"", str(error).removeprefix(f"{named.name}: ")[:200]
    return flat.words([len(keys), *(places[key] for key in keys)]) + data, LAYER_ROW


def _place(what: str, before: int, data: bytes) -> dict[str, Any]:
    digest = _words(hashlib.sha256(data).digest())
    return {f"{what}_before": before, f"{what}_bytes": len(data), f"{what}_digest": digest}


def _words(digest: bytes) -> tuple[int, ...]:
    return struct.unpack("<4q", digest)

"""What a bundle holds for the C loader: one more member, behind all that Python reads.

It is the flat records, one behind the other, the directory, zeros up to a whole block, and the footer, so that a loader
finds it from the end of the file. The directory says where each record and each cubin of the bundle begins, with sizes
and digests, and the footer has the directory's digest: that one stands for everything that can be loaded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusekit.abi import LaunchRecord, RecordError
from fusekit.cabi import flat
from fusekit.cabi.layout import MAGIC, VERSION
from fusekit.errors import UsageError
from fusekit.share import bundle as form
from fusekit.share.selection import Selection
from fusekit.store import Entry, Store
from fusekit.store.names import NameRecord


def export_bundle(store: Store, selection: Selection, path: Path) -> form.Transfer:
    """`fusekit.share.bundle.export_bundle`, for the C loader too. A kernel beyond its limits is listed for it with the
    reason, and is a kernel like others for Python.
    """
    return form.export_bundle(store, selection, path, lambda before: member(selection, before))


def member(selection: Selection, before: Mapping[str, int]) -> tuple[bytes, str]:
    """`derived` of a selection."""
    entries = {entry.key: entry for entry, _ in selection.entries}
    return derived([(record, entries[record.key]) for record, _ in selection.records], before)


def derived(kernels: Sequence[tuple[NameRecord, Entry]], before: Mapping[str, int]) -> tuple[bytes, str]:
    """The member and its directory's SHA-256, which follow from names and entries, both in the bundle's order. before:
    by its digest, how far before the member a cubin begins.
    """
    records = [_record(named, entry) for named, entry in kernels]
    left = size = sum(len(data) for data, _ in records)
    rows = []
    for (named, entry), (data, problem) in zip(kernels, records, strict=True):
        rows.append({
            **flat.of_arch(named.arch), "name": named.name, "problem": problem, **_place("record", left, data),
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


def _record(named: NameRecord, entry: Entry) -> tuple[bytes, str]:
    """The flat record, or nothing and why."""
    try:
        launch = LaunchRecord.from_json(dict(entry.launch))
        launch.check_complete()
        if launch.arch != named.arch:
            raise UsageError(f"its launch record is for {launch.arch}")
        return flat.record(named.name, launch, named.defaults), ""
    except (RecordError, UsageError, ValueError, OverflowError, struct.error) as error:
        return b"", str(error).removeprefix(f"{named.name}: ")[:200]


def _place(what: str, before: int, data: bytes) -> dict[str, Any]:
    digest = _words(hashlib.sha256(data).digest())
    return {f"{what}_before": before, f"{what}_bytes": len(data), f"{what}_digest": digest}


def _words(digest: bytes) -> tuple[int, ...]:
    return struct.unpack("<4q", digest)

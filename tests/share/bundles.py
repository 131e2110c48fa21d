"""Bundles to take apart and put together again."""

import json
import tarfile

import pytest

from fusekit.errors import IntegrityError
from fusekit.share.bundle import END, export_bundle, header, padding
from fusekit.share.bundle_import import import_bundle, open_bundle
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.keys import canonical_json
from tests.store.samples import build_entry, build_record, files

NAMES = ("quickstart/fc1@128x160-c2x1", "quickstart/fc1@128x192-c2x1", "other/fc2@a")


def fill(store):
    for seed, name in enumerate(NAMES):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, name))
    # A second name of the first kernel, and a kernel with the first one's cubin.
    entry, cubin = build_entry(0)
    store.publish_name(build_record(entry, f"quickstart/twin@{'long' * 24}"))
    twin = build_entry(9, cubin)[0]
    store.publish(twin, cubin)
    store.publish_name(build_record(twin, "other/fc1@b"))
    return store


def bundled(store, path):
    export_bundle(store, select(store), path)
    return path


def read_index(path, trust=None):
    """The checked index of the bundle `path`."""
    with open_bundle(path, trust) as reader:
        return reader.index()


def refused(path, into, match, error=IntegrityError, trust=None):
    """It is refused, for that reason, and the store that it was to go into is untouched."""
    before = files(into)
    with pytest.raises(error, match=match):
        import_bundle(Store(into, trust=trust), path)
    assert files(into) == before


def parts(path):
    """A bundle taken apart: (header, name, content) of each member."""
    with tarfile.open(path, "r:") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def put(members, path, end=END):
    """Members, as (name, content) or ready bytes, put together again."""
    data = b""
    for member in members:
        if isinstance(member, bytes):
            data += member
        else:
            name, content = member
            data += header(name, len(content)) + content + bytes(padding(len(content)))
    path.write_bytes(data + end)
    return path


def with_index(path, change):
    """The bundle with its index changed by `change(document)`, everything else as it was."""
    (name, index), *rest = parts(path)
    document = json.loads(index)
    change(document)
    return put([(name, (canonical_json(document) + "\n").encode()), *rest], path)

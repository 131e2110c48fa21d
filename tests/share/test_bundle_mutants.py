"""Bundles whose digests were all made anew after something in them was changed: what only their contents tell."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from fusekit.errors import FusekitError, IntegrityError
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share import bundle as form
from fusekit.share import loader as loading
from fusekit.share.bundle_import import import_bundle
from fusekit.share.selection import Selection, select
from fusekit.store import Store
from fusekit.store.documents import seal
from tests.conftest import PARTS
from tests.store.samples import build_entry, build_record

SPEC = {"op": "dense-gemm", "tile": [128, 128], "cluster": [2, 1], "problem": {"E": 1, "M": 8, "N": 8, "K": 8}}


@pytest.fixture
def store(tmp_path):
    """Two kernels, of one cubin each."""
    store = Store(tmp_path / "store")
    for number, name in enumerate(("quickstart/fc1@a", "quickstart/fc1@b")):
        entry, cubin = build_entry(number)
        store.publish(entry, cubin)
        store.publish_name(dataclasses.replace(build_record(entry, name), spec=SPEC, defaults={"cluster_margin": 0}))
    return store


def exchanged(selection: Selection) -> Selection:
    """The kernels of both names exchanged."""
    (first, one), (second, other) = selection.records
    swapped = ((dataclasses.replace(first, key=second.key), one), (dataclasses.replace(second, key=first.key), other))
    return dataclasses.replace(selection, records=swapped)


def refused(path: Path, text: str) -> None:
    target = path.with_suffix(".store")
    with pytest.raises(IntegrityError, match=text):
        import_bundle(Store(target), path)
    assert not target.exists()


def test_what_c_reads_says_the_same_as_what_python_reads(store, tmp_path):
    """A directory and digests of its own: variants exchanged, a kernel of which C is told that it has none."""
    selection, path = select(store), tmp_path / "k.tar"
    loading.export_bundle(store, selection, path)
    assert import_bundle(Store(tmp_path / "good"), path).names == 2
    form.export_bundle(store, selection, path, lambda before: loading.member(exchanged(selection), before))
    refused(path, "has a loader.bin that does not follow from its entries and names: .*; export it again")
    fewer = dataclasses.replace(selection, records=selection.records[:1])
    form.export_bundle(store, selection, path, lambda before: loading.member(fewer, before))
    refused(path, "has a loader.bin that does not follow")


def test_any_changed_word_of_what_c_reads_is_seen(store, tmp_path, soak, soak_part):
    selection, source = select(store), random.Random(f"loader {soak_part}")
    for number in range(2000 // PARTS if soak else 40):
        path = tmp_path / f"{number}.tar"

        def changed(before):
            data = bytearray(loading.member(selection, before)[0])
            place = source.randrange(0, len(data), 8)
            data[place : place + 8] = (int.from_bytes(data[place : place + 8], "little") ^ 1 << source.randrange(64)
                                       ).to_bytes(8, "little")  # fmt: skip
            return bytes(data), "any"

        form.export_bundle(store, selection, path, changed)
        refused(path, "has a loader.bin that does not follow")
        path.unlink()


VALUES = (
    None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 1.5, "", "x", "a\0b", "\ud800", "a\nfusekit: fine", [], {}, [0],
    ["mul", "M", 2**62], {"kind": "tensor"},
)  # fmt: skip


def mutate(value, source):
    """The JSON value with one of its parts replaced, removed, or put in twice."""
    places = []

    def walk(inside):
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                walk(inside[key])

    walk(value)
    inside, key = source.choice(places)
    way = source.randrange(4)
    if way == 0:
        del inside[key]
    elif way == 1 and isinstance(inside, dict):
        inside[f"{key}_"] = inside[key]
    elif way == 1:
        inside.append(inside[key])
    else:
        inside[key] = source.choice(VALUES)
    return value


def test_documents_that_were_changed_and_sealed_again(store, tmp_path, soak, soak_part):
    """Each is refused whole in words of one line, or makes a store in which nothing is wrong."""
    selection, source = select(store), random.Random(f"documents {soak_part}")
    taken = 0
    for number in range(3000 // PARTS if soak else 80):
        kind = source.choice(("entries", "records"))
        items = list(getattr(selection, kind))
        index = source.randrange(len(items))
        document, signed = items[index]
        value = json.loads(signed.data)
        value.pop("digest")
        try:
            data = seal(mutate(value, source), "it")
        except (FusekitError, TypeError):
            continue
        items[index] = (document, dataclasses.replace(signed, data=data))
        path, target = tmp_path / f"{number}.tar", tmp_path / f"{number}"
        form.export_bundle(store, dataclasses.replace(selection, **{kind: tuple(items)}), path)
        try:
            import_bundle(Store(target), path, inspect=WELLFORMED)
        except FusekitError as error:
            assert "\n" not in str(error)
            assert not target.exists()
        else:
            taken += 1
            assert Store(target).verify(full=True, inspect=WELLFORMED).bad == ()
        path.unlink()
    assert taken

"""Nothing wrong is ever loaded: every kind of damage to every kind of file is refused, and verify finds it."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.errors import IntegrityError, SignatureError
from fusekit.share.selection import select, sign_selection
from fusekit.store import Store
from fusekit.store.documents import seal, unseal
from fusekit.store.keys import canonical_json
from fusekit.store.signature import Trust, generate
from tests.store.samples import build_entry, build_record, replant

NAME = "quickstart/fc1@128x160-c2x1"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    for seed in range(2):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, f"quickstart/fc{seed + 1}@128x160-c2x1"))
    return store


def files(store):
    (entry, _), root = build_entry(), store.roots[0]
    return {
        "blob": root.blob_path(entry.cubin_sha256),
        "entry": root.entry_path(entry.key),
        "name": root.name_path(NAME, "sm_90a"),
    }


def load(store):
    record = store.find_name(NAME, "sm_90a")
    return None if record is None else store.load(record.key)


def flip(path, other):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path, other):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path, other):
    path.write_bytes(b"")


def append(path, other):
    path.write_bytes(path.read_bytes() + b"\n")


def zeros(path, other):
    path.write_bytes(bytes(path.stat().st_size))


def over_long(path, other):
    with path.open("r+b") as file:
        file.truncate(1 << 36)


def swap(path, other):
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def link(path, other):
    path.unlink()
    path.symlink_to(other)


def link_to_the_same(path, other):
    moved = path.rename(path.with_suffix(".moved"))
    path.symlink_to(moved)


def fifo(path, other):
    path.unlink()
    os.mkfifo(path)


def directory(path, other):
    path.unlink()
    path.mkdir()


DAMAGES = [flip, cut, empty, append, zeros, over_long, swap, link, link_to_the_same, fifo, directory]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["blob", "entry", "name"])
def test_damage_is_refused(store, kind, damage):
    root = store.roots[0]
    other_entry, _ = build_entry(1)
    others = {
        "blob": root.blob_path(other_entry.cubin_sha256),
        "entry": root.entry_path(other_entry.key),
        "name": root.name_path("quickstart/fc2@128x160-c2x1", "sm_90a"),
    }
    path = files(store)[kind]
    for target in (path, others[kind]):
        target.chmod(0o644)
    damage(path, others[kind])
    with pytest.raises(IntegrityError) as caught:
        load(store)
    assert str(path) in str(caught.value)
    assert "remove it" in str(caught.value)
    bad = store.verify(full=True).bad
    assert path in [problem.path for problem in bad] or str(path) in " ".join(problem.problem for problem in bad)


@pytest.mark.parametrize("kind", ["blob", "entry"])
def test_what_is_missing_behind_a_name_is_no_result(store, kind):
    files(store)[kind].unlink()
    if kind == "blob":
        with pytest.raises(IntegrityError, match="in no root of the store"):
            load(store)
    else:
        assert load(store) is None
    assert store.verify().bad


def test_the_quick_check_compares_sizes_and_the_full_one_hashes(store):
    path = files(store)["blob"]
    path.chmod(0o644)
    flip(path, None)
    assert not store.verify().bad
    (problem,) = store.verify(full=True).bad
    assert problem.key == build_entry()[0].key
    cut(path, None)
    for full in (False, True):  # and says it once
        (problem,) = store.verify(full=full).bad
        assert problem.key == build_entry()[0].key


@pytest.mark.parametrize("damage", [link, fifo, directory])
@pytest.mark.parametrize("full", [False, True])
def test_what_is_no_plain_file_in_the_place_of_a_cubin_is_said_once(store, damage, full):
    path = files(store)["blob"]
    damage(path, store.root)
    (problem,) = store.verify(full=full).bad
    assert (problem.key, problem.path) == (build_entry()[0].key, path)


def test_the_cubin_of_a_damaged_entry_is_not_called_unused(store):
    flip(files(store)["entry"], None)
    report = store.verify(full=True)
    assert (len(report.bad), report.orphans) == (1, 0)


def test_swapped_launch_records(store, tmp_path):
    """As they lie there, and by somebody who writes new digests: that is what signatures are for."""
    generate(tmp_path / "key")
    signed = Store(store.root, signing_key=tmp_path / "key")
    sign_selection(signed, select(signed))
    paths = [store.roots[0].entry_path(build_entry(seed)[0].key) for seed in range(2)]
    documents = [unseal(path.read_bytes(), path) for path in paths]
    records = [canonical_json(document["launch"]).encode() for document in documents]
    for path, record, other in zip(paths, records, reversed(records), strict=True):
        path.chmod(0o644)
        data = path.read_bytes()
        assert data.count(record) == 1
        path.write_bytes(data.replace(record, other))
    for seed in range(2):
        with pytest.raises(IntegrityError, match="does not have the digest"):
            store.load(build_entry(seed)[0].key)
    for path, document, other in zip(paths, documents, reversed(documents), strict=True):
        path.write_bytes(seal(document | {"launch": other["launch"]}, "entry"))
    trusting = Store(store.root, trust=Trust([tmp_path / "key.pub"]))
    for seed in range(2):
        with pytest.raises(SignatureError, match="is not signed"):
            trusting.load(build_entry(seed)[0].key)
    assert len(trusting.verify().bad) == 2


def test_an_entry_under_another_key(store):
    (entry, _), (other, _) = build_entry(0), build_entry(1)
    root = store.roots[0]
    shutil.copy(root.entry_path(other.key), root.entry_path(entry.key).with_suffix(".new"))
    root.entry_path(entry.key).with_suffix(".new").replace(root.entry_path(entry.key))
    with pytest.raises(IntegrityError, match=f"is the entry of key {other.key}"):
        store.find_entry(entry.key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["fields"].update({"spec.tile": "[64,64]"}), "key fields whose key is"),
        (lambda d: d.update(schema=True), "schema of type bool"),
        (lambda d: d.update(key="0" * 64), "entry of key 000"),
        (lambda d: d.pop("proof"), "members: proof"),
        (lambda d: d.update(zzz=1), "members: zzz"),
        (lambda d: d.update(launch=[]), "launch of type list"),
        (lambda d: d["launch"].update(arch="sm_100a"), "sm_100a under a key for sm_90a"),
        (lambda d: d["fields"].update(arch=90), "not strings"),
        (lambda d: d["fields"].pop("arch"), "no field 'arch'"),
        (lambda d: d["cubin"].update(sha256="../../../etc/passwd"), "names its cubin by"),
        (lambda d: d["cubin"].update(bytes=-1), "-1 bytes"),
        (lambda d: d["cubin"].update(bytes=1 << 40), "1099511627776 bytes"),
        (lambda d: d["cubin"].update(bytes=True), "True bytes"),
        (lambda d: d["cubin"].update(path="x"), "names its cubin by"),
        (lambda d: d.update(seconds=1), "seconds of type int"),
    ],
)
def test_a_sealed_entry_that_makes_no_sense(store, change, message):
    path = files(store)["entry"]
    replant(path, change)
    with pytest.raises(IntegrityError, match=message):
        store.find_entry(build_entry()[0].key)
    assert message in store.verify().bad[0].problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(name="quickstart/fc2@128x160-c2x1"), "record of quickstart/fc2"),
        (lambda d: d.update(arch="sm_100a"), "for sm_100a"),
        (lambda d: d.update(key="x"), "has the key 'x'"),
        (lambda d: d["defaults"].update(act_alpha="1"), "not a number"),
        (lambda d: d["defaults"].update(act_alpha=True), "not a number"),
        (lambda d: d.update(extra=1), "members: extra"),
    ],
)
def test_a_sealed_name_that_makes_no_sense(store, change, message):
    replant(files(store)["name"], change)
    with pytest.raises(IntegrityError, match=message):
        store.find_name(NAME, "sm_90a")
    assert message in store.verify().bad[0].problem


def test_a_name_for_another_architecture_than_its_entry(store):
    replant(files(store)["name"], lambda d: d.update(arch="sm_100a"))
    path = files(store)["name"]
    path.rename(path.with_name(path.name.replace("sm_90a", "sm_100a")))
    (problem,) = store.verify().bad
    assert "is for sm_100a, its entry for sm_90a" in problem.problem


def test_a_name_that_leads_nowhere(store):
    replant(files(store)["name"], lambda d: d.update(key="0" * 64))
    (problem,) = store.verify().bad
    assert "which no root holds" in problem.problem


def test_strange_files_are_found(store):
    root = store.root
    (root / "entries" / "zz").mkdir()
    (root / "entries" / "zz" / "notes.txt").write_text("x")
    (root / "blobs" / "sha256" / "zz").mkdir()
    (root / "blobs" / "sha256" / "zz" / "x").write_text("x")
    (root / "names" / "quickstart" / "x.json").write_text("{}")
    (root / "names" / "stray").write_text("x")
    assert len(store.verify().bad) == 3
    assert [listed.record.name for listed in store.names()] == [
        "quickstart/fc1@128x160-c2x1",
        "quickstart/fc2@128x160-c2x1",
    ]
    assert len(store.listing("*").problems) == 1


def test_leftovers_are_counted_but_are_no_damage(store):
    path = files(store)["entry"]
    path.with_name(f".{path.name}.1-abc.tmp").write_bytes(b"{")
    path.unlink()
    files(store)["name"].unlink()
    report = store.verify(full=True)
    assert (report.bad, report.temporaries, report.orphans) == ((), 1, 1)


@pytest.fixture(scope="module")
def one():
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        entry, cubin = build_entry()
        store.publish(entry, cubin)
        store.publish_name(build_record(entry))
        yield store


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(["blob", "entry", "name"]), data=st.data())
def test_any_changed_byte_is_seen(one, kind, data):
    path = files(one)[kind]
    good = path.read_bytes()
    path.chmod(0o644)
    place = data.draw(st.integers(0, len(good) - 1))
    other = data.draw(st.integers(1, 255))
    path.write_bytes(good[:place] + bytes([good[place] ^ other]) + good[place + 1 :])
    try:
        with pytest.raises(IntegrityError):
            load(one)
    finally:
        path.write_bytes(good)
    assert load(one) is not None


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode) | st.just(b"[" * 100_000) | st.just(b"9" * 5000))
def test_no_bytes_make_the_reader_fail_otherwise(data):
    with pytest.raises(IntegrityError):
        unseal(data, Path("file"))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.text().filter(lambda name: name != "digest"), values))
def test_what_is_sealed_is_unsealed(document):
    document["schema"] = 1
    assert unseal(seal(document, "test"), Path("file")) == document

"""A writable store over read-only ones."""

import pytest

from fusekit.config import Config
from fusekit.errors import IntegrityError
from fusekit.store import Store
from tests.store.samples import cut


@pytest.fixture
def store(tmp_path, make_entry, make_record):
    """Three stores with the same entry and name; the last has one more."""
    roots = [tmp_path / name for name in ("own", "site", "system")]
    for root in roots:
        store = Store(root)
        store.publish(*make_entry())
        store.publish_name(make_record(make_entry()[0]))
    store.publish(*make_entry(5))
    store.publish_name(make_record(make_entry(5)[0], "other/fc2@64x64-c1x1"))
    return Store(roots[0], roots[1:])


def test_opened_from_a_configuration(tmp_path):
    store = Store.open(Config(store=tmp_path / "a", read_only_roots=(tmp_path / "b", tmp_path / "c")))
    assert [root.path.name for root in store.roots] == ["a", "b", "c"]


def test_a_lower_root_is_found_and_nothing_is_copied(store, make_entry):
    entry, cubin = make_entry(5)
    assert store.load(entry.key) == (entry, cubin)
    assert Store(store.root).find_entry(entry.key) is None


def test_the_first_root_that_has_it_is_named(store):
    found = {listed.record.name: listed.root.name for listed in store.names()}
    assert found == {"quickstart/fc1@128x160-c2x1": "own", "other/fc2@64x64-c1x1": "system"}


@pytest.mark.parametrize("kind", ["blob", "entry", "name"])
def test_a_bad_file_does_not_hide_a_good_one_below(store, make_entry, make_record, kind):
    entry, cubin = make_entry()
    record = make_record(entry)

    def path(root):
        return {
            "blob": root.blob_path(entry.cubin_sha256),
            "entry": root.entry_path(entry.key),
            "name": root.name_path(record.name, record.arch),
        }[kind]

    for root in store.roots[:2]:
        cut(path(root))
    assert store.find_name(record.name, record.arch) == record
    assert store.load(entry.key) == (entry, cubin)
    assert store.read_cubin(entry) == cubin
    assert [listed.root.name for listed in store.names("quickstart")] == ["system" if kind == "name" else "own"]
    cut(path(store.roots[2]))
    with pytest.raises(IntegrityError, match="own"):
        store.find_name(record.name, record.arch) if kind == "name" else store.load(entry.key)


def test_an_entry_with_its_own_cubin_below_one_that_lost_it(tmp_path, make_entry):
    upper, lower = Store(tmp_path / "a"), Store(tmp_path / "b")
    first, cubin = make_entry()
    second, other = make_entry(cubin=b"the same kernel, other bytes")
    upper.publish(first, cubin)
    lower.publish(second, other)
    upper.roots[0].blob_path(first.cubin_sha256).unlink()
    assert Store(tmp_path / "a", [tmp_path / "b"]).load(first.key) == (second, other)


def test_a_name_may_lead_to_an_entry_in_a_lower_root(store, make_entry, make_record):
    record = make_record(make_entry(5)[0], "mine/fc2@64x64-c1x1")
    store.publish_name(record)
    assert store.find_name(record.name, record.arch) == record
    assert not store.verify(full=True).bad


def test_a_root_that_is_not_there_is_empty(tmp_path, make_entry):
    store = Store(tmp_path / "a", [tmp_path / "gone"])
    entry, cubin = make_entry()
    store.publish(entry, cubin)
    assert store.load(entry.key) == (entry, cubin)
    assert not (tmp_path / "gone").exists()


def test_verify_says_which_root(store, make_entry):
    cut(store.roots[1].entry_path(make_entry()[0].key))
    (problem,) = store.verify().bad
    assert problem.root == store.roots[1].path
    assert problem.key == make_entry()[0].key


def test_only_the_writable_store_is_written(store, make_entry, make_record):
    before = {path: path.stat().st_mtime_ns for root in store.roots[1:] for path in root.path.rglob("*")}
    entry, cubin = make_entry(9)
    store.publish(entry, cubin)
    store.publish_name(make_record(entry))
    with store.lock(entry.key):
        pass
    assert before == {path: path.stat().st_mtime_ns for root in store.roots[1:] for path in root.path.rglob("*")}


def test_a_kernel_is_copied_up_when_asked(store, make_entry, make_record):
    entry, cubin = make_entry(5)
    record = store.find_name("other/fc2@64x64-c1x1", "sm_90a")
    assert store.adopt(record)
    assert not store.adopt(record)
    own = Store(store.root)
    assert own.load(entry.key) == (entry, cubin)
    assert own.find_name(record.name, record.arch) == record
    assert not own.verify(full=True).bad


def test_only_what_is_whole_is_copied_up(store, make_entry):
    entry, _ = make_entry(5)
    record = store.find_name("other/fc2@64x64-c1x1", "sm_90a")
    cut(store.roots[2].blob_path(entry.cubin_sha256))
    with pytest.raises(IntegrityError):
        store.adopt(record)
    assert Store(store.root).find_entry(entry.key) is None


def test_a_name_that_a_lower_root_has_is_not_copied(store, make_entry, make_record):
    store.publish_name(make_record(make_entry(5)[0], "other/fc2@64x64-c1x1"))
    assert Store(store.root).find_name("other/fc2@64x64-c1x1", "sm_90a") is None

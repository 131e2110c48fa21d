"""A writable store over read-only ones."""

import pytest

from fusekit.config import Config
from fusekit.errors import IntegrityError
from fusekit.store import Store
from tests.store.samples import cut


@pytest.fixture
def layers(tmp_path, make_entry, make_record):
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
    store = Store.open(Config(store=tmp_path / "a", layers=(tmp_path / "b", tmp_path / "c")))
    assert [layer.root.name for layer in store.layers] == ["a", "b", "c"]


def test_a_lower_layer_is_found_and_nothing_is_copied(layers, make_entry):
    entry, cubin = make_entry(5)
    assert layers.load(entry.key) == (entry, cubin)
    assert Store(layers.root).find_entry(entry.key) is None


def test_the_first_layer_that_has_it_is_named(layers):
    found = {listed.record.name: listed.layer.name for listed in layers.names()}
    assert found == {"quickstart/fc1@128x160-c2x1": "own", "other/fc2@64x64-c1x1": "system"}


@pytest.mark.parametrize("kind", ["blob", "entry", "name"])
def test_a_bad_file_does_not_hide_a_good_one_below(layers, make_entry, make_record, kind):
    entry, cubin = make_entry()
    record = make_record(entry)

    def path(layer):
        return {
            "blob": layer.blob_path(entry.cubin_sha256),
            "entry": layer.entry_path(entry.key),
            "name": layer.name_path(record.name, record.arch),
        }[kind]

    for layer in layers.layers[:2]:
        cut(path(layer))
    assert layers.find_name(record.name, record.arch) == record
    assert layers.load(entry.key) == (entry, cubin)
    assert layers.read_cubin(entry) == cubin
    assert [listed.layer.name for listed in layers.names("quickstart")] == ["system" if kind == "name" else "own"]
    cut(path(layers.layers[2]))
    with pytest.raises(IntegrityError, match="own"):
        layers.find_name(record.name, record.arch) if kind == "name" else layers.load(entry.key)


def test_an_entry_with_its_own_cubin_below_one_that_lost_it(tmp_path, make_entry):
    upper, lower = Store(tmp_path / "a"), Store(tmp_path / "b")
    first, cubin = make_entry()
    second, other = make_entry(cubin=b"the same kernel, other bytes")
    upper.publish(first, cubin)
    lower.publish(second, other)
    upper.layers[0].blob_path(first.cubin_sha256).unlink()
    assert Store(tmp_path / "a", [tmp_path / "b"]).load(first.key) == (second, other)


def test_a_name_may_lead_to_an_entry_in_a_lower_layer(layers, make_entry, make_record):
    record = make_record(make_entry(5)[0], "mine/fc2@64x64-c1x1")
    layers.publish_name(record)
    assert layers.find_name(record.name, record.arch) == record
    assert not layers.verify(full=True).bad


def test_a_layer_that_is_not_there_is_empty(tmp_path, make_entry):
    store = Store(tmp_path / "a", [tmp_path / "gone"])
    entry, cubin = make_entry()
    store.publish(entry, cubin)
    assert store.load(entry.key) == (entry, cubin)
    assert not (tmp_path / "gone").exists()


def test_verify_says_which_layer(layers, make_entry):
    cut(layers.layers[1].entry_path(make_entry()[0].key))
    (problem,) = layers.verify().bad
    assert problem.layer == layers.layers[1].root
    assert problem.key == make_entry()[0].key


def test_only_the_writable_store_is_written(layers, make_entry, make_record):
    before = {path: path.stat().st_mtime_ns for layer in layers.layers[1:] for path in layer.root.rglob("*")}
    entry, cubin = make_entry(9)
    layers.publish(entry, cubin)
    layers.publish_name(make_record(entry))
    with layers.lock(entry.key):
        pass
    assert before == {path: path.stat().st_mtime_ns for layer in layers.layers[1:] for path in layer.root.rglob("*")}


def test_a_kernel_is_copied_up_when_asked(layers, make_entry, make_record):
    entry, cubin = make_entry(5)
    record = layers.find_name("other/fc2@64x64-c1x1", "sm_90a")
    assert layers.adopt(record)
    assert not layers.adopt(record)
    own = Store(layers.root)
    assert own.load(entry.key) == (entry, cubin)
    assert own.find_name(record.name, record.arch) == record
    assert not own.verify(full=True).bad


def test_only_what_is_whole_is_copied_up(layers, make_entry):
    entry, _ = make_entry(5)
    record = layers.find_name("other/fc2@64x64-c1x1", "sm_90a")
    cut(layers.layers[2].blob_path(entry.cubin_sha256))
    with pytest.raises(IntegrityError):
        layers.adopt(record)
    assert Store(layers.root).find_entry(entry.key) is None


def test_a_name_that_a_lower_layer_has_is_not_copied(layers, make_entry, make_record):
    layers.publish_name(make_record(make_entry(5)[0], "other/fc2@64x64-c1x1"))
    assert Store(layers.root).find_name("other/fc2@64x64-c1x1", "sm_90a") is None

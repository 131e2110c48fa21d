"""The record of a layer in a store: published once, closed under all that moves and removes kernels."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusekit.abi.layer_record import LayerRecord
from fusekit.choice.tuning import Row, Tuning, features
from fusekit.compiler.layers import Layer, publish_layer
from fusekit.errors import IntegrityError
from fusekit.layers import record_of
from fusekit.plan.layer import program
from fusekit.runtime.wellformed import WELLFORMED, check_entry
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.selection import select
from fusekit.share.source import bundle_source
from fusekit.store import Store
from fusekit.store.keys import sha256
from fusekit.store.names import layer_record
from tests.layers.samples import library, records
from tests.plan.test_layer_program import CASES, options
from tests.store.collecting import age

NAME = layer_record("layers/moe")


@pytest.fixture
def store(tmp_path):
    return library(tmp_path / "store", options(**CASES["plain"]))[0].store


def kernels(store):
    return store.kernels_of(store.find_name(NAME, "sm_90a"))


def test_a_record_is_published_once(store):
    layer = Layer(options(**CASES["plain"]), "sm_90a", ())
    before = store.find_name(NAME, "sm_90a")
    assert not publish_layer(store, layer)
    assert publish_layer(store, replace(layer, summary="other")), "its inputs differ"
    assert store.find_name(NAME, "sm_90a").key != before.key


def test_a_table_that_is_measured_later_makes_a_new_record_of_the_same_kernels(tmp_path):
    opened, _ = library(tmp_path / "store", options(**CASES["plain"]), variants=2)
    store, layer = opened.store, Layer(options(**CASES["plain"]), "sm_90a", ())
    before = opened.layer("layers/moe").record
    assert not before.tuning
    specs = {each.record.name.partition("@")[2]: each.record for each in store.names("layers/moe.fc2")}
    entries = [path.stem for path in (store.root / "entries").glob("*/*")]
    for variant, record in specs.items():
        problem = program(layer.options).parts["fc2"]["problem"]
        table = Tuning("sm_90a", (Row("FAKE H200", features(record.spec), problem, ((variant, None),)),)).to_bytes()
        store.publish_tuning("sm_90a", table)
        published = publish_layer(store, layer)
        after = opened.layer("layers/moe").record
        assert after.kernels[after.kernel("fc2", layer.options.tokens)].name == record.name
        assert after.tuning == {"store": {"sha256": sha256(table), "parts": after.tuning["store"]["parts"]}}
        assert "fc2" in after.tuning["store"]["parts"]
        assert not publish_layer(store, layer), "the table is the same"
        entries.append(published.key)
        assert {path.stem for path in (store.root / "entries").glob("*/*")} == {*entries}, "no kernel is new"


def test_a_device_that_was_measured_has_ladders_of_its_own(tmp_path):
    opened, _ = library(tmp_path / "store", options(**CASES["plain"]), variants=2)
    store, layer = opened.store, Layer(options(**CASES["plain"]), "sm_90a", ())
    specs = {each.record.name.partition("@")[2]: each.record for each in store.names("layers/moe.fc2")}
    here, (one, other) = opened.devices.get(0).name, specs
    problem = program(layer.options).parts["fc2"]["problem"]
    rows = [
        Row(device, features(specs[best].spec), problem, ((best, None),))
        for device, best in (("Another GPU", one), (here, other))
    ]
    store.publish_tuning("sm_90a", Tuning("sm_90a", tuple(rows)).to_bytes())
    assert publish_layer(store, layer)
    record, tokens = record_of(store, "layers/moe"), layer.options.tokens
    assert LayerRecord.from_json(record.to_json()) == record
    assert record.kernels[record.kernel("fc2", tokens)].name == specs[one].name
    assert opened.layer("layers/moe").kernel_name("fc2", tokens) == specs[other].name
    assert {specs[one].key, specs[other].key} <= record.kernels.keys(), "what moves a layer moves both"
    assert record.devices.keys() == {here} and record.for_device("A third GPU").parts == record.parts


def test_a_layer_that_lacks_a_kernel_has_no_record(store):
    (fc2,) = store.names("layers/moe.fc2")
    store.discard([(fc2.record.name, "sm_90a"), (NAME, "sm_90a")])
    assert not publish_layer(store, Layer(options(**CASES["plain"]), "sm_90a", ()))
    assert store.find_name(NAME, "sm_90a") is None


def test_listings_of_kernels_leave_records_out(store):
    assert NAME not in {listed.record.name for listed in store.names()}
    assert NAME in {name for name, _ in store.recorded("layers/moe")}
    assert NAME not in str(store.not_built("layers/other"))


def test_a_bundle_of_a_record_has_its_kernels(store, tmp_path):
    bundle = tmp_path / "moe.bundle"
    export_bundle(store, select(store, ["layers/moe.layer"]), bundle)
    other = Store(tmp_path / "other")
    with bundle.open("rb") as file:
        import_bundle(other, bundle_source(str(bundle), file), inspect=WELLFORMED)
    assert all(other.present(key) for key in kernels(other)) and kernels(other) == kernels(store)
    assert not other.verify(True, WELLFORMED).bad


def test_a_collection_keeps_what_a_layer_names(store):
    for path in (store.root / "used").glob("*/*"):
        path.unlink()
    for number, path in enumerate(sorted((store.root / "entries").glob("*/*"))):
        age(path, 10_000 + 1000 * number)
    for path in (store.root / "blobs").glob("*/*/*"):
        age(path, 100_000)
    named = kernels(store)  # marks nothing
    assert store.collect(max_age=15_000).removed == 0, "one of its kernels was used since"
    total = sum(path.stat().st_size for path in store.root.glob("[ben]*/**/*") if path.is_file())
    report = store.collect(max_bytes=total - 1)
    assert report.removed and store.find_name(NAME, "sm_90a") is None, "the layer goes before its kernels"
    assert sum(store.present(key, mark=False) is not None for key in named) >= len(named) - report.removed


def test_removing_a_layer_removes_its_record(store):
    store.discard([*store.recorded("layers/moe")])
    assert not store.recorded()


def test_a_kernel_that_a_layer_names_stays_without_its_own_name(store):
    (fc2,) = store.names("layers/moe.fc2")
    report = store.discard([(fc2.record.name, "sm_90a")])
    assert report.shared == {fc2.record.key: [(NAME, "sm_90a")]} and store.present(fc2.record.key)
    assert not store.names("layers/moe.fc2")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda document: document.pop("passes"), "passes: missing"),
        (lambda document: document["kernels"].popitem(), "it names other kernels than its entry"),
        (lambda document: document["must"].append("graphs"), "launching this layer needs graphs"),
    ],
)
def test_a_damaged_document_is_refused(store, change, text):
    entry, data = store.load(store.find_name(NAME, "sm_90a").key)
    document = json.loads(data)
    check_entry(entry, data)
    change(document)
    with pytest.raises(IntegrityError, match=text):
        check_entry(entry, json.dumps(document).encode())


def test_files_of_a_record_are_those_of_a_kernel(store):
    record = store.find_name(NAME, "sm_90a")
    assert Path(store.root / "names" / "layers" / "moe.layer@record.sm_90a.json").is_file()
    assert record.spec["options"]["topk"] == options(**CASES["plain"]).topk


LAUNCH = """
import sys, types
from pathlib import Path
sys.path.insert(0, {tests!r})
from fusekit.config import Config
from fusekit.library import open_library
from fusekit.runtime import Driver
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike

given = {{"bf16": "torch.bfloat16", "f32": "torch.float32", "i32": "torch.int32"}}
library = open_library(Config(store=Path({store!r})), driver=Driver(FakeDriver(symbol="", others={kernels!r})))
layer = library.layer("layers/moe")
sizes = layer.sizes(40)
dims, memory = layer.dims(40), {{}}
for number, (name, buffer) in enumerate((layer.inputs("forward") | layer.outputs("forward")).items(), start=1):
    memory[name] = Torchlike(buffer.extents(dims), given[buffer.dtype], 0x100_0000 * number)
kept = Torchlike((sizes.kept,), "torch.uint8", 0x7000_0000)
scratch = Torchlike((sizes.scratch,), "torch.uint8", 0x8000_0000)
layer.bind_forward(**memory, kept=kept, scratch=scratch)(0)
assert library.devices.driver.api.launches
heavy = ("fusekit.plan", "fusekit.choice", "fusekit.spec", "fusekit.compiler", "numpy", "torch", "cutlass")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_a_launch_of_a_layer_computes_nothing_again(tmp_path):
    """The record is all that it reads: no program, no choice of variants."""
    table = options(**CASES["plain"])
    store = library(tmp_path / "store", table)[0].store
    symbols = {
        record.symbol: [(each.offset, each.size) for each in record.parameters] for record in records(table).values()
    }
    code = LAUNCH.format(tests=str(Path(__file__).parents[2]), store=str(store.root), kernels=symbols)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr

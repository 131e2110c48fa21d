"""explain: hit, miss with the fields that differ, damage; on the packaged specs, without compiling."""

import json
from dataclasses import replace
from importlib import metadata

import pytest

from fusekit.abi import LaunchRecord
from fusekit.compiler.identity import key_fields_for
from fusekit.spec import find
from fusekit.store import NameRecord, Store, key_of
from fusekit_cli.main import main
from tests.store.samples import build_entry

SPEC = find(["quickstart"])[0]
RECORD = LaunchRecord(SPEC.arch, (), (), (), (1, 1, 1), (32, 1, 1), symbol="kernel")


@pytest.fixture
def explain(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("FUSEKIT_STORES", raising=False)

    def run(*arguments, code=0):
        assert main(["explain", "--store", str(tmp_path), *arguments]) == code
        return capsys.readouterr()

    return run


def fill(root, change=lambda fields: fields):
    """Publish something under the key that SPEC has, or had before `change`."""
    fields = change(key_fields_for(SPEC))
    entry, cubin = build_entry()
    entry = replace(entry, key=key_of(fields), fields=fields, launch=RECORD.to_json())
    store = Store(root)
    store.publish(entry, cubin)
    store.publish_name(NameRecord(SPEC.full_name, SPEC.arch, entry.key, SPEC.canonical(), SPEC.defaults()))
    return entry


def test_a_miss(explain):
    document = json.loads(explain(SPEC.full_name, "--json").out)
    assert (document["name"], document["status"], document["differs"]) == (SPEC.full_name, "miss", [])
    assert document["key"] == key_of(key_fields_for(SPEC))


def test_a_hit(explain, tmp_path):
    entry = fill(tmp_path)
    document = json.loads(explain(SPEC.full_name, "--json").out)
    assert (document["status"], document["key"], document["differs"]) == ("hit", entry.key, [])


def test_what_differs(explain, tmp_path):
    fields = key_fields_for(SPEC)
    source = next(label for label in fields if label.startswith("source."))
    extra = "toolchain.nvidia-cutlass-dsl-libs-extra"
    fill(tmp_path, lambda fields: fields | {"spec.tile": "[64,64]", extra: "1.0", source: "0" * 64})
    document = json.loads(explain(SPEC.full_name, "--json").out)
    assert document["status"] == "miss"
    differs = {row["field"]: (row["stored"], row["now"]) for row in document["differs"]}
    assert differs == {
        "spec.tile": ("[64,64]", fields["spec.tile"]),
        extra: ("1.0", None),
        source: ("0" * 64, fields[source]),
    }
    out = explain(SPEC.full_name).out
    assert "spec.tile" in out
    assert "(absent)" in out


def test_without_the_compiler_the_rest_is_compared(explain, tmp_path, monkeypatch):
    fill(tmp_path, lambda fields: fields | {"spec.tile": "[64,64]"})
    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    captured = explain("quickstart", "--json")
    documents = json.loads(captured.out)
    assert {(document["status"], document["key"]) for document in documents} == {("unknown", None)}
    assert [row["field"] for row in documents[0]["differs"]] == ["spec.tile"]
    assert "the store has no kernel of this name" in documents[1]["reason"]
    assert "pip install 'llvmlite>=0.44' 'nvidia-cutlass-dsl==4.8.*'" in captured.err
    monkeypatch.undo()
    fill(tmp_path, lambda fields: fields | {"toolchain.nvidia-cutlass-dsl": "4.0.0"})
    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    assert "all but the toolchain is the same" in explain(SPEC.full_name).out


def test_damage(explain, tmp_path):
    entry = fill(tmp_path)
    path = Store(tmp_path).roots[0].blob_path(entry.cubin_sha256)
    path.chmod(0o644)
    path.write_bytes(b"")
    document = json.loads(explain(SPEC.full_name, "--json").out)
    assert document["status"] == "damaged"
    assert str(path) in document["reason"]


def test_a_kernel_that_no_trusted_key_signed_is_not_damaged(explain, tmp_path, monkeypatch):
    fill(tmp_path)
    assert main(["key", "new", str(tmp_path / "key")]) == 0
    monkeypatch.setenv("FUSEKIT_TRUSTED_KEYS", str(tmp_path / "key.pub"))
    said = explain(SPEC.full_name).out
    assert "untrusted: " in said
    assert "fusekit key sign" in said
    assert "damaged" not in said


def test_several_are_a_list(explain):
    documents = json.loads(explain("quickstart", "--json").out)
    assert [document["name"] for document in documents] == [spec.full_name for spec in find(["quickstart"])]


def test_a_name_that_no_spec_has(explain):
    captured = explain("quickstart/nothing", code=2)
    assert captured.out == ""
    assert "quickstart/nothing" in captured.err

"""Cache manifests: their form, what a difference is called, and what is refused."""

import json
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fusekit.errors import IntegrityError, SignatureError, StoreError, UsageError
from fusekit.share.manifest import (
    LIMIT,
    Locked,
    Manifest,
    alone,
    differences,
    pinned,
    read_manifest,
    toolchain_label,
    write_manifest,
)
from fusekit.store.signature import Trust, generate, read_signing_key
from fusekit.store.verify import Inspect

TOOLCHAIN = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
}
NAME = "quickstart/linear@128x128-c2x1"


def locked(key="a", cubin="b", size=100, launch="1"):
    return Locked(key * 64, cubin * 64, size, launch * 64)


@pytest.fixture
def manifest():
    return Manifest("sm_90a", TOOLCHAIN, {NAME: locked(), "quickstart/fc1@a": locked("c", "d")})


def test_the_label_of_a_toolchain():
    assert toolchain_label(TOOLCHAIN) == "cutlass-dsl-4.8.1-cu12"
    assert toolchain_label(TOOLCHAIN | {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}) == "cutlass-dsl-4.8.1-cu12-cu13"
    assert toolchain_label(TOOLCHAIN | {"nvidia-cutlass-dsl-libs-base": "4.8.0"}) == "cutlass-dsl-4.8.1-base-4.8.0-cu12"


def test_there_and_back(manifest, tmp_path):
    path = write_manifest(manifest, tmp_path)
    assert path.name == "sm_90a-cutlass-dsl-4.8.1-cu12.json"
    assert read_manifest(path) == manifest
    before = path.read_bytes()
    write_manifest(read_manifest(path), tmp_path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert read_manifest(link) == manifest


def test_what_several_write_at_once_is_all_there(tmp_path):
    def write(number):
        with alone(tmp_path / "manifests"):
            path = tmp_path / "manifests" / Manifest("sm_90a", TOOLCHAIN, {}).filename
            manifest = read_manifest(path) if path.exists() else Manifest("sm_90a", TOOLCHAIN, {})
            write_manifest(manifest.updated({f"quickstart/fc{number}@a": locked()}), path.parent)
        return path

    with ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(write, range(40)))
    assert len(read_manifest(path).kernels) == 40
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_said_to_be_none_of_a_store(manifest, tmp_path):
    (tmp_path / "file").write_text("")
    for write in (lambda folder: alone(folder).__enter__(), lambda folder: write_manifest(manifest, folder)):
        with pytest.raises(StoreError, match=r"cannot write .*file.*; check the path and its file system, or choose"):
            write(tmp_path / "file")


def test_what_a_difference_is_called(manifest):
    built = {NAME: locked(cubin="f"), "quickstart/fc1@a": locked("e", "d"), "quickstart/new@a": locked()}
    comparison = manifest.compare(built, [*built, "quickstart/none@a"])
    assert comparison.same == ("quickstart/fc1@a",)  # other sources, same bytes
    (changed,) = comparison.changed
    assert (changed.name, changed.expected, changed.built) == (NAME, "b" * 64, "f" * 64)
    assert "not reproducible" in changed.why
    assert [name for name, _ in comparison.missing] == ["quickstart/new@a", "quickstart/none@a"]
    assert not comparison.ok
    other = manifest.compare({NAME: locked("e", "f")}, [NAME]).changed[0]
    assert "have changed since the manifest was written" in other.why
    launch = manifest.compare({NAME: locked(launch="2")}, [NAME]).changed[0]
    assert (launch.expected, launch.built) == ("1" * 64, "2" * 64)
    assert "the same cubin with another launch record from the same sources" in launch.why
    gone = manifest.compare({}, [NAME])
    assert gone.missing == ((NAME, "it is not built from the present sources"),)
    assert manifest.compare({NAME: locked()}, [NAME]).ok


def test_a_launch_record_is_pinned(store):
    """Key and cubin are those of the manifest, every digest is right, and the kernel is launched in another way."""
    record = store.names()[0].record
    entry = store.find_entry(record.key)
    manifest = Manifest("sm_90a", TOOLCHAIN, {record.name: Locked.of(entry)})
    inspect = pinned(manifest, Inspect(lambda *_: None, lambda _: None, lambda *_: None))
    inspect.entry(entry, None)
    inspect.name(record)
    with pytest.raises(
        IntegrityError, match=f"points to {'0' * 64}, and in the manifest to {record.key}: one of them is"
    ):
        inspect.name(replace(record, key="0" * 64))
    other = replace(entry, launch=entry.launch | {"grid": [7, 1, 1]})
    with pytest.raises(IntegrityError, match=f"launch record {other.launch_sha256}, which the manifest does not list"):
        inspect.entry(other, None)
    assert not list(differences(manifest, lambda name: (record, entry)))
    for kernel, what in (((record, other), "has the launch record"), ((record, None), "no entry"), (None, "not there")):
        ((name, key, why),) = differences(manifest, lambda name, kernel=kernel: kernel)
        assert (name, key) == (record.name, entry.key)
        assert what in why


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=3),
        lambda d: d.update(arch="../x"),
        lambda d: d.update(kernels=[]),
        lambda d: d.update(toolchain=3),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl": "4/../../../x"}),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl/../x": "4.8.1"}),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl-x": "\ud800"}),
        lambda d: d["kernels"].update({"../../x@y": d["kernels"][NAME]}),
        lambda d: d["kernels"][NAME].update(key="x"),
        lambda d: d["kernels"][NAME].update(cubin_sha256=None),
        lambda d: d["kernels"][NAME].update(bytes=-1),
        lambda d: d["kernels"][NAME].update(bytes="1"),
        lambda d: d["kernels"][NAME].update(more=1),
        lambda d: d["kernels"][NAME].pop("key"),
        lambda d: d["kernels"][NAME].pop("launch_sha256"),
        lambda d: d["kernels"][NAME].update(launch_sha256="x"),
    ],
    ids=range(16),
)
def test_what_is_no_manifest(manifest, tmp_path, change):
    path = write_manifest(manifest, tmp_path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(IntegrityError):
        read_manifest(path)


@pytest.mark.parametrize(
    ("content", "absent"),
    [(b"{}", "schema, arch, toolchain, kernels"), (b'{"schema": 1, "kernels": {}}', "arch, toolchain")],
)
def test_another_file(tmp_path, content, absent):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UsageError, match=f"is not a cache manifest: it has no {absent}; check the path;"):
        read_manifest(tmp_path / "x.json")


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="is not a cache manifest"):
        read_manifest(tmp_path / "x.json")


def test_what_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="there is no manifest"):
        read_manifest(tmp_path / "x.json")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is no plain file; a manifest is; check the path"):
            read_manifest(path)
    with (tmp_path / "long").open("wb") as file:
        file.truncate(LIMIT + 1)
    with pytest.raises(IntegrityError, match="a manifest has at most"):
        read_manifest(tmp_path / "long")


def test_a_signed_one(manifest, tmp_path, monkeypatch):
    for name in ("ours", "stranger"):
        generate(tmp_path / name, name)
    ours, stranger = (read_signing_key(tmp_path / name) for name in ("ours", "stranger"))
    trust = Trust([tmp_path / "ours.pub"])
    folder = tmp_path / "manifests"
    folder.mkdir()
    path = write_manifest(manifest, folder, ours)
    assert {path.name for path in folder.iterdir()} == {path.name, f"{path.name}.{ours.public.id}.sig"}
    assert read_manifest(path, trust) == read_manifest(path) == manifest

    path.write_bytes(path.read_bytes().replace(b"4.8.1", b"4.8.2"))
    with pytest.raises(SignatureError, match="changed after they were signed"):
        read_manifest(path, trust)
    write_manifest(manifest, folder, stranger)
    assert not (folder / f"{path.name}.{ours.public.id}.sig").exists()
    with pytest.raises(SignatureError, match=r"is not signed.*fusekit lock --write --sign KEY"):
        read_manifest(path, trust)
    write_manifest(manifest, folder)
    assert {path.name for path in folder.iterdir()} == {path.name}
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(SignatureError, match="is not signed"):
        read_manifest(path, trust)


def test_files_of_others_beside_it_stay(manifest, tmp_path):
    name = manifest.filename
    for other in (f"{name}.mine.sig", f"{name}.sig", f"other.{'a' * 16}.sig"):
        (tmp_path / other).write_text("mine")
    (tmp_path / f"{name}.{'b' * 16}.sig").mkdir()
    (tmp_path / f"{name}.{'c' * 16}.sig").write_bytes(bytes(64))
    before = {path.name for path in tmp_path.iterdir()}
    write_manifest(manifest, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before - {f"{name}.{'c' * 16}.sig"} | {name}


def test_a_manifest_that_cannot_be_written_keeps_its_signature(manifest, tmp_path, monkeypatch):
    generate(tmp_path / "ours")
    folder = tmp_path / "manifests"
    path = write_manifest(manifest, folder, read_signing_key(tmp_path / "ours"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a module that is imported first below the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            write_manifest(manifest.updated({"quickstart/new@a": locked()}), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_manifest(path, Trust([tmp_path / "ours.pub"])) == manifest

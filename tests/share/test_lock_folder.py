"""Locks of a folder: their form, what a difference is called, and what is refused."""

import json
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fusekit.errors import IntegrityError, SignatureError, StoreError, UsageError
from fusekit.share.lock_folder import alone, compared, write_lock
from fusekit.store.entries import toolchain_label
from fusekit.store.lockfile import LIMIT, Build, Lock, differences, lock_file, read_lock
from fusekit.store.signature import Trust, generate, read_signing_key

TOOLCHAIN = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
}
NAME = "quickstart/linear@128x128-c2x1"


ARCH, LABEL = "sm_90a", "cutlass-dsl-4.8.1-cu12"


def build(key="a", cubin="b", size=100, launch="1"):
    return Build(LABEL, key * 64, cubin * 64, size, launch * 64)


def lock_of(kernels):
    return Lock.of_folder(ARCH, TOOLCHAIN, kernels)


@pytest.fixture
def kernels():
    return {NAME: build(), "quickstart/fc1@a": build("c", "d")}


@pytest.fixture
def lock(kernels):
    return lock_of(kernels)


def write(lock, folder, signer=None):
    return write_lock(lock, folder / lock_file(ARCH, TOOLCHAIN), signer, folder=True)


def read(path, trust=None):
    return read_lock(path, trust, folder=True)


def test_the_label_of_a_toolchain():
    assert toolchain_label(TOOLCHAIN) == "cutlass-dsl-4.8.1-cu12"
    assert toolchain_label(TOOLCHAIN | {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}) == "cutlass-dsl-4.8.1-cu12-cu13"
    assert toolchain_label(TOOLCHAIN | {"nvidia-cutlass-dsl-libs-base": "4.8.0"}) == "cutlass-dsl-4.8.1-base-4.8.0-cu12"


def test_there_and_back(lock, tmp_path):
    path = write(lock, tmp_path)
    assert path.name == f"{ARCH}-{LABEL}.json"
    assert read(path) == read_lock(path) == lock
    before = path.read_bytes()
    write(read(path), tmp_path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert read(link) == lock


def test_the_same_kernels_are_the_same_bytes_and_others_another_lock(lock, kernels):
    assert lock_of(dict(reversed(kernels.items()))).to_bytes() == lock.to_bytes()
    assert lock_of({NAME: build()}).id != lock.id


def test_what_several_write_at_once_is_all_there(tmp_path):
    def add(number):
        with alone(tmp_path / "locks"):
            path = tmp_path / "locks" / lock_file(ARCH, TOOLCHAIN)
            listed = {name: one for (name, _), (one,) in read(path).kernels.items()} if path.exists() else {}
            write(lock_of({**listed, f"quickstart/fc{number}@a": build()}), path.parent)
        return path

    with ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(add, range(40)))
    assert len(read(path).kernels) == 40
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_said_to_be_none_of_a_store(lock, tmp_path):
    (tmp_path / "file").write_text("")
    for attempt in (lambda folder: alone(folder).__enter__(), lambda folder: write(lock, folder)):
        with pytest.raises(StoreError, match=r"cannot write .*file.*; check the path and its file system, or choose"):
            attempt(tmp_path / "file")


def test_what_a_difference_is_called(lock):
    def now(built, *wanted, wrong=None):
        here = lambda names: {(name, ARCH): names[name] for name in names}  # noqa: E731
        reasons = None if wrong is None else here(wrong)
        return compared(lock, here(built), [(name, ARCH) for name in wanted or built], reasons)

    built = {NAME: build(cubin="f"), "quickstart/fc1@a": build("e", "d"), "quickstart/new@a": build()}
    same, (changed,), missing = now(built, *built, "quickstart/none@a")
    assert same == [("quickstart/fc1@a", ARCH)]  # other sources, same bytes
    assert (changed.name, changed.before, changed.now, changed.toolchain) == (NAME, "b" * 64, "f" * 64, LABEL)
    assert "not reproducible" in changed.why
    assert [name for (name, _), _ in missing] == ["quickstart/new@a", "quickstart/none@a"]
    ((other,), (launch,)) = (now({NAME: one})[1] for one in (build("e", "f"), build(launch="2")))
    assert "have changed since the lock was written" in other.why
    assert (launch.before, launch.now) == ("1" * 64, "2" * 64)
    assert "the same cubin with another launch record from the same sources" in launch.why
    assert now({NAME: build(size=101)})[1]
    where = (NAME, ARCH)
    assert now({}, NAME) == ([], [], [(where, "it is not built from the present sources")])
    assert now({}, NAME, wrong={NAME: "no room"}) == ([], [], [(where, "no room")])
    assert now({NAME: build()}) == ([where], [], [])


def test_a_launch_record_is_pinned(store):
    """Key and cubin are those of the lock, every digest is right, and the kernel is launched in another way."""
    record = store.names()[0].record
    entry = store.find_entry(record.key)
    lock = lock_of({record.name: Build.of(LABEL, entry)})
    lock.check_entry(entry)
    lock.check_name(record)
    moved = replace(record, key="0" * 64)
    with pytest.raises(IntegrityError, match=f"points to {'0' * 12}, and .* lists {record.key[:12]} for it"):
        lock.check_name(moved)
    other = replace(entry, launch=entry.launch | {"grid": [7, 1, 1]})
    with pytest.raises(IntegrityError, match=r"has another launch record than .* lists"):
        lock.check_entry(other)

    def seen(name, entry):
        return [(where, key, why) for where, key, why in differences(lock, lambda _: entry, lambda *_: name)]

    assert not seen(record, entry)
    for name, held, what in (
        (record, other, "another launch record"), (record, None, "not here; sync it"), (None, entry, "not there"),
        (moved, entry, "points to"),
    ):  # fmt: skip
        ((where, _, why),) = seen(name, held)
        assert where == (record.name, ARCH) and what in why
    assert not list(differences(lock, lambda _: entry))


def former(lock, schema=2):
    """The lock as fusekit 0.1 and early 0.2 wrote it."""
    kernels = {
        name: {"key": one.key, "cubin_sha256": one.cubin_sha256, "bytes": one.bytes}
        | ({"launch_sha256": one.launch_sha256} if schema == 2 else {})
        for (name, _), (one,) in lock.kernels.items()
    }
    return {"schema": schema, "arch": ARCH, "toolchain": dict(TOOLCHAIN), "kernels": kernels}


def test_a_cache_manifest_is_read_and_nothing_else_keeps_to_it(lock, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(former(lock)))
    assert read(path).kernels == lock.kernels and read(path).toolchains == lock.toolchains
    path.write_text(json.dumps(former(lock, 1)))
    first = read(path)
    assert [one.launch_sha256 for (one,) in first.kernels.values()] == ["", ""]
    assert compared(first, {where: one for where, (one,) in lock.kernels.items()}, lock.kernels)[1:] == ([], [])
    with pytest.raises(IntegrityError, match=r"lists quickstart/fc1@a without its launch record.*remove the file"):
        write(first, tmp_path)
    with pytest.raises(IntegrityError, match="is no lock"):
        read_lock(path)


@pytest.mark.parametrize("form", [lambda lock: json.loads(lock.to_bytes()), former], ids=["lock", "manifest"])
@pytest.mark.parametrize(
    "change",
    [
        lambda d, k: d.update(schema=3),
        lambda d, k: d.update(kernels=[]),
        lambda d, k: d.update(more=1),
        lambda d, k: d.pop("kernels"),
        lambda d, k: k.update({"../../x@y": k[NAME]}),
        lambda d, k: k.update({NAME: None}),
    ],
    ids=range(6),
)
def test_what_is_no_lock(lock, tmp_path, form, change):
    document = form(lock)
    change(document, document["kernels"] if "arch" in document else document["kernels"][ARCH])
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="is no lock"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change",
    [{"key": "x"}, {"cubin_sha256": None}, {"bytes": -1}, {"bytes": "1"}, {"more": 1}, {"launch_sha256": "x"},
     {"launch_sha256": ""}, {"key": ...}, {"launch_sha256": ...}],
    ids=range(9),
)  # fmt: skip
@pytest.mark.parametrize("form", ["lock", "manifest"])
def test_what_is_no_build(lock, tmp_path, form, change):
    if form == "manifest":
        document = former(lock)
        one = document["kernels"][NAME]
    else:
        document = json.loads(lock.to_bytes())
        one = document["kernels"][ARCH][NAME][LABEL]
    one.update(change)
    for name in [name for name, value in one.items() if value is ...]:
        del one[name]
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="is no lock"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(arch="../x"),
        lambda d: d.update(toolchain=3),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl": "4/../../../x"}),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl/../x": "4.8.1"}),
        lambda d: d["toolchain"].update({"nvidia-cutlass-dsl-x": "\ud800"}),
    ],
    ids=range(5),
)
def test_what_is_no_manifest(lock, tmp_path, change):
    document = former(lock)
    change(document)
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="is no lock"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"3", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="is no lock"):
        read(tmp_path / "x.json")


def test_what_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="there is no lock"):
        read(tmp_path / "x.json")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is no plain file; a lock is; check the path"):
            read(path)
    with (tmp_path / "long").open("wb") as file:
        file.truncate(LIMIT + 1)
    with pytest.raises(IntegrityError, match="a lock has at most"):
        read(tmp_path / "long")


def test_a_signed_one(lock, tmp_path, monkeypatch):
    for name in ("ours", "stranger"):
        generate(tmp_path / name, name)
    ours, stranger = (read_signing_key(tmp_path / name) for name in ("ours", "stranger"))
    trust = Trust([tmp_path / "ours.pub"])
    folder = tmp_path / "locks"
    folder.mkdir()
    path = write(lock, folder, ours)
    assert {path.name for path in folder.iterdir()} == {path.name, f"{path.name}.{ours.public.id}.sig"}
    assert read(path, trust) == read(path) == lock

    path.write_bytes(path.read_bytes().replace(b"4.8.1", b"4.8.2"))
    with pytest.raises(SignatureError, match="changed after they were signed"):
        read(path, trust)
    write(lock, folder, stranger)
    assert not (folder / f"{path.name}.{ours.public.id}.sig").exists()
    with pytest.raises(SignatureError, match=r"is not signed.*fusekit lock --write --sign KEY"):
        read(path, trust)
    write(lock, folder)
    assert {path.name for path in folder.iterdir()} == {path.name}
    write(lock, folder, ours)
    with pytest.raises(SignatureError, match="is signed as a lock of a folder"):
        read_lock(path, trust)  # it never stands in for a project's
    write_lock(lock, path, ours)
    assert read(path, trust) == lock  # as that of a project may be compared with
    write(lock, folder)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(SignatureError, match="is not signed"):
        read(path, trust)


def test_files_of_others_beside_it_stay(lock, tmp_path):
    name = lock_file(ARCH, TOOLCHAIN)
    for other in (f"{name}.mine.sig", f"{name}.sig", f"other.{'a' * 16}.sig"):
        (tmp_path / other).write_text("mine")
    (tmp_path / f"{name}.{'b' * 16}.sig").mkdir()
    (tmp_path / f"{name}.{'c' * 16}.sig").write_bytes(bytes(64))
    before = {path.name for path in tmp_path.iterdir()}
    write(lock, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before - {f"{name}.{'c' * 16}.sig"} | {name}


def test_a_lock_that_cannot_be_written_keeps_its_signature(lock, kernels, tmp_path, monkeypatch):
    generate(tmp_path / "ours")
    folder = tmp_path / "locks"
    path = write(lock, folder, read_signing_key(tmp_path / "ours"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a module that is imported first below the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            write(lock_of({**kernels, "quickstart/new@a": build()}), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(path, Trust([tmp_path / "ours.pub"])) == lock

"""What an earlier version wrote is read, and its C loader reads what this one writes. `freeze.py` makes the files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from fusekit.abi import LaunchRecord
from fusekit.cabi import Exported, generate_loader
from fusekit.errors import NotBuiltError
from fusekit.library import Library
from fusekit.runtime.driver import Driver
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share.bundle_import import import_bundle
from fusekit.share.loader import export_bundle
from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.share.sync import sync
from fusekit.store import Store, key_of
from fusekit.store.entries import CUBIN_FORMAT
from fusekit.store.lockfile import differences, read_lock
from fusekit.store.signature import Trust
from tests.cabi.bundles import BundleLauncher
from tests.cabi.launcher import OK, build
from tests.cabi.recorder import Recorder
from tests.runtime.samples import fake_for

VERSIONS = sorted(Path(__file__).parent.glob("*.tar.gz"))


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda path: path.name.removesuffix(".tar.gz"))
def frozen(request, tmp_path_factory):
    """The folder that a version filled."""
    folder = tmp_path_factory.mktemp("frozen")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder / "compat"


@pytest.fixture
def trust(frozen):
    return Trust((frozen / "key.pub",))


@pytest.fixture
def store(frozen, trust):
    return Store(frozen / "store", trust=trust)


def exported(store: Store) -> list[Exported]:
    """Kernels of a store, as the C loader loads them."""
    kernels = []
    for listing in store.names():
        entry = store.find_entry(listing.record.key)
        assert entry is not None
        launch = LaunchRecord.from_json(dict(entry.launch))
        kernels.append(Exported(listing.record.name, launch, store.read_cubin(entry), listing.record.defaults))
    return kernels


def test_its_store_is_whole(store):
    report = store.verify(full=True, inspect=WELLFORMED)
    assert (report.bad, report.entries, report.names, report.blobs) == ((), 9, 9, 9)


def test_its_kernels_load_and_layers_want_a_build(store):
    for kernel in exported(store):
        loaded = Library(store, Driver(fake_for(kernel.record, symbol=kernel.record.symbol))).load(kernel.name)
        assert loaded.name == kernel.name
    with pytest.raises(NotBuiltError, match=r"no record of the layer.*fusekit build frozen\.toml/mlp"):
        Library(store, Driver(fake_for(kernel.record))).layer("frozen/mlp")


def test_its_bundle_is_imported(frozen, store, trust, tmp_path):
    other = Store(tmp_path / "store", trust=trust)
    transfer = import_bundle(other, frozen / "kernels.tar", inspect=WELLFORMED)
    assert (transfer.names, transfer.entries) == (9, 9)
    assert exported(other) == exported(store)


def test_its_manifest_is_read(frozen, store, trust):
    (path,) = (frozen / "manifests").glob("*.json")
    lock = read_lock(path, trust, folder=True)
    assert len(lock.kernels) == 9
    assert list(differences(lock, store.find_entry, store.find_name)) == []
    backwards = dataclasses.replace(lock, kernels=dict(zip(lock.kernels, [*lock.kernels.values()][::-1], strict=True)))
    assert len(list(differences(backwards, store.find_entry, store.find_name))) == 8  # all but the one in the middle


def test_its_lock_is_kept_to(frozen, store, trust, tmp_path):
    path = frozen / "fusekit.lock"
    if not path.exists():
        pytest.skip("0.1 has no lock")
    lock = read_lock(path, trust)
    assert (lock.serial, len(lock.kernels), lock.to_bytes()) == (1, 9, path.read_bytes())
    remote = Remote(str(tmp_path / "remote"))
    push(store, select(store), remote)
    node = Store(tmp_path / "node", trust=trust)
    report = sync(node, lock, {"team": remote}, WELLFORMED)
    assert (report.missing, report.problems, report.names) == ([], [], 9)
    kept = node.keeping_to(lock)
    assert {kept.load(listed.record.key)[0].key for listed in kept.names()} == {
        build.key for builds in lock.kernels.values() for build in builds
    }


def test_its_launch_records_come_back(frozen):
    documents = json.loads((frozen / "records.json").read_text(encoding="utf-8"))
    assert {document["schema"] for document in documents} >= {1, 2, 3}
    assert [LaunchRecord.from_json(document).to_json() for document in documents] == documents


def test_its_loader_opens_a_bundle_of_now(frozen, store, tmp_path):
    texts = {name: (frozen / "loader" / name).read_text(encoding="utf-8") for name in ("compat.h", "compat.c")}
    export_bundle(store, select(store), tmp_path / "kernels.tar")
    check_loader(build(tmp_path, texts, "compat"), tmp_path / "kernels.tar", exported(store))


def test_loaders_open_a_bundle_with_candidates(frozen, tmp_path):
    """That of 0.1 takes the last build of each name, as it did; that of now the one that the driver reads."""
    both = Store(tmp_path / "store")
    import_bundle(both, frozen / "kernels.tar", inspect=WELLFORMED)
    record = both.names("frozen/wgrad")[0].record
    entry, cubin = both.load(record.key)
    cubin = cubin[:CUBIN_FORMAT] + b"\x08" + cubin[CUBIN_FORMAT + 1 :]
    fields = entry.fields | {"toolchain.nvidia-cutlass-dsl-libs-cu13": "4.8.0"}
    built = dataclasses.replace(
        entry, key=key_of(fields), fields=fields, cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        resources=entry.resources | {"cubin_format": 8},
    )  # fmt: skip
    both.publish(built, cubin)
    both.publish_name(dataclasses.replace(record, key=built.key, summary={}))
    selection = select(both)
    assert [candidate.key for candidate, _ in selection.candidates] == [entry.key]
    bundle = tmp_path / "kernels.tar"
    export_bundle(both, selection, bundle)
    assert import_bundle(Store(tmp_path / "other"), bundle, inspect=WELLFORMED).entries == 10
    texts = {name: (frozen / "loader" / name).read_text(encoding="utf-8") for name in ("compat.h", "compat.c")}
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    kernels = exported(both)
    before = build(old, texts, "compat")
    check_loader(before, bundle, kernels)
    now = build(new, generate_loader("compat"), "compat")
    assert len(check_loader(now, bundle, kernels)) == len(kernels)
    (kernel,) = (kernel for kernel in kernels if kernel.name == record.name)
    for shared, version, cubin_format in ((before, 13000, 8), (now, 13000, 8), (now, 12080, 7)):
        recorder = Recorder(kernel.record, version=version)
        launcher = BundleLauncher(shared, bundle, kernel, prefix="compat", recorder=recorder)
        assert launcher.load() == OK, str(launcher.error)
        assert recorder.cubin_format == cubin_format
        assert launcher.unload() == OK


def test_its_bundle_opens_in_the_loader_of_now(frozen, store, tmp_path):
    check_loader(build(tmp_path, generate_loader("compat"), "compat"), frozen / "kernels.tar", exported(store))


def check_loader(shared: Path, bundle: Path, kernels: list[Exported]) -> list[tuple[str, str]]:
    for kernel in kernels:
        launcher = BundleLauncher(shared, bundle, kernel, prefix="compat")
        assert launcher.load() == OK, str(launcher.error)
        assert launcher.unload() == OK
    _, handle = launcher.loader.open(bundle)
    assert launcher.loader.verify(handle) == OK, str(launcher.error)
    names = launcher.loader.names(handle)
    assert {name for name, _ in names} == {kernel.name for kernel in kernels}
    launcher.loader.close(handle)
    return names

"""What programs compiled, shared: names, remotes, bundles, signatures, collections, many processes over one folder."""

import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.config import Config
from fusekit.errors import IntegrityError
from fusekit.runtime.wellformed import WELLFORMED, launch_record
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import fetch, pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select, sign_selection
from fusekit.store import Entry, Store, key_of
from fusekit.store.keys import sha256
from fusekit.store.signature import generate
from tests.cute.command import EXECUTE
from tests.cute.rig import HIT, MISS, Rig

pytestmark = pytest.mark.usefixtures("device")
NAMESPACE = ("unshare", "--net", "--map-root-user")


@pytest.fixture
def remote(tmp_path, filled):
    store = Store(filled)
    assert push(store, select(store), Remote(str(tmp_path / "remote"))).entries == 1
    return str(tmp_path / "remote")


@pytest.fixture
def other(tmp_path):
    """Another machine."""
    return Rig(tmp_path / "other", tmp_path / "report")


@pytest.fixture
def keys(tmp_path):
    generate(tmp_path / "key")
    return tmp_path / "key", (tmp_path / "key.pub",)


def test_a_name_tells_package_function_and_architecture(rig):
    (row,) = Store(rig.root).overview().rows
    assert (row.name, row.arch) == (f"tests/Kernel@{row.key[:16]}", "sm_90a")
    assert row.toolchain and row.toolchain.startswith("cutlass-dsl-4.8")
    record = Store(rig.root).names()[0].record
    assert record.spec == {"host-object": {"module": "tests.cute.kernels", "function": "Kernel.__call__"}}
    with pytest.raises(IntegrityError, match=r"has no launch record.*fusekit exec"):
        launch_record(Store(rig.root).find_entry(row.key))


def test_pull_and_bundles_carry_what_a_program_compiled(remote, other, filled, tmp_path):
    assert pull(Store(other.root), Remote(remote), inspect=WELLFORMED).names == 1
    assert other.counted() == HIT
    export_bundle(Store(filled), select(Store(filled), ("tests/Kernel",)), tmp_path / "bundle")
    third = Rig(tmp_path / "third", other.report)
    assert import_bundle(Store(third.root), tmp_path / "bundle", inspect=WELLFORMED).entries == 1
    assert third.counted() == HIT


def test_removing_the_name_removes_the_entry(rig):
    ((name, arch),) = Store(rig.root).recorded()
    Store(rig.root).discard({(name, arch)})
    assert not list(rig.root.glob("blobs/sha256/*/*"))
    assert rig.counted() == MISS


def test_a_miss_asks_the_remote_once_and_keeps_what_it_has(remote, other):
    assert other.counted(remote=remote, miss="error") == HIT
    assert len(Store(other.root).names()) == 1
    assert other.counted(miss="error") == HIT


def test_a_remote_without_it_or_that_fails_is_a_miss(other, tmp_path, capfd):
    assert other.counted(remote=str(tmp_path / "empty"), miss="warn") == MISS
    assert "is not in the store or at the remote" in capfd.readouterr().err
    begin = time.monotonic()
    third = Rig(tmp_path / "third", other.report)
    assert third.counted(remote="nosuchprotocol://x/y", miss="warn") == MISS
    assert "nosuchprotocol" in capfd.readouterr().err
    assert time.monotonic() - begin < 60


def test_a_store_that_cannot_be_written_loads_from_the_remote(remote, other, tmp_path):
    (tmp_path / "file").write_text("")
    assert Rig(tmp_path / "file" / "store", other.report).counted(remote=remote) == HIT


def test_trusted_keys_cover_what_a_remote_has(filled, keys, tmp_path):
    private, public = keys
    report = tmp_path / "report"
    shutil.copytree(filled, tmp_path / "signed")
    config = Config(store=tmp_path / "signed", signing_key=private)
    store, signed, plain = Store.open(config), str(tmp_path / "r1"), str(tmp_path / "r2")
    push(Store(filled), select(Store(filled)), Remote(plain))
    sign_selection(store, select(store))
    push(store, select(store), Remote(signed))
    for url, expected in ((plain, MISS), (signed, HIT)):
        reader = Rig(tmp_path / f"reader{expected[0]}", report)
        trusting = Config(store=reader.root, trusted_keys=public)
        assert reader.counted(config=trusting, remote=url) == expected


def test_a_damaged_object_of_a_remote_is_not_loaded(remote, other, tmp_path):
    (blob,) = (tmp_path / "remote").glob("blobs/sha256/*/*")
    blob.write_bytes(bytes(reversed(blob.read_bytes())))
    key = Store(tmp_path / "remote").names()[0].record.key
    with pytest.raises(IntegrityError):
        fetch(Store(other.root), Remote(remote), key)
    assert other.counted(remote=remote) == MISS


def test_opening_a_store_of_a_thousand_entries_reads_none_of_them(tmp_path, filled):
    store = Store(tmp_path / "store")
    key = Store(filled).names()[0].record.key
    store.publish(*Store(filled).load(key))
    for index in range(1000):
        fields = {"arch": "sm_90a", "kind": "host-object", "index": str(index)}
        entry = Entry(key_of(fields), fields, sha256(b"x"), 1, {"host-object": {}}, {}, {}, {}, 0.0)
        path = store.roots[0].entry_path(entry.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.to_bytes())
    took = []
    for _ in range(9):
        begin = time.process_time()
        opened = Store.open(Config(store=tmp_path / "store"))
        took.append(time.process_time() - begin)
        assert opened.load(key) is not None
    assert min(took) < 1e-3


def test_a_collection_keeps_what_a_running_program_used(rig, tmp_path):
    """`exec` holds a lease while its program runs."""
    program = (
        "import os, sys, time; from tests.cute import kernels; kernels.compile_kernel(); print('used', flush=True);"
        "sys.stdin.readline()"
    )
    env = os.environ | {"FUSEKIT_STORE": str(rig.root), "CUTE_DSL_ARCH": "sm_90a"}
    with subprocess.Popen(
        [*EXECUTE, sys.executable, "-c", program], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "used\n"
        kept = Store(rig.root).collect(max_bytes=0).removed
        process.communicate("\n", timeout=60)
    assert (kept, Store(rig.root).collect(max_bytes=0).removed) == (0, 1)


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode,
    reason="this machine gives no network namespaces",
)
def test_processes_of_four_network_namespaces_compile_once(tmp_path, soak):
    """As of four nodes with one folder: nothing but the folder is shared."""
    each = 4 if soak else 1
    program = (
        "import os, time; from tests.cute import kernels\n"
        f"for _ in range({each}):\n    if os.fork() == 0: kernels.compile_kernel(); os._exit(0)\n"
        f"for _ in range({each}): os.wait()"
    )
    env = os.environ | {"FUSEKIT_STORE": str(tmp_path / "store"), "CUTE_DSL_ARCH": "sm_90a"}
    nodes = [
        subprocess.Popen(
            [*NAMESPACE, *EXECUTE, sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    lines = [node.communicate(timeout=300)[1] for node in nodes]
    assert sum(" 1 misses" in line for line in lines) == 1, lines
    assert len(list((tmp_path / "store").glob("entries/*/*.json"))) == 1

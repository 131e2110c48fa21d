"""sync: a store holds what a lock lists, from roots and remotes, whatever else lies there."""

import dataclasses
from types import SimpleNamespace

import pytest

from fusekit.errors import IntegrityError, StoreError
from fusekit.runtime.wellformed import WELLFORMED
from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.share.sync import sync
from fusekit.store import Store
from fusekit.store.keys import sha256
from fusekit.store.lockfile import Build, Lock, read_lock
from fusekit.store.signature import Trust, generate
from tests.store.collecting import DAY, use
from tests.store.samples import files
from tests.store.test_candidates import CU12, CU13, NAME, publish

OTHER = "quickstart/fc2@a"


def lock_of(path, serial, **kernels):
    """A lock of (toolchain, entry) pairs by name, read from its file."""
    listed = {
        (name, "sm_90a"): tuple(sorted(Build.of(toolchain, entry) for toolchain, entry in builds))
        for name, builds in kernels.items()
    }
    labels = {build.toolchain: {} for builds in listed.values() for build in builds}
    path.write_bytes(Lock("0" * 32, serial, None, labels, {}, listed).to_bytes())
    return read_lock(path)


@pytest.fixture
def cluster(tmp_path):
    """A store where two toolchains built, pushed to a remote, and the lock of it."""
    store = Store(tmp_path / "builder")
    first, last, other = publish(store, CU12), publish(store, CU13), publish(store, CU12, seed=5, name=OTHER)
    remote = Remote(str(tmp_path / "remote"))
    push(store, select(store), remote)
    listed = {NAME: [("cu12", first), ("cu13", last)], OTHER: [("cu12", other)]}
    lock = lock_of(tmp_path / "fusekit.lock", 1, **listed)
    return SimpleNamespace(
        store=store, first=first, last=last, other=other, remotes={"team": remote}, lock=lock, listed=listed
    )


def keys(store, name=NAME):
    return [build.key for build in store.candidates(store.find_name(name, "sm_90a"))]


def test_from_a_remote_and_again(cluster, tmp_path):
    node = Store(tmp_path / "node")
    report = sync(node, cluster.lock, cluster.remotes, WELLFORMED)
    assert (report.missing, report.problems, report.names) == ([], [], 2)
    assert {source.origin for source in report.sources} == {"team"}
    assert sorted(keys(node)) == sorted([cluster.first.key, cluster.last.key])
    assert not node.verify(full=True, inspect=WELLFORMED).bad
    before = files(node.root)
    again = sync(node, cluster.lock, cluster.remotes, WELLFORMED)
    assert ({source.origin for source in again.sources}, again.names) == ({str(node.root)}, 0)
    assert files(node.root) == before
    kept = node.keeping_to(cluster.lock)
    assert kept.readable(kept.find_name(NAME, "sm_90a"), 12080).key == cluster.first.key


def test_a_read_only_root_needs_no_copy(cluster, tmp_path):
    node = Store(tmp_path / "node", (cluster.store.root,))
    report = sync(node, cluster.lock, {}, WELLFORMED)
    assert {source.origin for source in report.sources} == {str(cluster.store.root)}
    assert node.roots[0].name(NAME, "sm_90a") is None
    assert node.keeping_to(cluster.lock).load(cluster.first.key)


def test_what_is_missing_moves_no_name(cluster, tmp_path):
    node = Store(tmp_path / "node")
    old = publish(node, CU12, seed=9, name=OTHER)
    absent = dataclasses.replace(cluster.last, key="0" * 64)
    lock = lock_of(tmp_path / "more.lock", 1, **cluster.listed, **{"quickstart/fc3@a": [("cu13", absent)]})
    asked = []
    report = sync(node, lock, cluster.remotes, WELLFORMED, compile=lambda missing: asked.append(missing) or {})
    assert [(where[0], build.key) for where, build in report.missing] == [("quickstart/fc3@a", "0" * 64)]
    assert asked == [report.missing]
    assert node.find_name(OTHER, "sm_90a").key == old.key
    assert node.find_name(NAME, "sm_90a") is None
    # The same sync goes on: what is there is not copied again.
    report = sync(node, dataclasses.replace(cluster.lock, serial=2), cluster.remotes, WELLFORMED)
    assert {source.origin for source in report.sources} == {str(node.root)}
    assert node.find_name(OTHER, "sm_90a").key == cluster.other.key


def test_what_is_built_here_is_named_with_the_rest(cluster, tmp_path):
    """Also if the sync that built it was stopped."""
    node = Store(tmp_path / "node")
    old = publish(node, CU12, seed=9, name=OTHER)

    def compile_other(missing):
        node.publish(*cluster.store.load(cluster.other.key))
        return {cluster.other.key: "built here"}

    def records():
        return {((OTHER, "sm_90a"), cluster.other.key): cluster.store.find_name(OTHER, "sm_90a")}

    report = sync(node, cluster.lock, {}, WELLFORMED, compile=compile_other, records=records)
    assert ({source.origin for source in report.sources}, len(report.missing)) == ({"built here"}, 2)
    assert (node.find_name(OTHER, "sm_90a").key, node.find_name(NAME, "sm_90a")) == (old.key, None)
    only = Remote(str(tmp_path / "only"))
    push(cluster.store, select(cluster.store, [NAME]), only)
    with pytest.raises(IntegrityError, match="no record by which the name points to it"):
        sync(node, cluster.lock, {"only": only}, WELLFORMED)
    report = sync(node, cluster.lock, {"only": only}, WELLFORMED, records=records)
    assert (report.names, node.find_name(OTHER, "sm_90a").key) == (2, cluster.other.key)
    assert sync(node, cluster.lock, {}, WELLFORMED, records=records).names == 0


def test_a_name_that_moved_on_comes_back_to_the_lock(cluster, tmp_path):
    node = Store(tmp_path / "node")
    sync(node, cluster.lock, cluster.remotes, WELLFORMED)
    newer = publish(node, CU12, seed=77)
    assert node.find_name(NAME, "sm_90a").key == newer.key
    assert sync(node, cluster.lock, {}, WELLFORMED).names == 1
    assert node.find_name(NAME, "sm_90a").key in (cluster.first.key, cluster.last.key)
    assert node.find_entry(newer.key) == newer


def test_a_dry_run_writes_nothing(cluster, tmp_path):
    report = sync(Store(tmp_path / "node"), cluster.lock, cluster.remotes, WELLFORMED, dry_run=True)
    assert (report.missing, {source.origin for source in report.sources}) == ([], {"team"})
    assert not (tmp_path / "node").exists()


def test_other_bytes_in_a_remote_or_the_store(cluster, tmp_path):
    """Signed or whole as they may be: the lock says which."""
    wrong = [("cu12", dataclasses.replace(cluster.first, cubin_sha256="1" * 64))]
    lock = lock_of(tmp_path / "wrong.lock", 1, **{NAME: wrong})
    node = Store(tmp_path / "node")
    report = sync(node, lock, cluster.remotes, WELLFORMED)
    assert len(report.missing) == 1
    assert f"another cubin than {lock.path} lists" in report.problems[0]
    assert node.find_entry(cluster.first.key) is None
    spoiled = Store(tmp_path / "spoiled")
    cubin = b"another" + cluster.store.load(cluster.first.key)[1]
    other = dataclasses.replace(cluster.first, cubin_sha256=sha256(cubin), cubin_bytes=len(cubin))
    spoiled.publish(other, cubin)
    spoiled.publish_name(dataclasses.replace(cluster.store.find_name(NAME, "sm_90a"), key=cluster.first.key))
    with pytest.raises(IntegrityError, match=f"another cubin .*: `fusekit rm {NAME}`, then `fusekit sync`"):
        sync(spoiled, cluster.lock, cluster.remotes, WELLFORMED)
    use(spoiled, other, DAY)
    spoiled.discard({(NAME, "sm_90a")})
    assert sync(spoiled, cluster.lock, cluster.remotes, WELLFORMED).missing == []


def test_an_older_lock_is_refused(cluster, tmp_path):
    node = Store(tmp_path / "node")
    newer = lock_of(tmp_path / "newer.lock", 2, **cluster.listed)
    sync(node, newer, cluster.remotes, WELLFORMED)
    with pytest.raises(IntegrityError, match="serial 1, and serial 2"):
        sync(node, cluster.lock, cluster.remotes, WELLFORMED)
    with pytest.raises(IntegrityError, match="another lock of that serial"):
        sync(node, lock_of(tmp_path / "apart.lock", 2, **{OTHER: cluster.listed[OTHER]}), {}, WELLFORMED)


def test_a_remote_that_fails_and_one_that_answers(cluster, tmp_path):
    class Broken(Remote):
        def sizes(self, folder):
            raise StoreError("the network is down")

    remotes = {"broken": Broken(str(tmp_path / "remote")), **cluster.remotes}
    report = sync(Store(tmp_path / "node"), cluster.lock, remotes, WELLFORMED)
    assert (report.missing, report.problems) == ([], ["the network is down"])


def test_signatures_come_along(cluster, tmp_path):
    generate(tmp_path / "key")
    trust = Trust((tmp_path / "key.pub",))
    signing = Store(cluster.store.root, signing_key=tmp_path / "key")
    push(signing, select(signing), cluster.remotes["team"])
    node = Store(tmp_path / "node", trust=trust)
    assert sync(node, cluster.lock, cluster.remotes, WELLFORMED).missing == []
    assert node.load(cluster.last.key)
    stranger = Store(tmp_path / "stranger", trust=Trust((tmp_path / "other.pub",)))
    generate(tmp_path / "other")
    report = sync(stranger, cluster.lock, cluster.remotes, WELLFORMED)
    assert len(report.missing) == 3
    assert "is not trusted" in report.problems[0]

"""A name keeps a build of each toolchain: what a driver can read of it, what moves, what stays, what goes."""

import dataclasses
import json
import tarfile
import threading
import zlib

import pytest

from fusekit.errors import IntegrityError
from fusekit.share import bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.entries import CUDA13, toolchain_label
from fusekit.store.names import differences
from fusekit.store.signature import Trust, generate
from tests.cubins import cubin_of
from tests.share.bundles import bundled, read_index
from tests.store.collecting import DAY, age, use
from tests.store.samples import build_entry, build_record, files

NAME = "quickstart/fc1@128x160-c2x1"
CU12, CU13 = ("4.8.1", "cu12", 7), ("4.8.0", "cu13", 8)


def publish(store, toolchain, seed=0, spec=None, name=NAME):
    """What a build by `toolchain` publishes."""
    version, library, cubin_format = toolchain
    distributions = {"nvidia-cutlass-dsl": version, f"nvidia-cutlass-dsl-libs-{library}": version}
    cubin = cubin_of("kernel", seed=f"{toolchain} {seed}" * 20, abi=cubin_format)
    entry, _ = build_entry(zlib.crc32(cubin) % 100_000, cubin)
    resources = {**entry.resources, "cubin_format": cubin_format}
    entry = dataclasses.replace(entry, resources=resources, toolchain={"distributions": distributions})
    store.publish(entry, cubin)
    record = build_record(entry, name)
    store.publish_name(record if spec is None else dataclasses.replace(record, spec=spec))
    return entry


def builds(store, name=NAME):
    record = store.find_name(name, "sm_90a")
    return [build.key for build in store.candidates(record)]


def readable(store, driver, name=NAME):
    build = store.readable(store.find_name(name, "sm_90a"), driver)
    return None if build is None else build.key


def test_a_build_adds_a_candidate_and_removes_none(tmp_path):
    store = Store(tmp_path)
    first = publish(store, CU12)
    assert not (tmp_path / "candidates").exists()  # one build needs none
    second = publish(store, CU13)
    assert builds(store) == [second.key, first.key]
    assert [listed.record.key for listed in store.names()] == [second.key]
    assert (readable(store, 12080), readable(store, CUDA13)) == (first.key, second.key)
    assert publish(store, CU12) == first  # again: the last build is first
    assert builds(store) == [first.key, second.key]
    assert readable(store, CUDA13) == first.key
    report = store.verify(full=True)
    assert (report.names, report.bad, report.strays) == (1, (), ())


def test_a_listing_has_both(tmp_path):
    store = Store(tmp_path)
    first, second = publish(store, CU12), publish(store, CU13)
    publish(store, CU12, name="quickstart/fc2@a")
    row, other = store.overview().rows
    assert (row.key, row.toolchain, row.lowest_driver) == (second.key, "cutlass-dsl-4.8.0-cu13", 13000)
    assert [(build.key, build.toolchain, build.lowest_driver) for build in row.candidates] == [
        (first.key, "cutlass-dsl-4.8.1-cu12", 12040)
    ]
    assert (other.candidates, other.lowest_driver) == ((), 12040)


def test_a_build_of_another_spec_is_never_taken_for_it(tmp_path):
    store = Store(tmp_path)
    publish(store, CU12)
    last = publish(store, CU13, spec={"kernel": "fc1", "alpha": 2.0})
    assert differences({"kernel": "fc1"}, {"kernel": "fc1", "summary": "text"}) == ()
    assert builds(store) == [last.key]
    assert readable(store, 12080) is None
    assert store.overview().rows[0].candidates == ()


def test_the_newest_toolchain_that_the_driver_reads(tmp_path):
    store = Store(tmp_path)
    older = publish(store, ("4.9.0", "cu12", 7))
    publish(store, CU12)
    last = publish(store, CU13)
    assert readable(store, 12080) == older.key
    assert builds(store)[0] == last.key


def test_a_lower_root_gives_the_build_that_a_driver_reads(tmp_path):
    site = Store(tmp_path / "site")
    first = publish(site, CU12)
    last = publish(Store(tmp_path / "own"), CU13)
    both = Store(tmp_path / "own", (tmp_path / "site",))
    assert builds(both) == [last.key, first.key]


def test_copying_up_takes_the_candidates_along(tmp_path):
    site = Store(tmp_path / "site")
    first, last = publish(site, CU12), publish(site, CU13)
    both = Store(tmp_path / "own", (tmp_path / "site",))
    record = both.find_name(NAME, "sm_90a")
    assert both.adopt(record)
    own = Store(tmp_path / "own")
    assert builds(own) == [last.key, first.key]
    assert own.load(first.key)
    before = files(own.root)
    assert not both.adopt(record)
    assert files(own.root) == before


def test_a_format_that_was_not_recorded_is_read_from_the_cubin(tmp_path):
    store = Store(tmp_path)
    entry, cubin = build_entry(3, cubin_of("kernel", seed="old" * 200, abi=8))
    store.publish(entry, cubin)
    store.publish_name(build_record(entry))
    record = store.find_name(NAME, "sm_90a")
    assert (store.lowest_driver(record), store.readable(record, 12080)) == (13000, None)


def test_two_first_builders_lose_no_build(tmp_path):
    """Each sees no name, and one of them gives it: the other's is there as a candidate."""
    for turn in range(8):
        stores = [Store(tmp_path / str(turn)) for _ in range(2)]
        start = threading.Barrier(2)
        keys = []

        def build(store, toolchain, start=start, keys=keys):
            start.wait()
            keys.append(publish(store, toolchain).key)

        threads = [threading.Thread(target=build, args=each) for each in zip(stores, (CU12, CU13), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(builds(stores[0])) == sorted(keys)


def test_a_damaged_candidate_hides_none(tmp_path):
    store = Store(tmp_path)
    first, second = publish(store, CU12), publish(store, CU13)
    third = publish(store, ("4.7.0", "cu12", 7))
    (path,) = (tmp_path / "candidates").glob(f"*/*.{first.key[:12]}.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-3])
    assert builds(store) == [third.key, second.key]
    assert [problem.path for problem in store.verify().bad] == [path]
    path.write_bytes((path.parent / path.name.replace(first.key[:12], second.key[:12])).read_bytes())
    assert [problem.path for problem in store.verify().bad] == [path]
    assert builds(store) == [third.key, second.key]


# -- removal ----------------------------------------------------------------------------------------------------------


def test_collection_keeps_one_of_each_format_in_use(tmp_path):
    store = Store(tmp_path)
    before, first, second = publish(store, CU12, seed=1), publish(store, CU12), publish(store, CU13)
    for entry, ago in ((before, 9), (first, 8), (second, 1)):
        use(store, entry, ago * DAY)
    for path, days in zip(sorted((tmp_path / "candidates").rglob("*.json")), range(9), strict=False):
        age(path, (20 if before.key[:12] in path.name else days) * DAY)
    report = store.collect(max_age=5 * DAY)
    assert [kernel.key for kernel in report.evicted] == [before.key]
    assert builds(store) == [second.key, first.key]
    assert not store.verify().bad
    use(store, second, 6 * DAY)
    assert store.collect(max_age=5 * DAY).removed == 2
    assert files(tmp_path) == {}


def test_a_name_whose_last_build_goes_points_to_the_other(tmp_path):
    store = Store(tmp_path)
    first, last = publish(store, CU12), publish(store, CU13)
    for entry in (first, last):
        use(store, entry, 9 * DAY)
    bytes_now = store.collect(dry_run=True).kept_bytes
    report = store.collect(max_bytes=bytes_now - 1)
    (gone,) = report.evicted
    (left,) = {first.key, last.key} - {gone.key}
    assert builds(store) == [left]
    assert not store.verify().bad


def test_an_outdated_build_never_gets_the_name_back(tmp_path):
    store = Store(tmp_path)
    first, last = publish(store, CU12), publish(store, CU13, spec={"kernel": "other"})
    use(store, last, 9 * DAY)
    use(store, first, 1 * DAY)
    assert [kernel.key for kernel in store.collect(max_age=5 * DAY).evicted] == [last.key]
    assert store.find_name(NAME, "sm_90a") is None


def test_rm_takes_every_build(tmp_path):
    store = Store(tmp_path)
    for entry in (publish(store, CU12), publish(store, CU13), publish(store, CU13, name="quickstart/fc2@a")):
        use(store, entry, DAY)
    report = store.discard({(NAME, "sm_90a")})
    assert (report.names, report.missing, report.entries) == ([(NAME, "sm_90a")], [], 1)
    assert report.shared  # of the kernel with another name
    assert [path.parts[0] for path in files(tmp_path)].count("names") == 1
    assert not (tmp_path / "candidates" / "quickstart").exists() or not any((tmp_path / "candidates").rglob("*.json"))


# -- between stores ---------------------------------------------------------------------------------------------------


def test_a_bundle_carries_one_build_of_each_format(tmp_path):
    store = Store(tmp_path / "a")
    publish(store, CU12, seed=1)
    first, last = publish(store, CU12), publish(store, CU13)
    path = bundled(store, tmp_path / "kernels.tar")
    assert json.loads(_index(path))["schema"] == 3
    assert [member.kind for member in read_index(path).members].count("candidate") == 1
    other = Store(tmp_path / "b")
    assert import_bundle(other, path).entries == 2
    assert builds(other) == [last.key, first.key]
    assert bundled(other, tmp_path / "again.tar").read_bytes() == path.read_bytes()


def test_a_bundle_without_candidates_is_as_before(tmp_path):
    store = Store(tmp_path / "a")
    publish(store, CU12)
    assert json.loads(_index(bundled(store, tmp_path / "kernels.tar")))["schema"] == 1


def _index(path):
    with tarfile.open(path) as archive:
        return archive.extractfile("bundle.json").read()


def test_a_bundle_with_a_candidate_of_another_key_is_refused(tmp_path, monkeypatch):
    store = Store(tmp_path / "a")
    publish(store, CU12), publish(store, CU13)
    real = bundle.candidate_of
    monkeypatch.setattr(bundle, "candidate_of", lambda name, arch, digits, *rest: real(name, arch, "0" * 12, *rest))
    path = bundled(store, tmp_path / "kernels.tar")
    with pytest.raises(IntegrityError, match="for the key"):
        import_bundle(Store(tmp_path / "b"), path)


def test_a_push_and_a_pull_carry_both(tmp_path, url):
    store = Store(tmp_path / "a")
    first = publish(store, CU12)
    push(store, select(store), Remote(url))
    fresh = Store(tmp_path / "fresh")  # has never seen the first build
    last = publish(fresh, CU13)
    push(fresh, select(fresh), Remote(url))
    other = Store(tmp_path / "b")
    assert pull(other, Remote(url)).failed == []
    assert builds(other) == [last.key, first.key]
    assert push(other, select(other), Remote(url)).bytes == 0
    assert pull(other, Remote(url), ["quickstart"]).entries == 0


def test_signed_candidates_are_trusted_and_others_are_not(tmp_path):
    generate(tmp_path / "key", "tests")
    trust = Trust((tmp_path / "key.pub",))
    store = Store(tmp_path / "a", trust=trust, signing_key=tmp_path / "key")
    first, last = publish(store, CU12), publish(store, CU13)
    assert builds(store) == [last.key, first.key]
    path = bundled(store, tmp_path / "kernels.tar")
    other = Store(tmp_path / "b", trust=trust)
    import_bundle(other, path)
    assert builds(other) == [last.key, first.key]
    entry, cubin = build_entry(7)
    Store(tmp_path / "a").publish(entry, cubin)
    Store(tmp_path / "a").publish_candidate(dataclasses.replace(build_record(entry), summary=entry.summary()))
    assert builds(store) == [last.key, first.key]


def test_the_label_of_a_toolchain():
    assert toolchain_label({"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu12": "4.8.1"}) == (
        "cutlass-dsl-4.8.1-cu12"
    )

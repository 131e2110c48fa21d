"""Collection: what goes, and what stays."""

import dataclasses
import errno
import json
import os
import time

import pytest

from fusekit.errors import StoreError
from fusekit.store import Store, key_of, process
from fusekit.store.entries import ADOPTED
from fusekit.store.keys import sha256
from fusekit.store.marks import LEASE_SECONDS, mark_path
from tests.store.collecting import DAY, age, everything, fill, held, unreadable_files, use
from tests.store.samples import build_entry, build_record, replant

RANDOM = "0123456789ab"


def test_without_a_policy_nothing_goes(tmp_path):
    store, _ = fill(tmp_path)
    before = everything(tmp_path)
    report = store.collect()
    assert (report.removed, report.kept, report.freed_bytes) == (0, 4, 0)
    assert everything(tmp_path) == before


def test_the_least_recently_used_go_first(tmp_path):
    store, entries = fill(tmp_path)
    report = store.collect(max_age=250)
    assert [kernel.key for kernel in report.evicted] == [entry.key for entry in entries[:2]]
    assert [kernel.reason for kernel in report.evicted] == ["age", "age"]
    assert report.evicted[0].names == ("f/k0@v.sm_90a.json",)
    assert held(store) == ["k2@v", "k3@v"]
    kept = report.kept_bytes
    report = store.collect(max_bytes=kept - 1)
    assert held(store) == ["k3@v"]
    assert report.kept_bytes <= kept - 1
    assert store.collect(max_bytes=report.kept_bytes).removed == 0


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_more_goes_than_has_to(tmp_path, dry_run):
    store, entries = fill(tmp_path, 8, cubin=b"x" * 100_000)  # as of real kernels, most of the bytes are of cubins
    total = store.collect(dry_run=True).kept_bytes
    report = store.collect(max_bytes=total * 5 // 8, dry_run=dry_run)
    assert [kernel.key for kernel in report.evicted] == [entry.key for entry in entries[:3]]
    assert (report.removed, report.kept) == (3, 5)
    assert report.kept_bytes == total - report.freed_bytes <= total * 5 // 8
    assert len(held(store)) == (8 if dry_run else 5)


def test_what_is_freed_is_what_the_disk_has_less(tmp_path):
    store, _ = fill(tmp_path)

    def used():
        tops = ("blobs", "entries", "names")
        return sum(path.stat().st_size for top in tops for path in (tmp_path / top).rglob("*") if path.is_file())

    before = used()
    report = store.collect(max_bytes=before // 2)
    assert used() == before - report.freed_bytes == report.kept_bytes <= before // 2


def test_everything_can_go(tmp_path):
    store, _ = fill(tmp_path)
    report = store.collect(max_bytes=0)
    assert (report.removed, report.kept, report.kept_bytes) == (4, 0, 0)
    assert everything(tmp_path) == []


def test_a_load_keeps_what_it_loads(tmp_path):
    store, entries = fill(tmp_path)
    assert store.load(entries[0].key) is not None
    time.sleep(0.1)
    store.collect(max_age=50)
    assert held(store) == ["k0@v"]


def test_looking_is_not_using(tmp_path, monkeypatch):
    store, entries = fill(tmp_path)
    store.load(entries[0].key, mark=False)
    store.find_entry(entries[1].key)
    store.overview()
    store.verify(full=True)
    assert store.collect(max_age=50).removed == 4


def test_a_build_that_finds_a_kernel_uses_it(tmp_path):
    store, entries = fill(tmp_path)
    store.present(entries[0].key)
    store.settled(build_record(entries[1], "f/k1@v"))
    store.publish(*build_entry(2, cubin=b"2" + b"x" * 1000))
    time.sleep(0.1)
    store.collect(max_age=50)
    assert held(store) == ["k0@v", "k1@v", "k2@v"]


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path):
    store, _ = fill(tmp_path)
    (tmp_path / "entries" / ".x.tmp").parent.mkdir(exist_ok=True)
    left = store.roots[0].entry_path(build_entry()[0].key).with_name(".x.json.tmp")
    left.write_bytes(b"1")
    age(left, 2 * DAY)
    before = everything(tmp_path)
    planned = store.collect(max_age=250, dry_run=True)
    assert everything(tmp_path) == before
    done = store.collect(max_age=250)
    assert [kernel.key for kernel in planned.evicted] == [kernel.key for kernel in done.evicted]
    assert (planned.removed, planned.kept, planned.freed_bytes, planned.temporaries) == (
        done.removed,
        done.kept,
        done.freed_bytes,
        done.temporaries,
    )


def test_a_shared_cubin_goes_with_the_last_that_needs_it(tmp_path):
    store = Store(tmp_path)
    entries = [store.publish(*build_entry(seed, cubin=b"shared")) for seed in range(2)]
    use(store, entries[0], 100)
    use(store, entries[1], 10)
    assert store.collect(max_age=50).freed_bytes == len(entries[0].to_bytes())
    assert store.load(entries[1].key, mark=False) is not None
    store.collect(max_age=5)
    assert everything(tmp_path) == []


def test_orphans_go_at_once_but_not_while_a_build_runs(tmp_path):
    store = Store(tmp_path)
    entry, cubin = build_entry()
    with store.lease():
        time.sleep(0.02)
        store.publish(entry, cubin)
        store.roots[0].entry_path(entry.key).unlink()
        time.sleep(0.1)
        assert store.collect().orphans == 0
    report = store.collect()
    assert (report.orphans, report.removed, report.freed_bytes) == (1, 0, len(cubin))
    assert everything(tmp_path) == []


def test_what_a_build_relies_on_stays_until_it_ends(tmp_path):
    store, entries = fill(tmp_path)
    with store.lease():
        store.present(entries[0].key)
        time.sleep(0.1)
        report = Store(tmp_path).collect(max_bytes=0)
        assert report.in_use == 1
        assert held(store) == ["k0@v"]
    assert not list((tmp_path / "leases").iterdir())
    assert Store(tmp_path).collect(max_bytes=0).removed == 1


def test_the_lease_of_a_dead_process_protects_nothing(tmp_path):
    store, entries = fill(tmp_path)
    child = os.fork()
    if not child:
        with store.lease():
            store.present(entries[0].key)
            os._exit(0)
    os.waitpid(child, 0)
    (lease,) = (tmp_path / "leases").iterdir()
    assert process.is_gone(lease.name, process.host())
    time.sleep(0.1)
    assert store.collect(max_bytes=0).removed == 4
    assert not lease.exists()


def test_a_lease_from_elsewhere_ends_when_it_is_not_renewed(tmp_path):
    store, entries = fill(tmp_path)
    lease = tmp_path / "leases" / "0123456789ab-77-0123456789ab"
    lease.parent.mkdir(exist_ok=True)
    lease.write_text(str(time.time_ns() - 10**9))
    store.present(entries[0].key)
    time.sleep(0.1)
    assert store.collect(max_bytes=0).kept == 1
    age(lease, LEASE_SECONDS + 60)
    assert store.collect(max_bytes=0).kept == 0
    assert not lease.exists()


def test_temporaries_go_when_their_writer_is_gone_or_long_silent(tmp_path):
    store, entries = fill(tmp_path)
    folder, name = store.roots[0].entry_path(entries[0].key).parent, f"{entries[0].key}.json"
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    host = process.host()
    kinds = {
        "dead": (f".{name}.{host}-{child}-{RANDOM}.tmp", 0, True),
        "alive": (f".{name}.{process.owner(host)}-{RANDOM}.tmp", 0, False),
        "foreign": (f".{name}.0123456789ab-77-{RANDOM}.tmp", 0, False),
        "silent": (f".{name}.0123456789ab-78-{RANDOM}.tmp", 2 * DAY, True),
        "of the future": (f".{name}.0123456789ab-79-{RANDOM}.tmp", -2 * DAY, True),
        "of nobody": (".e.tmp", 2 * DAY, False),
        "of another folder": (f".{name[:-5]}.0123456789ab-77-{RANDOM}.tmp", 2 * DAY, False),
    }
    for name, ago, _ in kinds.values():
        (folder / name).write_bytes(b"12")
        age(folder / name, ago)
    report = store.collect()
    assert report.temporaries == 3
    assert report.freed_bytes == 6
    for kind, (name, _, goes) in kinds.items():
        assert (folder / name).exists() is not goes, kind


def test_locks_that_nobody_needs_go(tmp_path):
    store, entries = fill(tmp_path, 2)
    young, old = "1" * 64, "2" * 64
    for key in (entries[0].key, entries[1].key, young, old):
        with store.lock(key):
            pass
    age(store.roots[0].lock_path(old), 2 * DAY)
    with store.lock(entries[1].key):
        assert store.collect().locks == 2
    assert sorted(path.stem for path in (tmp_path / "locks").iterdir()) == sorted([entries[1].key, young])


def test_signatures_go_with_what_they_sign(tmp_path):
    store, entries = fill(tmp_path, 2)

    def sign(data, ago):
        path = tmp_path / "signatures" / sha256(data)[:2] / f"{sha256(data)}.0123456789abcdef"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 64)
        age(path, ago)
        return path

    root = store.roots[0]
    signed = [
        [sign(path.read_bytes(), 3 * DAY) for path in (root.entry_path(entry.key), root.name_path(name, "sm_90a"))]
        for entry, name in zip(entries, ("f/k0@v", "f/k1@v"), strict=True)
    ]
    young, old = sign(b"about to be published", 0), sign(b"replaced long ago", DAY)
    store.collect(max_age=150)
    assert [path.exists() for path in (*signed[0], *signed[1], young, old)] == [False, False, True, True, True, False]


def test_a_mark_says_where_an_entry_ran(tmp_path):
    store, entries = fill(tmp_path)
    key = entries[0].key
    mark, other = mark_path(tmp_path, key), tmp_path / "other"
    assert store.ran(key) == []
    for gpu in ("NVIDIA H100", "NVIDIA H200", "NVIDIA H100"):
        store.note_run(key, gpu)
    assert store.ran(key) == ["NVIDIA H100", "NVIDIA H200"]
    store.note_run(key, "x" * 5000)  # more than a mark takes
    store.note_run("0" * 64, "NVIDIA H100")  # of no entry
    assert store.ran(key) == ["NVIDIA H100", "NVIDIA H200"] and not mark_path(tmp_path, "0" * 64).exists()
    mark.write_bytes(b"NVIDIA H200\n\x1b[31mred\n\xff\nNVIDIA B200")
    assert store.ran(key) == ["NVIDIA H200", "\ufffd"]  # neither control characters nor half a line
    mark.unlink()
    other.write_text("mine\n")
    os.link(other, mark)
    store.note_run(key, "NVIDIA H100")  # a second link, which may be anybody's, is replaced
    assert other.read_text() == "mine\n" and store.ran(key) == ["NVIDIA H100"]
    mark.unlink()
    mark.symlink_to(other)
    store.note_run(key, "NVIDIA H200")
    assert other.read_text() == "mine\n" and store.ran(key) == []


def test_marks_of_no_entry_go(tmp_path):
    store, entries = fill(tmp_path)
    store.roots[0].entry_path(entries[0].key).unlink()
    store.collect()
    assert not mark_path(tmp_path, entries[0].key).exists()
    assert mark_path(tmp_path, entries[1].key).exists()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_clock_that_jumps(tmp_path, ahead):
    """Everything was stamped by a clock that was a year wrong: nothing is lost by age, and size still holds."""
    store, entries = fill(tmp_path)
    for entry in entries:
        use(store, entry, -365 * DAY if ahead else 365 * DAY)
    if ahead:
        assert store.collect(max_age=30 * DAY).removed == 0
        assert store.load(entries[0].key) is not None
        stamp = mark_path(tmp_path, entries[1].key).stat().st_mtime
        assert stamp <= time.time() + 5  # it counts from now on
        time.sleep(0.1)
        assert store.collect(max_age=0.05).removed == 4
    else:
        assert store.load(entries[3].key) is not None
        store.collect(max_age=30 * DAY)
        assert held(store) == ["k3@v"]


def test_size_holds_though_every_stamp_is_in_the_future(tmp_path):
    store, entries = fill(tmp_path)
    for entry in entries:
        use(store, entry, -365 * DAY)
    assert store.collect(max_bytes=0).kept == 0


def test_what_a_later_version_wrote_keeps_its_cubin(tmp_path):
    store, entries = fill(tmp_path, 1)
    replant(store.roots[0].entry_path(entries[0].key), lambda d: d.update(schema=9, more={"x": 1}))
    assert store.collect().orphans == 0
    assert store.roots[0].blob(entries[0].cubin_sha256) is not None
    use(store, entries[0], 100)
    assert store.collect(max_age=50).removed == 1
    assert everything(tmp_path) == []


def test_an_entry_that_cannot_be_read_stops_the_removal_of_cubins(tmp_path):
    store, entries = fill(tmp_path, 2)
    path = store.roots[0].entry_path(entries[0].key)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    report = store.collect(max_age=150)
    assert str(path) in report.notes[0]
    assert store.roots[0].blob(entries[0].cubin_sha256) is not None
    assert store.load(entries[1].key) is not None


def test_what_lies_behind_a_link_to_a_folder_keeps_its_cubin(tmp_path):
    store, entries = fill(tmp_path / "store")
    folder = store.roots[0].entry_path(entries[0].key).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert store.load(entries[0].key, mark=False) is not None
    report = store.collect(max_age=0.001)
    assert str(folder) in report.notes[0]
    assert "no cubin and no signature is removed" in report.notes[0]
    assert store.load(entries[0].key, mark=False) is not None


def test_what_is_not_the_stores_is_left_alone(tmp_path):
    store, _ = fill(tmp_path / "store")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("notes.tmp", ".x.tmp", "a"):
        (outside / name).write_text("precious")
        age(outside / name, 9 * DAY)
    root = store.root
    (root / "names" / "link").symlink_to(outside)
    (root / "entries" / "zz").symlink_to(outside)
    (root / "blobs" / "sha256" / "zz").symlink_to(outside)
    (root / "entries" / "yy").mkdir()
    (root / "entries" / "yy" / "notes.txt").write_text("mine")
    os.mkfifo(root / "entries" / "yy" / ("0" * 64 + ".json"))
    (root / "blobs" / "sha256" / "yy" / ("1" * 64)).mkdir(parents=True)
    store.collect(max_bytes=0)
    assert sorted(path.name for path in outside.iterdir()) == [".x.tmp", "a", "notes.tmp"]
    assert (root / "entries" / "yy" / "notes.txt").exists()
    assert (root / "blobs" / "sha256" / "yy" / ("1" * 64)).exists()


def test_lower_roots_are_left_alone(tmp_path):
    lower, _ = fill(tmp_path / "lower")
    before = everything(tmp_path / "lower")
    upper = Store(tmp_path / "upper", [lower.root])
    upper.publish_name(build_record(build_entry(0)[0], "f/mine@v"))
    assert upper.collect(max_bytes=10**9).removed == 0
    assert everything(tmp_path / "lower") == before
    assert upper.find_name("f/mine@v", "sm_90a") is not None


def test_no_store_is_no_error(tmp_path):
    report = Store(tmp_path / "none").collect(max_bytes=0)
    assert (report.removed, report.kept) == (0, 0)
    assert not (tmp_path / "none").exists()


def test_a_store_that_cannot_be_written(unprivileged):
    store, _ = fill(unprivileged / "store")
    for path in (store.root, *store.root.rglob("*")):
        if path.is_dir():
            path.chmod(0o555)
    with pytest.raises(StoreError, match=r"grant access to it"):
        store.collect(max_bytes=0)
    assert len(held(store)) == 4
    assert store.collect(max_bytes=0, dry_run=True).removed == 4


@pytest.fixture(params=["EACCES", "EIO", "ESTALE"])
def unreadable(request, monkeypatch):
    return unreadable_files(monkeypatch, getattr(errno, request.param))


def test_what_an_unreadable_name_may_stand_for_stays(tmp_path, unreadable):
    store, _ = fill(tmp_path)
    name = store.roots[0].name_path("f/k0@v", "sm_90a")
    before = everything(tmp_path)
    unreadable(name)
    for dry_run in (True, False):
        report = store.collect(max_bytes=0, max_age=0.001, dry_run=dry_run)
        assert (report.removed, report.orphans, report.kept, report.unread) == (0, 0, 4, [str(name)])
        assert "no kernel is evicted" in report.notes[0]
        assert str(name) in report.notes[0]
    assert everything(tmp_path) == before


def test_removal_leaves_what_an_unreadable_name_may_stand_for(tmp_path, unreadable):
    store, entries = fill(tmp_path)
    store.publish_name(build_record(entries[0], "g/other@v"))
    time.sleep(0.1)
    other = store.roots[0].name_path("g/other@v", "sm_90a")
    unreadable(other)
    planned = store.discard([("f/k0@v", "sm_90a")], dry_run=True)
    done = store.discard([("f/k0@v", "sm_90a")])
    assert (planned.names, planned.may_be_needed, planned.unread) == (done.names, done.may_be_needed, done.unread)
    assert (done.names, done.may_be_needed, done.entries) == ([("f/k0@v", "sm_90a")], [entries[0].key], 0)
    assert done.unread == [str(other)]
    assert store.load(entries[0].key) is not None


def test_an_unreadable_name_can_be_removed_and_its_kernel_stays(tmp_path, unreadable):
    store, entries = fill(tmp_path)
    name = store.roots[0].name_path("f/k0@v", "sm_90a")
    unreadable(name)
    done = store.discard([("f/k0@v", "sm_90a")])
    assert (done.names, done.without_entry, done.unread) == ([("f/k0@v", "sm_90a")],) * 2 + ([str(name)],)
    assert store.load(entries[0].key) is not None


def test_removal_says_that_it_leaves_cubins(tmp_path, unreadable):
    store, entries = fill(tmp_path, 2)
    unreadable(store.roots[0].entry_path(entries[1].key))
    done = store.discard([("f/k0@v", "sm_90a")])
    assert (done.entries, done.cubins, done.unread) == (1, 1, [str(store.roots[0].entry_path(entries[1].key))])
    assert store.roots[0].blob(entries[0].cubin_sha256) is not None


def test_a_cubin_that_was_left_aside_stays_while_an_entry_cannot_be_read(tmp_path, unreadable):
    """A collection that was killed may have left it aside, and the entry that needs it may be the unreadable one."""
    store, entries = fill(tmp_path, 2)
    blob = store.roots[0].blob_path(entries[0].cubin_sha256)
    blob.rename(blob.with_name(f".{blob.name}.{process.host()}-{4194305}-{RANDOM}.tmp"))
    unreadable(store.roots[0].entry_path(entries[0].key))
    assert store.collect().temporaries == 0
    assert store.roots[0].blob(entries[0].cubin_sha256) is not None


def test_an_unreadable_lease_protects_everything(tmp_path, unreadable):
    """When it began is not known; its stamp is that of its last renewal."""
    store, entries = fill(tmp_path)
    with store.lease():
        store.present(entries[0].key)
        for lease in (tmp_path / "leases").iterdir():
            unreadable(lease)
            time.sleep(0.1)
            os.utime(lease)
        time.sleep(0.1)
        assert Store(tmp_path).collect(max_bytes=0).removed == 0


@pytest.mark.parametrize("days", [100, -100])
def test_a_dry_run_goes_by_the_clock_of_the_file_system(tmp_path, monkeypatch, days):
    store, _ = fill(tmp_path, idle=2 * DAY)
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + days * DAY)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(days * DAY) * 10**9)
    before = everything(tmp_path)
    planned = store.collect(max_age=5 * DAY, dry_run=True)
    assert everything(tmp_path) == before
    done = store.collect(max_age=5 * DAY)
    assert [kernel.key for kernel in planned.evicted] == [kernel.key for kernel in done.evicted]
    assert done.removed == 2


def test_removal_says_that_it_leaves_the_cubin_of_an_unreadable_entry(tmp_path, unreadable):
    store, entries = fill(tmp_path, 2)
    path = store.roots[0].entry_path(entries[0].key)
    unreadable(path)
    done = store.discard([("f/k0@v", "sm_90a")])
    assert (done.entries, done.cubins, done.unread) == (1, 1, [str(path)])
    assert store.roots[0].blob(entries[0].cubin_sha256) is not None


def test_an_adopted_kernel_does_not_keep_what_it_was_made_of(tmp_path):
    store = Store(tmp_path)
    of, blob = build_entry(1)
    fields = {**build_entry(2)[0].fields, ADOPTED: json.dumps(of.key)}
    kernel = dataclasses.replace(build_entry(2)[0], key=key_of(fields), fields=fields)
    for entry, data, name in ((of, blob, "f/of@v"), (kernel, build_entry(2)[1], "adopted/k@v")):
        store.publish(entry, data)
        store.publish_name(build_record(entry, name))
    time.sleep(0.1)
    report = store.discard([("f/of@v", "sm_90a")])
    assert (report.names, report.entries, report.shared) == ([("f/of@v", "sm_90a")], 1, {})
    assert store.find_entry(of.key) is None
    assert store.load(kernel.key)[0] == kernel

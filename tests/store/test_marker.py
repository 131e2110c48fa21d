"""What is a store: the marker, stores from before there was one, and folders that are something else."""

import os
import shutil

import pytest

from fusekit.errors import IntegrityError, NoStoreError
from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.layout import MARKER
from fusekit.store.marker import DATA, FORMAT, absence
from tests.store.attacks import COMMANDS, RANDOM, WRITERS, attempt, gone_owner, state, whole_store
from tests.store.collecting import DAY, age, everything
from tests.store.samples import build_entry

HEX = "0123456789abcdef" * 4


def make(root, paths):
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")
        age(file, 9 * DAY)


FOREIGN = {
    "a project": ("locks/terraform.tfstate", "used/photos/img.jpg", "main.tf"),
    "folders of our names": ("locks/terraform.tfstate", "used/photos/img.jpg", "entries/2024/diary.json"),
    "another store of blobs": (f"blobs/sha256/{HEX[:2]}/{HEX}",),
    "a registry": (f"blobs/sha256/{HEX[:2]}/{HEX}/data", "repositories/x/_layers/link"),
    "entries that are none": (f"entries/{HEX[:2]}/{HEX}.json", "README"),
    "one file": ("notes.txt",),
}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_that_is_something_else(tmp_path, aside, kind, command):
    root = tmp_path / "project"
    make(root, FOREIGN[kind])
    before = state(root)
    error = attempt(command, Store(root), aside)
    assert isinstance(error, NoStoreError)
    assert state(root) == before
    assert error.exit_code == 2
    assert str(root) in str(error)
    assert "name a store or an empty folder with --store or FUSEKIT_STORE" in str(error)
    assert isinstance(attempt("gc --dry-run", Store(root), aside), NoStoreError)
    for reader in ("verify", "ls", "load"):
        attempt(reader, Store(root), aside)
    assert state(root) == before
    assert "is no store of fusekit" in absence(root)
    # What the message says at its end works; and even then only what is fusekit's own goes.
    (root / MARKER).write_bytes(DATA)
    report = Store(root).collect(max_bytes=0)
    ours = {f"blobs/sha256/{HEX[:2]}/{HEX}", f"entries/{HEX[:2]}/{HEX}.json"}
    assert set(report.files) == set(FOREIGN[kind]) & ours
    assert {path for path in FOREIGN[kind] if not (root / path).exists()} == set(report.files)


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a new file system", "a temporary of a marker"])
def test_a_new_store_is_marked_first(tmp_path, aside, there, command):
    root = tmp_path / "store"
    if there != "nothing":
        root.mkdir()
    if there == "a new file system":
        (root / "lost+found").mkdir(0o700)
    elif there == "a temporary of a marker":
        (root / f".{MARKER}.{gone_owner()}.tmp").write_bytes(DATA[:3])
    result = attempt(command, Store(root), aside)
    assert not isinstance(result, NoStoreError)
    if command not in ("gc", "rm") or there.startswith("a temporary"):
        assert (root / MARKER).read_bytes() == DATA
        assert absence(root) is None


def older(root, kind):
    """A store as it was before there was a marker."""
    store = whole_store(root)
    (root / MARKER).unlink()
    if kind == "empty":
        for path in root.rglob("*"):
            if path.is_file():
                path.unlink()
    elif kind == "locks only":
        for path in root.iterdir():
            if path.name != "locks":
                shutil.rmtree(path)
    elif kind == "with strangers' files":
        make(root, ["notes.txt", "locks/terraform.tfstate"])
    elif kind == "damaged":
        make(root, [f"entries/00/{'0' * 64}.json"])
    return store


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["whole", "empty", "locks only", "with strangers' files", "damaged"])
def test_an_older_store_is_known_by_what_it_holds(tmp_path, aside, kind, command):
    root = tmp_path / "store"
    older(root, kind)
    assert absence(root) is None
    result = attempt(command, Store(root), aside)
    assert not isinstance(result, NoStoreError)
    if command not in ("import", "pull", "copy"):  # those may find all of it there
        assert (root / MARKER).exists() == (command in WRITERS or command == "gc without a policy")
    if kind == "with strangers' files":
        assert (root / "notes.txt").exists()
        assert (root / "locks" / "terraform.tfstate").exists()


def test_an_older_store_on_a_read_only_mount(unprivileged):
    store = older(unprivileged / "store", "whole")
    for path in (store.root, *store.root.rglob("*")):
        if path.is_dir():
            path.chmod(0o555)
    with store.lease():  # protects nothing there
        assert store.load(build_entry()[0].key) == build_entry()
        assert len(store.overview().rows) == 1
        assert not store.verify(full=True).bad


@pytest.mark.parametrize("command", WRITERS)
def test_a_store_of_a_later_format(tmp_path, aside, command):
    store = whole_store(tmp_path / "store")
    (store.root / MARKER).chmod(0o644)
    (store.root / MARKER).write_text(f'{{"fusekit_store":{FORMAT + 1},"more":[]}}\n')
    before = state(store.root)
    error = attempt(command, Store(store.root), aside)
    assert isinstance(error, NoStoreError)
    assert f"is a store of format {FORMAT + 1}" in str(error)
    assert "update fusekit" in str(error)
    assert state(store.root) == before


def test_readers_of_a_store_of_a_later_format(tmp_path):
    store, below = whole_store(tmp_path / "store"), whole_store(tmp_path / "below")
    (store.root / MARKER).chmod(0o644)
    (store.root / MARKER).write_text(f'{{"fusekit_store":{FORMAT + 1}}}\n')
    before = state(store.root)
    reader = Store(store.root)
    with pytest.raises(NoStoreError, match="format"):
        reader.load(build_entry()[0].key)
    assert "format" in reader.overview().problems[0]
    assert "format" in reader.verify().bad[0].problem
    # The other roots go on.
    assert Store(store.root, [below.root]).load(build_entry()[0].key) == build_entry()
    assert len(Store(store.root, [below.root]).overview().rows) == 1
    assert state(store.root) == before


@pytest.mark.parametrize("kind", ["text", "other JSON", "empty", "link", "folder", "FIFO"])
def test_a_marker_that_is_none(tmp_path, aside, kind):
    """Builders and collectors refuse it, readers go on, verification names it."""
    store, victim = whole_store(tmp_path / "store"), tmp_path / "victim"
    path = store.root / MARKER
    path.unlink()
    if kind == "link":
        victim.write_bytes(DATA)
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.write_text({"text": "precious", "other JSON": '{"fusekit_store":true}', "empty": ""}[kind])
    before = everything(store.root)
    for command in ("gc", "publish", "lock", "tune"):
        error = attempt(command, Store(store.root), aside)
        assert isinstance(error, IntegrityError), command
        assert str(path) in str(error)
    assert everything(store.root) == before
    assert Store(store.root).load(build_entry()[0].key) == build_entry()
    assert str(path) in {str(problem.path) for problem in store.verify().bad}
    if kind == "link":
        assert victim.read_bytes() == DATA


def test_what_a_dry_run_says_is_what_goes(tmp_path):
    """File by file, for a store with everything in it: in use, held, damaged, left behind, strange."""
    store = whole_store(tmp_path, 6)
    root = store.roots[0]
    keys = [build_entry(seed)[0].key for seed in range(6)]
    for number, key in enumerate(keys):
        for path in (root.entry_path(key), tmp_path / "used" / key[:2] / key):
            age(path, (number + 1) * 100)
    make(tmp_path, [
        f"used/{HEX[:2]}/{HEX}",  # a mark of nothing
        f"used/{HEX[:2]}/photo.jpg", "used/photos/img.jpg", "locks/terraform.tfstate", "leases/house.pdf",
        "tuning/a.odt",
        f"names/f/.k@v.sm_90a.json.{RANDOM}-9-{RANDOM}.tmp", "names/f/.draft.tmp", "notes.txt",
        f".now.{RANDOM}-9-{RANDOM}.tmp", f"tuning/.sm_90a.json.{RANDOM}-9-{RANDOM}.tmp", f"blobs/sha256/{HEX}",
        f"entries/zz/{HEX}.json", f"signatures/{HEX[:2]}/{HEX}.exe",
    ])  # fmt: skip
    os.mkfifo(tmp_path / "entries" / "pipe")
    (tmp_path / "used" / "00").mkdir(exist_ok=True)
    (tmp_path / "used" / "00" / ("0" * 64)).symlink_to(tmp_path / "notes.txt")
    with Store(tmp_path).lease(), Store(tmp_path).lock(keys[5]):
        store.load(keys[3])
        options = {"max_age": 250}
        before = everything(tmp_path)
        planned = store.collect(dry_run=True, **options)
        assert everything(tmp_path) == before
        done = store.collect(**options)
        after = everything(tmp_path)
    assert sorted(planned.files) == sorted(done.files) == sorted(set(before) - set(after))
    for label in ("removed", "kept", "freed_bytes", "kept_bytes", "orphans", "temporaries", "locks", "signatures",
                  "marks", "leases", "strays", "notes", "evicted"):  # fmt: skip
        expected, actual = getattr(planned, label), getattr(done, label)
        assert expected == actual or label == "evicted"
        assert actual or label == "in_use", label
    assert (
        [kernel.key for kernel in planned.evicted]
        == [kernel.key for kernel in done.evicted]
        == [keys[5], keys[4], keys[2]]
    )
    assert f"locks/{keys[5]}.lock" not in done.files
    strays = {path.removeprefix(f"{tmp_path}/") for path in done.strays}
    assert strays == {
        f"used/{HEX[:2]}/photo.jpg", "used/photos", "locks/terraform.tfstate", "leases/house.pdf", "tuning/a.odt",
        "names/f/.draft.tmp", f"blobs/sha256/{HEX}", "entries/zz", f"signatures/{HEX[:2]}/{HEX}.exe", "entries/pipe",
        f"used/00/{'0' * 64}",
    }  # fmt: skip
    assert {str(path).removeprefix(f"{tmp_path}/") for path in store.verify().strays} >= strays - {
        f"blobs/sha256/{HEX}", "entries/zz",
    }  # fmt: skip


def test_names_of_strangers_are_printed_safely(tmp_path):
    store = whole_store(tmp_path)
    (tmp_path / "locks" / "\x1b[2J\udcff").write_text("")
    (stray,) = store.collect().strays
    assert stray.isprintable()
    assert "\\x1b[2J" in stray


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_push_to_a_folder_that_is_something_else(tmp_path, kind):
    root = tmp_path / "project"
    make(root, FOREIGN[kind])
    before, store = state(root), whole_store(tmp_path / "store")
    for dry_run in (True, False):
        with pytest.raises(NoStoreError, match="or as the URL of a push"):
            push(store, select(store), Remote(str(root)), dry_run=dry_run)
    assert state(root) == before


def test_a_folder_that_was_pushed_to_is_a_store(tmp_path):
    store = whole_store(tmp_path / "store")
    push(store, select(store), Remote(str(tmp_path / "remote")))
    assert (tmp_path / "remote" / MARKER).read_bytes() == DATA

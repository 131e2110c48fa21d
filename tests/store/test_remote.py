"""Remotes: only what is missing moves, what breaks is resumed, and nothing that comes back is believed."""

import contextlib
import dataclasses
import functools
import http.server
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from fusekit.errors import IntegrityError, NotBuiltError, StoreError, UsageError
from fusekit.store import Store
from fusekit.store.exchange import Progress, pull, push
from fusekit.store.remote import Remote
from fusekit.store.selection import select
from fusekit.store.signature import Trust, generate, read_signing_key
from tests.store import pusher
from tests.store.samples import build_entry, build_record

NAMES = ("quickstart/fc1@128x160-c2x1", "quickstart/fc2@a", "other/fc1@b")


def fill(store, names=NAMES, first=0):
    for seed, name in enumerate(names, start=first):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        store.publish_name(build_record(entry, name))
    return store


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


@pytest.fixture(params=["memory", "folder", "file"])
def url(request, tmp_path):
    return {
        "memory": f"memory://{uuid.uuid4().hex}/kernels",
        "folder": str(tmp_path / "remote" / "kernels"),
        "file": f"file://{tmp_path}/remote/kernels/",
    }[request.param]


class Unsteady:
    """A file system that fails when `fails(operation, path)` says so, and writes down what it was asked for."""

    def __init__(self, real, fails=lambda operation, path: None):
        self.real = real
        self.fails = fails
        self.calls = []

    def __getattr__(self, name):
        value = getattr(self.real, name)
        if name not in ("pipe_file", "open", "find", "ls", "mv", "info", "makedirs"):
            return value

        @functools.wraps(value)
        def call(path, *arguments, **options):
            self.calls.append((name, path))
            error = self.fails(name, path)
            if error is not None:
                raise error
            return value(path, *arguments, **options)

        return call

    def count(self, operation, part=""):
        return sum(name == operation and part in path for name, path in self.calls)


def remote(url, fails=lambda operation, path: None):
    made = Remote(url, pause=0.001)
    made._fs = Unsteady(made._fs, fails)
    return made


def files(root):
    return {
        path.relative_to(root): path.read_bytes()
        for path in Path(root).rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "used")
    }


def damage(url, path, change):
    filesystem, root = fsspec.core.url_to_fs(url)
    full = f"{root.rstrip('/')}/{path}"
    data = change(filesystem.cat_file(full))
    filesystem.rm_file(full)
    if data is not None:
        filesystem.pipe_file(full, data)


# -- there and back ---------------------------------------------------------------------------------------------------


def test_there_and_back(store, url, tmp_path):
    steps: list[Progress] = []
    sent = push(store, select(store), Remote(url), notify=steps.append)
    assert (sent.entries, sent.names, sent.skipped, sent.failed) == (3, 3, 0, [])
    assert sent.bytes == sum(map(len, files(tmp_path / "store").values()))
    assert steps[0] == Progress(0, 6, 0)
    assert (steps[-1].done, steps[-1].bytes) == (6, sent.bytes)

    got = pull(Store(tmp_path / "seeded"), Remote(url))
    assert (got.entries, got.names, got.skipped, got.failed) == (3, 3, 0, [])
    assert files(tmp_path / "seeded") == files(tmp_path / "store")
    assert not Store(tmp_path / "seeded").verify(full=True).bad


def test_only_what_is_missing_moves(store, url, tmp_path):
    push(store, select(store, ["quickstart"]), Remote(url))
    second = remote(url)
    report = push(store, select(store), second)
    assert (report.entries, report.skipped, report.names) == (1, 2, 1)
    assert second._fs.count("pipe_file") == 3  # a cubin, an entry, a name
    again = remote(url)
    report = push(store, select(store), again)
    assert (report.entries, report.skipped, report.names, report.bytes) == (0, 3, 0, 0)
    assert again._fs.count("pipe_file") == 0
    assert again._fs.count("open", "blobs") == again._fs.count("open", "entries") == 0

    target = Store(tmp_path / "seeded")
    assert pull(target, Remote(url), ["quickstart/fc1"]).entries == 1
    second = remote(url)
    report = pull(target, second)
    assert (report.entries, report.skipped) == (2, 1)
    assert second._fs.count("open", "blobs") == second._fs.count("open", "entries") == 2
    again = remote(url)
    assert pull(target, again).bytes == 0
    assert again._fs.count("open", "blobs") == again._fs.count("open", "entries") == 0


def test_a_name_that_stands_for_another_kernel_now(store, url, tmp_path):
    push(store, select(store), Remote(url))
    pull(Store(tmp_path / "seeded"), Remote(url))
    fill(store, NAMES[:1], first=7)
    report = push(store, select(store), Remote(url))
    assert (report.entries, report.names) == (1, 1)
    report = pull(Store(tmp_path / "seeded"), Remote(url), [NAMES[0]])
    assert (report.entries, report.names) == (1, 1)
    assert Store(tmp_path / "seeded").find_name(NAMES[0], "sm_90a").key == build_entry(7)[0].key


def test_patterns(store, url, tmp_path):
    push(store, select(store), Remote(url))
    for patterns, count in ((["quickstart"], 2), (["*/fc1"], 2), (["other/fc1@b"], 1), (["quickstart", "other"], 3)):
        assert pull(Store(tmp_path / f"{count}-{patterns[0][0]}"), Remote(url), patterns).names == count
    with pytest.raises(NotBuiltError, match="does not list 'quickstart/none'"):
        pull(Store(tmp_path / "none"), Remote(url), ["quickstart", "quickstart/none"])
    with pytest.raises(NotBuiltError, match="does not list 'quickstart' for sm_100a"):
        pull(Store(tmp_path / "none"), Remote(url), ["quickstart"], "sm_100a")
    with pytest.raises(NotBuiltError, match="does not list any kernel"):
        pull(Store(tmp_path / "none"), Remote(f"{url}/elsewhere"))
    assert not (tmp_path / "none").exists()


def test_layers(store, url, tmp_path):
    layered = Store(tmp_path / "top", [tmp_path / "store"])
    assert push(layered, select(layered), Remote(url)).entries == 3
    assert pull(layered, Remote(url)).entries == 3  # into the writable store, which has none
    assert files(tmp_path / "top") == files(tmp_path / "store")


# -- connections that fail --------------------------------------------------------------------------------------------


def test_a_failing_connection_is_tried_again(store, url, tmp_path):
    failed = set()

    def once(operation, path):
        if (operation, path) in failed or ".tmp" in path:
            return None
        failed.add((operation, path))
        return ConnectionResetError("gone")

    assert push(store, select(store), remote(url, once)).entries == 3
    failed.clear()
    assert pull(Store(tmp_path / "seeded"), remote(url, once)).entries == 3
    assert len(failed) > 9
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_what_will_not_change_is_not_tried_again(store, url):
    broken = remote(url, lambda operation, path: PermissionError("no") if operation == "pipe_file" else None)
    with pytest.raises(StoreError, match=r"cannot write .*/blobs/.*: PermissionError: no; .* carries on"):
        push(store, select(store, [NAMES[0]]), broken)
    assert broken._fs.count("pipe_file") == 1


def test_a_listing_that_breaks_off_is_no_short_listing(store, tmp_path, monkeypatch):
    """fsspec's own walk leaves out a folder that it cannot list."""
    url = str(tmp_path / "remote")
    push(store, select(store), Remote(url))
    made = Remote(url, pause=0.001)
    real = made._fs.ls

    def ls(path, **options):
        if path.endswith("names/other"):
            raise ConnectionResetError("gone")
        return real(path, **options)

    monkeypatch.setattr(made._fs, "ls", ls)
    with pytest.raises(StoreError, match=r"cannot list .*/names, 5 times: ConnectionResetError"):
        pull(Store(tmp_path / "seeded"), made)


def test_a_connection_that_stays_away(store, url):
    broken = remote(url, lambda operation, path: TimeoutError("late") if operation in ("find", "ls") else None)
    with pytest.raises(StoreError, match=r"cannot list .*, 5 times: TimeoutError: late"):
        push(store, select(store), broken)
    assert broken._fs.count("ls") + broken._fs.count("find") == 5


@pytest.mark.parametrize("writes", range(0, 9, 2))
def test_a_broken_push_is_resumed(store, url, tmp_path, writes):
    def breaks(operation, path):
        return PermissionError("no more") if operation == "pipe_file" and broken._fs.count(operation) > writes else None

    broken = remote(url, breaks)
    with pytest.raises(StoreError):
        push(store, select(store), broken)
    # Whoever comes by now finds nothing that is wrong.
    target = Store(tmp_path / "meanwhile")
    with contextlib.suppress(NotBuiltError):
        assert pull(target, Remote(url)).failed == []
    assert not target.verify(full=True).bad
    resumed = remote(url)
    push(store, select(store), resumed)
    assert resumed._fs.count("pipe_file") == 9 - writes
    assert pull(Store(tmp_path / "seeded"), Remote(url)).failed == []
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


@pytest.mark.parametrize("reads", range(0, 9, 2))
def test_a_broken_pull_is_resumed(store, url, tmp_path, reads):
    push(store, select(store), Remote(url))

    def breaks(operation, path):
        return PermissionError("no more") if operation == "open" and broken._fs.count(operation) > reads else None

    broken = remote(url, breaks)
    target = Store(tmp_path / "seeded")
    with pytest.raises(StoreError):
        pull(target, broken)
    assert not target.verify(full=True).bad
    there = target.verify().entries
    report = pull(target, Remote(url))
    assert (report.skipped, report.entries) == (there, 3 - there)
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_a_push_that_was_killed_while_it_wrote(store, tmp_path):
    """On a file system, a part of a file never has its name."""
    url = str(tmp_path / "remote")
    broken = remote(url, lambda operation, path: ConnectionError("gone") if operation == "mv" else None)
    with pytest.raises(StoreError, match="5 times"):
        push(store, select(store), broken)
    assert files(url) == {}
    (tmp_path / "remote" / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (tmp_path / "remote" / "blobs" / "sha256" / ".x.1-ab.tmp").write_bytes(b"part")  # of one that was killed
    push(store, select(store), Remote(url))
    assert pull(Store(tmp_path / "seeded"), Remote(url)).entries == 3


# -- what is damaged there --------------------------------------------------------------------------------------------


def paths_of(seed, name):
    entry, _ = build_entry(seed)
    digest = entry.cubin_sha256
    return {
        "blob": f"blobs/sha256/{digest[:2]}/{digest}",
        "entry": f"entries/{entry.key[:2]}/{entry.key}.json",
        "name": f"names/{name}.sm_90a.json",
    }


@pytest.mark.parametrize("which", ["blob", "entry", "name"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: b"",
        lambda data: b"[" * 3000,
        lambda data: None,
    ],
    ids=["cut", "longer", "flipped", "empty", "nested", "missing"],
)
def test_what_is_damaged_is_refused_and_the_rest_comes(store, url, tmp_path, which, change):
    push(store, select(store), Remote(url))
    damage(url, paths_of(0, NAMES[0])[which], change)
    target = Store(tmp_path / "seeded")
    report = pull(target, Remote(url))
    gone = which == "name" and change(b"x" * 10) is None
    assert [name for name, _ in report.failed] == ([] if gone else [NAMES[0]])
    assert report.entries == 2
    assert sorted(found.record.name for found in target.names()) == sorted(NAMES[1:])
    assert not target.verify(full=True).bad
    # Pushing again mends it, and only it: with --full also where the sizes fit.
    mended = push(store, select(store), Remote(url), full=True)
    assert (mended.entries, mended.names) == ((0, 1) if which == "name" else (1, 0))
    assert pull(target, Remote(url)).failed == []
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


def test_a_cut_cubin_is_seen_by_its_size(store, url):
    push(store, select(store), Remote(url))
    damage(url, paths_of(0, NAMES[0])["blob"], lambda data: data[:-1])
    again = remote(url)
    assert push(store, select(store), again).entries == 1
    assert again._fs.count("pipe_file") == 2


def test_documents_in_each_others_place(store, url, tmp_path):
    push(store, select(store), Remote(url))
    filesystem, root = fsspec.core.url_to_fs(url)
    at = {
        (seed, what): f"{root.rstrip('/')}/{path}"
        for seed in (0, 1)
        for what, path in paths_of(seed, NAMES[seed]).items()
    }
    for what in ("blob", "entry", "name"):
        data = filesystem.cat_file(at[1, what])
        filesystem.rm_file(at[0, what])
        filesystem.pipe_file(at[0, what], data)
        target = Store(tmp_path / f"seeded-{what}")
        assert [name for name, _ in pull(target, Remote(url)).failed] == [NAMES[0]]
        assert not target.verify(full=True).bad
        push(store, select(store), Remote(url), full=True)


def test_an_enormous_answer_is_not_read(store, url, monkeypatch):
    push(store, select(store), Remote(url))
    made = Remote(url)

    class Endless:
        taken = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, count):
            Endless.taken += 1
            return b"x" * min(count, 1 << 16)

    monkeypatch.setattr(made._fs, "open", lambda path, mode: Endless())
    with pytest.raises(IntegrityError, match="more than 1048576 bytes; it may have at most 1048576"):
        made.read(paths_of(0, NAMES[0])["entry"], limit=1 << 20)
    assert Endless.taken == 17


def test_strange_files_are_left_alone(store, tmp_path):
    url = str(tmp_path / "remote")
    push(store, select(store), Remote(url))
    names = tmp_path / "remote" / "names"
    (names / "quickstart" / "readme.txt").write_text("hello")
    (names / "stray.json").write_text("{}")
    (names / "a" / "b").mkdir(parents=True)
    (names / "a" / "b" / "c@d.sm_90a.json").write_text("{}")
    os.mkfifo(names / "quickstart" / "pipe@x.sm_90a.json")
    (names / "quickstart" / "link@x.sm_90a.json").symlink_to("/dev/zero")
    (names / "quickstart" / "folder@x.sm_90a.json").mkdir()
    target = Store(tmp_path / "seeded")
    report = pull(target, Remote(url))
    assert report.entries == 3
    assert {name for name, _ in report.failed} <= {"quickstart/link@x", "quickstart/pipe@x"}
    assert files(tmp_path / "seeded") == files(tmp_path / "store")


# -- several at once --------------------------------------------------------------------------------------------------


def test_concurrent_pushers_agree(tmp_path):
    """Four processes, each with a build of its own of the same keys: what is there afterwards is whole."""
    url = str(tmp_path / "remote")
    root = Path(__file__).parents[2]
    pushers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.store.pusher", url, tmp_path / f"store-{age}", str(age)],
            cwd=root,
            stderr=subprocess.PIPE,
            text=True,
        )
        for age in range(4)
    ]
    for process in pushers:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    target = Store(tmp_path / "seeded")
    report = pull(target, Remote(url))
    assert (report.entries, report.names, report.failed) == (pusher.KERNELS, pusher.KERNELS, [])
    assert not target.verify(full=True).bad
    # And it stays so: none of them has anything to add.
    for age in range(4):
        store = Store(tmp_path / f"store-{age}")
        assert push(store, select(store), Remote(url)).bytes == 0


def test_the_entry_that_is_there_stands(store, url, tmp_path):
    push(store, select(store), Remote(url))
    entry, _ = build_entry(0)
    other = Store(tmp_path / "other")
    cubin = b"another build of it"
    slower = dataclasses.replace(build_entry(0, cubin)[0], seconds=900.25)
    other.publish(slower, cubin)
    other.publish_name(build_record(slower, NAMES[0]))
    assert push(other, select(other), Remote(url)).entries == 0
    pull(Store(tmp_path / "seeded"), Remote(url))
    assert Store(tmp_path / "seeded").find_entry(entry.key) == entry


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(store, tmp_path):
    """The store behind a plain web server."""
    pytest.importorskip("aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        listing = True

        def log_message(self, *_):
            pass

        def list_directory(self, path):
            if self.listing:
                return super().list_directory(path)
            self.send_error(403)
            return None

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "store"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.handler = Quiet
    yield server
    server.shutdown()
    server.server_close()


def test_over_http(served, tmp_path):
    url = f"http://127.0.0.1:{served.server_port}"
    report = pull(Store(tmp_path / "seeded"), Remote(url))
    assert (report.entries, report.names, report.failed) == (3, 3, [])
    assert files(tmp_path / "seeded") == files(tmp_path / "store")
    more = fill(Store(tmp_path / "seeded"), ["new/a@b"], 8)
    with pytest.raises(StoreError, match="cannot write"):
        push(more, select(more), Remote(url, pause=0.001))


def test_over_http_without_listings(served, tmp_path):
    served.handler.listing = False
    url = f"http://127.0.0.1:{served.server_port}"
    target = Store(tmp_path / "seeded")
    assert pull(target, Remote(url, pause=0.001), [NAMES[0]], "sm_90a").entries == 1
    with pytest.raises(NotBuiltError, match="full name and --arch"):
        pull(target, Remote(url, pause=0.001), ["quickstart"])
    with pytest.raises(NotBuiltError, match="quickstart/none@a"):
        pull(target, Remote(url, pause=0.001), ["quickstart/none@a"], "sm_90a")


def test_no_server(tmp_path):
    with pytest.raises(StoreError, match=r"cannot list .*, 2 times"):
        pull(Store(tmp_path / "seeded"), Remote("http://127.0.0.1:9/kernels", attempts=2, pause=0.001))


# -- signed ones ------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path):
    for name in ("ours", "stranger"):
        generate(tmp_path / name, name)
    return tmp_path


def trusting(keys, root="seeded", signing_key=None):
    return Store(keys / root, trust=Trust([keys / "ours.pub"]), signing_key=signing_key)


def test_signatures_travel_along(store, url, keys):
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    assert pull(trusting(keys), Remote(url)).failed == []
    assert not trusting(keys).verify(full=True).bad
    plain = Store(keys / "plain")
    pull(plain, Remote(url))
    assert files(keys / "plain") == files(keys / "seeded")
    assert push(signing, select(signing), Remote(url)).bytes == 0


def test_only_what_is_trusted_is_pulled(store, url, keys, monkeypatch):
    push(store, select(store), Remote(url))
    strangers = Store(keys / "store", signing_key=keys / "stranger")
    push(strangers, select(strangers), Remote(url))

    def parse(*_):
        raise AssertionError("parsed")

    monkeypatch.setattr("fusekit.store.names.unseal", parse)
    monkeypatch.setattr("fusekit.store.entries.unseal", parse)
    report = pull(trusting(keys), Remote(url))
    assert len(report.failed) == 3
    assert all("not signed" in error or "signed only by" in error for _, error in report.failed)
    assert not (keys / "seeded").exists()


def test_signing_what_was_pushed_unsigned(store, url, keys):
    push(store, select(store), Remote(url))
    signing = Store(keys / "store", signing_key=keys / "ours")
    again = remote(url)
    push(signing, select(signing), again)
    assert again._fs.count("pipe_file", "blobs") == again._fs.count("pipe_file", "entries") == 0
    assert pull(trusting(keys), Remote(url)).failed == []


def test_a_signed_entry_replaces_another_that_is_not(store, url, keys):
    entry, cubin = build_entry(0)
    other = Store(keys / "other")
    other.publish(dataclasses.replace(entry, seconds=2.5), cubin)
    other.publish_name(build_record(entry, NAMES[0]))
    push(other, select(other), Remote(url))
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    assert pull(trusting(keys), Remote(url)).failed == []
    assert trusting(keys).find_entry(entry.key) == entry


def test_a_forged_remote(store, url, keys):
    signing = Store(keys / "store", signing_key=keys / "ours")
    push(signing, select(signing), Remote(url))
    entry, _ = build_entry(0)
    forged = dataclasses.replace(entry, launch={**entry.launch, "dynamic_shared": 0})
    damage(url, paths_of(0, NAMES[0])["entry"], lambda data: forged.to_bytes())
    report = pull(trusting(keys), Remote(url))
    assert [name for name, _ in report.failed] == [NAMES[0]]
    assert "is not signed" in report.failed[0][1]
    key_id = read_signing_key(keys / "ours").public.id
    damage_signature = next(path for path in Remote(url).sizes("signatures") if path.endswith(key_id))
    damage(url, damage_signature, lambda data: bytes(64))
    assert len(pull(Store(keys / "plain"), Remote(url)).failed) == 0  # nobody asks for signatures there
    assert len(pull(trusting(keys, "again"), Remote(url)).failed) >= 1


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "message"), [("", "the URL is empty"), ("nothing://x/y", "Protocol not known")])
def test_no_such_url(bad, message):
    with pytest.raises(UsageError, match=message):
        Remote(bad)


def test_a_password_is_not_shown():
    assert Remote("http://me:secret@host/kernels").at("x") == "http://host/kernels/x"
    with pytest.raises(UsageError, match="nosuch://host/kernels: Protocol not known") as caught:
        Remote("nosuch://me:secret@host/kernels")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("missing", ["fsspec", "tenacity"])
def test_without_the_extra(missing, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StoreError, match=rf"package {missing}; pip install 'fusekit\[remote\]'"):
        Remote("memory://x")


def test_a_plugin_that_is_not_installed():
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match=r"s3://bucket/x: .*s3fs.*; each kind of URL has its fsspec plugin"):
            Remote("s3://bucket/x")

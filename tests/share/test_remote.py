"""Remotes: only what is missing moves, and several agree."""

import dataclasses
import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusekit.errors import NotBuiltError, StoreError, UsageError
from fusekit.share.push_pull import Progress, pull, push
from fusekit.share.remote import Remote, hidden, hidden_url
from fusekit.share.selection import select
from fusekit.store import Store
from tests.share import pusher
from tests.share.remotes import NAMES, fill, remote
from tests.store.samples import build_entry, build_record, files


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


# -- there and back ---------------------------------------------------------------------------------------------------


def test_there_and_back(store, url, tmp_path, caplog):
    steps: list[Progress] = []
    sent = push(store, select(store), Remote(url), notify=steps.append)
    assert (sent.entries, sent.names, sent.skipped, sent.failed) == (3, 3, 0, [])
    assert sent.bytes == sum(map(len, files(tmp_path / "store").values()))
    assert steps[0] == Progress(0, 6, 0)
    assert (steps[-1].done, steps[-1].bytes) == (6, sent.bytes)

    caplog.set_level("INFO", "fusekit")
    got = pull(Store(tmp_path / "seeded"), Remote(url))
    assert [log.getMessage() for log in caplog.records] == [
        f"downloaded {got.entries} kernels, {got.bytes} bytes, from {Remote(url).url} into {tmp_path / 'seeded'};"
        " there already: 0, refused: 0"
    ]
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


def test_roots(store, url, tmp_path):
    layered = Store(tmp_path / "top", [tmp_path / "store"])
    assert push(layered, select(layered), Remote(url)).entries == 3
    assert pull(layered, Remote(url)).entries == 3  # into the writable store, which has none
    assert files(tmp_path / "top") == files(tmp_path / "store")


# -- several at once --------------------------------------------------------------------------------------------------


def test_concurrent_pushers_agree(tmp_path):
    """Four processes, each with a build of its own of the same keys: what is there afterwards is whole."""
    url = str(tmp_path / "remote")
    root = Path(__file__).parents[2]
    pushers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.share.pusher", url, tmp_path / f"store-{age}", str(age)],
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


def test_without_credentials_there_is_one_attempt(tmp_path):
    class NoCredentialsError(Exception):
        """As botocore's, which need not be installed."""

    tries = []

    def step():
        tries.append(1)
        raise NoCredentialsError("Unable to locate credentials")

    with pytest.raises(StoreError, match=r"cannot read .*: NoCredentialsError: Unable to locate credentials"):
        Remote(str(tmp_path), attempts=3, pause=0.001).attempt("x", "read", step)
    assert len(tries) == 1


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "the URL is empty"),
        ("nothing://x/y", "Protocol not known"),
        ("http:/host/kernels", "two slashes after http:"),
        ("https://", "names no server"),
    ],
)
def test_no_such_url(bad, message):
    with pytest.raises(UsageError, match=message):
        Remote(bad)


def test_a_password_is_not_shown():
    assert Remote("http://me:secret@host/kernels").at("x") == "http://host/kernels/x"
    with pytest.raises(UsageError, match="nosuch://host/kernels: Protocol not known") as caught:
        Remote("nosuch://me:secret@host/kernels")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mark", [*"')\" ?#@/"])
@pytest.mark.parametrize("form", ["{}", "cannot reach ('{}'), twice", '<a "{}">: refused'])
def test_no_character_of_a_password_or_a_query_ends_its_hiding(form, mark):
    secret = f"Xq7{mark}Zk9"
    url = f"https://me:{secret}@host:8080/kernels?Signature={secret}&more=1#{secret}"
    texts = [hidden(form.format(url), url), hidden_url(url)]
    for bad in (url.replace("https", "nosuch"), url.replace("://", ":/")):
        with pytest.raises(UsageError) as caught:
            Remote(bad)
        texts.append(str(caught.value))
    assert not any(part in text for text in texts for part in ("Xq7", "Zk9"))
    assert ("https://host:8080/kernels" in texts[0]) == (mark not in "?#/")


@pytest.mark.parametrize("missing", ["fsspec", "tenacity"])
def test_without_the_extra(missing, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StoreError, match=rf"package {missing}; pip install 'fsspec>="):
        Remote("memory://x")


def test_a_plugin_that_is_not_installed():
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match=r"s3://bucket/x: .*s3fs.*; each kind of URL has its fsspec plugin"):
            Remote("s3://bucket/x")

"""Bundles that come in pieces, and what is looked at where it lies."""

import contextlib
import functools
import http.server
import io
import shutil
import tempfile
import threading

import pytest

from fusekit.errors import IntegrityError, SignatureError, StoreError, UsageError
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle, read_bundle
from fusekit.share.push_pull import pull, push, survey
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.share.source import Stream, bundle_source, is_bundle
from fusekit.store import Store
from fusekit.store.signature import Trust
from tests.share.bundles import NAMES, bundled, fill
from tests.share.remotes import damage, remote
from tests.store.samples import build_entry, files


def stream(data, taken=None, piece=1000):
    """`data` in pieces; `taken` counts their bytes."""

    def pieces():
        for start in range(0, len(data), piece):
            if taken is not None:
                taken.append(len(data[start : start + piece]))
            yield data[start : start + piece]

    return Stream("a pipe", pieces)


@pytest.mark.parametrize("piece", [1, 511, 1 << 20])
def test_a_bundle_from_a_pipe(store, bundle, tmp_path, piece):
    done = import_bundle(Store(tmp_path / "piped"), stream(bundle.read_bytes(), piece=piece))
    assert (done.entries, done.names) == (4, 5)
    assert files(tmp_path / "piped") == files(tmp_path / "store")


def test_no_more_is_taken_than_the_index_says(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("fusekit.share.bundle_import._HEAD_LIMIT", 4096)
    taken = []
    with pytest.raises(IntegrityError, match=r"a pipe has .* bytes, and by its index"):
        import_bundle(Store(tmp_path / "piped"), stream(bundle.read_bytes() + bytes(50 << 20), taken))
    assert sum(taken) < bundle.stat().st_size + 2000
    taken.clear()
    with pytest.raises(IntegrityError, match="a pipe is not a tar file"):
        import_bundle(Store(tmp_path / "piped"), stream(bytes(50 << 20), taken))
    assert sum(taken) < 6000
    assert not (tmp_path / "piped").exists()


@pytest.mark.parametrize("keep", [0, 100, 512, 700, 5000, -1])
def test_a_pipe_that_breaks_off(bundle, tmp_path, keep):
    with pytest.raises(IntegrityError, match="a pipe"):
        import_bundle(Store(tmp_path / "piped"), stream(bundle.read_bytes()[:keep]))
    assert not (tmp_path / "piped").exists()


def test_an_unsigned_pipe_is_refused_before_the_rest_is_taken(bundle, keys, monkeypatch):
    monkeypatch.setattr("fusekit.share.bundle_import._HEAD_LIMIT", 4096)
    taken = []
    with pytest.raises(SignatureError, match="a pipe is not signed"):
        trust = Trust([keys / "ours.pub"])
        import_bundle(Store(keys / "piped", trust=trust), stream(bundle.read_bytes() + bytes(1 << 20), taken))
    assert sum(taken) < 6000


def test_which_source(tmp_path):
    assert bundle_source("a/b.tar", io.BytesIO()).is_absolute()
    assert bundle_source("-", io.BytesIO(b"x")).where == "standard input"
    terminal = io.BytesIO()
    terminal.isatty = lambda: True
    with pytest.raises(UsageError, match="standard input is a terminal"):
        bundle_source("-", terminal)
    (tmp_path / "folder").mkdir()
    assert is_bundle("-")
    assert is_bundle(str(tmp_path / "absent.tar"))
    assert is_bundle("https://host/kernels.tar?sig=abc")
    assert not is_bundle(str(tmp_path / "folder"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """The folder `tmp_path` behind a web server, and how often it was asked; some answers break off."""
    pytest.importorskip("aiohttp")
    asked, broken = [], []

    class Breaking(Quiet):
        def do_GET(self):
            asked.append(self.path)
            with contextlib.suppress(OSError):
                if broken and self.path.endswith(".tar"):
                    broken.pop()
                    self.send_response(200)
                    self.send_header("Content-Length", "100000")
                    self.end_headers()
                    self.wfile.write(b"bundle.json")
                    self.close_connection = True
                else:
                    super().do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Breaking, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked, broken
    server.shutdown()
    server.server_close()


def test_a_bundle_from_a_web_server(store, bundle, web, tmp_path):
    url, asked, broken = web
    broken += [1, 1]
    done = import_bundle(Store(tmp_path / "fetched"), bundle_source(f"{url}/kernels.tar", io.BytesIO()))
    assert done.entries == 4
    assert asked == ["/kernels.tar"] * 3
    assert files(tmp_path / "fetched") == files(tmp_path / "store")
    with pytest.raises(StoreError, match=r"cannot read http://127.*/absent\.tar: there is no such file"):
        import_bundle(
            Store(tmp_path / "none"), bundle_source(f"{url.replace('//', '//me:x@')}/absent.tar", io.BytesIO())
        )
    with pytest.raises(StoreError, match=r"cannot read http://127[^?]*/absent\.tar: ") as caught:
        import_bundle(Store(tmp_path / "none"), bundle_source(f"{url}/absent.tar?Signature=topsecret", io.BytesIO()))
    assert "topsecret" not in str(caught.value)
    signed = bundle_source(f"{url}/kernels.tar?Signature=topsecret", io.BytesIO())
    assert import_bundle(Store(tmp_path / "fetched"), signed).skipped == 4
    (tmp_path / "kernels").write_bytes(bundle.read_bytes())
    assert is_bundle(f"{url}/kernels")
    assert not is_bundle(f"{url}/store")
    assert not is_bundle(f"{url}/nothing")


def test_nothing_is_changed_by_a_dry_run(store, bundle, url, tmp_path):
    push(store, select(store, ["quickstart"]), Remote(url))
    there = Remote(url).sizes("names")
    before = files(tmp_path / "store")
    report = push(store, select(store), Remote(url), dry_run=True)
    assert (report.entries, report.names, report.skipped) == (2, 2, 2)
    assert [step.name for step in report.steps] == ["other/fc1@b", "other/fc2@a"]
    assert report.bytes == sum(step.bytes for step in report.steps) == push(store, select(store), Remote(url)).bytes
    target = Store(tmp_path / "target")
    for make in (
        lambda dry: pull(target, Remote(url), dry_run=dry),
        lambda dry: import_bundle(target, bundle, dry_run=dry),
    ):
        dry = make(True)
        assert not (tmp_path / "target").exists()
        pull(target, Remote(url), ["quickstart"])
        partly, marks = make(True), files(tmp_path / "target")
        done = make(False)
        assert (partly.entries, partly.names, partly.skipped) == (done.entries, done.names, done.skipped)
        assert partly.steps == done.steps
        assert (dry.bytes, len(dry.steps)) != (partly.bytes, len(partly.steps))
        assert marks != files(tmp_path / "target")
        assert make(True).steps in ([], ())
        shutil.rmtree(tmp_path / "target")
    assert files(tmp_path / "store") == before
    assert len(there) == 3


def test_a_dry_run_marks_nothing_as_used(store, bundle, tmp_path):
    import_bundle(Store(tmp_path / "target"), bundle)
    used = {path: path.stat().st_mtime_ns for path in (tmp_path / "target").rglob("*")}
    import_bundle(Store(tmp_path / "target"), bundle, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "target").rglob("*")} == used


def test_what_lies_in_a_bundle_or_a_remote(store, bundle, url):
    records, entries = read_bundle(bundle)
    assert {record.name for record in records} >= set(NAMES)
    push(store, select(store), Remote(url))
    content = survey(Remote(url), cubins=True)
    assert (list(content.records), dict(content.entries), content.cubins) == (records, entries, 3)
    assert survey(Remote(url), patterns=["other"]).entries == {}
    entry, _ = build_entry(0)
    damage(url, f"blobs/sha256/{entry.cubin_sha256[:2]}/{entry.cubin_sha256}", lambda data: data[:-1] + b"!")
    assert survey(Remote(url), entries=True).failed == ()
    assert survey(Remote(url), entries=True, cubins=False).failed == ()  # it has its size
    with_it = {key for key, other in entries.items() if other.cubin_sha256 == entry.cubin_sha256}
    assert {key for _, key, _ in survey(Remote(url), cubins=True).failed} == with_it
    damage(url, f"blobs/sha256/{entry.cubin_sha256[:2]}/{entry.cubin_sha256}", lambda data: data[:-1])
    content = survey(Remote(url), cubins=False)
    assert {key for _, key, _ in content.failed} == with_it
    assert content.cubins == 2


def test_a_missing_cubin_is_found_where_none_is_read_and_where_none_is_listed(store, url, monkeypatch):
    push(store, select(store), Remote(url))
    entry, _ = build_entry(0)
    listed, silent = remote(url), remote(url)
    monkeypatch.setattr(silent, "sizes", lambda folder: {} if folder == "blobs" else Remote.sizes(silent, folder))
    assert [survey(server, cubins=False).failed for server in (listed, silent)] == [(), ()]
    assert (listed._fs.count("open", "/blobs/"), silent._fs.count("open", "/blobs/") > 0) == (0, True)
    damage(url, f"blobs/sha256/{entry.cubin_sha256[:2]}/{entry.cubin_sha256}", lambda data: None)
    for server in (listed, silent):
        (why,) = {why for _, _, why in survey(server, cubins=False).failed}
        assert f"{entry.cubin_sha256} is missing; " in why


def test_trust_counts_where_it_lies_too(keys, url):
    plain = fill(Store(keys / "store"))
    push(plain, select(plain), Remote(url))
    trust = Trust([keys / "ours.pub"])
    failed = survey(Remote(url), trust).failed
    assert len(failed) == 5
    assert all("is not signed" in why for _, _, why in failed)
    with pytest.raises(SignatureError):
        read_bundle(bundled(plain, keys / "k.tar"), trust)
    signing = Store(keys / "store", signing_key=keys / "ours")
    export_bundle(signing, select(signing), keys / "k.tar")
    assert len(read_bundle(keys / "k.tar", trust)[0]) == 5


def test_no_folder_takes_a_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StoreError, match=r"cannot keep a bundle in .*gone.*name another folder with TMPDIR"):
        import_bundle(Store(tmp_path / "store"), bundle_source("-", io.BytesIO(b"bundle")))
    assert not (tmp_path / "store").exists()

"""Servers that never end, never answer or lie about sizes: each is given up within bounds, with its place named."""

import contextlib
import gzip
import http.server
import threading
import time

import pytest

from fusekit.errors import IntegrityError, NotBuiltError, StoreError
from fusekit.share.bounds import FOLDER_DEPTH, Bounds
from fusekit.share.push_pull import pull
from fusekit.share.remote import Remote
from fusekit.store import Store
from tests.store.samples import build_entry, build_record

pytest.importorskip("aiohttp")
NAME = "quickstart/fc1@a"
PAGE = b"<html><a href='quickstart/'>q</a> <a href='?C=N'>sort</a> <a href='../'>up</a></html>"


class Hostile:
    """A web server whose `answer(handler)` says what becomes of a request; `sent`, `paths`: what it has done."""

    def __init__(self, answer):
        self.sent, self.paths = 0, []
        hostile = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hostile.paths.append(self.path)
                with contextlib.suppress(OSError):
                    answer(self)

            def log_message(self, *_):
                pass

            def send(self, body, **headers):
                self.send_response(200)
                for label, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(label.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body)

            def stream(self, piece, pause=0.0, status=200, pieces=100_000):
                self.send_response(status)
                self.send_header("Connection", "close")
                self.end_headers()
                for _ in range(pieces):
                    self.wfile.write(piece)
                    hostile.sent += len(piece)
                    time.sleep(pause)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://me:secret@127.0.0.1:{self.server.server_port}/kernels"
        self.place = f"http://127.0.0.1:{self.server.server_port}/kernels"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Hostile(answer))
        return servers[-1]

    yield start
    for hostile in servers:
        hostile.server.shutdown()
        hostile.server.server_close()


def refused(hostile, tmp_path, error=StoreError, patterns=(), arch=None, **bounds):
    """What `pull` says of the server; it names the place, shows no password, and leaves nothing in the store."""
    begun = time.monotonic()
    remote = Remote(hostile.url, attempts=2, pause=0.001, bounds=Bounds(**bounds))
    with pytest.raises(error) as caught:
        report = pull(Store(tmp_path / "seeded"), remote, patterns, arch)
        if report.failed:
            raise IntegrityError(report.failed[0][1])
    message = str(caught.value)
    assert "secret" not in message
    assert hostile.place in message
    assert len(message) < 2000
    assert time.monotonic() - begun < 20
    assert not (tmp_path / "seeded").exists()
    return message


@pytest.mark.parametrize("status", [200, 206])
def test_an_endless_document(serve, tmp_path, status):
    def answer(request):
        if request.path.endswith(".json"):
            request.stream(b"x" * (1 << 20), status=status)
        else:
            request.send_error(404)

    hostile = serve(answer)
    message = refused(hostile, tmp_path, IntegrityError, [NAME], "sm_90a")
    assert "has more than 16777216 bytes; it may have at most 16777216" in message
    assert hostile.sent < 200 << 20


def test_an_endless_listing(serve, tmp_path):
    hostile = serve(lambda request: request.stream(b'<a href="x">x</a>' * 10_000))
    assert "the listing has more than 16777216 bytes" in refused(hostile, tmp_path)
    assert hostile.sent < 200 << 20


def test_a_listing_of_too_many(serve, tmp_path):
    page = b"".join(b'<a href="k%d@a.sm_90a.json">x</a>' % number for number in range(2000))
    hostile = serve(lambda request: request.send(page))
    assert "more than 1000 files and folders" in refused(hostile, tmp_path, listing_entries=1000)


def test_a_listing_that_expands(serve, tmp_path):
    bomb = gzip.compress(bytes(64 << 20))
    hostile = serve(lambda request: request.send(bomb, Content_Encoding="gzip"))
    assert "the answer is compressed ('gzip'), which was not requested" in refused(hostile, tmp_path)
    assert len(bomb) < 1 << 20


def test_a_listing_that_nests_itself(serve, tmp_path):
    hostile = serve(lambda request: request.send(b'<a href="names/">x</a><a href="more/">x</a>'))
    refused(hostile, tmp_path, NotBuiltError)
    assert len(hostile.paths) < 2**FOLDER_DEPTH
    assert max(path.count("/") for path in hostile.paths) <= FOLDER_DEPTH + 2


def test_a_silent_server(serve, tmp_path):
    hostile = serve(lambda request: time.sleep(60))
    message = refused(hostile, tmp_path, silence=0.3)
    assert "TimeoutError: nothing came for 0.3 s" in message
    assert "2 times" in message


def test_a_silent_server_is_not_tried_for_ever(serve, tmp_path):
    hostile = serve(lambda request: time.sleep(60))
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"nothing came for 0\.2 s"):
        Remote(hostile.url, attempts=500, pause=0.001, bounds=Bounds(silence=0.2, patience=1.0)).sizes("names")
    assert 1.0 < time.monotonic() - begun < 5


def test_a_slow_trickle(serve, tmp_path):
    hostile = serve(lambda request: request.stream(b"x", pause=0.02))
    assert "bytes came in" in refused(hostile, tmp_path, grace=0.5)
    assert hostile.sent < 500


def test_a_slow_listing_of_many_folders(serve, tmp_path):
    def answer(request):
        time.sleep(0.05)
        request.send(b"".join(b'<a href="f%d/">x</a>' % number for number in range(200)))

    message = refused(serve(answer), tmp_path, listing_seconds=1.0)
    assert "the listing takes more than 1 s" in message or "bytes came in" in message


def test_more_than_one_command_may_read(serve, tmp_path):
    entry, cubin = build_entry(0, b"\x7fELF" + bytes(1 << 20))
    store = Store(tmp_path / "store")
    store.publish(entry, cubin)
    store.publish_name(build_record(entry, NAME))

    def answer(request):
        path = tmp_path / "store" / request.path.removeprefix("/kernels/")
        request.send(path.read_bytes()) if path.is_file() else request.send_error(404)

    message = refused(serve(answer), tmp_path, StoreError, [NAME], "sm_90a", total_bytes=1 << 20)
    assert "more than 1048576 bytes were read" in message
    assert pull(Store(tmp_path / "seeded"), Remote(serve(answer).url), [NAME], "sm_90a").entries == 1


def test_links_that_lead_elsewhere_are_not_followed(serve, tmp_path):
    page = PAGE + b"".join(
        b'<a href="%s">x</a>' % link
        for link in (
            b"http://127.0.0.2:1/x/",
            b"/",
            b"//h/",
            b"a%2f..%2fb/",
            b"%2e%2e/",
            b"[",
            b"http://[/",
            b"x" * 5000,
        )
    )
    hostile = serve(lambda request: request.send(page) if request.path.count("/") == 3 else request.send_error(404))
    refused(hostile, tmp_path, NotBuiltError)
    assert set(hostile.paths) <= {"/kernels/names/", "/kernels/names/quickstart/"}


def test_a_library_that_never_connects(monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: time.sleep(30))
    with pytest.raises(StoreError, match=r"sftp://host/k cannot be opened \(TimeoutError: not done within 0\.2 s\)"):
        Remote("sftp://me:secret@host/k", bounds=Bounds(grace=0.2))


def test_a_library_that_never_returns(tmp_path, monkeypatch):
    """A protocol whose plugin has no time limit of its own."""
    remote = Remote(str(tmp_path), attempts=1, pause=0.001, bounds=Bounds(grace=0.2, listing_seconds=0.2))
    remote._here = False
    monkeypatch.setattr(remote._fs, "ls", lambda *_, **__: time.sleep(30))
    with pytest.raises(StoreError, match=r"cannot list .*/names: TimeoutError: not done within 0\.2"):
        remote.sizes("names")
    monkeypatch.setattr(remote._fs, "info", lambda *_, **__: time.sleep(30))
    with pytest.raises(StoreError, match=r"cannot read .*/names/x: TimeoutError"):
        remote.read("names/x", limit=10)

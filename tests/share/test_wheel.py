"""Wheels: what is in one, what installs and removes it, and that its store is read as any root."""

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile

import pytest

from fusekit.config import Config
from fusekit.errors import IntegrityError, NotBuiltError, SignatureError, UsageError
from fusekit.share.selection import select
from fusekit.share.wheel import check_wheel_name, export_wheel, unpacked
from fusekit.store import Store, installed
from fusekit.store.lockfile import read_lock
from fusekit.store.signature import Trust, generate
from tests.share.bundles import NAMES, fill


@pytest.fixture
def store(tmp_path):
    return fill(Store(tmp_path / "store"))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path, empty."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    installed._roots.cache_clear()
    yield folder
    installed._roots.cache_clear()


def wheel_of(store, folder, *patterns, name="my-kernels", version="1.2"):
    return export_wheel(store, select(store, patterns), name, version, folder)[0]


def install(wheel, site):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    installed._roots.cache_clear()


def test_the_same_kernels_give_the_same_bytes(store, tmp_path):
    first = wheel_of(store, tmp_path / "dist")
    other = fill(Store(tmp_path / "other"))
    other.load(next(iter(other.names("other/fc1@b"))).record.key)  # marks it as used
    assert wheel_of(other, tmp_path / "dist2").read_bytes() == first.read_bytes()
    assert first.name == "my_kernels-1.2-py3-none-any.whl"


def test_its_record_lists_every_file(store, tmp_path):
    with zipfile.ZipFile(wheel_of(store, tmp_path)) as wheel:
        rows = [line.split(",") for line in wheel.read("my_kernels-1.2.dist-info/RECORD").decode().splitlines()]
        assert [row[0] for row in rows] == wheel.namelist()
        for name, digest, size in rows[:-1]:
            data = wheel.read(name)
            assert int(size) == len(data)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        folders = {"/".join(row[0].split("/")[:3]) for row in rows if "/store/" in row[0]}
    assert folders == {f"my_kernels/store/{part}" for part in ("fusekit-store.json", "blobs", "entries", "names")}


def test_an_installed_wheel_is_a_read_only_root(store, site, tmp_path):
    name = NAMES[2]
    install(wheel_of(store, tmp_path, name), site)
    ours = Store.open(Config(store=tmp_path / "empty"))
    assert [root.path for root in ours.roots] == [tmp_path / "empty", site / "my_kernels" / "store"]
    record = ours.find_name(name, "sm_90a")
    assert record == store.find_name(name, "sm_90a") and ours.load(record.key) == store.load(record.key)
    assert ours.verify(True).bad == () and ours.verify(True).names == 1
    with pytest.raises(NotBuiltError, match="build it with: fusekit build quickstart/linear"):
        raise ours.not_built("quickstart/linear")
    assert not (tmp_path / "empty" / "names").exists()
    shutil.rmtree(site / "my_kernels-1.2.dist-info")
    installed._roots.cache_clear()
    assert len(Store.open(Config(store=tmp_path / "empty")).roots) == 1


def test_the_writable_store_and_named_roots_come_first(store, site, tmp_path):
    install(wheel_of(store, tmp_path), site)
    install(wheel_of(store, tmp_path, name="Another.One"), site)
    roots = Store.open(Config(store=tmp_path / "empty", read_only_roots=(tmp_path / "named",))).roots
    names = ["another_one", "my_kernels"]
    assert [root.path for root in roots] == [
        tmp_path / "empty", tmp_path / "named", *(site / name / "store" for name in names)
    ]  # fmt: skip


def test_a_damaged_file_of_a_wheel_is_an_error(store, site, tmp_path):
    install(wheel_of(store, tmp_path, NAMES[2]), site)
    blob = next(path for path in (site / "my_kernels/store/blobs").rglob("*") if path.is_file())
    blob.write_bytes(b"x" * blob.stat().st_size)
    ours = Store.open(Config(store=tmp_path / "empty"))
    with pytest.raises(IntegrityError):
        ours.load(ours.find_name(NAMES[2], "sm_90a").key, mark=False)
    assert ours.verify(True).bad


def test_signatures_and_the_signed_lock_are_in_it(store, site, tmp_path):
    private, public = tmp_path / "key", tmp_path / "key.pub"
    generate(private)
    signing = Store(tmp_path / "store", signing_key=private)
    install(wheel_of(signing, tmp_path, NAMES[2]), site)
    (lock,) = (site / "my_kernels" / "locks").glob("*.json")
    assert [name for name, _ in read_lock(lock, Trust((public,)), folder=True).kernels] == [NAMES[2]]
    trusting = Store.open(Config(store=tmp_path / "empty", trusted_keys=(public,)))
    assert trusting.load(trusting.find_name(NAMES[2], "sm_90a").key) is not None
    generate(tmp_path / "other")
    wary = Store.open(Config(store=tmp_path / "empty", trusted_keys=(tmp_path / "other.pub",)))
    with pytest.raises(SignatureError):
        wary.find_name(NAMES[2], "sm_90a")


def test_a_wheel_is_read_without_installing_it(store, tmp_path):
    wheel = wheel_of(store, tmp_path)
    with zipfile.ZipFile(wheel, "a") as file:
        for stray in ("../../escaped", "../names/a/b@c.sm_90a.json", "names/x", "tuning/sm_90a.json", "/etc/x"):
            file.writestr(f"my_kernels/store/{stray}", b"stray")
        file.writestr("other/store/names/a/b@c.sm_90a.json", b"stray")
    with unpacked(wheel) as folder:
        copy = Store(folder)
        assert [listed.record for listed in copy.names()] == [listed.record for listed in store.names()]
        assert not copy.verify(True).bad
        assert not [path for path in folder.parent.rglob("*") if path.is_file() and path.read_bytes() == b"stray"]
    assert not folder.exists()


def test_a_file_that_is_no_wheel_of_kernels(tmp_path):
    other, text = tmp_path / "other.whl", tmp_path / "text.whl"
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("other/__init__.py", b"")
    text.write_text("text")
    for path, error, message in (
        (other, UsageError, "has no store of kernels"), (text, IntegrityError, "not a readable wheel"),
        (tmp_path / "none.whl", UsageError, "there is no wheel"),
    ):  # fmt: skip
        with pytest.raises(error, match=message), unpacked(path):
            pass


def test_metadata_that_names_no_store_is_passed_over(site, tmp_path):
    texts = {
        "a": b"[console_scripts]\nfusekit.stores = a\n", "b": b"[fusekit.stores]\nb = ../../b\n", "c": b"\xff",
        "d": b"[fusekit.stores]\nd = d\n[other]\ne = e\n",
    }  # fmt: skip
    for name, text in texts.items():
        (site / f"{name}-1.dist-info").mkdir()
        (site / f"{name}-1.dist-info" / "entry_points.txt").write_bytes(text)
    for name in "abe":
        (site / name / "store").mkdir(parents=True)
    installed._roots.cache_clear()
    assert installed.installed_roots() == ()


@pytest.mark.parametrize("text", ["kernels", "1.0", "my kernels-1.0", "kernels-1.0-x", "../k-1.0", "k-1.0/..", "-1"])
def test_a_name_that_no_wheel_can_have(text):
    with pytest.raises(UsageError, match="is not NAME-VERSION; a wheel is called such as my-kernels"):
        check_wheel_name(text)


@pytest.mark.parametrize("text", ["k-1", "a.b_c-d-0.2.0rc1", "fusekit-kernels-sm90a-0.2.0.post1.dev3"])
def test_names_of_wheels(text):
    assert "-".join(check_wheel_name(text)) == text


def test_pip_installs_and_removes_it(store, tmp_path):
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    wheel = wheel_of(store, tmp_path)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--no-index", "--no-deps", "--no-compile", "--target", str(tmp_path / "target")]
    subprocess.run([*pip, "install", *target, str(wheel)], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from fusekit.store import Store;"
        "from fusekit.config import Config; print(len(list(Store.open(Config(store=Path(sys.argv[2]))).names())))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "target"), str(tmp_path / "empty")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(list(store.names()))

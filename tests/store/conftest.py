"""Fixtures of the store's tests."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from fusekit.store import Entry, NameRecord, Store, process
from fusekit.store.signature import generate
from tests.share.bundles import bundled, fill
from tests.store import attacks
from tests.store.samples import build_entry, build_record

NOBODY = 65534


@pytest.fixture
def make_entry() -> Callable[..., tuple[Entry, bytes]]:
    return build_entry


@pytest.fixture
def make_record() -> Callable[..., NameRecord]:
    return build_record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of five names, for tests that do not make one of their own."""
    return fill(Store(tmp_path / "store"))


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Path:
    """A bundle of all that is in `store`."""
    return bundled(store, tmp_path / "kernels.tar")


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, for a test that runs without the power to ignore permissions, also where the suite runs as root."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    # What is imported late is imported now: this process may be unable to read its own library afterwards.
    build_entry(0)[0].to_bytes()
    process.host()
    import_module("filelock")
    if root:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o700)
        shutil.rmtree(folder)


@pytest.fixture(params=["memory", "folder", "file"])
def url(request, tmp_path):
    return {
        "memory": f"memory://{uuid.uuid4().hex}/kernels",
        "folder": str(tmp_path / "remote" / "kernels"),
        "file": f"file://{tmp_path}/remote/kernels/",
    }[request.param]


@pytest.fixture
def keys(tmp_path):
    """Two private keys: ours and a stranger's."""
    for name in ("ours", "stranger"):
        generate(tmp_path / name, f"{name} of the tests")
    return tmp_path


@pytest.fixture(scope="module")
def aside(tmp_path_factory):
    """A bundle, a remote and another store, to take kernels from."""
    folder = tmp_path_factory.mktemp("aside")
    attacks.bundle(folder)
    return folder

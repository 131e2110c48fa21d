"""The tests' own small kernel, importable by name: compile processes import it so."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusekit.compiler import pool
from fusekit.store import Store

from .servers import Popen

sys.path.insert(0, str(Path(__file__).parent))
AS_STARTED = {"test_pool"}


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Popen]:
    """What servers are forked from."""
    popen = Popen(tmp_path_factory.mktemp("servers"))
    yield popen
    popen.close()


@pytest.fixture(scope="module", autouse=True)
def quick_servers(request: pytest.FixtureRequest, forked: Popen) -> Iterator[None]:
    """Builds of this process import the compiler once, except in the tests of the servers themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in AS_STARTED:
            names = {name: getattr(pool.subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
            patch.setattr(pool, "subprocess", SimpleNamespace(Popen=forked, **names))
        yield


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def tilecopy():
    return pytest.importorskip("tilecopy", reason="the CuTe DSL (extra `build`) is not installed")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    tilecopy = pytest.importorskip("tilecopy", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.trace import compile_plan

    return compile_plan(tilecopy.plan(), tmp_path_factory.mktemp("scratch"))

"""The tests' own small kernel, importable by name: compile processes import it so."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusekit.compiler import pool
from fusekit.store import Store

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def started_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of fork servers start them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem == "test_pool":
            patch.setattr(pool, "subprocess", subprocess)
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

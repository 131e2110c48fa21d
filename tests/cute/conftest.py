"""Programs under `fusekit exec`, as processes, and the cache in this process."""

import os
import shutil
import subprocess

import pytest

from tests.cute.command import EXECUTE, LINE, ROOT


class Run:
    """One run of a program. out, err, code: as it ended; counts: (hits, misses) of its line on stderr."""

    def __init__(self, done):
        self.out, self.code = done.stdout, done.returncode
        match = LINE.search(done.stderr)
        self.counts = match and (int(match[1]), int(match[2]))
        self.err = LINE.sub("", done.stderr)


@pytest.fixture
def run(tmp_path):
    def run(*command, execute=EXECUTE, timeout=200, **variables):
        variables = {"FUSEKIT_STORE": str(tmp_path / "store"), "CUTE_DSL_ARCH": "sm_90a", **variables}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        done = subprocess.run(
            [*execute, *command], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
        )
        return Run(done)

    return run


@pytest.fixture(scope="module")
def device():
    """What stands in for a device."""
    from fusekit.compiler import dsl

    with dsl.target("sm_90a", 1024):
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory, device):
    """A store with the kernel as it is."""
    from tests.cute.rig import HIT, MISS, Rig

    root = tmp_path_factory.mktemp("filled") / "store"
    rig = Rig(root, root.parent / "report")
    assert rig.counted() == MISS
    assert rig.counted() == HIT
    return root


@pytest.fixture
def rig(tmp_path, filled):
    from tests.cute.rig import Rig

    shutil.copytree(filled, tmp_path / "store")
    return Rig(tmp_path / "store", tmp_path / "report")


@pytest.fixture
def empty(tmp_path):
    from tests.cute.rig import Rig

    return Rig(tmp_path / "store", tmp_path / "report")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where folders of runs of `fusekit exec --with` are; no variable of the packages is set."""
    from fusekit.cute.packages import PACKAGES

    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    for package in PACKAGES.values():
        for variable in package.variables:
            monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"

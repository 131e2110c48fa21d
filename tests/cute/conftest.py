"""Runs programs under `fusekit exec`, as processes."""

import os
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

"""Packages that compile CuTe DSL kernels, unmodified: every call is a hit the second time, and every hit is compared
with what the DSL compiles. Each call becomes a kernel with a launch record.
"""

import functools
import json
import os
import sys
from importlib.util import find_spec

import pytest

from tests.cute.command import EXECUTE
from tests.cute.test_exec import NO_DSL

PROMISED = 1.8  # cold to warm, CPU time of the calls


def _last(done):
    """(calls, CPU seconds): the last line, after what the package prints."""
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.parametrize("package", ["quack", "flash_attn", "flashinfer"])
def test_a_package_compiles_once(package, run, soak, figure):
    if not soak:
        pytest.skip("only with --soak: it takes a minute")
    pytest.importorskip("cutlass", reason=NO_DSL)
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = (sys.executable, "-m", "tests.cute.packages", package)
    run = functools.partial(run, *command, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    records = (*EXECUTE[:-1], "--records", "--")
    bare, cold, warm, compared = run(execute=()), run(execute=records), run(), run(FUSEKIT_VERIFY="1")
    count, seconds = _last(bare)
    assert (cold.counts, warm.counts, compared.counts) == ((0, count), (count, 0), (count, 0)), cold.err
    assert "is not what the DSL compiles" not in compared.err
    assert cold.err.count("fusekit: adopted as adopted/") == count
    took = [_last(each)[1] for each in (cold, warm)]
    assert took[1] * PROMISED <= seconds
    figure(
        f"fusekit exec, {package}, {count} calls of cute.compile, CPU seconds: {seconds:.2f} without, {took[0]:.2f}"
        f" cold, {took[1]:.2f} from the store"
    )

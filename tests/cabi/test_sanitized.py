"""The C of layers under the sanitizers: its tests once more, compiled with them, on a driver that launches nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .launcher import FLAGS
from .test_hostile import SANITIZERS

HERE = Path(__file__).parent


@pytest.mark.soak("runs the tests of layers in C once more, slower")
@pytest.mark.parametrize(
    "module", ["test_layers.py", "test_layer_bundles.py", "test_layer_ranks.py", "test_tvm_ffi.py"]
)
def test_no_access_is_out_of_bounds(module, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    preloaded = []
    for name in ("libasan.so", "libstdc++.so"):  # the second, so that the first finds how C++ throws
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        preloaded.append(found.stdout.strip())
    if not Path(preloaded[0]).is_absolute():
        pytest.skip("gcc has no sanitizers")
    options = " ".join(["-g", *SANITIZERS])
    compiler = tmp_path / "cc"  # that of `export --lang tvm-ffi`
    compiler.write_text(f'#!/bin/sh\nexec gcc {options} "$@"\n')
    compiler.chmod(0o755)
    environment = {
        FLAGS: options, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # those are Python's; and rustc does not run with it
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-k", "not rust", HERE / module]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout

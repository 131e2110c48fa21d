"""JAX in a process of its own: its threads would make the forks of other tests unsafe."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_calls_of_jax(soak):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    programs = [str(path) for path in sorted(Path(__file__).parent.glob("jax_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *programs, *(["--soak"] if soak else [])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # the driver is a fake one, also where there is a GPU
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most of the time goes into compiling what runs once
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

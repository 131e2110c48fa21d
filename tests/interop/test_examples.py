"""Examples that need no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

ROOT = Path(__file__).parents[2]


def test_the_readmes_program_trains_on_the_cpu(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FUSEKIT_STORE": str(tmp_path / "store")}
    command = [sys.executable, ROOT / "examples" / "train.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0: loss ")

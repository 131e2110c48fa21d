"""Layers of layers.toml inside jax.jit, each in a process of its own, with and without XLA's command buffers.

fusekit --store STORE build tests/gpu/layers.toml     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_jax_moe.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit import NotBuiltError

FLAGS = {"queued": "", "graphs": "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"}


@pytest.fixture(scope="session")
def usable():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    probe = "import jax; assert jax.devices('cuda'), 'jax sees no GPU'"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"JAX is not usable here: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("layer", ["qwen3", "gpt-oss", "deepseek", "choices", "router-f32"])
def test_layer(opened, usable, layer, flags):
    name = f"layers/{layer}"
    try:
        opened.layer(name)
    except NotBuiltError as error:
        pytest.skip(str(error))
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), FLAGS[flags]]).strip(),
    }
    command = [sys.executable, str(Path(__file__).with_name("layers_in_jax.py")), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

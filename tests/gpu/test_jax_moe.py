"""Layers of layers.toml inside jax.jit, each in a process of its own, with and without XLA's command buffers; and a
layer over two ranks, in one process and in two.

fusekit --store STORE build tests/gpu/layers.toml examples/ranks.toml ragged-dot     on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_jax_moe.py
"""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit import NotBuiltError

ROOT = Path(__file__).parents[2]
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
@pytest.mark.parametrize("layer", ["qwen3", "gpt-oss", "deepseek", "qwen3-next", "choices", "router-f32"])
def test_layer(opened, usable, layer, flags):
    name = f"layers/{layer}"
    try:
        opened.layer(name)
    except NotBuiltError as error:
        pytest.skip(str(error))
    command = [sys.executable, str(Path(__file__).with_name("layers_in_jax.py")), name]
    done = subprocess.run(
        command, env=environment(flags), capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("flags", FLAGS)
def test_ragged_dot(opened, usable, flags):
    if not opened.store.names("ragged-dot/*"):
        pytest.skip(f"no kernels of ragged-dot in {opened}; run fusekit build ragged-dot there and name the store")
    command = [sys.executable, str(Path(__file__).with_name("ragged_dot_in_jax.py"))]
    done = subprocess.run(
        command, env=environment(flags), capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def environment(flags):
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # XLA would try each product of plain JAX in many ways before it runs it, for most of a minute.
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0", FLAGS[flags]]).strip(),
    }


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("more", [[], ["--leave"]])
@pytest.mark.parametrize("processes", [1, 2])
def test_layer_over_ranks(opened, usable, processes, more, flags):
    """Values and gradients; a rank that stays away, after which the other says so in time."""
    if opened.devices.count < 2:
        pytest.skip("needs two devices")
    if not opened.store.names("ranks/*"):
        pytest.skip(f"no layer of the examples in {opened}; build examples/ranks.toml there and name the store")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(ROOT / "examples" / "jax_ranks.py"), *more]
    started = [
        subprocess.Popen(
            [*command, *([str(rank), address] if processes > 1 else [])], env=environment(flags),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        out = "".join(item.communicate(timeout=300)[0] for item in started)
    finally:
        for entry in started:
            entry.kill()
    assert [item.returncode for item in started] == [0] * processes and out.count("right") == 2, out[-6000:]
    assert not more or "rank 0 waited in launch" in out, out[-6000:]

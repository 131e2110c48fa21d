"""Where nothing is launched or compiled (macOS): a store is read, checked and filled, specs are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.samples import publish

# Of os on Linux alone.
LINUX = (
    "O_PATH", "O_TMPFILE", "copy_file_range", "eventfd", "getxattr", "memfd_create", "pidfd_open", "posix_fadvise",
    "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "sendfile", "setns", "splice",
)  # fmt: skip
ABSENT = ("cuda", "cutlass", "llvmlite", "torch", "numpy")
PRELUDE = f"""
import builtins, os, sys
for name in {LINUX}:
    if hasattr(os, name): delattr(os, name)
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {ABSENT} else self.finder.find_spec(name, *rest)
sys.meta_path[:] = map(Without, sys.meta_path)
sys.platform = "darwin"
real = os.readlink, builtins.open, os.open
def without_proc(call):
    def called(path, *arguments, **options):
        if str(path).startswith("/proc"): raise FileNotFoundError(2, "there is no /proc", path)
        return call(path, *arguments, **options)
    return called
os.readlink, builtins.open, os.open = map(without_proc, real)
import io
io.open = builtins.open
"""


def elsewhere(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command as on another system."""
    argv = ["fusekit", *map(str, arguments)]
    statement = f"{PRELUDE}\nfrom fusekit_cli.main import main\nsys.argv = {argv}\nsys.exit(main())"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    command = [sys.executable, "-c", statement]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments", [("ls",), ("verify", "--full"), ("show", "sample/fc1"), ("gc", "--dry-run"), ("export", "all.tar")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_store_is_read(tmp_path, arguments):
    publish(tmp_path / "store")
    done = elsewhere(tmp_path, "--store", tmp_path / "store", *arguments)
    assert done.returncode == 0, done.stderr


def test_a_bundle_travels(tmp_path):
    publish(tmp_path / "store")
    for arguments in (("--store", tmp_path / "store", "export", "all.tar"), ("--store", "other", "import", "all.tar")):
        done = elsewhere(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
    assert "sample/fc1" in elsewhere(tmp_path, "--store", "other", "ls").stdout


def test_a_spec_is_written(tmp_path):
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 4, "hidden_act": "silu", "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = elsewhere(tmp_path, "new", "config.json")
    assert done.returncode == 0, done.stderr
    assert "[[kernel]]" in done.stdout


def test_what_needs_a_driver_or_a_compiler_says_so(tmp_path):
    publish(tmp_path / "store")
    run = elsewhere(tmp_path, "--store", tmp_path / "store", "run", "sample/fc1")
    assert (run.returncode, "Traceback" in run.stderr) == (4, False), run.stderr
    for arguments in (("build", "quickstart"), ("lock", "quickstart")):
        done = elsewhere(tmp_path, "--store", tmp_path / "store", *arguments)
        assert done.returncode in (1, 2), done.stdout
        assert "Traceback" not in done.stderr
        assert "the CuTe DSL; pip install '.[build]'" in done.stderr

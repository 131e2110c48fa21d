"""Where nothing is launched or compiled (macOS): a store is read, checked and filled, specs are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.share.push_pull import push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store.lockfile import Build, Lock
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
    return python(folder, f"{PRELUDE}\nfrom fusekit_cli.main import main\nsys.argv = {argv}\nsys.exit(main())")


def python(folder: Path, statement: str) -> subprocess.CompletedProcess[str]:
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


def test_a_lock_is_synced(tmp_path):
    pytest.importorskip("fsspec")
    store = publish(tmp_path / "built")
    push(store, select(store), Remote(str(tmp_path / "remote")))
    (record,) = (listed.record for listed in store.names())
    build = Build.of("cu12", store.find_entry(record.key))
    lock = Lock("0" * 32, 1, None, {"cu12": {}}, {}, {(record.name, record.arch): (build,)})
    (tmp_path / "fusekit.lock").write_bytes(lock.to_bytes())
    (tmp_path / "fusekit.toml").write_text("[remotes]\nteam = 'remote'\n")
    done = elsewhere(tmp_path, "--store", "node", "sync", "--frozen")
    assert "serial 1: 1 from team; 0 missing" in done.stdout, done.stderr


def test_a_layer_is_computed(tmp_path):
    """Its definition, from a spec alone; that needs NumPy."""
    pytest.importorskip("numpy")
    (tmp_path / "model.toml").write_text(
        "schema = 1\n[[kernel]]\nname = 'mlp'\nkind = 'mlp'\nhidden = 64\nintermediate = 32\n"
    )
    statement = (
        "import numpy\nimport fusekit\nlayer = fusekit.open_library().layer('model.toml/mlp', device='cpu')\n"
        "from fusekit.interop.views import as_dtype\n"
        "x, w1, w2, y = (numpy.full(shape, 0x3F80, numpy.uint16) for shape in ((2, 64), (64, 64), (64, 32), (2, 64)))\n"
        "given = {name: as_dtype(array, 'bf16') for name, array in dict(x=x, w1=w1, w2=w2, y=y).items()}\n"
        "layer.forward(**given, scratch=numpy.empty(layer.sizes(2).inference, numpy.uint8))\n"
        "print(hex(y[0, 0]), 'cuda' in sys.modules)\n"
    )
    done = python(tmp_path, PRELUDE.replace(repr(ABSENT), repr(ABSENT[:-1])) + statement)
    assert done.stdout == "0x4800 False\n", done.stderr  # 32 * 64 * 64


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

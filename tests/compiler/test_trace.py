"""Compiling is reproducible, leaves nothing behind, and says what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusekit.compiler.trace import compile_plan
from fusekit.errors import BuildError

HERE = Path(__file__).parent
SCRIPT = """
import hashlib, json, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tilecopy
from fusekit.compiler.worker import plan
from fusekit.compiler.trace import compile_plan
from fusekit.spec import find

made = {}
for name, each in [("tilecopy", tilecopy.plan()), ("linear", plan(find(["quickstart/linear"])[0]))]:
    with tempfile.TemporaryDirectory() as scratch:
        compiled = compile_plan(each, Path(scratch))
    del compiled.proof["seconds"]
    made[name] = [hashlib.sha256(compiled.cubin).hexdigest(), compiled.launch, compiled.resources, compiled.proof]
print(json.dumps(made, sort_keys=True))
"""


def test_processes_folders_and_hash_seeds_give_the_same_bytes(tilecopy, tmp_path):
    outputs = []
    for seed in ("0", "4711"):
        folder = tmp_path / f"folder {seed}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(HERE)],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
        assert list(folder.iterdir()) == []
    assert outputs[0] == outputs[1]
    assert outputs[0]["tilecopy"][0] != outputs[0]["linear"][0]


@pytest.mark.parametrize("folder", ["a blank", "x --opt-level=0 --gpu-arch=sm_80", "a 'quote\" \\ $HOME;#"])
def test_the_scratch_folder_is_no_option(tilecopy, tmp_path, folder):
    """Whatever is in its path, such as that of TMPDIR, never reaches the compiler's options."""
    cubins = []
    for scratch in (tmp_path / "plain", tmp_path / folder):
        scratch.mkdir()
        cubins.append(compile_plan(tilecopy.plan(), scratch).cubin)
        assert list(scratch.iterdir()), "the DSL's dumps lie there"
    assert cubins[0] == cubins[1]


def test_the_working_directory_stays_empty(tilecopy, tmp_path, monkeypatch):
    scratch, folder = tmp_path / "scratch", tmp_path / "folder"
    scratch.mkdir()
    folder.mkdir()
    monkeypatch.chdir(folder)
    compile_plan(tilecopy.plan(), scratch)
    assert list(folder.iterdir()) == []


def test_no_driver_is_asked_for_the_architecture(tilecopy, tmp_path, monkeypatch):
    """Where a driver sees no GPU, the DSL's question for it takes a minute."""
    from cutlass.base_dsl import env_manager
    from cutlass.cutlass_dsl import CuTeDSL

    asked = []
    monkeypatch.setattr(env_manager, "detect_gpu_arch", lambda prefix: asked.append(prefix) or "sm_100a")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "_arch", None)
    compile_plan(tilecopy.plan(), tmp_path)
    assert asked == []


def test_a_kernel_that_the_dsl_refuses_is_a_build_error(tilecopy, tmp_path):
    with pytest.raises(BuildError, match=r"the CuTe DSL refuses the kernel: .*this kernel cannot be traced"):
        compile_plan(tilecopy.plan(SimpleNamespace(kernel="broken")), tmp_path)

"""What was captured, built again in another process and folder: the same cubins, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cute"
PROGRAM = """
import hashlib, json, sys, tempfile
import numpy as np
import fusekit
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

def kernels():
    {kernels}

digests = []
with fusekit.capture() as found:
    for function, arguments, options in kernels():
        with tempfile.TemporaryDirectory() as folder:
            options += f" --gpu-arch=sm_90a --keep-cubin --dump-dir={{folder}}"
            made = cute.compile(function, *arguments, options=options)
            digests.append(hashlib.sha256(made.artifacts.CUBIN).hexdigest())
assert not found.problems, found.problems
found.write(sys.argv[1])
print(json.dumps(digests))
"""
OWN = """
    import fusion, gemm, rows
    yield *fusion.arguments(), ""
    yield *rows.arguments(4), ""
    yield *gemm.arguments(), ""
    yield *fusion.arguments(), "--opt-level=1"
    x, y = np.zeros((16, 32), np.float32), np.zeros(16, np.float32)
    yield rows.SquareSum(2), (from_dlpack(x), from_dlpack(y), CUstream(0)), ""
    dynamic = from_dlpack(x, assumed_align=16).mark_compact_shape_dynamic(0, (0, 1), 8)
    yield rows.SquareSum(2), (dynamic, from_dlpack(y).mark_layout_dynamic(), CUstream(0)), ""
"""
SCORES = """
import cutlass
from cutlass import cute

def softcap(cap):
    inverse = 1.0 / cap
    @cute.jit
    def score(x):
        return x * inverse
    score.__vector__ = 2
    return score

def added(by, then):
    return lambda x: then(x) + by

class Scores:
    def __init__(self, score):
        self.score = score

    @cute.kernel
    def kernel(self, x: cute.Tensor, then: cutlass.Constexpr):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = then(self.score(x[thread]))

    @cute.jit
    def __call__(self, x: cute.Tensor, then: cutlass.Constexpr):
        self.kernel(x, then).launch(grid=[1, 1, 1], block=[16 * self.score.__vector__, 1, 1])
"""
INSIDE = """
    import scores
    x = from_dlpack(np.zeros(32, np.float32))
    for cap in (4.0, 8.0):
        capped, plain = scores.softcap(cap), scores.added(0.5, scores.added(1.5, abs))
        yield scores.Scores(capped), (x, plain), ""
        yield scores.Scores(capped), (x, scores.added(0.5, capped)), ""  # after it was traced once
"""
QUACK = """
    import cutlass
    from quack.rmsnorm import _compile_rmsnorm_fwd
    from quack.softmax import Softmax
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    original = type(cute.compile).__call__

    def kept(self, *args, options="", **kwargs):  # as QuACK calls it, with its own options, and the cubin kept
        with tempfile.TemporaryDirectory() as folder:
            made = original(self, *args, options=f"{options} --keep-cubin --dump-dir={folder}", **kwargs)
            digests.append(hashlib.sha256(made.artifacts.CUBIN).hexdigest())
        return made

    type(cute.compile).__call__ = kept
    _compile_rmsnorm_fwd.__wrapped__(bf16, bf16, None, f32, None, None, 4096, True, False, False, False)
    Softmax.compile.__wrapped__(bf16, bf16, 2048)
    type(cute.compile).__call__ = original
    yield from ()
"""


def captured_elsewhere(tmp_path, kernels):
    """(digests of what a program compiles, those of what `fusekit build` makes of its capture in another folder)."""
    modules, script, other = (tmp_path / name for name in ("modules", "script", "other"))
    for folder in (modules, script, other):
        folder.mkdir()
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, modules)
    (modules / "scores.py").write_text(SCORES)
    (script / "program.py").write_text(PROGRAM.format(kernels=kernels.strip()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEKIT_", "CUTE_DSL_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(modules), str(ROOT)]),
        "CUTE_DSL_ARCH": "sm_90a",
        "FUSEKIT_STORE": str(tmp_path / "store"),
    }
    file = other / "found.toml"
    done = run([sys.executable, script / "program.py", file], script, environment)
    del environment["CUTE_DSL_ARCH"]
    command = "from fusekit_cli.main import main; main()"
    built = run([sys.executable, "-c", command, "build", "found.toml", "--allow-extern", "--json"], other, environment)
    rows_ = json.loads(built.stdout)["built"]
    return json.loads(done.stdout), [row["cubin_sha256"] for row in rows_]


def run(command, folder, environment):
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.soak("six kernels more, compiled twice; the next test compares cubins in the same way")
def test_the_cubins_are_the_same_in_another_process_and_folder(tmp_path):
    compiled, built = captured_elsewhere(tmp_path, OWN)
    assert len(compiled) == 6
    assert built == compiled


def test_functions_made_inside_functions_are_made_again(tmp_path):
    """What they hold decides the cubin."""
    compiled, built = captured_elsewhere(tmp_path, INSIDE)
    assert len(set(compiled)) == 4
    assert built == compiled


def test_quacks_own_functions_are_captured_and_built_to_the_same_cubins(tmp_path):
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    compiled, built = captured_elsewhere(tmp_path, QUACK)
    assert len(compiled) == 2
    assert built == compiled

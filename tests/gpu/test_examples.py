"""The examples, each in a process of its own as a user would start it; the C ones are exported and compiled first."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fusekit import NotBuiltError, reference

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FC1, FIRST = "gpt-oss-20b/fc1-fwd", "quickstart/moe-fc1"
GROUPS, ROWS, H, I = 4, 700, 2880, 2880  # noqa: E741 (the field's own name)


# Frameworks that are installed but broken (by another NumPy than they know, say) are no fault of the example.
PROBES = {
    "numpy": "import numpy",
    "torch": "import torch; assert torch.cuda.is_available(), 'torch sees no GPU'",
    "jax": "import jax; assert jax.devices('cuda'), 'jax sees no GPU'",
    "cupy": "import cupy; cupy.zeros(1)",
    "numba": "import numba.cuda.np.arrayobj",
}


def stored(library, name):
    try:
        return library.find(name)
    except NotBuiltError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("file", "framework", "needs"),
    [
        ("first.py", "torch", FIRST), ("first_numpy.py", "numpy", FIRST), ("pytorch_moe.py", "torch", FIRST),
        ("jax_moe.py", "jax", FIRST), ("cupy_moe.py", "cupy", FIRST), ("numba_moe.py", "numba", FIRST),
        ("layer.py", "numpy", "layer/moe.fc1-fwd"), ("train.py", "torch", "layer/moe.fc1-fwd"),
    ],
)  # fmt: skip
def test_framework(opened, file, framework, needs):
    stored(opened, needs)
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    usable = subprocess.run([sys.executable, "-c", PROBES[framework]], capture_output=True, text=True, check=False)
    if usable.returncode:
        pytest.skip(f"{framework} does not work here: {usable.stderr.strip().splitlines()[-1]}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, EXAMPLES / file], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def problem(gpu, tmp_path_factory):
    """A folder with the inputs, and what the Python runtime makes of them."""
    from fusekit.runtime import DeviceArray

    kernel = gpu.library.load(stored(gpu.library, FC1).name)
    folder = tmp_path_factory.mktemp("fc1")
    inputs = reference.make_inputs(kernel.spec, E=GROUPS, M=ROWS, N=2 * I, K=H, seed=5)
    shapes = {"y": (ROWS, I), "preactivation": (ROWS, 2 * I)}
    arrays = {}
    for name in ("x", "w", "bias", "offsets"):
        values = np.ascontiguousarray(inputs[name])
        values.tofile(folder / f"{name}.bin")
        arrays[name] = DeviceArray(gpu.devices, values.shape, "i32" if name == "offsets" else "bf16")
        arrays[name].upload(values)
    for name, shape in shapes.items():
        arrays[name] = DeviceArray(gpu.devices, shape, "bf16")
        arrays[name].fill(0xFF)
    kernel(**arrays)
    gpu.finish("fc1 in Python")
    wanted = {name: bytes(arrays[name].download()) for name in shapes}
    outputs = {name: np.frombuffer(wanted[name], np.uint16).reshape(shape) for name, shape in shapes.items()}
    rows = reference.sample_rows(inputs["offsets"], 24)
    actual = reference.check(kernel.spec, inputs, outputs, rows)
    assert all(result.ok for result in actual.values()), "\n".join(map(str, actual.values()))
    return folder, wanted, kernel.name


def compiled(folder, file, compiler, standard):
    """The example over moe.c, which lies in the folder."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    language = ["-x", "c++"] if compiler == "g++" else []
    command = [compiler, f"-std={standard}", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{folder}",
               EXAMPLES / "c" / file, *language, folder / "moe.c", "-ldl", "-o", folder / "program"]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "program"


def compare(problem, program, *arguments):
    """Runs the program on the problem's folder; its outputs are those of Python, bit for bit."""
    folder, wanted, _ = problem
    for output in wanted:
        (folder / f"{output}.bin").unlink(missing_ok=True)
    sizes = [str(size) for size in (GROUPS, ROWS, H, I)]
    done = subprocess.run(
        [program, *arguments, folder, *sizes], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for output, data in wanted.items():
        assert (folder / f"{output}.bin").read_bytes() == data, f"{output} differs"


@pytest.mark.parametrize(("file", "compiler", "standard"), [("fc1.c", "gcc", "c11"), ("fc1.cpp", "g++", "c++17")])
def test_c_programs_give_the_bits_that_python_gives(gpu, problem, tmp_path, file, compiler, standard):
    from fusekit.abi import LaunchRecord
    from fusekit.cabi import Exported, generate

    record = gpu.library.find(problem[2])
    entry, cubin = gpu.library.store.load(record.key)
    exported = Exported(FC1, LaunchRecord.from_json(dict(entry.launch)), cubin, record.defaults)
    for target, text in generate([exported], "moe").items():
        (tmp_path / target).write_text(text)
    compare(problem, compiled(tmp_path, file, compiler, standard))


@pytest.mark.parametrize(("compiler", "standard"), [("gcc", "c11"), ("g++", "c++17")])
def test_a_c_program_that_reads_a_bundle_gives_them_too(gpu, problem, tmp_path, compiler, standard):
    from fusekit.cabi import generate_loader
    from fusekit.share.loader import export_bundle
    from fusekit.share.selection import select

    store = gpu.library.store
    export_bundle(store, select(store, [problem[2]]), tmp_path / "kernels.tar")
    for target, text in generate_loader("moe").items():
        (tmp_path / target).write_text(text)
    program = compiled(tmp_path, "bundle.c", compiler, standard)
    compare(problem, program, tmp_path / "kernels.tar", problem[2])

"""The C and C++ examples compile against an export, without warnings; they run in tests/gpu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusekit.cabi import Exported, generate, generate_loader
from fusekit.spec import find
from fusekit.spec.parse import parse_file
from tests.layers.samples import library
from tests.records import read_record

from .launcher import CUBIN, FLAGS, complete
from .layers import exported

EXAMPLES = Path(__file__).parents[2] / "examples" / "c"
COMMANDS = {
    "fc1.c": ("gcc", "-std=c11"),
    "fc1.cpp": ("g++", "-std=c++17"),
    "bundle.c": ("gcc", "-std=c11"),
}


@pytest.mark.parametrize("example", sorted(COMMANDS))
def test_it_compiles(example, tmp_path):
    compiler, standard = COMMANDS[example]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    spec = find(["gpt-oss-20b/fc1-fwd"])[0]
    kernels = [Exported(spec.full_name, complete(read_record(spec)), CUBIN)]
    texts = generate_loader("moe") if example == "bundle.c" else generate(kernels, "moe")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    language = ["-x", "c++"] if compiler == "g++" else []
    command = [compiler, standard, "-Wall", "-Wextra", "-Werror", "-Wpedantic", f"-I{tmp_path}", EXAMPLES / example,
               *language, tmp_path / "moe.c", "-ldl", "-o", tmp_path / "fc1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "fc1"], capture_output=True, check=False).returncode == 2  # usage


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """moe.h, moe.c and moe.o of the layer of the examples, whose kernels take the addresses of their tensors."""
    table = next(spec.layer for spec in find(["layer"]) if "." in spec.name)
    return exported_to(tmp_path_factory.mktemp("layer"), table)[0]


def exported_to(folder, table):
    """(the folder with the files of a layer and a driver, the layer in Python)."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    opened, _ = library(folder / "store", table)
    python = opened.layer(f"{table.file}/{table.name}")
    of_layer, kernels = exported(opened, python)
    for name, text in generate(kernels, "moe", [of_layer]).items():
        (folder / name).write_text(text)
    run(folder, "gcc", "-std=c11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c", "moe.c", "-o", "moe.o")
    launches = [step for kernel in kernels for step in kernel.record.launches]
    places = [[f"{each.offset} {each.size}" for each in step.parameters] for step in launches]
    rows = [" ".join([step.symbol, *places]) for step, places in zip(launches, places, strict=True)]
    (folder / "kernels.txt").write_text("\n".join(rows))
    driver = [Path(__file__).parent / "stand_in.c", "-o", "libcuda.so.1"]
    run(folder, "gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *driver)
    return folder, python


no_driver = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="it says that there is no driver")


def run(folder, *command, status=0, **environment):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr


def launches_of_an_inference(folder, *command):
    """Symbols of what a program launches, on a driver that does nothing."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    run(folder, *command, LD_LIBRARY_PATH=str(folder), STAND_IN_KERNELS="kernels.txt", STAND_IN_LOG="log")
    return [line.split()[0] for line in log.read_text().splitlines() if not line.startswith("allocate")]


@pytest.mark.parametrize("program", ["layer_ctypes.py", "rust/layer.rs"])
def test_a_layer_takes_less_than_40_lines(program):
    text = (EXAMPLES.parent / program).read_text()
    assert text in (EXAMPLES.parents[1] / "docs" / "embedding.md").read_text() and len(text.splitlines()) < 40


def test_a_layer_is_trained_in_c(layer):
    command = ["gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-I."]
    run(layer, *command, EXAMPLES / "train.c", "moe.o", "-ldl", "-o", "train")
    assert "usage" in run(layer, "./train", status=2)


def test_both_ranks_of_a_layer_are_launched_by_c(tmp_path):
    """On a driver that launches nothing: each rank's passes, on windows of both."""
    folder, python = exported_to(tmp_path, parse_file(EXAMPLES.parent / "ranks.toml")[0].layer)
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wpedantic", *os.environ.get(FLAGS, "").split()]
    run(folder, "gcc", "-std=c11", "-O1", *warnings, "-I.", EXAMPLES / "ranks.c", "moe.o", "-ldl", "-o", "ranks")
    assert "usage" in run(folder, "./ranks", status=2)
    tokens, sizes = (3, 0), {"w1": 8 * 256 * 512, "w2": 8 * 256 * 256}
    for rank, count in enumerate(tokens):
        (folder / "data" / str(rank)).mkdir(parents=True)
        own = {"x": 512, "dy": 512, "indices": 16, "weights": 16}
        for name, size in (sizes | {name: count * each for name, each in own.items()}).items():
            (folder / "data" / str(rank) / f"{name}.bin").write_bytes(bytes(size))
    driver = {"LD_LIBRARY_PATH": str(folder), "STAND_IN_KERNELS": "kernels.txt", "STAND_IN_LOG": "log"}
    run(folder, "./ranks", "data", *map(str, tokens), **driver)
    assert [(folder / "data" / str(rank) / "y.bin").stat().st_size for rank in (0, 1)] == [3 * 512, 0]
    lines = [line.split() for line in (folder / "log").read_text().splitlines() if not line.startswith("allocate")]
    steps = [
        step for which in ("forward", "backward")
        for step in python.record.launched(which, python.outputs(which), python.capacity)
    ]  # fmt: skip
    assert [line[0] for line in lines] == 2 * [step.part.replace("-", "_") for step in steps]
    windows = {}
    for step, line, other in zip(steps, lines, lines[len(steps) :], strict=False):
        if step.window:  # the last pointers
            assert line[5][-32:] == other[5][-32:] == windows.setdefault(step.window, line[5][-32:])
    assert len({*windows.values()}) == len(windows) == 3


@no_driver
def test_a_layer_is_launched_by_rust(layer):
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    run(layer, "ar", "rcs", "libmoe.a", "moe.o")
    command = ["rustc", "--edition", "2021", "-L", ".", "-l", "static=moe", "-l", "dl", "-o", "of_rust"]
    run(layer, *command, EXAMPLES.parent / "rust" / "layer.rs")
    assert "no NVIDIA driver" in run(layer, "./of_rust", status=101)
    assert len(launches_of_an_inference(layer, "./of_rust")) == 6


@no_driver
def test_a_layer_is_launched_by_ctypes(layer):
    run(layer, "gcc", "-shared", "moe.o", "-ldl", "-o", "moe.so")
    program = EXAMPLES.parent / "layer_ctypes.py"
    assert "no NVIDIA driver" in run(layer, sys.executable, "-S", program, "./moe.so", status=1)
    assert len(launches_of_an_inference(layer, sys.executable, "-S", program, "./moe.so")) == 6

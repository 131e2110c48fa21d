"""The C and C++ examples compile against an export, without warnings; they run in tests/gpu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fusekit.cabi import Exported, generate, generate_loader
from fusekit.spec import find
from tests.records import read_record

from .launcher import CUBIN, complete

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

"""An architecture is a row of facts and a folder of kernels: nothing else names one, and another row is enough."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fusekit"
ROOMS = ("spec", "choice", "plan", "layers", "interop")
ARCHITECTURE = re.compile(r"sm_?[0-9]{2,3}[a-z]?\b|hopper|blackwell|wgmma|tcgen05", re.IGNORECASE)


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_names_an_architecture(room):
    """Docstrings included."""
    files = [path for path in (PACKAGE / room).rglob("*.py") if "arch" not in path.relative_to(PACKAGE).parts]
    assert files
    result = {
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ARCHITECTURE.search(line)
    }
    assert not result


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The packages with one row more: of an architecture with more multiprocessors and less shared memory."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("fusekit", "cli", "kernel_specs"):
        shutil.copytree(PACKAGE.parent / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "fusekit_cli").symlink_to(folder / "cli")
    (folder / "fusekit" / "plan" / "arch" / "sm_99z.py").write_text(
        "from dataclasses import replace\n"
        "from fusekit.plan.arch import sm_90a\n"
        'ROW = replace(sm_90a.ROW, name="sm_99z", sms=200, shared_bytes=180 * 1024, default=False)\n'
    )
    return folder


def run(checkout, *arguments):
    environment = os.environ | {"PYTHONPATH": str(checkout), "FUSEKIT_STORE": str(checkout / "store")}
    command = [sys.executable, "-P", "-m", "fusekit", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_a_packaged_spec_is_built_for_the_architecture_that_is_asked_for(checkout):
    """Sweeps are judged by its row: what no longer fits is an error with that row's arithmetic."""
    done = run(checkout, "build", "quickstart/linear", "--arch", "sm_99z", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)["would_build"]
    assert [(item["name"], item["arch"]) for item in missing] == [("quickstart/linear@128x128-c2x1", "sm_99z")]
    both = run(checkout, "build", "quickstart/linear", "--arch", "sm_90a,sm_99z", "--dry-run", "--json")
    assert {load["arch"] for load in json.loads(both.stdout)["would_build"]} == {"sm_90a", "sm_99z"}
    plain = run(checkout, "build", "quickstart/linear", "--dry-run", "--json")
    assert {load["arch"] for load in json.loads(plain.stdout)["would_build"]} == {"sm_90a"}


def test_a_spec_file_of_ones_own_keeps_its_architecture(checkout):
    shutil.copy(checkout / "kernel_specs" / "quickstart.toml", checkout / "mine.toml")
    done = run(checkout, "build", "./mine.toml", "--arch", "sm_99z", "--dry-run")
    assert done.returncode == 2
    assert "none of the kernels named is for it; they are for sm_90a" in done.stderr


def test_an_architecture_without_a_row_is_refused(checkout):
    done = run(checkout, "build", "quickstart/linear", "--arch", "sm_98y", "--dry-run")
    assert done.returncode == 2
    assert "sm_98y" in done.stderr


def test_kernels_built_for_another_architecture_are_not_left_behind(checkout):
    """The packaged file does not name it, and `--prune` must not remove them."""
    code = (
        "from types import SimpleNamespace\n"
        "from fusekit.compiler.naming import left_behind\n"
        "from fusekit.spec.catalog import targets\n"
        "found = targets(['quickstart*'])\n"
        "names = {(spec.full_name, arch): None for spec in found[0].every for arch in ('sm_90a', 'sm_99z')}\n"
        "names['quickstart/gone@64x64', 'sm_90a'] = None\n"
        "store = SimpleNamespace(recorded=lambda file: names)\n"
        "print([each.name for each in left_behind(store, found)])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['quickstart/gone@64x64']\n", done.stderr

"""What pyproject.toml says about the tree is true of the tree."""

import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import fusekit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "fusekit", "cli", "kernel_specs", "cache_manifests", "tests"}


def test_every_package_is_installed():
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("fusekit/**/__init__.py")}
    packages = {".".join(folder.parts) for folder in folders}
    data = {"fusekit.kernel_specs", "fusekit.cache_manifests"}
    setuptools = PROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == packages | data | {"fusekit_cli"}
    assert {ROOT / folder for folder in setuptools["package-dir"].values()} == {
        ROOT / name for name in ("fusekit", "cli", "kernel_specs", "cache_manifests")
    }
    assert not list((ROOT / "cli").glob("*/__init__.py")), "cli is one flat package"


def test_the_top_level_is_this_and_no_more():
    assert all((ROOT / name).exists() for name in TOP_LEVEL)
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the tree cannot be told")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.partition("/")[0] for line in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


def test_data_folders_hold_only_data():
    assert {path.suffix for path in (ROOT / "kernel_specs").iterdir()} == {".toml"}
    assert {path.suffix for path in (ROOT / "cache_manifests").iterdir() if path.name != ".gitkeep"} <= {".json"}


def test_the_installed_version_is_this_one():
    assert version("fusekit") == fusekit.__version__


def test_license():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"

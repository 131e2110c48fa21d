"""What pyproject.toml says about the tree is true of the tree."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import fusekit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The folders that are installed, and as what.
FOLDERS = {
    "fusekit": "fusekit",
    "cli": "fusekit_cli",
    "kernel_specs": "fusekit/kernel_specs",
    "cache_manifests": "fusekit/cache_manifests",
}
PAGES = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples", "mkdocs.yml"}
TOP_LEVEL = {"pyproject.toml", "LICENSE", "tests", *PAGES, *FOLDERS}


def git(*arguments: str) -> list[str]:
    """The lines of a git command's answer; skips where this is no checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the tree cannot be told")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def build(what: str, tree: Path, folder: Path) -> Path:
    """What the build backend makes of `tree`: "sdist", "wheel" or "editable"."""
    folder.mkdir()
    code = f"import sys, hatchling.build as backend; print(backend.build_{what}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=tree, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of, with leftovers of an earlier build."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if not (ROOT / name).exists():
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    for left in ("build/lib/fusekit/kernel_specs/old.toml", "fusekit/__pycache__/old.cpython-311.pyc"):
        (copy / left).parent.mkdir(parents=True, exist_ok=True)
        (copy / left).write_text("schema = 1")
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build("sdist", tree, tree.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree, tree.parent / "wheel")


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tracked(tree: Path, *folders: str) -> dict[str, bytes]:
    names = git("ls-files", "--cached", "--others", "--exclude-standard", *folders)
    return {name: (tree / name).read_bytes() for name in names if (tree / name).is_file()}


def test_the_wheel_holds_every_file_of_the_tree_and_no_other(tree, wheel):
    expected = {}
    for name, data in tracked(tree, *FOLDERS).items():
        top, _, rest = name.partition("/")
        expected[f"{FOLDERS[top]}/{rest}"] = data
    got = {name: data for name, data in members(wheel).items() if ".dist-info/" not in name}
    assert got.keys() == expected.keys()
    assert got == expected
    assert {"fusekit/py.typed", "fusekit_cli/py.typed", "fusekit/cabi/core.h"} <= got.keys()


def test_the_sdist_holds_the_tests_and_the_examples(tree, sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    files = {name for name in tracked(tree) if not name.startswith((".ci/", ".editable/", ".github/"))}
    assert inside == files | {"PKG-INFO"}


def test_the_sdist_builds_the_same_wheel(tree, sdist, wheel):
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.0 to 3.11.3 has none
        archive.extractall(tree.parent / "unpacked", **safely)
    (source,) = (tree.parent / "unpacked").iterdir()
    assert members(build("wheel", source, tree.parent / "again")) == members(wheel)


def test_an_editable_install_is_the_tree(tree):
    added = [
        line
        for name, data in members(build("editable", tree, tree.parent / "editable")).items()
        if name.endswith(".pth")
        for line in data.decode().splitlines()
    ]
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import fusekit, fusekit_cli.main as main\n"
        "from fusekit.spec.catalog import packaged_folder\n"
        "print(fusekit.__file__, main.__file__, packaged_folder(), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code, *added], capture_output=True, text=True, check=True)
    got = [Path(line).resolve() for line in run.stdout.splitlines()]
    assert got == [tree / "fusekit" / "__init__.py", tree / "cli" / "main.py", tree / "kernel_specs"]


def test_the_top_level_is_this_and_no_more():
    assert all((ROOT / name).exists() for name in TOP_LEVEL)
    top = {line.partition("/")[0] for line in git("ls-files")}
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

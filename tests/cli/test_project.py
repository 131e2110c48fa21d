"""fusekit init, and commands in a folder with a project."""

import json

import pytest

from fusekit.store import Store
from tests.share.remotes import fill
from tests.spec.configs import CONFIGS
from tests.test_project import SPEC

UNSET = {"FUSEKIT_STORE": ""}


def test_init_lists_the_spec_files_of_the_folder(tmp_path, fusekit):
    (tmp_path / "moe.toml").write_text(SPEC)
    (tmp_path / "other.toml").write_text("[tool]\nx = 1")
    assert fusekit("init", "--json").json == {
        "file": str(tmp_path / "fusekit.toml"), "specs": ["moe.toml"], "models": []
    }  # fmt: skip
    assert "give --force" in fusekit("init", code=2).err
    would = fusekit("build", "--dry-run", "--json").json["would_build"]
    assert [row["name"].partition("@")[0] for row in would] == ["moe/fc1"]
    assert "no spec file is" not in fusekit("init", "--force").err


def test_init_of_a_model(tmp_path, fusekit):
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    assert "config.json" in fusekit("init", "Qwen3-30B-A3B", code=2).err
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    fusekit("init", "Qwen3-30B-A3B")
    document = fusekit("build", "--dry-run", "--json").json
    assert [layer["name"] for layer in document["layers"]] == ["qwen3-30b-a3b/moe"]
    fusekit("new", "Qwen3-30B-A3B", "-o", "elsewhere.toml", "--name", "elsewhere")
    written = fusekit("build", "--dry-run", "--json", "elsewhere.toml").json
    assert [row["key"] for row in written["would_build"]] == [row["key"] for row in document["would_build"]]


def test_init_in_an_empty_folder(tmp_path, fusekit):
    assert "no spec file is here" in fusekit("init").err
    assert fusekit("ls", "--json").json == []  # every key in it can be read


def test_stores_and_remotes_of_a_project(tmp_path, fusekit):
    fill(Store(tmp_path / "kernels"))
    (tmp_path / "fusekit.toml").write_text("[stores]\nstore = 'kernels'\n[remotes]\nteam = 'mirror'\n")
    assert len(fusekit("ls", "--json", **UNSET).json) == 3
    assert fusekit("ls", "--json").json == []  # the environment wins
    assert fusekit("push", "team", "--json", **UNSET).json["entries"] == 3
    assert fusekit("pull", "team", "--json").json["entries"] == 3
    assert (tmp_path / "mirror" / "names").is_dir()
    assert fusekit("doctor", "--json").json["project"] == str(tmp_path / "fusekit.toml")


def test_a_broken_project_is_one_clear_error(tmp_path, fusekit):
    (tmp_path / "fusekit.toml").write_text("[target]")
    assert "fusekit.toml: target: there is no such key" in fusekit("ls", code=2).err
    assert fusekit("--version").code == 0


@pytest.mark.parametrize("toolchain", ["cutlass-dsl-1.0-cu12"])
def test_another_toolchain_does_not_build(tmp_path, fusekit, toolchain):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    (tmp_path / "fusekit.toml").write_text(f"[targets]\ntoolchains = ['{toolchain}']")
    assert "is installed here" in fusekit("build", "quickstart/linear", code=1).err

"""What a name stands for when specs change, when two files share a stem, and when names are taken out again."""

import json

import pytest

from fusekit.store import Store
from tests.servers import ANEW

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

SPEC = """schema = 1
[defaults]
arch = "sm_90a"
op = "grouped-gemm"
cluster = [1, 1]
schedule = "static"
problem = {{ E = 4, M = 512, N = 384, K = 256 }}
[[kernel]]
name = "fc1"
activation = {{ kind = "{kind}" }}
tile = {tile}
"""
SMALL, LARGE = "fc1@64x128-c1x1", "fc1@128x128-c1x1"


def spec(folder, kind="swiglu", tile="[[64, 128], [128, 128]]", more=""):
    folder.mkdir(exist_ok=True)
    path = folder / "moe.toml"
    path.write_text(SPEC.format(kind=kind, tile=tile) + more)
    return str(path)


@pytest.fixture
def edited(fusekit, tmp_path):
    """A store where a spec was built, changed to another activation and one tile less, and built again."""
    fusekit("build", spec(tmp_path / "a"))
    return fusekit("build", spec(tmp_path / "a", "geglu", "[64, 128]"), "--json")


def test_a_kernel_left_from_before_is_never_taken(fusekit, edited, tmp_path):
    """show and export choose as load does, and refuse what it refuses."""
    for line in (
        ("show", "moe/fc1"),
        ("export", "--lang", "c", "out", "moe/fc1"),
        ("export", "--lang", "c", "out", "moe"),
    ):
        refused = fusekit(*line, code=2)
        assert f"moe/{LARGE} and moe/{SMALL} for sm_90a differ in activation" in refused.err
        assert "--prune" in refused.err
        assert refused.out == ""
    assert not (tmp_path / "out").exists()
    assert fusekit("show", f"moe/{SMALL}", "--json").json["spec"]["activation"]["kind"] == "geglu"

    pruned = fusekit("build", "a/moe.toml", "--prune", "--json")
    assert pruned.json["pruned"] == [{"name": f"moe/{LARGE}", "arch": "sm_90a"}]
    assert "removed, as the spec no longer has them" in pruned.err
    assert fusekit("show", "moe/fc1", "--json").json["name"] == f"moe/{SMALL}"
    fusekit("export", "--lang", "c", "out", "moe/fc1")
    assert not Store(fusekit.root).verify(full=True).bad


def test_a_build_says_what_it_moves_and_leaves_behind(fusekit, edited, tmp_path):
    (moved,) = edited.json["moved"]
    assert (moved["name"], moved["differs"]) == (f"moe/{SMALL}", ["activation"])
    assert moved["before"] != moved["now"] == edited.json["built"][0]["key"]
    left = [{"name": f"moe/{LARGE}", "arch": "sm_90a", "root": str(fusekit.root)}]
    assert edited.json["left_behind"] == left
    assert f"moe/{SMALL} (sm_90a) pointed to another kernel before: activation differs in its spec" in edited.err
    assert "give one of the two a namespace" in edited.err
    assert f"no longer in the spec: moe/{LARGE}" in edited.err
    # Until it is gone it is said again, also before anything is built; of what is not meant nothing is said.
    dry = fusekit("build", "a/moe.toml", "--dry-run", "--json")
    assert (dry.json["left_behind"], dry.json["would_build"]) == (left, [])
    again = fusekit("build", "a/moe.toml/fc1@64*", "--json")
    assert (again.json["moved"], again.json["left_behind"], again.err) == ([], [], "")


def test_another_teams_file_of_the_same_stem(fusekit, tmp_path):
    """It takes the names, which is said; with a namespace, given in the file or to the build, it does not."""
    one = "[64, 128]"
    fusekit("build", spec(tmp_path / "a", tile=one))
    theirs = spec(tmp_path / "b", "geglu", one)
    separate = fusekit("build", theirs, "--namespace", "team-b", "--json")
    assert [row["name"] for row in separate.json["built"]] == [f"team-b.moe/{SMALL}"]
    assert (separate.json["moved"], separate.json["left_behind"]) == ([], [])
    own = SPEC.format(kind="geglu", tile=one).replace("schema = 1", 'schema = 1\nnamespace = "team-b"')
    (tmp_path / "b" / "moe.toml").write_text(own)
    assert fusekit("build", theirs, "--json").json["cached"] == [f"team-b.moe/{SMALL}"]
    assert fusekit("explain", theirs, "--json").json["status"] == "hit"
    assert fusekit("show", "moe/fc1", "--json").json["spec"]["activation"]["kind"] == "swiglu"
    assert fusekit("show", "team-b.moe/fc1", "--json").json["spec"]["activation"]["kind"] == "geglu"
    assert len(fusekit("ls", "team-b.*", "--json").json) == 1
    assert fusekit("show", f"{theirs}/fc1", "--json").json["name"] == f"team-b.moe/{SMALL}"
    assert [row["name"] for row in fusekit("ls", theirs, "--json").json] == [f"team-b.moe/{SMALL}"]
    assert fusekit("show", "moe.toml/fc1", "--json").json["name"] == f"moe/{SMALL}"  # there is no such file here
    # Without: both kernels are in the store by now, and the name is moved all the same.
    taken = fusekit("build", spec(tmp_path / "c", "geglu", one), "--json")
    assert (taken.json["cached"], [row["name"] for row in taken.json["moved"]]) == ([f"moe/{SMALL}"], [f"moe/{SMALL}"])
    assert "(moe) had these names" in taken.err
    back = fusekit("build", "a/moe.toml", "--json", "--namespace", "Not A Name", code=2)
    assert 'namespace = "Not A Name"' in back.err


def test_targets_are_files_folders_globs_and_stdin(fusekit, tmp_path):
    kernel = '[[kernel]]\nname = "fc2"\ntile = [64, 128]\n'
    spec(tmp_path / "specs", tile="[64, 128]", more=kernel)
    (tmp_path / "specs" / "other.toml").write_text(
        'schema = 1\n[defaults]\narch = "sm_90a"\nop = "dense-gemm"\ncluster = [1, 1]\nschedule = "static"\n' + kernel
    )

    def would(*targets):
        rows = fusekit("build", *targets, "--dry-run", "--json").json["would_build"]
        assert [row["name"] for row in explained(*targets)] == [row["name"] for row in rows]
        return [row["name"].partition("@")[0] for row in rows]

    def explained(*targets):
        found = fusekit("explain", *targets, "--json").json
        return found if isinstance(found, list) else [found]

    assert would("specs/moe.toml/fc2") == ["moe/fc2"]
    assert would("specs/moe.toml/fc1@64x128-c1x1") == ["moe/fc1"]
    assert would("specs") == would("specs/") == would("specs/*.toml") == ["moe/fc1", "moe/fc2", "other/fc2"]
    assert would("specs/*.toml/fc2*") == ["moe/fc2", "other/fc2"]
    assert would("specs/other.toml", "specs/moe.toml/fc1") == ["other/fc2", "moe/fc1"]
    for target, message in (
        ("specs/moe.toml/fc3", "'specs/moe.toml/fc3' names no kernel of specs/moe.toml; did you mean"),
        ("none/*.toml", "matches no file"),
        ("none.toml/fc1", "none.toml: there is no such file"),
        ("moe/fc1", "names no packaged kernel"),
        (".", "is a folder without a .toml file"),
    ):
        assert message in fusekit("build", target, "--dry-run", code=2).err
    (tmp_path / "moe.toml").write_text("")
    assert "for the file moe.toml here give its path: moe.toml/fc1" in fusekit("build", "moe/fc1", code=2).err

    built = fusekit("build", "-", "--json", stdin=(tmp_path / "specs" / "other.toml").read_text())
    assert [row["name"] for row in built.json["built"]] == ["stdin/fc2@64x128-c1x1"]
    assert fusekit("build", "-", stdin="schema = ", code=2).err.startswith("fusekit: stdin: not TOML")
    (tmp_path / "cache_manifests").mkdir()
    (path,) = fusekit("lock", "specs/other.toml/fc2", "--write", "--json").json["written"]
    assert list(json.loads((tmp_path / path).read_text())["kernels"]["sm_90a"]) == ["other/fc2@64x128-c1x1"]
    assert fusekit("build", "--check", path, "specs/*.toml/fc2", "--json", code=1).json["same"] == [
        "other/fc2@64x128-c1x1"
    ]


def test_no_option_comes_from_the_folder_for_temporary_files(fusekit, tmp_path):
    spec(tmp_path / "a", tile="[64, 128]")
    digests = set()
    for name in ("plain", "x --opt-level=0 --ptxas-options=-O0"):
        (tmp_path / name).mkdir()
        line = ("build", "a/moe.toml", "--json", "--store", str(tmp_path / f"store of {name}"))
        digests.add(fusekit(*line, **{"TMPDIR": str(tmp_path / name), ANEW: "1"}).json["built"][0]["cubin_sha256"])
        assert list((tmp_path / name).iterdir()) == []
    assert len(digests) == 1

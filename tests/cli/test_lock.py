"""fusekit lock and build --check: what was built, committed, and built again."""

import json
import shutil
from pathlib import Path

import pytest

from fusekit.compiler.build_check import check_build
from fusekit.compiler.identity import Identity
from fusekit.compiler.toolchain import distributions
from fusekit.spec.catalog import packaged_folder
from fusekit.store.entries import toolchain_label
from fusekit.store.lockfile import Lock, lock_file, read_lock
from fusekit.store.names import layer_record
from tests.servers import ANEW

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
NAME = "quickstart/moe-fc2@128x128-c2x1"
ARCH, LABEL = "sm_90a", toolchain_label(distributions())
SMALL = """schema = 1
[[kernel]]
name = "mlp"
kind = "mlp"
arch = "sm_90a"
hidden = 512
intermediate = 256
keep = "none"
problem = { T = 1024 }
"""
LOCKS = packaged_folder().with_name("cache_manifests")


def test_write_and_check(fusekit, tmp_path):
    folder = tmp_path / "cache_manifests"
    folder.mkdir()
    assert "there is no lock" in fusekit("lock", "quickstart/moe-fc2", code=2).err
    written = fusekit("lock", "quickstart/moe-fc2", "--write", "--json").json
    assert (written["same"], written["changed"], written["missing"]) == ([NAME], [], [])
    (path,) = map(Path, written["written"])
    assert path.parent == folder
    assert fusekit("ls", "--json").json[0]["cubin_sha256"] == read_lock(path).kernels[NAME, ARCH][0].cubin_sha256
    assert fusekit("lock", "quickstart/moe-fc2").out == "1 same, 0 changed, 0 missing\n"

    # Built again from nothing, in no store: the same bytes.
    arguments = ("build", "--check", str(path), "--json", "--store", str(tmp_path / "unused"))
    checked = fusekit(*arguments, **{ANEW: "1"}).json
    assert (checked["same"], checked["changed"], checked["missing"], checked["failed"]) == ([NAME], [], [], [])
    assert [built["name"] for built in checked["built"]] == [NAME]
    assert not (tmp_path / "unused").exists()

    document = json.loads(path.read_text())
    document["kernels"][ARCH][NAME][LABEL]["launch_sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    for command in (("build", "--check", str(path)), ("lock", "quickstart/moe-fc2")):
        (row,) = fusekit(*command, "--json", code=1).json["changed"]
        assert (row["expected"], "the same cubin with another launch record" in row["reason"]) == ("0" * 64, True)

    # A difference is reported, kernel by kernel.
    document = json.loads(path.read_text())
    document["kernels"][ARCH][NAME][LABEL]["cubin_sha256"] = "0" * 64
    document["kernels"][ARCH]["quickstart/gone@a"] = document["kernels"][ARCH][NAME]
    path.write_text(json.dumps(document))
    checked = fusekit("build", "--check", str(path), "--json", code=1).json
    (row,) = checked["changed"]
    assert (row["name"], row["expected"], row["arch"]) == (NAME, "0" * 64, "sm_90a")
    assert "not reproducible" in row["reason"]
    assert [row["name"] for row in checked["missing"]] == ["quickstart/gone@a"]
    shown = fusekit("lock", "quickstart/moe-fc2", code=1)
    assert NAME in shown.out
    assert "0 same, 1 changed, 0 missing" in shown.out
    assert [row["name"] for row in fusekit("lock", "quickstart", "--json", code=1).json["missing"]] == [
        "quickstart/linear@128x128-c2x1",
        "quickstart/moe-fc1@128x128-c2x1",
        "quickstart/moe-fc1@128x192-c2x1",
    ]
    assert fusekit("lock", "quickstart/moe-fc2", "--write", "--json").json["same"] == [NAME]
    assert ("quickstart/gone@a", ARCH) in read_lock(path).kernels  # only what was named is written


def test_the_locks_that_come_with_fusekit(fusekit):
    """Used where the working directory has none, as it is with every installed copy."""
    name = committed().name
    document = fusekit("lock", "quickstart/moe-fc2", "--json", code=1).json
    assert [(row["name"], row["reason"]) for row in document["missing"]] == [(NAME, "not built yet")]
    fusekit("build", "quickstart/moe-fc2")
    assert fusekit("lock", "quickstart/moe-fc2").out == "1 same, 0 changed, 0 missing\n"
    assert "there is no folder" in fusekit("lock", "quickstart/moe-fc2", "--write", code=2).err
    assert (LOCKS / name).exists()


def test_another_toolchain_is_refused(fusekit, tmp_path):
    lock = Lock.of_folder(ARCH, {"nvidia-cutlass-dsl": "4.0"}, {})
    (tmp_path / "x.json").write_bytes(lock.to_bytes())
    refused = fusekit("build", "--check", "x.json", code=1)
    assert "is of another toolchain: nvidia-cutlass-dsl 4.0 there" in refused.err


def test_a_signed_lock(fusekit, tmp_path):
    pytest.importorskip("cryptography")
    (tmp_path / "cache_manifests").mkdir()
    fusekit("key", "new", "ours")
    fusekit("key", "new", "stranger")
    trusted = {"FUSEKIT_TRUSTED_KEYS": str(tmp_path / "ours.pub")}
    refused = fusekit("lock", "quickstart/moe-fc2", "--write", code=1, **trusted)
    assert "would be signed by nobody" in refused.err
    assert "name the private key" in fusekit("build", "quickstart/moe-fc2", "--sign", "stranger", code=1, **trusted).err
    (path,) = fusekit("lock", "quickstart/moe-fc2", "--write", "--sign", "ours", "--json", **trusted).json["written"]
    assert fusekit("lock", "quickstart/moe-fc2", **trusted).out == "1 same, 0 changed, 0 missing\n"
    assert fusekit("build", "quickstart/moe-fc2", **trusted).out.startswith("1 kernel, all cached")
    Path(path).write_bytes(Path(path).read_bytes() + b" ")
    assert "changed after they were signed" in fusekit("build", "--check", path, code=1, **trusted).err
    # What stays of the old one would be signed with the rest.
    again = fusekit("lock", "quickstart/moe-fc2", "--write", "--sign", "ours", code=1, **trusted)
    assert "changed after they were signed" in again.err


def test_a_lock_of_something_else_is_not_written_elsewhere(fusekit, tmp_path):
    folder = tmp_path / "cache_manifests"
    folder.mkdir()
    (path,) = map(Path, fusekit("lock", "quickstart/moe-fc2", "--write", "--json").json["written"])
    document = json.loads(path.read_text())
    versions = {LABEL: document["toolchains"][LABEL] | {"nvidia-cutlass-dsl": "4.0.0"}}
    for change in ({"kernels": {"sm_80": document["kernels"][ARCH]}}, {"toolchains": versions}):
        path.write_text(json.dumps(document | change))
        for options in ((), ("--write",)):
            assert (
                "is named by its architecture and toolchain"
                in fusekit("lock", "quickstart/moe-fc2", *options, code=1).err
            )
    assert list(folder.iterdir()) == [path]


def committed():
    path = LOCKS / lock_file(ARCH, distributions())
    if not path.exists():
        pytest.skip(f"no lock of this toolchain is committed: {path.name}")
    return path


def test_the_committed_lock_lists_what_is_packaged():
    from fusekit.spec import find
    from fusekit.spec.schemas import layer_name, layer_of

    path, identity = committed(), Identity()
    lock = read_lock(path)
    assert [*lock.toolchains.values()] == [identity.toolchain]
    specs = [spec for spec in find([]) if spec.arch == ARCH and spec.op != "extern"]
    records = {(layer_record(layer_name(spec)), ARCH) for spec in specs if layer_of(spec)}
    assert set(lock.kernels) == {(spec.full_name, ARCH) for spec in specs} | records, "`fusekit lock --write` renews it"


def test_a_sample_of_the_committed_lock_is_built_again():
    """The same sources and toolchain gave these bytes on another machine, on another day."""
    checked = check_build(read_lock(committed()), [NAME])
    assert not checked.report.failed
    assert checked.ok, (*checked.changed, *checked.missing, "`fusekit lock --write` renews it")


def test_foreign_kernels_are_locked_where_they_are_asked_for(fusekit, tmp_path):
    (tmp_path / "cache_manifests").mkdir()
    shutil.copy(Path(__file__).parents[1] / "compiler" / "foreignkernels.py", tmp_path)
    (tmp_path / "own.toml").write_text("""schema = 1
[[kernel]]
name = "twice"
op = "extern"
source = "foreignkernels:twice"
arch = "sm_90a"
arguments.x = { role = "input", shape = ["M", "N"] }
arguments.y = { role = "output", shape = ["M", "N"] }
""")
    arguments = ("lock", "own.toml")
    assert "allow it with --allow-extern" in fusekit(*arguments, "--write", code=2).err
    fusekit.environment["FUSEKIT_ALLOW_EXTERN"] = "1"
    written = fusekit(*arguments, "--write", "--json").json
    assert (written["same"], written["missing"]) == (["own/twice@base"], [])
    assert fusekit(*arguments).out == "1 same, 0 changed, 0 missing\n"
    checked = fusekit("build", "own.toml", "--check", *written["written"], "--json").json
    assert (checked["same"], checked["failed"]) == (["own/twice@base"], [])
    (tmp_path / "foreignkernels.py").write_text((tmp_path / "foreignkernels.py").read_text() + "# changed\n")
    assert [row["name"] for row in fusekit(*arguments, "--json", code=1).json["missing"]] == ["own/twice@base"]
    (tmp_path / "foreignkernels.py").unlink()
    failed = fusekit("build", "own.toml", "quickstart/linear", "--dry-run", "--json", code=1).json
    assert [row["name"] for row in failed["failed"]] == ["own/twice@base"]
    assert [row["name"] for row in failed["would_build"]] == ["quickstart/linear@128x128-c2x1"]


@pytest.mark.soak("builds a layer of six kernels")
def test_the_records_of_layers_are_locked(fusekit, tmp_path):
    folder, record = tmp_path / "cache_manifests", layer_record("small/mlp")
    folder.mkdir()
    (tmp_path / "small.toml").write_text(SMALL)
    written = fusekit("lock", "small.toml", "--write", "--json").json
    (path,) = map(Path, written["written"])
    assert record in written["same"] and not written["changed"] and not written["missing"]
    ((build,),) = (builds for (name, _), builds in read_lock(path).kernels.items() if name == record)
    (listed,) = (row for row in fusekit("ls", "small", "--json").json if row["name"] == record)
    assert (build.key, build.cubin_sha256) == (listed["key"], listed["cubin_sha256"])

    document = json.loads(path.read_text())
    document["kernels"][ARCH][record][LABEL]["cubin_sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    assert [row["name"] for row in fusekit("lock", "small.toml", "--json", code=1).json["changed"]] == [record]
    del document["kernels"][ARCH][record]  # a lock of before
    path.write_text(json.dumps(document))
    before = fusekit("lock", "small.toml", "--json").json
    assert before["same"] == [name for name in written["same"] if name != record]

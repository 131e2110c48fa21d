"""ls, show, verify over a store of test entries."""

import re
import sys
import zipfile
from dataclasses import replace

import pytest

from fusekit.abi import LaunchRecord
from fusekit.compiler.gemm import signature
from fusekit.spec import parse_text
from fusekit.store import NameRecord, Store
from fusekit_cli.doctor import _toolchains
from fusekit_cli.main import main
from tests.cli.conftest import NAMES
from tests.cli.test_doctor import Bindings
from tests.store.samples import build_entry, cut
from tests.store.test_candidates import CU12, CU13, NAME, publish


def test_ls(store, fusekit):
    rows = fusekit("ls", "--json").json
    assert [row["name"] for row in rows] == list(NAMES)
    entry, cubin = build_entry()
    assert rows[0] == {
        "name": NAMES[0],
        "arch": "sm_90a",
        "key": entry.key,
        "cubin_sha256": entry.cubin_sha256,
        "bytes": len(cubin),
        "registers": 168,
        "spill_bytes": 0,
        "root": str(fusekit.root),
        "part_of": None,
        "toolchain": None,
        "lowest_driver": None,
        "candidates": [],
    }


def test_ls_for_people_can_be_cut_and_searched(store, fusekit):
    lines = fusekit("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "ARCH", "REGISTERS", "SPILLS", "BYTES", "KEY", "DRIVER", "TOOLCHAIN"]
    assert [line.split()[0] for line in lines[1:]] == list(NAMES)
    assert all(line.isascii() and line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["quickstart"], 3),
        (["quickstart/moe-fc1"], 2),
        ([NAMES[0]], 1),
        (["*@128x128*"], 2),
        (["quick*/moe*"], 2),
        (["quickstart/linear", "quickstart"], 3),
        (["nothing"], 0),
        (["*", "--arch", "sm_100a"], 0),
    ],
)
def test_ls_takes_names_and_globs(store, fusekit, patterns, count):
    result = fusekit("ls", *patterns, "--json")
    assert len(result.json) == count
    assert ("fusekit build" in result.err) == (count == 0)


def test_ls_of_no_store(fusekit):
    assert fusekit("ls", "--json").json == []
    assert fusekit("ls").out == ""
    assert not fusekit.root.exists()


def test_ls_says_what_it_leaves_out(store, fusekit):
    own = store.roots[0]
    cut(own.entry_path(build_entry(0)[0].key))
    cut(own.name_path(NAMES[1], "sm_90a"))
    result = fusekit("ls", "--json")
    assert [row["name"] for row in result.json] == [NAMES[2]]
    assert result.err.count("left out:") == 2


def test_ls_shows_roots(store, fusekit, tmp_path):
    result = fusekit("ls", "--json", FUSEKIT_STORE=str(tmp_path / "own"), FUSEKIT_STORES=str(fusekit.root))
    assert {row["root"] for row in result.json} == {str(fusekit.root)}


def test_show(store, fusekit):
    document = fusekit("show", NAMES[0], "--json").json
    entry, _ = build_entry()
    assert {"name", "key", "spec", "launch", "toolchain", "resources", "proof"} <= set(document)
    assert (document["name"], document["key"], document["launch"]) == (NAMES[0], entry.key, entry.launch)
    assert document["defaults"] == {"act_limit": "inf"}
    out = fusekit("show", NAMES[0]).out
    assert entry.key in out
    assert re.search(r"registers +168", out)


def test_machine_code(store, fusekit, tmp_path):
    tool = tmp_path / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --print-code ] && [ -s "$2" ] && echo "HGMMA R24"\n')
    tool.chmod(0o755)
    path = {"PATH": f"{tool.parent}:/usr/bin:/bin"}
    assert fusekit("show", NAMES[0], "--sass", **path).out.strip() == "HGMMA R24"
    assert fusekit("show", NAMES[0], "--sass", "--json", **path).json["sass"] == "HGMMA R24\n"
    assert f"name one: {NAMES[0]}" in fusekit("show", "quickstart", "--sass", code=2, **path).err
    assert "leave --from out" in fusekit("show", NAMES[0], "--sass", "--from", "x.tar", code=2, **path).err
    tool.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    assert "cannot read this cubin: broken" in fusekit("show", NAMES[0], "--sass", code=1, **path).err


def test_show_says_what_the_arguments_are(fusekit):
    text = 'schema = 1\n[[kernel]]\nname = "fc1"\nop = "grouped-gemm"\narch = "sm_90a"\ntile = [128, 128]\n'
    (spec,) = parse_text(text + 'activation = { kind = "swiglu" }\nb_major = "n"\n', "model")
    kernel = signature(spec)
    launch = LaunchRecord(
        kernel.arch, kernel.arguments, kernel.dims, (), (1, 1, 1), (384, 1, 1), symbol="kernel"
    ).to_json()
    entry, cubin = build_entry()
    store = Store(fusekit.root)
    store.publish(replace(entry, launch=launch), cubin)
    store.publish_name(NameRecord(spec.full_name, "sm_90a", entry.key, spec.canonical(), {}))
    rows = fusekit("show", "model/fc1", "--json").json["arguments"]
    assert [row["name"] for row in rows] == ["x", "w", "y", "offsets", "act_alpha", "act_limit", "act_up_offset"]
    assert rows[1] | {"what": ""} == {
        "name": "w",
        "role": "input",
        "dtype": "bf16",
        "shape": "[E, K, 2 * I]",
        "what": "",
    }
    assert rows[3]["what"].startswith("End row of each group, cumulative")
    assert (rows[4]["role"], rows[4]["shape"]) == ("scalar", "")
    lines = fusekit("show", "model/fc1").out.splitlines()
    table = lines[1 : 1 + len(rows)]
    assert lines[0].split() == ["ARGUMENT", "ROLE", "DTYPE", "SHAPE", "WHAT", "IT", "IS"]
    assert [line.split()[0] for line in table] == [row["name"] for row in rows]
    assert all(line.endswith(row["what"]) for line, row in zip(table, rows, strict=True))
    assert len(lines) <= 40
    assert re.fullmatch(r"--all: (\d+ more lines, )?proof, launch record and fields of the key", lines[-1])
    whole = fusekit("show", "model/fc1", "--all").out.splitlines()
    assert len(whole) > 60 and whole[: 1 + len(rows)] == lines[: 1 + len(rows)]
    assert {"proof", "launch", "fields"} <= {*whole} - {*lines}


def test_show_of_a_kernel_is_the_variant_that_is_loaded(store, fusekit):
    document = fusekit("show", "quickstart/moe-fc1", "--json").json
    assert document["name"] == NAMES[1]  # few tiles, which all run at once: the smaller ones are done first


def test_show_of_several_is_a_list(store, fusekit):
    assert [document["name"] for document in fusekit("show", "quickstart", "--json").json] == list(NAMES)
    assert fusekit("show", "*/linear", "--json").json["name"] == NAMES[0]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("nothing", "fusekit build nothing.toml"),
        ("quickstart/other", "quickstart has linear, moe-fc1, moe-fc2"),
        ("quickstart/linear@64x64-c1x1", "fusekit build quickstart/linear"),
        ("x*", "fusekit build 'x*.toml'"),
    ],
)
def test_show_of_what_is_not_there(store, fusekit, name, end):
    result = fusekit("show", name, "--json", code=3)
    assert result.out == ""
    assert result.err.endswith(f"{end}\n")
    assert ("(there are quickstart/linear@128x128-c2x1); build its variants with" in result.err) == ("@" in name)


def test_show_of_what_is_damaged(store, fusekit):
    cut(store.roots[0].entry_path(build_entry()[0].key))
    result = fusekit("show", NAMES[0], code=1)
    assert result.out == ""
    assert "remove it and build it again" in result.err


def test_show_of_a_name_without_its_entry(store, fusekit):
    store.roots[0].entry_path(build_entry()[0].key).unlink()
    assert "fusekit build quickstart/linear" in fusekit("show", NAMES[0], code=3).err


def test_verify(store, fusekit):
    assert fusekit("verify", "--json").json | {"blobs": 3} == {
        "checked": 6,
        "bad": [],
        "entries": 3,
        "names": 3,
        "blobs": 3,
        "full": False,
        "orphans": 0,
        "temporaries": 0,
        "strays": [],
        "absent": [],
        "open_to_all": [],
    }
    assert fusekit("verify", "--full").out == "3 entries, 3 names, 3 cubins checked in full: none bad\n"


def test_verify_finds_damage(store, fusekit):
    entry, _ = build_entry()
    path = store.roots[0].blob_path(entry.cubin_sha256)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[::-1])
    assert fusekit("verify", "--json").json["bad"] == []
    result = fusekit("verify", "--full", "--json", code=1)
    (bad,) = result.json["bad"]
    assert bad["key"] == entry.key
    assert str(path) in bad["problem"]
    assert "bad:" in fusekit("verify", "--full", code=1).out


def test_verify_of_no_store(fusekit):
    result = fusekit("verify", "--full", "--json", code=3)
    assert (result.json["checked"], result.json["absent"]) == (0, [str(fusekit.root)])
    assert f"there is no folder {fusekit.root}: there is no store to check; `fusekit build` makes a store" in result.err
    message = fusekit("verify", "--full", code=3).out
    assert message == "nothing was checked: there is no store\n"
    assert "3 if there is no store" in fusekit("verify", "--help").out


@pytest.mark.parametrize("kind", ["no folder", "is empty", "is no store"])
def test_a_root_that_is_not_mounted(store, fusekit, tmp_path, kind):
    root = tmp_path / "mnt"
    if kind != "no folder":
        root.mkdir()
    if kind == "is no store":
        (root / "notes.txt").write_text("mine")
    roots = {"FUSEKIT_STORES": str(root)}
    result = fusekit("verify", "--json", code=3, **roots)
    assert (result.json["checked"], result.json["absent"]) == (6, [str(root)])
    assert "none bad" in fusekit("verify", code=3, **roots).out
    for arguments in (["show", "quickstart/none"], ["run", "quickstart/none"], ["export", "b.tar", "quickstart/none"]):
        message = fusekit(*arguments, code=3, **roots).err
        assert "no packaged spec has it; quickstart has linear, " in message
        assert kind in message
        assert f"{root}" in message
        assert "check FUSEKIT_STORES, and that its file systems are mounted" in message
    listed = fusekit("ls", "--json", code=1, **roots)
    assert (len(listed.json), f"{root}" in listed.err) == (3, True)
    # The user's own folder need not be there where a root is; one that is named has to be.
    below = {"FUSEKIT_STORES": str(fusekit.root), "FUSEKIT_STORE": str(tmp_path / "own")}
    done = fusekit("verify", "--json", **below)
    assert (done.json["absent"], "there is no store" in done.err) == ([str(tmp_path / "own")], False)
    fusekit("verify", "--store", str(tmp_path / "own"), code=3, **below)


@pytest.mark.parametrize("place", ["", "names"])
def test_ls_of_what_cannot_be_listed(store, fusekit, tmp_path, place):
    own = tmp_path / "own"
    (own / place).parent.mkdir(exist_ok=True)
    (own / place).write_text("")
    result = fusekit("ls", "--json", "--store", str(own), code=1, FUSEKIT_STORES=str(fusekit.root))
    assert len(result.json) == 3
    assert f"left out: cannot list {own / 'names'}" in result.err


def test_a_folder_that_is_no_store_is_refused(store, fusekit, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.tf").write_text("precious")
    fusekit("export", "all.tar", "quickstart")
    (tmp_path / "key").unlink(missing_ok=True)
    for arguments in (
        ["gc"], ["gc", "--dry-run"], ["import", str(tmp_path / "all.tar")], ["copy"], ["build", "quickstart/linear"],
    ):  # fmt: skip
        result = fusekit(*arguments, "--store", str(project), code=2, FUSEKIT_STORES=str(fusekit.root))
        assert f"{project} is no store of fusekit, and not empty" in result.err
        assert result.err.count("\n") <= 2
    assert f"store   {project} (not writable)" in fusekit("doctor", "--store", str(project)).out
    message = fusekit("verify", "--store", str(project), code=3).err
    assert f"{project} is no store of fusekit: there is no store to check; nothing is written there" in message
    listed = fusekit("ls", "--json", "--store", str(project), code=1)
    assert listed.json == []
    assert f"{project} is no store of fusekit, and not empty" in listed.err
    assert "fills the store" not in listed.err
    assert [path.name for path in project.iterdir()] == ["main.tf"]


def test_a_wheel_of_kernels(store, fusekit, tmp_path):
    done = fusekit("export", "--wheel", "my-kernels-1.0", "quickstart/linear", "-o", "dist", "--json").json
    wheel = tmp_path / done["file"]
    assert (done["names"], done["bytes"]) == (1, wheel.stat().st_size)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    environment = {"FUSEKIT_STORE": str(tmp_path / "none"), "PYTHONPATH": str(tmp_path / "site")}
    root = str(tmp_path / "site" / "my_kernels" / "store")
    assert [row["name"] for row in fusekit("ls", "--json", **environment).json] == [NAMES[0]]
    assert fusekit("verify", "--full", "--json", **environment).json["names"] == 1
    assert [store["path"] for store in fusekit("doctor", "--json", **environment).json["stores"]][1:] == [root]
    missing = fusekit("show", "quickstart/moe-fc1", code=3, **environment)
    assert "build it with: fusekit build quickstart/moe-fc1" in missing.err


def test_a_signed_wheel_is_replaced_by_its_signer_alone(store, fusekit, tmp_path):
    pytest.importorskip("cryptography")
    for name in ("ours", "theirs"):
        fusekit("key", "new", name)
    wheel = ("export", "--wheel", "k-1")
    fusekit(*wheel)
    for _ in range(2):
        assert fusekit(*wheel, "--sign", "ours", "--json").json["signed_by"]
    for signed in ((), ("--sign", "theirs")):
        message = fusekit(*wheel, *signed, code=2).err
        assert "give --force to replace it, or another NAME-VERSION" in message
    fusekit(*wheel, "--force")
    assert fusekit(*wheel, "--sign", "theirs", "--json").json["signed_by"]


def test_words_about_wheels(store, fusekit):
    assert "next: pip install dist/k-1-py3-none-any.whl" in fusekit("export", "--wheel", "k-1").err
    assert "'k' is not NAME-VERSION" in fusekit("export", "--wheel", "k", code=2).err
    assert "export -o is for wheels" in fusekit("export", "b.tar", "-o", "x", code=2).err
    assert "leave --lang out" in fusekit("export", "--wheel", "k-1", "--lang", "c", code=2).err
    assert "Missing argument" in fusekit("export", code=2).err


def test_schema(fusekit):
    jsonschema = pytest.importorskip("jsonschema")
    schema = fusekit("schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    assert fusekit("schema", "--json").json == schema


def test_bench_without_a_gpu_and_without_numpy_names_the_gpu(store, fusekit, monkeypatch, capsys):
    monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: Bindings(count=0))
    monkeypatch.setitem(sys.modules, "numpy", None)
    for name in ("gemms", "shape"):
        monkeypatch.delitem(sys.modules, f"fusekit.bench.{name}", raising=False)
    assert main(["bench", "quickstart/linear", "--store", str(fusekit.root)]) == 4
    assert "NumPy" not in capsys.readouterr().err


def test_builds_of_two_toolchains(tmp_path, fusekit):
    """ls, show and doctor say toolchain and lowest driver; rm removes both."""
    store = Store(fusekit.root)
    first, last = publish(store, CU12), publish(store, CU13)
    (row,) = fusekit("ls", "--json").json
    assert (row["key"], row["lowest_driver"], row["toolchain"]) == (last.key, "13.0", "cutlass-dsl-4.8.0-cu13")
    assert [(build["key"], build["lowest_driver"]) for build in row["candidates"]] == [(first.key, "12.4")]
    assert [line.split()[-2:] for line in fusekit("ls").out.splitlines()[1:]] == [
        ["13.0", "cutlass-dsl-4.8.0-cu13"],
        ["12.4", "cutlass-dsl-4.8.1-cu12"],
    ]
    assert _toolchains(store, "12.8") == (
        [
            {"toolchain": "cutlass-dsl-4.8.0-cu13", "lowest_driver": "13.0", "names": 1},
            {"toolchain": "cutlass-dsl-4.8.1-cu12", "lowest_driver": "12.4", "names": 1},
        ],
        [],
    )
    publish(store, CU13, name="quickstart/fc2@a")
    assert _toolchains(store, "12.8")[1] == ["quickstart/fc2@a"]
    assert (_toolchains(store, "13.0")[1], _toolchains(store, None)[1]) == ([], [])
    (held,) = fusekit("doctor", "--json").json["stores"]
    assert [row["names"] for row in held["toolchains"]] == [2, 1]
    shown = fusekit("show", NAME, "--json").json
    assert (shown["lowest_driver"], [build["key"] for build in shown["candidates"]]) == ("13.0", [first.key])
    fusekit("rm", "quickstart")
    assert fusekit("verify", "--json").json["checked"] == 0

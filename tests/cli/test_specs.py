"""Spec files on the command line: what is refused and how soon, what a build warns of, the schema."""

import json
import os
import time
from pathlib import Path

import pytest

OWN = """schema = 1
[[kernel]]
name = "k"
op = "grouped-gemm"
arch = "sm_90a"
b_major = "n"
tile = [[128, 160], [128, 192]]
"""


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


def test_what_is_packaged(fusekit):
    rows = {row["name"]: row for row in fusekit("specs", "qwen3-30b-a3b/moe", "quickstart", "--json").json}
    assert [*rows] == ["qwen3-30b-a3b/moe", "quickstart/linear", "quickstart/moe-fc1", "quickstart/moe-fc2"]
    layer = rows["qwen3-30b-a3b/moe"]
    assert (layer["what"], layer["sizes"]["X"], layer["sizes"]["K"]) == ("moe layer", 128, 8)
    assert layer["kernels"] > 12 and layer["bytes"] > 100_000
    fc1 = rows["quickstart/moe-fc1"]
    assert (fc1["what"], [*fc1["sizes"]], fc1["kernels"]) == ("grouped-gemm", ["E", "M", "N", "K"], 2)


def test_sizes_of_a_file_without_a_lock(fusekit, tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    (row,) = fusekit("specs", "own.toml", "--json").json
    assert row == {"name": "own/k", "what": "grouped-gemm", "sizes": {}, "kernels": row["kernels"], "bytes": None}
    heading, line = fusekit("specs", "own.toml").out.splitlines()
    assert heading.split() == ["NAME", "WHAT", "SIZES", "KERNELS", "BYTES"] and line.split()[:2] == [
        "own/k",
        "grouped-gemm",
    ]


HOSTILE = {
    "pipe": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "sparse": _large,
    "digits": lambda path: path.write_text(OWN + f"cluster_margin = {'9' * 5000}\n"),
    "hex": lambda path: path.write_text(OWN + f"cluster_margin = 0x{'9' * 5000}\n"),
    "deep": lambda path: path.write_text(OWN + f"cluster = {'[' * 400}{']' * 400}\n"),
    "dotted": lambda path: path.write_text(OWN + ".".join("a" * 100_000) + " = 1\n"),
    "names": lambda path: path.write_text(OWN + "".join(f'[[kernel]]\nname = "n{i}"\n' for i in range(10**6))),
    "tiles": lambda path: path.write_text(OWN + f"tile = [{'[128, 128], ' * 10**6}]\n"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_at_once(kind, fusekit, tmp_path):
    HOSTILE[kind](tmp_path / f"{kind}.toml")
    start = time.monotonic()
    done = fusekit("build", f"{kind}.toml", "--dry-run", code=2)
    assert time.monotonic() - start < 5  # a process of its own, on a machine that may be busy
    assert done.out == ""
    assert done.err.startswith(f"fusekit: {kind}.toml: ")
    assert done.err.count("\n") == 1


def test_what_a_sweep_leaves_out_is_said_once(fusekit, tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    done = fusekit("build", "own.toml", "own.toml", "--dry-run", "--json")
    assert [row["name"] for row in done.json["would_build"]] == ["own/k@128x192-c2x1-dynamic"]
    (warning,) = done.json["warnings"]
    assert warning.startswith("own.toml: [[kernel]] 1 (k): left out of the sweep: { tile = [128, 160] }: tile N = 160")
    assert done.err == f"fusekit: warning: {warning}\n"
    (tmp_path / "own.toml").write_text(OWN + "exclude = [{ tile = [128, 160] }]\n")
    done = fusekit("build", "own.toml", "--dry-run", "--json")
    assert (done.json["warnings"], done.err) == ([], "")


def test_shapes_alone_make_a_plan(fusekit, tmp_path):
    (tmp_path / "own.toml").write_text("""schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
problem = { E = 32, M = 98304, N = 5760, K = 2880 }
""")
    rows = fusekit("build", "own.toml", "--dry-run", "--json").json["would_build"]
    assert [row["name"].partition("@")[2] for row in rows] == [
        "128x192-c2x1-dynamic",
        "128x192-c1x2-dynamic",
        "256x192-c1x2-dynamic",
    ]


def test_the_schema(fusekit):
    assert json.loads(fusekit("schema").out)["$id"] == "urn:fusekit:spec:1"

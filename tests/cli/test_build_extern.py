"""fusekit build of foreign kernels: asked for, isolated, filed under what they are made from."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
KERNELS = Path(__file__).parents[1] / "compiler" / "foreignkernels.py"
RUNNER = Path(__file__).parents[1] / "benchmarks" / "run.py"
SPEC = """schema = 1
[[kernel]]
name = "twice"
op = "extern"
source = "mykernels:twice"
arch = "sm_90a"
arguments.x = { role = "input", shape = ["M", "N"], doc = "What is scaled." }
arguments.y = { role = "output", shape = ["M", "N"] }
"""


@pytest.fixture
def spec(fusekit, tmp_path):
    """A spec and its module in the folder that commands run in."""
    (tmp_path / "own.toml").write_text(SPEC)
    shutil.copy(KERNELS, tmp_path / "mykernels.py")
    return tmp_path / "own.toml"


def test_running_foreign_python_is_asked_for(fusekit, spec):
    refused = fusekit("build", "own.toml", code=2)
    assert "own/twice@base is a foreign kernel: building it runs mykernels:twice" in refused.err
    assert "--allow-extern" in refused.err
    assert not fusekit.root.exists()
    (row,) = fusekit("build", "own.toml", "--dry-run", "--json").json["would_build"]  # runs nothing
    assert row["name"] == "own/twice@base"

    (built,) = fusekit("build", "own.toml", "--allow-extern", "--json").json["built"]
    assert built["proved_launches"] >= 64
    # What is there needs no trust.
    shown = fusekit("show", "own/twice", "--json").json
    assert shown["spec"]["status"] == "compiled and proved, not run"
    assert [row["what"] for row in shown["arguments"][:2]] == ["What is scaled.", ""]
    assert fusekit("ls", "own", "--json").json[0]["name"] == "own/twice@base"


def test_a_package_that_is_missing_is_named(fusekit):
    if find_spec("flash_attn"):
        pytest.skip("flash-attn-4 is installed")
    example = Path(__file__).parents[2] / "examples" / "attention.toml"
    refused = fusekit("build", str(example), "--allow-extern", "--json", code=1)
    wanted = {f"attention/{name}@base" for name in ("forward", "forward-sink", "forward-paged", "backward-prepare")}
    wanted |= {f"attention/{name}@base" for name in ("backward", "round-queries", "round-keys")}
    assert {row["name"] for row in refused.json["failed"]} == wanted
    assert all("pip install 'flash-attn-4'" in row["error"] for row in refused.json["failed"])


def test_a_changed_module_is_a_miss_that_says_so(fusekit, spec):
    fusekit("build", "own.toml", "--allow-extern")
    assert fusekit("build", "own.toml", "--allow-extern", "--json").json["cached"] == ["own/twice@base"]
    module = spec.parent / "mykernels.py"
    module.write_text(module.read_text() + "# more\n")
    (row,) = fusekit("build", "own.toml", "--dry-run", "--json").json["would_build"]
    assert row["reason"].endswith("what differs: foreign.module.mykernels.py")


def test_a_build_of_everything_leaves_foreign_kernels_out(fusekit):
    plan = fusekit("build", "--dry-run", "--json")
    assert not [row for row in plan.json["would_build"] if row["name"].startswith(("quack/", "cudnn/"))]
    assert "foreign kernels (cudnn, quack), whose specs run Python to be built; --allow-extern" in plan.err


def test_a_source_has_an_environment_from_nothing(fusekit, spec, monkeypatch):
    spec.with_name("mykernels.py").write_text(
        KERNELS.read_text().replace(
            "def twice(columns=0):",
            "import json, os, sys\n\n\ndef twice(columns=0):\n    raise RuntimeError(json.dumps([dict(os.environ),"
            " sorted(each for each in sys.modules if each in ('torch', 'quack', 'cudnn'))]))\n",
        )
    )
    for name in ("QUACK_CACHE_DIR", "CUTE_DSL_LINEINFO", "CUDNN_LOGLEVEL", "HOME"):
        monkeypatch.setenv(name, "/tmp/never")
    (failed,) = fusekit("build", "own.toml", "--allow-extern", "--json", code=1).json["failed"]
    environment, modules = json.loads(failed["error"].partition("RuntimeError: ")[2].rpartition(" (")[0])
    assert environment.keys() & {"QUACK_CACHE_DIR", "CUTE_DSL_LINEINFO", "CUDNN_LOGLEVEL", "HOME"} == set()
    assert (environment["CUTE_DSL_ARCH"], environment["QUACK_ARCH"]) == ("sm_90a", "90")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert modules == []


def test_a_spec_is_begun_by_tracing(fusekit, spec, tmp_path):
    written = fusekit("new", "--from", "mykernels:twice", "--params", '{"columns": 96}')
    assert 'x = { role = "input", shape = ["M", 96], doc = "" }' in written.out
    assert "# f32, 16-byte aligned, strides: any multiple of 4, 1; the kernel reads it\n" in written.out
    assert "y: inout, the kernel reads and writes it\n" in written.err
    assert written.err.endswith("scale-twice.toml, then fusekit build scale-twice.toml --allow-extern\n")
    sized = fusekit("new", "--from", "mykernels:sized", "--name", "sums").out
    assert 'name = "some-of"' in sized  # as the host function
    assert "#   fusekit build sums.toml --allow-extern   # runs mykernels:sized; proves the launch\n" in sized
    assert "#   fusekit run sums/some-of --check --reference MODULE:FUNCTION" in sized
    assert "# sizes_0 is the extent N: read from the tensors\n# i32, passed by callers;" in sized
    assert "sizes_0 =" not in sized
    fusekit("new", "--from", "mykernels:filled", "-o", "filled.toml")
    text = (tmp_path / "filled.toml").read_text()
    assert 'y = { role = "output", shape = ["D0"], doc = "" }' in text
    assert "its role is unknown\nmemory = " in text  # it is not touched
    assert "# Check the roles, and fill in every" in text
    refused = fusekit("build", "filled.toml", "--allow-extern", code=2)
    assert 'arguments.memory.role = "?": must be one of input, output, inout, workspace' in refused.err
    fusekit("new", "--from", "mykernels:twice", "-o", "begun.toml")
    assert "?" not in (tmp_path / "begun.toml").read_text()
    assert (
        fusekit("build", "begun.toml", "--allow-extern", "--json").json["built"][0]["name"] == "begun/scale-twice@base"
    )
    failure = fusekit("new", "--from", "mykernels:broken", code=1)
    assert failure.err.startswith("fusekit: source mykernels:broken raised RuntimeError: no luck (")
    assert "mykernels.py, line " in failure.err
    spec.with_name("ending.py").write_text("import os\n\n\ndef ends():\n    os._exit(3)\n")
    assert "ended with 3, without an answer; a source" in fusekit("new", "--from", "ending:ends", code=1).err
    spec.write_text(SPEC.replace("mykernels:twice", "ending:ends"))
    (failed,) = fusekit("build", "own.toml", "--allow-extern", "--json", code=1).json["failed"]
    assert "(exit code 3); a source returns what cute.compile takes, and ends no process" in failed["error"]
    assert "one of the two" in fusekit("new", code=2).err
    assert "--tokens, --inference" in fusekit("new", "--from", "a:b", "--tokens", "8192", "--inference", code=2).err
    assert "--params" in fusekit("new", "-", "--params", "{}", code=2).err


REFUSED = {
    "renamed": 'x = { role = "input", shape = ["M", "N"] }\ny = { role = "output", shape = ["M", "N"], rename = "x" }',
    "scratch": 'y = { role = "output", shape = ["N"] }\nmemory = { role = "workspace", bytes = ["mul", 4, "Q"] }',
    "zeroed": 'y = { role = "output", shape = ["N"] }\nmemory = { role = "workspace", bytes = "N", zeroed = true }',
    "inside": 'y = { role = "output", shape = [["mul", "N", 2]] }\nmemory = { role = "workspace", bytes = 4 }',
}


def test_a_record_that_cannot_be_is_refused_by_the_keys_of_the_spec(fusekit, spec):
    text = 'schema = 1\n[defaults]\nop = "extern"\narch = "sm_90a"\n'
    for name, arguments in REFUSED.items():
        source = "twice" if "x = " in arguments else "filled"
        text += f'[[kernel]]\nname = "{name}"\nsource = "mykernels:{source}"\n[kernel.arguments]\n{arguments}\n'
    spec.write_text(text)
    failed = fusekit("build", "own.toml", "--allow-extern", "--json", code=1).json["failed"]
    assert {row["name"].partition("/")[2].partition("@")[0]: row["error"] for row in failed} == {
        "renamed": "arguments: 'x' occurs twice; names are unique; say arguments.NAME.rename = \"TEXT\" of one",
        "scratch": "arguments.memory.bytes[2]: unknown variable 'Q'; known are N, sm_count",
        "zeroed": "arguments.memory.bytes: unknown variable 'N'; known are sm_count",
        "inside": "dims: 'N' stands only inside expressions; some shape must be its bare name",
    }


def test_the_table_of_a_store(fusekit, spec):
    import subprocess
    import sys

    fusekit("build", "own.toml", "--allow-extern")
    ran = subprocess.run(
        [sys.executable, RUNNER, "table", "own/*"], capture_output=True, text=True, check=True,
        env={"FUSEKIT_STORE": str(fusekit.root)},
    )  # fmt: skip
    line, _, last = ran.stdout.splitlines()[-3:]
    assert line.startswith("| own/twice@base | sm_90a | x, y, options_factor, options_sm_count | 2 |")
    assert re.fullmatch(r"1 kernels; reading and proof took \d+\.\d\d s at most\.", last)

"""The page for newcomers, run as it is: every command, every piece of code, and the kernels that it is about."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusekit.abi import LaunchRecord
from fusekit.config import Config
from fusekit.library import Library
from fusekit.runtime.driver import Driver
from fusekit.store import Store
from tests.cabi.launcher import OK, Launcher, compile_shared
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike
from tests.servers import SETTINGS
from tests.soak import sample

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "cute"
PAGE = (ROOT / "docs" / "your-kernel.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SOURCES = {path.name: path.read_text() for path in FILES.iterdir() if path.is_file()}
KERNELS = ("gemm@base", "silu-add@base", "square-sum@cluster2", "square-sum@cluster4", "total@base")


def block(language: str, holds: str) -> str:
    """The page's block that holds a text."""
    (result,) = (text for kind, text in BLOCKS if kind == language and holds in text)
    return result


@pytest.fixture(scope="module")
def run(commands):
    """Runs a command in a folder; `fusekit` as a fork (see `tests/servers.py`)."""

    def run(command, place, **changes):
        own = {"FUSEKIT_STORE": str(place / "store"), "COLUMNS": "200", **changes}
        if command[0] == "fusekit":
            own |= {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
            ended = commands.run(command[1:], SETTINGS | {"HOME": str(place)} | own, place, "", 300)
            return subprocess.CompletedProcess(command, *ended)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEKIT_", "CUTE_DSL_"))}
        return subprocess.run(
            command, cwd=place, env=kept | own, capture_output=True, text=True, check=False, timeout=300
        )

    return run


@pytest.fixture(scope="module")
def run_block(run):
    def run_block(holds, place):
        for line in block("sh", holds).splitlines():
            done = run(shlex.split(line), place)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    return run_block


def test_the_page_says_what_a_workspace_is():
    (size, zeroed) = re.findall(r"^\| `arguments\.NAME\.(?:bytes|zeroed)` .*$", PAGE, re.MULTILINE)
    assert all(message in size for message in ("needs", "instead of a shape", "of dims", "fixed extents"))
    assert all(message in zeroed for message in ("before the first launch", "the last one left", "`sm_count` at most"))


@pytest.fixture(scope="module")
def place(tmp_path_factory, run_block):
    """A newcomer's folder, with the kernels built as the page says."""
    place = tmp_path_factory.mktemp("own")
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    run_block("kernels.toml", place)
    return place


def stored(place, name="kernels/silu-add@base"):
    store = Store.open(Config(store=place / "store"))
    return store, *store.load(store.find_name(name, "sm_90a").key)


def opened(place, name="kernels/silu-add@base"):
    """A library over a driver that records, for the kernel `name`."""
    store, entry, _ = stored(place, name)
    record = LaunchRecord.from_json(dict(entry.launch))
    fake = FakeDriver([(parameter.offset, parameter.size) for parameter in record.parameters], symbol=record.symbol)
    return Library(store, Driver(fake)), fake


def vectors(n=4096):
    return {
        name: Torchlike((n,), "torch.bfloat16", 0x1000_0000 * (index + 1))
        for index, name in enumerate(("x", "residual", "y"))
    }


@pytest.mark.parametrize(
    ("language", "text"), [item for item in BLOCKS if item[0] in ("toml", "c") or "arguments():" in item[1]]
)
def test_what_the_page_shows_of_the_files_is_in_them(language, text):
    assert any(text in source for source in SOURCES.values())


def test_the_kernel_on_the_page_is_the_one_in_the_file():
    assert block("python", "@cute.jit") in SOURCES["fusion.py"]


def test_the_commands_build_and_prove_the_kernels(run, place):
    listed = json.loads(run(["fusekit", "ls", "kernels/*", "--json"], place).stdout)
    assert sorted(item["name"] for item in listed) == [f"kernels/{name}" for name in KERNELS]
    assert all(item["spill_bytes"] == 0 for item in listed)
    for name in KERNELS:
        _, entry, _ = stored(place, f"kernels/{name}")
        assert entry.proof["launches"] >= 64


def test_the_records_say_what_the_kernels_do(place):
    records = {name: LaunchRecord.from_json(dict(stored(place, f"kernels/{name}")[1].launch)) for name in KERNELS}
    assert records["square-sum@cluster4"].cluster == (4, 1, 1)
    assert records["square-sum@cluster4"].grid == (("mul", 4, "M"), 1, 1)
    maps = [parameter for parameter in records["gemm@base"].parameters if hasattr(parameter, "box")]
    assert [tensor_map.argument for tensor_map in maps] == ["a", "b"]
    assert records["gemm@base"].grid[0][:2] == ("min", "sm_count")
    assert records["silu-add@base"].scalars[0].default == 1.0
    assert [launch.grid for launch in records["total@base"].launches] == [(256, 1, 1), (1, 1, 1)]
    assert (records["total@base"].scratch, records["total@base"].workspace) == (1024, 0)


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("fusion:arguments", {"x": "input", "residual": "input", "y": "output"}),
        ("gemm:arguments", {"a": "input", "b": "input", "c": "output"}),  # tensor maps
        ("total:arguments", {"x": "input", "y": "output", "sums": "inout"}),  # two launches
    ],
)
def test_new_finds_the_roles_of_the_page(run, place, source, roles):
    begun = json.loads(run(["fusekit", "new", "--from", source, "--json"], place).stdout)
    assert begun["roles"] == roles
    (kernel,) = (item for item in tomllib.loads(SOURCES["kernels.toml"])["kernel"] if item["source"] == source)
    given = {name: argument.get("role") for name, argument in kernel["arguments"].items()}
    # A workspace is read and written, and nothing says that no caller gives it.
    assert all(given[name] == role or (given[name], role) == ("workspace", "inout") for name, role in roles.items())


def test_where_nothing_compiles_names_give_the_roles(run, place):
    (place / "odd.py").write_text(SOURCES["fusion.py"].replace("grid=(blocks, 1, 1)", "grid=(blocks, missing, 1)"))
    done = run(["fusekit", "new", "--from", "odd:arguments", "--json"], place)
    assert json.loads(done.stdout)["roles"] == {"x": "input", "residual": "input", "y": "output"}
    assert "note: the kernel could not be compiled to see the roles: " in done.stderr
    assert "odd.py" in done.stderr
    assert "y: output, its role is guessed from its name" in done.stderr


def test_building_again_does_nothing(run, place):
    done = run(["fusekit", "build", "kernels.toml", "--allow-extern", "--json"], place)
    assert len(json.loads(done.stdout)["cached"]) == len(KERNELS)


def test_without_leave_nothing_is_run(run, place):
    done = run(["fusekit", "build", "kernels.toml"], place)
    assert done.returncode == 2
    assert "--allow-extern" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launch_from_python(place):
    library, fake = opened(place)
    names = {"fusekit": SimpleNamespace(open_library=lambda: library), **vectors()}
    exec(block("python", "kernel.bind"), names)
    first, second = fake.launches
    assert first.grid == second.grid == (2, 1, 1)
    assert first.parameters == second.parameters
    assert first.parameters[0][:8] == (0x1000_0000).to_bytes(8, "little")


def test_a_launch_from_c(run, place, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    done = run(shlex.split(block("sh", "gcc").splitlines()[0]), place)
    if "the C launcher reads schema 1" in done.stderr:
        pytest.skip("this fusekit's C launcher reads no record of schema 2")
    *compiling, running = block("sh", "gcc").splitlines()
    for line in compiling:
        done = run(shlex.split(line), place)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    done = run(shlex.split(running, comments=True), place)
    assert done.returncode in (0, 1)
    assert done.returncode == 0 or "libcuda" in done.stderr or "CUDA" in done.stderr, done.stderr
    from fusekit.cabi import Exported

    _, entry, cubin = stored(place)
    kernels = [Exported("kernels/silu-add", LaunchRecord.from_json(dict(entry.launch)), cubin)]
    launcher = Launcher(compile_shared(tmp_path, kernels), kernels)
    assert launcher.load() == OK, str(launcher.error)
    addresses = {f"{name}.address": tensor.address for name, tensor in vectors().items()}
    assert launcher.launch(launcher.arguments({"N": 4096, **addresses}, {"scale": 0.5})) == OK, str(launcher.error)
    library, fake = opened(place)
    library.load("kernels/silu-add", "sm_90a")(scale=0.5, **vectors())
    assert launcher.recorder.launches[0].parameters == fake.launches[0].parameters
    assert launcher.recorder.launches[0].grid == fake.launches[0].grid


def test_a_call_from_jax(place):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    import jax
    import jax.numpy as jnp

    def lowered(function):
        return lambda **arrays: jax.jit(function).trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()

    x = jnp.ones(4096, jnp.bfloat16)
    names = {"jax": SimpleNamespace(jit=lowered), "library": opened(place)[0], "x": x, "residual": x}
    exec(block("python", "interop.jax"), names)
    assert "custom_call @silu_add(" in names["y"]
    assert names["y"].count("tensor<4096xbf16>") >= 3


CAPTURING = """
import hashlib, json, sys, fusekit
from cutlass import cute
from fusion import arguments
silu_add, fakes = arguments()
{block}
print(json.dumps([repr(found), found.problems]))
"""


def test_what_a_program_compiles_is_written_down_and_built(run, run_block, place):
    code = CAPTURING.format(block=block("python", "fusekit.capture()"))
    done = run([sys.executable, "-c", code], place, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["<Capture of 1 kernels, 0 problems>", []]
    run_block("found.toml", place)
    assert stored(place, "found/silu_add@base")[2] == stored(place)[2]


def test_one_line_for_a_cache_and_what_becomes_of_it(run_block, place, monkeypatch):
    import fusekit
    from fusekit.compiler import dsl

    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("FUSEKIT_STORE", str(place / "store"))
    from fusion import arguments

    function, fakes = arguments()
    first, _ = block("python", "fusekit.compile(").splitlines()
    with dsl.target("sm_90a", 1024):
        exec(first, {"fusekit": fusekit, "silu_add": function, "fakes": fakes})
    run_block("fusekit adopt", place)
    library, fake = opened(place, "mine/silu-add@base")
    library.load("mine/silu-add", "sm_90a")(scale=0.5, **vectors())
    own, wanted = opened(place)
    own.load("kernels/silu-add", "sm_90a")(scale=0.5, **vectors())
    assert fake.launches[0].parameters == wanted.launches[0].parameters


# What is changed in the specs -> into what, of which kernel, what the build says then.
CHANGES = {
    'role = "output"': ('role = "result"', "silu-add", "one of input, output, inout, workspace"),
    'role = "input", ': ("", "silu-add", "lacks role"),
    'shape = ["N"]': ('shape = ["N", "M"]', "silu-add", "rank 1"),
    '"fusion:arguments"': ('"fusion:nothing"', "silu-add", "no function nothing"),
    '"rows:arguments"': ('"absent:arguments"', "square-sum", "no module absent"),
    "residual = {": ("left = {", "silu-add", "arguments.left: the trace has no such argument"),
}


@pytest.mark.parametrize("text", sample(CHANGES, most=2))
def test_a_spec_that_is_wrong_is_refused_in_words(run, place, tmp_path, text):
    for path in FILES.glob("*.py"):
        shutil.copy(path, tmp_path)
    new, kernel, says = CHANGES[text]
    (tmp_path / "kernels.toml").write_text(SOURCES["kernels.toml"].replace(text, new, 1))
    done = run(["fusekit", "build", f"kernels.toml/{kernel}", "--allow-extern"], tmp_path)
    assert done.returncode in (1, 2)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_changed_file_is_a_miss(run, place, tmp_path):
    for name in ("fusion.py", "kernels.toml"):
        shutil.copy(place / name, tmp_path)
    wanted = ["fusekit", "build", "kernels.toml/silu-add", "--allow-extern", "--dry-run", "--json"]
    store = {"FUSEKIT_STORE": str(place / "store")}
    assert json.loads(run(wanted, tmp_path, **store).stdout)["cached"] == ["kernels/silu-add@base"]
    (tmp_path / "fusion.py").write_text(SOURCES["fusion.py"].replace("THREADS = 256", "THREADS = 128"))
    assert json.loads(run(wanted, tmp_path, **store).stdout)["cached"] == []


def test_every_block_of_the_page_is_looked_at():
    run_here = (
        "kernels.toml",
        "gcc",
        "found.toml",
        "kernel.bind",
        "interop.jax",
        "fusekit.capture()",
        "fusekit.compile(",
        "fusekit.traced(",
        "fusekit adopt",
    )
    for _, text in BLOCKS:
        assert any(text in source for source in SOURCES.values()) or any(word in text for word in run_here), text

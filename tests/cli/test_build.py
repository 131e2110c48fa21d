"""fusekit build: from nothing to a store, and what happens when it is stopped, repeated, or asked for nonsense."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusekit.errors import UsageError
from fusekit.store import Store
from fusekit_cli.main import main

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
PROC = Path("/proc")
NAME = "quickstart/moe-fc2@128x128-c2x1"


@pytest.mark.parametrize("terminal", [True, False])
def test_every_packaged_spec_is_asked_for_on_a_terminal_alone(fusekit, monkeypatch, capsys, terminal):
    questions, ran = [], []

    def confirm(text, **_):
        questions.append(text)
        return False

    def execute(*_, **__):
        ran.append(1)
        raise UsageError("far enough")

    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("click.confirm", confirm)
    monkeypatch.setattr("fusekit.compiler.build.execute", execute)
    assert main(["build", "--store", str(fusekit.root)]) == (1 if terminal else 2)
    assert (len(questions), len(ran)) == ((1, 0) if terminal else (0, 1))
    if terminal:
        assert "every packaged spec is built: " in questions[0]
        assert "nothing was built; `fusekit build quickstart`" in capsys.readouterr().err


def test_build_and_build_again(fusekit):
    plan = fusekit("build", "quickstart/moe-fc2", "--dry-run", "--json").json
    assert [row["name"] for row in plan["would_build"]] == [NAME]
    assert (plan["cached"], plan["estimated_seconds"]) == ([], None)
    assert not fusekit.root.exists()

    first = fusekit("build", "quickstart/moe-fc2", "--json")
    document = first.json
    (built,) = document["built"]
    assert set(built) == {"name", "arch", "key", "cubin_sha256", "bytes", "seconds", "proved_launches"}
    assert (built["name"], built["arch"], built["key"]) == (NAME, "sm_90a", plan["would_build"][0]["key"])
    assert built["proved_launches"] >= 8
    assert (document["cached"], document["failed"]) == ([], [])
    assert document["seconds"] > 0
    assert first.err == f"1/1 {NAME}\n"
    assert {path.name for path in fusekit.root.parent.iterdir()} == {"store"}

    again = fusekit("build", "quickstart/moe-fc2", "--json")
    assert (again.json["built"], again.json["cached"], again.err) == ([], [NAME], "")
    cached = fusekit("build", "quickstart/moe-fc2")
    assert cached.out.startswith("1 kernel, all cached (")
    assert "next: " not in cached.err
    assert fusekit("build", "quickstart/moe-fc2", "--dry-run").out == "0 to build (0 kernels to compile), 1 cached\n"
    other = fusekit("build", "quickstart/moe-fc1@128x128-c2x1", "--dry-run")
    assert f"(1 kernel to compile, about {max(1, round(built['seconds']))} s), 0 cached" in other.out
    shown = fusekit("show", NAME, "--json").json
    assert (shown["key"], shown["proof"]["launches"]) == (built["key"], built["proved_launches"])
    assert fusekit("explain", NAME, "--json").json["status"] == "hit"
    assert fusekit("verify", "--full", "--json").json["bad"] == []


@pytest.mark.soak("reads every file of the compiler once more")
def test_a_build_leaves_code_of_compile_processes_in_the_users_cache(fusekit):
    fusekit("build", "quickstart/moe-fc2", XDG_CACHE_HOME="")
    home = fusekit.root.parent
    assert {path.name for path in home.iterdir()} == {".cache", "store"}
    assert [path.name for path in (home / ".cache").iterdir()] == ["fusekit-compiler"]


def test_a_dry_run_says_why(fusekit, tmp_path):
    spec = """schema = 1
        [[kernel]]
        name = "k"
        op = "dense-gemm"
        arch = "sm_90a"
        dtype = "bf16"
        tile = [128, 128]
        problem = { E = 1, M = 256, N = 256, K = 256 }
        """
    (tmp_path / "own.toml").write_text(spec)
    (row,) = fusekit("build", "own.toml", "--dry-run", "--json").json["would_build"]
    assert (row["status"], row["reason"]) == ("miss", "the store has no kernel of this name")
    fusekit("build", "own.toml")
    (tmp_path / "own.toml").write_text(spec + "bias = true\n")
    (row,) = fusekit("build", "own.toml", "--dry-run", "--json").json["would_build"]
    differs = "what differs: source.kernels/gemm/operands/bias.py, source.plan/operands/bias.py, spec.bias"
    assert row["reason"].endswith(differs)
    assert differs in fusekit("build", "own.toml", "--dry-run").out
    (tmp_path / "two.toml").write_text(spec)  # the same kernel under another name, and a new one
    table = fusekit("build", "own.toml", "two.toml").out.splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [
        ["own/k@128x128-c1x2-dynamic", "sm_90a", "built"],
        ["two/k@128x128-c1x2-dynamic", "sm_90a", "hit"],
    ]
    assert table[3].startswith("1 built, 1 cached (")


def test_a_hit_imports_no_compiler(fusekit):
    built = fusekit("build", "quickstart/moe-fc2").err
    assert built.endswith(
        "next: fusekit show quickstart/moe-fc2, or on a GPU: fusekit run quickstart/moe-fc2 --check\n"
    )
    code = (
        "import sys; from fusekit_cli.main import main; code = main(['build', 'quickstart/moe-fc2']);"
        "assert not {'cutlass', 'llvmlite', 'numpy', 'cuda', 'rich', 'multiprocessing'} & set(sys.modules);"
        "assert not {'fusekit.abi', 'fusekit.store.gc', 'fusekit.compiler.pool'} & set(sys.modules);"  # of milliseconds
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=fusekit.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no-such-file"], 2, "'no-such-file' names no packaged kernel"),
        (["missing.toml"], 2, "missing.toml"),
        (["quickstart", "--arch", "sm_100a"], 2, "arch 'sm_100a': none of the kernels named is for it"),
        (["quickstart", "--jobs", "0"], 2, "--jobs"),
        (["quickstart", "--jobs", "many"], 2, "--jobs"),
        (["quickstart", "--check", "x.json"], 2, "there is no lock x.json"),
        (["--check", "x.json", "--dry-run"], 2, "--check with --dry-run"),
        (["--check", "x.json", "--lineinfo"], 2, "or --lineinfo: a lock lists kernels without line"),
        (["quickstart", "--executor", "ssh://x"], 2, "it must be dask://host:port"),
        (["quickstart", "--executor", "dask://"], 2, "it must be dask://host:port"),
        (["quickstart", "--sign", ""], 2, "--sign"),
        (["quickstart", "--sign", "absent"], 2, "there is no key file"),
    ],
)
def test_nonsense_is_refused(fusekit, arguments, code, message):
    result = fusekit("build", *arguments, code=code)
    assert message in result.err
    assert result.out == ""
    assert not fusekit.root.exists()


def test_a_store_that_cannot_be_made(fusekit):
    fusekit.root.write_text("a file")
    result = fusekit("build", "quickstart/moe-fc2", code=1)
    assert str(fusekit.root) in result.err
    assert "Traceback" not in result.err


def start(fusekit, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fusekit", "build", *arguments],
        env=fusekit.environment,
        cwd=fusekit.root.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(folder)
    return found


@pytest.mark.skipif(not PROC.is_dir(), reason="reads /proc to find the compile processes")
def test_an_interrupted_build_leaves_a_whole_store(fusekit):
    # So much is left to do that it cannot be done before the signal comes, however busy the machine is.
    build = start(fusekit, "gpt-oss-120b", "--jobs", "1")
    first = build.stderr.readline()
    assert first.startswith("1/")
    workers = children(build.pid)
    assert workers
    build.send_signal(signal.SIGINT)
    out, err = build.communicate(timeout=60)
    assert build.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    deadline = time.monotonic() + 30
    while (left := [folder for folder in workers if folder.exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left

    store = Store(fusekit.root)
    there = [listed.record.name for listed in store.names()]
    assert there
    assert not store.verify(full=True).bad
    plan = fusekit("build", "gpt-oss-120b", "--dry-run", "--json").json
    assert sorted(plan["cached"]) == sorted(there)
    lost = plan["would_build"][0]["name"]
    rest = fusekit("build", lost, there[0], "--json").json
    assert (rest["cached"], [row["name"] for row in rest["built"]]) == ([there[0]], [lost])


def test_two_builds_at_once_compile_once(fusekit):
    builds = [start(fusekit, "quickstart/moe-fc2", "--json") for _ in range(2)]
    documents = []
    for build in builds:
        out, err = build.communicate(timeout=120)
        assert build.returncode == 0, err
        documents.append(json.loads(out))
    assert sorted(len(document["built"]) for document in documents) == [0, 1]
    assert sorted(document["cached"] for document in documents) == [[], [NAME]]
    assert not Store(fusekit.root).verify(full=True).bad

"""Compile processes: blind, reusable, replaceable, and gone afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from fusekit.compiler.memory import available_bytes, bound
from fusekit.compiler.pool import HOMES, ForkServer, PostponedError, run
from fusekit.compiler.worker import Job
from fusekit.errors import BuildError, ToolchainError
from fusekit.spec import find
from tests.soak import sample

(LINEAR,) = find(["quickstart/linear"])


@pytest.fixture
def misbehaving(tilecopy):
    import misbehaving

    return misbehaving


@pytest.fixture
def server(tmp_path):
    with closing(ForkServer(tmp_path)) as running:
        yield running


@pytest.fixture
def worker(server):
    return server.worker()


def test_a_process_has_an_environment_of_its_own(misbehaving, worker, tmp_path, monkeypatch):
    """What the DSL, the compilers inside it or Python could take from the user's has no way in."""
    for name in (
        "CUTE_DSL_COMPILER_OPT",
        "CUTLASS_X",
        "CUDA_HOME",
        "NVVM_X",
        "LLVM_X",
        "PYTHONOPTIMIZE",
        "PATH",
        "HOME",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    with pytest.raises(BuildError, match="ValueError: ") as caught:
        worker.compile(Job("a", misbehaving.tells, None))
    variables, end = json.JSONDecoder().raw_decode(str(caught.value), str(caught.value).index("{"))
    kept = {name: value for name, value in variables.items() if not name.startswith("PYTHON") and name != "LC_CTYPE"}
    assert kept == {"CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": "/nowhere", "TMPDIR": str(tmp_path)}
    assert (variables["PYTHONHASHSEED"], "PYTHONOPTIMIZE" in variables) == ("0", False)
    assert str(tmp_path) in str(caught.value)[end:]  # it works in its scratch folder


def test_a_process_outlives_a_failure_and_is_replaced_after_its_death(misbehaving, worker):
    with pytest.raises(BuildError, match=r"IndexError: .*defect of the kernel's planner") as caught:
        worker.compile(Job("a", misbehaving.defective, None))
    assert "in defective" in caught.value.__notes__[0]
    with pytest.raises(BuildError, match=r"died of file/kernel@v \(SIGSEGV\); its last words: .*a last word") as caught:
        worker.compile(Job("file/kernel@v", misbehaving.dies, None))
    assert caught.value.name == "file/kernel@v"
    with pytest.raises(BuildError, match=r"died of b \(exit code 7\)"):
        worker.compile(Job("b", misbehaving.leaves, None))

    done = worker.compile(Job("c", misbehaving.good, None))
    assert done.compiled.proof["launches"] >= 8
    assert done.seconds > 0


@pytest.mark.parametrize(
    ("source", "said"),
    sample(
        [
            (
                "raise ModuleNotFoundError(\"No module named 'cutlass'\")",
                "ModuleNotFoundError: No module named 'cutlass'",
            ),
            ("raise ImportError('libcute.so.1: cannot open shared object file')", "libcute.so.1: cannot open"),
            ("raise OSError('undefined symbol: cuteInit')", "OSError: undefined symbol: cuteInit"),
            ("raise SystemExit(3)", "SystemExit: 3"),
            ("import os; os.kill(os.getpid(), 11)", r"its process died of it \(SIGSEGV\)"),
            ("", "ModuleNotFoundError: No module named 'cutlass.cute'"),
            (None, "No module named 'cutlass"),  # another version
        ],
        most=4,
    ),
)
def test_a_compiler_that_cannot_be_imported_is_reported(worker, tmp_path, monkeypatch, source, said):
    package = tmp_path / "broken" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source or "")
    if source is None:
        (package / "cute.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(
        ToolchainError, match=f"(?s){said}.*pip install --force-reinstall .*'nvidia-cutlass-dsl=="
    ) as caught:
        worker.compile(Job("a", None, LINEAR))
    assert "defect" not in str(caught.value)


def test_a_planner_that_cannot_be_imported_is_an_error(worker, tilecopy, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "vanishing.py").write_text("def plan(spec):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    import vanishing

    (tmp_path / "elsewhere" / "vanishing.py").unlink()
    with pytest.raises(BuildError, match=r"cannot load its kernel: ModuleNotFoundError: .*vanishing"):
        worker.compile(Job("a", vanishing.plan, None))


def test_few_servers_of_foreign_modules_are_kept(server):
    """Those in use, and of the others the last; a module that comes again has the same one."""
    homes = [Job(f"k{number}", None, LINEAR, {}, (f"module{number}", "sm_90a")) for number in range(HOMES + 3)]
    with server.at(homes[0]) as used:
        servers = []
        for job in homes[1:]:
            with server.at(job) as each:
                servers.append(each)
        assert not used.closed
    assert [item.closed for item in servers] == [True] * 3 + [False] * (HOMES - 1)
    with server.at(homes[0]) as again, server.at(homes[-1]) as last, server.at(homes[1]) as new:
        assert again is used and last is servers[-1] and new is not servers[0]
    server.close()
    assert used.closed and all(item.closed for item in servers) and new.closed


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def hanging(folder):
    """The compile process that hangs in `folder`, once it does."""
    mark = folder / "hanging"
    deadline = time.monotonic() + 60
    while not mark.exists() or not mark.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(mark.read_text())


def test_leaving_early_ends_what_still_runs(misbehaving, server, tmp_path):
    planners = {"hangs": misbehaving.hangs, "fails": misbehaving.defective}
    workers = [server.worker(), server.worker()]
    outcomes = run(
        list(planners),
        workers,
        lambda worker, name: worker.compile(Job(name, planners[name], str(tmp_path))),
        server.close,
    )
    assert next(outcomes)[0] == "fails"
    process = hanging(tmp_path)
    outcomes.close()
    assert not alive(process)


def test_what_is_postponed_does_not_hold_up_the_others_nor_the_end():
    tried = []

    def task(worker, item):
        tried.append(item)
        if item < 2:
            raise PostponedError
        return item

    outcomes = run(list(range(6)), [None], task, lambda: None)
    assert [next(outcomes)[0] for _ in range(4)] == [2, 3, 4, 5]
    outcomes.close()
    count = len(tried)
    assert tried[:6] == list(range(6))
    assert len(tried) == count  # its thread has ended


def test_every_item_is_answered_once():
    items = list(range(20))
    answers = dict(run(items, [None] * 3, lambda worker, item: 10 // (item % 4), lambda: None))
    assert sorted(answers) == items
    assert answers[1] == 10
    assert isinstance(answers[4], ZeroDivisionError)


def test_nothing_to_do_starts_nothing():
    assert list(run([], [None] * 4, lambda worker, item: item, lambda: None)) == []


def test_a_server_that_was_killed_is_replaced(misbehaving, server):
    first, second = server.worker(), server.worker()
    with pytest.raises(BuildError, match="IndexError"):
        first.compile(Job("a", misbehaving.defective, None))
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    with pytest.raises(BuildError, match="IndexError"):
        second.compile(Job("b", misbehaving.defective, None))
    with pytest.raises(BuildError, match="IndexError"):  # forked by the one that is gone, and well
        first.compile(Job("c", misbehaving.defective, None))
    first.hang_up()


def test_processes_end_with_a_caller_that_is_killed(misbehaving, tmp_path):
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); import misbehaving;"
        "from fusekit.compiler.pool import ForkServer; from fusekit.compiler.worker import Job;"
        "ForkServer(pathlib.Path(sys.argv[1])).worker().compile(Job('a', misbehaving.hangs, sys.argv[1]))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, tmp_path, Path(__file__).parent])
    try:
        process = hanging(tmp_path)
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + 30
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(process)


def test_a_process_that_takes_too_much_memory_is_named(misbehaving, tmp_path):
    why = r"^greedy: .*limit of memory"
    with closing(ForkServer(tmp_path, memory=1 << 30)) as server, pytest.raises(BuildError, match=why):
        server.worker().compile(Job("greedy", misbehaving.greedy, None))


def test_a_process_that_has_grown_is_replaced(misbehaving, tmp_path):
    seen = set()
    with closing(ForkServer(tmp_path, recycle=1)) as server:
        worker = server.worker()
        for _ in range(2):
            with pytest.raises(BuildError, match=r"process \d+") as caught:
                worker.compile(Job("a", misbehaving.tells_its_process, None))
            seen.add(str(caught.value))
    assert len(seen) == 2


def test_as_many_processes_as_the_memory_holds():
    gigabyte = 1 << 30
    assert bound(8, 100 * gigabyte).workers == 8
    assert bound(8, 100 * gigabyte).bytes == 10 * gigabyte
    assert bound(8, 5 * gigabyte).workers == 4
    assert bound(8, 0) == bound(1, 0)
    assert bound(8, 0).workers == 1
    assert 0 < available_bytes() < 1 << 62


def test_memory_of_a_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert available_bytes(tmp_path) == 4 << 20
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 4 << 20
    (group / "memory.max").write_text("5000\n")
    assert available_bytes(tmp_path) == 4000

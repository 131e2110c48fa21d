"""Building on executors: threads, processes, and a real Dask cluster, which share nothing but what is sent to them."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from fusekit.compiler import executor as executors
from fusekit.compiler.build import execute, plan_build
from fusekit.compiler.executor import compile_here, connect
from fusekit.compiler.identity import key_fields_for
from fusekit.compiler.worker import Job
from fusekit.errors import BuildError, ToolchainError, UsageError
from fusekit.spec import find
from fusekit.store import Store

LINEAR = find(["quickstart/linear"])[0]
HERE = Path(__file__).parent


def kernels(count):
    """So many kernels with keys of their own, and names."""
    sizes = [(64, 16 * size) for size in range(1, count + 1)]
    return [dataclasses.replace(LINEAR, kernel=f"k{width}", tile=(tall, width)) for tall, width in sizes]


def build(store, specs, planner, executor, **options):
    return execute(plan_build(specs, store), store, planner=planner, executor=executor, **options)


class Lost(concurrent.futures.Executor):
    """Loses what it is given."""

    def submit(self, function, /, *arguments, **options):
        future = concurrent.futures.Future()
        future.set_exception(ConnectionError("the machine is gone"))
        return future


def test_a_thread_pool(tilecopy, store):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        report = build(store, [*kernels(3), dataclasses.replace(LINEAR, kernel="broken")], tilecopy.plan, pool)
        assert pool.submit(int, "3").result() == 3  # it is the caller's, and open
    (broken,) = report.failed
    assert "this kernel cannot be traced" in broken.error
    assert [built.name.partition("@")[0] for built in report.built] == [f"quickstart/k{16 * n}" for n in (1, 2, 3)]
    assert not store.verify(full=True).bad
    entry = store.find_entry(report.built[0].key)
    assert entry.toolchain["distributions"]["nvidia-cutlass-dsl"]
    again = build(store, kernels(3), tilecopy.plan, Lost())
    assert len(again.cached) == 3  # nothing is sent for a hit


def test_threads_that_ask_first_share_one_set_of_processes(monkeypatch):
    created = []

    class Slow:
        def __init__(self, stamp):
            created.append(self)
            time.sleep(0.05)
            self.guard, self.users, self.old = threading.Lock(), 0, False
            self.stamp, self.process = stamp, os.getpid()

        def borrow(self):
            raise BuildError("enough")

    monkeypatch.setattr(executors, "_Processes", Slow)
    kept = []
    monkeypatch.setattr(executors, "_kept", lambda: kept)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(compile_here, [Job("k", None, LINEAR)] * 4))
    assert [str(answer) for answer in answers] == ["enough"] * 4
    assert len(created) == 1


def test_what_was_imported_from_other_sources_compiles_nothing(monkeypatch):
    """A worker of a cluster outlives an upgrade, and its compile processes have what was there before."""
    stamps, closed, compiled = iter("aabbbc"), [], []

    class Processes:
        def __init__(self, stamp):
            self.guard, self.users, self.old = threading.Lock(), 0, False
            self.stamp, self.process = stamp, os.getpid()

        @contextlib.contextmanager
        def borrow(self):
            yield self

        def compile(self, job):
            compiled.append(self.stamp)
            return "done"

        def close(self):
            closed.append(self.stamp)

    monkeypatch.setattr(executors, "_Processes", Processes)
    kept = []
    monkeypatch.setattr(executors, "_kept", lambda: kept)
    monkeypatch.setattr(executors, "_stamp", lambda: next(stamps))
    answers = [compile_here(Job("k", None, LINEAR)) for _ in range(3)]
    assert answers[:2] == ["done", "done"]
    assert "changed while k was compiled; run the build again" in str(answers[2])
    assert (compiled, closed) == (["a", "b", "b"], ["a"])


def test_the_stamp_is_of_contents(monkeypatch, tmp_path):
    package = tmp_path / "fusekit" / "compiler"
    package.mkdir(parents=True)
    monkeypatch.setattr(executors, "__file__", str(package / "executor.py"))
    (package / "one.py").write_text("SIZE = 4")
    os.utime(package / "one.py", (0, 0))
    before = executors._stamp()
    assert before == executors._stamp()
    (package / "one.py").write_text("SIZE = 8")
    os.utime(package / "one.py", (0, 0))
    assert executors._stamp() != before


@pytest.mark.soak("an executor as the threads above and the cluster below, and two more imports of the compiler")
def test_a_process_pool(tilecopy, store):
    with concurrent.futures.ProcessPoolExecutor(2, get_context("spawn")) as pool:
        report = build(store, kernels(3), tilecopy.plan, pool, jobs=2)
    assert len(report.built) == 3
    assert not report.failed
    assert not store.verify(full=True).bad


def test_what_an_executor_loses_is_named(tilecopy, store):
    report = build(store, kernels(2), tilecopy.plan, Lost())
    assert len(report.failed) == 2
    assert report.failed[0].error.startswith(
        f"the executor lost {report.failed[0].name} (ConnectionError: the machine is gone)"
    )


def test_what_an_executor_gives_up_is_no_stop_of_the_builder(tilecopy, store):
    """As a Dask client does with what waits, once its scheduler is gone."""

    class Gone(concurrent.futures.Executor):
        def submit(self, *_):
            future = concurrent.futures.Future()
            future.cancel()
            return future

    report = build(store, kernels(2), tilecopy.plan, Gone())
    assert [failed.error for failed in report.failed] == [
        f"the executor gave up {failed.name}, as one does whose scheduler is gone; it was not compiled; look at the "
        "executor's own logs, and build it again"
        for failed in report.failed
    ]


def test_another_installation_is_refused(tilecopy):
    fields = key_fields_for(LINEAR)
    job = Job("a/b@c", tilecopy.plan, LINEAR, fields | {"toolchain.nvidia-cutlass-dsl": "4.0"})
    refused = compile_here(job)
    assert isinstance(refused, BuildError)
    assert "would compile a/b@c from something else: toolchain.nvidia-cutlass-dsl differs there" in str(refused)
    more = compile_here(dataclasses.replace(job, fields={**fields, "source.x": "1", "spec.x": "2"}))
    assert "source.x, spec.x differ there" in str(more)


def test_stopping_takes_back_what_has_not_begun(tilecopy, store):
    """Ctrl-C while kernels wait at an executor: they are taken back, and what has come is there."""

    class Slow(concurrent.futures.Executor):
        def __init__(self):
            self.futures = []
            self.first = threading.Lock()

        def submit(self, function, /, *arguments, **options):
            future = concurrent.futures.Future()
            self.futures.append(future)
            if self.first.acquire(blocking=False):
                deadline = time.monotonic() + 60
                while len(self.futures) < 4:  # all of them wait here when the first one comes
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                future.set_result(function(*arguments, **options))
            return future

    slow = Slow()

    def interrupt(step):
        if step.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(store, kernels(4), tilecopy.plan, slow, progress=interrupt)
    assert len(store.names()) == 1
    assert not store.verify(full=True).bad
    assert sorted(future.cancelled() for future in slow.futures) == [False, True, True, True]


@pytest.mark.parametrize("url", ["", "dask://", "tcp://host:1", "ray://host"])
def test_no_such_executor(url):
    with pytest.raises(UsageError, match=r"it must be dask://host:port"), connect(url):
        pass


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'distributed"), connect("dask://127.0.0.1:1"):
        pass


def test_no_scheduler(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 0.2)
    with (
        pytest.raises(BuildError, match=r"no Dask scheduler answers at dask://127.0.0.1:9"),
        connect("dask://127.0.0.1:9"),
    ):
        pass


# -- a Dask cluster ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and two worker processes, each with a home and a store of its own; its URL, workers and folder."""
    distributed = pytest.importorskip("distributed", reason="Dask (extra `dask`) is not installed")
    folder = tmp_path_factory.mktemp("cluster")
    result, started = folder / "scheduler.json", []

    def start(name, *arguments):
        home = folder / name
        home.mkdir()
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "FUSEKIT_STORE": str(home / "its-own-store"),
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)])),
        } | {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=environment, cwd=home, stdout=log, stderr=log
            )
        started.append(process)
        return process

    try:
        # The system chooses a port that is free, and the scheduler says which.
        listening = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(result))
        scheduler = start("scheduler", "distributed.cli.dask_scheduler", *listening)
        deadline = time.monotonic() + 60
        while not result.exists() or not result.read_text().rstrip().endswith("}"):
            assert scheduler.poll() is None, (folder / "scheduler" / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = json.loads(result.read_text())["address"]
        workers = [
            start(
                f"worker-{index}", "distributed.cli.dask_worker", address,
                "--nthreads", "1", "--name", f"worker-{index}", "--no-dashboard", "--no-nanny",
            )
            for index in range(2)
        ]  # fmt: skip
        with distributed.Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield address.replace("tcp://", "dask://"), workers, folder
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_dask_cluster_builds_together(tilecopy, store, cluster):
    url, _, folder = cluster
    steps = []
    with connect(url) as executor:
        report = build(store, kernels(6), tilecopy.plan, executor, progress=steps.append)
    assert not report.failed
    assert len(report.built) == 6
    assert [step.done for step in steps] == list(range(7))
    assert not store.verify(full=True).bad
    assert len(store.names()) == 6
    # Both had a share in it, and nobody has a store but the one that was given.
    assert not list(folder.glob("*/its-own-store"))
    assert len({item.parent for item in folder.glob("worker-*/fusekit-executor-*")}) == 2


def test_a_kernel_that_kills_its_process_on_a_cluster(tilecopy, store, cluster):
    import misbehaving

    url, *_ = cluster
    with connect(url) as executor:
        report = build(store, kernels(2), misbehaving.dies, executor)
        assert [failed.error.partition(";")[0] for failed in report.failed] == [
            f"the compile process died of {failed.name} (SIGSEGV)" for failed in report.failed
        ]
        assert len(build(store, kernels(2), tilecopy.plan, executor).built) == 2  # the cluster is as well as before


@pytest.mark.soak("--executor connects as the tests around it do")
def test_the_command_line(tilecopy, cluster, tmp_path):
    url, *_ = cluster
    root = tmp_path / "given"
    done = subprocess.run(
        [sys.executable, "-m", "fusekit", "build", "quickstart/moe-fc2", "--executor", url, "--store", root],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "1 built" in done.stdout
    assert not Store(root).verify(full=True).bad


def test_a_dask_worker_that_dies_is_no_end(tilecopy, store, cluster):
    """The other one takes over what it had. The cluster is one worker short afterwards."""
    url, workers, _ = cluster

    def kill_one(step):
        if step.done == 2:
            workers[0].kill()
            workers[0].wait()

    with connect(url) as executor:
        report = build(store, kernels(6), tilecopy.plan, executor, progress=kill_one)
    assert len(report.built) == 6
    assert not report.failed
    assert not store.verify(full=True).bad


def test_a_cluster_without_workers_is_not_waited_for_in_silence(tilecopy, store, cluster, tmp_path):
    """Both of its workers are gone by now, or go here."""
    url, workers, _ = cluster
    for worker in workers:
        worker.kill()
        worker.wait()
    message = []
    with (
        pytest.raises(ToolchainError, match=r"had no worker for 3 s; start one with `dask worker tcp://127.0.0.1"),
        connect(url, note=message.append, worker_seconds=3) as executor,
    ):
        build(store, kernels(3), tilecopy.plan, executor)
    (note,) = message
    assert f"{url} has no worker; waiting up to 3 s; start one with `dask worker tcp://" in note
    done = subprocess.run(
        [
            sys.executable, "-m", "fusekit", "build", "quickstart", "--executor", url, "--executor-timeout", "2",
            "--store", tmp_path / "given",
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert [line.partition("; ")[0] for line in done.stderr.splitlines()] == [
        f"the Dask scheduler at {url} has no worker",
        f"fusekit: the Dask scheduler at {url} had no worker for 2 s",
    ]

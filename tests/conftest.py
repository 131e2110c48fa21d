"""Options of the whole suite."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

FIGURES = pytest.StashKey[list[str]]()
PARTS = 24  # of a long round, to run at the same time
LONG = ("test_deploy.py", "test_kernels.py", "test_gpu_harness.py", "test_other_packages.py")
WORKERS = 8  # at most: with the compiler loaded a process has half a gigabyte, and starts others

sys.path.append(str(Path(__file__).parents[1]))  # for `examples`; an installed fusekit comes first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long rounds, and measure the figures that docs quote")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "soak_part" in metafunc.fixturenames:
        metafunc.parametrize("soak_part", range(PARTS if metafunc.config.getoption("--soak") else 1))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spreads the whole suite over the processors, file by file; tests that are named run in this process."""
    whole = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    free = not config.getoption("--soak") and not config.getoption("usepdb")
    if whole and free and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        # One more than processors: tests wait for processes that they start.
        config.option.numprocesses = min(WORKERS, len(os.sched_getaffinity(0)) + 1)
        config.option.dist = "loadfile"  # what a module's tests share is made once
        config.option.loadscopereorder = False  # files with few tests take longest
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of a worker


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """One worker goes ahead: byte code that it writes of tests is read by the others. Each text of a spec, which many
    modules look at, is parsed once.
    """
    from fusekit.spec import parse

    parsed: dict[str, Any] = {}
    ended: list[bool] = []
    parse_text = parse.parse_text

    def once(*arguments: Any, **named: Any) -> Any:
        if ended:  # a module that was imported meanwhile has this function ever after
            return parse_text(*arguments, **named)
        return parsed.get(key := repr((arguments, named))) or parsed.setdefault(key, parse_text(*arguments, **named))

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as ahead:
        patch.setattr(parse, "parse_text", once)
        if hasattr(session.config, "workerinput") and not sys.dont_write_bytecode:
            done = session.config._tmp_path_factory.getbasetemp().parent / "collected"  # type: ignore[attr-defined]
            ahead.enter_context(FileLock(f"{done}.lock"))
            if done.exists():
                ahead.close()
            ahead.callback(done.touch)
        gc.disable()
        try:
            return (yield)
        finally:
            ended.append(True)
            parsed.clear()
            gc.freeze()  # what is there now stays, and is not looked at again and again
            gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long and would begin last begin first: at the end one of them would keep one processor alone."""
    if not config.getoption("--soak"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []
    # Random cases are few, the same in every run, and may take long. --soak draws others, and keeps those that fail for
    # the next run.
    if not config.getoption("--soak"):
        slow = [HealthCheck.too_slow]
        settings.register_profile(
            "repeatable", derandomize=True, max_examples=40, deadline=None, suppress_health_check=slow
        )
        settings.load_profile(config.getoption("--hypothesis-profile", None) or "repeatable")
    # What a build keeps of installed files in the user's cache folder serves all tests and their processes.
    if hasattr(config, "cache"):
        os.environ.setdefault("XDG_CACHE_HOME", str(config.cache.mkdir("home")))
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_disks() -> Iterator[None]:
    """What tests write need not outlive the machine; those about syncing look at the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_records(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """A launch record that one worker has read out of a kernel is not read again by another."""
    from tests.records import FOLDERS

    here = tmp_path_factory.getbasetemp()
    FOLDERS[:] = [here.parent if hasattr(request.config, "workerinput") else here]


@pytest.fixture(scope="session", autouse=True)
def compile_servers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Builds of all workers and of their commands import the compiler once. The folder of `servers.start_compiler`."""
    from fusekit.compiler import new_extern, pool
    from fusekit.compiler.digests import private
    from fusekit.compiler.options import environment
    from fusekit.config import compiler_cache
    from tests import servers

    worker, here = hasattr(request.config, "workerinput"), tmp_path_factory.getbasetemp()
    folder = (here.parent if worker else here) / "servers"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            fresh = Path(pool.__file__).with_name("fresh.py")
            owner = os.getppid() if worker else os.getpid()
            for arch in (None, "sm_90a"):  # without, and for kernels of other packages
                servers.start_compiler(folder, environment(folder, arch), fresh, private(compiler_cache()), owner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "subprocess", servers.subprocess_of(folder))
        patch.setattr(new_extern, "subprocess", SimpleNamespace(run=servers.run_of(folder)))
        yield folder


@pytest.fixture(scope="session")
def commands(compile_servers: Path, request: pytest.FixtureRequest) -> Any:
    """The `servers.Commands` that commands of all workers are forked from."""
    from tests import servers

    owner = os.getppid() if hasattr(request.config, "workerinput") else os.getpid()
    with FileLock(f"{compile_servers}.lock"):
        return servers.Commands(compile_servers, servers.SETTINGS, owner)


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether --soak was given."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Notes one line that is printed at the end of the run."""
    return request.config.stash[FIGURES].append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[FIGURES]:
            terminalreporter.write_line(line)

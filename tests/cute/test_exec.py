"""`fusekit exec`: programs and all their processes, as they are without it but for what they compile."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fusekit.cute
from fusekit.compiler.options import environment
from fusekit.config import EXEC, Config, CuteConfig, exec_environment
from fusekit.cute import report
from tests.cute.command import EXECUTE, LINE, ROOT

NO_DSL = "the CuTe DSL (extra `build`) is not installed"
STARTUP = Path(fusekit.cute.__file__).parent / "startup"


def program(*arguments):
    return (sys.executable, "-m", "tests.cute.program", *arguments)


def test_a_program_is_what_it_is_without(run):
    pytest.importorskip("cutlass", reason=NO_DSL)
    bare = run(*program("exit"), execute=())
    cold, warm = run(*program("exit")), run(*program("exit"))
    assert (cold.out, cold.err, cold.code) == (warm.out, warm.err, warm.code) == (bare.out, bare.err, bare.code)
    assert (cold.counts, warm.counts) == ((0, 1), (1, 0))
    assert bare.code == 7


def test_a_program_is_what_it_is_without_a_trace(run):
    pytest.importorskip("cutlass", reason=NO_DSL)
    level1 = (*EXECUTE[:-1], "--level", "1", "--")
    bare = run(*program("exit"), execute=())
    for counts in ((0, 1), (1, 0)):
        done = run(*program("exit"), execute=level1)
        assert (done.out, done.err, done.code, done.counts) == (bare.out, bare.err, bare.code, counts)


def test_every_process_of_a_program_is_served(run):
    pytest.importorskip("cutlass", reason=NO_DSL)
    done = run(*program("methods"))
    assert done.counts == (4, 1), done.err
    assert done.out.count("CudaDialectJitCompiledFunction") == 5


def test_sixteen_processes_compile_once(run):
    pytest.importorskip("cutlass", reason=NO_DSL)
    done = run(*program("together"))
    assert done.out == f"{[0] * 16}\n"
    assert done.counts == (15, 1), done.err


def test_the_line_comes_after_the_last_process(run, tmp_path):
    pytest.importorskip("cutlass", reason=NO_DSL)
    done = run(*program("late", str(tmp_path / "late")))
    assert (tmp_path / "late").read_text() == "done"
    assert done.counts == (0, 1), done.err


HIDDEN = {
    "works": "import sys; sys.stdout.write(f'hidden: {__file__} {__name__} {sys.path[1:]}\\n')",
    "lacks a module": "import nothing_of_this_name",
    "fails": "1 / 0",
}


@pytest.mark.parametrize("text", [None, *HIDDEN.values()], ids=["none", *HIDDEN])
def test_python_starts_as_it_does_without(run, tmp_path, text):
    variables = {}
    if text is not None:
        (tmp_path / "sitecustomize.py").write_text(text)
        variables["PYTHONPATH"] = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", variables.get("PYTHONPATH", ""))
        hooked = exec_environment(CuteConfig(Config(store=tmp_path)), STARTUP, None)
    bare = run(*program("state"), execute=(), **variables)
    done = run(*program("state"), execute=(), **hooked)
    assert (done.out, done.err, done.code) == (bare.out, bare.err, bare.code)


def test_a_process_without_the_dsl_starts_as_fast(tmp_path):
    variables = exec_environment(CuteConfig(Config(store=tmp_path)), STARTUP, None)

    def seconds(env):
        """CPU time, at least: other processes delay this one."""

        def once():
            child = os.posix_spawn(sys.executable, (sys.executable, "-c", "pass"), env)
            _, status, used = os.wait4(child, 0)
            assert status == 0
            return used.ru_utime + used.ru_stime

        return min(once() for _ in range(7))

    assert seconds(variables) - seconds(dict(os.environ)) < 0.03


def test_no_variable_reaches_a_compile_process(tmp_path, monkeypatch):
    variables = exec_environment(CuteConfig(Config(store=tmp_path)), tmp_path, None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not {EXEC, "PYTHONPATH"} & environment(tmp_path, "sm_90a").keys()


def test_a_child_has_the_configuration_of_the_command(tmp_path):
    config = Config(
        store=tmp_path,
        read_only_roots=(tmp_path / "lower",),
        trusted_keys=(),
        only_keys=(tmp_path / "key",),
        debug=True,
    )
    variables = exec_environment(CuteConfig(config), tmp_path, tmp_path / "report")
    there = CuteConfig.from_environment(environ=variables)
    assert there.level == 2
    assert (there.config, there.report) == (config, tmp_path / "report")
    assert json.loads(variables[EXEC])["store"] == str(tmp_path)


def test_the_exit_code_is_the_programs(run):
    assert run("sh", "-c", "exit 5").code == 5
    killed = run("sh", "-c", "kill -TERM $$")
    assert killed.code == -signal.SIGTERM
    assert killed.counts == (0, 0)
    absent = run("no-such-program")
    assert (absent.code, absent.counts) == (127, None)
    assert absent.err == "fusekit: there is no program no-such-program; check the name, and PATH\n"
    assert run(str(ROOT / "README.md")).code == 126
    assert run("true", FUSEKIT_MISS="fail").code == 2


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 2, "there is no program to run; name one: fusekit exec -- python serve.py"),
        (("serve.py",), 127, "there is no program serve.py; give it to Python: fusekit exec -- python serve.py"),
        (("a -b",), 127, "give a command as several words: fusekit exec -- a -b"),
        (("A=1", "python"), 127, "variables are set before fusekit: A=1 fusekit exec -- CMD"),
        ((str(ROOT / "docs/figures/draw.py"),), 126, "cannot be run: Permission denied; give it to Python"),
    ],
)
def test_what_cannot_be_run_comes_with_what_can(run, words, code, text):
    done = run(*words)
    assert (done.code, done.out, done.counts) == (code, "", None)
    assert text in done.err and done.err.count("\n") == 1


def test_stdout_is_the_programs(run):
    done = run("true", execute=(*EXECUTE[:-1], "--json", "--"))
    assert done.code == 2 and "exec leaves stdout to the program" in done.out + done.err


@pytest.mark.parametrize(("miss", "code"), [("warn", 0), ("error", 1)])
def test_a_python_without_fusekit_is_told_how_to_get_it(run, tmp_path, miss, code):
    for name in ("fusekit", "cutlass"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    script = tmp_path / "program.py"
    script.write_text("try: import cutlass\nexcept ImportError: pass")
    done = run(sys.executable, str(script), FUSEKIT_MISS=miss)
    assert (done.code, done.out, done.counts) == (code, "", (0, 0))
    assert f"{sys.executable} has no fusekit.cute; install fusekit there: {sys.executable} -m pip" in done.err


def test_the_report_says_why_misses_stay_misses(tmp_path):
    file = tmp_path / "report"
    file.touch()
    report.miss(file, "a", f"{report.ABSENT}; a value changed")
    report.hit(file, 1.5, "b")
    assert report.troubles(file) == []
    report.miss(file, "", "it dumps SASS")
    report.miss(file, "", "a hook\nchanges ✓")
    report.not_stored(file, "a", "no space left " + "x" * 10_000)
    (served, stored) = report.troubles(file)
    assert served == "2 could not be hits: it dumps SASS; FUSEKIT_MISS=warn names all of them"
    assert stored.startswith("1 could not be stored: no space left xxx") and len(stored) < 1000
    assert (report.counts(file), report.keys(file)) == ((1, 3, 1.5), {"a", "b"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_program(number, tmp_path):
    script = f"trap 'echo got it; exit 9' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [*EXECUTE, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as command:
        assert command.stdout.readline() == "ready\n"
        command.send_signal(number)
        out, err = command.communicate(timeout=60)
    assert (out, command.returncode) == ("got it\n", 9)
    assert LINE.fullmatch(err)

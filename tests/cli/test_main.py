"""The group: help, common options, errors, exit codes, what is imported."""

import os
import signal
import subprocess
import sys
from keyword import iskeyword
from pathlib import Path

import click
import pytest

import fusekit as library
from fusekit.errors import ArgumentError, DriverError, FusekitError, NotBuiltError, StoreError
from fusekit_cli import main as entry
from fusekit_cli.main import VERBS, cli, main

FOLDER = Path(entry.__file__).parent


def test_version(fusekit):
    assert fusekit("--version").out == f"fusekit {library.__version__}\n"


def test_help_lists_every_verb(fusekit):
    out = fusekit("--help").out
    for verb, help_line in VERBS.items():
        assert f"  {verb} " in out
        assert help_line in out


def test_every_verb_has_its_file_and_its_help():
    context = click.Context(cli)
    for verb in VERBS:
        assert (FOLDER / f"{verb.replace('-', '_')}{'_' if iskeyword(verb) else ''}.py").is_file()
        command = cli.get_command(context, verb)
        assert command is not None
        assert command.help
        names = {option for parameter in command.params for option in parameter.opts}
        assert {"--store", "--json", "--debug"} <= names


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("ls",), ("show", "quickstart/linear"), ("verify",)]
)
def test_quick_verbs_import_nothing_heavy(store, fusekit, arguments):
    code = (
        "import sys\nfrom fusekit_cli.main import main\n"
        f"code = main({list(arguments)!r})\n"
        "heavy = {'cutlass', 'numpy', 'cuda', 'rich', 'torch', 'llvmlite', 'hypothesis', 'fusekit.compiler'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", code], env=fusekit.environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "arguments", [("bogus",), ("ls", "--bogus"), ("show",), ("--store", "", "ls"), ("show", "a", "b")]
)
def test_usage_errors(fusekit, arguments):
    result = fusekit(*arguments, code=2)
    assert result.out == ""
    assert "Error:" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("where", ["before", "after"])
def test_common_options_stand_before_or_after_the_verb(store, fusekit, where):
    options = ["--json", "--store", str(fusekit.root)]
    line = [*options, "ls"] if where == "before" else ["ls", *options]
    assert len(fusekit(*line, FUSEKIT_STORE="/nonexistent").json) == 3


def test_the_nearer_option_wins(store, fusekit):
    assert len(fusekit("--store", "/nonexistent", "ls", "--json", "--store", str(fusekit.root)).json) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FusekitError("it is so"), 1),
        (StoreError("it is so"), 1),
        (ArgumentError("it is so"), 2),
        (NotBuiltError("it is so"), 3),
        (DriverError("it is so"), 4),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
    ],
)
def test_an_error_is_one_message(monkeypatch, capsys, error, code):
    @click.command("ls")
    def command():
        raise error

    monkeypatch.setattr(entry, "import_module", lambda name: type("module", (), {"command": command}))
    assert main(["ls"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().startswith("fusekit: " + ("interrupted" if code == 130 else "it is so"))


def test_a_defect_is_said_to_be_one(monkeypatch, capsys):
    def broken(name):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(entry, "import_module", broken)
    assert main(["ls"]) == 1
    assert "ZeroDivisionError: by zero; this is a defect of fusekit; --debug" in capsys.readouterr().err


def test_no_memory_left_is_no_defect(monkeypatch, capsys):
    def greedy(name):
        raise MemoryError

    monkeypatch.setattr(entry, "import_module", greedy)
    assert main(["ls"]) == 1
    message = capsys.readouterr().err
    assert "out of memory" in message
    assert "--rows" in message
    assert "defect" not in message


def test_a_traceback_only_with_debug(fusekit):
    assert "Traceback" not in fusekit("show", "quickstart", code=3).err
    result = fusekit("show", "quickstart", "--debug", code=3)
    assert "Traceback" in result.err
    assert "NotBuiltError" in result.err
    assert "\nfusekit: 'quickstart' is not in any store layer" in result.err


def test_interrupted_in_the_middle(fusekit):
    code = (
        "import sys, time, fusekit.store.store as s\n"
        "def slow(*a):\n    print('now', flush=True)\n    time.sleep(60)\n"
        "s.Store.verify = slow\n"
        "from fusekit_cli.main import main\nsys.exit(main(['verify']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=fusekit.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "now\n"
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_traceback(store, fusekit):
    process = subprocess.Popen(
        [sys.executable, "-m", "fusekit_cli", "ls"],
        env=fusekit.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_an_answer_that_cannot_be_written_is_no_success(store, fusekit, option):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fusekit_cli", "ls", *option],
            env=fusekit.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "cannot write the answer to stdout: No space left on device" in done.stderr
    assert "defect" not in done.stderr

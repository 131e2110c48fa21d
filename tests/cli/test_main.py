"""The group: help, common options, errors, exit codes, what is imported."""

import contextlib
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
from fusekit.store import NameRecord
from fusekit_cli import main as entry
from fusekit_cli.main import COMMANDS, cli, main
from fusekit_cli.terminal import message
from tests.cli.conftest import NAMES, SPEC

FOLDER = Path(entry.__file__).parent


def test_help_is_a_command(fusekit):
    assert fusekit("help").out == fusekit("--help").out
    assert fusekit("help", "build").out == fusekit("build", "--help").out
    assert "there is no command bild; there are init, new, specs, build, " in fusekit("help", "bild", code=2).err


def test_version(fusekit):
    assert fusekit("--version").out == f"fusekit {library.__version__}\n"


def test_help_lists_every_command(fusekit):
    out = fusekit("--help").out
    for name, help_line in COMMANDS.items():
        assert f"  {name} " in out
        assert help_line in out


def test_every_command_has_its_file_and_its_help():
    context = click.Context(cli)
    for name in COMMANDS:
        assert (FOLDER / f"{name.replace('-', '_')}{'_' if iskeyword(name) else ''}.py").is_file()
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help
        names = {option for parameter in command.params for option in parameter.opts}
        assert {"--store", "--json", "--quiet", "--verbose", "--debug"} <= names


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("ls",), ("show", "quickstart/linear"), ("verify",)]
)
def test_quick_commands_import_nothing_heavy(store, fusekit, arguments):
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
def test_common_options_stand_before_or_after_the_command(store, fusekit, where):
    options = ["--json", "--store", str(fusekit.root)]
    line = [*options, "ls"] if where == "before" else ["ls", *options]
    assert len(fusekit(*line, FUSEKIT_STORE="/nonexistent").json) == 3


def test_quiet_and_verbose(store, fusekit, tmp_path):
    assert fusekit("ls", "nothing").err.startswith("nothing of that name in")
    assert fusekit("ls", "nothing", "-q").err == fusekit("--quiet", "ls", "nothing").err == ""
    assert fusekit("show", "nothing/x", "-q", code=3).err.startswith("fusekit: 'nothing/x' is not in the store")
    assert fusekit("ls", "-q").out == fusekit("ls").out == fusekit("ls", "-v").out
    root = str(tmp_path / "site")
    lines = fusekit("ls", "-v", FUSEKIT_STORES=root, code=1).err.splitlines()  # the root is not there
    assert lines[:2] == [f"store: {fusekit.root}", f"read-only root: {root}"]
    assert fusekit("-q", "ls", "-v").err  # the last one counts
    assert not fusekit("-v", "ls", "nothing", "-q").err


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


def test_an_end_of_file_is_no_interrupt(monkeypatch, capsys):
    def half(name):
        raise EOFError("marshal data too short")

    monkeypatch.setattr(entry, "import_module", half)
    assert main(["ls"]) == 1
    message = capsys.readouterr().err
    assert "EOFError: marshal data too short" in message
    assert "interrupted" not in message


def test_a_traceback_only_with_debug(fusekit):
    assert "Traceback" not in fusekit("show", "quickstart", code=3).err
    result = fusekit("show", "quickstart", "--debug", code=3)
    assert "Traceback" in result.err
    assert "NotBuiltError" in result.err
    assert "\nfusekit: 'quickstart' is not in the store" in result.err


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


@pytest.mark.parametrize(
    "line", [["ls"], ["ls", "--json"], ["show", NAMES[0]], ["schema"], ["--help"], ["export", "-"]]
)
def test_a_reader_that_goes_away_is_no_error_in_words(store, fusekit, line):
    process = subprocess.Popen(
        [sys.executable, "-m", "fusekit", *line],
        env=fusekit.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "line",
    [("ls",), ("ls", "--json"), ("schema",), ("--help",), ("--version",), ("build", "--help"), ("show", NAMES[0])],
)
def test_an_answer_that_cannot_be_written_is_no_success(store, fusekit, line):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fusekit", *line],
            env=fusekit.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (only,) = done.stderr.splitlines()
    assert "cannot write the answer to stdout: No space left on device" in only
    assert "defect" not in only


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_error_that_cannot_be_written_keeps_its_exit_code(fusekit):
    for line, code in ((("show", "a/b"), 3), (("bogus",), 2)):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "fusekit", *line]
            done = subprocess.run(command, env=fusekit.environment, stdout=subprocess.PIPE, stderr=full, check=False)
        assert (done.returncode, done.stdout) == (code, b"")


def closed(fusekit, line, *streams):
    """What a command says whose standard streams of these numbers are closed."""
    shut = " ".join(f"{number}>&-" for number in streams)
    command = ["sh", "-c", f'exec "$@" {shut}', "sh", sys.executable, "-m", "fusekit", *line]
    return subprocess.run(command, env=fusekit.environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("line", [("ls",), ("ls", "--json"), ("show", NAMES[0]), ("schema",)])
def test_a_closed_stdout_is_no_success(store, fusekit, line):
    done = closed(fusekit, line, 1)
    assert done.returncode == 1
    assert "cannot write the answer to stdout" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (("import", "-"), 1, "is not a bundle, or ends too early"),
        (("ls", "--from", "-"), 1, "is not a bundle, or ends too early"),
        (("build", "-"), 2, "the file is empty"),
        (("new", "-"), 2, "not JSON"),
    ],
)
def test_a_closed_stdin_is_empty(fusekit, line, code, words):
    done = closed(fusekit, line, 0)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(fusekit):
    """What others write to stderr would end up in it."""
    code = (
        "import os\nfrom fusekit_cli.main import main\nmain(['schema'])\n"
        "file = os.open('/dev/null', os.O_RDONLY)\nassert file > 2, file"
    )
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, env=fusekit.environment, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("build", "a" * 300), 2),
        (("build", f"{'a' * 300}.toml"), 2),
        (("build", f"{'a' * 300}.toml/x"), 2),
        (("explain", f"{'a' * 300}/b"), 2),
        (("ls", "--from", "a" * 300), 1),
        (("verify", "--from", "a" * 300), 1),
        (("push", "file", "quickstart"), 1),
        (("new", "--from", "os:getcwd", "--params", "[" * 100_000), 2),
    ],
)
def test_what_the_system_refuses_is_no_defect(store, fusekit, tmp_path, line, code):
    (tmp_path / "file").write_text("mine")
    err = fusekit(*line, code=code).err
    assert err.startswith("fusekit: ")
    assert "defect" not in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "code"),
    [(("--store", "x", "ls"), 2), (("export", "x.tar"), 1), (("import", "x.tar"), 1), (("key", "show", "x"), 1)],
)
def test_a_current_folder_that_is_gone_is_no_defect(store, fusekit, tmp_path, line, code):
    gone = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    command = ["sh", "-c", gone, str(tmp_path / "gone"), sys.executable, "-m", "fusekit", *line]
    done = subprocess.run(command, env=fusekit.environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert "current folder" in done.stderr
    assert "defect" not in done.stderr


HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e\udc80\x7f"


@pytest.mark.parametrize(
    "line",
    [
        ("ls", f"{HOSTILE}/x"), ("show", f"{HOSTILE}/x"), ("build", f"{HOSTILE}.toml"), ("build", f"{HOSTILE}/x"),
        ("build", "own.toml"), ("build", "--check", f"{HOSTILE}.json"), (HOSTILE,), (f"--{HOSTILE}",),
        ("lock", HOSTILE),
        ("import", HOSTILE), ("verify", "--store", HOSTILE), ("show", "x", "--debug", "--store", HOSTILE),
        ("gc", "--max-size", HOSTILE), ("run", HOSTILE), ("explain", HOSTILE), ("export", "out", HOSTILE),
        ("pull", HOSTILE), ("key", "show", HOSTILE), ("doctor", "--store", HOSTILE), ("build", "--executor", HOSTILE),
    ],
    ids=lambda line: " ".join(line).encode("ascii", "replace").decode().replace("\x1b", "^")[:16],
)  # fmt: skip
def test_control_characters_do_not_reach_the_terminal(fusekit, line):
    own = fusekit.root.parent / "own.toml"
    own.write_bytes(b'schema = 1\n[[kernel]]\nname = "a\\u001b[31m"\nop = "\\u009b2J"\n"k\\u0007" = 1\n')
    result = fusekit(*line, code=None)
    assert "defect" not in result.err
    for text in (result.out, result.err):
        assert not [character for character in text if ord(character) < 32 and character not in "\n\t"]
        assert not {"\x7f", "\x9b", "\u202e", "\x07"} & set(text)
    if "doctor" not in line:
        assert result.code in (0, 1, 2, 3)


def test_control_characters_of_stored_names_are_escaped(store, fusekit):
    name = "quickstart/\x1b[31mred@128x128-c2x1"
    with contextlib.suppress(FusekitError):
        store.publish_name(NameRecord(name, "sm_90a", store.find_name(NAMES[0], "sm_90a").key, SPEC, {}))
    for line in (("ls",), ("show", "quickstart"), ("verify",), ("explain", "quickstart")):
        assert "\x1b" not in fusekit(*line, code=None).out


def test_a_message_of_megabytes_is_shortened(fusekit):
    said = fusekit("show", "x/" + "y" * 100_000, code=3).err
    assert said.startswith("fusekit: 'x/yyy")
    assert " characters left out ...] yyy" in said
    assert len(said) < 10_000
    assert len(message("x" * 10**7)) < 10_000

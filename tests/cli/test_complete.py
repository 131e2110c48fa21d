"""Completion in a shell: commands, options, names of packaged specs and of the store, globs, files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOE = ["quickstart/moe-fc1@128x128-c2x1", "quickstart/moe-fc1@128x192-c2x1"]

SPEC = """schema = 1
[defaults]
op = "dense-gemm"
arch = "sm_90a"
tile = [[128, 64], [128, 128]]
cluster = [1, 1]
problem = { E = 1, M = 256, N = 256, K = 256 }
[[kernel]]
name = "one"
[[kernel]]
name = "two"
"""


@pytest.fixture
def complete(fusekit):
    """What is offered for the last word of a line."""

    def offered(*words):
        line = " ".join(["fusekit", *words])
        answer = fusekit(_FUSEKIT_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words)))
        assert not answer.err
        return [text.partition(",")[2] or text for text in answer.out.splitlines() if text]

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("sch",), ["schema"]),
        (("new", "--family", "nemo"), ["nemotron", "nemotron_h"]),
        (("help", "ex"), ["explain", "export", "exec"]),
        (("build", "--dry"), ["--dry-run"]),
        (("bench", "--gr"), ["--groups"]),
        (("bench", "--groups", "o"), ["one"]),
        (("build", "gpt-oss"), ["gpt-oss-120b", "gpt-oss-20b"]),
        (("build", "quick"), ["quickstart", "quickstart/linear", "quickstart/moe-fc1", "quickstart/moe-fc2"]),
        (("build", "quickstart/moe"), ["quickstart/moe-fc1", "quickstart/moe-fc2"]),
        (("build", "quickstart/moe-fc1"), ["quickstart/moe-fc1", *MOE]),
        (("lock", "quickstart/moe-fc1@"), MOE),
        (("explain", "quickstart/*2"), ["quickstart/*2"]),
        (("build", "gpt-oss-*/fc?-w"), ["gpt-oss-*/fc?-w"]),
        (("build", "quickstart/*@128x19"), ["quickstart/*@128x192-c2x1"]),
        (("build", "nothing-has-this-name"), []),
        (("build", "nothing*"), []),
        (("new", "some/mod"), ["some/mod"]),
        (("ls", "--from", "kern"), ["kern"]),
        (("verify", "--check", "man"), ["man"]),
        (("pull", "rem"), ["rem"]),
    ],
)
def test_what_needs_no_store(complete, words, offered):
    assert complete(*words) == offered


def test_names_of_the_store(store, complete, fusekit):
    assert complete("show", "quickstart/moe-fc1@") == MOE
    assert complete("ls", "q") == ["quickstart", "quickstart/linear", "quickstart/moe-fc1"]
    assert complete("run", "*/lin") == ["*/linear", "*/linear@128x128-c2x1"]
    for words in (("bench",), ("copy",), ("export", "file"), ("push", "url"), ("key", "sign"), ("rm",)):
        assert complete(*words, "quickstart/l") == ["quickstart/linear", "quickstart/linear@128x128-c2x1"]
    assert complete("--store", "/nonexistent", "show", "quick") == []
    assert complete("show", "--store", str(fusekit.root), "quickstart/moe-fc1@128x19") == MOE[1:]


def test_no_completion_fails(complete, fusekit):
    fusekit.root.mkdir()
    (fusekit.root / "names").write_text("no folder")
    assert complete("show", "q") == []
    assert complete("show", "[") == []
    assert complete("build", "~nobody-of-this-name/x") == []


def test_spec_files(complete, fusekit):
    here = fusekit.root.parent
    (here / "specs").mkdir()
    for name in ("own.toml", "other.txt", "specs/inner.toml", ".hidden.toml"):
        (here / name).write_text("")
    assert complete("build", "own") == ["own.toml"]
    (here / "own.toml").write_text(SPEC)
    assert complete("build", "own.toml/") == ["own.toml/one", "own.toml/two"]
    assert complete("explain", f"{here}/own.toml/two@128x1") == [f"{here}/own.toml/two@128x128-c1x1-dynamic"]
    assert complete("build", "spe") == ["specs/"]
    assert complete("build", "specs/") == ["specs/inner.toml"]
    assert complete("explain", f"{here}/sp") == [f"{here}/specs/"]
    assert "own.toml" in complete("lock", "''")
    assert complete("import", "o") == complete("show", "--store", "o") == ["o"]  # the shell itself completes files


def shell(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def in_shell(fusekit, name, code):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = fusekit.environment | {"PATH": path, "TERM": "dumb", "ZDOTDIR": str(fusekit.root.parent)}
    run = subprocess.run(
        [shell(name), "-c", code], env=environment, cwd=fusekit.root.parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_in_bash(store, fusekit):
    code = 'eval "$(_FUSEKIT_COMPLETE=bash_source fusekit)"; COMP_WORDBREAKS=${COMP_WORDBREAKS//@}\n'
    code += "COMP_WORDS=(fusekit show quickstart/moe-fc1@); COMP_CWORD=2; _fusekit_completion fusekit\n"
    assert in_shell(fusekit, "bash", code + 'printf "%s\\n" "${COMPREPLY[@]}"; complete -p fusekit')[:2] == MOE


def test_in_fish(store, fusekit):
    code = '_FUSEKIT_COMPLETE=fish_source fusekit | source; complete -C "fusekit show quickstart/moe-fc1@"'
    assert in_shell(fusekit, "fish", code) == MOE


def test_in_zsh(store, fusekit):
    code = (
        'autoload -Uz compinit; compinit -u; eval "$(_FUSEKIT_COMPLETE=zsh_source fusekit)"\n'
        "compadd() { print -l $completions }; _describe() { print -l ${(P)2} }\n"
        "words=(fusekit show quickstart/moe-fc1@); CURRENT=3; _fusekit_completion"
    )
    assert in_shell(fusekit, "zsh", code) == MOE

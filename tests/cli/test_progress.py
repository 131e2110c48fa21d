"""Progress: lines where stderr is no terminal, a bar with the time that is left where it is."""

import io
import sys

import pytest

from fusekit.compiler.estimate import Estimate
from fusekit.config import Config
from fusekit_cli.options import Session
from fusekit_cli.output import duration
from fusekit_cli.progress import Remaining, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, tmp_path, stderr, moves_bytes=False, expected=None, **options):
    session = Session(**options)
    session.__dict__["config"] = Config(store=tmp_path, color=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with progress(session, "compiling", moves_bytes=moves_bytes, expected=expected) as update:
            update(0, 2, "", 0)
            update(1, 2, "a/\x1b[31mb", 10)
            update(2, 2, "c/d", 20)
    return stderr.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch, tmp_path):
    lines = "1/2 a/\\x1b[31mb\n2/2 c/d\n"
    assert shown(monkeypatch, tmp_path, io.StringIO()) == lines
    assert shown(monkeypatch, tmp_path, io.StringIO(), moves_bytes=True) == ""
    assert shown(monkeypatch, tmp_path, io.StringIO(), moves_bytes=True, verbose=True) == lines
    assert shown(monkeypatch, tmp_path, io.StringIO(), quiet=True) == ""


def test_a_bar_on_a_terminal(monkeypatch, tmp_path):
    pytest.importorskip("rich")
    text = shown(monkeypatch, tmp_path, Terminal())
    assert "2/2" in text
    assert "left" in text
    assert "a/\\x1b[31mb" in text or "c/d" in text
    assert "\x1b[31m" not in text
    assert "1/2 a/" not in text
    assert "1/2 a/" in shown(monkeypatch, tmp_path, Terminal(), verbose=True)
    assert shown(monkeypatch, tmp_path, Terminal(), quiet=True) == ""


def test_a_bar_knows_the_remaining_time_before_the_first_step_is_done(monkeypatch, tmp_path):
    pytest.importorskip("rich")
    expected = Estimate({"a/\x1b[31mb": 7200.0, "c/d": 3600.0}, 1)
    assert "3:00:00 left" in shown(monkeypatch, tmp_path, Terminal(), expected=expected)


def test_the_remaining_time_follows_what_was_measured():
    left = Remaining(Estimate({"long": 30.0, "short": 10.0}, 2))
    assert (left.at(0), left.at(5), left.at(99)) == (30, 25, 0)  # one process compiles the longest
    left = Remaining(Estimate({"a": 10.0, "b": 10.0, "c": 20.0}, 2))
    assert left.at(0) == 20
    left.step("c", 20.0)  # twice as long as expected
    assert left.at(20) == 15
    assert left.at(25) == 10
    left.step("unknown", 20.0)
    assert left.at(20) == 15
    left.step("a", 30.0)
    left.step("b", 40.0)
    assert left.at(40) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (40.4, "40 s"), (100, "2 min"), (5969, "99 min"), (5970, "1.7 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text

"""Progress: lines where stderr is no terminal, a bar with the time that is left where it is."""

import io
import sys

import pytest

from fusekit.config import Config
from fusekit_cli.options import Session
from fusekit_cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, tmp_path, stderr, moves_bytes=False, **options):
    session = Session(**options)
    session.__dict__["config"] = Config(store=tmp_path, color=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with progress(session, "compiling", moves_bytes=moves_bytes) as update:
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

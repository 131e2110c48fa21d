"""Text for people, JSON for programs."""

import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.config import Config
from fusekit_cli import output
from fusekit_cli.options import Session

ALIGNED = "NAME             N\n[bold]a:smile:   1\nb               22\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, tmp_path, color=True, columns=80):
    """What a small table is on a terminal."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        output.table(session(tmp_path, color), ("NAME", "N"), [("[bold]a:smile:", 1), ("b", 22)], right=("N",))
    return terminal.getvalue()


def session(tmp_path, color):
    session = Session()
    session.__dict__["config"] = Config(store=tmp_path, color=color)
    return session


@pytest.mark.parametrize("color", [True, False])
def test_a_table_on_a_terminal_is_drawn(monkeypatch, tmp_path, color):
    pytest.importorskip("rich")
    text = drawn(monkeypatch, tmp_path, color)
    assert "[bold]a:smile:" in text
    assert "─" in text
    assert not any(f"\x1b[{code}" in text for code in ("3", "4", "9"))


def test_a_table_without_rich_is_aligned(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert drawn(monkeypatch, tmp_path) == ALIGNED


WIDE = [(f"model/moe.fc{n}@128x128-c2x1-dynamic", "sm_90a", 168, f"{n}.25", "what is in the file is not the same now")
        for n in (1, 2)]  # fmt: skip


@pytest.mark.parametrize("columns", [140, 80, 66])
def test_a_narrow_terminal_leaves_columns_out_and_never_breaks_a_word(monkeypatch, tmp_path, columns):
    pytest.importorskip("rich")
    headings = ("NAME", "ARCH", "REGISTERS", "SECONDS", "WHY")
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        output.table(session(tmp_path, False), headings, WIDE, spare=("REGISTERS", "ARCH"), prose=("WHY",))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert all(word in text for row in WIDE for word in (row[0].rpartition(".")[2], row[3], *row[4].split()))
    assert "SECONDS" in text
    assert ("REGISTERS" in text, "ARCH" in text) == (columns > 80, columns > 80)
    assert ("NAME begins with model/moe." in text) == (columns == 66)


DIGEST = "0123456789abcdef" * 4


def on_terminal(monkeypatch, columns, show):
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        result = show()
    return result, re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()


def test_several_columns_are_wrapped_and_digests_are_short(monkeypatch, tmp_path):
    pytest.importorskip("rich")
    row = ("moe/fc1", DIGEST, "the first of two long texts in a row", "and the second of them here")
    headings = ("NAME", "KEY", "READS", "WRITES")
    count, lines = on_terminal(
        monkeypatch, 80, lambda: output.table(session(tmp_path, False), headings, [row], prose=("READS", "WRITES"))
    )
    assert count == len(lines)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert f"{DIGEST[:12]}…" in text
    assert DIGEST[:13] not in text
    assert all(word in text.split() for cell in row[2:] for word in cell.split())


def test_lines_are_wrapped_at_words_on_a_terminal_alone(monkeypatch):
    document = {"key": DIGEST, "kernel": f"what differs: {DIGEST} and {DIGEST}", "b": "short"}
    _, shown = on_terminal(monkeypatch, 40, lambda: output.tree(document))
    short = f"{DIGEST[:12]}…"
    assert shown == [
        f"key     {short}", f"kernel  what differs: {short} and", f"        {short}", "b       short"
    ]  # fmt: skip
    assert on_terminal(monkeypatch, 80, lambda: output.tree({"key": DIGEST}))[1] == [f"key  {DIGEST}"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        assert output.lines([DIGEST * 9]) == [DIGEST * 9]


def test_a_table_wider_than_the_terminal_is_not_folded(monkeypatch, tmp_path):
    assert drawn(monkeypatch, tmp_path, columns=20) == ALIGNED


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_anything_prints(document):
    old, sys.stdout = sys.stdout, io.StringIO()
    try:
        output.tree(document)
        sys.stdout = io.StringIO()
        output.print_json(document)
        json.loads(sys.stdout.getvalue(), parse_constant=pytest.fail)
    finally:
        sys.stdout = old


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes(count, text):
    assert output.size(count) == text


def test_plurals():
    assert [output.plural(n, w) for n, w in ((1, "entry"), (2, "entry"), (0, "name"))] == [
        "1 entry",
        "2 entries",
        "0 names",
    ]


def test_where_names_leave_no_room_the_text_is_below(monkeypatch, tmp_path, capsys):
    """The rows of two models have nothing in common that could be printed once."""
    pytest.importorskip("rich")
    rows = [(f"{model}/moe-fp8.quantise-x-turned@128x192-c2x1-dynamic", "sm_90a", "why it is so " * 9)
            for model in ("qwen3-30b-a3b", "deepseek")]  # fmt: skip
    count, lines = on_terminal(
        monkeypatch, 70,
        lambda: output.table(session(tmp_path, False), ("NAME", "ARCH", "WHY"), rows, spare=("ARCH",), prose=("WHY",)),
    )  # fmt: skip
    assert count == len(lines)
    assert max(map(len, lines)) <= 70
    assert [line for line in lines if "/" in line] == [row[0] for row in rows]
    assert " ".join(" ".join(lines[2:]).split()).startswith(rows[0][2].strip())


def test_what_a_narrow_table_leaves_out_is_wrapped_too(monkeypatch, tmp_path, capsys):
    pytest.importorskip("rich")
    headings = ("NAME", "TOOLCHAIN", "REGISTERS", "SPILLED", "PART OF")
    table = [("a-name", *("x" * 20 for _ in headings[1:]))]
    on_terminal(monkeypatch, 40, lambda: output.table(session(tmp_path, False), headings, table, spare=headings[1:]))
    notes = capsys.readouterr().err.splitlines()
    assert max(map(len, notes)) <= 40
    assert "TOOLCHAIN, REGISTERS, SPILLED;" in " ".join(notes)

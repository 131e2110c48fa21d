"""Output on stdout: a JSON document, or text; tables are drawn on a terminal and aligned elsewhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit_cli.options import Session
from fusekit_cli.terminal import inline

if TYPE_CHECKING:
    from fusekit.share.selection import Step
    from fusekit.share.transfer import Report


def answer(session: Session, document: Any, text: Callable[[], None]) -> None:
    """Print `document` with --json; otherwise call `text`, which prints it for people."""
    if session.json:
        print_json(document)
    else:
        text()


def print_json(document: Any) -> None:
    """Print `document`, which may contain dataclasses and paths, as strict JSON; an infinity is the string "inf"."""
    click.echo(json.dumps(_json(document), indent=2, allow_nan=False))


def one_or_many(documents: Sequence[Any]) -> Any:
    """One document itself, or a list of several: a name gives one, a glob as many as it matches."""
    return documents[0] if len(documents) == 1 else list(documents)


def table(
    session: Session, headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """Print rows under headings; the columns named in `right` are aligned to the right.

    On a terminal it is drawn; into a file or a pipe it is aligned with spaces, at any width, so that it can be cut,
    sorted and searched.
    """
    cells = [[inline(str(cell)) for cell in row] for row in rows]
    lines: list[str] = []
    widths = [max(len(row[i]) for row in [headings, *cells]) for i in range(len(headings))]
    if sys.stdout.isatty() and _drawn(session, headings, cells, widths, right):
        return
    pad = [str.rjust if heading in right else str.ljust for heading in headings]
    for row in [headings, *cells]:
        padded = [by(cell, width) for by, cell, width in zip(pad, row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    click.echo("\n".join(lines))


def driver(version: int | None) -> str | None:
    """13000 -> "13.0"."""
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def tree(document: Mapping[str, Any], indent: str = "") -> None:
    """Print nested JSON values as indented `name  value` lines; a list of plain values stays on one line."""
    width = max((len(name) for name, value in document.items() if _flat(value)), default=0)
    for name, value in document.items():
        if _flat(value):
            click.echo(f"{indent}{inline(name).ljust(width)}  {_plain(value)}".rstrip())
        elif isinstance(value, Mapping):
            click.echo(f"{indent}{inline(name)}")
            tree(value, indent + "  ")
        else:
            click.echo(f"{indent}{inline(name)}")
            for item in value:
                click.echo(f"{indent}  - {_item(item)}")


def dry_document(dry_run: bool, steps: Iterable[Step]) -> dict[str, Any]:
    """The members that --dry-run adds to the JSON document: names that would be copied, or whose entries would be."""
    return {"dry_run": True, "would": list(steps)} if dry_run else {}


def dry_rows(session: Session, dry_run: bool, steps: Sequence[Step]) -> None:
    """The same as a table."""
    if dry_run and steps:
        rows = [(step.name, step.arch, size(step.bytes), step.key[:12]) for step in steps]
        table(session, ("NAME", "ARCH", "BYTES", "KEY"), rows, right=("BYTES",))


def transferred(session: Session, report: Report, done: str, dry_run: bool, **more: Any) -> None:
    """Print the report of a push or pull. done: "pushed" or "pulled". more: further members of the JSON document."""
    document = {"entries": report.entries, "names": report.names, "bytes": report.bytes, "skipped": report.skipped}

    def text() -> None:
        dry_rows(session, dry_run, report.steps)
        would = "would be " if dry_run else ""
        copied = f"{plural(report.entries, 'entry')} and {plural(report.names, 'name')} {would}{done}"
        click.echo(f"{copied} ({size(report.bytes)}), {report.skipped} there already")

    answer(session, document | more | dry_document(dry_run, report.steps), text)


def size(count: int) -> str:
    """A number of bytes as text: `37.2 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """`1 entry`, `2 entries`."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun}"


def _drawn(
    session: Session, headings: Sequence[str], cells: list[list[str]], widths: list[int], right: Sequence[str]
) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a launch-only installation may lack it
        return False
    console = Console(no_color=not session.config.color, markup=False, highlight=False, emoji=False)
    if sum(widths) + 3 * len(widths) + 1 > console.width:
        return False  # a name that is folded cannot be copied
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        drawn.add_column(heading, justify="right" if heading in right else "left")
    for row in cells:
        drawn.add_row(*row)
    with console.capture() as captured:
        console.print(drawn)
    # The escape sequences are those of rich; the cells have none left.
    getattr(sys.stdout, "write_drawn", sys.stdout.write)(captured.get())
    return True


def _flat(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value
    return not isinstance(value, (list, tuple)) or not any(isinstance(item, Mapping) for item in value)


def _item(value: Any) -> str:
    # The name of an item comes first.
    if isinstance(value, Mapping) and "name" in value and len(value) > 1:
        rest = {label: member for label, member in value.items() if label != "name"}
        return f"{_plain(value['name'])}: {_plain(rest)}"
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return json.dumps(_json(value))
    return inline(str(value))


def _json(value: Any) -> Any:
    """`value` as JSON types: a dataclass as its fields, a path as text, an infinity as "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value):
        return {field.name: _json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return value

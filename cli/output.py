"""Output on stdout: a JSON document, or text; tables are drawn on a terminal and aligned elsewhere."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import StoreError, UsageError
from fusekit_cli.options import Session
from fusekit_cli.terminal import inline

if TYPE_CHECKING:
    from fusekit.share.selection import Step
    from fusekit.share.transfer import Report


SHOWN = 3  # problems; a store without signatures has one a kernel
_PROSE = 20  # columns that a text that is wrapped takes at least
_VALUE = re.compile(r"\s*(- )?\S+\s\s+")  # what is before the value of a line of a tree


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
    session: Session, headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = (),
    spare: Sequence[str] = (), prose: Sequence[str] = (),
) -> int:  # fmt: skip
    """Print rows under headings; the columns named in `right` are aligned to the right. Returns the number of lines.

    On a terminal it is drawn. Where that is too narrow, digests are shortened, the columns `spare` are left out, the
    first ones first, what all names of the first column begin with is printed once above, and the columns `prose` are
    wrapped at words. Into a file or a pipe it is aligned with spaces, at any width, so that it can be cut, sorted and
    searched.
    """
    cells = [[inline(str(cell)) for cell in row] for row in rows]
    lines: list[str] = []
    if sys.stdout.isatty() and (drawn := _drawn(session, headings, cells, right, spare, prose)):
        return drawn
    widths = _widths(headings, cells)
    pad = [str.rjust if heading in right else str.ljust for heading in headings]
    for row in [headings, *cells]:
        padded = [by(cell, width) for by, cell, width in zip(pad, row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    click.echo("\n".join(lines))
    return len(lines)


def lines(texts: Iterable[str]) -> list[str]:
    """Lines as they are printed: those that a terminal would break have short digests, and are wrapped at words."""
    if not sys.stdout.isatty():
        return [*texts]
    width = shutil.get_terminal_size().columns
    fitted: list[str] = []
    for text in texts:
        short = text if len(text) <= width else _short(text)
        column = _VALUE.match(short)
        indent = " " * min(column.end() if column else 2, width // 2)
        wrapped = textwrap.wrap(
            short, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) if len(short) > width else [short]  # fmt: skip
        fitted += wrapped
    return fitted


def check_folder(option: str, path: Path) -> None:
    """UsageError if the folder of the file `path`, which `option` names, is missing: before anything takes long."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")


def save(option: str, path: Path, data: bytes) -> None:
    """Write the file `path`, which `option` names, in one step."""
    from fusekit.store.publishing import replace_file

    try:
        replace_file(path, methodcaller("write", data))
    except StoreError as error:
        raise UsageError(f"{option}: {error}") from error


def driver(version: int | None) -> str | None:
    """13000 -> "13.0"."""
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def tree(document: Mapping[str, Any], indent: str = "") -> None:
    """Print nested JSON values as indented `name  value` lines; a list of plain values stays on one line."""
    for line in lines(tree_lines(document, indent)):
        click.echo(line)


def tree_lines(document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The lines of `tree`."""
    width = max((len(name) for name, value in document.items() if _flat(value)), default=0)
    for name, value in document.items():
        if _flat(value):
            yield f"{indent}{inline(name).ljust(width)}  {plain(value)}".rstrip()
        elif isinstance(value, Mapping):
            yield f"{indent}{inline(name)}"
            yield from tree_lines(value, indent + "  ")
        else:
            yield f"{indent}{inline(name)}"
            yield from (f"{indent}  - {_item(item)}" for item in value)


def dry_document(dry_run: bool, steps: Iterable[Step]) -> dict[str, Any]:
    """The members that --dry-run adds to the JSON document: names that would be copied, or whose entries would be."""
    return {"dry_run": True, "would": list(steps)} if dry_run else {}


def dry_rows(session: Session, dry_run: bool, steps: Sequence[Step]) -> None:
    """The same as a table."""
    if dry_run and steps:
        rows = [(step.name, step.arch, size(step.bytes), step.key[:12]) for step in steps]
        table(session, ("NAME", "ARCH", "BYTES", "KEY"), rows, right=("BYTES",))


def note_left_out(session: Session, problems: Iterable[str]) -> None:
    """Notes why kernels are left out."""
    distinct = [*dict.fromkeys(problems)]
    for problem in distinct[:SHOWN]:
        session.note(f"left out: {problem}")
    if len(distinct) > SHOWN:
        session.note(f"left out: {len(distinct) - SHOWN} more; `fusekit verify` lists them")


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


def duration(seconds: float) -> str:
    """`seconds` in the unit that people read: 40 s, 12 min, 1.5 h."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def plural(count: int, noun: str) -> str:
    """`1 entry`, `2 entries`."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun}"


def _widths(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in [headings, *cells]) for i in range(len(headings))]


def _needed(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Columns of a terminal that a drawn table takes."""
    return sum(_widths(headings, cells)) + 3 * len(headings) + 1


def _fits(headings: Sequence[str], cells: list[list[str]], width: int, prose: Sequence[str]) -> bool:
    """Whether a table fits into `width` columns, once the text of the columns `prose` is wrapped."""
    if _needed(headings, cells) <= width:
        return True
    wrapped = [heading for heading in headings if heading in prose]
    for heading in wrapped:
        headings, cells = _without(headings, cells, heading)
    return _needed(headings, cells) + (3 + _PROSE) * len(wrapped) <= width


def _short(text: str) -> str:
    """`text` with the first digits of its digests."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)


def _without(headings: Sequence[str], cells: list[list[str]], heading: str) -> tuple[list[str], list[list[str]]]:
    kept = [at for at, name in enumerate(headings) if name != heading]
    return [headings[at] for at in kept], [[row[at] for at in kept] for row in cells]


def _common(names: Sequence[str]) -> str:
    """What several names all begin with, to the end of a file's or a layer's name."""
    first, last = min(names), max(names)
    alike = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first[: max(first.rfind("/", 0, alike), first.rfind(".", 0, alike)) + 1]


def _drawn(
    session: Session, headings: Sequence[str], cells: list[list[str]], right: Sequence[str], spare: Sequence[str],
    prose: Sequence[str],
) -> int:  # fmt: skip
    """Lines of the table that was drawn; 0 if it cannot be."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a launch-only installation may lack it
        return 0
    console = Console(no_color=not session.config.color, markup=False, highlight=False, emoji=False)
    dropped: list[str] = []
    if _needed(headings, cells) > console.width:
        cells = [[_short(cell) for cell in row] for row in cells]
    for heading in spare:
        if _needed(headings, cells) <= console.width:
            break
        headings, cells = _without(headings, cells, heading)
        dropped.append(heading)
    begin = ""
    if not _fits(headings, cells, console.width, prose):
        begin = _common([row[0] for row in cells])
        cells = [[row[0].removeprefix(begin), *row[1:]] for row in cells]
    fits = _fits(headings, cells, console.width, prose)
    if not fits and not set(headings) & set(prose):
        return 0  # a name that is folded cannot be copied
    if begin:
        click.echo(f"{headings[0]} begins with {begin}")
    if not fits:
        return _stacked(headings, cells, console.width, prose)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        justify: Any = "right" if heading in right else "left"
        drawn.add_column(heading, justify=justify, no_wrap=heading not in prose)
    for row in cells:
        drawn.add_row(*row)
    with console.capture() as captured:
        console.print(drawn)
    # The escape sequences are those of rich; the cells have none left.
    getattr(sys.stdout, "write_drawn", sys.stdout.write)(captured.get())
    if dropped:
        note = f"not shown in {console.width} columns: {', '.join(dropped)}; --json has all"
        session.note("\n".join(textwrap.wrap(note, console.width)))
    return captured.get().count("\n")


def _stacked(headings: Sequence[str], cells: Sequence[Sequence[str]], width: int, prose: Sequence[str]) -> int:
    """Print each row as the cells that are no prose, and below them those that are; returns the number of lines."""
    stacked = [f"{', '.join(heading for heading in headings if heading not in prose)}; below: {', '.join(prose)}"]
    for row in cells:
        stacked.append("  ".join(cell for heading, cell in zip(headings, row, strict=True) if heading not in prose))
        for text in (cell for heading, cell in zip(headings, row, strict=True) if heading in prose):
            stacked += textwrap.wrap(
                text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    click.echo("\n".join(stacked))
    return len(stacked)


def _flat(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value
    return not isinstance(value, (list, tuple)) or not any(isinstance(item, Mapping) for item in value)


def _item(value: Any) -> str:
    # The name of an item comes first.
    if isinstance(value, Mapping) and "name" in value and len(value) > 1:
        rest = {label: member for label, member in value.items() if label != "name"}
        return f"{plain(value['name'])}: {plain(rest)}"
    return plain(value)


def plain(value: Any) -> str:
    """`value` on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items()) or "none"
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

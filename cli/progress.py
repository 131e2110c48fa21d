"""Progress on stderr: a bar with the remaining time on a terminal; otherwise a line for each long step.

With --verbose a line for every step; with --quiet nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fusekit_cli.options import Session
from fusekit_cli.terminal import inline

if TYPE_CHECKING:
    from fusekit.share.push_pull import Progress

Update = Callable[[int, int, str, int], None]
"""Called with: steps done, all steps, the last one (empty: none yet), bytes copied so far."""


def progress_of(update: Update) -> Callable[[Progress], None]:
    """`update` as the callback of `push` and `pull`."""
    return lambda step: update(step.done, step.total, step.what, step.bytes)


@contextlib.contextmanager
def progress(session: Session, doing: str, *, moves_bytes: bool = False) -> Iterator[Update]:
    """Show the progress of `doing`; the bar disappears at the end. moves_bytes: many short steps, shown with bytes and
    their rate.
    """
    bar = _bar(session, moves_bytes) if sys.stderr.isatty() and not session.quiet else None

    def note(done: int, total: int, what: str, moved: int) -> None:
        if what and (session.verbose or (bar is None and not moves_bytes)):
            session.note(f"{done}/{total} {what}")

    if bar is None:
        yield note
        return
    with bar:
        task = bar.add_task(doing, total=None, moved="")

        def update(done: int, total: int, what: str, moved: int) -> None:
            note(done, total, what, moved)
            elapsed = bar.tasks[task].elapsed or 0.0
            rate = f"{moved / 1e6:.1f} MB, {moved / 1e6 / elapsed:.1f} MB/s" if moved and elapsed else ""
            bar.update(task, completed=done, total=total, description=inline(what or doing), moved=rate)

        yield update


def _bar(session: Session, moves_bytes: bool) -> Any:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:  # no bar without rich
        return None
    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left")]
    if moves_bytes:
        columns.append(TextColumn("{task.fields[moved]}"))
    columns.append(TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True, no_color=not session.config.color), transient=True)

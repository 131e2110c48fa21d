"""Progress on stderr: a bar on a terminal, with the time that is left; elsewhere a line for each step that takes long.
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
"""Called with: steps done, steps in all, what came last (empty: nothing yet), bytes moved so far."""


def progress_of(update: Update) -> Callable[[Progress], None]:
    """`update` as `push` and `pull` call it."""
    return lambda step: update(step.done, step.total, step.what, step.bytes)


@contextlib.contextmanager
def progress(session: Session, doing: str, *, moves_bytes: bool = False) -> Iterator[Update]:
    """Shows how far `doing` has come; the bar goes when it is done. moves_bytes: many short steps, shown with the bytes
    and their rate.
    """
    bar = _bar(session, moves_bytes) if sys.stderr.isatty() and not session.quiet else None

    def tell(done: int, total: int, what: str, moved: int) -> None:
        if what and (session.verbose or (bar is None and not moves_bytes)):
            session.note(f"{done}/{total} {what}")

    if bar is None:
        yield tell
        return
    with bar:
        task = bar.add_task(doing, total=None, moved="")

        def update(done: int, total: int, what: str, moved: int) -> None:
            tell(done, total, what, moved)
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
    except ImportError:  # drawn only where it is installed
        return None
    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left")]
    if moves_bytes:
        columns.append(TextColumn("{task.fields[moved]}"))
    columns.append(TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True, no_color=not session.config.color), transient=True)

"""Progress on stderr: a bar with the remaining time on a terminal; otherwise a line for each long step.

With --verbose a line for every step; with --quiet nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fusekit_cli.options import Session
from fusekit_cli.terminal import inline

if TYPE_CHECKING:
    from fusekit.compiler.estimate import Estimate
    from fusekit.share.push_pull import Progress

Update = Callable[[int, int, str, int], None]
"""Called with: steps done, all steps, the last one (empty: none yet), bytes copied so far."""


def progress_of(update: Update) -> Callable[[Progress], None]:
    """`update` as the callback of `push` and `pull`."""
    return lambda step: update(step.done, step.total, step.what, step.bytes)


@contextlib.contextmanager
def progress(
    session: Session, doing: str, *, moves_bytes: bool = False, expected: Estimate | None = None,
    steps: int | None = None,
) -> Iterator[Update]:  # fmt: skip
    """Show the progress of `doing`; the bar disappears at the end. moves_bytes: many short steps, shown with bytes and
    their rate. expected: gives the remaining time before a step is done, and where steps differ. steps: how many there
    are, if that is known; 0 shows no bar.
    """
    left = Remaining(expected) if expected else None
    bar = _bar(session, moves_bytes, left) if sys.stderr.isatty() and steps != 0 and not session.quiet else None

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
            if left and what:
                left.step(what, elapsed)
            rate = f"{moved / 1e6:.1f} MB, {moved / 1e6 / elapsed:.1f} MB/s" if moved and elapsed else ""
            bar.update(task, completed=done, total=total, description=inline(what or doing), moved=rate)

        yield update


class Remaining:
    """The seconds that are left of a build, by what was expected of its steps and what they took."""

    def __init__(self, expected: Estimate) -> None:
        self._waiting = dict(expected.seconds)
        self._whole = self._left = expected.whole
        self._sum = sum(expected.seconds.values())
        self._at = 0.0

    def step(self, name: str, elapsed: float) -> None:
        """The step `name` ended after `elapsed` seconds: what was measured counts the more, the more is done."""
        self._waiting.pop(name, None)
        share = sum(self._waiting.values()) / self._sum
        self._left, self._at = share * (share * self._whole + elapsed), elapsed

    def at(self, elapsed: float) -> float:
        """Seconds that are left after `elapsed` seconds."""
        return max(0.0, self._left - (elapsed - self._at))


def _bar(session: Session, moves_bytes: bool, left: Remaining | None) -> Any:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text
    except ImportError:  # no bar without rich
        return None

    class Expected(ProgressColumn):
        def render(self, task: Any) -> Text:
            assert left is not None
            seconds = round(left.at(task.elapsed or 0.0))
            return Text(str(timedelta(seconds=seconds)), style="progress.remaining")

    remaining = TimeRemainingColumn() if left is None else Expected()
    columns = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), remaining, TextColumn("left")]
    if moves_bytes:
        columns.append(TextColumn("{task.fields[moved]}"))
    columns.append(TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(stderr=True, no_color=not session.config.color), transient=True)

"""A pass of a layer bound to its arguments, and how much memory passes need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError
from fusekit.runtime.handle import Handle
from fusekit.runtime.side import Queue, run
from fusekit.runtime.streams import stream_handle

if TYPE_CHECKING:
    from fusekit.exchange import Window


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a layer needs beside its arguments: kept between the passes, and scratch memory of each pass; of a
    layer over ranks also each window, which layers of the same size share.

    codes: of arguments, those that `Layer.quantise` writes.
    """

    kept: int
    forward: int
    inference: int
    backward: int
    windows: Mapping[str, int] = field(default_factory=dict)
    codes: int = 0

    @property
    def scratch(self) -> int:
        """Of whichever pass needs most: the passes of a stream may share it."""
        return max(self.forward, self.inference, self.backward)


class Pass(Handle):
    """A pass bound to its arguments: `forward(stream)` queues its launches, and may be captured in a CUDA graph.

    It belongs to one thread at a time, and keeps its arguments alive.
    """

    again = "bind the pass of its layer again"

    __slots__ = ("_after", "_arguments", "_turn", "_windows", "_written", "launches")

    def __init__(
        self, launches: Sequence[Queue], arguments: Mapping[str, Any], written: Mapping[str, int],
        windows: Sequence[Window] = (), after: object = None,
    ) -> None:  # fmt: skip
        """written: how many launches it takes until an output is there. windows: that passes share; after: the `_turn`
        of the part that left there what this one reads.
        """
        self.launches = tuple(launches)
        self._arguments, self._written = dict(arguments), dict(written)
        self._windows, self._after, self._turn = tuple(windows), after, object()

    def __call__(self, stream: Any = None) -> None:
        """Queues the launches on `stream`, as a kernel's. Raises ArgumentError where another pass used the windows
        between two parts of this one.
        """
        handle = stream if type(stream) is int else stream_handle(stream)
        self._take_windows()
        run(self.launches, handle)

    def _take_windows(self) -> None:
        if self._after is not None and any(window.user is not self._after for window in self._windows):
            raise ArgumentError(
                "a pass that uses the same windows came between the parts of this one, and other rows may lie there"
                " now; call the parts one after the other, or give the layers windows of their own: other `tokens`"
            )
        for window in self._windows:
            window.user = self._turn

    def split(self, output: str) -> tuple[Pass, Pass]:
        """(the launches until `output` is there, the rest), to be called in this order on one stream or joined ones.

        So `dx, weights = backward.split("dx")`: what waits for dx can start between. All outputs serve as scratch
        memory from the first launch on. Layers over ranks share windows: no other pass on them comes between the parts.
        Raises ArgumentError.
        """
        if output not in self._written:
            raise ArgumentError(
                f"the pass does not write {output}; its outputs are {', '.join(self._written)}", argument=output
            )
        count = self._written[output]
        later = {name: at - count for name, at in self._written.items() if at > count}
        first = {name: at for name, at in self._written.items() if at <= count}
        begin = Pass(self.launches[:count], self._arguments, first, self._windows, self._after)
        return begin, Pass(self.launches[count:], self._arguments, later, self._windows, begin._turn)

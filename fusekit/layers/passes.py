"""A pass of a layer bound to its arguments, and how much memory passes need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusekit.errors import ArgumentError
from fusekit.runtime.side import Queue, run
from fusekit.runtime.streams import stream_handle


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


class Pass:
    """A pass bound to its arguments: `forward(stream)` queues its launches, and may be captured in a CUDA graph.

    It belongs to one thread at a time, and keeps its arguments alive.
    """

    __slots__ = ("_arguments", "_written", "launches")

    def __init__(self, launches: Sequence[Queue], arguments: Mapping[str, Any], written: Mapping[str, int]) -> None:
        """written: how many launches it takes until an output is there."""
        self.launches = tuple(launches)
        self._arguments, self._written = dict(arguments), dict(written)

    def __call__(self, stream: Any = None) -> None:
        """Queues the launches on `stream`, as a kernel's."""
        handle = stream if type(stream) is int else stream_handle(stream)
        run(self.launches, handle)

    def split(self, output: str) -> tuple[Pass, Pass]:
        """(the launches until `output` is there, the rest), to be called in this order on one stream or joined ones.

        So `dx, weights = backward.split("dx")`: what waits for dx can start between. All outputs serve as scratch
        memory from the first launch on. Raises ArgumentError.
        """
        if output not in self._written:
            raise ArgumentError(
                f"the pass does not write {output}; its outputs are {', '.join(self._written)}", argument=output
            )
        count = self._written[output]
        later = {name: at - count for name, at in self._written.items() if at > count}
        first = {name: at for name, at in self._written.items() if at <= count}
        return (
            Pass(self.launches[:count], self._arguments, first), Pass(self.launches[count:], self._arguments, later)
        )  # fmt: skip

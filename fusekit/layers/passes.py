"""A pass of a layer bound to its arguments, and how much memory passes need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError
from fusekit.runtime.handle import Handle
from fusekit.runtime.side import Queue, run
from fusekit.runtime.streams import handle_of

if TYPE_CHECKING:
    from fusekit.exchange import Window
    from fusekit.runtime.launch import Launch
    from fusekit.runtime.tensors import View

_PLACEMENTS_KEPT = 1024  # sets of addresses known to be aligned and apart; those of an allocator come round again


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
        handle = stream if type(stream) is int else handle_of(stream, self._arguments.values())
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


class MovingPass:
    """A pass on arguments of fixed shapes, launched at other addresses each time. It keeps no tensor alive.

    names, views: of the arguments, in the order of their addresses. launches: those of the kernels; parts: for each of
    them its tensors in order, as (the argument in whose memory it lies, bytes from the begin); of a tensor that lies
    elsewhere, (-1, its address). queue: what queues the launches.
    """

    __slots__ = ("_addresses", "_launches", "_parts", "_placed", "_users", "names", "queue", "views")

    def __init__(
        self, names: Sequence[str], views: Sequence[View], addresses: Sequence[int], launches: Sequence[Launch],
        parts: Sequence[Sequence[tuple[int, int]]], queue: list[Queue],
    ) -> None:  # fmt: skip
        self.names, self.views, self.queue = names, views, queue
        self._launches, self._parts, self._addresses = launches, parts, addresses
        self._placed = {tuple(addresses)}
        self._users = [
            [at for at, each in enumerate(parts) if any(base == number for base, _ in each)]
            for number in range(len(addresses))
        ]

    def knows(self, addresses: Sequence[int]) -> bool:
        """Whether its arguments may lie there, as far as it was told before by `trust`."""
        return addresses == self._addresses or tuple(addresses) in self._placed

    def lying(self, addresses: Sequence[int]) -> dict[str, tuple[int, View]]:
        """Its arguments, there."""
        return dict(zip(self.names, zip(addresses, self.views, strict=True), strict=True))

    def trust(self, addresses: Sequence[int]) -> None:
        """Notes that its arguments may lie there."""
        if len(self._placed) >= _PLACEMENTS_KEPT:
            self._placed.clear()
        self._placed.add(tuple(addresses))

    def move(self, addresses: Sequence[int]) -> None:
        """Brings its arguments to these addresses. Raises ArgumentError, and then is of no further use."""
        before = self._addresses
        if addresses == before:
            return
        stale = {
            user
            for users, address, old in zip(self._users, addresses, before, strict=True) if address != old
            for user in users
        }  # fmt: skip
        bases = (*addresses, 0)  # the last one of what lies elsewhere
        for at in stale:
            launch = self._launches[at]
            try:
                launch.place([bases[base] + begin for base, begin in self._parts[at]])
            except ArgumentError as error:
                where = zip(launch.addresses, self._parts[at], strict=True)
                names = {argument: self.names[base] for argument, (base, _) in where if base >= 0}
                raise of_the_pass(error, launch.kernel.name, names) from error
        self._addresses = addresses


def of_the_pass(error: ArgumentError, kernel: str, names: Mapping[str, str]) -> ArgumentError:
    """The error of one of its kernels; names: arguments of the pass, by those of the kernel that lie in them."""
    name = names.get(error.argument or "")
    if name is None:
        return error
    known = "" if name == error.argument else f"{name}, of which {kernel} makes its {error.argument}: "
    return ArgumentError(f"{known}{error}", argument=name)

"""A pass of a layer bound to its arguments, and how much memory passes need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError
from fusekit.runtime.handle import Handle
from fusekit.runtime.side_stream import Chain, Queue, chain
from fusekit.runtime.streams import handle_of

if TYPE_CHECKING:
    from fusekit.exchange import Window
    from fusekit.layers.fitting import Fitted
    from fusekit.runtime.launch import Launch
    from fusekit.runtime.tensors import View

PASSES = FORWARD, INFERENCE, BACKWARD, QUANTISE = "forward", "inference", "backward", "quantise"
_PLACEMENTS_KEPT = 1024  # sets of addresses known to be aligned and apart; those of an allocator come round again


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of memory that a layer needs.

    kept: from the forward to the backward pass. forward, inference, backward: scratch memory of each pass.
    windows: IPC buffers of a layer over ranks by name; layers of the same size share them. fp8_weights: the outputs of
    `Layer.quantise`.
    """

    kept: int
    forward: int
    inference: int
    backward: int
    windows: Mapping[str, int] = field(default_factory=dict)
    fp8_weights: int = 0

    @property
    def scratch(self) -> int:
        """Scratch memory of the pass that needs most. The passes of a stream may share it."""
        return max(self.forward, self.inference, self.backward)


class Pass(Handle):
    """A pass bound to its arguments. Calling it with a stream queues its launches; a CUDA graph may capture the call.

    It belongs to one thread at a time, and keeps its arguments alive.
    """

    again = "bind the pass of its layer again"

    __slots__ = ("_after", "_arguments", "_chain", "_queue", "_turn", "_windows", "_written", "launches")

    def __init__(
        self, launches: Sequence[Queue], arguments: Mapping[str, Any], written: Mapping[str, int],
        windows: Sequence[Window] = (), after: object = None, chain: Chain = chain,
    ) -> None:  # fmt: skip
        """written: the number of launches after which each output is there. windows: those that passes share. after:
        the `_turn` of the part of a split pass that this one follows. chain: makes one queue of the launches.
        """
        self.launches = tuple(launches)
        self._chain, self._queue = chain, chain(self.launches)
        self._arguments, self._written = dict(arguments), dict(written)
        self._windows, self._after, self._turn = tuple(windows), after, object()

    def __call__(self, stream: Any = None) -> None:
        """Queues the launches on `stream`, which is what `Kernel.__call__` takes. Raises ArgumentError if another pass
        used the windows between two parts of a split pass.
        """
        handle = stream if type(stream) is int else handle_of(stream, self._arguments.values())
        if self._windows:
            self._take_windows()
        self._queue(handle)

    def _take_windows(self) -> None:
        if self._after is not None and any(window.user is not self._after for window in self._windows):
            raise ArgumentError(
                "a pass that uses the same windows came between the parts of this one, and other rows may lie there"
                " now; call the parts one after the other, or give the layers windows of their own: other `tokens`"
            )
        for window in self._windows:
            window.user = self._turn

    def split(self, output: str) -> tuple[Pass, Pass]:
        """Splits the pass in two, to be called in this order on one stream or on joined streams.

        So communication that needs only dx can start early: `dx, weights = backward.split("dx")`. All outputs may serve
        as scratch memory from the first launch on. Layers over ranks share windows: call no other pass on them between
        the parts.

        Parameters
        ----------
        output : str
            The output that is there after the first part.

        Returns
        -------
        tuple[Pass, Pass]

        Raises
        ------
        ArgumentError
            If the pass does not write `output`.
        """
        if output not in self._written:
            raise ArgumentError(
                f"the pass does not write {output}; its outputs are {', '.join(self._written)}", argument=output
            )
        count = self._written[output]
        later = {name: at - count for name, at in self._written.items() if at > count}
        first = {name: at for name, at in self._written.items() if at <= count}
        begin = Pass(self.launches[:count], self._arguments, first, self._windows, self._after, self._chain)
        return begin, Pass(self.launches[count:], self._arguments, later, self._windows, begin._turn, self._chain)


class MovingPass:
    """A pass on arguments of fixed shapes, launched at other addresses each time. It keeps no tensor alive.

    names, views: of the arguments, in the order of their addresses. launches: of the kernels. parts: for each launch
    its tensors in order, as (number of the argument in whose memory it lies, bytes from its begin), or (-1, address).
    queue: queues the launches, with those that use the side stream.
    """

    __slots__ = ("_addresses", "_parts", "_placed", "_users", "fitted", "launches", "names", "queue", "views")

    def __init__(
        self, names: Sequence[str], views: Sequence[View], addresses: Sequence[int], launches: Sequence[Launch],
        parts: Sequence[Sequence[tuple[int, int]]], queue: Queue,
    ) -> None:  # fmt: skip
        self.names, self.views, self.queue = names, views, queue
        self.launches, self._parts, self._addresses = launches, parts, addresses
        self._placed = {tuple(addresses)}
        self.fitted: Fitted | None = None  # writes its launches, once it was fitted to other tokens or addresses
        self._users = [
            [at for at, tensors in enumerate(parts) if any(base == number for base, _ in tensors)]
            for number in range(len(addresses))
        ]

    def knows(self, addresses: Sequence[int]) -> bool:
        """Whether these addresses are known to be valid."""
        return addresses == self._addresses or tuple(addresses) in self._placed

    def lying(self, addresses: Sequence[int]) -> dict[str, tuple[int, View]]:
        """Its arguments at these addresses: (address, view) by name."""
        return dict(zip(self.names, zip(addresses, self.views, strict=True), strict=True))

    def trust(self, addresses: Sequence[int]) -> None:
        """Notes that these addresses are valid."""
        if len(self._placed) >= _PLACEMENTS_KEPT:
            self._placed.clear()
        self._placed.add(tuple(addresses))

    def move(self, addresses: Sequence[int]) -> None:
        """Moves the arguments to these addresses. After an ArgumentError the pass must not be used again."""
        before = self._addresses
        if addresses == before:
            return
        stale = {
            user
            for users, address, old in zip(self._users, addresses, before, strict=True) if address != old
            for user in users
        }  # fmt: skip
        bases = (*addresses, 0)  # base -1: an absolute address
        for at in stale:
            launch = self.launches[at]
            try:
                launch.place([bases[base] + begin for base, begin in self._parts[at]])
            except ArgumentError as error:
                where = zip(launch.addresses, self._parts[at], strict=True)
                names = {argument: self.names[base] for argument, (base, _) in where if base >= 0}
                raise of_the_pass(error, launch.kernel.name, names) from error
        self._addresses = addresses


def of_the_pass(error: ArgumentError, kernel: str, names: Mapping[str, str]) -> ArgumentError:
    """A kernel's error, about the pass. names: arguments of the pass by the kernel's arguments that lie in them."""
    name = names.get(error.argument or "")
    if name is None:
        return error
    known = "" if name == error.argument else f"{name}, of which {kernel} makes its {error.argument}: "
    return ArgumentError(f"{known}{error}", argument=name)

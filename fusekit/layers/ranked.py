"""A layer whose experts are spread over ranks (expert parallelism), on one rank."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusekit.abi.expr import evaluate
from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import ArgumentError, CapacityError
from fusekit.exchange import Part, Ranks, Window
from fusekit.exchange.windows import read
from fusekit.layers.layer import Layer
from fusekit.layers.passes import BACKWARD, INFERENCE, Sizes
from fusekit.runtime.side_stream import Chain, Queue, SideStream

if TYPE_CHECKING:
    from fusekit.library import Library
    from fusekit.runtime import Devices

CHECKED = "checked"  # the place of what `check` reads
_SECONDS = 1.0  # between two looks at what went wrong


class RankedLayer(Layer):
    """The layer on one rank, with the rank's tokens and the parameters of the rank's experts.

    All ranks give the same `tokens`, and launch the same passes with the same outputs in the same order.

    Parameters
    ----------
    ranks : Ranks, optional
        This rank. It allocates the windows (IPC buffers, mapped by all ranks). Without it, nothing can be launched,
        but `sizes` works.
    tokens : int, optional
        The most tokens of any rank in a pass. Default: the spec's.
    rows : int, optional
        The most rows that a rank's experts have room for. Default: enough for any routing.

    Raises
    ------
    ArgumentError
        Also if `ranks` opened another build of the layer before.
    """

    _shares = False  # plans are of its own limits
    _compiles = False

    def __init__(
        self, library: Library, record: LayerRecord, device: int | None = None, *, ranks: Ranks | None = None,
        tokens: int | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        if ranks is not None:
            rule = "one rank, of those that fusekit.exchange.Ranks.in_process or Ranks.of_process makes"
            ArgumentError.unless(Ranks, "ranks", ranks, rule)
        super().__init__(library, record, ranks.device if ranks is not None else device)
        name, options = self.name, self.options
        if ranks is not None and ranks.count != options.ranks:
            raise ArgumentError(
                f"{name} is over {options.ranks} ranks, and there are {ranks.count}; start as many, or build the layer"
                f" with ranks = {ranks.count}",
                argument="ranks",
            )
        tokens, rows = (
            None if value is None else ArgumentError.integer(key, value, "a whole number, 1 or more", 1)
            for key, value in (("tokens", tokens), ("rows", rows))
        )
        self.ranks = ranks
        self.capacity = evaluate(record.limits["capacity"], {"tokens": tokens or options.tokens})
        any_routing = self._limit("rows", self.capacity)
        if any_routing >= 2**31:
            raise ArgumentError(
                f"tokens = {tokens or options.tokens}: {any_routing} rows may come to a rank's experts, which have room"
                " for 2**31 - 1 at most; give fewer tokens",
                argument="tokens",
            )
        if rows is not None and rows > any_routing:
            raise ArgumentError(
                f"rows = {rows}; at most {any_routing} rows come to a rank's experts, with any routing; give that or"
                " fewer, or leave rows out",
                argument="rows",
            )
        self.rows = any_routing if rows is None else rows
        self._windows: dict[str, Window] = {}
        into = {which: {step.window for step in each.steps} for which, each in record.passes.items()}
        self._used = {which: tuple(name for name in record.windows if name in used) for which, used in into.items()}
        self._parts: dict[str, Any] = {}  # buffers in windows by name
        self._looked = 0.0
        self._overflows = self._warned = 0  # passes with too few rows that `check` or a warning reported
        if ranks is not None:
            ranks.opens(name, self._digest())

    def over(self, ranks: Ranks) -> RankedLayer:
        """The same layer on this rank."""
        return RankedLayer(
            self._library, self.record, self._device, ranks=ranks, tokens=self.capacity, rows=self.rows
        )  # fmt: skip

    @property
    def devices(self) -> Devices:
        """The devices of the library."""
        return self._library.devices

    @property
    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity, id(self.ranks), self.capacity, self.rows)

    def _digest(self) -> str:
        """Digest of what all ranks must share: the table, without the tokens that variants were chosen for, and the
        kernels that ranks launch together.
        """
        together = {step.part for each in self.record.passes.values() for step in each.steps if step.window}
        kernels = [(part, self.record.kernel(part, self.capacity)) for part in sorted(together)]
        table = self.options.canonical() | {"tokens": 0}
        return hashlib.sha256(json.dumps([table, kernels], sort_keys=True).encode()).hexdigest()

    def _limit(self, name: str, capacity: int) -> int:
        return int(evaluate(self.record.limits[name], {"capacity": capacity}))

    def _limits(self) -> dict[str, int]:
        return {"capacity": self.capacity, "rows": self.rows}

    def dims(self, tokens: int) -> dict[str, int]:
        """The dims of shapes for so many tokens of this rank."""
        return self.record.environment(tokens, **self._limits())

    def sizes(
        self, tokens: int | None = None, gradients: Collection[str] | None = None, *, in_place: bool = False
    ) -> Sizes:
        """The bytes of memory that passes need; see `Layer.sizes`.

        tokens: of this rank in a pass, by default the most. The windows "grads" and "returned" are allocated by the
        first backward pass. Kept and scratch memory hold `rows` for any number of tokens.
        """
        sizes = super().sizes(self.capacity if tokens is None else tokens, gradients, in_place=in_place)
        self._have_room(tokens or 0, "tokens")
        dims = self.dims(0)
        return replace(sizes, windows={name: evaluate(size, dims) for name, size in self.record.windows.items()})

    def connect(self, *, training: bool = True) -> None:
        """Allocates the windows now, on all ranks, as the first launch would. training: those of backward, too."""
        for window in self.record.windows if training else self._used[INFERENCE]:
            self._window(window)

    def check(self) -> None:
        """Raises for errors of passes that have run. Call it after a pass, on every rank. It waits for no launch.

        `forward` and `backward` check once a second, and warn of a CapacityError.

        Raises
        ------
        CapacityError
            Once, on every rank, if the experts of any rank had more rows than `rows` in a forward pass of this layer
            since the last call. The next pass is valid.
        PeerTimeoutError
            If a launch of this rank stopped waiting for another rank.
        """
        if self.ranks is None or not self._windows:
            return
        count, error = self._overflow()
        self._overflows = self._warned = count
        if error is not None:
            raise error
        self.ranks.check()

    def _overflow(self) -> tuple[int, CapacityError | None]:
        """(passes in which a rank had too few rows, the error for those that `check` has not reported)."""
        for name in self._windows:
            self._window(name)  # raises for one that was closed
        if "overflow" not in self._parts:
            return 0, None
        where = self.devices, self.devices.get(self._ranks.device), self._parts["overflow"].address, 4
        if read(*where)[0] == self._overflows:
            return self._overflows, None
        count, rank, wanted, most = read(*where)  # again: the first word is written last
        passes = "a pass" if count - self._overflows == 1 else f"{count - self._overflows} passes, in the last of which"
        return count, CapacityError(
            f"{self.name}: in {passes} the experts of rank {rank} were chosen for {wanted} rows and have room for"
            f" {self.rows}; the choices beyond were left out; open the layer on every rank with rows = {most} or more,"
            " or leave rows out",
            rows=most,
        )

    def _look(self) -> None:
        """`check` for a caller that does not call it. It only warns of an overflow: ranks look after different passes,
        and a rank that raised would leave the others waiting.
        """
        count, error = self._overflow()
        if error is not None and count != self._warned:
            self._warned = count
            warnings.warn(f"{error}; layer.check() raises this", RuntimeWarning, stacklevel=4)
        self._ranks.check()

    # -- launches -----------------------------------------------------------------------------------------------------

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False, sm_count: int | None = None,
    ) -> None:  # fmt: skip
        if self.ranks is not None and time.monotonic() - self._looked > _SECONDS:
            self._look()
            self._looked = time.monotonic()
        if not all(window.peers for window in self._shared(which)):
            self._moving.clear()  # they launch on windows that were closed; binding again raises
        super()._call(which, kept, scratch, arguments, stream, cluster_margin, in_place, sm_count)
        for window in self._shared(which):
            window.user = None

    def _chain(self, which: str) -> Chain:
        chain = super()._chain(which)

        def checked(launches: Sequence[Queue]) -> Queue:
            queue = chain(launches)

            def run(stream: int) -> None:
                if part := self.devices.part_of(stream):
                    raise ArgumentError(
                        f"{self.name}: the stream {stream:#x} is of a green context of {part} multiprocessors; a layer"
                        " over ranks needs the whole device, for some of its launches wait for others; give a stream of"
                        " the whole device, and reserve SMs with cluster_margin",
                        argument="stream",
                    )
                queue(stream)

            return run

        return checked

    def _shared(self, which: str) -> Sequence[Window]:
        return [self._windows[name] for name in self._used[which] if name in self._windows]

    def _check(self, which: str, given: Mapping[str, Any]) -> tuple[int, int, dict[str, int]]:
        tokens, device, compact = super()._check(which, given)
        if device != self._ranks.device:
            raise ArgumentError(f"{self.name}: tensors on device {device}; the rank's is {self._ranks.device}")
        self._have_room(tokens, "dy" if which == BACKWARD else "x")
        return tokens, device, compact

    def _have_room(self, tokens: int, argument: str) -> None:
        if tokens > self.capacity:
            raise ArgumentError(
                f"{self.name}: {tokens} tokens; the windows have room for {self.capacity}; open the layer on every rank"
                f" with tokens = {tokens} or more",
                argument=argument,
            )

    @property
    def _ranks(self) -> Ranks:
        if self.ranks is None:
            raise ArgumentError(
                f"{self.name} is over {self.options.ranks} ranks; open it with library.layer(name, ranks=...), of"
                " fusekit.exchange.Ranks",
                argument="ranks",
            )
        return self.ranks

    def _chosen_for(self, tokens: int) -> int:
        # Experts of a rank without tokens may have many rows, so the most tokens of a rank decide.
        return self.capacity

    def _window(self, name: str) -> Window:
        if name not in self._windows:
            self._refuse_crowd()
            dims = self.dims(0)
            size = evaluate(self.record.windows[name], dims)
            window = self._windows[name] = self._ranks.window((name, self.capacity, size), size, self.name)
            for part, buffer in self.record.buffers.items():
                if buffer.place == name:
                    address = window.address + evaluate(buffer.offset, dims)
                    self._parts[part] = Part(address, buffer.extents(dims), buffer.dtype, self._ranks.device)
        if not self._windows[name].peers:
            raise ArgumentError(
                f"{self.name}: the windows of {self.ranks} were closed; open the layer again, with new ranks",
                argument="ranks",
            )
        return self._windows[name]

    def _refuse_crowd(self) -> None:
        """Raises ArgumentError if ranks share a device, and one may find no room there while all others wait for it."""
        others, device = self._ranks.sharing - 1, self.devices.get(self._ranks.device)
        grain = evaluate(self.record.limits["capacity"], {"tokens": 1})

        def blocks(tokens: int) -> int:
            return others * self._limit("waiting", tokens)

        overlap = self.options.overlap
        if not others or (blocks(self.capacity) < device.sm_count and not overlap):
            return
        fits = (tokens for tokens in range(self.capacity, 0, -grain) if blocks(tokens) < device.sm_count)
        fewer = 0 if overlap else next(fits, 0)
        raise ArgumentError(
            f"{self.name}: {others + 1} ranks share {device}; "
            + ("products" if overlap else f"{blocks(self.capacity)} blocks of a launch")
            + f" may wait there for the last rank, and take all of its {device.sm_count} multiprocessors; give each"
            " rank a device of its own"
            + (f", or open the layer on every rank with tokens = {fewer} or fewer" if fewer else ""),
            argument="ranks",
        )

    def _in_window(self, name: str) -> Any:
        buffer = self.record.buffers[name]
        if buffer.place != CHECKED:
            self._window(buffer.place)
        elif name not in self._parts:
            address = self._ranks.checked(self.devices)
            self._parts[name] = Part(address, buffer.extents({}), buffer.dtype, self._ranks.device)
        return self._parts[name]

    def _side_stream(self) -> SideStream:
        return self._ranks.side_stream(self.devices)

    def _together(self, window: str) -> dict[str, Any]:
        if not window:
            return {}
        common = {"rank": self._ranks.rank, "capacity": self.capacity, "timeout": self._ranks.timeout}
        return {"window": self._window(window).peers, **common}

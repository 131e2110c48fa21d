"""A layer whose experts are spread over ranks, as one rank has it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, CapacityError
from fusekit.exchange import Layout, Part, Ranks, Window
from fusekit.layers.layer import Layer
from fusekit.layers.passes import Sizes
from fusekit.plan.exchange import MOST
from fusekit.plan.layer import Buffer, Options
from fusekit.plan.layer.program import BACKWARD, INFERENCE
from fusekit.plan.layer.ranks import arrives, room, stores, window_sizes
from fusekit.runtime.side import Side

if TYPE_CHECKING:
    from fusekit.library import Library
    from fusekit.runtime import Devices, Kernel
    from fusekit.store import NameRecord

_SECONDS = 1.0  # between two looks at what went wrong


class RankedLayer(Layer):
    """The layer of one rank: its own tokens go in and out, and it has the parameters of its own experts.

    ranks: this rank, and where windows come from; None: sizes can be asked for, nothing launched. tokens: the most of
    any rank; default: the spec's. rows: the most that a rank's experts have room for; default: enough for any routing.
    All ranks say the same tokens. They launch the same passes, asking for the same outputs, in the same order. Raises
    ArgumentError for a build of the layer that `ranks` did not open first.
    """

    def __init__(
        self, library: Library, name: str, options: Options, arch: str | None = None, device: int | None = None, *,
        ranks: Ranks | None = None, tokens: int | None = None, rows: int | None = None,
        records: Iterable[NameRecord] | None = None,
    ) -> None:  # fmt: skip
        if ranks is not None:
            rule = "one rank, of those that fusekit.exchange.Ranks.in_process or Ranks.of_process makes"
            ArgumentError.unless(Ranks, "ranks", ranks, rule)
        super().__init__(library, name, arch, ranks.device if ranks is not None else device, options, records)
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
        self._layouts = {
            window: Layout(self.program.parts[part], tokens or options.tokens, options.hidden)
            for window, part in stores(self.program).items()
        }
        self._first = arrives(options)  # whose header has the count of rows
        self.capacity = self._layouts[self._first].capacity
        self.program = self.program.within(room(options, self.capacity, rows))
        self.rows = self.program.room["M"]
        self._windows: dict[str, Window] = {}
        self._used = {which: tuple(stores(self.program, which)) for which in self.program.steps}  # windows of a pass
        self._parts: dict[str, Any] = {}  # of the windows, by the names of buffers
        self._looked = 0.0
        if ranks is not None:
            ranks.opens(name, self._digest())

    def over(self, ranks: Ranks) -> RankedLayer:
        """The same as the layer of a rank."""
        return RankedLayer(
            self._library, self.name, self.options, self._arch, self._device, ranks=ranks, tokens=self.capacity,
            rows=self.rows, records=self._records.values(),
        )  # fmt: skip

    @property
    def devices(self) -> Devices:
        """Those of its library."""
        return self._library.devices

    @property
    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity, id(self.ranks), self.capacity, self.rows)

    def _digest(self) -> str:
        """Of what all ranks have in common: the table, but for the tokens that variants were chosen for, and the
        kernels that ranks launch together.
        """
        together = {f"{self.name}.{part}" for part, keys in self.program.parts.items() if "ranks" in keys}
        own = self._arch or self.devices.get(self._ranks.device).arch
        kernels = [
            (name, record.key)
            for (name, arch), record in sorted(self._records.items())
            if name.partition("@")[0] in together and arch == own
        ]
        table = replace(self.options, tokens=0).canonical()
        return hashlib.sha256(json.dumps([table, kernels], sort_keys=True).encode()).hexdigest()

    def sizes(
        self, tokens: int | None = None, gradients: Collection[str] | None = None, *, in_place: bool = False
    ) -> Sizes:
        """As a layer's; tokens: of this rank in a pass, default: the most. `windows` by name; those of "grads" and
        "returned" are made by the first backward pass. Kept and scratch memory hold `rows` for any number of tokens.
        """
        found = super().sizes(self.capacity if tokens is None else tokens, gradients, in_place=in_place)
        self._have_room(tokens or 0, "tokens")
        windows = window_sizes(self.program, self.options)
        return replace(found, windows=windows)

    def connect(self, *, training: bool = True) -> None:
        """Makes the windows now, all ranks together; the first launch would. training: those of backward, too."""
        for window in stores(self.program, "" if training else INFERENCE):
            self._window(window)

    def check(self) -> None:
        """Raises PeerTimeoutError if a launch of this rank gave up waiting for another, CapacityError if its experts
        had more rows than `rows`. Waits for no launch. `forward` and `backward` do this once a second.
        """
        if self.ranks is None or self._first not in self._windows:
            return
        self.ranks.check()
        wanted = self._window(self._first).words()[MOST // 4]
        if wanted > self.rows:
            raise CapacityError(
                f"{self.name}: the experts of rank {self.ranks.rank} were chosen for {wanted} rows and have room for"
                f" {self.rows}; the choices beyond were left out; give rows = {wanted} or more, or leave rows out",
                rows=wanted,
            )

    # -- launches -----------------------------------------------------------------------------------------------------

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False,
    ) -> None:  # fmt: skip
        if time.monotonic() - self._looked > _SECONDS:
            self.check()
            self._looked = time.monotonic()
        super()._call(which, kept, scratch, arguments, stream, cluster_margin, in_place)
        for window in self._shared(which):
            window.user = None

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

    def _kernel(self, part: str, dims: Mapping[str, int]) -> Kernel:
        # Of a rank without tokens the experts may have many rows: what is chosen is for the most tokens of each rank.
        return super()._kernel(part, {"T": self.capacity, "M": self.capacity * self.options.topk})

    def _window(self, name: str) -> Window:
        if name not in self._windows:
            layout = self._layouts[name]
            # Rows are counted in a window, so layers share it that have room for as many.
            key = (name, layout.capacity, layout.bytes, *((self.rows,) if name == self._first else ()))
            window = self._windows[name] = self._ranks.window(key, layout.bytes, self.name)
            parts = layout.parts(window.address, self._ranks.device)
            parts["most"] = Part(window.address + MOST, (1,), "i32", self._ranks.device)
            parts["arrivals"] = Part(window.address, (self.program.room["F"],), "i32", self._ranks.device)
            self._parts |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        if not self._windows[name].peers:
            raise ArgumentError(
                f"{self.name}: the windows of {self.ranks} were closed; open the layer again, with new ranks",
                argument="ranks",
            )
        return self._windows[name]

    def _in_window(self, buffer: Buffer) -> Any:
        self._window(buffer.place)
        return self._parts[buffer.name]

    def _side(self) -> Side:
        return self._ranks.side(self.devices)

    def _together(self, window: str) -> dict[str, Any]:
        if not window:
            return {}
        common = {"rank": self._ranks.rank, "capacity": self.capacity, "timeout": self._ranks.timeout}
        return {"window": self._window(window).peers, **common}

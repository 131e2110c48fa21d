"""A layer whose experts are spread over ranks, as one rank has it."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, CapacityError
from fusekit.exchange import Layout, Part, Ranks, Window
from fusekit.exchange.windows import read
from fusekit.layers.layer import Layer
from fusekit.layers.passes import Sizes
from fusekit.plan.exchange import GRAIN, waiting
from fusekit.plan.layer import Buffer, Options
from fusekit.plan.layer.program import BACKWARD, CHECKED, INFERENCE
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
        self.capacity = self._layouts[arrives(options)].capacity
        any_routing = room(options, self.capacity)["M"]
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
        self.program = self.program.within(room(options, self.capacity, rows))
        self.rows = self.program.room["M"]
        self._windows: dict[str, Window] = {}
        self._used = {which: tuple(stores(self.program, which)) for which in self.program.steps}  # windows of a pass
        self._parts: dict[str, Any] = {}  # of the windows, by the names of buffers
        self._looked = 0.0
        self._overflows = self._warned = 0  # passes with too few rows, of which `check` told, or a warning
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
        """What went wrong in passes that have run: call it after a pass, on every rank. Waits for no launch.

        Raises CapacityError, once, if the experts of any rank had more rows than `rows` in a forward pass of this layer
        since the last call; every rank raises it, and the next pass is good. Raises PeerTimeoutError if a launch of
        this rank gave up waiting for another. `forward` and `backward` look once a second, and warn of the first.
        """
        if self.ranks is None or not self._windows:
            return
        count, error = self._overflow()
        self._overflows = self._warned = count
        if error is not None:
            raise error
        self.ranks.check()

    def _overflow(self) -> tuple[int, CapacityError | None]:
        """(passes in which a rank had too few rows, what to raise for those that `check` has not told of)."""
        for name in self._windows:
            self._window(name)  # which refuses one that was closed
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
        """`check`, for a caller that does not ask: ranks look at different passes, so none leaves its turn out for what
        the next pass does not have.
        """
        count, error = self._overflow()
        if error is not None and count != self._warned:
            self._warned = count
            warnings.warn(f"{error}; layer.check() raises this", RuntimeWarning, stacklevel=4)
        self._ranks.check()

    # -- launches -----------------------------------------------------------------------------------------------------

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False,
    ) -> None:  # fmt: skip
        if self.ranks is not None and time.monotonic() - self._looked > _SECONDS:
            self._look()
            self._looked = time.monotonic()
        if not all(window.peers for window in self._shared(which)):
            self._moving.clear()  # they launch on windows that were closed; what binds anew says so
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

    def _chosen_for(self, tokens: int) -> int:
        return self.capacity

    def _window(self, name: str) -> Window:
        if name not in self._windows:
            self._refuse_crowd()
            layout = self._layouts[name]
            key = (name, layout.capacity, layout.bytes)
            window = self._windows[name] = self._ranks.window(key, layout.bytes, self.name)
            parts = layout.parts(window.address, self._ranks.device)
            parts["arrivals"] = Part(window.address, (self.program.room["F"],), "i32", self._ranks.device)
            self._parts |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        if not self._windows[name].peers:
            raise ArgumentError(
                f"{self.name}: the windows of {self.ranks} were closed; open the layer again, with new ranks",
                argument="ranks",
            )
        return self._windows[name]

    def _refuse_crowd(self) -> None:
        """Raises ArgumentError where ranks share a device, and one may have no room while all others wait for it."""
        others, device = self._ranks.sharing - 1, self.devices.get(self._ranks.device)
        together = [keys for keys in self.program.parts.values() if "ranks" in keys]

        def blocks(tokens: int) -> int:
            return others * max(waiting(keys, tokens) for keys in together)

        overlap = self.options.overlap
        if not others or (blocks(self.capacity) < device.sm_count and not overlap):
            return
        fits = (tokens for tokens in range(self.capacity, 0, -GRAIN) if blocks(tokens) < device.sm_count)
        fewer = 0 if overlap else next(fits, 0)
        raise ArgumentError(
            f"{self.name}: {others + 1} ranks share {device}; "
            + ("products" if overlap else f"{blocks(self.capacity)} blocks of a launch")
            + f" may wait there for the last rank, and take all of its {device.sm_count} multiprocessors; give each"
            " rank a device of its own"
            + (f", or open the layer on every rank with tokens = {fewer} or fewer" if fewer else ""),
            argument="ranks",
        )

    def _in_window(self, buffer: Buffer) -> Any:
        if buffer.place != CHECKED:
            self._window(buffer.place)
        elif buffer.name not in self._parts:
            address = self._ranks.checked(self.devices)
            self._parts[buffer.name] = Part(address, buffer.extents({}), buffer.dtype, self._ranks.device)
        return self._parts[buffer.name]

    def _side(self) -> Side:
        return self._ranks.side(self.devices)

    def _together(self, window: str) -> dict[str, Any]:
        if not window:
            return {}
        common = {"rank": self._ranks.rank, "capacity": self.capacity, "timeout": self._ranks.timeout}
        return {"window": self._window(window).peers, **common}

"""Passes that are kept for the next call: moved to its addresses, and fitted to its tokens by compiled code."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import cycle, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_pass import KEPT, SCRATCH
from fusekit.abi.symbolic import NotCompiledError
from fusekit.abi.tensormap import DEFINED_BYTES, rewritten
from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.layers.arguments import check_addresses
from fusekit.layers.pass_code import Call, PassCode
from fusekit.layers.passes import BACKWARD, FORWARD, INFERENCE, MovingPass
from fusekit.runtime.maps import memory_of
from fusekit.runtime.streams import PER_THREAD
from fusekit.runtime.tensors import strides_of

if TYPE_CHECKING:
    from fusekit.abi.layer_record import LayerRecord
    from fusekit.layers.pass_plan import PassPlan
    from fusekit.runtime.devices import Devices
    from fusekit.runtime.launch_plan import Block, LaunchPlan

_IDLE_KEPT = 4  # passes of a class of calls: as many token counts come and go without being fitted again
# Tokens and addresses for which the driver's tensor maps are looked at: those of a call, the ends, and all bits.
_BITS, _ADDRESSES = (0x5555_5500, 0x2AAA_AA80), (0xAA_AAAA_AAAA_AAA0, 0x155_5555_5555_5540)
_LEADS = {FORWARD: "x", INFERENCE: "x", BACKWARD: "dy"}  # whose rows are the tokens


class Passes:
    """Passes for calls of one signature that no thread is launching.

    name: of the layer. outputs: of the pass. alignment: of "kept" and "scratch", None for that of devices.
    """

    def __init__(self, name: str, outputs: Collection[str], alignment: int | None) -> None:
        self.idle: list[MovingPass] = []
        self._name, self._outputs, self._alignment = name, outputs, alignment

    def take(self, addresses: list[int]) -> MovingPass | None:
        """One that is moved to these addresses; None: there is none. Raises ArgumentError."""
        try:
            moving = self.idle.pop()
        except IndexError:
            return None
        if not moving.knows(addresses):
            check_addresses(self._name, moving.lying(addresses), self._outputs, self._alignment)
            moving.trust(addresses)
        moving.move(addresses)
        return moving

    def append(self, moving: MovingPass) -> None:
        """Takes a pass back."""
        self.idle.append(moving)


class FittedPasses:
    """Those of one layer for the calls of a class, which differ in tokens and addresses."""

    def __init__(self, compiled: CompiledPass) -> None:
        self.idle: list[MovingPass] = []
        self._compiled = compiled
        self._last: tuple[Sequence[Any], tuple[int, int]] = (), (0, 0)  # shapes of a call, and its `room`

    def take(self, tokens: int, shapes: Sequence[Any], addresses: list[int], stream: int) -> MovingPass | None:
        """One that is fitted and moved; None: there is none. shapes: of the tensors, each with its strides.

        Raises NotCompiledError for a call that has to be checked.
        """
        known, room = self._last
        if shapes != known:
            room = self._compiled.room(shapes, self._compiled.code.shapes(tokens))
            self._last = shapes, room
        try:
            moving = self.idle.pop()
            if moving.fitted.tokens != tokens:  # type: ignore[union-attr]  # most often they are those of the last call
                moving = self._nearest(tokens, moving)
        except IndexError:
            return None
        fitted: Fitted = moving.fitted  # type: ignore[assignment]
        if fitted.tokens != tokens:
            fitted.fit(tokens)
        fitted.serve(room, addresses, stream)
        return moving

    def _nearest(self, tokens: int, last: MovingPass) -> MovingPass:
        """One that is fitted to the tokens, else the oldest; `last` is the newest. Raises IndexError: other
        threads have them all.
        """
        idle = self.idle
        idle.append(last)
        fitted = [at for at, moving in enumerate(idle) if moving.fitted.tokens == tokens]  # type: ignore[union-attr]
        return idle.pop(fitted[0] if fitted else 0)

    def append(self, moving: MovingPass) -> None:
        """Takes a pass back."""
        if moving.fitted is None:
            parts = [part for launch in moving.launches for part in launch.parts]
            moving.fitted = Fitted(self._compiled, parts)
        self.idle.append(moving)
        if len(self.idle) > _IDLE_KEPT:
            del self.idle[0]


class CompiledPass:
    """The code of a class of calls.

    alignment: of "kept" and "scratch". Raises NotCompiledError.
    """

    def __init__(self, call: Call, devices: Devices, alignment: int) -> None:
        self.devices, self.call = devices, call
        tensors = [tensor for _, parts in call.steps for plan, _ in parts for tensor in plan.record.tensors]
        unaligned = max(tensor.alignment for tensor in tensors) - 1
        masks = [alignment - 1 if name in (KEPT, SCRATCH) else unaligned for name in call.names]
        self.code = PassCode(call, masks)

    def check_maps(self, tokens: int) -> None:
        """Raises NotCompiledError unless the driver encodes tensor maps as the code writes them. tokens: of a call."""
        call, maps = self.call, self.code.maps
        slots = [
            (slot, bytes(memory_of(tensor_map))) for _, parts in call.steps for plan, block in parts
            for slot, tensor_map in zip(plan.maps, block.maps, strict=True)
        ]  # fmt: skip
        counts = tokens, call.low, call.high, *(max(call.low, bits & call.high) for bits in _BITS)
        for count, address in zip(counts, cycle(_ADDRESSES)):
            for (slot, before), shape in zip(slots, maps(count) or (), strict=False):  # (): not a number for this pass
                try:
                    encoded = slot.encode_as(address, *shape)
                except ArgumentError as error:
                    raise NotCompiledError(str(error)) from error
                if bytes(memory_of(encoded))[:DEFINED_BYTES] != rewritten(before, address, *shape):
                    raise NotCompiledError("a driver that encodes tensor maps in another way")

    def room(self, shapes: Sequence[Any], expected: Sequence[Any]) -> tuple[int, int]:
        """Bytes of "kept" and "scratch" of a call whose tensors have these shapes. Raises NotCompiledError."""
        count = len(expected)
        memory = [0, 0]
        if shapes[:count] != expected:
            raise NotCompiledError("shapes or strides are not those of the pass")
        for at in range(count, len(shapes), 2):
            extents = shapes[at]
            if not isinstance(extents, tuple) or len(extents) != 1 or shapes[at + 1] != (1,):
                raise NotCompiledError("memory that is not contiguous")
            number = at // 2
            memory[self.call.names[number] == SCRATCH] = extents[0] * self.call.itemsizes[number]
        return memory[0], memory[1]


class Fitted:
    """The launches of a bound pass, whose blocks are written by compiled code."""

    __slots__ = ("_arena", "_compiled", "_grids", "_ordered", "_own", "_parts", "_place", "_shape", "_sizes", "_stream",
                 "_where", "tokens")  # fmt: skip

    def __init__(self, compiled: CompiledPass, parts: Sequence[tuple[LaunchPlan, Block]]) -> None:
        self._compiled, self._parts = compiled, parts
        self._arena = compiled.code.cells.arena(parts)
        self._where: list[int] = []
        self._ordered = itemgetter(*range(len(compiled.call.names)))  # puts what is of each argument in their order
        self._grids = tuple(plan.grid for plan, _ in parts)
        self._own: Sequence[Any] = ()  # as the scratch memory of their kernels is
        self._stream = -1
        self.tokens = 0

    def fit(self, tokens: int) -> None:
        """Writes what follows the tokens. Raises NotCompiledError; then it must not be used again, as for `serve`."""
        code = self._compiled.code
        of_tokens, self._place = code.functions(tokens)
        shape = of_tokens(tokens)
        if shape is None:
            raise NotCompiledError("a launch that its kernel does not allow")
        if shape.grids != self._grids:
            for (_, block), grid, before in zip(self._parts, shape.grids, self._grids, strict=True):
                if grid != before:
                    config = block.config
                    config.gridDimX, config.gridDimY, config.gridDimZ = grid
            self._grids = shape.grids
        code.write(self._arena, shape.numbers)
        self._shape, self._sizes = shape, self._ordered(shape.sizes)
        self.tokens, self._where = tokens, []

    def serve(self, room: tuple[int, int], addresses: list[int], stream: int) -> None:
        """Moves the pass for a call with `room` bytes of "kept" and "scratch", in `stream`. Raises NotCompiledError for
        one that has to be checked.
        """
        shape = self._shape
        if shape.kept > room[0] or shape.scratch > room[1]:
            raise NotCompiledError("too little memory")
        if addresses != self._where:
            ordered = self._ordered(addresses)
            if not self._place(self._arena, addresses, ordered, self._sizes, shape.values):
                self._place_anew(addresses)
            self._where = addresses
        if stream != self._stream:
            self._aim(stream)
        if shape.own != self._own:
            for scratch, before in zip_longest(shape.own, self._own):
                if scratch != before:
                    number, size, shifts = scratch
                    plan, block = self._parts[number]
                    plan.put_scratch(block, stream, size, shifts)
            self._own = shape.own

    def _place_anew(self, addresses: list[int]) -> None:
        """Places what is not in the order of before."""
        shape, pairs = self._shape, list(zip(addresses, self._shape.sizes, strict=True))
        self._ordered = itemgetter(*sorted(range(len(pairs)), key=pairs.__getitem__))
        self._sizes = self._ordered(shape.sizes)
        if not self._place(self._arena, addresses, self._ordered(addresses), self._sizes, shape.values):
            raise NotCompiledError("tensors that share memory, or an address that is not aligned")

    def _aim(self, stream: int) -> None:
        # Not for a part of the device, nor for a default stream that each thread has for itself.
        if self._compiled.devices.part_of(stream) or (stream == PER_THREAD and self._shape.own):
            raise NotCompiledError("a stream for which passes are bound")
        for plan, block in self._parts:
            if block.stream != stream:
                plan.aim(block, stream, scratch=False)
        self._stream, self._own = stream, ()


Idle = dict[CompiledPass, FittedPasses]
"""The passes of one layer that no thread is launching."""


class CallClasses:
    """The compiled passes of a layer, by all of a call but tokens and addresses. most: the tokens of a pass."""

    def __init__(self, record: LayerRecord, devices: Devices, most: int) -> None:
        self._record, self._devices, self._most = record, devices, most
        # By kind of call: where its shapes have the tokens, the last tokens of each rung of kernels, and for each rung
        # the code; None: it cannot be.
        self._known: dict[Any, tuple[int, list[int], dict[int, CompiledPass | None]]] = {}
        self._last: dict[str, tuple[Any, Any]] = {}  # kind and entry of the last call of a pass: to compare is cheaper

    def passes(self, kind: Sequence[Any], shapes: Sequence[Any], idle: Idle) -> tuple[FittedPasses, int] | None:
        """Those for a call of a known class, and its tokens.

        kind: the pass, three settings, then name, dtype and device of each tensor. shapes: shape and strides of each.
        idle: of the layer.
        """
        last, known = self._last.get(kind[0], (None, None))
        if kind != last:
            known = self._known.get(tuple(kind))
            if known is None:
                return None
            self._last[kind[0]] = kind, known
        lead, ends, rungs = known
        tokens = self._tokens(shapes[lead])
        compiled = rungs.get(bisect_left(ends, tokens)) if tokens else None
        if compiled is None:
            return None
        passes = idle.get(compiled)
        return passes or idle.setdefault(compiled, FittedPasses(compiled)), tokens

    def add(
        self, kind: Sequence[Any], shapes: Sequence[Any], idle: Idle, plan: PassPlan, moving: MovingPass, alignment: int
    ) -> FittedPasses | None:
        """Compiles the class of a call that was bound; None: it cannot be, as where a tensor is not contiguous."""
        names, name = kind[4::3], _LEADS.get(kind[0])
        contiguous = all(view.strides == strides_of(view.shape) for view in moving.views)
        if name not in names or not contiguous:
            return None
        if kind not in self._known:
            ladders = [self._record.parts[step.part] for step in self._record.passes[kind[0]].steps]
            rungs = sorted({tokens for ladder in ladders for tokens, _ in ladder if tokens is not None})
            self._known.setdefault(kind, (2 * names.index(name), rungs, {}))
        lead, ends, known = self._known[kind]
        tokens = self._tokens(shapes[lead])
        at = bisect_left(ends, tokens)
        if not tokens or at in known:
            return None
        low, high = ends[at - 1] + 1 if at else 1, ends[at] if at < len(ends) else self._most
        steps = [(step, launch.parts) for (step, _), launch in zip(plan.steps, moving.launches, strict=True)]
        sizes = tuple(DTYPES[view.dtype].bytes for view in moving.views)
        call = Call(
            self._record, kind[0], tuple(moving.names), sizes, frozenset(plan.outputs), kind[2], steps, low, high
        )
        known[at] = None
        try:
            compiled = CompiledPass(call, self._devices, alignment)
            if compiled.code.functions(tokens)[0](tokens) is None:
                return None
            compiled.check_maps(tokens)
        except NotCompiledError:
            return None
        known[at] = compiled
        return idle.setdefault(compiled, FittedPasses(compiled))

    def _tokens(self, shape: Any) -> int:
        """The tokens of a call whose leading tensor has this shape; 0: its class is never compiled."""
        tokens = shape[0] if shape else 0
        return tokens if type(tokens) is int and tokens <= self._most else 0

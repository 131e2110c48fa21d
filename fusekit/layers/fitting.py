"""Passes that are kept for the next call: moved to its addresses, and fitted to its tokens by compiled code."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from operator import add, and_, le
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_pass import KEPT, SCRATCH
from fusekit.abi.parameters import TENSOR_MAP_BYTES
from fusekit.abi.symbolic import NotCompiledError
from fusekit.dtypes import DTYPES
from fusekit.layers.arguments import check_addresses
from fusekit.layers.pass_code import Call, PassCode
from fusekit.layers.passes import BACKWARD, FORWARD, INFERENCE, MovingPass
from fusekit.runtime.streams import PER_THREAD
from fusekit.runtime.tensors import strides_of

if TYPE_CHECKING:
    from fusekit.abi.layer_record import LayerRecord
    from fusekit.layers.pass_plan import PassPlan
    from fusekit.runtime.devices import Devices
    from fusekit.runtime.launch_plan import Block, LaunchPlan
    from fusekit.runtime.tensors import Meta

_IDLE_KEPT = 4  # passes of a class of calls: as many token counts come and go without being fitted again
_END = 2**64
_LEADS = {FORWARD: "x", INFERENCE: "x", BACKWARD: "dy"}  # whose rows are the tokens


class Passes:
    """Passes for calls of one signature that no thread is launching.

    name: of the layer. outputs: of the pass. alignment: of "kept" and "scratch", None for that of devices.
    """

    refused = False

    def __init__(self, name: str, outputs: Collection[str], alignment: int | None) -> None:
        self.idle: list[MovingPass] = []
        self._name, self._outputs, self._alignment = name, outputs, alignment

    def take(self, addresses: list[int], stream: int) -> MovingPass | None:
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
    """As `Passes`, taken from those of a class of calls, `idle`. room: the bytes that "kept" and "scratch" have.

    refused: compiled code could not serve a call, so its signature wants `Passes`.
    """

    def __init__(self, compiled: CompiledPass, tokens: int, room: tuple[int, int], idle: list[MovingPass]) -> None:
        self._compiled, self._tokens, self._room = compiled, tokens, room
        self.idle, self.refused = idle, False

    def take(self, addresses: list[int], stream: int) -> MovingPass | None:
        """One that is fitted and moved; None: there is none, or the call has to be checked."""
        idle, tokens = self.idle, self._tokens
        try:
            moving = idle.pop(next((at for at, each in enumerate(idle) if each.tokens == tokens), 0))
        except IndexError:
            return None
        fitted = moving.fitted
        assert fitted is not None
        fits = fitted.tokens == tokens or fitted.fit(tokens)
        self.refused = not (fits and fitted.serves(self._room, addresses, stream))
        return None if self.refused else moving

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
        self.code = PassCode(call)
        tensors = [tensor for _, parts in call.steps for plan, _ in parts for tensor in plan.record.tensors]
        unaligned = max(tensor.alignment for tensor in tensors) - 1
        self.masks = [alignment - 1 if name in (KEPT, SCRATCH) else unaligned for name in call.names]

    def room(self, metas: Sequence[Meta], tokens: int) -> tuple[int, int] | None:
        """Bytes of "kept" and "scratch" of a call whose tensors have these shapes; None: it has to be checked."""
        expected = self.code.shapes(tokens)
        if [meta[1:3] for meta in metas[: len(expected)]] != expected:
            return None
        memory = dict.fromkeys((KEPT, SCRATCH), 0)
        rest = slice(len(expected), None)
        for name, meta, size in zip(self.call.names[rest], metas[rest], self.call.itemsizes[rest], strict=True):
            if len(meta[1]) != 1 or meta[2] != (1,):
                return None
            memory[name] = meta[1][0] * size
        return memory[KEPT], memory[SCRATCH]


class Fitted:
    """The launches of a bound pass, whose blocks are written by compiled code."""

    __slots__ = ("_at", "_compiled", "_dims", "_follows", "_grids", "_maps", "_memory", "_parts", "_place", "_shape",
                 "_slots", "_stream", "_where", "tokens")  # fmt: skip

    def __init__(self, compiled: CompiledPass, parts: Sequence[tuple[LaunchPlan, Block]]) -> None:
        self._compiled, self._parts = compiled, parts
        self._memory = [block.memory for _, block in parts]
        self._slots = [slot for plan, _ in parts for slot in plan.maps]
        self._maps = [tensor_map for _, block in parts for tensor_map in block.maps]
        self._dims: list[Any] = [None] * len(self._maps)  # those that `_maps` hold, of maps that follow the tokens
        self._at = [0] * len(self._maps)  # where they are
        self._where: list[int] = []
        self._grids = tuple(plan.grid for plan, _ in parts)
        self._stream = -1
        self.tokens = 0

    def fit(self, tokens: int) -> bool:
        """Writes what follows the tokens; False: the call has to be checked."""
        try:
            functions = self._compiled.code.functions(tokens)
        except NotCompiledError:
            return False
        if functions is None:
            return False
        of_tokens, self._place, self._follows = functions
        shape = of_tokens(tokens)
        if shape is None:
            return False
        for (_, block), grid, before in zip(self._parts, shape.grids, self._grids, strict=True):
            if grid != before:
                config = block.config
                config.gridDimX, config.gridDimY, config.gridDimZ = grid
        self._grids = shape.grids
        self._shape, self.tokens, self._stream, self._where = shape, tokens, -1, []
        return True

    def serves(self, room: tuple[int, int], addresses: list[int], stream: int) -> bool:
        """Moves the pass for a call with `room` bytes of "kept" and "scratch"; False: the call has to be checked."""
        enough = self._shape.kept <= room[0] and self._shape.scratch <= room[1]
        return enough and (addresses == self._where or self._place_at(addresses)) and self._aim(stream)

    def _place_at(self, addresses: list[int]) -> bool:
        shape, before = self._shape, self._at
        begins, ends = sorted(addresses), sorted(map(add, addresses, shape.sizes))
        if begins[0] <= 0 or ends[-1] > _END or not all(map(le, ends, begins[1:])):
            return False
        if any(map(and_, addresses, self._compiled.masks)):
            return False
        at = self._place(self._memory, addresses, shape.values)
        if not self._where and self._follows:
            self._reshape(at)
        replace = self._compiled.devices.driver.api.cuTensorMapReplaceAddress
        for number, address in enumerate(at):
            if address != before[number]:
                if replace(self._maps[number], address)[0]:
                    self._slots[number].move(self._maps[number], address)
                before[number] = address
        self._where = addresses
        return True

    def _reshape(self, at: Sequence[int]) -> None:
        """Encodes the tensor maps that follow the tokens."""
        driver, context = self._compiled.devices.driver, self._parts[0][0].loaded.device.context
        with nullcontext() if driver.is_inside(context) else driver.inside(context):
            for number, (dims, strides) in zip(self._follows, self._shape.maps, strict=True):
                if self._dims[number] != (dims, strides):
                    self._dims[number] = None
                    encoded = self._slots[number].encode_as(at[number], dims, strides)
                    ctypes.memmove(self._maps[number].getPtr(), encoded.getPtr(), TENSOR_MAP_BYTES)
                    self._dims[number], self._at[number] = (dims, strides), at[number]

    def _aim(self, stream: int) -> bool:
        # Not for a part of the device, nor for a default stream that each thread has for itself.
        if stream == self._stream:
            return True
        own = self._shape.own
        if self._compiled.devices.part_of(stream) or (stream == PER_THREAD and any(size for size, _ in own)):
            return False
        for (plan, block), scratch in zip(self._parts, own, strict=True):
            if block.stream != stream or scratch[0]:
                plan.aim(block, stream, scratch)
        self._stream = stream
        return True


Idle = dict[CompiledPass, list[MovingPass]]
"""The passes of one layer that no thread is launching."""


class CallClasses:
    """The compiled passes of a layer, by all of a call but tokens and addresses. most: the tokens of a pass."""

    def __init__(self, record: LayerRecord, devices: Devices, most: int) -> None:
        self._record, self._devices, self._most = record, devices, most
        self._known: dict[Any, CompiledPass | None] = {}
        self._ends = {
            which: sorted({
                tokens for step in each.steps for tokens, _ in record.parts[step.part] if tokens is not None
            })
            for which, each in record.passes.items()
        }  # fmt: skip

    def passes(self, signature: Sequence[Any], idle: Idle) -> FittedPasses | None:
        """Those for a call of a known class. signature: the pass, three settings, then names and metas in turn. idle:
        of the layer.
        """
        tokens = self._tokens(signature)
        compiled = self._known.get(self._class_of(signature, tokens)) if tokens else None
        room = compiled.room(signature[5::2], tokens) if compiled is not None else None
        if compiled is None or room is None:
            return None
        return FittedPasses(compiled, tokens, room, idle.setdefault(compiled, []))

    def add(
        self, signature: Sequence[Any], idle: Idle, plan: PassPlan, moving: MovingPass, alignment: int
    ) -> FittedPasses | None:
        """Compiles the class of a call that was bound; None: it cannot be, as where a tensor is not contiguous."""
        tokens = self._tokens(signature)
        key = self._class_of(signature, tokens)
        contiguous = all(view.strides == strides_of(view.shape) for view in moving.views)
        if not tokens or not contiguous or key in self._known:
            return None
        ends = self._ends[signature[0]]
        at = bisect_left(ends, tokens)
        low, high = ends[at - 1] + 1 if at else 1, ends[at] if at < len(ends) else self._most
        steps = [(step, launch.parts) for (step, _), launch in zip(plan.steps, moving.launches, strict=True)]
        sizes = tuple(DTYPES[view.dtype].bytes for view in moving.views)
        call = Call(
            self._record, signature[0], tuple(moving.names), sizes, frozenset(plan.outputs), signature[2], steps, low,
            high,
        )  # fmt: skip
        self._known[key] = None
        try:
            compiled = CompiledPass(call, self._devices, alignment)
            functions = compiled.code.functions(tokens)
            if functions is None or functions[0](tokens) is None:
                return None
        except NotCompiledError:
            return None
        self._known[key] = compiled
        return self.passes(signature, idle)

    def _tokens(self, signature: Sequence[Any]) -> int:
        """The tokens of a call; 0: its class is never compiled."""
        names, lead = signature[4::2], _LEADS.get(signature[0])
        shape = signature[5 + 2 * names.index(lead)][1] if lead in names else ()
        return shape[0] if shape and type(shape[0]) is int and shape[0] <= self._most else 0

    def _class_of(self, signature: Sequence[Any], tokens: int) -> Any:
        metas = signature[5::2]
        fixed = [(dtype, device) for dtype, _, _, device in metas]
        return (*signature[:4], *signature[4::2], *fixed, bisect_left(self._ends[signature[0]], tokens))

"""The passes of a layer: buffers, steps, and which of them a call needs.

A buffer is an argument, which the caller gives; or lies in `kept`, which the forward pass fills and the backward pass
reads; or in `scratch`, for one pass; or, of a layer over ranks, in a window, whose name is then its place, or with what
its `check` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.plan.exchange import CHOICES, NOTHING
from fusekit.plan.operands.saved_preactivation import DZ, Z
from fusekit.plan.quant import SIDE

ARGUMENT, KEPT, SCRATCH, CHECKED = "argument", "kept", "scratch", "checked"
FORWARD, INFERENCE, BACKWARD = "forward", "inference", "backward"
BOTH = (FORWARD, INFERENCE)
RECOMPUTE, DGRAD, WGRAD = "recompute", "dgrad", "wgrad"  # what a backward pass does, in this order
QUANTISE = "quantise"  # name of the step that quantises the weights, where the layer reads FP8 values
ALIGNMENT = 256  # of a buffer within kept or scratch memory


@dataclass(frozen=True, slots=True)
class Buffer:
    """shape: numbers, and the names of dims: "T" tokens, "M" rows, of a layer over ranks "S" places of a window and "C"
    choices of its own tokens, and in scratch memory others of `Program.dims`. place: as in the module's docstring.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    place: str

    def extents(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(dims[extent] if isinstance(extent, str) else extent for extent in self.shape)

    def bytes(self, dims: Mapping[str, int]) -> int:
        """Its size; at least one element, so that it has an address."""
        return prod(max(extent, 1) for extent in self.extents(dims)) * DTYPES[self.dtype].bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of the kernel `part`; its arguments by name, as buffers that it reads and buffers that it writes.

    window: of a launch that all ranks make together, the one that they store into; what then is in a window is no
    argument. on_side: it is queued on the side stream, after what was queued there and before (`Program.joins`). needs,
    spared: outputs of which it is there only if the first is asked for, or only if the second is not.
    """

    part: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    window: str = ""
    on_side: bool = False
    needs: str = ""
    spared: str = ""

    @property
    def arguments(self) -> dict[str, str]:
        """The kernel's arguments, as buffers."""
        return {
            name: buffer for name, buffer in {**self.reads, **self.writes}.items() if not name.startswith("window.")
        }


Arguments = tuple[Mapping[str, Buffer], Mapping[str, Buffer]]


@dataclass(frozen=True, slots=True)
class Program:
    """A layer. parts: the keys of each kernel's table. steps: of each pass, in order. topk: rows of a token. experts:
    groups of rows, those of a rank.

    room: dims that are the same for any number of tokens, of a layer over ranks.
    """

    parts: Mapping[str, Mapping[str, Any]]
    buffers: Mapping[str, Buffer]
    steps: Mapping[str, tuple[Step, ...]]
    topk: int
    experts: int = 0
    room: Mapping[str, int] = field(default_factory=dict)
    _arguments: dict[str, Arguments] = field(default_factory=dict, init=False, repr=False, compare=False)

    def dims(self, tokens: int) -> dict[str, int]:
        """The dims of shapes for so many tokens: T, M, C; and of a layer that reads FP8 values the room that those
        along T or M take, also in blocks.
        """
        extents = {"T": tokens, "M": tokens * self.topk, "C": tokens * self.topk, **self.room}
        if QUANTISE not in self.steps:
            return extents
        for name, groups in (("T", 0), ("M", self.experts)):
            blocks = max(-(-(extents[name] + (SIDE - 1) * groups) // SIDE), 1)
            extents |= {f"{name}_padded": blocks * SIDE, f"{name}_blocks": blocks}
        return extents

    def within(self, room: Mapping[str, int]) -> Program:
        """The same with the dims `room` fixed."""
        return replace(self, room=dict(room))

    def arguments(self, which: str) -> Arguments:
        """What the caller gives to a pass: (inputs, outputs)."""
        if which not in self._arguments:  # each call of a layer asks
            self._arguments[which] = self._arguments_of(which)
        return self._arguments[which]

    def _arguments_of(self, which: str) -> Arguments:
        inputs: dict[str, Buffer] = {}
        outputs: dict[str, Buffer] = {}
        for step in self.steps.get(which, ()):
            for name in step.reads.values():
                if self.buffers[name].place == ARGUMENT and name not in outputs:
                    inputs[name] = self.buffers[name]
            outputs |= {name: self.buffers[name] for name in step.writes.values()}
        return inputs, {name: buffer for name, buffer in outputs.items() if buffer.place == ARGUMENT}

    def needed(self, which: str, given: Collection[str], *, in_place: bool = False) -> tuple[Step, ...]:
        """The steps of a pass that make the outputs `given`, and what of kept memory the pass fills. in_place: in the
        order that saves memory, if the pass is a backward one.
        """
        wanted = set(given)
        if which == FORWARD:
            wanted |= {name for name, buffer in self.buffers.items() if buffer.place == KEPT}
        steps: list[Step] = []
        for step in reversed(self.steps.get(which, ())):
            out = (step.needs and step.needs not in given) or step.spared in given
            if wanted & set(step.writes.values()) and not out:
                steps.append(step)
                wanted |= set(step.reads.values())
        steps.reverse()
        return tuple(self._soon(steps) if in_place and which == BACKWARD else steps)

    def _soon(self, steps: list[Step]) -> list[Step]:
        """Steps in another order: the only reader of what lies in scratch memory comes right after what it needs, so
        that others can have that memory. So fc2's weight gradient comes before fc1's data gradient, and dx later. A
        layer over ranks keeps its order, in which launches run next to those of other ranks.
        """
        if any(step.window or step.on_side for step in steps):
            return steps
        order = list(steps)
        for step in steps:
            given = {name for name in step.reads.values() if self.buffers[name].place == SCRATCH}
            at = max((index for index, other in enumerate(order) if given & set(other.writes.values())), default=-1) + 1
            if at and given.difference(*(other.arguments.values() for other in order[at:] if other is not step)):
                order.remove(step)
                order.insert(at, step)
        return order

    def joins(self, steps: Iterable[Step]) -> list[bool]:
        """For each step, whether it joins the side stream: because it reads what a launch there writes, or because an
        earlier step has awaited the rows anyway. A step that must run at the same time never joins.
        """
        joins, pending, awaited = [], set[str](), False
        for step in steps:
            keys = self.parts[step.part]
            concurrent = step.on_side or bool(keys.get("awaits")) or keys.get("sends") in (CHOICES, NOTHING)
            join = bool(pending) and not concurrent and (awaited or not pending.isdisjoint(step.arguments.values()))
            joins.append(join)
            awaited = (awaited or bool(keys.get("awaits"))) and not join and not step.on_side
            pending = set() if join or step.on_side else pending
            pending |= set(step.writes.values()) if step.on_side else set()
        return joins

    def kept(self, dims: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where each kept buffer begins, and the bytes of all."""
        places, end = {}, 0
        for buffer in self.buffers.values():
            if buffer.place == KEPT:
                places[buffer.name] = end
                end += _padded(buffer.bytes(dims))
        return places, end

    def kept_line(self) -> tuple[int, int]:
        """(a, b): for T tokens `kept` needs at most a T + b bytes, and little less; for callers with a symbol for T."""
        slope = rest = 0
        for buffer in self.buffers.values():
            if buffer.place == KEPT:
                size = buffer.bytes(self.dims(1))
                grows = any(isinstance(extent, str) and extent not in self.room for extent in buffer.shape)
                slope += size if grows else 0
                rest += size + ALIGNMENT
        return slope, rest

    def scratch(
        self, which: str, given: Collection[str], dims: Mapping[str, int], lent: Collection[str] | None = None, *,
        in_place: bool = False,
    ) -> tuple[dict[str, tuple[str, int]], int]:  # fmt: skip
        """Where each buffer of a pass's scratch memory lies, (SCRATCH, KEPT or an output, first byte), and how many
        bytes of scratch memory that takes; those that are not needed at the same time share memory. dz lies where z
        was, unless z is kept.

        given: the caller's outputs; any other that a step writes lies here, too. lent: those of them that may hold
        buffers which are done with before they are written; None: all. in_place: so may kept memory, once a backward
        pass has read what is there.
        """
        steps = self.needed(which, given, in_place=in_place)
        life: dict[str, tuple[int, int]] = {}
        elsewhere = set(given) | self.arguments(which)[0].keys()
        inside = {ARGUMENT, SCRATCH, *([KEPT] if which == INFERENCE else [])}
        elsewhere |= {name for name, buffer in self.buffers.items() if buffer.place not in inside}
        for index, step in enumerate(steps):
            for name in {*step.reads.values(), *step.writes.values()} - elsewhere:
                life[name] = (life.get(name, (index, index))[0], index)
        homes = [_Home(name, *until) for name, until in self._unwritten(steps, dims).items() if name in given]
        homes = [home for home in homes if lent is None or home.name in lent]
        kept = self._read_out(steps, dims) if in_place and which == BACKWARD else {}
        homes = sorted([*homes, *kept.values()], key=lambda home: (home.room, home.name, home.begin))
        homes.append(rest := _Home(SCRATCH, None, len(steps)))
        places: dict[str, tuple[str, int]] = {}
        over = {step.writes[DZ]: step.reads[Z] for step in steps if DZ in step.writes}
        for dz, z in over.items():
            if z in life:
                life[z] = life[z][0], life.pop(dz)[1]
            elif z in kept:
                places[dz] = kept[z].keep(life.pop(dz))
        # The largest first, each in the smallest home that has room, at the lowest place that is free while it lives.
        for name in sorted(life, key=lambda name: (-self.buffers[name].bytes(dims), name)):
            size = _padded(self.buffers[name].bytes(dims))
            places[name] = next(place for home in homes if (place := home.place(size, life[name])) is not None)
        places |= {dz: places[z] for dz, z in over.items() if z in life}
        return places, max((high for _, high, _ in rest.taken), default=0)

    def _read_out(self, steps: Sequence[Step], dims: Mapping[str, int]) -> dict[str, _Home]:
        """The memory of each kept buffer, free from the step on after the last one that reads it."""
        begins, _ = self.kept(dims)
        read = {name: index for index, step in enumerate(steps) for name in step.reads.values()}
        return {
            name: _Home(KEPT, _padded(self.buffers[name].bytes(dims)), len(steps), begin, read.get(name, -1) + 1)
            for name, begin in begins.items()
        }

    def _unwritten(self, steps: Sequence[Step], dims: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """For each output that is not added to: its bytes, and the first step that writes it."""
        first: dict[str, tuple[int, int]] = {}
        for index, step in reversed(list(enumerate(steps))):
            for name in {*step.reads.values(), *step.writes.values()}:
                buffer = self.buffers[name]
                if buffer.place == ARGUMENT and 0 not in buffer.extents(dims):  # without elements it has no memory
                    first[name] = buffer.bytes(dims), index
        added = {
            written for step in steps if self.parts[step.part].get("accumulate") for written in step.writes.values()
        }
        return {name: until for name, until in first.items() if name not in added}


@dataclass(slots=True)
class _Home:
    """Memory for buffers, from byte `begin` of `name` on. room: its bytes; None: as many as it takes. It is free from
    step `since` to the one before `until`. taken: by (first byte, end, life).
    """

    name: str
    room: int | None
    until: int
    begin: int = 0
    since: int = 0
    taken: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)

    def keep(self, life: tuple[int, int]) -> tuple[str, int]:
        """Takes all of it, for a step that writes over what it reads."""
        self.taken.append((0, self.room or 0, life))
        return self.name, self.begin

    def place(self, size: int, life: tuple[int, int]) -> tuple[str, int] | None:
        """Takes the lowest place that is free from step life[0] to life[1]; None where there is none."""
        begin = 0
        for low, high, (start, end) in sorted(self.taken):
            if start <= life[1] and life[0] <= end and low < begin + size:
                begin = max(begin, high)
        joins = life[0] < self.since or life[1] >= self.until
        if joins or (self.room is not None and begin + size > self.room):
            return None
        self.taken.append((begin, begin + size, life))
        return self.name, self.begin + begin


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

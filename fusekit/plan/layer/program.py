"""The passes of a layer: buffers, steps, and which of them a call needs.

A buffer is an argument, which the caller gives; or lies in `kept`, which the forward pass fills and the backward pass
reads; or in `scratch`, for one pass; or, of a layer over ranks, in a window, whose name is then its place, or with what
its `check` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, prod
from typing import Any

from fusekit.abi.layer_memory import ALIGNMENT, Layout, needs, padded
from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH
from fusekit.dtypes import DTYPES
from fusekit.plan.exchange import CHOICES, NOTHING
from fusekit.plan.layer.memory import Home, Sample, ladder
from fusekit.plan.operands.saved_preactivation import DZ, Z
from fusekit.plan.quant import SIDE

CHECKED = "checked"
FORWARD, INFERENCE, BACKWARD = "forward", "inference", "backward"
BOTH = (FORWARD, INFERENCE)
RECOMPUTE, DGRAD, WGRAD = "recompute", "dgrad", "wgrad"  # what a backward pass does, in this order
QUANTISE = "quantise"  # name of the step that quantises the weights, where the layer reads FP8 values


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

    room: dims that are the same for any number of tokens, of a layer over ranks. tokens: what a pass usually
    has. room_for: `room` for so many tokens of each rank. few: by part, the most tokens that it is launched for; many:
    the most that it is not launched for.
    """

    parts: Mapping[str, Mapping[str, Any]]
    buffers: Mapping[str, Buffer]
    steps: Mapping[str, tuple[Step, ...]]
    topk: int
    experts: int = 0
    room: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 1
    room_for: Callable[[int], Mapping[str, int]] | None = field(default=None, repr=False, compare=False)
    few: Mapping[str, int] = field(default_factory=dict)
    many: Mapping[str, int] = field(default_factory=dict)
    _layouts: dict[tuple[str, frozenset[str], bool], tuple[Layout, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
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

    def typical(self, tokens: int) -> dict[str, int]:
        """`dims`, with room for as many tokens of each rank."""
        return (self.within(self.room_for(tokens)) if self.room_for else self).dims(tokens)

    def within(self, room: Mapping[str, int]) -> Program:
        """The same with the dims `room` fixed."""
        return replace(self, room=dict(room))

    def launches(self, part: str, tokens: int) -> bool:
        """Whether a pass of so many tokens launches a part."""
        return self.many.get(part, -1) < tokens <= self.few.get(part, tokens)

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
        if in_place and which == BACKWARD:
            order = [id(step) for step in self.in_place_order(list(self.steps[which]))]
            steps.sort(key=lambda step: order.index(id(step)))
        return tuple(steps)

    def in_place_order(self, steps: list[Step]) -> list[Step]:
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
                end += padded(buffer.bytes(dims))
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
        asked, in_place = set(given), in_place and which == BACKWARD
        whole = asked if lent is None else asked.intersection(lent)
        used = {name for step in self.needed(which, asked) for name in (*step.reads.values(), *step.writes.values())}
        sizes = {name: self.buffers[name].bytes(dims) for name in used - asked}
        kept = self.kept(dims)[0]
        least: float = inf
        for each in self.layouts(which, in_place, asked):
            if each.lends <= whole and self._ranges_over(each, dims):
                starts, needed = needs(each.places, sizes)
                bytes_left = needed.pop(SCRATCH, 0)
                if bytes_left < least and all(end <= self._room(home, dims) for home, end in needed.items()):
                    layout, begins, least = each, starts, bytes_left
        places = {
            place.buffer: (KEPT, kept[place.home] + begins[place.buffer])
            if place.home in kept and which == BACKWARD
            else (place.home, begins[place.buffer])
            for place in layout.places
            if place.buffer in sizes
        }
        return places, padded(int(least))

    def _ranges_over(self, layout: Layout, dims: Mapping[str, int]) -> bool:
        return layout.since <= dims["S" if self.room_for else "T"] <= layout.until

    def layouts(self, which: str, in_place: bool, asked: Collection[str] | None = None) -> Iterator[Layout]:
        """Layouts of a pass's memory; the first that serves a call holds for it. asked: only those that have the
        buffers of all steps for these outputs.
        """
        spared = {step.spared for step in self.steps.get(which, ())}
        for outputs in self._classes(which):
            if asked is None or (outputs.issuperset(asked) and not spared & (outputs - set(asked))):
                key = which, outputs, in_place
                if key not in self._layouts:
                    self._layouts[key] = tuple(self._layouts_of(*key))
                yield from self._layouts[key]

    def _classes(self, which: str) -> list[frozenset[str]]:
        """Sets of outputs that have layouts, the smallest first: all, those of tokens and those of weights, dx alone,
        all others, and all but weight matrices.
        """
        outputs = self.arguments(which)[1]
        every = frozenset(outputs)
        tokens = {name for name, buffer in outputs.items() if any(isinstance(extent, str) for extent in buffer.shape)}
        matrices = {step.writes["dw"] for step in self.steps.get(which, ()) if "dw" in step.writes}
        sets = [every]
        if which == BACKWARD:
            sets += [every & tokens, every - tokens, every & {"dx"}, every - {"dx"}, every - matrices]
        return sorted({each for each in sets if each} or {every}, key=lambda each: (len(each), sorted(each)))

    def _layouts_of(self, which: str, outputs: frozenset[str], in_place: bool) -> Iterator[Layout]:
        """Layouts of a class: with homes in outputs and kept memory, in kept memory, and in none."""
        steps = self.needed(which, outputs, in_place=in_place)
        inside = {ARGUMENT, SCRATCH, *([KEPT] if which == INFERENCE else [])}
        lives: dict[str, tuple[int, int]] = {}
        aside: set[str] = set()
        for index, step in enumerate(steps):
            for name in {*step.reads.values(), *step.writes.values()} - self.arguments(which)[0].keys():
                if self.buffers[name].place in inside:
                    lives[name] = (lives.get(name, (index, index))[0], index)
            together = step.writes.values() if len(step.writes) > 1 else ()
            aside |= outputs.intersection({*step.reads.values(), *together})
        # An output that is read, or written with others, needs room only where the caller does not give it.
        lives = {name: life for name, life in lives.items() if name not in outputs or name in aside}
        lent = [Home(name, 0, until, True) for name, until in self._unwritten(steps).items() if name in outputs]
        read = {name: index for index, step in enumerate(steps) for name in step.reads.values()}
        kept = {
            name: Home(name, read.get(name, -1) + 1, len(steps), False)
            for name, buffer in self.buffers.items()
            if in_place and buffer.place == KEPT
        }
        over = {step.writes[DZ]: step.reads[Z] for step in steps if DZ in step.writes}
        over = {dz: z for dz, z in over.items() if z in lives or z in kept}
        for dz, z in over.items():
            if z in lives:
                lives[z] = lives[z][0], lives.pop(dz)[1]

        @cache
        def sample(tokens: int) -> Sample:
            dims = self.typical(tokens)
            sizes = {name: 0 if name in aside else self.buffers[name].bytes(dims) for name in lives.keys() | over}
            return Sample(
                dims[dim], sizes, {home.name: self._room(home.name, dims) for home in (*lent, *kept.values())}
            )

        dim = "S" if self.room_for else "T"
        layout = Layout(outputs, frozenset(), in_place)
        for homes in dict.fromkeys(((*lent, *kept.values()), tuple(kept.values()), ())):
            held = over if homes else {dz: z for dz, z in over.items() if z in lives}
            layouts = ladder(layout, lives, held, homes, sample, self.tokens)
            yield from layouts
            if all(place.home == SCRATCH for each in layouts for place in each.places):
                return  # these hold for any dims

    def _room(self, name: str, dims: Mapping[str, int]) -> int:
        """The bytes of an output or kept buffer; an output without elements has no memory."""
        buffer = self.buffers[name]
        if buffer.place == KEPT:
            return padded(buffer.bytes(dims))
        return 0 if 0 in buffer.extents(dims) else buffer.bytes(dims)

    def _unwritten(self, steps: Sequence[Step]) -> dict[str, int]:
        """For each output that is not added to, the first step that writes it."""
        first: dict[str, int] = {}
        for index, step in reversed(list(enumerate(steps))):
            first |= {name: index for name in step.arguments.values() if self.buffers[name].place == ARGUMENT}
        added = {
            written for step in steps if self.parts[step.part].get("accumulate") for written in step.writes.values()
        }
        return {name: until for name, until in first.items() if name not in added}

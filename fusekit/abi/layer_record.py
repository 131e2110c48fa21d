"""The layer record: which kernels the passes of a layer launch, in which order, on which memory, as data.

A launcher needs no more than it and the launch records that it names by key. For T tokens, all else follows:

1. `dims` are evaluated in their order, with "T" (and, over ranks, "capacity" and "rows") known.
2. Of a pass, those `steps` are queued that are for an output which is asked for, and whose conditions hold.
3. The kernel of a step is the first on its part's ladder whose tokens are enough; where that has none, the step is left
   out. It counts for layouts all the same.
4. Of the layouts that serve the call, the first that takes least scratch memory gives the place of each buffer; `kept`
   ones lie one after the other.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from fusekit.abi.codec import RecordReader, expression, string
from fusekit.abi.expr import Expr, RecordError, evaluate, thaw, variables
from fusekit.abi.layer_enough import enough_scratch
from fusekit.abi.layer_memory import ALIGNMENT, Layout, needs, padded
from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH, LayerBuffer, LayerPass, LayerStep, joins_of

SCHEMA = 1
GAPS = "gaps"  # rungs without a kernel
UNDERSTOOD = frozenset({"dims", "buffers", "passes", "parts", "joins", "windows", GAPS})
"""What a record may require of its reader by the member `must`."""
Ladder = tuple[tuple[int | None, str | None], ...]


def _unbounded(expr: Expr, env: Mapping[str, int]) -> int:
    """`evaluate` of the symbols of a tracer, which has no values to compare with 64 bits."""
    if isinstance(expr, int | str):
        return evaluate(expr, env)
    first, *rest = (_unbounded(item, env) for item in expr[1:])
    for item in rest:
        first = _SYMBOLIC[expr[0]](first, item)
    return first


_SYMBOLIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "max": max,
    "ceildiv": lambda dividend, divisor: -(-dividend // divisor),
}  # fmt: skip


@dataclass(frozen=True)
class LayerLaunch:
    """One launch of a pass. places: of each argument, (an argument of the pass, "kept", "scratch" or a window, bytes
    from its begin); shapes: likewise.
    """

    part: str
    key: str
    places: Mapping[str, tuple[str, int]]
    shapes: Mapping[str, tuple[int, ...]]
    joins: bool


@dataclass(frozen=True)
class LayerKernel:
    """A kernel of a layer. name: its full name. launch: SHA-256 of its launch record's canonical JSON. defaults: of its
    run-time scalars and launch options, by name.
    """

    name: str
    launch: str = ""
    defaults: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        defaults = {name: str(value) if abs(value) == inf else value for name, value in self.defaults.items()}
        return {"name": self.name, "launch": self.launch, "defaults": defaults}

    @classmethod
    def from_json(cls, value: Any, where: str) -> LayerKernel:
        reader = RecordReader(value, where)
        return cls(reader.string("name"), reader.string("launch"), reader.mapping("defaults", _number))


@dataclass(frozen=True)
class LayerRecord:
    """A layer for one architecture. parts: the ladder of each: (most tokens, key of a kernel or None), the last
    for any number.

    kernels: by key. windows: of a layer over ranks, the bytes of each. limits: there, "capacity" for as many tokens of
    a rank as the variable "tokens" says; and over "capacity" the "rows" that any routing can give a rank, and "waiting"
    blocks of a launch. devices: by the driver's name of a device that was measured, the ladders that are others there.
    options, summary, promises, tuning (where the ladders come from): for people; launching reads none of them.
    """

    name: str
    arch: str
    dims: Mapping[str, Expr]
    buffers: Mapping[str, LayerBuffer]
    passes: Mapping[str, LayerPass]
    parts: Mapping[str, Ladder]
    range_of: str = "T"
    summary: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    promises: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, LayerKernel] = field(default_factory=dict)
    windows: Mapping[str, Expr] = field(default_factory=dict)
    limits: Mapping[str, Expr] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, Ladder]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON types only; `from_json` gives an equal record back."""
        return {
            "schema": SCHEMA, "kind": "layer", "must": [*["windows"] * bool(self.windows), *[GAPS] * self.has_gaps],
            "name": self.name, "arch": self.arch,
            "summary": self.summary, "options": dict(self.options), "promises": dict(self.promises),
            "dims": [{"name": name, "value": thaw(expr)} for name, expr in self.dims.items()],
            "range_of": self.range_of,
            "buffers": [{"name": name, **buffer.to_json()} for name, buffer in self.buffers.items()],
            "passes": {name: each.to_json() for name, each in self.passes.items()},
            "parts": _rungs(self.parts),
            "kernels": {key: kernel.to_json() for key, kernel in self.kernels.items()},
            "windows": [{"name": name, "bytes": thaw(size)} for name, size in self.windows.items()],
            "limits": {name: thaw(limit) for name, limit in self.limits.items()}, "tuning": dict(self.tuning),
            **({"devices": {name: _rungs(parts) for name, parts in self.devices.items()}} if self.devices else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> LayerRecord:
        """The record in `value`. A member that this version does not know is ignored, unless `must` names it.

        Raises RecordError.
        """
        reader = RecordReader(value)
        if kind := set(reader.array("must", string)) - UNDERSTOOD:
            raise RecordError(
                f"must: launching this layer needs {', '.join(sorted(kind))}, which this fusekit does not know; use the"
                " version that built it, or build the layer with this one"
            )
        reader.string("kind", ("layer",))
        record = cls(
            reader.string("name"), reader.string("arch"), dict(reader.array("dims", _dim)),
            dict(reader.array("buffers", _buffer)), reader.mapping("passes", LayerPass.from_json),
            reader.mapping("parts", _ladder), reader.string("range_of"),
            reader.string("summary") if "summary" in reader else "",
            reader.mapping("options", _any) if "options" in reader else {},
            reader.mapping("promises", _any) if "promises" in reader else {},
            reader.mapping("kernels", LayerKernel.from_json), dict(reader.array("windows", _window)),
            reader.mapping("limits", expression),
            reader.mapping("tuning", _any) if "tuning" in reader else {},
            reader.mapping("devices", _parts) if "devices" in reader else {},
        )  # fmt: skip
        record.check()
        return record

    def check(self) -> None:
        """Raises RecordError where a name is of nothing in the record, or an expression reads what has no value."""
        _known(variables(self.limits.get("capacity", 0)), {"tokens"}, "limits.capacity")
        for name in self.limits.keys() - {"capacity"}:
            _known(variables(self.limits[name]), {"capacity"}, f"limits.{name}")
        known = {"T", "capacity", "rows"}
        for name, expr in self.dims.items():
            _known(variables(expr), known, f"dims.{name}")
            known.add(name)
        _known({self.range_of}, known, "range_of")
        for name, buffer in self.buffers.items():
            _known(set().union(*map(variables, (*buffer.shape, buffer.offset))), known, f"buffers.{name}")
        for name, size in self.windows.items():
            _known(variables(size), known, f"windows.{name}")
        for name, parts in self.devices.items():
            _known(parts, self.parts, f"devices.{name}")
        names = {*self.buffers, SCRATCH}
        for which, each in self.passes.items():
            for index, step in enumerate(each.steps):
                where = f"passes.{which}.steps[{index}]"
                _known({step.part}, self.parts, where)
                _known({step.window} - {""}, self.windows, where)
                _known({*step.arguments.values(), *step.writes}, names, where)
                _known({*(step.outputs or ()), *filter(None, (step.needs, step.unless))}, each.outputs, where)
            for index, layout in enumerate(each.layouts):
                below: set[str] = set()
                where = f"passes.{which}.layouts[{index}]"
                _known(layout.outputs | layout.lends, each.outputs, where)
                for place in layout.places:
                    _known({place.buffer, place.home}, names, where)
                    _known(place.above, below, where)
                    below.add(place.buffer)

    def to_bytes(self) -> bytes:
        """The canonical document."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def key(self) -> str:
        """SHA-256 of the canonical document, which names its kernels by key."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def has_gaps(self) -> bool:
        """Whether a ladder has a rung without a kernel."""
        return any(key is None for ladder in self.ladders for _, key in ladder)

    @property
    def ladders(self) -> tuple[Ladder, ...]:
        """Those of all parts, of any device."""
        return tuple(ladder for parts in (self.parts, *self.devices.values()) for ladder in parts.values())

    @cached_property
    def arguments(self) -> Mapping[str, tuple[Mapping[str, LayerBuffer], Mapping[str, LayerBuffer]]]:
        """By pass, (inputs, outputs) by name."""
        return {
            which: (
                {name: self.buffers[name] for name in each.inputs},
                {name: self.buffers[name] for name in each.outputs},
            )
            for which, each in self.passes.items()
        }

    def kept_line(self, env: Mapping[str, int]) -> tuple[int, int]:
        """(a, b): for T tokens `kept` needs at most a T + b bytes, and little less; for callers with a symbol for T.
        env: the dims of one token.
        """
        growing = {"T"}
        for name, expr in self.dims.items():
            growing |= {name} if variables(expr) & growing else set()
        slope = rest = 0
        for buffer in self.buffers.values():
            if buffer.place == KEPT:
                size = buffer.bytes(env)
                slope += size if any(variables(extent) & growing for extent in buffer.shape) else 0
                rest += size + ALIGNMENT
        return slope, rest

    def environment(self, tokens: int, **limits: int) -> dict[str, int]:
        """The dims for so many tokens. limits: capacity and rows of a layer over ranks."""
        env = {"T": tokens, **limits}
        value = evaluate if type(tokens) is int else _unbounded
        for name, expr in self.dims.items():
            env[name] = value(expr, env)
        return env

    def kept(self, env: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where each kept buffer begins, and the bytes of all."""
        places, end = {}, 0
        for name, buffer in self.buffers.items():
            if buffer.place == KEPT:
                places[name] = end
                end += padded(buffer.bytes(env))
        return places, end

    def for_device(self, name: str) -> LayerRecord:
        """The record with the ladders for the device that the driver calls so."""
        return replace(self, parts={**self.parts, **self.devices.get(name, {})}, devices={})

    def kernel(self, part: str, tokens: int) -> str | None:
        """The key of a part's kernel for so many tokens; None: it is not launched."""
        return next(key for most, key in self.parts[part] if most is None or tokens <= most)

    def launched(self, which: str, asked: Collection[str], tokens: int) -> tuple[LayerStep, ...]:
        """The steps of a pass that have a kernel for so many tokens."""
        queued = self.passes[which].queued(asked)
        return tuple(step for step in queued if self.kernel(step.part, tokens) is not None)

    def scratch(
        self, which: str, asked: Collection[str], env: Mapping[str, int], lent: Collection[str], *,
        in_place: bool = False,
    ) -> tuple[dict[str, tuple[str, int]], int]:  # fmt: skip
        """Where each buffer of a pass lies, and the bytes of scratch memory. lent: outputs in contiguous memory."""
        each = self.passes[which]
        used = {name for step in each.queued(asked, in_place=in_place) for name in step.arguments.values()}
        sizes = {name: self.buffers[name].bytes(env) for name in used.difference(asked)}
        kept = self.kept(env)[0]
        rest, layout, begins = inf, None, dict[str, int]()
        for other in self.layouts(which, asked, in_place):
            if other.lends.issubset(lent) and other.since <= env[self.range_of] <= other.until:
                starts, needed = needs(other.places, sizes)
                left = needed.pop(SCRATCH, 0)
                if left < rest and all(end <= self._room(home, env) for home, end in needed.items()):
                    rest, layout, begins = left, other, starts
        if layout is None:
            raise RecordError(f"passes.{which}: no layout is for {', '.join(sorted(asked))}; the record is damaged")
        overwrites = {place.home for place in layout.places if in_place and place.home in kept}
        return {
            place.buffer: (KEPT, kept[place.home] + begins[place.buffer])
            if place.home in overwrites
            else (place.home, begins[place.buffer])
            for place in layout.places
            if place.buffer in sizes
        }, padded(int(rest))

    def most_scratch(
        self, which: str, tokens: int, asked: Collection[str] | None = None, *, in_place: bool = False,
        limits: Mapping[str, int] | None = None,
    ) -> int:  # fmt: skip
        """The bytes of scratch memory that are enough for passes of at most so many tokens. asked: their outputs, all
        contiguous; None: any. limits: as for `environment`.
        """
        return enough_scratch(self, which, tokens, asked, in_place, limits or {})

    def any_scratch(self, layouts: Iterable[Layout], env: Mapping[str, int]) -> int:
        """What is enough for these dims, for any outputs, contiguous or not."""
        sizes = {name: buffer.bytes(env) for name, buffer in self.buffers.items()}
        most, sure = 0, list[Layout]()
        for layout in layouts:
            after = any(layout.outputs == other.outputs and other.lends <= layout.lends for other in sure)
            if layout.since <= env[self.range_of] <= layout.until and not after:
                needed = needs(layout.places, sizes)[1]
                most = max(most, padded(needed.pop(SCRATCH, 0)))
                if all(end <= self._room(home, env) for home, end in needed.items()):
                    sure.append(layout)  # no call comes to those after it
        return most

    def layouts(self, which: str, asked: Collection[str] | None, in_place: bool) -> list[Layout]:
        """Layouts in their order. asked: those that have the buffers of all steps for these outputs; None: all."""
        each = self.passes[which]
        spared = {step.unless for step in each.steps if step.unless}
        return [
            layout
            for layout in each.layouts
            if layout.in_place == in_place
            and (asked is None or (layout.outputs.issuperset(asked) and not spared & layout.outputs.difference(asked)))
        ]

    def _room(self, name: str, env: Mapping[str, int]) -> int:
        buffer = self.buffers[name]
        if buffer.place == KEPT:
            return padded(buffer.bytes(env))
        return 0 if 0 in buffer.extents(env) else buffer.bytes(env)

    def launches(
        self, which: str, env: Mapping[str, int], asked: Collection[str], lent: Collection[str] | None = None, *,
        in_place: bool = False,
    ) -> list[LayerLaunch]:  # fmt: skip
        """The launches of a pass. lent: outputs in contiguous memory; None: all."""
        each = self.passes[which]
        tokens = env.get("capacity", env["T"])
        steps = each.queued(asked, in_place=in_place)
        scratch = self.scratch(which, asked, env, asked if lent is None else lent, in_place=in_place)[0]
        kept = self.kept(env)[0]
        kernels = [(step, key) for step in steps if (key := self.kernel(step.part, tokens)) is not None]

        def place(name: str) -> tuple[str, int]:
            buffer = self.buffers[name]
            if name in asked or name in each.inputs:
                return name, 0
            if buffer.place not in (ARGUMENT, KEPT, SCRATCH):
                return buffer.place, 0
            if name not in scratch and name not in kept:
                raise RecordError(f"passes.{which}: no layout has a place for {name}; the record is damaged")
            return scratch[name] if name in scratch else (KEPT, kept[name])

        return [
            LayerLaunch(
                step.part, key,
                {argument: place(name) for argument, name in step.arguments.items()},
                {argument: self.buffers[name].extents(env) for argument, name in step.arguments.items()}, joins,
            )
            for (step, key), joins in zip(kernels, joins_of(step for step, _ in kernels), strict=True)
        ]  # fmt: skip


def _known(names: Collection[str], known: Collection[str], where: str) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise RecordError(f"{where}: {', '.join(unknown)}: the record has nothing of that name")


def _dim(value: Any, where: str) -> tuple[str, Expr]:
    reader = RecordReader(value, where)
    return reader.string("name"), reader.expr("value")


def _window(value: Any, where: str) -> tuple[str, Expr]:
    reader = RecordReader(value, where)
    return reader.string("name"), reader.expr("bytes")


def _number(value: Any, where: str) -> float:
    if value in ("inf", "-inf"):
        return float(value)
    if type(value) not in (int, float):
        raise RecordError(f"{where}: {value!r}; it must be a number")
    return value  # type: ignore[no-any-return]


def _buffer(value: Any, where: str) -> tuple[str, LayerBuffer]:
    return RecordReader(value, where).string("name"), LayerBuffer.from_json(value, where)


def _rungs(parts: Mapping[str, Ladder]) -> dict[str, Any]:
    return {
        name: [
            {**({} if key is None else {"key": key}), **({} if most is None else {"tokens": most})}
            for most, key in ladder
        ]
        for name, ladder in parts.items()
    }


def _parts(value: Any, where: str) -> Mapping[str, Ladder]:
    return RecordReader({"parts": value}, where).mapping("parts", _ladder)


def _ladder(value: Any, where: str) -> Ladder:
    if not isinstance(value, list) or not value:
        raise RecordError(f"{where}: it must be an array of kernels, at least one")
    rungs = []
    for index, rung in enumerate(value):
        reader = RecordReader(rung, f"{where}[{index}]")
        rungs.append((reader.integer("tokens") if "tokens" in reader else None,
                      reader.string("key") if "key" in reader else None))  # fmt: skip
    counts = [most for most, _ in rungs if most is not None]
    if rungs[-1][0] is not None or len(counts) + 1 < len(rungs) or counts != sorted({*counts}):
        raise RecordError(f"{where}: the tokens of its kernels must ascend, and the last must be for any number")
    return tuple(rungs)


def _any(value: Any, where: str) -> Any:
    return value

"""The passes of a layer as data: buffers, steps in their order, layouts of memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fusekit.abi.codec import RecordReader, expression, integer, string
from fusekit.abi.expr import Expr, RecordError, evaluate, thaw
from fusekit.abi.layer_memory import Layout
from fusekit.dtypes import DTYPES

ARGUMENT, KEPT, SCRATCH = "argument", "kept", "scratch"


@dataclass(frozen=True)
class LayerBuffer:
    """place: "argument", "kept", "scratch", a window, or "checked" (see the exchange). offset: bytes from
    the begin of its window. words: what it holds, for people.
    """

    dtype: str
    shape: tuple[Expr, ...]
    place: str
    offset: Expr = 0
    words: str = ""

    def extents(self, env: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(evaluate(extent, env) for extent in self.shape)

    def bytes(self, env: Mapping[str, int]) -> int:
        """Its size; of at least one element, so that it has an address."""
        return prod(max(extent, 1) for extent in self.extents(env)) * DTYPES[self.dtype].bytes

    def to_json(self) -> dict[str, Any]:
        more = {"offset": thaw(self.offset), "words": self.words}
        return {"dtype": self.dtype, "shape": thaw(self.shape), "place": self.place} | {
            name: value for name, value in more.items() if value
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> LayerBuffer:
        reader = RecordReader(value, where)
        return cls(
            reader.string("dtype", tuple(DTYPES)), reader.array("shape", expression), reader.string("place"),
            reader.expr("offset") if "offset" in reader else 0, reader.string("words") if "words" in reader else "",
        )  # fmt: skip


@dataclass(frozen=True)
class LayerStep:
    """A launch of `part`. arguments: of the kernel, as buffers; writes: the buffers that it writes.

    outputs: those for which it is queued; None: always. needs, unless: an output that must be asked for, or must not.
    window: of a launch that all ranks make together, the one that they store into. on_side: it is queued on the side
    stream. awaits, apart: it waits for rows of other ranks; it never joins the side stream.
    """

    part: str
    arguments: Mapping[str, str]
    writes: tuple[str, ...]
    outputs: frozenset[str] | None = None
    needs: str = ""
    unless: str = ""
    window: str = ""
    on_side: bool = False
    awaits: bool = False
    apart: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """The buffers that it reads and does not write."""
        return frozenset(self.arguments.values()).difference(self.writes)

    def is_for(self, asked: Collection[str]) -> bool:
        """Whether a pass with the outputs `asked` queues it."""
        wanted = self.outputs is None or not self.outputs.isdisjoint(asked)
        return wanted and not (self.needs and self.needs not in asked) and self.unless not in asked

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"part": self.part, "arguments": dict(self.arguments), "writes": list(self.writes)}
        if self.outputs is not None:
            document["outputs"] = sorted(self.outputs)
        given = {name: getattr(self, name) for name in _CONDITIONS}
        return document | {name: value for name, value in given.items() if value}

    @classmethod
    def from_json(cls, value: Any, where: str) -> LayerStep:
        reader = RecordReader(value, where)
        conditions: dict[str, Any] = {name: reader.string(name) for name in _CONDITIONS[:3] if name in reader}
        conditions |= {name: reader.boolean(name) for name in _CONDITIONS[3:] if name in reader}
        return cls(
            reader.string("part"), reader.mapping("arguments", string), reader.array("writes", string),
            frozenset(reader.array("outputs", string)) if "outputs" in reader else None, **conditions,
        )  # fmt: skip


_CONDITIONS = ("needs", "unless", "window", "on_side", "awaits", "apart")


@dataclass(frozen=True)
class LayerPass:
    """inputs, outputs: what the caller gives. in_place: the order of `steps` in a pass that overwrites kept memory.
    adds: outputs that are added to what is there.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[LayerStep, ...]
    layouts: tuple[Layout, ...]
    in_place: tuple[int, ...] = ()
    adds: tuple[str, ...] = ()

    def queued(self, asked: Collection[str], *, in_place: bool = False) -> tuple[LayerStep, ...]:
        """The steps for the outputs `asked`."""
        order = [self.steps[index] for index in self.in_place] if in_place and self.in_place else self.steps
        return tuple(step for step in order if step.is_for(asked))

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": list(self.inputs), "outputs": list(self.outputs),
            "steps": [step.to_json() for step in self.steps], "layouts": [each.to_json() for each in self.layouts],
            **({"in_place": list(self.in_place)} if self.in_place else {}),
            **({"adds": list(self.adds)} if self.adds else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any, where: str) -> LayerPass:
        reader = RecordReader(value, where)
        result = cls(
            reader.array("inputs", string), reader.array("outputs", string), reader.array("steps", LayerStep.from_json),
            reader.array("layouts", Layout.from_json),
            reader.array("in_place", integer) if "in_place" in reader else (),
            reader.array("adds", string) if "adds" in reader else (),
        )  # fmt: skip
        if result.in_place and sorted(result.in_place) != [*range(len(result.steps))]:
            raise RecordError(f"{where}.in_place: it must have each of {len(result.steps)} steps once")
        return result


def joins_of(steps: Iterable[LayerStep]) -> list[bool]:
    """For each step, whether it first joins the side stream: because it reads what a launch there writes, or because an
    earlier step has awaited the rows anyway.
    """
    joins, pending, awaited = [], set[str](), False
    for step in steps:
        reads = not pending.isdisjoint(step.arguments.values())
        join = bool(pending) and not (step.on_side or step.awaits or step.apart) and (awaited or reads)
        joins.append(join)
        awaited = (awaited or step.awaits) and not join and not step.on_side
        pending = set() if join or step.on_side else pending
        pending |= set(step.writes) if step.on_side else set()
    return joins

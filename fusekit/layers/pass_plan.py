"""The plan of a pass: its kernels in order, and where each buffer lies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusekit.abi.layer_record import ARGUMENT, KEPT, SCRATCH
from fusekit.plan.layer import Buffer, Program, Step

if TYPE_CHECKING:
    from fusekit.runtime import Kernel


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A pass for one count of tokens and one set of outputs.

    steps: each with its kernel and buffers. joins: whether a step first joins the side stream. written: after how many
    steps each output is there. kept: bytes from the begin of `kept`; scratch: (argument, bytes from its begin).
    """

    outputs: Collection[str]
    steps: tuple[tuple[Step, Kernel, Mapping[str, Buffer]], ...]
    joins: Sequence[bool]
    written: Mapping[str, int]
    kept: Mapping[str, int]
    kept_bytes: int
    scratch: Mapping[str, tuple[str, int]]
    scratch_bytes: int
    dims: Mapping[str, int]

    def place(self, buffer: Buffer, given: Collection[str], inputs: Collection[str]) -> tuple[str, int] | None:
        """(the argument in whose memory the buffer lies, bytes from its begin); None: in a window."""
        name = buffer.name
        if name in given and (name in self.outputs or name in inputs):
            return name, 0
        if buffer.place not in (ARGUMENT, KEPT, SCRATCH):
            return None
        return self.scratch[name] if name in self.scratch else ("kept", self.kept[name])


def plan_pass(
    program: Program, which: str, tokens: int, outputs: set[str], compact: set[str], in_place: bool,
    kernel: Callable[[str, Mapping[str, int]], Kernel],
) -> PassPlan:  # fmt: skip
    """compact: of `outputs`, those that are contiguous. kernel: loads that of a part for dims."""
    dims = program.dims(tokens)
    steps: list[tuple[Step, Kernel, Mapping[str, Buffer]]] = []
    written: dict[str, int] = {}
    needed = program.needed(which, outputs, in_place=in_place)
    for step in needed:
        buffers = {argument: program.buffers[name] for argument, name in step.arguments.items()}
        steps.append((step, kernel(step.part, dims), buffers))
        written |= {name: len(steps) for name in outputs.intersection(step.writes.values())}
    scratch, scratch_bytes = program.scratch(which, outputs, dims, compact, in_place=in_place)
    kept, kept_bytes = program.kept(dims)
    return PassPlan(
        frozenset(outputs), tuple(steps), program.joins(needed), written, kept, kept_bytes, scratch,
        scratch_bytes, dims,
    )  # fmt: skip

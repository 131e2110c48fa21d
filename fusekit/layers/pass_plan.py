"""The plan of a pass: its kernels in order, and where each buffer lies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH, LayerStep, joins_of
from fusekit.abi.layer_record import LayerRecord

if TYPE_CHECKING:
    from fusekit.runtime import Kernel


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A pass for one count of tokens and one set of outputs.

    steps: each with its kernel. joins: whether a step first joins the side stream. written: after how many steps each
    output is there. kept: bytes from the begin of `kept`; scratch: (argument, bytes from its begin).
    """

    outputs: Collection[str]
    steps: tuple[tuple[LayerStep, Kernel], ...]
    joins: Sequence[bool]
    written: Mapping[str, int]
    kept: Mapping[str, int]
    kept_bytes: int
    scratch: Mapping[str, tuple[str, int]]
    scratch_bytes: int
    dims: Mapping[str, int]

    def place(
        self, record: LayerRecord, name: str, given: Collection[str], inputs: Collection[str]
    ) -> tuple[str, int] | None:
        """(the argument in whose memory a buffer lies, bytes from its begin); None: in a window."""
        if name in given and (name in self.outputs or name in inputs):
            return name, 0
        if record.buffers[name].place not in (ARGUMENT, KEPT, SCRATCH):
            return None
        return self.scratch[name] if name in self.scratch else ("kept", self.kept[name])


def pass_plan(
    record: LayerRecord, which: str, dims: Mapping[str, int], outputs: set[str], compact: set[str], in_place: bool,
    kernel: Callable[[str, Mapping[str, int]], Kernel | None],
) -> PassPlan:  # fmt: skip
    """compact: of `outputs`, those that are contiguous. kernel: loads that of a part for dims; None: it has none."""
    loaded = [(step, kernel(step.part, dims)) for step in record.passes[which].queued(outputs, in_place=in_place)]
    launched = tuple((step, each) for step, each in loaded if each is not None)
    queued = [step for step, _ in launched]
    written: dict[str, int] = {}
    for count, step in enumerate(queued, start=1):
        written |= dict.fromkeys(outputs.intersection(step.writes), count)
    scratch, scratch_bytes = record.scratch(which, outputs, dims, compact, in_place=in_place)
    kept, kept_bytes = record.kept(dims)
    return PassPlan(
        frozenset(outputs), launched, joins_of(queued), written, kept,
        kept_bytes, scratch, scratch_bytes, dims,
    )  # fmt: skip

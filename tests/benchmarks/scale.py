"""A model of a layer over R ranks: what its steps would take. It is arithmetic on measured constants, no measurement.

    python tests/benchmarks/run.py scale          prints the table of docs/expert-parallelism.md

Every rank has T tokens, whose K experts are any of X. A rank sends what other ranks need at the speed of one GPU's
links, whatever rank it is for, as NVSwitch gives it; tokens and experts are even. The products run at the rates that
one GPU had with as many rows. Steps follow one another, or ("at best") hide all of the smaller of both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import comb

# Two H200s: dispatch and combine of T = 128 to 32768 tokens of 4096 bytes, half of them to the other GPU.
BANDWIDTH = 335e3  # bytes a microsecond, of one GPU to the others
DISPATCH, COMBINE = 9.0, 14.0  # us without a byte
# One H200: moe-index took 15 us for 65,536 choices and 42 us for 524,288.
INDEX, CHOICE = 11.1, 59e-6  # us, us a choice
CAPACITY = 8192  # tokens of a rank
RANKS = (2, 4, 8, 64)


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of bf16. forward, backward: TFLOP/s of its passes on one H200, router and sums of rows included; of
    Qwen3-30B over four, what moves rows between them excluded.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    forward: float
    backward: float


SHAPES = (
    Shape("Qwen3-30B", 2048, 768, 128, 8, 637, 625),
    Shape("gpt-oss-120b", 2880, 2880, 128, 4, 597, 592),
    Shape("DeepSeek-V3", 7168, 2048, 256, 8, 619, 633),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one rank. bytes: that it sends in a dispatch of rows."""

    bytes: float
    dispatch: float
    combine: float
    index: float
    compute: float
    compute_backward: float
    returned: float
    flops: float

    @property
    def forward(self) -> float:
        """Step after step."""
        return self.dispatch + self.index + self.compute + self.combine

    @property
    def backward(self) -> float:
        """Step after step: dy, x again, the weights' gradients and dx."""
        return 2 * self.dispatch + self.compute_backward + self.returned + self.combine

    @property
    def forward_at_best(self) -> float:
        """All communication hidden behind the GEMMs, or the GEMMs behind it."""
        return self.index + max(self.compute, self.dispatch + self.combine)

    @property
    def backward_at_best(self) -> float:
        """The same backward."""
        return max(self.compute_backward, 2 * self.dispatch + self.returned + self.combine)


def remote(shape: Shape, ranks: int) -> float:
    """Ranks other than its own that a token goes to, on average."""
    others = shape.experts - shape.experts // ranks
    return (ranks - 1) * (1 - comb(others, shape.topk) / comb(shape.experts, shape.topk))


def times(shape: Shape, ranks: int, tokens: int = CAPACITY) -> Times:
    """Times of a layer over `ranks`, each with `tokens`."""
    rows = 2.0 * shape.hidden * tokens * remote(shape, ranks)
    choices = 4.0 * tokens * shape.topk * (ranks - 1)  # bytes: a rank tells every other one all of them
    flops = 6.0 * tokens * shape.topk * shape.hidden * shape.intermediate
    return Times(
        bytes=rows + 2 * choices,
        dispatch=DISPATCH + (rows + 2 * choices) / BANDWIDTH,
        combine=COMBINE + rows / BANDWIDTH,
        index=INDEX + CHOICE * ranks * tokens * shape.topk,
        compute=flops / shape.forward / 1e6,
        compute_backward=2 * flops / shape.backward / 1e6,
        returned=COMBINE + choices / BANDWIDTH,
        flops=flops,
    )


def windows(shape: Shape, ranks: int, tokens: int = CAPACITY) -> float:
    """Bytes of the windows of forward and backward, of one rank."""
    row, choice = 2.0 * shape.hidden, 4.0 * shape.topk
    return ranks * tokens * (3 * row + 5 * choice)


def table() -> str:
    """The model as a table of Markdown."""
    lines = [
        f"| layer, T = {CAPACITY} a rank | R | sent, MB | dispatch, us | combine, us | index, us | forward, ms"
        " | TFLOP/s | at best | backward, ms | TFLOP/s | at best | windows, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        for ranks in RANKS:
            one = times(shape, ranks)
            rates = [
                f"{one.flops * factor / each / 1e6:.0f}"
                for factor, each in ((1, one.forward), (1, one.forward_at_best), (2, one.backward),
                                     (2, one.backward_at_best))
            ]  # fmt: skip
            cells = [
                shape.name, ranks, f"{one.bytes / 1e6:.0f}", f"{one.dispatch:.0f}", f"{one.combine:.0f}",
                f"{one.index:.0f}", f"{one.forward / 1e3:.2f}", rates[0], rates[1], f"{one.backward / 1e3:.2f}",
                rates[2], rates[3], f"{windows(shape, ranks) / 1e9:.2f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    sys.stdout.write(f"{table()}\n")
    return 0

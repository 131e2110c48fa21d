"""Bytes and operations of a launch, and their share of a device's peak (fusekit.choice.gpus)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.choice.gpus import Gpu
from fusekit.dtypes import DTYPES
from fusekit.plan.operands import WGRAD
from fusekit.plan.quant import MX_SIDE, ROW, SIDE, Quant
from fusekit.reference.meaning import meaning
from fusekit.reference.operands.gather import CHOICES


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: `flops` multiply-adds counted as two, `bytes` that must cross the memory bus at least once."""

    flops: int
    bytes: int
    rate: float = 1.0  # of the tensor cores, in multiples of that of bf16

    def rates(self, ms: float) -> tuple[float, float]:
        """(TFLOP/s, GB/s) at `ms` milliseconds a launch."""
        return self.flops / ms * 1e-9, self.bytes / ms * 1e-6

    def share(self, ms: float, peak: Gpu) -> float:
        """The share of the peak that binds: tensor throughput or bandwidth, whichever needs longer at its peak."""
        return max(self.flops / (peak.tflops * self.rate * 1e9), self.bytes / (peak.gbs * 1e6)) / ms


def gemm_work(spec: Mapping[str, Any], *, rows: int, groups: int, busy: int, n: int, k: int) -> Work:
    """The work of a GEMM of `spec` (canonical form).

    rows: those that groups own. groups: all of them; `busy` have rows, and only their weights are read. n: columns of w
    (gate and up), of dy for a weight gradient. k: columns of x.
    """
    means, flops = meaning(spec), 2 * rows * n * k
    size = DTYPES[means.factors[0]].bytes
    read = rows if means.operands["gather"] == "none" else rows // CHOICES  # rows of the gathered operand
    if means.epilogue == WGRAD:
        # An empty group's zeros are written, but nothing is added to it.
        weights = 2 * 4 * busy if means.operands["accumulate"] else DTYPES[means.out_dtype].bytes * groups
        sums = (2 * 4 * busy if means.operands["accumulate"] else 4 * groups) if means.operands["dbias"] else 0
        moved = rows * n + read * k if means.operands["gather"] != "dy" else read * n + rows * k
        scales = 4 * -(-rows // SIDE) * (n + k) if means.quant.coded_inputs else 0
        return Work(flops, size * moved + scales + weights * n * k + sums * n, 2.0 / size)
    gated = means.activation.gated
    factors, moved, rate = size * read * k + DTYPES[means.factors[1]].bytes * busy * n * k, 0, 2.0 / size
    single = rows if means.operands["row_scale"] else 0  # float32 numbers
    if means.quant.coded_inputs:
        single += _scales(means.quant, rows, busy, n, k)
    elif means.quant.mx_weights:
        factors = size * read * k + busy * n * (k // 2 + k // MX_SIDE)
    elif means.quant.weights_alone:
        single += busy * -(-n // SIDE) * -(-k // SIDE)
    if means.activation.backward:
        width = 2 * n if gated else n
        moved += (1 + means.quant.wide) * rows * width + (rows * n if means.operands["recompute"] else 0)
        if means.quant.coded:
            factors += rows * width
            single += rows * -(-width // SIDE)
        single += (rows if means.operands["dprob"] else 0) + (groups * width if means.operands["dbias"] else 0)
        return Work(flops, factors + 2 * moved + 4 * single, rate)
    y = rows * (n // 2 if gated else n)
    coded = (1 + means.quant.transpose) * means.quant.coded  # orientations
    single += coded * -(-y // SIDE)
    factors += coded * y
    if means.out_dtype == "f32":
        single += y
    elif means.quant.wide:
        moved += y
    if means.operands["save_preactivation"]:
        moved += rows * n
    if means.operands["bias"]:
        moved += busy * n
    return Work(flops, factors + 2 * moved + 4 * single, rate)


def _scales(recipe: Quant, rows: int, busy: int, n: int, k: int) -> int:
    """Scales of x and of the weights that are read."""
    if recipe.by_block:
        blocks = -(-k // SIDE)
        return blocks * (rows + busy * -(-n // SIDE))
    return rows + busy * n if recipe.inputs == ROW else 1 + busy

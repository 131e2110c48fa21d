"""Trials of quantise: FP8 values and scales, bit for bit."""

from __future__ import annotations

import numpy as np

from fusekit.bench.roofline import Work
from fusekit.bench.trial import Trial, Verdict
from fusekit.dtypes import DTYPES
from fusekit.library import Library
from fusekit.plan.quantise import SQUARE
from fusekit.reference import quantise_check, quantise_inputs, quantise_output_shapes
from fusekit.runtime import Kernel

E4M3 = "e4m3"
DEFAULT = {"E": 4, "M": 4096, "K": 2880}  # where a spec has no problem


class QuantiseTrial(Trial):
    """A `Trial` of quantise, for `rows` (None: the spec's) rows."""

    def __init__(self, library: Library, kernel: Kernel, rows: int | None, seed: int, *, guarded: bool = False) -> None:
        spec = kernel.spec
        self._open(library, kernel)
        self.problem = {**DEFAULT, **(spec.get("problem") or {})}
        if rows is not None:
            self.problem["M"] = rows
        groups, count, columns = (int(self.problem[name]) for name in ("E", "M", "K"))
        tokens = int(self.problem.get("T", 0))
        if topk := int(spec.get("topk", 0)):
            count, tokens = max(count // topk, 1) * topk, 0
        self.inputs = quantise_inputs(spec, M=count, K=columns, E=groups, T=tokens, seed=seed)
        self.outputs = quantise_output_shapes(spec, M=count, K=columns, E=groups)
        elements = (groups if spec["blocks"] == SQUARE else 1) * count * columns
        read = sum(value.nbytes for value in self.inputs.values())
        fp8 = elements * sum(dtype == E4M3 for _, dtype in self.outputs.values())
        more = ((int(np.prod(shape)), dtype) for shape, dtype in self.outputs.values() if dtype != E4M3)
        self.work = Work(flops=0, bytes=read + fp8 + sum(size * DTYPES[dtype].bytes for size, dtype in more))
        self._place_all()

    def check(self) -> Verdict:
        """Compares every byte that `launch` wrote, or should not have written, with the reference."""
        outputs, problems = self.fetch()
        return Verdict.of([], problems + quantise_check(self.kernel.spec, self.inputs, outputs))

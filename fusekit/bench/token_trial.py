"""Trials of the router's operations and of those between router and GEMM: a row is a token."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fusekit.bench.roofline import Work
from fusekit.bench.trial import Trial, Verdict
from fusekit.dtypes import DTYPES
from fusekit.library import Library
from fusekit.plan.token_operation import INOUT, ROUTER
from fusekit.plan.tokens import TOKENS
from fusekit.reference import (
    Measurement,
    permutation_check,
    permutation_inputs,
    router_check,
    router_inputs,
    token_output_shapes,
)
from fusekit.reference.tokens import token_tensors
from fusekit.runtime import Kernel

DEFAULT_TOKENS, DEFAULT_HIDDEN = 4096, 2880  # where a spec has no problem
# The reference needs several float64 copies of what it looks at: so many elements of a row-by-row matrix at a time.
CHUNK = 4 * 10**6


def token_work(spec: Mapping[str, Any], *, tokens: int, hidden: int = 0, choices: int | None = None) -> Work:
    """The bytes that an operation of `spec` (canonical form) must move. choices: those that have a row; None: all.

    A backward pass through chosen experts alone needs their logits and gradients, not the rows that these lie in.
    """
    moved = 0
    for operand, shape, dtype in token_tensors(spec, T=tokens, H=hidden):
        if operand.sparse:
            shape = (tokens, spec["topk"])
        elif choices is not None and operand.shape.split()[0] in ("M", "TK"):
            shape = (choices, *shape[1:])
        passes = 2 if operand.role == INOUT else 1
        moved += passes * prod(shape) * DTYPES[dtype].bytes
    return Work(flops=0, bytes=moved)


class TokenTrial(Trial):
    """A `Trial` of a kernel that works token by token, for `rows` (None: the spec's) tokens.

    inputs: instead of random ones.
    """

    def __init__(
        self, library: Library, kernel: Kernel, rows: int | None, seed: int, inputs: Mapping[str, Any] | None = None,
        *, guarded: bool = False,
    ) -> None:  # fmt: skip
        spec = kernel.spec
        problem = spec.get("problem") or {"T": DEFAULT_TOKENS, "H": DEFAULT_HIDDEN}
        self._open(library, kernel)
        self.tokens = int(problem["T"]) if rows is None else rows
        self.routes = TOKENS[spec["op"]].family == ROUTER
        if self.routes:
            self.problem = {"T": self.tokens, "X": spec["experts"], "K": spec["topk"]}
            self.inputs = dict(inputs or router_inputs(spec, T=self.tokens, seed=seed))
            self.work = token_work(spec, tokens=self.tokens)
        else:
            dims = {"T": self.tokens, "H": int(problem["H"])}
            self.problem = {**dims, "K": spec["topk"]}
            self.inputs = dict(inputs or permutation_inputs(spec, T=dims["T"], H=dims["H"], seed=seed))
            placed = self.inputs.get("inverse", self.inputs.get("indices"))
            rows_there = None if placed is None else int(np.count_nonzero(placed >= 0))
            self.work = token_work(spec, tokens=self.tokens, hidden=dims["H"], choices=rows_there)
        self.outputs = token_output_shapes(spec, T=self.tokens, H=self.problem.get("H", 0))
        self._place_all()

    def check(self) -> Verdict:
        """Compares what `launch` wrote with the reference. What was not written still holds poison, and is wrong."""
        outputs, problems = self.fetch()
        measured: list[Measurement] = []
        if not self.routes:
            measured, wrong = permutation_check(self.kernel.spec, self.inputs, outputs)
            problems += wrong
        operands = TOKENS[self.kernel.spec["op"]].operands
        by_token = {operand.name for operand in operands if operand.shape.split()[:1] == ["T"]}
        step = max(1, CHUNK // self.problem.get("X", 1))
        if self.kernel.spec["op"] == "moe-aux-loss":  # one number for all tokens
            step = max(1, self.tokens)
        for start in range(0, max(1, self.tokens) if self.routes else 0, step):
            rows = slice(start, start + step)
            inputs = {name: array[rows] if name in by_token else array for name, array in self.inputs.items()}
            if "tokens" in inputs:
                inputs["tokens"] = min(step, self.tokens - start)
            part = {name: array[rows] for name, array in outputs.items()}
            more, wrong = router_check(self.kernel.spec, inputs, part)
            measured += more
            problems += [f"tokens from {start}: {line}" for line in wrong]
        return Verdict.of(measured, problems)

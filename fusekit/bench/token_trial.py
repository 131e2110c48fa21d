"""Trials of the router's operations and of those between router and GEMM: a row is a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusekit.bench.roofline import Work
from fusekit.bench.trial import Trial, Verdict
from fusekit.dtypes import DTYPES
from fusekit.plan.operations import OPERATIONS, ROUTER
from fusekit.reference import (
    Measurement,
    held,
    permutation_check,
    permutation_inputs,
    permutation_output_shapes,
    router_check,
    router_inputs,
    router_output_shapes,
)
from fusekit.runtime import Kernel, Library

DEFAULT_TOKENS, DEFAULT_HIDDEN = 4096, 2880  # where a spec has no problem
# The reference needs several float64 copies of what it looks at: so many elements of a row-by-row matrix at a time.
CHUNK = 4 * 10**6
ROWLESS = ("expert_bias", "counts", "grad_loss")  # inputs that all tokens share


def router_work(spec: Mapping[str, Any], *, tokens: int) -> Work:
    """The bytes that a router operation of `spec` (canonical form) must move.

    A backward pass through chosen experts alone needs their logits and gradients, not the rows that these lie in.
    """
    experts, topk, op = spec["experts"], spec["topk"], spec["op"]
    shapes = router_output_shapes(spec, T=tokens)
    moved = sum(int(np.prod(shape)) * DTYPES[dtype].bytes for shape, dtype in shapes.values())
    row = tokens * experts
    if op in ("moe-aux-loss", "moe-aux-loss-bwd"):
        read = row * DTYPES[spec["out_dtype"]].bytes if op == "moe-aux-loss" else 0
        return Work(flops=0, bytes=moved + read + 4 * experts)
    if op in ("router-topk", "router-aux-score"):
        moved += row * DTYPES[spec["dtype"]].bytes
    elif op == "router-topk-bwd":
        choices = {"bytes": row, "bits": tokens * -(-experts // 32) * 4, "none": tokens * topk * 4}
        gradients = DTYPES["f32" if spec["outputs"] == "compact" else spec["out_dtype"]].bytes
        logits = row if spec["pre_softmax"] else tokens * topk
        moved += choices[spec["routing_map"]] + tokens * topk * gradients + logits * DTYPES[spec["dtype"]].bytes
    else:
        moved += 2 * row * DTYPES[spec["out_dtype"]].bytes
        if spec["score_function"] != "softmax":
            moved += tokens * DTYPES["f32"].bytes
    return Work(flops=0, bytes=moved)


def permutation_work(spec: Mapping[str, Any], *, tokens: int, hidden: int, choices: int) -> Work:
    """The bytes that a permutation operation must move. choices: those that have a row."""
    size = DTYPES[spec["dtype"]].bytes if spec["dtype"] in DTYPES else 0
    token_rows, expert_rows = tokens * hidden * size, choices * hidden * size
    per_choice = 4 * tokens * spec["topk"]
    weights = per_choice if spec["weighted"] else 0
    scaling = per_choice if spec["scaled"] else 0
    moved = {
        "moe-index": 2 * per_choice + 4 * choices * (2 if spec.get("tokens") else 1) + 4 * spec["experts"],
        "moe-permute": token_rows + expert_rows + per_choice + 2 * weights + scaling,
        "moe-permute-bwd": 2 * token_rows + expert_rows + per_choice + 2 * weights,
        "moe-unpermute": token_rows + expert_rows + per_choice + weights,
        "moe-unpermute-bwd": token_rows + 2 * expert_rows + per_choice + 2 * weights,
    }
    return Work(flops=0, bytes=moved[spec["op"]])


class TokenTrial(Trial):
    """A `Trial` of a kernel that works token by token, for `rows` (None: the spec's) tokens.

    inputs: in place of made-up ones.
    """

    def __init__(
        self, library: Library, kernel: Kernel, rows: int | None, seed: int, inputs: Mapping[str, Any] | None = None
    ) -> None:
        spec = kernel.spec
        problem = spec.get("problem") or {"T": DEFAULT_TOKENS, "H": DEFAULT_HIDDEN}
        self._open(library, kernel)
        self.tokens = int(problem["T"]) if rows is None else rows
        self.routes = OPERATIONS[spec["op"]].family == ROUTER
        if self.routes:
            self.problem = {"T": self.tokens, "X": spec["experts"], "K": spec["topk"]}
            self.inputs = dict(inputs or router_inputs(spec, T=self.tokens, seed=seed))
            self.work = router_work(spec, tokens=self.tokens)
            self.outputs: dict[str, Any] = router_output_shapes(spec, T=self.tokens)
        else:
            dims = {"T": self.tokens, "H": int(problem["H"])}
            self.problem = {**dims, "K": spec["topk"]}
            self.inputs = dict(inputs or permutation_inputs(spec, T=dims["T"], H=dims["H"], seed=seed))
            placed = self.inputs["indices" if spec["op"] == "moe-index" else "inverse"]
            rows_there = int(np.count_nonzero(placed >= 0))
            self.work = permutation_work(spec, tokens=self.tokens, hidden=dims["H"], choices=rows_there)
            self.outputs = permutation_output_shapes(spec, **dims)
        self._place_all()

    def fetch(self) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
        """The outputs as they are on the device, and what was written around them."""
        outputs: dict[str, np.ndarray[Any, Any]] = {}
        problems: list[str] = []
        for name, (shape, dtype) in self.outputs.items():
            problems += self._around(name)
            outputs[name] = np.frombuffer(self.arrays[name].download(), held(dtype)).reshape(shape)
        return outputs, problems

    def check(self) -> Verdict:
        """Compares what `launch` wrote with the reference. What was not written still holds poison, and is wrong."""
        outputs, problems = self.fetch()
        measured: list[Measurement] = []
        if not self.routes:
            measured, wrong = permutation_check(self.kernel.spec, self.inputs, outputs)
            problems += wrong
        step = max(1, CHUNK // self.problem.get("X", 1))
        if self.kernel.spec["op"] == "moe-aux-loss":  # one number for all tokens
            step = max(1, self.tokens)
        for start in range(0, max(1, self.tokens) if self.routes else 0, step):
            rows = slice(start, start + step)
            inputs = {
                name: each if name in ROWLESS or np.ndim(each) == 0 else each[rows]
                for name, each in self.inputs.items()
            }
            if "tokens" in inputs:
                inputs["tokens"] = min(step, self.tokens - start)
            part = {name: each[rows] for name, each in outputs.items()}
            more, wrong = router_check(self.kernel.spec, inputs, part)
            measured += more
            problems += [f"tokens from {start}: {line}" for line in wrong]
        return Verdict.of(measured, problems)

"""A launch's outputs against the reference: all of them, or a sample where that would take too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.operations import OPERATIONS
from fusekit.reference import Measurement, expected, make_inputs, measure, row_ends, sample_rows, sample_weights
from fusekit.reference.meaning import meaning

# Up to so many multiply-adds the reference is computed whole, in about a second; beyond it, rows are sampled.
WHOLE = 2 * 10**9
# Up to so many elements of dw it may have, whatever they cost: each takes 50 bytes while it is compared.
WHOLE_ELEMENTS = 2 * 10**7
SAMPLED_ROWS = 192
# Columns at either end in which the first and last row of every group are compared.
EDGE = 32


class Inputs(dict[str, Any]):
    """Random inputs by argument name, and the reference's outputs for them so far."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.wanted: dict[Any, Any] = {}

    def check(
        self, spec: Mapping[str, Any], outputs: Mapping[str, Any], rows: Any = None, columns: Any = None
    ) -> list[Measurement]:
        """Measures outputs against the reference in these rows and columns, which is worked out once."""
        chosen = tuple(index if index is None else index.tobytes() for index in (rows, columns))
        if chosen not in self.wanted:
            self.wanted[chosen] = expected(spec, self, rows, columns)
        wanted = self.wanted[chosen].items()
        return [measure(name, want.of(np.asarray(outputs[name])), want) for name, want in wanted]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for inputs: equal for all variants of a kernel."""

    meaning: str
    spec: Mapping[str, Any] = field(compare=False)
    problem: Mapping[str, int] = field(compare=False)
    seed: int
    spare: int


@lru_cache(maxsize=1)  # they may take gigabytes
def _random(request: _Request) -> Inputs:
    e, m, n, k = (request.problem[name] for name in ("E", "M", "N", "K"))
    return Inputs(make_inputs(request.spec, E=e, M=m, N=n, K=k, seed=request.seed, spare=request.spare))


def inputs_of(spec: Mapping[str, Any], problem: Mapping[str, int], seed: int, spare: int) -> Inputs:
    """Random inputs of a kernel, kept from the last call for other variants of the same kernel."""
    return _random(_Request(repr((vars(meaning(spec)), sorted(problem.items()))), spec, problem, seed, spare))


def compare(
    spec: Mapping[str, Any], problem: Mapping[str, int], inputs: Inputs, outputs: Mapping[str, Any]
) -> list[Measurement]:
    """Measures whole output buffers of `spec` (canonical form).

    problem: E, M, N, K. inputs, outputs: arrays by argument name, as the reference takes them.
    """
    ends = row_ends(spec, inputs, problem["M"])
    wgrad = OPERATIONS[spec["op"]].reduces_rows
    elements = problem["E"] * problem["N"] * problem["K"]
    if int(ends[-1]) * problem["N"] * problem["K"] <= WHOLE and not (wgrad and elements > WHOLE_ELEMENTS):
        return inputs.check(spec, outputs)
    return _weights(spec, problem, inputs, outputs, ends) if wgrad else _rows(spec, problem, inputs, outputs, ends)


def _rows(
    spec: Mapping[str, Any], problem: Mapping[str, int], inputs: Inputs, outputs: Mapping[str, Any],
    ends: NDArray[np.int64],
) -> list[Measurement]:  # fmt: skip
    measured = inputs.check(spec, outputs, sample_rows(ends, SAMPLED_ROWS))
    if not {"y", "dz"} & outputs.keys():  # the output is FP8 alone
        return measured
    # Sampling widens whole weights, so it takes few groups. The edges of all of them are cheap in few columns.
    width = outputs["y" if "y" in outputs else "dz"].shape[1]
    if "y" not in outputs and spec["glu_layout"] != "none":
        width //= 2
    sizes = np.diff(ends, prepend=0)
    starts = ends[sizes > 0] - sizes[sizes > 0]
    rows = np.unique(np.concatenate([starts, ends[sizes > 0] - 1]))
    measured += inputs.check(spec, outputs, rows, _edges(width))
    if "dbias" in outputs:  # which takes all rows, and shows what any of them did
        few = np.unique([0, width // 3, width - 1])
        measured += inputs.check(spec, outputs, None, few)
    return measured


def _weights(
    spec: Mapping[str, Any], problem: Mapping[str, int], inputs: Inputs, outputs: Mapping[str, Any],
    ends: NDArray[np.int64],
) -> list[Measurement]:  # fmt: skip
    shape = (problem["E"], problem["N"], problem["K"])
    measured = inputs.check(spec, outputs, *sample_weights(ends, shape, SAMPLED_ROWS))
    # All groups, the corners of each: a row that went to a neighbour shows in every element of both.
    corners = np.unique([0, 1, shape[1] - 2, shape[1] - 1])
    rows = (np.arange(shape[0])[:, None] * shape[1] + corners).reshape(-1)
    return measured + inputs.check(spec, outputs, rows, _edges(shape[2]))


def _edges(extent: int) -> NDArray[np.int64]:
    """The first and last of `extent` indices."""
    return np.arange(extent) if extent <= 2 * EDGE else np.r_[0:EDGE, extent - EDGE : extent]

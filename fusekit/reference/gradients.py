"""What a backward epilogue has when its operands give their outputs, and float32 sums of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array
from fusekit.reference.wgrad import STEP, UNIT

Values = tuple[Array, Array]  # float64, and how far float32 may be from them


@dataclass(frozen=True, slots=True)
class Gradients:
    """For the ``rows`` and ``columns`` of da that were chosen; None: all of them. z_columns: those of dz.

    numbers: of the rows. shape: of dz, whole. ends: int64[E], the end row of each group. k: terms of an element of da.
    product: da * activation(z). y: row_scale * activation(z).
    limit: of the Frobenius norm of sums, where FP8 output decides it.
    """

    rows: NDArray[np.int64] | None
    columns: NDArray[np.int64] | None
    z_columns: NDArray[np.int64] | None
    numbers: NDArray[np.int64]
    shape: tuple[int, int]
    ends: NDArray[np.int64]
    k: int
    product: Values
    y: Values
    dz: Values
    limit: float | None = None

    def sums(self, terms: Values, groups: list[slice]) -> tuple[Array, Array, float]:
        """(value, error, bound of the Frobenius norm) of the sums of ``terms`` over each group of their rows.

        Errors of one sum are of either sign: four times the root of their squares, and the sum's own as ``wgrad`` has
        it.
        """
        value = np.zeros((len(groups), terms[0].shape[1]))
        slack = np.zeros_like(value)
        most = 0
        for index, group in enumerate(groups):
            part, error = terms[0][group], terms[1][group]
            steps = math.ceil(part.shape[0] / STEP) + math.ceil(self.k / STEP)
            most = max(most, steps)
            value[index] = part.sum(axis=0)
            rounding = UNIT * ((8 + 2 * math.sqrt(steps)) * np.abs(part).sum(axis=0) + steps * np.abs(value[index]))
            slack[index] = 4 * np.sqrt((error**2).sum(axis=0)) + rounding
        return value, slack, self.limit or UNIT * (32 + most)

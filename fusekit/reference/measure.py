"""How far a result is from the reference, and whether that is right.

Two bounds must hold. The relative Frobenius error of the whole tensor stays below ``FROBENIUS``: a bf16 rounding alone
costs 1.7e-3. And every element stays within ``2**(1-p) |ref| + c``, p being the bits of the format's significand
(2**-7 for bf16). c comes with the reference, element by element: it is the error that float32 arithmetic may make of
the products summed there, so that it is never a fixed tolerance that could hide a wrong row. A float32 result
is not rounded further, so both its bounds come from the sum alone, and its Frobenius bound comes with the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array, format_of, values

FROBENIUS = {"bf16": 2.5e-3, "fp16": 5.0e-4}


@dataclass(frozen=True, slots=True)
class Expected:
    """What one output must hold: float64 ``value`` and ``slack`` (c above) [R, C].

    They are those of the ``rows`` int64[R] and ``columns`` int64[C] (None: all) of the buffer, its leading dimensions
    taken as one. ``shape`` is the whole buffer's, empty if unknown. ``limit`` is the Frobenius bound of float32.
    """

    dtype: str
    rows: NDArray[np.int64]
    value: Array
    slack: Array
    columns: NDArray[np.int64] | None = None
    shape: tuple[int, ...] = ()
    limit: float | None = None

    def of(self, whole: Array) -> Array:
        """The elements of the ``whole`` buffer that ``value`` is about, [R, C]."""
        rows = self.table(whole)[self.rows]
        return rows if self.columns is None else rows[:, self.columns]

    def table(self, whole: Array) -> Array:
        """``whole`` as [rows, columns]."""
        return whole.reshape(-1, 1 if self._upright else whole.shape[-1])

    @property
    def _upright(self) -> bool:
        """Whether the buffer, of more than one column or a vector, is taken as one with a number for each row."""
        one = self.columns is None and self.value.shape[1] == 1
        return one and bool(self.shape) and (len(self.shape) == 1 or self.shape[-1] > 1)

    def only(self, keep: NDArray[np.bool_]) -> Expected:
        """The rows where ``keep`` bool[R] says so."""
        return replace(self, rows=self.rows[keep], value=self.value[keep], slack=self.slack[keep])

    def place(self, row: int, column: int) -> tuple[int, ...]:
        """Where element (row, column) of ``value`` lies in the buffer."""
        across = column if self.columns is None else int(self.columns[column])
        if self._upright:
            return tuple(int(index) for index in np.unravel_index(self.rows[row], self.shape))
        if len(self.shape) == 1:
            return (across,)
        leading = self.shape[:-1] or (int(self.rows[row]) + 1,)
        return (*(int(index) for index in np.unravel_index(self.rows[row], leading)), across)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One output's error.

    ``fro`` is ||got - ref|| / ||ref||; ``max_scaled`` the largest error in units of the element's bound, so at most 1
    is right; ``wrong`` counts elements over their bound, NaN for a number and number for a NaN among them. ``worst`` is
    the index of the worst element in the whole buffer, None if nothing was compared; ``got`` and ``want`` are the
    values there.
    """

    name: str
    ok: bool
    fro: float
    fro_limit: float
    max_scaled: float
    wrong: int
    elements: int
    worst: tuple[int, ...] | None
    got: float
    want: float

    def __str__(self) -> str:
        if self.worst is None:
            return f"{self.name}: nothing to compare"
        axes = ("group", "row", "column")[-len(self.worst) :] if len(self.worst) > 1 else ("element",)
        place = " ".join(f"{axis} {index}" for axis, index in zip(axes, self.worst, strict=True))
        return (
            f"{self.name}: {'ok' if self.ok else 'WRONG'}, relative Frobenius error {self.fro:.3g} "
            f"(limit {self.fro_limit:.3g}), {self.wrong} of {self.elements} elements over their bound, worst at "
            f"{place}: {self.got:.7g} for {self.want:.7g}, {self.max_scaled:.3g} of its bound"
        )


def measure(name: str, got: Array, want: Expected) -> Measurement:
    """Compare ``got`` [R, C] (uint16 bits of ``want.dtype``, or floats) with the reference ``want``."""
    if got.shape != want.value.shape:
        raise ValueError(f"{name} has shape {got.shape}; the reference has {want.value.shape}")
    limit = FROBENIUS[want.dtype] if want.limit is None else want.limit
    if not got.size:
        return Measurement(name, True, 0.0, limit, 0.0, 0, 0, None, np.nan, np.nan)
    numbers = values(got, want.dtype).astype(np.float64)
    scaled = _scaled(numbers, want)
    row, column = np.unravel_index(int(np.argmax(scaled)), scaled.shape)
    wrong = int(np.count_nonzero(scaled > 1.0))
    fro, negligible = _frobenius(numbers, want)
    return Measurement(
        name=name,
        ok=wrong == 0 and (negligible or fro <= limit),
        fro=fro,
        fro_limit=limit,
        max_scaled=float(scaled[row, column]),
        wrong=wrong,
        elements=got.size,
        worst=want.place(int(row), int(column)),
        got=float(numbers[row, column]),
        want=float(want.value[row, column]),
    )


def bound(want: Expected) -> Array:
    """How far an element may be from the reference [R, C]."""
    form = format_of(want.dtype)
    return np.abs(want.value) * form.eps + want.slack + form.smallest


def _scaled(numbers: Array, want: Expected) -> Array:
    """|got - ref| in units of the bound [R, C]; infinite where one is NaN or infinite and the other is not that."""
    form = format_of(want.dtype)
    with np.errstate(all="ignore"):
        room = bound(want)
        scaled = np.abs(numbers - want.value) / room
        # A NaN or an infinity has no distance: it is right where the reference has it too, or rounds to infinity.
        overflow = np.abs(want.value) + room > form.max
        same = (np.isnan(numbers) & np.isnan(want.value)) | (
            np.isinf(numbers) & (np.sign(numbers) == np.sign(want.value)) & overflow
        )
        odd = ~np.isfinite(scaled) | ~np.isfinite(want.value) | ~np.isfinite(numbers)
    return np.where(odd, np.where(same, 0.0, np.inf), scaled)


def _frobenius(numbers: Array, want: Expected) -> tuple[float, bool]:
    """The relative error over elements finite on both sides, and whether the reference is all rounding noise."""
    both = np.isfinite(numbers) & np.isfinite(want.value)
    reference = np.where(both, want.value, 0.0)
    error = float(np.linalg.norm(np.where(both, numbers, 0.0) - reference))
    size = float(np.linalg.norm(reference))
    noise = float(np.linalg.norm(np.where(both, want.slack, 0.0)))
    if size == 0.0:
        return (0.0 if error == 0.0 else np.inf), True
    return error / size, size <= noise

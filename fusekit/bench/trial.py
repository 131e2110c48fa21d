"""One kernel on random inputs: buffers with guards, launch, comparison with the reference, timing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusekit.abi import TensorArgument
from fusekit.bench.compare import Inputs, compare, inputs_of
from fusekit.bench.roofline import Work, gemm_work
from fusekit.bench.timing import Timing, own_stream, time_launch
from fusekit.errors import UsageError
from fusekit.library import Library
from fusekit.plan.operations import OPERATIONS
from fusekit.reference import (
    BY_GROUP,
    POISON,
    Measurement,
    coded_check,
    held,
    order_check,
    output_shapes,
    poisoned,
    row_ends,
)
from fusekit.reference.fp8 import coded, largest_shapes
from fusekit.reference.meaning import meaning
from fusekit.runtime import DeviceArray, Kernel

# Bytes of poison before and after every output; a multiple of every alignment that a record asks for.
GUARD = 4096
# Rows that no group owns, when the result is checked: they must stay as they were.
SPARE = 5
BLOCKS = 64  # of 128 tokens, whose FP8 output is compared


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error` is {"fro", "max_scaled"}, the worst over outputs, None where there is no reference; `problems` says in
    words what is wrong.
    """

    ok: bool
    error: dict[str, float] | None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, measured: Sequence[Measurement], problems: Sequence[str]) -> Verdict:
        """From what was compared and what else is wrong."""
        wrong = [*problems, *(str(distance) for distance in measured if not distance.ok)]
        error = {
            "fro": max((distance.fro for distance in measured), default=0.0),
            "max_scaled": max((distance.max_scaled for distance in measured), default=0.0),
        }
        return cls(not wrong, error, wrong)


class Trial:
    """Inputs on host and device, outputs poisoned, for `kernel` and `rows` (None: the spec's) rows.

    `guarded` leaves spare rows after the last group of a grouped kernel. An output that accumulates begins as a random
    input.
    """

    notes: tuple[str, ...] = ()  # on every result, in words
    inputs: dict[str, Any]
    outputs: dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype

    def __init__(self, library: Library, kernel: Kernel, rows: int | None, seed: int, *, guarded: bool) -> None:
        self._open(library, kernel)
        spec = kernel.spec
        self.problem = _problem(spec, rows)
        most = next(dim.maximum for dim in kernel.record.dims if dim.name in ("M", "P"))
        if self.problem["M"] > most:
            raise UsageError(f"M = {self.problem['M']} rows; {kernel.name} takes at most {most}; give fewer --rows")
        dims = self.problem
        spare = min(SPARE, dims["M"] // 2) if guarded and OPERATIONS[spec["op"]].ragged else 0
        self.inputs = inputs_of(spec, dims, seed, spare)
        ends = row_ends(spec, self.inputs, dims["M"])
        self.owned = int(ends[-1])
        busy = int(np.count_nonzero(np.diff(ends, prepend=0)))
        self.work: Work = gemm_work(spec, rows=self.owned, groups=dims["E"], busy=busy, n=dims["N"], k=dims["K"])
        self.outputs = output_shapes(spec, **dims)
        self._place_all()

    def _open(self, library: Library, kernel: Kernel) -> None:
        self.kernel = kernel
        self.devices = library.devices
        self.device = self.devices.get(kernel.device)
        self.arrays: dict[str, DeviceArray] = {}

    def _place_all(self) -> None:
        try:
            for tensor in self.kernel.record.tensors:
                self._place(tensor)
        except BaseException:
            self.close()
            raise

    def _place(self, tensor: TensorArgument) -> None:
        if tensor.name in self.outputs:
            shape, dtype = self.outputs[tensor.name]
            array = DeviceArray(self.devices, shape, dtype, self.device.ordinal, offset=GUARD, tail=GUARD)
            self.arrays[tensor.name] = array
            array.fill(POISON & 0xFF)
            if tensor.name in self.inputs:
                array.upload(self.inputs[tensor.name])
            return
        if tensor.name not in self.inputs:
            raise UsageError(
                f"{self.kernel.name} takes {tensor.name}, which no operand has that is installed here; install the "
                "package that it was built with"
            )
        value = np.ascontiguousarray(self.inputs[tensor.name])
        self.arrays[tensor.name] = DeviceArray(self.devices, value.shape, tensor.dtype, self.device.ordinal)
        self.arrays[tensor.name].upload(value)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call: arrays, and random scalars where the spec has no defaults."""
        scalars = {
            scalar.name: self.inputs[scalar.name] for scalar in self.kernel.record.scalars if scalar.name in self.inputs
        }
        return {**self.arrays, **scalars}

    def launch(self, margin: int | None) -> None:
        """Launches once and waits."""
        self.kernel(**self.arguments, cluster_margin=margin)
        self.devices.synchronize(self.device, f"{self.kernel.name}: cuCtxSynchronize")

    def time(self, margin: int | None) -> Timing:
        """Times a bound launch on a stream of its own."""
        with own_stream(self.devices, self.device) as stream:
            return time_launch(
                self.devices, self.device, self.kernel.bind(**self.arguments, cluster_margin=margin), stream
            )

    def check(self) -> Verdict:
        """Compares what `launch` wrote with the reference, and looks at every byte that it had no business with."""
        problems: list[str] = []
        assert isinstance(self.inputs, Inputs)
        means = meaning(self.kernel.spec)
        fp8 = {name for result in coded(means) for name in result.outputs} | largest_shapes(means, 1).keys()
        exact = fp8 | {name for name, (_, dtype) in self.outputs.items() if dtype == "i32"}
        outputs, around = self.fetch(exact)
        outputs |= {name: self._fetch(name, problems) for name in self.outputs.keys() - exact}
        problems += around + order_check(self.kernel.spec, self.inputs, outputs)
        problems += coded_check(self.kernel.spec, self.inputs, outputs, BLOCKS) if fp8 else []
        return Verdict.of(compare(self.kernel.spec, self.problem, self.inputs, outputs), problems)

    def fetch(self, names: Iterable[str] | None = None) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
        """The outputs (None: all) as they are on the device, and what was written around them."""
        wanted = list(self.outputs if names is None else names)
        around = [line for name in wanted for line in written_around(name, self.arrays[name])]
        return {name: self._values(name) for name in wanted}, around

    def _values(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        shape, dtype = self.outputs[name]
        return np.frombuffer(self.arrays[name].download(), held(dtype)).reshape(shape)

    def _fetch(self, name: str, problems: list[str]) -> np.ndarray[Any, np.dtype[Any]]:
        problems += written_around(name, self.arrays[name])
        values = self._values(name)
        untouched = poisoned(values)
        if name not in BY_GROUP:
            written = ~untouched[self.owned :]
            if written.any():
                row = self.owned + int(np.argwhere(written)[0, 0])
                problems.append(f"{name}: row {row}, which no group owns, was written to")
            untouched = untouched[: self.owned]
        if untouched.any():
            first = ", ".join(map(str, np.argwhere(untouched)[0]))
            problems.append(f"{name}: {int(untouched.sum())} elements were not written, the first at {first}")
        return values

    def close(self) -> None:
        """Frees device memory and unloads the kernel."""
        while self.arrays:
            self.arrays.popitem()[1].free()
        self.kernel.unload()


def written_around(name: str, array: DeviceArray) -> list[str]:
    """Messages of writes around the poisoned buffer `name`, which has `GUARD` more bytes at either end."""
    return [
        f"{name}: the {GUARD} bytes {where} the buffer were written to"
        for where, start in (("before", -GUARD), ("after", array.nbytes))
        if set(array.download(start, GUARD)) != {POISON & 0xFF}
    ]


def _problem(spec: dict[str, Any], rows: int | None) -> dict[str, int]:
    """E, M, N, K: the spec's, or a few tiles where it has none."""
    problem = spec.get("problem")
    if problem is None:
        tile_m, tile_n = spec["tile"]
        operation = OPERATIONS[spec["op"]]
        groups = 4 if operation.ragged else 1
        if operation.reduces_rows:
            problem = {"E": groups, "M": 2048, "N": 2 * tile_m, "K": 2 * tile_n}
        else:
            problem = {"E": groups, "M": 8 * tile_m, "N": 2 * math.lcm(tile_n, 64), "K": 512}
    problem = {name: int(problem[name]) for name in ("E", "M", "N", "K")}
    if rows is not None:
        problem["M"] = rows
    return problem

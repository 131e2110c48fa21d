"""Trials of kernels that are not fusekit's: random inputs of the shapes and roles that the launch record has.

What a foreign kernel computes is not known here, so nothing is compared without a reference of the caller's; an
operation of another package may have one. Floating-point inputs are random. Integers are
zeros: they may be indices, of which no other is known to be inside of what they point into.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.abi import Dim, LaunchRecord, ScalarArgument, TensorArgument, evaluate
from fusekit.bench.arrays import BLOCK
from fusekit.bench.roofline import Work
from fusekit.bench.trial import GUARD, Trial, Verdict, written_around
from fusekit.dtypes import DTYPES, FLOAT
from fusekit.errors import UsageError
from fusekit.library import Library
from fusekit.plan.operations import operation
from fusekit.reference import POISON, Expected, Measurement, decode, held, measure
from fusekit.reference.formats import bits
from fusekit.reference.measure import FROBENIUS
from fusekit.runtime import DeviceArray, Devices, Kernel

ROUNDED = 2.0**-14  # of a result, that float32 arithmetic may be off
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING, as launches want their events
EXTENT = 1024  # of a dim that nobody gave, where all tensors together then take at most
MOST_BYTES = 1 << 30
NOTE = "not compared: a foreign kernel has no reference; looked at, with --check, are the bytes around its outputs"
Reference = Callable[..., Mapping[str, Any]]  # of the spec and the arguments by name, the outputs by name


class Strided(DeviceArray):
    """A tensor with strides of its own. What fills or reads it sees its memory, gaps included, as flat."""

    def __init__(self, devices: Devices, tensor: TensorArgument, dims: Mapping[str, int], device: int) -> None:
        shape, strides = layout(tensor, dims)
        size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        super().__init__(devices, (size if all(shape) else 0,), tensor.dtype, device, offset=GUARD, tail=GUARD)
        self.shape, self._strides = shape, strides


class ForeignTrial(Trial):
    """A `Trial` of a kernel with `op = "extern"`, or of another package's operation without a trial.

    sizes: of dims and scalars by name; None, or a name left out: a size that fits into memory, and 1 for a scalar
    without a default. reference: MODULE:FUNCTION, see `load_reference`.
    """

    def __init__(
        self, library: Library, kernel: Kernel, rows: int | None, seed: int, sizes: Mapping[str, float] | None = None,
        reference: str | None = None,
    ) -> None:  # fmt: skip
        self._open(library, kernel)
        self._reference, self.notes = _reference(kernel.spec.get("op"))
        self._sums = reference is not None
        if reference is not None:
            outputs = [tensor.name for tensor in kernel.record.tensors if tensor.written]
            self._reference, self.notes = load_reference(reference, outputs), ()
        given = dict(sizes or {}) if rows is None else {"M": rows, **(sizes or {})}
        record = kernel.record
        scalars = {scalar.name: scalar for scalar in record.scalars}
        known = [dim.name for dim in record.dims] + [*scalars]
        for name, value in given.items():
            if name not in known:
                raise UsageError(
                    f"{name} = {value}: {kernel.name} has no such dim or scalar; it has {', '.join(known)}"
                )
        self.problem = extents(record, {name: value for name, value in given.items() if name not in scalars})
        self.inputs = {
            name: _number(scalar, given.get(name, 1))
            for name, scalar in scalars.items()
            if name in given or (scalar.default is None and name not in kernel.defaults)
        }
        self._events = {name: self._event() for name in record.handles - given.keys()}
        self.inputs |= {name: int(event) for name, event in self._events.items()}
        self._seed = seed
        self._before: dict[str, NDArray[Any]] = {}  # what the reference is given
        moved = sum(_bytes(tensor, self.problem) * (1 + (tensor.role == "inout")) for tensor in record.tensors)
        self.work = Work(flops=0, bytes=moved)
        self._place_all()

    def _event(self) -> Any:
        driver = self.devices.driver
        with self.devices.active(self.device):
            return driver.check(driver.api.cuEventCreate(_UNTIMED), "cuEventCreate")

    def close(self) -> None:
        super().close()
        for event in self._events.values():
            self.devices.driver.api.cuEventDestroy(event)
        self._events.clear()

    def _place(self, tensor: TensorArgument) -> None:
        array = self.arrays[tensor.name] = Strided(self.devices, tensor, self.problem, self.device.ordinal)
        array.fill(POISON & 0xFF)
        if tensor.role != "output":
            array.upload_repeated(numbers(tensor.dtype, array.nbytes, self._seed + sum(tensor.name.encode())))
            if self._reference is not None:
                self._before[tensor.name] = self._values_of(tensor)

    def _values_of(self, tensor: TensorArgument) -> NDArray[Any]:
        """The tensor's numbers: float64 for 16-bit types, else as NumPy holds it."""
        array, dtype = self.arrays[tensor.name], held(tensor.dtype)
        assert isinstance(array, Strided)
        flat = np.frombuffer(array.download(), dtype)
        strides = tuple(dtype.itemsize * stride for stride in array._strides)
        whole = np.lib.stride_tricks.as_strided(flat, array.shape, strides, writeable=False)
        return decode(whole, tensor.dtype).astype(np.float64) if tensor.dtype in ("bf16", "fp16") else whole

    def check(self) -> Verdict:
        """Looks at the bytes around what the kernel writes, and compares its outputs where the operation has a
        reference.
        """
        written = [tensor for tensor in self.kernel.record.tensors if tensor.written]
        problems = [problem for tensor in written for problem in written_around(tensor.name, self.arrays[tensor.name])]
        if self._reference is None:
            return Verdict(not problems, None, problems)
        defaults = {scalar.name: scalar.default for scalar in self.kernel.record.scalars} | {**self.kernel.defaults}
        scalars = {name: defaults[name] for name in (each.name for each in self.kernel.record.scalars)} | self.inputs
        wanted = self._reference(self.kernel.spec, {**scalars, **self._before})
        measured = [_measured(tensor, self._values_of(tensor), wanted, sums=self._sums) for tensor in written]
        return Verdict.of(measured, problems)


def _reference(op: Any) -> tuple[Callable[..., Mapping[str, Any]] | None, tuple[str, ...]]:
    """(what the results of an operation of another package must be, and if nobody says it, a note on that)."""
    row = operation(op)
    if row is None:
        return None, (f"not compared: op {op} is of a package that is not installed here",)
    if row.reference:
        return row.load("reference"), ()
    return None, (NOTE if not row.package else f"not compared: {row.lacks('reference')}",)


def load_reference(text: str, outputs: Sequence[str]) -> Reference:
    """The function `text` (MODULE:FUNCTION) of an importable module or one of the current folder.

    It is called with every tensor that the kernel reads and every scalar, by name: 16-bit numbers as float64, others as
    NumPy holds them, FP8 as bytes. It returns the outputs: an array if there is one, else a mapping by name. Raises
    UsageError, as the function's call does.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"--reference {text}: it must be MODULE:FUNCTION, such as --reference fusion:reference")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        function = getattr(import_module(module), name)
    except Exception as error:
        raise UsageError(f"--reference {text} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise UsageError(f"--reference {text} is no function; name one that returns what the kernel should compute")

    def reference(spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise UsageError(f"--reference {text}: {error}; it must take {', '.join(arguments)}") from error
        try:
            result = function(**arguments)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise UsageError(
                f"--reference {text} failed at {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(result, Mapping):
            return result
        if len(outputs) == 1:
            return {outputs[0]: result}
        raise UsageError(f"--reference {text}: it must return a mapping with the outputs {', '.join(outputs)}")

    return reference


def _measured(
    tensor: TensorArgument, got: NDArray[Any], wanted: Mapping[str, Any], *, sums: bool = False
) -> Measurement:
    """One output against the reference, but for ROUNDED of float32 arithmetic. sums: terms may cancel, so that the
    error is one of typical results, too.
    """
    if tensor.name not in wanted:
        raise UsageError(f"{tensor.name}: the reference gives {', '.join(wanted)}; it must give every output")
    value = np.asarray(wanted[tensor.name], np.float64)
    if value.shape != got.shape:
        raise UsageError(f"{tensor.name}: the reference gives the shape {value.shape}; it must be {got.shape}")
    table = value.reshape(-1, got.shape[-1])
    finite = table[np.isfinite(table)]
    typical = float(np.sqrt(np.mean(np.square(finite)))) if sums and finite.size else 0.0
    want = Expected(
        tensor.dtype, np.arange(len(table)), table, ROUNDED * (np.abs(table) + typical), shape=got.shape,
        limit=None if tensor.dtype in FROBENIUS else ROUNDED,
    )  # fmt: skip
    return measure(tensor.name, want.of(np.asarray(got, np.float64)), want)


def extents(record: LaunchRecord, given: Mapping[str, float]) -> dict[str, int]:
    """The value of every dim of `record`: as given, or one size, halved until all tensors fit into memory."""
    size = EXTENT
    while True:
        extents = {dim.name: _extent(dim, given.get(dim.name), size) for dim in record.dims}
        if size == 1 or sum(_bytes(tensor, extents) for tensor in record.tensors) <= MOST_BYTES:
            return extents
        size //= 2


def _extent(dim: Dim, given: float | None, size: int) -> int:
    if given is None:
        least = -(-dim.minimum // dim.divisor) * dim.divisor
        return min(max(size // dim.divisor * dim.divisor, least, dim.divisor), dim.maximum // dim.divisor * dim.divisor)
    if given != int(given) or int(given) % dim.divisor or not dim.minimum <= given <= dim.maximum:
        raise UsageError(
            f"{dim.name} = {given:g}; it must be a multiple of {dim.divisor} from {dim.minimum} to {dim.maximum}"
        )
    return int(given)


def _number(scalar: ScalarArgument, value: float) -> float | int:
    return int(value) if scalar.is_integer and value == int(value) else value


def layout(tensor: TensorArgument, dims: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides in elements): strides that the record leaves open are those of a row-major tensor around the ones
    that it fixes, rounded up to their divisor."""
    shape = tuple(evaluate(extent, dims) for extent in tensor.shape)
    free = [index for index in range(tensor.rank) if tensor.reads_stride(index)]
    strides = [0 if index in free else evaluate(stride, dims) for index, stride in enumerate(tensor.strides)]
    span = max((max(shape[index], 1) * stride for index, stride in enumerate(strides) if index not in free), default=1)
    for index in reversed(free):
        strides[index] = -(-span // tensor.stride_divisor) * tensor.stride_divisor
        span = max(shape[index], 1) * strides[index]
    return shape, tuple(strides)


def _bytes(tensor: TensorArgument, dims: Mapping[str, int]) -> int:
    return DTYPES[tensor.dtype].bytes * prod(evaluate(extent, dims) for extent in tensor.shape)


def numbers(dtype: str, nbytes: int, seed: int) -> NDArray[Any]:
    """A block of at most `nbytes` bytes: random numbers of a floating-point type, none zero; zeros of an integer."""
    row = DTYPES[dtype]
    count = min(nbytes // row.bytes, BLOCK)
    rng = np.random.default_rng(seed)
    if row.kind != FLOAT:
        return np.zeros(count * row.bytes, np.uint8)
    if row.bits == 16:
        return bits((count,), dtype, seed)
    if row.bits > 16:
        return rng.uniform(0.25, 1.0, count).astype(row.array)
    fp8 = rng.integers(0, 256, count, np.uint8)
    if row.packed > 1:  # every code is a number
        return fp8
    # A sign, an exponent a little below 1, any mantissa; scales have neither sign nor mantissa, and are 1.
    fraction = row.significand - 1
    kept = 0x80 | (1 << fraction) - 1 if fraction else 0
    return (fp8 & np.uint8(kept)) | np.uint8(-row.lowest << fraction)

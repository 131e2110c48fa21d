"""From a case to buffers, and from buffers to a verdict. Pure NumPy: tested on the CPU with a stand-in for the kernel.

Every tensor lies in a buffer of its own between guards. All that a kernel must not read is NaN (guards, padding, spare
rows), all that it must not write, and all that it must, holds the poison 0xFFFF beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusekit import reference
from fusekit.spec import KernelSpec

from .cases import Case

# Bytes before and after a tensor. No tensor is better aligned than a launch demands: matrices lie 16 bytes past a
# multiple of 32, the others one element further.
GUARD = 1040
VECTORS = ("offsets", "alpha", "bias", "row_scale")
DTYPES = {"bf16": np.uint16, "fp16": np.uint16, "f32": np.float32, "i32": np.int32}


@dataclass(frozen=True)
class Buffer:
    """A tensor that begins ``guard`` bytes into its allocation ``image``, uint8; strides are in elements."""

    image: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    guard: int = GUARD

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def array(self) -> np.ndarray:
        """The tensor's elements (16-bit floats as uint16); writing changes the image."""
        kind = np.dtype(DTYPES[self.dtype])
        strides = tuple(stride * kind.itemsize for stride in self.strides)
        return np.ndarray(self.shape, kind, self.image.data, self.guard, strides)

    def fresh(self) -> Buffer:
        """The same buffer, all poison."""
        return replace(self, image=np.full_like(self.image, 0xFF))


@dataclass(frozen=True)
class Launch:
    """A case ready to run: the kernel's arguments, the names of those it writes, and what the reference needs."""

    spec: KernelSpec
    case: Case
    arguments: dict[str, Buffer | float]
    outputs: tuple[str, ...]
    inputs: dict[str, Any]

    def fresh(self) -> Launch:
        """The same launch with new outputs: poisoned, or what they held before for one that is added to."""
        fresh = {name: self.arguments[name].fresh() for name in self.outputs}
        for name in fresh.keys() & self.inputs.keys():
            fresh[name].array[...] = self.inputs[name]
        return replace(self, arguments=self.arguments | fresh)


def guarded(
    shape: tuple[int, ...], dtype: str, pad: int = 0, data: np.ndarray | None = None, guard: int = GUARD
) -> Buffer:
    """A buffer of 0xFF bytes with rows ``pad`` elements longer than the shape says; ``data`` goes into the tensor."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, extent * strides[0] + (pad if len(strides) == 1 else 0))
    elements = strides[0] * shape[0]
    image = np.full(guard + elements * np.dtype(DTYPES[dtype]).itemsize + GUARD, 0xFF, np.uint8)
    buffer = Buffer(image, dtype, shape, tuple(strides), guard)
    if data is not None:
        buffer.array[...] = data
    return buffer


def prepare(spec: KernelSpec, case: Case, seed: int = 0) -> Launch:
    """Made-up inputs for the case, and poisoned outputs."""
    rows = case.rows + case.spare
    inputs = reference.make_inputs(
        spec, E=len(case.sizes), M=rows, N=case.n, K=case.k, seed=seed, sizes=case.sizes, spare=case.spare
    )
    if case.loud:
        inputs["x"] += np.uint16(3 << (7 if spec.dtype == "bf16" else 10))
    for name in inputs.keys() & {"x", "dy"}:
        inputs[name][case.rows :] = reference.POISON
        if case.nan_group is not None:
            inputs[name][_rows_of(case, case.nan_group)] = reference.POISON
    if case.nan_empty_weights:
        inputs["w"][[group for group, size in enumerate(case.sizes) if not size]] = reference.POISON
    if "row_scale" in inputs:
        inputs["row_scale"][case.rows :] = np.nan
    inputs |= case.scalars
    shapes = reference.output_shapes(spec, E=len(case.sizes), M=rows, N=case.n, K=case.k)
    arguments: dict[str, Buffer | float] = {}
    for name, value in inputs.items():
        if name in shapes:
            continue
        if isinstance(value, float):
            arguments[name] = value
        else:
            guard = GUARD + value.itemsize if name in VECTORS else GUARD
            padded = 0 if name in VECTORS else case.pad
            arguments[name] = guarded(value.shape, _dtype_of(spec, name), padded, value, guard)
    for name, (shape, dtype) in shapes.items():
        arguments[name] = guarded(shape, dtype, case.pad, inputs.get(name))
    return Launch(spec, case, arguments, tuple(shapes), inputs)


def faults(launch: Launch) -> list[str]:
    """What is wrong with the outputs after the launch, one line each; empty if all is right."""
    case, found = launch.case, []
    wgrad = launch.spec.op == "grouped-wgrad"
    written = len(case.sizes) if wgrad else case.rows  # along the outputs' first dimension
    owned = np.arange(written)
    if case.nan_group is not None:  # what comes of it is anything; its neighbours' is not
        owned = np.setdiff1d(owned, case.nan_group if wgrad else owned[_rows_of(case, case.nan_group)])
    for name in launch.outputs:
        found += _strays(name, launch.arguments[name], written) + _gaps(name, launch.arguments[name], owned)
    outputs = {name: launch.arguments[name].array for name in launch.outputs}
    chosen = _sampled_weights(launch, owned) if wgrad else (_sampled(launch, owned),)
    results = reference.check(launch.spec, launch.inputs, outputs, *chosen)
    found += [str(result) for result in results.values() if not result.ok]
    return found + (_empty_groups(launch) if wgrad else [])


def differences(first: Launch, second: Launch) -> list[str]:
    """Outputs that two launches of the same case did not leave the same, bit for bit."""
    return [
        f"{name}: the same launch twice gave other bits"
        for name in first.outputs
        if not np.array_equal(first.arguments[name].image, second.arguments[name].image)
    ]


def _empty_groups(launch: Launch) -> list[str]:
    """Weight gradients of groups without rows: zeros, or bit for bit what was there."""
    empty = [group for group, size in enumerate(launch.case.sizes) if not size]
    got = launch.arguments["dw"].array[empty]
    right = got.view(np.uint32) == launch.inputs["dw"][empty].view(np.uint32) if "dw" in launch.inputs else got == 0
    return [] if right.all() else [f"dw: {np.count_nonzero(~right)} elements of empty groups are wrong"]


def _strays(name: str, buffer: Buffer, rows: int) -> list[str]:
    """Writes outside the rows that groups own: in guards, between rows, in spare rows."""
    beyond = replace(buffer, image=buffer.image.copy())
    beyond.array.view(f"u{buffer.itemsize}")[:rows] = 2 ** (8 * buffer.itemsize) - 1
    hit = np.flatnonzero(beyond.image != 0xFF)
    if not hit.size:
        return []
    element = (int(hit[0]) - buffer.guard) // buffer.itemsize
    row, column = divmod(element, buffer.strides[-2])
    return [
        f"{name}: {hit.size} bytes written outside rows 0..{rows - 1}, first at element {element} "
        f"(row {row}, column {column} of {' x '.join(map(str, buffer.shape))}, row stride {buffer.strides[-2]})"
    ]


def _gaps(name: str, buffer: Buffer, rows: np.ndarray) -> list[str]:
    """Elements that should have been written and still hold the poison."""
    missing = np.argwhere(reference.poisoned(buffer.array[rows]))
    if not missing.size:
        return []
    *row, column = missing[0]
    place = " ".join(map(str, [rows[row[0]], *row[1:]]))
    return [f"{name}: {len(missing)} elements not written, first at row {place} column {column}"]


def _sampled(launch: Launch, owned: np.ndarray) -> np.ndarray:
    if launch.case.sample is None:
        return owned
    return reference.sample_rows(reference.offsets_of(launch.case.sizes), launch.case.sample)


def _sampled_weights(launch: Launch, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows and columns of dw, as the reference counts them."""
    case = launch.case
    if case.sample is None:
        return (groups[:, None] * case.n + np.arange(case.n)).reshape(-1), None
    shape = (len(case.sizes), case.n, case.k)
    return reference.sample_weights(reference.offsets_of(case.sizes), shape, case.sample)


def _rows_of(case: Case, group: int) -> slice:
    start = sum(case.sizes[:group])
    return slice(start, start + case.sizes[group])


def _dtype_of(spec: KernelSpec, name: str) -> str:
    fixed: Mapping[str, str] = {"offsets": "i32", "alpha": "f32", "row_scale": "f32"}
    return fixed.get(name, spec.dtype)

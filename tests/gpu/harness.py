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
from fusekit.dtypes import DTYPES as FORMATS
from fusekit.plan.exchange import CHUNK, words
from fusekit.plan.quant import PACKED, SIDE
from fusekit.reference.fp8 import padded_starts
from fusekit.spec import KernelSpec

from .cases import Case

# Bytes before and after a tensor. No tensor is better aligned than a launch demands: matrices lie 16 bytes past a
# multiple of 32, the others one element further.
GUARD = 1040
VECTORS = ("offsets", "index", "alpha", "bias", "row_scale", "dprob", "dbias", "x_s", "w_s")
COMPACT = ("dy_ts", "x_ts", "y_ts", "dz_ts")
CODED = ("_q", "_s", "_t", "_ts", "_amax")  # endings of outputs that `reference.coded_check` is for
# Inputs with a row for each token.
TOKENS = {"x", "dy", "preactivation"}
DTYPES = {
    "bf16": np.uint16, "fp16": np.uint16, "f32": np.float32, "i32": np.int32, "e4m3": np.uint8, "e5m2": np.uint8,
    "e8m0": np.uint8, "u8": np.uint8,
}  # fmt: skip


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
    """Random inputs for the case, and poisoned outputs."""
    rows = case.rows + case.spare
    inputs = reference.make_inputs(
        spec, E=len(case.sizes), M=rows, N=case.n, K=case.k, seed=seed, sizes=case.sizes, spare=case.spare
    )
    if case.loud:
        loud = "preactivation" if spec.activation.backward else "x"
        inputs[loud] += inputs[loud].dtype.type(3 << (FORMATS[_dtype_of(spec, loud)].significand - 1))
    if "dy_t" in inputs:
        _poison_blocks(inputs, case)
    for name in inputs.keys() & TOKENS - {spec.operands["gather"]}:
        _poison(inputs[name], slice(case.rows, None))
        if case.nan_group is not None:
            _poison(inputs[name], _rows_of(case, case.nan_group))
    if spec.operands["gather"] != "none":
        _choose(inputs, spec.operands["gather"], case)
    if case.nan_empty_weights:
        for name in inputs.keys() & {"w", "w_s"}:
            _poison(inputs[name], [group for group, size in enumerate(case.sizes) if not size])
    for name in inputs.keys() & {"row_scale", "x_s"}:
        if inputs[name].shape[-1] == rows > 1:  # scales of all of x are one
            inputs[name][..., case.rows :] = np.nan
            if case.nan_group is not None and name == "x_s":
                inputs[name][..., _rows_of(case, case.nan_group)] = np.nan
    inputs |= case.scalars
    shapes = reference.output_shapes(spec, E=len(case.sizes), M=rows, N=case.n, K=case.k)
    arguments: dict[str, Buffer | float] = {}
    for name, value in inputs.items():
        if name in shapes:
            continue
        if isinstance(value, float):
            arguments[name] = value
        else:
            arguments[name] = _placed(name, value.shape, _dtype_of(spec, name), case.pad, value)
    for name, (shape, dtype) in shapes.items():
        arguments[name] = _placed(name, shape, dtype, case.pad, inputs.get(name))
    return Launch(spec, case, arguments, tuple(shapes), inputs)


def _choose(inputs: dict[str, Any], gathered: str, case: Case) -> None:
    """Spare rows choose far beyond the tensor, rows of the NaN group its last row, which is NaN and nobody else's."""
    tensor, index = inputs[gathered], inputs["index"]
    last = np.full((1, tensor.shape[1]), reference.POISON, tensor.dtype)
    inputs[gathered] = np.concatenate([tensor, last])
    if "arrivals" in inputs:
        inputs["arrivals"] = np.zeros(words(len(tensor) + CHUNK), np.int32)
    if case.rows:  # every way of choosing nothing
        wild = [-1, len(tensor) + 1, 2**31 - 1, -(2**31)]
        nothing = np.flatnonzero(index == -1)
        index[nothing] = np.resize(wild, nothing.size)
    index[case.rows :] = 2**31 - 1
    if case.nan_group is not None:
        index[_rows_of(case, case.nan_group)] = len(tensor)


def faults(launch: Launch) -> list[str]:
    """What is wrong with the outputs after the launch, one line each; empty if all is right."""
    actual = []
    for name in (name for name in launch.outputs if name.endswith(CODED)):
        actual += _strays_of_fp8(launch, name)
    for name in (name for name in launch.outputs if not name.endswith(CODED)):
        buffer, parts = launch.arguments[name], _parts(launch, name)
        actual += _strays(name, buffer, len(parts)) + _gaps(name, buffer, np.flatnonzero(parts))
    for name, want in _wanted(launch):
        array, parts = launch.arguments[name].array, _parts(launch, name)
        rows = want.rows
        if name in reference.BY_GROUP:  # of dw, which has as many rows in each part
            rows = rows * len(parts) // len(want.table(array))
        want = want.only(parts[rows])
        result = reference.measure(name, want.of(array), want)
        actual += [] if result.ok else [str(result)]
        actual += _empty_groups(launch, name) if name in reference.BY_GROUP else []
    arrays = {name: launch.arguments[name].array for name in launch.outputs}
    return actual + reference.coded_check(launch.spec, launch.inputs, arrays)


def differences(first: Launch, second: Launch) -> list[str]:
    """Outputs that two launches of the same case did not leave the same, bit for bit."""
    return [
        f"{name}: the same launch twice gave other bits"
        for name in first.outputs
        if not np.array_equal(first.arguments[name].image, second.arguments[name].image)
    ]


def in_place(launch: Launch, output: str, over: str) -> Launch:
    """The launch with new outputs, of which one begins as a copy of the input that it is to lie over."""
    fresh = launch.fresh()
    given = launch.arguments[over]
    assert given.strides == launch.arguments[output].strides
    return replace(fresh, arguments=fresh.arguments | {output: replace(given, image=given.image.copy())})


def laid_over(launch: Launch, output: str, over: str) -> Launch:
    """What such a launch must leave: the input, but for the rows that `launch` has written."""
    output_array, given = launch.arguments[output], launch.arguments[over]
    wanted = replace(given, image=given.image.copy())
    wanted.array[: launch.case.rows] = output_array.array[: launch.case.rows]
    return replace(launch, arguments=launch.arguments | {output: wanted})


def _parts(launch: Launch, name: str) -> np.ndarray:
    """Along the output's first dimension, as far as it is written: whether it is the reference's, bool[...].

    What comes of a group full of NaN may be anything; its neighbours' may not.
    """
    case, buffer = launch.case, launch.arguments[name]
    by_group = name in reference.BY_GROUP
    parts = np.ones(buffer.shape[0] if by_group else case.rows, bool)
    if case.nan_group is not None:
        parts[case.nan_group if by_group else _rows_of(case, case.nan_group)] = False
    return parts


def _wanted(launch: Launch) -> list[tuple[str, reference.Expected]]:
    """What the outputs must be: all of it, or a sample where the case says so."""
    spec, case, inputs = launch.spec, launch.case, launch.inputs
    if case.sample is None:
        return list(reference.expected(spec, inputs).items())
    offsets = reference.offsets_of(case.sizes)
    if spec.epilogue == "wgrad":
        chosen = reference.sample_weights(offsets, (len(case.sizes), case.n, case.k), case.sample)
        return list(reference.expected(spec, inputs, *chosen).items())
    wanted = list(reference.expected(spec, inputs, reference.sample_rows(offsets, case.sample)).items())
    if spec.operands["dbias"]:  # which takes all rows
        few = np.unique([0, 1, case.n // 2, case.n - 1])
        wanted.append(("dbias", reference.expected(spec, inputs, None, few)["dbias"]))
    return wanted


def _empty_groups(launch: Launch, name: str) -> list[str]:
    """Gradients of groups without rows: zeros, or bit for bit what was there."""
    empty: Any = [group for group, size in enumerate(launch.case.sizes) if not size]
    if not empty:
        return []
    if not launch.spec.grouped:
        empty = slice(None)
    got = launch.arguments[name].array[empty]
    right = got.view(np.uint32) == launch.inputs[name][empty].view(np.uint32) if name in launch.inputs else got == 0
    return [] if right.all() else [f"{name}: {np.count_nonzero(~right)} elements of empty groups are wrong"]


def _strays(name: str, buffer: Buffer, rows: int) -> list[str]:
    """Writes outside the rows that groups own: in guards, between rows, in spare rows."""
    beyond = replace(buffer, image=buffer.image.copy())
    beyond.array.view(f"u{buffer.itemsize}")[:rows] = 2 ** (8 * buffer.itemsize) - 1
    hit = np.flatnonzero(beyond.image != 0xFF)
    if not hit.size:
        return []
    element = (int(hit[0]) - buffer.guard) // buffer.itemsize
    stride = buffer.strides[-2] if len(buffer.strides) > 1 else 1
    row, column = divmod(element, stride)
    return [
        f"{name}: {hit.size} bytes written outside rows 0..{rows - 1}, first at element {element} "
        f"(row {row}, column {column} of {' x '.join(map(str, buffer.shape))}, row stride {stride})"
    ]


def _strays_of_fp8(launch: Launch, name: str) -> list[str]:
    """Writes outside the tensor: in guards, between rows. What is inside is `coded_check`'s."""
    buffer = launch.arguments[name]
    beyond = replace(buffer, image=buffer.image.copy())
    beyond.array.view(f"u{buffer.itemsize}")[...] = 2 ** (8 * buffer.itemsize) - 1
    hit = np.flatnonzero(beyond.image != 0xFF)
    return [f"{name}: {hit.size} bytes written outside, the first at byte {hit[0] - buffer.guard}"] if hit.size else []


def _gaps(name: str, buffer: Buffer, rows: np.ndarray) -> list[str]:
    """Elements that should have been written and still hold the poison."""
    missing = np.argwhere(reference.poisoned(buffer.array[rows]))
    if not missing.size:
        return []
    place = ", ".join(map(str, [rows[missing[0][0]], *missing[0][1:]]))
    return [f"{name}: {len(missing)} elements not written, first at {place}"]


def _placed(name: str, shape: tuple[int, ...], dtype: str, pad: int, data: np.ndarray | None) -> Buffer:
    """The buffer of an argument; vectors, and what is compact like them, without padding and less well aligned."""
    if name in VECTORS or name.endswith("_amax"):
        return guarded(shape, dtype, 0, data, GUARD + max(np.dtype(DTYPES[dtype]).itemsize, 4))
    if name in COMPACT or dtype in ("e8m0", "u8"):
        pad = 0
    return guarded(shape, dtype, pad * 2 if np.dtype(DTYPES[dtype]).itemsize == 1 else pad, data)


def _poison(array: np.ndarray, where: Any) -> None:
    """All ones: a NaN in every format."""
    array.view(f"u{array.itemsize}")[where] = np.iinfo(f"u{array.itemsize}").max


def _poison_blocks(inputs: dict[str, Any], case: Case) -> None:
    """FP8 values and scales of spare blocks of tokens, and of those of a group that is full of NaN."""
    if "offsets" not in inputs:  # a dense one takes all tokens
        return
    starts = padded_starts(inputs["offsets"])
    beyond = [slice(starts[-1], None)]
    if case.nan_group is not None:
        beyond.append(slice(starts[case.nan_group], starts[case.nan_group + 1]))
    for where in beyond:
        for name in ("dy", "x"):
            inputs[f"{name}_t"][:, where] = 0xFF
            first, last = where.start // SIDE, None if where.stop is None else where.stop // SIDE
            inputs[f"{name}_ts"][first:last] = np.nan


def _rows_of(case: Case, group: int) -> slice:
    start = sum(case.sizes[:group])
    return slice(start, start + case.sizes[group])


def _dtype_of(spec: KernelSpec, name: str) -> str:
    singles = ("alpha", "row_scale", "x_s", "w_s", "dy_ts", "x_ts")
    fixed: Mapping[str, str] = {"offsets": "i32", "index": "i32", "arrivals": "i32", **dict.fromkeys(singles, "f32")}
    names = ("dy_t", "x_t") if spec.epilogue == "wgrad" else ("x", "w")
    fixed = dict(zip(names, spec.plan.factors, strict=True)) | fixed
    fixed |= {"w_s": PACKED} if spec.plan.quant.mx_weights else {}
    return fixed.get(name, spec.dtype)

"""Checks of a call's arguments against a launch record, and the variables that its expressions read.

Everything here depends on shapes, strides, dtypes and devices only, so it is done once for each combination of them;
what depends on addresses (alignment, overlap) is prepared here as plain numbers for the launch path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusekit.abi import (
    F32_END,
    Expr,
    LaunchRecord,
    PeersArgument,
    ScalarArgument,
    TensorArgument,
    evaluate,
    render,
    variables,
)
from fusekit.errors import ArgumentError
from fusekit.runtime.tensors import View, compact_strides

_ADDRESSES = 2**64
_REACH = 2**57
"""The most elements from a tensor's first to its last."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A checked call: `env` has every dim and stride variable, `spans` the bytes from first to last element.

    `strides` are the effective ones in elements, argument by argument in the record's order of tensors.
    """

    env: dict[str, int]
    device: int
    strides: tuple[tuple[int, ...], ...]
    spans: tuple[int, ...]


def check_names(record: LaunchRecord, given: Iterable[str], defaults: Mapping[str, Any], kernel: str) -> None:
    """Raises ArgumentError for an argument that `record` does not have, or one that is missing and has no default."""
    peers = {f"{peer.name}.{rank}": peer.name for peer in record.peers for rank in range(peer.count)}
    names = {peers.get(name, name) for name in given}
    known = [argument.name for argument in record.arguments]
    for name in sorted(names - set(known)):
        import difflib

        near = difflib.get_close_matches(name, known, 1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(
            f"{name} is no argument of {kernel}; it takes {', '.join(known)};{hint or ' leave it out'}", argument=name
        )
    for argument in record.arguments:
        if argument.name in names:
            continue
        if isinstance(argument, TensorArgument):
            raise ArgumentError(
                f"{argument.name} is missing; {kernel} needs the {argument.role} {signature(argument)}",
                argument=argument.name,
            )
        if isinstance(argument, PeersArgument):
            raise ArgumentError(
                f"{argument.name} is missing; {kernel} needs the windows of {argument.count} ranks, in their order",
                argument=argument.name,
            )
        if defaults.get(argument.name, argument.default) is None:
            raise ArgumentError(
                f"{argument.name} is missing; {kernel} needs this {argument.dtype} scalar, it has no default",
                argument=argument.name,
            )


def signature(tensor: TensorArgument) -> str:
    """The argument as messages show it: bf16[M, K]."""
    return f"{tensor.dtype}[{', '.join(render(extent) for extent in tensor.shape)}]"


def check_scalar(argument: ScalarArgument, value: Any) -> float | int:
    """`value` as the number that `argument` takes. Raises ArgumentError."""
    kind = "integer" if argument.is_integer else "number"
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = value.__index__() if argument.is_integer else float(value)
    except OverflowError:  # an integer beyond every float
        number = math.copysign(2.0**1000, 1 if value > 0 else -1)
    except (TypeError, ValueError, AttributeError):
        raise ArgumentError(
            f"{argument.name} is {value!r}, a {type(value).__name__}; it must be an {argument.dtype} {kind}",
            argument=argument.name,
        ) from None
    if argument.bounded and not argument.allows(int(number)):
        raise ArgumentError(f"{argument.name} is {number}; it {argument.rule}", argument=argument.name)
    if argument.dtype == "f64":
        return number
    if argument.dtype == "i64":
        if not argument.allows(int(number)):
            raise ArgumentError(f"{argument.name} is {number}; it {argument.rule}", argument=argument.name)
        return number
    low, high = (-(2.0**31), 2.0**31) if argument.dtype == "i32" else (-F32_END, F32_END)
    if math.isfinite(number) and (not low <= number < high or number == -F32_END):
        raise ArgumentError(
            f"{argument.name} is {float(number):g}; it does not fit into {argument.dtype}, which ends at"
            f" {2**31 - 1 if argument.dtype == 'i32' else 3.4028235e38}",
            argument=argument.name,
        )
    return number


def bind(record: LaunchRecord, views: Sequence[View]) -> Bound:
    """Checks `views`, one for each tensor of `record` in its order; raises ArgumentError that names the argument."""
    tensors = record.tensors
    for tensor, view in zip(tensors, views, strict=True):
        if view.dtype != tensor.dtype:
            raise ArgumentError(f"{tensor.name} is {view.dtype}; it must be {tensor.dtype}", argument=tensor.name)
        if len(view.shape) != tensor.rank:
            raise ArgumentError(
                f"{tensor.name} has rank {len(view.shape)}, shape {list(view.shape)}; it must have rank {tensor.rank}:"
                f" {signature(tensor)}",
                argument=tensor.name,
            )
    device = _common_device(tensors, views)
    dims, origins = _dims(record, views)
    for tensor, view in zip(tensors, views, strict=True):
        _check_shape(tensor, view, dims, origins)
    env: dict[str, int] = dict(dims)
    strides = tuple(_strides(tensor, view, dims) for tensor, view in zip(tensors, views, strict=True))
    spans = []
    for tensor, view, steps in zip(tensors, views, strides, strict=True):
        env.update((tensor.stride_variable(index), step) for index, step in enumerate(steps))
        last = sum((extent - 1) * step for extent, step in zip(view.shape, steps, strict=True))
        spans.append(0 if 0 in view.shape else (last + 1) * tensor.itemsize)
        if last > _REACH:
            raise ArgumentError(
                f"{tensor.name} has strides {list(view.strides)} for shape {list(view.shape)}, so that it reaches over"
                f" {spans[-1]} bytes; no memory is so large",
                argument=tensor.name,
            )
    for constraint in record.constraints:
        if constraint.reads <= env.keys() and evaluate(constraint.expr, env) != 0:
            shown = ", ".join(f"{name} = {value}" for name, value in dims.items())
            raise ArgumentError(f"{constraint.message}; got {shown}")
    return Bound(env, device, strides, tuple(spans))


def _common_device(tensors: Sequence[TensorArgument], views: Sequence[View]) -> int:
    """The device ordinal of all tensors; -1 if all are empty and without an address."""
    first: TensorArgument | None = None
    device = -1
    for tensor, view in zip(tensors, views, strict=True):
        if view.device < 0:  # an empty array without an address of its own
            continue
        if first is None:
            first, device = tensor, view.device
        elif view.device != device:
            raise ArgumentError(
                f"{tensor.name} is on device {view.device}, {first.name} on device {device}; the tensors of one launch"
                " are on one device",
                argument=tensor.name,
            )
    return device


def _dims(record: LaunchRecord, views: Sequence[View]) -> tuple[dict[str, int], dict[str, str]]:
    """Every dim's value and the argument that fixed it: inputs before outputs, so that an error names an output."""
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    for tensor, view in sorted(zip(record.tensors, views, strict=True), key=lambda pair: pair[0].written):
        for extent, value in zip(tensor.shape, view.shape, strict=True):
            name, factor = _scaled_dim(extent)
            if name and name not in values and value % factor == 0:
                values[name], origins[name] = value // factor, tensor.name
    for dim in record.dims:
        value, name = values[dim.name], origins[dim.name]
        if value % dim.divisor:
            raise ArgumentError(
                f"{name} gives {dim.name} = {value}; {dim.name} must be a multiple of {dim.divisor}", argument=name
            )
        if not dim.minimum <= value <= dim.maximum:
            raise ArgumentError(
                f"{name} gives {dim.name} = {value}; {dim.name} must be {dim.minimum} to {dim.maximum}", argument=name
            )
    return values, origins


def _scaled_dim(extent: Expr) -> tuple[str, int]:
    """(dim, factor) of an extent that one dim decides, "M" or ["mul", 2, "I"]; ("", 1) for any other."""
    if isinstance(extent, str):
        return extent, 1
    if isinstance(extent, tuple) and len(extent) == 3 and extent[0] == "mul":
        factor, name = extent[1:]
        if isinstance(factor, int) and factor > 0 and isinstance(name, str):
            return name, factor
    return "", 1


def _check_shape(tensor: TensorArgument, view: View, dims: dict[str, int], origins: dict[str, str]) -> None:
    for index, (extent, value) in enumerate(zip(tensor.shape, view.shape, strict=True)):
        expected = evaluate(extent, dims)
        if value == expected:
            continue
        text = render(extent)
        source = "" if text == str(expected) else f" {text} ="
        fixed = sorted({origins[name] for name in variables(extent)} - {tensor.name})
        why = f" (fixed by {', '.join(fixed)})" if fixed else ""
        raise ArgumentError(
            f"{tensor.name} has {value} at dim {index}, shape {list(view.shape)}; it must have{source} {expected}{why}:"
            f" {signature(tensor)}",
            argument=tensor.name,
        )


def _strides(tensor: TensorArgument, view: View, dims: dict[str, int]) -> tuple[int, ...]:
    """The effective strides: those of extents 0 and 1 are arbitrary, and become the compact ones."""
    compact = compact_strides(view.shape)
    if 0 in view.shape:
        return compact
    effective = []
    for index, (extent, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        where = f"{tensor.name} has stride {stride} at dim {index} (elements, shape {list(view.shape)})"
        if tensor.reads_stride(index):
            if extent == 1:
                stride = compact[index]
            elif stride <= 0 or stride % tensor.stride_divisor:
                raise ArgumentError(
                    f"{where}; it must be a positive multiple of {tensor.stride_divisor}"
                    f" ({tensor.stride_divisor * tensor.itemsize} bytes)",
                    argument=tensor.name,
                )
        else:
            expected = evaluate(tensor.strides[index], dims)
            if extent > 1 and stride != expected:
                kind = "contiguous" if tensor.strides[index] == 1 else "compact"
                raise ArgumentError(f"{where}; it must be {expected} ({kind})", argument=tensor.name)
            stride = expected
        effective.append(stride)
    if tensor.written:
        _check_distinct(tensor, view.shape, effective)
    return tuple(effective)


def _check_distinct(tensor: TensorArgument, shape: tuple[int, ...], strides: list[int]) -> None:
    """Raises ArgumentError for an output whose elements share memory: it would be written in a race."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent == 1:
            continue
        if stride < reach:
            raise ArgumentError(
                f"{tensor.name} has strides {strides} for shape {list(shape)}, so that elements overlap; an output's"
                " elements must lie apart",
                argument=tensor.name,
            )
        reach = stride * (extent - 1) + reach


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors, at least one of them written, that must not overlap. Indices count the record's tensors.

    Where both are matrices of the same row pitch (bytes), they may interleave: columns of one buffer. in_place: they
    may be the same memory.
    """

    first: int
    second: int
    first_span: int
    second_span: int
    pitch: int
    first_width: int
    second_width: int
    in_place: bool

    def overlap(self, distance: int) -> bool:
        """Whether both share memory if `second` begins `distance` bytes after `first`."""
        if not -self.second_span < distance < self.first_span or (self.in_place and distance == 0):
            return False
        if not self.pitch:
            return True
        column = distance % self.pitch
        return column < self.first_width or column + self.second_width > self.pitch


def pairs(record: LaunchRecord, views: Sequence[View], bound: Bound) -> tuple[Pair, ...]:
    """Every pair that could overlap: empty tensors cannot, and inputs may share memory with each other."""
    tensors = record.tensors
    pairs = []
    for first in range(len(tensors)):
        for second in range(first + 1, len(tensors)):
            spans = bound.spans[first], bound.spans[second]
            if (tensors[first].written or tensors[second].written) and all(spans):
                widths = [_row(tensors[index], views[index], bound.strides[index]) for index in (first, second)]
                pitch = widths[0][0] if widths[0][0] == widths[1][0] else 0
                same = bound.strides[first] == bound.strides[second] and _in_place(tensors[first], tensors[second])
                pairs.append(Pair(first, second, *spans, pitch, widths[0][1], widths[1][1], same))
    return tuple(pairs)


def _in_place(one: TensorArgument, other: TensorArgument) -> bool:
    """Whether one of the two may be written over the other."""
    return one.name == other.in_place_of or other.name == one.in_place_of


def _row(tensor: TensorArgument, view: View, strides: tuple[int, ...]) -> tuple[int, int]:
    """(pitch, width) in bytes of a matrix with contiguous rows; (0, 0) for anything else."""
    if len(strides) != 2 or strides[1] != 1 or view.shape[0] == 1:
        return 0, 0
    return strides[0] * tensor.itemsize, view.shape[1] * tensor.itemsize


def check_placement(record: LaunchRecord, bound: Bound, pairs: Sequence[Pair], addresses: Sequence[int]) -> None:
    """Raises ArgumentError for an address that is null or misaligned, or an output that overlaps another argument."""
    tensors = record.tensors
    for tensor, address, span in zip(tensors, addresses, bound.spans, strict=True):
        check_address(tensor.name, address)
        if span and not address:
            raise ArgumentError(f"{tensor.name} has a null address; it must be allocated", argument=tensor.name)
        if span and address % tensor.alignment:
            raise ArgumentError(
                f"{tensor.name} begins at {address:#x}, {address % tensor.alignment} bytes after a multiple of"
                f" {tensor.alignment}; it must begin at a multiple of {tensor.alignment} bytes",
                argument=tensor.name,
            )
    for pair in pairs:
        if pair.overlap(addresses[pair.second] - addresses[pair.first]):
            one, other = tensors[pair.first], tensors[pair.second]
            output, partner = (other, one) if other.written else (one, other)
            rule = "an output must not share memory with another argument"
            if _in_place(one, other):
                rule = "it must be the same memory, of the same strides, or share none"
            raise ArgumentError(f"{output.name} overlaps {partner.name} in memory; {rule}", argument=output.name)


def check_address(name: str, address: Any) -> None:
    """Raises ArgumentError for a value that is not an address."""
    if not hasattr(address, "__index__") or not 0 <= address < _ADDRESSES:
        raise ArgumentError(
            f"{name} has the address {address!r}; it must be an integer from 0 to 2**64 - 1", argument=name
        )

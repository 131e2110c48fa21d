"""Whether the parts of a launch record fit together; RecordError with the field's path where they do not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from fusekit.abi.arguments import PeersArgument, TensorArgument, bare_dims, check_name, shape_dims
from fusekit.abi.codec import integer
from fusekit.abi.expr import RecordError, validate
from fusekit.abi.floats import validate_float
from fusekit.abi.limits import check_limits, check_text
from fusekit.abi.parameters import (
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorMapParameter,
)
from fusekit.dtypes import INTEGERS

if TYPE_CHECKING:
    from fusekit.abi.record import LaunchRecord, LaunchStep

# Each is an integer. What the names mean to the driver is in docs/launch-record.md.
ATTRIBUTES = (
    "cooperative",
    "non_portable_cluster_size_allowed",
    "preferred_shared_memory_carveout",
    "programmatic_stream_serialization",
)
T = TypeVar("T")
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


def check_complete(record: LaunchRecord, prefix: str) -> None:
    """Symbol and parameter offsets are filled in, aligned and disjoint."""
    if not record.symbol:
        raise RecordError(f"{prefix}symbol: empty; a record is complete only after compilation")
    check_text(record.symbol, f"{prefix}symbol")
    end = 0
    for index, parameter in sorted(enumerate(record.parameters), key=lambda item: item[1].offset):
        where = f"{prefix}parameters[{index}].offset"
        if parameter.offset < 0:
            raise RecordError(f"{where}: {parameter.offset}; a record is complete only after compilation")
        if parameter.offset % parameter.alignment:
            raise RecordError(
                f"{where}: {parameter.offset}; {parameter.name} needs a multiple of {parameter.alignment}"
            )
        if parameter.offset < end:
            raise RecordError(f"{where}: {parameter.offset}; {parameter.name} overlaps what ends at {end}")
        end = parameter.offset + parameter.size


def triple(items: tuple[T, ...], where: str) -> tuple[T, T, T]:
    """x, y, z."""
    if len(items) != 3:
        raise RecordError(f"{where}: {len(items)} entries; it has 3 (x, y, z)")
    return items[0], items[1], items[2]


def unique(names: list[str], where: str) -> None:
    """Raises RecordError where a name occurs twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RecordError(f"{where}[{index}].name: {name!r} occurs twice; names are unique")


def host_variables(record: LaunchRecord) -> frozenset[str]:
    """The variables that a call's shapes and strides give."""
    strides = {tensor.stride_variable(index) for tensor in record.tensors for index in range(tensor.rank)}
    return frozenset(dim.name for dim in record.dims) | strides


def integers_of(record: LaunchRecord) -> frozenset[str]:
    """The i32 scalars."""
    return frozenset(scalar.name for scalar in record.scalars if scalar.dtype == "i32")


def check(record: LaunchRecord) -> None:
    """All but what compilation fills in."""
    if not _ARCH.fullmatch(record.arch):
        raise RecordError(f"arch: {record.arch!r}; it looks like sm_90a")
    _check_signature(record)
    dims = frozenset(dim.name for dim in record.dims)
    known = host_variables(record) | integers_of(record) | {"sm_count", "cluster_margin", "active_clusters"}
    for name, expr in record.values.items():
        check_name(name, f"values.{name}")
        if name in known or name in {argument.name for argument in record.arguments}:
            raise RecordError(f"values.{name}: the name is taken; give the value another one")
        validate(expr, f"values.{name}", known)
        known |= {name}
    for index, constraint in enumerate(record.constraints):
        validate(constraint.expr, f"constraints[{index}].expr", known)
        check_text(constraint.message, f"constraints[{index}].message")
    _check_step(record, record, known, "")
    for index, step in enumerate(record.then):
        _check_step(record, step, known, f"then[{index}].")
    validate(record.workspace, "workspace.bytes", frozenset({"sm_count"}))
    validate(record.scratch, "scratch.bytes", dims | {"sm_count"})
    for index, name in enumerate(record.skip_if_zero):
        if name not in dims:
            raise RecordError(f"skip_if_zero[{index}]: {name!r} is no dim; dims are {', '.join(sorted(dims))}")
    check_limits(record)


def _check_step(record: LaunchRecord, step: LaunchRecord | LaunchStep, known: frozenset[str], prefix: str) -> None:
    _check_parameters(record, step.parameters, known, prefix)
    triple(step.grid, f"{prefix}grid")
    for index, extent in enumerate(step.grid):
        validate(extent, f"{prefix}grid[{index}]", known)
    for name, extents, limit in (("block", step.block, 1024), ("cluster", step.cluster, 16)):
        x, y, z = triple(extents, f"{prefix}{name}")
        if min(x, y, z) < 1 or x * y * z > limit:
            raise RecordError(f"{prefix}{name}: {x}x{y}x{z}; each is at least 1 and their product at most {limit}")
    if step.dynamic_shared < 0:
        raise RecordError(f"{prefix}dynamic_shared: {step.dynamic_shared}; bytes are not negative")
    for name, value in step.attributes.items():
        if name not in ATTRIBUTES:
            raise RecordError(f"{prefix}attributes.{name}: unknown; the attributes are {', '.join(ATTRIBUTES)}")
        integer(value, f"{prefix}attributes.{name}")


def _check_signature(record: LaunchRecord) -> None:
    unique([argument.name for argument in record.arguments], "arguments")
    unique([dim.name for dim in record.dims], "dims")
    dims = frozenset(dim.name for dim in record.dims)
    for index, dim in enumerate(record.dims):
        dim.check(f"dims[{index}]")
    for index, argument in enumerate(record.arguments):
        if isinstance(argument, TensorArgument):
            argument.check(f"arguments[{index}]", dims)
        elif isinstance(argument, PeersArgument):
            argument.check(f"arguments[{index}]", dims | integers_of(record))
        else:
            argument.check(f"arguments[{index}]")
    _check_in_place(record)
    bare = bare_dims(record.arguments)
    for index, dim in enumerate(record.dims):
        if dim.name not in bare:
            why = "only inside expressions" if dim.name in shape_dims(record.arguments) else "in no tensor's shape"
            raise RecordError(f"dims[{index}].name: {dim.name!r} stands {why}; some shape must be its bare name")


def _check_in_place(record: LaunchRecord) -> None:
    """What an output may be written over is an input like it, and no other output's."""
    inputs = {tensor.name: tensor for tensor in record.tensors if tensor.role == "input"}
    for index, argument in enumerate(record.arguments):
        if not isinstance(argument, TensorArgument) or not (over := argument.in_place_of):
            continue
        where = f"arguments[{index}].in_place_of"
        if argument.role != "output":
            raise RecordError(f"{where}: {over!r}; {argument.name} is {argument.role}; of an output alone")
        if over not in inputs:
            raise RecordError(f"{where}: {_unknown(over, frozenset(inputs))}")
        given = inputs.pop(over)
        if (given.dtype, given.shape) != (argument.dtype, argument.shape):
            raise RecordError(f"{where}: {over!r} is no {argument.name} in dtype and shape; both must be the same")


def _check_parameters(
    record: LaunchRecord, parameters: tuple[Parameter, ...], values: frozenset[str], prefix: str
) -> None:
    unique([parameter.name for parameter in parameters], f"{prefix}parameters")
    tensors = frozenset(tensor.name for tensor in record.tensors)
    for index, parameter in enumerate(parameters):
        where = f"{prefix}parameters[{index}]"
        check_name(parameter.name, f"{where}.name")
        if isinstance(parameter, TensorMapParameter):
            if parameter.argument not in tensors:
                raise RecordError(f"{where}.argument: {_unknown(parameter.argument, tensors)}")
            parameter.check(where, values, frozenset(f"{name}.address" for name in tensors))
        elif isinstance(parameter, StructParameter):
            parameter.check(where)
            unique([item.name for item in parameter.fields], f"{where}.fields")
            for place, item in enumerate(parameter.fields):
                _check_scalar(record, item, values, f"{where}.fields[{place}]")
        else:
            _check_scalar(record, parameter, values, where)


def _check_scalar(
    record: LaunchRecord, parameter: PointerParameter | IntegerParameter | FloatParameter, values: frozenset[str],
    where: str,
) -> None:  # fmt: skip
    check_name(parameter.name, f"{where}.name")
    if isinstance(parameter, IntegerParameter):
        if parameter.dtype not in INTEGERS:
            raise RecordError(f"{where}.dtype: {parameter.dtype!r}; it must be one of {', '.join(INTEGERS)}")
        validate(parameter.value, f"{where}.value", values)
    elif isinstance(parameter, FloatParameter):
        floats = frozenset(scalar.name for scalar in record.scalars if scalar.dtype == "f32")
        if parameter.argument and parameter.argument not in floats:
            raise RecordError(f"{where}.argument: {_unknown(parameter.argument, floats)}")
        validate_float(parameter.value, f"{where}.value", floats)
    else:
        memory = {name for name in ("workspace", "scratch") if getattr(record, name) != 0}
        allowed = frozenset(tensor.name for tensor in record.tensors) | memory
        if parameter.argument not in allowed:
            raise RecordError(f"{where}.argument: {_unknown(parameter.argument, allowed)}")
        validate(parameter.shift, f"{where}.shift", values)


def _unknown(name: str, allowed: frozenset[str]) -> str:
    return f"{name!r}; this kind of parameter may name {', '.join(sorted(allowed)) or 'none'}"

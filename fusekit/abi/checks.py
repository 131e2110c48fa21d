"""Whether the parts of a launch record fit together; RecordError with the field's path where they do not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from fusekit.abi.arguments import PeersArgument, TensorArgument, bare_dims, check_name, shape_dims
from fusekit.abi.codec import integer
from fusekit.abi.events import check_events
from fusekit.abi.expr import Expr, RecordError, validate, variables
from fusekit.abi.floats import Truncated, validate_float, value_variables
from fusekit.abi.limits import THREADS, check_limits, check_text
from fusekit.abi.parameters import (
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorMapParameter,
)
from fusekit.dtypes import FLOATS, INTEGERS

if TYPE_CHECKING:
    from fusekit.abi.record import LaunchRecord, LaunchStep

# Each is an integer. What the names mean to the driver is in docs/launch-record.md.
ATTRIBUTES = (
    "cooperative",
    "non_portable_cluster_size_allowed",
    "preferred_shared_memory_carveout",
    "programmatic_stream_serialization",
)
DEVICE = frozenset({"sm_count", "cluster_margin", "active_clusters"})
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
    """The scalars that are integers."""
    return frozenset(scalar.name for scalar in record.scalars if scalar.is_integer)


def check(record: LaunchRecord) -> None:
    """All but what compilation fills in."""
    if not _ARCH.fullmatch(record.arch):
        raise RecordError(f"arch: {record.arch!r}; it looks like sm_90a")
    _check_signature(record)
    dims = frozenset(dim.name for dim in record.dims)
    known = host_variables(record) | integers_of(record) | {"sm_count", "cluster_margin", "active_clusters"}
    floats = frozenset(scalar.name for scalar in record.scalars if scalar.is_float)
    for name, value in record.values.items():
        check_name(name, f"values.{name}")
        if name in known or name in {argument.name for argument in record.arguments}:
            raise RecordError(f"values.{name}: the name is taken; give the value another one")
        if isinstance(value, Truncated):
            validate_float(value.expr, f"values.{name}", floats, integers=known)
        else:
            validate(value, f"values.{name}", known)
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
    _check_clusters(record)


def _check_step(record: LaunchRecord, step: LaunchRecord | LaunchStep, known: frozenset[str], prefix: str) -> None:
    _check_parameters(record, step.parameters, known, prefix)
    triple(step.grid, f"{prefix}grid")
    for index, extent in enumerate(step.grid):
        validate(extent, f"{prefix}grid[{index}]", known)
    triple(step.block, f"{prefix}block")
    for index, extent in enumerate(step.block):
        validate(extent, f"{prefix}block[{index}]", known)
    sizes = [("cluster", triple(step.cluster, f"{prefix}cluster"), 16)]
    if step.preferred_cluster:
        sizes.append(("preferred_cluster", triple(step.preferred_cluster, f"{prefix}preferred_cluster"), 16))
    # What follows the arguments is checked at a launch.
    width, height, depth = (extent if isinstance(extent, int) else 1 for extent in step.block)
    sizes.append(("block", (width, height, depth), THREADS))
    for name, (x, y, z), limit in sizes:
        if min(x, y, z) < 1 or x * y * z > limit:
            raise RecordError(f"{prefix}{name}: {x}x{y}x{z}; each is at least 1 and their product at most {limit}")
    _check_preferred(step, prefix)
    validate(step.dynamic_shared, f"{prefix}dynamic_shared", known)
    if isinstance(step.dynamic_shared, int) and step.dynamic_shared < 0:
        raise RecordError(f"{prefix}dynamic_shared: {step.dynamic_shared}; bytes are not negative")
    validate(step.when, f"{prefix}when", known)
    read = _all_variables(record, step.when) & DEVICE
    if read:  # the launches of a record are the same on every part of a device
        raise RecordError(f"{prefix}when: it reads {', '.join(sorted(read))}; a launch depends on arguments alone")
    handles = {scalar.name for scalar in record.scalars if scalar.dtype == "i64"}
    check_events(step.events, handles, f"{prefix}events")
    for name, value in step.attributes.items():
        if name not in ATTRIBUTES:
            raise RecordError(f"{prefix}attributes.{name}: unknown; the attributes are {', '.join(ATTRIBUTES)}")
        integer(value, f"{prefix}attributes.{name}")


def _check_preferred(step: LaunchRecord | LaunchStep, prefix: str) -> None:
    for preferred, least in zip(step.preferred_cluster, step.cluster, strict=False):
        if preferred % least:
            raise RecordError(
                f"{prefix}preferred_cluster: {'x'.join(map(str, step.preferred_cluster))}; each is a multiple of the"
                f" cluster's, {'x'.join(map(str, step.cluster))}"
            )


def _all_variables(record: LaunchRecord, expr: Expr) -> set[str]:
    """The names that `expr` reads, also through values."""
    names = variables(expr)
    for name, value in reversed(tuple(record.values.items())):
        if name in names:
            names |= value_variables(value)
    return names


def _check_clusters(record: LaunchRecord) -> None:
    """The driver is asked for the clusters of the last launch before any arguments are known."""
    last = (record.then or (record,))[-1]
    constant = all(isinstance(item, int) for item in (*last.block, last.dynamic_shared))
    if not constant and record.reads("active_clusters"):
        raise RecordError("block: active_clusters is of a launch whose block and shared memory are constants")


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
        if parameter.dtype not in FLOATS:
            raise RecordError(f"{where}.dtype: {parameter.dtype!r}; it must be one of {', '.join(FLOATS)}")
        floats = frozenset(scalar.name for scalar in record.scalars if scalar.is_float)
        alike = frozenset(scalar.name for scalar in record.scalars if scalar.dtype == parameter.dtype)
        if parameter.argument and parameter.argument not in alike:
            raise RecordError(f"{where}.argument: {_unknown(parameter.argument, alike)}")
        validate_float(parameter.value, f"{where}.value", floats, integers=values)
    else:
        memory = {name for name in ("workspace", "scratch") if getattr(record, name) != 0}
        allowed = frozenset(tensor.name for tensor in record.tensors) | memory
        if parameter.argument not in allowed:
            raise RecordError(f"{where}.argument: {_unknown(parameter.argument, allowed)}")
        validate(parameter.shift, f"{where}.shift", values)


def _unknown(name: str, allowed: frozenset[str]) -> str:
    return f"{name!r}; this kind of parameter may name {', '.join(sorted(allowed)) or 'none'}"

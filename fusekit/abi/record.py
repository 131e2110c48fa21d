"""The launch record: everything beside the cubin that a launcher must know, as data with a versioned JSON form.

``LaunchRecord(...)`` checks that the parts fit together; ``from_json`` is strict: an unknown, missing or mistyped field
raises RecordError with the field's path. The package docstring gives the overview.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fusekit.abi.arguments import (
    Argument,
    Dim,
    ScalarArgument,
    TensorArgument,
    argument_from_json,
    bare_dims,
    check_name,
    shape_dims,
)
from fusekit.abi.codec import Reader, expression, integer, string
from fusekit.abi.expr import Expr, RecordError, freeze, thaw, validate
from fusekit.abi.parameters import (
    INTEGER_BYTES,
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    TensorMapParameter,
    parameter_from_json,
)

__all__ = [
    "SCHEMA", "Argument", "Constraint", "Dim", "FloatParameter", "IntegerParameter", "LaunchRecord", "Parameter",
    "PointerParameter", "ScalarArgument", "TensorArgument", "TensorMapParameter",
]  # fmt: skip

SCHEMA = 1
# Each is an integer. What the names mean to the driver stands in launch-record.md beside this file.
ATTRIBUTES = (
    "cooperative",
    "non_portable_cluster_size_allowed",
    "preferred_shared_memory_carveout",
    "programmatic_stream_serialization",
)
T = TypeVar("T")
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


@dataclass(frozen=True, slots=True)
class Constraint:
    """`expr` over dims and strides must be 0, or the launch is refused with `message` (which states the rule)."""

    expr: Expr
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", freeze(self.expr))

    def to_json(self) -> dict[str, Any]:
        return {"expr": thaw(self.expr), "message": self.message}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Constraint:
        reader = Reader(value, where)
        constraint = cls(reader.expr("expr"), reader.string("message"))
        reader.end()
        return constraint


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """How to launch one kernel.

    `grid` is in blocks and a multiple of `cluster`; `block` in threads; `dynamic_shared`, `workspace` and `scratch` in
    bytes. The workspace is what a kernel keeps from launch to launch; its expression may read only sm_count, so that it
    can be allocated at load. The scratch is memory for one launch, of any content before and after; its expression
    reads dims. A launch in which a dim of `skip_if_zero` is 0 does nothing and succeeds.
    """

    arch: str
    arguments: tuple[Argument, ...]
    dims: tuple[Dim, ...]
    parameters: tuple[Parameter, ...]
    grid: tuple[Expr, Expr, Expr]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    symbol: str = ""
    constraints: tuple[Constraint, ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    workspace: Expr = 0
    workspace_zeroed: bool = False
    scratch: Expr = 0
    skip_if_zero: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("arguments", "dims", "parameters", "constraints", "block", "cluster", "skip_if_zero"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "grid", tuple(freeze(item) for item in self.grid))
        object.__setattr__(self, "workspace", freeze(self.workspace))
        object.__setattr__(self, "scratch", freeze(self.scratch))
        object.__setattr__(self, "attributes", dict(self.attributes))
        _check(self)

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorArgument))

    @property
    def scalars(self) -> tuple[ScalarArgument, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, ScalarArgument))

    def check_complete(self) -> None:
        """Raises RecordError unless symbol and parameter offsets are filled in, aligned and disjoint."""
        if not self.symbol:
            raise RecordError("symbol: empty; a record is complete only after compilation")
        end = 0
        for index, parameter in sorted(enumerate(self.parameters), key=lambda item: item[1].offset):
            where = f"parameters[{index}].offset"
            if parameter.offset < 0:
                raise RecordError(f"{where}: {parameter.offset}; a record is complete only after compilation")
            if parameter.offset % parameter.alignment:
                raise RecordError(
                    f"{where}: {parameter.offset}; {parameter.name} needs a multiple of {parameter.alignment}"
                )
            if parameter.offset < end:
                raise RecordError(f"{where}: {parameter.offset}; {parameter.name} overlaps what ends at {end}")
            end = parameter.offset + parameter.size

    def to_json(self) -> dict[str, Any]:
        """JSON types only; `from_json` gives an equal record back."""
        scratch = {} if self.scratch == 0 else {"scratch": {"bytes": thaw(self.scratch)}}
        return {
            "schema": self.schema,
            "symbol": self.symbol,
            "arch": self.arch,
            "arguments": [argument.to_json() for argument in self.arguments],
            "dims": [dim.to_json() for dim in self.dims],
            "constraints": [constraint.to_json() for constraint in self.constraints],
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "grid": [thaw(item) for item in self.grid],
            "block": list(self.block),
            "cluster": list(self.cluster),
            "dynamic_shared": self.dynamic_shared,
            "attributes": dict(sorted(self.attributes.items())),
            "workspace": {"bytes": thaw(self.workspace), "zeroed": self.workspace_zeroed},
            **scratch,
            "skip_if_zero": list(self.skip_if_zero),
        }

    @classmethod
    def from_json(cls, value: Any) -> LaunchRecord:
        """The complete record in `value`; RecordError for another schema or a wrong, missing or unknown field."""
        reader = Reader(value)
        schema = reader.integer("schema")
        if schema != SCHEMA:
            raise RecordError(
                f"schema: {schema}; this fusekit reads launch records of schema {SCHEMA}; rebuild the kernel with this"
                " version or use the fusekit that wrote it"
            )
        workspace = Reader(reader.take("workspace"), "workspace")
        scratch = Reader(reader.take("scratch"), "scratch") if "scratch" in reader else None
        record = cls(
            symbol=reader.string("symbol"),
            arch=reader.string("arch"),
            arguments=reader.array("arguments", argument_from_json),
            dims=reader.array("dims", Dim.from_json),
            constraints=reader.array("constraints", Constraint.from_json),
            parameters=reader.array("parameters", parameter_from_json),
            grid=_triple(reader.array("grid", expression), "grid"),
            block=_triple(reader.array("block", integer), "block"),
            cluster=_triple(reader.array("cluster", integer), "cluster"),
            dynamic_shared=reader.integer("dynamic_shared"),
            attributes=reader.mapping("attributes", integer),
            workspace=workspace.expr("bytes"),
            workspace_zeroed=workspace.boolean("zeroed"),
            scratch=0 if scratch is None else scratch.expr("bytes"),
            skip_if_zero=reader.array("skip_if_zero", string),
        )
        workspace.end()
        if scratch is not None:
            scratch.end()
        reader.end()
        record.check_complete()
        return record


def _triple(items: tuple[T, ...], where: str) -> tuple[T, T, T]:
    if len(items) != 3:
        raise RecordError(f"{where}: {len(items)} entries; it has 3 (x, y, z)")
    return items[0], items[1], items[2]


def _unique(names: list[str], where: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RecordError(f"{where}[{index}].name: {name!r} stands twice; names are unique")


def _check(record: LaunchRecord) -> None:
    if record.schema != SCHEMA:
        raise RecordError(f"schema: {record.schema}; this fusekit writes schema {SCHEMA}")
    if not _ARCH.fullmatch(record.arch):
        raise RecordError(f"arch: {record.arch!r}; it looks like sm_90a")
    _check_signature(record)
    dims = frozenset(dim.name for dim in record.dims)
    strides = {tensor.stride_variable(index) for tensor in record.tensors for index in range(tensor.rank)}
    host = dims | strides
    for index, constraint in enumerate(record.constraints):
        validate(constraint.expr, f"constraints[{index}].expr", host)
    _check_parameters(record, host | {"sm_count", "cluster_margin"})
    _triple(record.grid, "grid")
    for index, extent in enumerate(record.grid):
        validate(extent, f"grid[{index}]", host | {"sm_count", "cluster_margin"})
    for name, extents, limit in (("block", record.block, 1024), ("cluster", record.cluster, 16)):
        x, y, z = _triple(extents, name)
        if min(x, y, z) < 1 or x * y * z > limit:
            raise RecordError(f"{name}: {x}x{y}x{z}; each is at least 1 and their product at most {limit}")
    if record.dynamic_shared < 0:
        raise RecordError(f"dynamic_shared: {record.dynamic_shared}; bytes are not negative")
    for name, value in record.attributes.items():
        if name not in ATTRIBUTES:
            raise RecordError(f"attributes.{name}: unknown; the attributes are {', '.join(ATTRIBUTES)}")
        integer(value, f"attributes.{name}")
    validate(record.workspace, "workspace.bytes", frozenset({"sm_count"}))
    validate(record.scratch, "scratch.bytes", dims | {"sm_count"})
    for index, name in enumerate(record.skip_if_zero):
        if name not in dims:
            raise RecordError(f"skip_if_zero[{index}]: {name!r} is no dim; dims are {', '.join(sorted(dims))}")


def _check_signature(record: LaunchRecord) -> None:
    _unique([argument.name for argument in record.arguments], "arguments")
    _unique([dim.name for dim in record.dims], "dims")
    dims = frozenset(dim.name for dim in record.dims)
    for index, dim in enumerate(record.dims):
        dim.check(f"dims[{index}]")
    for index, argument in enumerate(record.arguments):
        if isinstance(argument, TensorArgument):
            argument.check(f"arguments[{index}]", dims)
        else:
            argument.check(f"arguments[{index}]")
    bare = bare_dims(record.arguments)
    for index, dim in enumerate(record.dims):
        if dim.name not in bare:
            why = "only inside expressions" if dim.name in shape_dims(record.arguments) else "in no tensor's shape"
            raise RecordError(f"dims[{index}].name: {dim.name!r} stands {why}; some shape must be its bare name")


def _check_parameters(record: LaunchRecord, values: frozenset[str]) -> None:
    _unique([parameter.name for parameter in record.parameters], "parameters")
    tensors = {tensor.name for tensor in record.tensors}
    floats = {scalar.name for scalar in record.scalars if scalar.dtype == "f32"}
    integers = frozenset(scalar.name for scalar in record.scalars if scalar.dtype == "i32")
    addresses = frozenset(f"{name}.address" for name in tensors)
    for index, parameter in enumerate(record.parameters):
        where = f"parameters[{index}]"
        check_name(parameter.name, f"{where}.name")
        if isinstance(parameter, IntegerParameter):
            if parameter.dtype not in INTEGER_BYTES:
                raise RecordError(f"{where}.dtype: {parameter.dtype!r}; it must be one of {', '.join(INTEGER_BYTES)}")
            validate(parameter.value, f"{where}.value", values | integers)
            continue
        allowed = set(tensors)
        if isinstance(parameter, FloatParameter):
            allowed = floats
        elif isinstance(parameter, PointerParameter):
            allowed |= {name for name in ("workspace", "scratch") if getattr(record, name) != 0}
        if parameter.argument not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise RecordError(f"{where}.argument: {parameter.argument!r}; this kind of parameter may name {known}")
        if isinstance(parameter, TensorMapParameter):
            parameter.check(where, values, addresses)

"""The launch record: everything next to the cubin that a launcher must know, as data with a versioned JSON form.

``LaunchRecord(...)`` checks that the parts fit together; ``from_json`` is strict: an unknown, missing or mistyped field
raises RecordError with the field's path. The package docstring gives the overview.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fusekit.abi.arguments import (
    Argument,
    Dim,
    PeersArgument,
    ScalarArgument,
    TensorArgument,
    WithArguments,
    argument_from_json,
)
from fusekit.abi.checks import check, check_complete, host_variables, triple, unique
from fusekit.abi.codec import RecordReader, expression, integer, string
from fusekit.abi.events import LaunchEvent
from fusekit.abi.expr import SCHEMA_2_OPERATORS, Expr, RecordError, freeze, operators, thaw, variables
from fusekit.abi.floats import Truncated, Value, validate_float, value_of, value_variables
from fusekit.abi.parameters import (
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorMapParameter,
    flat,
    parameter_from_json,
)
from fusekit.dtypes import DTYPES

__all__ = [
    "SCHEMAS", "Argument", "Constraint", "Dim", "FloatParameter", "IntegerParameter", "LaunchRecord", "LaunchStep",
    "Parameter", "PeersArgument", "PointerParameter", "ScalarArgument", "StructParameter", "TensorArgument",
    "TensorMapParameter",
]  # fmt: skip

# A record is written in the first of them that can express it.
SCHEMAS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Constraint:
    """`expr` must be 0, or the launch is refused with `message` (which states the rule).

    In schema 1 it reads dims and strides; in schema 2 whatever a grid may read.
    """

    expr: Expr
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", freeze(self.expr))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables that it reads."""
        return frozenset(variables(self.expr))

    def to_json(self) -> dict[str, Any]:
        return {"expr": thaw(self.expr), "message": self.message}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Constraint:
        reader = RecordReader(value, where)
        constraint = cls(reader.expr("expr"), reader.string("message"))
        reader.end()
        return constraint


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """One more launch of a record that has several, in the same stream: the fields are those of LaunchRecord."""

    parameters: tuple[Parameter, ...]
    grid: tuple[Expr, Expr, Expr]
    block: tuple[Expr, Expr, Expr]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: Expr = 0
    symbol: str = ""
    attributes: Mapping[str, int] = field(default_factory=dict)
    preferred_cluster: tuple[int, ...] = ()
    when: Expr = 1
    events: tuple[LaunchEvent, ...] = ()

    def __post_init__(self) -> None:
        _freeze_step(self)

    @classmethod
    def from_json(cls, value: Any, where: str) -> LaunchStep:
        reader = RecordReader(value, where)
        step = cls(**_step(reader))
        reader.end()
        return step


@dataclass(frozen=True)
class LaunchRecord(WithArguments):
    """How to launch one kernel, or several in a row.

    `grid` is in blocks and a multiple of `cluster`; `block` in threads; `dynamic_shared`, `workspace` and `scratch` in
    bytes. The workspace is what a kernel keeps from launch to launch; its expression may read only sm_count, so that it
    can be allocated at load. The scratch is memory for one launch, of any content before and after; its expression
    reads dims. A launch in which a dim of `skip_if_zero` is 0 does nothing and succeeds. One whose `when` is 0 is left
    out; it reads nothing of the device. `preferred_cluster`: the cluster that the device takes instead of `cluster`
    where it can; empty for none. `events`: what the launch records.

    `values` names integers that expressions read; each reads only those before it. `then`: the launches that follow
    this one in the stream. `active_clusters` is a variable that a launcher asks the driver for, of the last launch.
    """

    arch: str
    arguments: tuple[Argument, ...]
    dims: tuple[Dim, ...]
    parameters: tuple[Parameter, ...]
    grid: tuple[Expr, Expr, Expr]
    block: tuple[Expr, Expr, Expr]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: Expr = 0
    symbol: str = ""
    constraints: tuple[Constraint, ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    workspace: Expr = 0
    workspace_zeroed: bool = False
    scratch: Expr = 0
    skip_if_zero: tuple[str, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    then: tuple[LaunchStep, ...] = ()
    preferred_cluster: tuple[int, ...] = ()
    when: Expr = 1
    events: tuple[LaunchEvent, ...] = ()

    def __post_init__(self) -> None:
        values = {name: each if isinstance(each, Truncated) else freeze(each) for name, each in self.values.items()}
        object.__setattr__(self, "values", values)
        for name in ("arguments", "dims", "constraints", "skip_if_zero", "then"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "workspace", freeze(self.workspace))
        object.__setattr__(self, "scratch", freeze(self.scratch))
        _freeze_step(self)
        check(self)

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        """A record of its own for each launch, in order: this one's arguments and values, and one launch."""
        return self._launches if self.then else (self,)

    @cached_property
    def _launches(self) -> tuple[LaunchRecord, ...]:
        alone = replace(self, then=())
        return (alone, *(replace(alone, **{name: getattr(step, name) for name in _STEP}) for step in self.then))

    @property
    def schema(self) -> int:
        """The first schema that can express this record."""
        if any(scalar.dtype not in ("f32", "i32") for scalar in self.scalars):
            return 5
        if any(isinstance(value, Truncated) for value in self.values.values()):
            return 5
        if _is_schema_5(self) or any(map(_is_schema_5, self.then)):
            return 5
        if any(tensor.in_place_of for tensor in self.tensors):
            return 4
        if self.peers or any(scalar.bounded for scalar in self.scalars):
            return 3
        if self.values or self.then or any(DTYPES[tensor.dtype].argument > 1 for tensor in self.tensors):
            return 2
        if any(parameter.is_schema_2() for parameter in self.parameters):
            return 2
        host = host_variables(self)
        launch = host | {"sm_count", "cluster_margin"}
        reading = [(constraint.expr, host) for constraint in self.constraints]
        reading += [(expr, launch) for expr in (*self.grid, self.workspace, self.scratch)]
        for parameter in self.parameters:
            names = {f"{tensor.name}.address" for tensor in self.tensors}
            if isinstance(parameter, IntegerParameter):
                names = {scalar.name for scalar in self.scalars}
            reading += [(expr, launch | names) for expr in getattr(parameter, "expressions", ())]
        new = any(operators(expr) & SCHEMA_2_OPERATORS or not variables(expr) <= allowed for expr, allowed in reading)
        return 2 if new else 1

    def reads(self, name: str) -> bool:
        """Whether some expression of a launch reads the variable `name`."""
        return name in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        exprs = [constraint.expr for constraint in self.constraints]
        for step in self.launches:
            exprs += [*step.grid, *step.block, step.dynamic_shared, step.when]
            exprs += [expr for _, item in flat(step.parameters) for expr in item.expressions]
        return frozenset().union(*map(variables, exprs), *map(value_variables, self.values.values()))

    @cached_property
    def deciding(self) -> frozenset[str]:
        """The float scalars that integers of a launch follow."""
        scalars = (each.scalars for each in self.values.values() if isinstance(each, Truncated))
        return frozenset().union(*scalars)

    @cached_property
    def handles(self) -> frozenset[str]:
        """The scalars that are handles of events."""
        return frozenset(event.argument for step in self.launches for event in step.events)

    def environment(self, env: Mapping[str, int], floats: Mapping[str, float] | None = None) -> dict[str, int]:
        """`env` and, evaluated in it, the record's values. floats: of the scalars that are `deciding`."""
        known = dict(env)
        for name, value in self.values.items():
            known[name] = value_of(value, known, floats or {})
        return known

    def check_complete(self) -> None:
        """Raises RecordError unless symbol and parameter offsets are filled in, aligned and disjoint."""
        for index, launch in enumerate(self.launches):
            check_complete(launch, f"then[{index - 1}]." if index else "")

    def to_json(self) -> dict[str, Any]:
        """JSON types only; `from_json` gives an equal record back."""
        return {
            "schema": self.schema,
            "arch": self.arch,
            "arguments": [argument.to_json() for argument in self.arguments],
            "dims": [dim.to_json() for dim in self.dims],
            "constraints": [constraint.to_json() for constraint in self.constraints],
            **_step_json(self),
            "workspace": {"bytes": thaw(self.workspace), "zeroed": self.workspace_zeroed},
            **({} if self.scratch == 0 else {"scratch": {"bytes": thaw(self.scratch)}}),
            "skip_if_zero": list(self.skip_if_zero),
            **({"values": [{"name": name, **_value_json(each)} for name, each in self.values.items()]}
               if self.values else {}),
            **({"then": [_step_json(step) for step in self.then]} if self.then else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> LaunchRecord:
        """The complete record in `value`; RecordError for another schema or a wrong, missing or unknown field."""
        reader = RecordReader(value)
        schema = reader.integer("schema")
        if schema not in SCHEMAS:
            raise RecordError(
                f"schema: {schema}; this fusekit reads launch records of schema {SCHEMAS[0]} to {SCHEMAS[-1]}; rebuild"
                " the kernel with this version or use the fusekit that wrote it"
            )
        workspace = RecordReader(reader.take("workspace"), "workspace")
        scratch = RecordReader(reader.take("scratch"), "scratch") if "scratch" in reader else None
        record = cls(
            arch=reader.string("arch"),
            arguments=reader.array("arguments", argument_from_json),
            dims=reader.array("dims", Dim.from_json),
            constraints=reader.array("constraints", Constraint.from_json),
            **_step(reader),
            workspace=workspace.expr("bytes"),
            workspace_zeroed=workspace.boolean("zeroed"),
            scratch=0 if scratch is None else scratch.expr("bytes"),
            skip_if_zero=reader.array("skip_if_zero", string),
            values=_values(reader.array("values", _value)) if "values" in reader else {},
            then=reader.array("then", LaunchStep.from_json) if "then" in reader else (),
        )
        workspace.end()
        if scratch is not None:
            scratch.end()
        reader.end()
        record.check_complete()
        if record.schema > schema:
            raise RecordError(f"schema: {schema}; the record says what only schema {record.schema} can; it is damaged")
        return record


_STEP = (
    "symbol", "parameters", "grid", "block", "cluster", "dynamic_shared", "attributes", "preferred_cluster", "when",
    "events",
)  # fmt: skip


def _freeze_step(step: LaunchRecord | LaunchStep) -> None:
    for name in ("parameters", "cluster", "preferred_cluster", "events"):
        object.__setattr__(step, name, tuple(getattr(step, name)))
    for name in ("grid", "block"):
        object.__setattr__(step, name, tuple(freeze(item) for item in getattr(step, name)))
    for name in ("dynamic_shared", "when"):
        object.__setattr__(step, name, freeze(getattr(step, name)))
    object.__setattr__(step, "attributes", dict(step.attributes))


def _is_schema_5(step: LaunchRecord | LaunchStep) -> bool:
    open_ = any(not isinstance(item, int) for item in (*step.block, step.dynamic_shared))
    floats = [item for _, item in flat(step.parameters) if isinstance(item, FloatParameter)]
    new = open_ or step.when != 1 or bool(step.preferred_cluster or step.events)
    return new or any(item.is_schema_5() for item in floats)


def _step(reader: RecordReader) -> dict[str, Any]:
    """The fields of one launch."""
    return {
        "symbol": reader.string("symbol"),
        "parameters": reader.array("parameters", parameter_from_json),
        "grid": triple(reader.array("grid", expression), reader.path("grid")),
        "block": triple(reader.array("block", expression), reader.path("block")),
        "cluster": triple(reader.array("cluster", integer), reader.path("cluster")),
        "dynamic_shared": reader.expr("dynamic_shared"),
        "attributes": reader.mapping("attributes", integer),
        "preferred_cluster": reader.array("preferred_cluster", integer) if "preferred_cluster" in reader else (),
        "when": reader.expr("when") if "when" in reader else 1,
        "events": reader.array("events", LaunchEvent.from_json) if "events" in reader else (),
    }


def _step_json(step: LaunchRecord | LaunchStep) -> dict[str, Any]:
    return {
        "symbol": step.symbol,
        "parameters": [parameter.to_json() for parameter in step.parameters],
        "grid": [thaw(item) for item in step.grid],
        "block": [thaw(item) for item in step.block],
        "cluster": list(step.cluster),
        "dynamic_shared": thaw(step.dynamic_shared),
        "attributes": dict(sorted(step.attributes.items())),
        **({"preferred_cluster": list(step.preferred_cluster)} if step.preferred_cluster else {}),
        **({} if step.when == 1 else {"when": thaw(step.when)}),
        **({"events": [event.to_json() for event in step.events]} if step.events else {}),
    }


def _value_json(value: Value) -> dict[str, Any]:
    if isinstance(value, Truncated):
        return {"truncated": thaw(value.expr)}  # type: ignore[arg-type]
    return {"value": thaw(value)}


def _value(value: Any, where: str) -> tuple[str, Value]:
    reader = RecordReader(value, where)
    name, what = reader.string("name"), reader.take("truncated") if "truncated" in reader else None
    if what is not None:
        validate_float(what, f"{where}.truncated")
    pair = name, Truncated(what) if what is not None else reader.expr("value")
    reader.end()
    return pair


def _values(pairs: tuple[tuple[str, Value], ...]) -> dict[str, Value]:
    unique([name for name, _ in pairs], "values")
    return dict(pairs)

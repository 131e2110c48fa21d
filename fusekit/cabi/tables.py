"""A launch record as constants of the C launcher (`record.c` declares their types)."""

from __future__ import annotations

import re
import struct

from fusekit.abi import (
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    TensorArgument,
    TensorMapParameter,
    flat,
    variables,
)
from fusekit.abi.floats import FloatExpr, evaluate_float
from fusekit.abi.parameters import ENCODINGS, INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLE_BYTES, Scalar
from fusekit.dtypes import DTYPES
from fusekit.errors import UsageError

# Limits of the C launcher's arrays.
MOST_RANK, MOST_VARIABLES, MOST_NODES, MOST_PARAMETERS, MOST_SPACE, MOST_TENSORS = 5, 512, 16, 256, 32764, 32
_OPERATORS = {
    name: f"FK_{name.upper()}"
    for name in (
        "add", "sub", "mul", "floordiv", "ceildiv", "mod", "min", "max", "eq", "ne", "lt", "le", "bit_length", "exp2",
        "fadd", "fsub", "fmul", "fdiv",
    )
}  # fmt: skip
_SWIZZLES = tuple(SWIZZLE_BYTES)
_ARCH = re.compile(r"sm_([0-9]+)([0-9])([af]?)")
_OWN_MEMORY = {"workspace": "FK_WORKSPACE", "scratch": "FK_SCRATCH"}
_NO_EXPRESSION = "{NULL, 0}"


def string(text: str) -> str:
    """A C string literal."""
    shown = text.encode("unicode_escape").decode().replace('"', '\\"').replace("?", "\\?")
    return f'"{shown}"'


def constant(value: int) -> str:
    """A signed 64-bit constant; the smallest one has no literal of its own."""
    return "INT64_MIN" if value == -(2**63) else f"INT64_C({value})"


class Tables:
    """The tables of one kernel. `number` keeps the names of several kernels in one file apart."""

    def __init__(self, number: int, name: str, record: LaunchRecord, cubin: str, cubin_size: int) -> None:
        self.number = number
        self.record = record
        self._name = name
        self._cubin = cubin
        self._cubin_size = cubin_size
        self._arrays: dict[tuple[str, ...], str] = {}
        self._lines: list[str] = []
        self._variables = _variables(record)
        self._floats = [scalar.name for scalar in record.scalars if scalar.dtype == "f32"]
        self._check()

    def text(self) -> str:
        """Definitions of everything; the last one is ``fk_record_<number>``."""
        record, number = self.record, self.number
        host = {dim.name for dim in record.dims}
        host |= {tensor.stride_variable(index) for tensor in record.tensors for index in range(tensor.rank)}
        constraints = [
            f"{{{self._expression(item.expr)}, {string(item.message)}, {int(not variables(item.expr) <= host)}}}"
            for item in record.constraints
        ]
        dims = [
            f"{{{string(dim.name)}, {constant(dim.divisor)}, {constant(dim.minimum)}, {constant(dim.maximum)}}}"
            for dim in record.dims
        ]
        places = [dim.name for dim in record.dims]
        match = _ARCH.fullmatch(record.arch)
        assert match is not None  # a record checks its architecture
        first = ", ".join(str(self._first(kind)) for kind in ("address", "integer"))
        own = ", ".join(str(self._variables[name]) for name in ("sm_count", "cluster_margin", "active_clusters"))
        members = [
            string(self._name),
            f"{match[1]}, {match[2]}, {int(match[3] == 'a')}",
            f"(const unsigned char *){self._cubin}, {self._cubin_size}",
            self._array("fk_dim", "dims", dims),
            self._array("fk_tensor", "tensors", [self._tensor(tensor) for tensor in record.tensors]),
            self._array("fk_constraint", "constraints", constraints),
            self._array("fk_expression", "named", [self._expression(expr) for expr in record.values.values()]),
            self._array("fk_node", "nodes", [self._node(index, node) for index, node in enumerate(record.launches)]),
            self._array("int", "skip", [str(places.index(name)) for name in record.skip_if_zero]),
            f"{first}, {own}, {len(self._variables) - len(record.values)}",
            str(int(record.reads("active_clusters"))),
            f"{self._expression(record.workspace)}, {int(record.workspace_zeroed)}",
            _NO_EXPRESSION if record.scratch == 0 else self._expression(record.scratch),
        ]
        body = ",\n    ".join(members)
        return "\n".join([*self._lines, f"static const fk_record fk_record_{number} = {{\n    {body}\n}};", ""])

    def _node(self, index: int, node: LaunchRecord) -> str:
        """One launch of the record."""
        placed = sorted(node.parameters, key=lambda item: item.offset)
        parameters = [f"{{{string(item.name)}, {item.offset}, {item.size}}}" for item in placed]
        parts = [self._part(index, offset, item) for offset, item in flat(placed)]
        settings = node.attributes
        members = [
            string(node.symbol),
            self._array("fk_parameter", f"parameters_{index}", parameters),
            self._array("fk_part", f"parts_{index}", parts),
            "{" + ", ".join(self._expression(extent) for extent in node.grid) + "}",
            f"{_braced(node.block)}, {_braced(node.cluster)}, {node.dynamic_shared}",
            f"{int(bool(settings.get('cooperative')))}, {int(bool(settings.get('programmatic_stream_serialization')))},"
            f" {int(bool(settings.get('non_portable_cluster_size_allowed')))},"
            f" {settings.get('preferred_shared_memory_carveout', -1)}",
        ]
        return "{" + ",\n     ".join(members) + "}"

    def _check(self) -> None:
        record, launches = self.record, self.record.launches
        parameters = [item for launch in launches for item in launch.parameters]
        for what, count, most in (
            ("variables", len(self._variables), MOST_VARIABLES), ("launches", len(launches), MOST_NODES),
            ("parameters in one launch", max(len(launch.parameters) for launch in launches), MOST_PARAMETERS),
            ("bytes of parameters", max((item.offset + item.size for item in parameters), default=0), MOST_SPACE),
            ("tensors", len(record.tensors), MOST_TENSORS),
            ("dims in one tensor", max((tensor.rank for tensor in record.tensors), default=0), MOST_RANK),
        ):  # fmt: skip
            if count > most:
                raise UsageError(f"{self._name} has {count} {what}; the C launcher takes at most {most}")

    def _first(self, kind: str) -> int:
        """Index of the first variable of its kind; the others follow."""
        if kind == "address":
            names = [f"{tensor.name}.address" for tensor in self.record.tensors]
        else:
            names = [scalar.name for scalar in self.record.scalars if scalar.dtype == "i32"]
        return self._variables[names[0]] if names else 0

    def _array(self, kind: str, name: str, items: list[str]) -> str:
        """Defines an array and returns the pair (array, count) for the record; nothing has the pair (NULL, 0)."""
        if not items:
            return "NULL, 0"
        label = f"fk_{name}_{self.number}"
        body = ",\n    ".join(items)
        self._lines.append(f"static const {kind} {label}[] = {{\n    {body}\n}};")
        return f"{label}, {len(items)}"

    def _expression(self, expr: Expr) -> str:
        return self._program(self._steps(expr))

    def _program(self, steps: list[str]) -> str:
        """The pair (steps, count); what several expressions have in common is defined once."""
        label = self._arrays.get(tuple(steps))
        if label is None:
            label = self._arrays[tuple(steps)] = f"fk_e{self.number}_{len(self._arrays)}"
            self._lines.append(f"static const fk_step {label}[] = {{{', '.join(steps)}}};")
        return f"{{{label}, {len(steps)}}}"

    def _steps(self, expr: Expr) -> list[str]:
        """Postfix order. The first two operands of a longer sum are added first, so the stack stays as deep as the
        expression.
        """
        if isinstance(expr, int):
            return [f"{{FK_PUSH, {constant(expr)}}}"]
        if isinstance(expr, str):
            return [f"{{FK_VARIABLE, {self._variables[expr]}}}"]
        operator, *operands = expr
        if operator == "if":
            condition, then, other = (self._steps(item) for item in operands)
            return [
                *condition, f"{{FK_UNLESS, {len(then) + 1}}}", *then, f"{{FK_JUMP, {len(other)}}}", *other,
            ]  # fmt: skip
        return _postfix(operator, [self._steps(item) for item in operands])

    def _float_steps(self, expr: FloatExpr) -> list[str]:
        if isinstance(expr, list | tuple):
            return _postfix(expr[0], [self._float_steps(item) for item in expr[1:]])
        if expr in self._floats:
            return [f"{{FK_VARIABLE, {self._floats.index(str(expr))}}}"]
        (bits,) = struct.unpack("<I", struct.pack("<f", evaluate_float(expr, {})))
        return [f"{{FK_PUSH, INT64_C({bits:#010x}) /* {expr} */}}"]

    def _tensor(self, tensor: TensorArgument) -> str:
        free = sum(tensor.reads_stride(index) << index for index in range(tensor.rank))
        shape = self._expressions_of(tensor.shape)
        strides = self._expressions_of(tensor.strides)
        first = self._variables[tensor.stride_variable(0)] if tensor.rank else 0
        return (
            f"{{{string(tensor.name)}, {int(tensor.written)}, {tensor.itemsize}, {tensor.rank}, {tensor.alignment},"
            f" {constant(tensor.stride_divisor)},\n     {shape},\n     {strides},\n     {free}u, {first}}}"
        )

    def _expressions_of(self, items: tuple[Expr, ...]) -> str:
        shown = [self._expression(item) for item in items]
        return "{" + ", ".join(shown + [_NO_EXPRESSION] * (MOST_RANK - len(shown))) + "}"

    def _part(self, node: int, offset: int, item: TensorMapParameter | Scalar) -> str:
        kind, argument, value, tensor_map = "FK_POINTER", 0, _NO_EXPRESSION, "NULL"
        if isinstance(item, TensorMapParameter):
            kind, tensor_map = "FK_TENSOR_MAP", f"&{self._map(node, item)}"
        elif isinstance(item, IntegerParameter):
            kind, value = "FK_INT" if item.signed else "FK_UINT", self._expression(item.value)
        elif isinstance(item, FloatParameter):
            kind, value = "FK_FLOAT", self._program(self._float_steps(item.value))
        elif isinstance(item, PointerParameter):
            kind = _OWN_MEMORY.get(item.argument, kind)
            if item.argument not in _OWN_MEMORY:
                argument = [tensor.name for tensor in self.record.tensors].index(item.argument)
            if item.shift != 0:
                value = self._expression(item.shift)
        return f"{{{string(item.name)}, {kind}, {offset}, {item.size}, {argument}, {value}, {tensor_map}}}"

    def _map(self, node: int, parameter: TensorMapParameter) -> str:
        label = f"fk_map_{self.number}_{node}_{parameter.name}"
        boxes = [extents + (0,) * (MOST_RANK - len(extents)) for extents in (parameter.box, parameter.element_strides)]
        members = [
            f"{DTYPES[parameter.dtype].number}, {parameter.rank}, {self._expression(parameter.address)}",
            self._expressions_of(parameter.dims),
            self._expressions_of(parameter.strides),
            f"{_braced(boxes[0])}, {_braced(boxes[1])}",
            f"{INTERLEAVES.index(parameter.interleave)}, {_SWIZZLES.index(parameter.swizzle)},"
            f" {L2_PROMOTIONS.index(parameter.l2_promotion)}, {OOB_FILLS.index(parameter.oob_fill)},"
            f" {ENCODINGS.index(parameter.encoding)}",
        ]
        body = ",\n    ".join(members)
        self._lines.append(f"static const fk_map {label} = {{\n    {body}\n}};")
        return label


def _variables(record: LaunchRecord) -> dict[str, int]:
    """Indices of what expressions read: dims, strides of every tensor, addresses, i32 scalars, the launch's
    own, the record's values.
    """
    names = [dim.name for dim in record.dims]
    names += [tensor.stride_variable(index) for tensor in record.tensors for index in range(tensor.rank)]
    names += [f"{tensor.name}.address" for tensor in record.tensors]
    names += [scalar.name for scalar in record.scalars if scalar.dtype == "i32"]
    names += ["sm_count", "cluster_margin", "active_clusters", *record.values]
    return {name: index for index, name in enumerate(names)}


def _postfix(operator: str, operands: list[list[str]]) -> list[str]:
    """An operator of one operand behind it, any other behind each operand from the second on."""
    own = f"{{{_OPERATORS[operator]}, 0}}"
    steps = [*operands[0], own] if len(operands) == 1 else list(operands[0])
    for operand in operands[1:]:
        steps += [*operand, own]
    return steps


def _braced(values: tuple[int, ...]) -> str:
    return "{" + ", ".join(f"{value}u" for value in values) + "}"

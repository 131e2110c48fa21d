"""A launch record as constants of the C launcher (`record.c` declares their types)."""

from __future__ import annotations

import re

from fusekit.abi import (
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    Parameter,
    PointerParameter,
    TensorArgument,
    TensorMapParameter,
)
from fusekit.abi.parameters import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLE_BYTES
from fusekit.errors import UsageError

# Limits of the C launcher's arrays.
MOST_RANK, MOST_VARIABLES, MOST_STACK, MOST_MAPS, MOST_PARAMETERS, MOST_TENSORS = 5, 256, 40, 16, 96, 32
_OPERATORS = {
    "add": "FK_ADD", "sub": "FK_SUB", "mul": "FK_MUL", "floordiv": "FK_FLOORDIV", "ceildiv": "FK_CEILDIV",
    "mod": "FK_MOD", "min": "FK_MIN", "max": "FK_MAX",
}  # fmt: skip
# CUtensorMapDataType, CUtensorMapSwizzle
_DTYPES = ("u8", "u16", "u32", "i32", "u64", "i64", "fp16", "f32", "f64", "bf16")
_SWIZZLES = tuple(SWIZZLE_BYTES)
_ARCH = re.compile(r"sm_([0-9]+)([0-9])([af]?)")
_BESIDE = {"workspace": "FK_WORKSPACE", "scratch": "FK_SCRATCH"}
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
        self._expressions: dict[Expr, str] = {}
        self._lines: list[str] = []
        self._variables = _variables(record)
        self._check()

    def text(self) -> str:
        """Definitions of everything; the last one is ``fk_record_<number>``."""
        record, number = self.record, self.number
        tensors = [self._tensor(tensor) for tensor in record.tensors]
        parameters = [self._parameter(item) for item in sorted(record.parameters, key=lambda item: item.offset)]
        constraints = [f"{{{self._expression(item.expr)}, {string(item.message)}}}" for item in record.constraints]
        dims = [
            f"{{{string(dim.name)}, {constant(dim.divisor)}, {constant(dim.minimum)}, {constant(dim.maximum)}}}"
            for dim in record.dims
        ]
        places = [dim.name for dim in record.dims]
        skip = [str(places.index(name)) for name in record.skip_if_zero]
        arrays = [
            self._array("fk_dim", "dims", dims),
            self._array("fk_tensor", "tensors", tensors),
            self._array("fk_constraint", "constraints", constraints),
            self._array("fk_parameter", "parameters", parameters),
        ]
        skips = self._array("int", "skip", skip)
        match = _ARCH.fullmatch(record.arch)
        assert match is not None  # a record checks its architecture
        first = {kind: self._first(kind) for kind in ("address", "integer")}
        settings = record.attributes
        maps = sum(isinstance(item, TensorMapParameter) for item in record.parameters)
        members = [
            f"{string(self._name)}, {string(record.symbol)}",
            f"{match[1]}, {match[2]}, {int(match[3] == 'a')}",
            f"(const unsigned char *){self._cubin}, {self._cubin_size}",
            *arrays,
            str(maps),
            f"{first['address']}, {first['integer']}, {self._variables['sm_count']},"
            f" {self._variables['cluster_margin']}, {len(self._variables)}",
            "{" + ", ".join(self._expression(extent) for extent in record.grid) + "}",
            f"{_braced(record.block)}, {_braced(record.cluster)}, {record.dynamic_shared}",
            f"{int(bool(settings.get('cooperative')))}, {int(bool(settings.get('programmatic_stream_serialization')))},"
            f" {int(bool(settings.get('non_portable_cluster_size_allowed')))},"
            f" {settings.get('preferred_shared_memory_carveout', -1)}",
            f"{self._expression(record.workspace)}, {int(record.workspace_zeroed)}",
            _NO_EXPRESSION if record.scratch == 0 else self._expression(record.scratch),
            skips,
        ]
        body = ",\n    ".join(members)
        return "\n".join([*self._lines, f"static const fk_record fk_record_{number} = {{\n    {body}\n}};", ""])

    def _check(self) -> None:
        record = self.record
        if record.schema != 1:
            raise UsageError(
                f"{self._name} has a launch record of schema {record.schema}; the C launcher reads schema 1; launch it"
                " from Python"
            )
        maps = sum(isinstance(item, TensorMapParameter) for item in record.parameters)
        for what, count, most in (
            ("variables", len(self._variables), MOST_VARIABLES), ("tensor maps", maps, MOST_MAPS),
            ("parameters", len(record.parameters), MOST_PARAMETERS), ("tensors", len(record.tensors), MOST_TENSORS),
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
        if expr not in self._expressions:
            steps = self._steps(expr)
            label = f"fk_e{self.number}_{len(self._expressions)}"
            self._lines.append(f"static const fk_step {label}[] = {{{', '.join(steps)}}};")
            self._expressions[expr] = f"{{{label}, {len(steps)}}}"
        return self._expressions[expr]

    def _steps(self, expr: Expr) -> list[str]:
        """Postfix order. The first two operands of a longer sum are added first, so the stack stays as deep as the
        expression.
        """
        if isinstance(expr, int):
            return [f"{{FK_PUSH, {constant(expr)}}}"]
        if isinstance(expr, str):
            return [f"{{FK_VARIABLE, {self._variables[expr]}}}"]
        operator, *operands = expr
        steps = self._steps(operands[0])
        for operand in operands[1:]:
            steps += [*self._steps(operand), f"{{{_OPERATORS[operator]}, 0}}"]
        return steps

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

    def _parameter(self, parameter: Parameter) -> str:
        tensors = [tensor.name for tensor in self.record.tensors]
        floats = [scalar.name for scalar in self.record.scalars if scalar.dtype == "f32"]
        kind, argument, value, tensor_map = "FK_POINTER", 0, _NO_EXPRESSION, "NULL"
        if isinstance(parameter, TensorMapParameter):
            kind, tensor_map = "FK_TENSOR_MAP", f"&{self._map(parameter)}"
            argument = tensors.index(parameter.argument)
        elif isinstance(parameter, IntegerParameter):
            kind, value = {"i32": "FK_INT32", "i64": "FK_INT64"}[parameter.dtype], self._expression(parameter.value)
        elif isinstance(parameter, FloatParameter):
            kind, argument = "FK_FLOAT", floats.index(parameter.argument)
        elif isinstance(parameter, PointerParameter):
            if parameter.argument in _BESIDE:
                kind = _BESIDE[parameter.argument]
            else:
                argument = tensors.index(parameter.argument)
        return (
            f"{{{string(parameter.name)}, {kind}, {parameter.offset}, {parameter.size}, {argument}, {value},"
            f" {tensor_map}}}"
        )

    def _map(self, parameter: TensorMapParameter) -> str:
        label = f"fk_map_{self.number}_{parameter.name}"
        boxes = [extents + (0,) * (MOST_RANK - len(extents)) for extents in (parameter.box, parameter.element_strides)]
        members = [
            f"{_DTYPES.index(parameter.dtype)}, {parameter.rank}, {self._expression(parameter.address)}",
            self._expressions_of(parameter.dims),
            self._expressions_of(parameter.strides),
            f"{_braced(boxes[0])}, {_braced(boxes[1])}",
            f"{INTERLEAVES.index(parameter.interleave)}, {_SWIZZLES.index(parameter.swizzle)},"
            f" {L2_PROMOTIONS.index(parameter.l2_promotion)}, {OOB_FILLS.index(parameter.oob_fill)}",
        ]
        body = ",\n    ".join(members)
        self._lines.append(f"static const fk_map {label} = {{\n    {body}\n}};")
        return label


def _variables(record: LaunchRecord) -> dict[str, int]:
    """Indices of what expressions read: dims, strides of every tensor, addresses, i32 scalars, the launch's own."""
    names = [dim.name for dim in record.dims]
    names += [tensor.stride_variable(index) for tensor in record.tensors for index in range(tensor.rank)]
    names += [f"{tensor.name}.address" for tensor in record.tensors]
    names += [scalar.name for scalar in record.scalars if scalar.dtype == "i32"]
    names += ["sm_count", "cluster_margin"]
    return {name: index for index, name in enumerate(names)}


def _braced(values: tuple[int, ...]) -> str:
    return "{" + ", ".join(f"{value}u" for value in values) + "}"

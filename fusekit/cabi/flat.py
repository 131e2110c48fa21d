"""Launch records, and what else the C launcher reads, in the form of `layout`."""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fusekit.abi import (
    Argument,
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PeersArgument,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
    TensorMapParameter,
    Truncated,
    flat,
    variables,
)
from fusekit.abi.events import PROGRAMMATIC
from fusekit.abi.floats import FloatExpr, evaluate_float
from fusekit.abi.layer_memory import Layout
from fusekit.abi.layer_pass import LayerPass
from fusekit.abi.layer_record import LayerRecord
from fusekit.abi.limits import LAUNCH_VARIABLES, WORD
from fusekit.abi.parameters import ENCODINGS, INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLE_BYTES, Scalar
from fusekit.cabi.layout import DTYPES, KINDS, LAYER_VARIABLES, OPERATORS, PASSES, PLACES, TABLES, Field
from fusekit.dtypes import DTYPES as TYPES
from fusekit.dtypes import FLOATS
from fusekit.errors import UsageError

_CODES = {name: code for code, name in enumerate(OPERATORS)}
_SWIZZLES = tuple(SWIZZLE_BYTES)
_ARCH = re.compile(r"sm_([0-9]+)([0-9])([af]?)")
_RUNTIME_MEMORY = ("workspace", "scratch")
FLOAT_KINDS = dict(zip(FLOATS, ("float", "double", "bfloat", "half"), strict=True))
_SUFFIXES = ("", "f", "a")
_MEMBERS = {
    "cooperative": "cooperative",
    "serialization": "programmatic_stream_serialization",
    "non_portable_cluster": "non_portable_cluster_size_allowed",
}

_SINGLE = frozenset({"fadd", "fsub", "fmul", "fdiv", "fsqrt"})  # of binary32 numbers
Steps = list[tuple[int, int]]


def words(items: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(items)}q", *items)


def encode(title: str, table: str, rows: Sequence[Mapping[str, Any]], where: str = "") -> bytes:
    """Rows of a table and what follows them. title: whose they are, for the error.

    A row maps names of fields to a number or several, a text, rows, steps or several; what it lacks is 0 or empty.
    Raises UsageError for what the C launcher would refuse as beyond its limits.
    """
    head: list[int] = []
    tail: list[bytes] = []
    for number, row in enumerate(rows):
        place = f"{where}[{number}]." if where else ""
        for field in TABLES[table]:
            value = row.get(
                field.name, "" if field.kind == "text" else 0 if field.kind == "whole" and field.count == 1 else ()
            )
            if field.kind == "whole":
                numbers = [value] if field.count == 1 else [*value, *[field.low] * (field.count - len(value))]
                for item in numbers:
                    _check(title, place, field, item)
                head += numbers
            elif field.kind == "text":
                data = value.encode("utf-8", "surrogatepass")
                _check(title, place, field, len(data))
                head.append(len(data))
                tail.append(data.ljust((len(data) // 8 + 1) * 8, b"\0"))
            elif field.kind == "rows":
                _check(title, place, field, len(value))
                head += (0, len(value))
                tail.append(encode(title, field.of, value, f"{place}{field.name}"))
            else:
                programs = [value] if field.count == 1 else [*value, *[()] * (field.count - len(value))]
                for steps in programs:
                    _check(title, place, field, len(steps))
                    head += (0, len(steps))
                    tail.append(words([item for step in steps for item in step]))
    return words(head) + b"".join(tail)


def _check(title: str, where: str, field: Field, value: int) -> None:
    if not field.low <= value <= field.high:
        count = "" if field.kind == "whole" else " entries" if field.kind != "text" else " bytes"
        raise UsageError(
            f"{title}: {where}{field.name} has {value}{count}; the C launcher takes {field.low} to {field.high}"
        )


def _check_defaults(title: str, launch: LaunchRecord, defaults: Mapping[str, Any]) -> None:
    """Raises UsageError for a default that its argument cannot be: C would cut it to one that it can."""
    margin = ScalarArgument("cluster_margin", "i32", minimum=0)
    for scalar in (margin, *launch.scalars):
        value = defaults.get(scalar.name, scalar.default)
        if scalar.is_integer and value is not None and not (type(value) is int and scalar.allows(value)):
            raise UsageError(
                f"{title}: the default {scalar.name} = {value!r} {scalar.rule}, as an integer; say so in its spec, and"
                " build the kernel again"
            )
        if scalar.dtype == "i64" and value is not None and float(value) != value:
            raise UsageError(f"{title}: the default {scalar.name} = {value} is beyond what a double of C holds")


def of_arch(arch: str) -> dict[str, Any]:
    """Text, numbers and suffix of an architecture."""
    match = _ARCH.fullmatch(arch)
    numbers = ("0", "0", "") if match is None else match.groups()  # of no device
    return {"arch": arch, "major": int(numbers[0]), "minor": int(numbers[1]), "suffix": _SUFFIXES.index(numbers[2])}


def record(name: str, launch: LaunchRecord, defaults: Mapping[str, Any], *, in_place: bool = True) -> bytes:
    """A complete launch record. name: the kernel's; defaults: the spec's, which come before the record's. in_place:
    False for a loader of before, which refuses every output in another argument's memory.
    """
    rows, values = more_rows(launch), _more_values(launch)
    tail = encode(name, "more", [{"nodes": rows, "values": values}]) if any(rows) or values else b""
    return encode(name, "record", [record_row(name, launch, defaults, in_place=in_place)]) + tail


def record_row(
    name: str, launch: LaunchRecord, defaults: Mapping[str, Any], *, in_place: bool = True
) -> dict[str, Any]:
    """The same as the one row of its table."""
    _check_defaults(name, launch, defaults)
    return _RecordWriter(name, launch, defaults, in_place).row()


def layer(record: LayerRecord, keys: Sequence[str]) -> bytes:
    """A layer record. keys: of the kernels, by the number that C has for each."""
    names = {name: index for index, name in enumerate((*LAYER_VARIABLES, *record.dims))}
    windows = {name: index for index, name in enumerate(record.windows)}
    places = {name: index for index, name in enumerate((*PLACES, *windows))}
    buffers = {name: index for index, name in enumerate(record.buffers)}
    parts = {name: index for index, name in enumerate(record.parts)}
    numbers = {key: index for index, key in enumerate(keys)}

    def steps(each: LayerPass) -> list[dict[str, Any]]:
        bits = {name: index for index, name in enumerate(each.outputs)}
        return [
            {
                "part": parts[step.part], "outputs": 0 if step.outputs is None else _mask(step.outputs, each.outputs),
                "needs": bits.get(step.needs, -1), "unless": bits.get(step.unless, -1),
                "window": windows.get(step.window, -1), "on_side": int(step.on_side), "awaits": int(step.awaits),
                "apart": int(step.apart),
                "writes": _indices(map(buffers.__getitem__, step.writes if step.on_side else ())),
                "operands": [
                    {"name": argument, "buffer": buffers[name], "written": int(name in step.writes)}
                    for argument, name in step.arguments.items()
                ],
            }
            for step in each.steps
        ]  # fmt: skip

    def layout(each: Layout, outputs: Sequence[str]) -> dict[str, Any]:
        return {
            "outputs": _mask(each.outputs, outputs), "lends": _mask(each.lends, outputs),
            "in_place": int(each.in_place), "since": each.since,
            "until": WORD if each.until == math.inf else int(each.until),
            "places": [
                {"buffer": buffers[place.buffer], "home": buffers.get(place.home, -1),
                 "above": _indices(map(buffers.__getitem__, place.above))}
                for place in each.places
            ],
        }  # fmt: skip

    def of_pass(which: str) -> dict[str, Any]:
        if which not in record.passes:
            return {}
        each = record.passes[which]
        return {
            "inputs": _indices(map(buffers.__getitem__, each.inputs)),
            "outputs": _indices(map(buffers.__getitem__, each.outputs)), "steps": steps(each),
            "layouts": [layout(item, each.outputs) for item in each.layouts], "in_place": _indices(each.in_place),
        }  # fmt: skip

    row = {
        "name": record.name, "arch": record.arch, "kernel_count": len(keys), "variable_count": len(names),
        "dims": [{"expression": _steps_of(expr, names)} for expr in record.dims.values()],
        "ranges": names[record.range_of],
        "windows": [{"name": name, "bytes": _steps_of(size, names)} for name, size in record.windows.items()],
        "capacity": _steps_of(record.limits.get("capacity", 0), {"tokens": names["T"]}),
        "most_rows": _steps_of(record.limits.get("rows", 0), names),
        "buffers": [
            {"name": name, "dtype": DTYPES.index(each.dtype), "itemsize": TYPES[each.dtype].bytes,
             "rank": len(each.shape), "place": places[each.place], "offset": _steps_of(each.offset, names),
             "shape": [_steps_of(extent, names) for extent in each.shape]}
            for name, each in record.buffers.items()
        ],
        "parts": [
            {"name": name, "rungs": [
                {"tokens": WORD if most is None else most, "kernel": -1 if key is None else numbers[key]}
                for most, key in ladder
            ]}
            for name, ladder in record.parts.items()
        ],
        "passes": [of_pass(which) for which in PASSES],
    }  # fmt: skip
    return encode(record.name, "layer", [row])


def _mask(names: Collection[str], outputs: Sequence[str]) -> int:
    return sum(1 << index for index, name in enumerate(outputs) if name in names)


def _indices(numbers: Iterable[int]) -> list[dict[str, int]]:
    return [{"index": number} for number in numbers]


def more_rows(launch: LaunchRecord) -> list[dict[str, Any]]:
    """What a node's own row has no place for, by node."""
    return [_more(node, _RecordWriter("", launch, {}, True)) for node in launch.launches]


def _more_values(launch: LaunchRecord) -> list[dict[str, Any]]:
    """The floats that values are made of; none where no value is."""
    writer = _RecordWriter("", launch, {}, True)
    rows = [
        {"number": writer.float_steps(each.expr, single=False)} if isinstance(each, Truncated) else {}
        for each in launch.values.values()
    ]
    return rows if any(rows) else []


def _more(node: LaunchRecord, writer: _RecordWriter) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if node.when != 1:
        row["when"] = writer.steps(node.when)
    if not all(isinstance(extent, int) for extent in node.block):
        row["block"] = [writer.steps(extent) for extent in node.block]
    if not isinstance(node.dynamic_shared, int):
        row["shared"] = writer.steps(node.dynamic_shared)
    if node.preferred_cluster:
        row["preferred"] = node.preferred_cluster
    for event in node.events:
        name = "programmatic" if event.kind == PROGRAMMATIC else "completion"
        row |= {name: writer.variable(event.argument), f"{name}_flags": event.flags}
        if event.kind == PROGRAMMATIC:
            row["at_block_start"] = event.at_block_start
    return row


class _RecordWriter:
    def __init__(self, name: str, launch: LaunchRecord, defaults: Mapping[str, Any], in_place: bool) -> None:
        self._name, self._in_place = name, in_place
        self._launch = launch
        self._defaults = defaults
        self._tensors = [tensor.name for tensor in launch.tensors]
        self._floats = [scalar.name for scalar in launch.scalars if scalar.is_float]
        names = [*LAUNCH_VARIABLES, *(dim.name for dim in launch.dims)]
        self._first = [len(names)]  # of each kind of variables
        for kind in (
            [tensor.stride_variable(index) for tensor in launch.tensors for index in range(tensor.rank)],
            [f"{tensor.name}.address" for tensor in launch.tensors],
            [scalar.name for scalar in launch.scalars if scalar.is_integer],
            launch.values,
        ):
            names += kind
            self._first.append(len(names))
        self._variables = {variable: index for index, variable in enumerate(names)}

    def row(self) -> dict[str, Any]:
        launch = self._launch
        arch = of_arch(launch.arch)
        host = {dim.name for dim in launch.dims}
        host |= {tensor.stride_variable(index) for tensor in launch.tensors for index in range(tensor.rank)}
        early: list[dict[str, Any]] = []
        late: list[dict[str, Any]] = []
        for item in launch.constraints:
            row = {"expression": self.steps(item.expr), "message": item.message}
            (early if variables(item.expr) <= host else late).append(row)
        for scalar in launch.scalars:
            if scalar.bounded:
                late.append({"expression": self.steps(_beyond(scalar)), "message": f"{scalar.name} {scalar.rule}"})
        strides = itertools.accumulate((tensor.rank for tensor in launch.tensors), initial=self._first[0])
        first = ("first_stride", "first_address", "first_integer", "first_value", "variable_count")
        return {
            **arch, "name": self._name, "exact": int(arch["suffix"] == 2), **dict(zip(first, self._first, strict=True)),
            "margin": self._defaults.get("cluster_margin", 0), "float_count": len(self._floats),
            "asks_clusters": int(launch.reads("active_clusters")), "workspace": self.steps(launch.workspace),
            "workspace_zeroed": int(launch.workspace_zeroed),
            "scratch": () if launch.scratch == 0 else self.steps(launch.scratch),
            "dims": [{"name": dim.name, "divisor": dim.divisor, "minimum": dim.minimum, "maximum": dim.maximum}
                     for dim in launch.dims],
            "tensors": [self._tensor(tensor, first) for tensor, first in zip(launch.tensors, strides, strict=False)],
            "arguments": [self._argument(single) for argument in launch.arguments for single in _single(argument)],
            "constraints": early, "late_constraints": late,
            "values": [
                {} if isinstance(each, Truncated) else {"expression": self.steps(each)}
                for each in launch.values.values()
            ],
            "skips": [{"dim": self._variables[name]} for name in launch.skip_if_zero],
            "nodes": [self._node(node) for node in launch.launches],
        }  # fmt: skip

    def _tensor(self, tensor: TensorArgument, first_stride: int) -> dict[str, Any]:
        free = [tensor.reads_stride(index) for index in range(tensor.rank)]
        over = 2 + self._tensors.index(tensor.in_place_of) if self._in_place and tensor.in_place_of else 0
        return {
            "name": tensor.name, "written": over or int(tensor.written), "itemsize": tensor.itemsize,
            "rank": tensor.rank, "alignment": tensor.alignment, "stride_divisor": tensor.stride_divisor,
            "free_strides": sum(is_free << index for index, is_free in enumerate(free)),
            "first_stride": first_stride,
            "shape": [self.steps(extent) for extent in tensor.shape],
            "strides": [
                () if is_free else self.steps(stride) for is_free, stride in zip(free, tensor.strides, strict=True)
            ],
        }  # fmt: skip

    def _argument(self, argument: TensorArgument | ScalarArgument) -> dict[str, Any]:
        row = {"name": argument.name, "dtype": DTYPES.index(argument.dtype)}
        if isinstance(argument, TensorArgument):
            return row | {"tensor": self._tensors.index(argument.name)}
        value = default_of(argument, self._defaults)
        (bits,) = struct.unpack("<q", struct.pack("<d", 0 if value is None else value))
        return row | {"tensor": -1, "has_default": int(value is not None), "default_bits": bits}

    def _node(self, node: LaunchRecord) -> dict[str, Any]:
        placed = sorted(node.parameters, key=lambda item: item.offset)
        settings = node.attributes
        return {
            "symbol": node.symbol, "grid": [self.steps(extent) for extent in node.grid],
            "block": [extent if isinstance(extent, int) else 1 for extent in node.block], "cluster": node.cluster,
            "shared": node.dynamic_shared if isinstance(node.dynamic_shared, int) else 0,
            "parameters": [{"name": item.name, "offset": item.offset, "size": item.size} for item in placed],
            "parts": [self._part(offset, item) for offset, item in flat(placed)],
            **{field: int(bool(settings.get(name))) for field, name in _MEMBERS.items()},
            "carveout": settings.get("preferred_shared_memory_carveout", -1),
        }  # fmt: skip

    def _part(self, offset: int, item: TensorMapParameter | Scalar) -> dict[str, Any]:
        row: dict[str, Any] = {"name": item.name, "offset": offset, "size": item.size, "argument": -1}
        if isinstance(item, TensorMapParameter):
            kind, row["map"] = "tensor_map", [self._map(item)]
        elif isinstance(item, IntegerParameter):
            kind, row["value"] = "int" if item.dtype[0] == "i" else "uint", self.steps(item.value)
        elif isinstance(item, FloatParameter):
            kind = FLOAT_KINDS[item.dtype]
            row["number"] = self.float_steps(item.value, single=item.dtype == "f32")
        else:
            assert isinstance(item, PointerParameter)
            kind = item.argument if item.argument in _RUNTIME_MEMORY else "pointer"
            if kind == "pointer":
                row["argument"] = self._tensors.index(item.argument)
            if item.shift != 0:
                row["value"] = self.steps(item.shift)
        return row | {"kind": KINDS.index(kind)}

    def _map(self, parameter: TensorMapParameter) -> dict[str, Any]:
        return {
            "dtype": DTYPES.index(parameter.dtype), "rank": parameter.rank, "address": self.steps(parameter.address),
            "dims": [self.steps(item) for item in parameter.dims],
            "strides": [self.steps(item) for item in parameter.strides],
            "box": parameter.box, "element_strides": parameter.element_strides,
            "interleave": INTERLEAVES.index(parameter.interleave), "swizzle": _SWIZZLES.index(parameter.swizzle),
            "promotion": L2_PROMOTIONS.index(parameter.l2_promotion), "fill": OOB_FILLS.index(parameter.oob_fill),
            "raw": ENCODINGS.index(parameter.encoding),
        }  # fmt: skip

    def variable(self, name: str) -> int:
        return self._variables[name]

    def steps(self, expr: Expr) -> Steps:
        return _steps_of(expr, self._variables)

    def float_steps(self, expr: FloatExpr, single: bool) -> Steps:
        """single: whether a mere number is meant to be of binary32."""
        if isinstance(expr, list | tuple):
            operator, *operands = expr
            if operator in ("fint", "dint"):
                return [(_CODES[operator], self._variables[operands[0]])]
            if operator == "fif":
                condition = self.float_steps(operands[0], single=False)
                then, other = (self.float_steps(item, single) for item in operands[1:])
                return _chosen(condition, then, other)
            return list(_postfix(operator, [self.float_steps(item, operator in _SINGLE) for item in operands]))
        if expr in self._floats:
            return [(_CODES["variable"], self._floats.index(str(expr)))]
        value = evaluate_float(expr, {}, single)
        if single:
            (bits,) = struct.unpack("<I", struct.pack("<f", value))
            return [(_CODES["push"], bits)]
        return [(_CODES["number"], struct.unpack("<q", struct.pack("<d", value))[0])]


def _steps_of(expr: Expr, names: Mapping[str, int]) -> Steps:
    """Postfix order. The first two operands of a longer sum are added first, so the stack stays as deep as the
    expression. names: the index of each variable.
    """
    if isinstance(expr, int):
        return [(_CODES["push"], expr)]
    if isinstance(expr, str):
        return [(_CODES["variable"], names[expr])]
    operator, *operands = expr
    if operator == "if":
        condition, then, other = (_steps_of(item, names) for item in operands)
        return _chosen(condition, then, other)
    return list(_postfix(operator, [_steps_of(item, names) for item in operands]))


def _chosen(condition: Steps, then: Steps, other: Steps) -> Steps:
    return [*condition, (_CODES["unless"], len(then) + 1), *then, (_CODES["jump"], len(other)), *other]


def _single(argument: Argument) -> tuple[TensorArgument | ScalarArgument, ...]:
    """What the C launcher knows: a window is a tensor without dims."""
    return argument.tensors if isinstance(argument, PeersArgument) else (argument,)


def _beyond(scalar: ScalarArgument) -> Expr:
    """0 where an integer keeps to its bounds."""
    low, high, step = scalar.minimum, scalar.maximum, scalar.divisor
    if scalar.dtype == "i64":  # whose differences may not fit
        return ("if", ("lt", scalar.name, low), 1, ("if", ("lt", high, scalar.name), 1, ("mod", scalar.name, step)))
    return ("max", 0, ("sub", low, scalar.name), ("sub", scalar.name, high), ("mod", scalar.name, step))


def _postfix(operator: str, operands: list[Steps]) -> Iterator[tuple[int, int]]:
    """An operator of one operand after it, any other after each operand from the second on."""
    code = (_CODES[operator], 0)
    yield from operands[0]
    if len(operands) == 1:
        yield code
    for operand in operands[1:]:
        yield from operand
        yield code


def default_of(scalar: ScalarArgument, defaults: Mapping[str, Any]) -> float | int | None:
    """The spec's default, or else the record's."""
    value = defaults.get(scalar.name, scalar.default)
    return float(value) if isinstance(value, str) else value

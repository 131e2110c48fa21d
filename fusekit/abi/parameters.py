"""What the kernel receives: the entries of its parameter space, each with its byte offset and the value to put there.

Offsets and sizes are those of the cubin (its ``.nv.info`` KPARAM records). An offset of -1 marks a record that has not
been compiled yet; only a complete record may be stored or launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusekit.abi.codec import RecordReader, expression, integer
from fusekit.abi.expr import Expr, RecordError, freeze, thaw, validate
from fusekit.abi.floats import (
    SCHEMA_2_FLOATS,
    FloatExpr,
    evaluate_float,
    float_operators,
    integer_variables,
    packed,
    rounded,
    validate_float,
    with_integers,
)
from fusekit.dtypes import DTYPES, FLOATS, INTEGERS, MAPS, SIGNED

SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
INTERLEAVES = ("none", "16B", "32B")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")
OOB_FILLS = ("none", "nan_zero")
ENCODINGS = ("driver", "raw")
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class TensorMapParameter:
    """A 128-byte tensor map by value: the arguments of cuTensorMapEncodeTiled.

    `address` defaults to the argument's own address and wraps modulo 2**64. `dims` and `box` are innermost first and in
    elements; `strides` are those of dims 1, 2, ... in bytes (one fewer than dims). `encoding` is ``driver``,
    or ``raw``: the launcher writes the descriptor itself, `address` modulo 2**57, `strides` modulo 2**40 and `dims`
    modulo 2**32, where the driver would refuse them.
    """

    name: str
    argument: str
    offset: int = -1
    size: int = TENSOR_MAP_BYTES
    address: Expr = ""
    dtype: str = "bf16"
    dims: tuple[Expr, ...] = ()
    strides: tuple[Expr, ...] = ()
    box: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = ()
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: str = "none"
    oob_fill: str = "none"
    encoding: str = "driver"

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", freeze(self.address) if self.address != "" else f"{self.argument}.address")
        object.__setattr__(self, "dims", tuple(freeze(item) for item in self.dims))
        object.__setattr__(self, "strides", tuple(freeze(item) for item in self.strides))
        object.__setattr__(self, "box", tuple(self.box))
        object.__setattr__(self, "element_strides", tuple(self.element_strides) or (1,) * len(self.dims))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def alignment(self) -> int:
        # 64 in the constant bank. The parameter space begins 16 bytes off that there (at 0x210 on sm_90).
        return 16

    def check(self, where: str, values: frozenset[str], addresses: frozenset[str]) -> None:
        if self.size != TENSOR_MAP_BYTES:
            raise RecordError(f"{where}.size: {self.size}; a tensor map has {TENSOR_MAP_BYTES} bytes")
        for key, value, allowed in (
            ("dtype", self.dtype, MAPS),
            ("encoding", self.encoding, ENCODINGS),
            ("interleave", self.interleave, INTERLEAVES),
            ("swizzle", self.swizzle, tuple(SWIZZLE_BYTES)),
            ("l2_promotion", self.l2_promotion, L2_PROMOTIONS),
            ("oob_fill", self.oob_fill, OOB_FILLS),
        ):
            if value not in allowed:
                raise RecordError(f"{where}.{key}: {value!r}; it must be one of {', '.join(allowed)}")
        if not 1 <= self.rank <= 5:
            raise RecordError(f"{where}.dims: rank {self.rank}; a tensor map has rank 1 to 5")
        for key, count, expected in (
            ("strides", len(self.strides), self.rank - 1),
            ("box", len(self.box), self.rank),
            ("element_strides", len(self.element_strides), self.rank),
        ):
            if count != expected:
                raise RecordError(f"{where}.{key}: {count} entries; rank {self.rank} needs {expected}")
        validate(self.address, f"{where}.address", values | addresses)
        for index, dim in enumerate(self.dims):
            validate(dim, f"{where}.dims[{index}]", values)
        for index, stride in enumerate(self.strides):
            validate(stride, f"{where}.strides[{index}]", values)
        for index, extent in enumerate(self.box):
            if not 1 <= extent <= 256:
                raise RecordError(f"{where}.box[{index}]: {extent}; a box extent is 1 to 256 elements")
        for index, step in enumerate(self.element_strides):
            if not 1 <= step <= 8:
                raise RecordError(f"{where}.element_strides[{index}]: {step}; an element stride is 1 to 8")
        inner, width = self.box[0] * DTYPES[self.dtype].bits / 8, SWIZZLE_BYTES[self.swizzle]
        if self.interleave == "none" and inner % 16:
            raise RecordError(f"{where}.box[0]: {inner:g} bytes; the inner box extent is a multiple of 16 bytes")
        if width and inner > width:
            raise RecordError(f"{where}.box[0]: {inner:g} bytes; swizzle {self.swizzle} allows at most {width}")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "tensor_map", "name": self.name, "argument": self.argument, "offset": self.offset, "size":
            self.size, "address": thaw(self.address), "dtype": self.dtype, "dims": thaw(self.dims), "strides":
            thaw(self.strides), "box": list(self.box), "element_strides": list(self.element_strides), "interleave":
            self.interleave, "swizzle": self.swizzle, "l2_promotion": self.l2_promotion, "oob_fill": self.oob_fill,
            **({} if self.encoding == "driver" else {"encoding": self.encoding}),
        }  # fmt: skip

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return (self.address, *self.dims, *self.strides)

    def is_schema_2(self) -> bool:
        return DTYPES[self.dtype].map > 1 or self.encoding != "driver"

    @classmethod
    def read(cls, reader: RecordReader, name: str, offset: int, size: int) -> TensorMapParameter:
        return cls(
            name=name,
            offset=offset,
            size=size,
            argument=reader.string("argument"),
            address=reader.expr("address"),
            dtype=reader.string("dtype", MAPS),
            dims=reader.array("dims", expression),
            strides=reader.array("strides", expression),
            box=reader.array("box", integer),
            element_strides=reader.array("element_strides", integer),
            interleave=reader.string("interleave", INTERLEAVES),
            swizzle=reader.string("swizzle", tuple(SWIZZLE_BYTES)),
            l2_promotion=reader.string("l2_promotion", L2_PROMOTIONS),
            oob_fill=reader.string("oob_fill", OOB_FILLS),
            encoding=reader.string("encoding", ENCODINGS) if "encoding" in reader else "driver",
        )


@dataclass(frozen=True, slots=True)
class PointerParameter:
    """The 64-bit device address of a tensor argument, of the workspace or of the scratch (arguments of that name).

    `shift` is an expression in bytes that is added to it, modulo 2**64.
    """

    name: str
    argument: str
    offset: int = -1
    size: int = field(default=8, init=False)
    shift: Expr = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shift", freeze(self.shift))

    @property
    def alignment(self) -> int:
        return 8

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "pointer", "name": self.name, "argument": self.argument, "offset": self.offset, "size": self.size,
            **({} if self.shift == 0 else {"shift": thaw(self.shift)}),
        }  # fmt: skip

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return (self.shift,)

    def is_schema_2(self) -> bool:
        return self.shift != 0


@dataclass(frozen=True, slots=True)
class IntegerParameter:
    """An integer computed by an expression over dims, strides, i32 scalars, values, sm_count and cluster_margin."""

    name: str
    dtype: str
    value: Expr
    offset: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", freeze(self.value))

    @property
    def size(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def alignment(self) -> int:
        return self.size

    @property
    def signed(self) -> bool:
        return DTYPES[self.dtype].kind == SIGNED

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest value that it can hold."""
        bits = 8 * self.size
        return (-(1 << bits - 1), (1 << bits - 1) - 1) if self.signed else (0, (1 << bits) - 1)

    def to_bytes(self, value: int) -> bytes:
        """`value`, which lies in `range`, as the kernel reads it."""
        return value.to_bytes(self.size, "little", signed=self.signed)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "integer", "name": self.name, "dtype": self.dtype, "value": thaw(self.value), "offset": self.offset,
            "size": self.size,
        }  # fmt: skip

    @property
    def expressions(self) -> tuple[Expr, ...]:
        return (self.value,)

    def is_schema_2(self) -> bool:
        return DTYPES[self.dtype].integer > 1


@dataclass(frozen=True, slots=True)
class FloatParameter:
    """A float: the value of a scalar argument of its type, or the float expression `value` without one."""

    name: str
    argument: str
    offset: int = -1
    value: FloatExpr = ""
    dtype: str = "f32"

    def __post_init__(self) -> None:
        value = freeze(self.value)  # type: ignore[arg-type]
        object.__setattr__(self, "value", self.argument if self.argument else value)

    @property
    def size(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def alignment(self) -> int:
        return self.size

    def evaluate(self, scalars: Mapping[str, float], env: Mapping[str, int] | None = None) -> float:
        """Its value for these scalars, each a number of its own type. env: the integers that it reads."""
        expr = with_integers(self.value, env or {})
        return evaluate_float(expr, scalars, single=self.dtype == "f32")

    def to_bytes(self, value: float) -> bytes:
        """`value` as the kernel reads it."""
        return packed(rounded(value, self.dtype), self.dtype)

    def to_json(self) -> dict[str, Any]:
        what = {"argument": self.argument} if self.argument else {"value": thaw(self.value)}  # type: ignore[arg-type]
        kind = {} if self.dtype == "f32" else {"dtype": self.dtype}
        return {"kind": "float", "name": self.name, **kind, **what, "offset": self.offset, "size": self.size}

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """The integers that its expression reads."""
        return tuple(sorted(integer_variables(self.value)))

    def is_schema_2(self) -> bool:
        return not self.argument

    def is_schema_5(self) -> bool:
        return self.dtype != "f32" or not float_operators(self.value) <= SCHEMA_2_FLOATS


@dataclass(frozen=True, slots=True)
class StructParameter:
    """A parameter of several parts, as a C struct: `fields` with their offsets inside it, ascending.

    What lies between the fields is padding and zero.
    """

    name: str
    size: int
    fields: tuple[PointerParameter | IntegerParameter | FloatParameter, ...]
    offset: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))

    @property
    def alignment(self) -> int:
        return max((item.alignment for item in self.fields), default=1)

    def check(self, where: str) -> None:
        end = 0
        if self.size < 1:
            raise RecordError(f"{where}.size: {self.size}; a struct has at least 1 byte")
        for index, item in enumerate(self.fields):
            if item.offset < end or item.offset % item.alignment or item.offset + item.size > self.size:
                raise RecordError(
                    f"{where}.fields[{index}].offset: {item.offset}; it must be a multiple of {item.alignment}, from"
                    f" {end} and so that {item.size} bytes end by {self.size}"
                )
            end = item.offset + item.size

    def to_json(self) -> dict[str, Any]:
        fields = [item.to_json() for item in self.fields]
        return {"kind": "struct", "name": self.name, "offset": self.offset, "size": self.size, "fields": fields}

    def is_schema_2(self) -> bool:
        return True


Scalar = PointerParameter | IntegerParameter | FloatParameter
Parameter = TensorMapParameter | Scalar | StructParameter
SCALAR_KINDS = ("pointer", "integer", "float")
KINDS = ("tensor_map", *SCALAR_KINDS, "struct")


def flat(parameters: Iterable[Parameter]) -> Iterator[tuple[int, TensorMapParameter | Scalar]]:
    """Every part with its offset in the parameter space: a struct's fields in the place of the struct."""
    for parameter in parameters:
        if isinstance(parameter, StructParameter):
            for item in parameter.fields:
                yield parameter.offset + item.offset, item
        else:
            yield parameter.offset, parameter


def parameter_from_json(value: Any, where: str) -> Parameter:
    reader = RecordReader(value, where)
    kind = reader.string("kind", KINDS)
    name, offset, size = reader.string("name"), reader.integer("offset"), reader.integer("size")
    parameter: Parameter
    if kind == "tensor_map":
        parameter = TensorMapParameter.read(reader, name, offset, size)
    elif kind == "struct":
        fields = reader.array("fields", _field_from_json)
        parameter = StructParameter(name, size, fields, offset)
        parameter.check(where)
    else:
        parameter = _scalar(reader, kind, name, offset)
    reader.end()
    if size != parameter.size:
        raise RecordError(f"{where}.size: {size}; a {kind} parameter of this type has {parameter.size} bytes")
    return parameter


def _field_from_json(value: Any, where: str) -> Scalar:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is not None and kind not in SCALAR_KINDS:
        raise RecordError(f"{where}.kind: {kind!r}; it must be one of {', '.join(SCALAR_KINDS)}")
    parameter = parameter_from_json(value, where)
    assert not isinstance(parameter, TensorMapParameter | StructParameter)
    return parameter


def _scalar(reader: RecordReader, kind: str, name: str, offset: int) -> Scalar:
    if kind == "pointer":
        argument = reader.string("argument")
        return PointerParameter(name, argument, offset, reader.expr("shift") if "shift" in reader else 0)
    if kind == "integer":
        return IntegerParameter(name, reader.string("dtype", INTEGERS), reader.expr("value"), offset)
    dtype = reader.string("dtype", FLOATS) if "dtype" in reader else "f32"
    if "value" not in reader:
        return FloatParameter(name, reader.string("argument"), offset, dtype=dtype)
    value = reader.take("value")
    validate_float(value, reader.path("value"))
    return FloatParameter(name, "", offset, value, dtype)

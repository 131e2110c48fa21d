"""What the kernel receives: the entries of its parameter space, each with its byte offset and the value to put there.

Offsets and sizes are those of the cubin (its ``.nv.info`` KPARAM records). An offset of -1 marks a record that has not
been compiled yet; only a complete record may be stored or launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fusekit.abi.arguments import DTYPE_BYTES
from fusekit.abi.codec import Reader, expression, integer
from fusekit.abi.expr import Expr, RecordError, freeze, thaw, validate

SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
INTERLEAVES = ("none", "16B", "32B")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")
OOB_FILLS = ("none", "nan_zero")
INTEGER_BYTES = {"i32": 4, "i64": 8}
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class TensorMapParameter:
    """A 128-byte tensor map by value: the arguments of cuTensorMapEncodeTiled.

    `address` defaults to the argument's own address and wraps modulo 2**64. `dims` and `box` are innermost first and in
    elements; `strides` are those of dims 1, 2, ... in bytes (one fewer than dims).
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
            ("dtype", self.dtype, tuple(DTYPE_BYTES)),
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
        inner, width = self.box[0] * DTYPE_BYTES[self.dtype], SWIZZLE_BYTES[self.swizzle]
        if self.interleave == "none" and inner % 16:
            raise RecordError(f"{where}.box[0]: {inner} bytes; the inner box extent is a multiple of 16 bytes")
        if width and inner > width:
            raise RecordError(f"{where}.box[0]: {inner} bytes; swizzle {self.swizzle} allows at most {width}")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "tensor_map", "name": self.name, "argument": self.argument, "offset": self.offset, "size":
            self.size, "address": thaw(self.address), "dtype": self.dtype, "dims": thaw(self.dims), "strides":
            thaw(self.strides), "box": list(self.box), "element_strides": list(self.element_strides), "interleave":
            self.interleave, "swizzle": self.swizzle, "l2_promotion": self.l2_promotion, "oob_fill": self.oob_fill,
        }  # fmt: skip

    @classmethod
    def read(cls, reader: Reader, name: str, offset: int, size: int) -> TensorMapParameter:
        return cls(
            name=name,
            offset=offset,
            size=size,
            argument=reader.string("argument"),
            address=reader.expr("address"),
            dtype=reader.string("dtype", tuple(DTYPE_BYTES)),
            dims=reader.array("dims", expression),
            strides=reader.array("strides", expression),
            box=reader.array("box", integer),
            element_strides=reader.array("element_strides", integer),
            interleave=reader.string("interleave", INTERLEAVES),
            swizzle=reader.string("swizzle", tuple(SWIZZLE_BYTES)),
            l2_promotion=reader.string("l2_promotion", L2_PROMOTIONS),
            oob_fill=reader.string("oob_fill", OOB_FILLS),
        )


@dataclass(frozen=True, slots=True)
class PointerParameter:
    """The 64-bit device address of a tensor argument, of the workspace or of the scratch (arguments of that name)."""

    name: str
    argument: str
    offset: int = -1
    size: int = field(default=8, init=False)

    @property
    def alignment(self) -> int:
        return 8

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "pointer",
            "name": self.name,
            "argument": self.argument,
            "offset": self.offset,
            "size": self.size,
        }


@dataclass(frozen=True, slots=True)
class IntegerParameter:
    """A 32- or 64-bit signed integer computed by an expression over dims, strides, sm_count and cluster_margin."""

    name: str
    dtype: str
    value: Expr
    offset: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", freeze(self.value))

    @property
    def size(self) -> int:
        return INTEGER_BYTES[self.dtype]

    @property
    def alignment(self) -> int:
        return self.size

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "integer", "name": self.name, "dtype": self.dtype, "value": thaw(self.value), "offset": self.offset,
            "size": self.size,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class FloatParameter:
    """A float32: the value of an f32 scalar argument."""

    name: str
    argument: str
    offset: int = -1
    size: int = field(default=4, init=False)

    @property
    def alignment(self) -> int:
        return 4

    def to_json(self) -> dict[str, Any]:
        return {"kind": "float", "name": self.name, "argument": self.argument, "offset": self.offset, "size": self.size}


Parameter = TensorMapParameter | PointerParameter | IntegerParameter | FloatParameter
KINDS = ("tensor_map", "pointer", "integer", "float")


def parameter_from_json(value: Any, where: str) -> Parameter:
    reader = Reader(value, where)
    kind = reader.string("kind", KINDS)
    name, offset, size = reader.string("name"), reader.integer("offset"), reader.integer("size")
    parameter: Parameter
    if kind == "tensor_map":
        parameter = TensorMapParameter.read(reader, name, offset, size)
    elif kind == "pointer":
        parameter = PointerParameter(name, reader.string("argument"), offset)
    elif kind == "integer":
        parameter = IntegerParameter(name, reader.string("dtype", tuple(INTEGER_BYTES)), reader.expr("value"), offset)
    else:
        parameter = FloatParameter(name, reader.string("argument"), offset)
    reader.end()
    if size != parameter.size:
        raise RecordError(f"{where}.size: {size}; a {kind} parameter of this type has {parameter.size} bytes")
    return parameter

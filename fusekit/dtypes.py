"""Element types: one row each, read by every room. Standard library only.

A row's `name` is what spec files and launch records call the type. The other columns are its names and numbers
elsewhere, and the limits of its numbers; an empty column: there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT, SIGNED, UNSIGNED, BOOL = "float", "signed", "unsigned", "bool"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    bits: of an element as tensors count them; packed: numbers in it. framework: the name in PyTorch, which NumPy,
    ml_dtypes and JAX share, and aliases of it. typestr: in array interfaces, without the byte order. dlpack: (code,
    bits, lanes). xla: XLA_FFI_DataType. cutlass: the DSL's name of one number. c: a C type of the same bits.

    tensor_map: the end of CU_TENSOR_MAP_DATA_TYPE_*, as which tensor maps copy the type; map_code: what a descriptor
    has for it from bit 7 of word 2 on. number: in CUtensorMapDataType, and beyond it in the C loader's fusekit_dtype.

    significand: bits of it, the leading one included; lowest: the least exponent of a normal number; max: the
    largest finite number.

    argument, integer, map: the first schema of launch records in which a tensor, an integer parameter or a tensor map
    may have the type; 0: none.
    """

    name: str
    bits: int
    kind: str
    framework: str = ""
    aliases: tuple[str, ...] = ()
    packed: int = 1
    typestr: str = ""
    dlpack: tuple[int, int, int] | None = None
    xla: int | None = None
    cutlass: str = ""
    c: str = ""
    tensor_map: str = ""
    map_code: int | None = None
    number: int | None = None
    significand: int = 0
    lowest: int = 0
    max: float = 0.0
    argument: int = 0
    integer: int = 0
    map: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of one element, rounded up."""
        return -(-self.bits // 8)

    @property
    def array(self) -> str:
        """The name in NumPy, ml_dtypes and JAX, none of which packs several numbers into an element: then uint8."""
        return self.framework if self.packed == 1 else "uint8"

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0 ** (1 - self.significand)

    @property
    def min_normal(self) -> float:
        """The least positive normal number."""
        return 2.0**self.lowest

    @property
    def smallest(self) -> float:
        """The least positive number."""
        return self.min_normal * self.eps

    @property
    def negative_infinity(self) -> int:
        """The bits of minus infinity: sign and exponent all ones (IEEE 754 formats and bf16)."""
        return (1 << self.bits) - (1 << self.significand - 1)


ROWS = (
    DType("bf16", 16, FLOAT, "bfloat16", typestr="V2", dlpack=(4, 16, 1), xla=16, cutlass="BFloat16", c="uint16_t",
          tensor_map="BFLOAT16", map_code=10, number=9, significand=8, lowest=-126, max=(2 - 2.0**-7) * 2.0**127,
          argument=1, map=1),
    DType("fp16", 16, FLOAT, "float16", ("half",), typestr="f2", dlpack=(2, 16, 1), xla=10, cutlass="Float16",
          c="uint16_t", tensor_map="FLOAT16", map_code=6, number=6, significand=11, lowest=-14, max=65504.0, argument=1,
          map=1),
    DType("f32", 32, FLOAT, "float32", ("float",), typestr="f4", dlpack=(2, 32, 1), xla=11, cutlass="Float32",
          c="float", tensor_map="FLOAT32", map_code=7, number=7, significand=24, lowest=-126,
          max=(2 - 2.0**-23) * 2.0**127, argument=1, map=1),
    DType("f64", 64, FLOAT, "float64", ("double",), typestr="f8", dlpack=(2, 64, 1), xla=12, cutlass="Float64",
          c="double", tensor_map="FLOAT64", map_code=9, number=8, significand=53, lowest=-1022,
          max=(2 - 2.0**-52) * 2.0**1023, argument=1, map=1),
    DType("i32", 32, SIGNED, "int32", ("int",), typestr="i4", dlpack=(0, 32, 1), xla=4, cutlass="Int32", c="int32_t",
          tensor_map="INT32", map_code=3, number=3, argument=1, integer=1, map=1),
    DType("i64", 64, SIGNED, "int64", ("long",), typestr="i8", dlpack=(0, 64, 1), xla=5, cutlass="Int64", c="int64_t",
          tensor_map="INT64", map_code=5, number=5, argument=1, integer=1, map=1),
    DType("i8", 8, SIGNED, "int8", typestr="i1", dlpack=(0, 8, 1), xla=2, cutlass="Int8", c="int8_t", integer=2),
    DType("i16", 16, SIGNED, "int16", typestr="i2", dlpack=(0, 16, 1), xla=3, cutlass="Int16", c="int16_t", integer=2),
    DType("u8", 8, UNSIGNED, "uint8", typestr="u1", dlpack=(1, 8, 1), xla=6, cutlass="Uint8", c="uint8_t",
          tensor_map="UINT8", map_code=0, number=0, argument=1, integer=2, map=1),
    DType("u16", 16, UNSIGNED, "uint16", typestr="u2", dlpack=(1, 16, 1), xla=7, cutlass="Uint16", c="uint16_t",
          tensor_map="UINT16", map_code=1, number=1, argument=1, integer=2, map=1),
    DType("u32", 32, UNSIGNED, "uint32", typestr="u4", dlpack=(1, 32, 1), xla=8, cutlass="Uint32", c="uint32_t",
          tensor_map="UINT32", map_code=2, number=2, argument=1, integer=2, map=1),
    DType("u64", 64, UNSIGNED, "uint64", typestr="u8", dlpack=(1, 64, 1), xla=9, cutlass="Uint64", c="uint64_t",
          tensor_map="UINT64", map_code=4, number=4, argument=1, integer=2, map=1),
    DType("bool", 8, BOOL, "bool", typestr="b1", dlpack=(6, 8, 1), xla=1, cutlass="Boolean", c="uint8_t",
          tensor_map="UINT8"),
    # FP8 values and scales, and two 4-bit values in a byte. Tensor maps copy them as bytes.
    DType("e4m3", 8, FLOAT, "float8_e4m3fn", dlpack=(10, 8, 1), xla=20, cutlass="Float8E4M3FN", c="uint8_t",
          tensor_map="UINT8", number=16, significand=4, lowest=-6, max=448.0, argument=2),
    DType("e5m2", 8, FLOAT, "float8_e5m2", dlpack=(12, 8, 1), xla=19, cutlass="Float8E5M2", c="uint8_t",
          tensor_map="UINT8", number=17, significand=3, lowest=-14, max=57344.0, argument=2),
    DType("e8m0", 8, FLOAT, "float8_e8m0fnu", dlpack=(14, 8, 1), xla=33, cutlass="Float8E8M0FNU", c="uint8_t",
          tensor_map="UINT8", number=18, significand=1, lowest=-127, max=2.0**127, argument=2),
    DType("e2m1x2", 8, FLOAT, "float4_e2m1fn_x2", packed=2, dlpack=(17, 4, 2), cutlass="Float4E2M1FN", c="uint8_t",
          tensor_map="UINT8", number=19, significand=2, lowest=0, max=6.0, argument=2),
    # What a tensor map alone knows: float32 read as TF32, and 4- and 6-bit values that it unpacks.
    DType("tf32", 32, FLOAT, cutlass="TFloat32", tensor_map="TFLOAT32", map_code=7 | 1 << 9, number=11, map=2),
    DType("u4_align8", 4, UNSIGNED, tensor_map="16U4_ALIGN8B", map_code=11, number=13, map=2),
    DType("u4_align16", 4, UNSIGNED, tensor_map="16U4_ALIGN16B", map_code=12, number=14, map=2),
    DType("u6_align16", 6, UNSIGNED, tensor_map="16U6_ALIGN16B", map_code=13, number=15, map=2),
)  # fmt: skip
DTYPES = {row.name: row for row in ROWS}
ARGUMENTS = tuple(row.name for row in ROWS if row.argument)
INTEGERS = tuple(row.name for row in ROWS if row.integer)
MAPS = tuple(row.name for row in ROWS if row.map)
SCALARS = ("f32", "i32", "i64", "f64", "bf16", "fp16")
FLOATS = ("f32", "f64", "bf16", "fp16")
"""Of numbers that are passed by value."""
ROUNDINGS = ("f32", "bf16", "fp16")
"""Those to which a float expression can round a number, by the operator of that name."""


def by(column: str, names: tuple[str, ...] = ARGUMENTS) -> dict[Any, str]:
    """The name of the type for each value of a column, of the types in `names`."""
    found = {getattr(DTYPES[name], column): name for name in names}
    return {value: name for value, name in found.items() if value not in (None, "")}

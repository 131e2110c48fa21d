"""What a caller of a kernel passes: named tensors and scalars, and the dims that their shapes are made of."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusekit.abi.codec import RecordReader, describe, expression
from fusekit.abi.expr import Expr, RecordError, freeze, thaw, validate, variables
from fusekit.abi.floats import rounded
from fusekit.dtypes import ARGUMENTS, DTYPES, FLOATS, SCALARS

ROLES = ("input", "output", "inout")
PEER = "peer"
MOST_PEERS = 32
WHOLE = {f"i{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)}
"""The least and the largest scalar of each type of integer."""
F32_END = float(2**128 - 2**103)
"""From here on a number is rounded to infinity, as an f32."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
RESERVED = frozenset({
    "sm_count", "active_clusters", "cluster_margin", "workspace", "scratch", "stream", "inf", "nan",
})  # fmt: skip
OPTIONS = frozenset({"stream", "cluster_margin", "priority", "sm_count"})
"""What a launch takes next to the arguments. A new record has no argument of such a name; an old one may."""


def check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise RecordError(
            f"{where}: {name[:80]!r}; a name is up to 1024 letters, digits and _, and does not begin with a digit"
        )


@dataclass(frozen=True, slots=True)
class Dim:
    """A run-time extent in elements: a multiple of `divisor` in [`minimum`, `maximum`]."""

    name: str
    divisor: int = 1
    minimum: int = 0
    maximum: int = 2**31 - 1

    def check(self, where: str) -> None:
        check_name(self.name, f"{where}.name")
        if self.name in RESERVED:
            raise RecordError(f"{where}.name: {self.name!r} is reserved; reserved are {', '.join(sorted(RESERVED))}")
        if self.divisor < 1:
            raise RecordError(f"{where}.divisor: {self.divisor}; it must be at least 1")
        if not 0 <= self.minimum <= self.maximum < 2**63:
            raise RecordError(
                f"{where}: minimum {self.minimum} and maximum {self.maximum}; 0 <= minimum <= maximum < 2**63"
            )

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "divisor": self.divisor, "minimum": self.minimum, "maximum": self.maximum}

    @classmethod
    def from_json(cls, value: Any, where: str = "dim") -> Dim:
        reader = RecordReader(value, where)
        dim = cls(
            reader.string("name"), reader.integer("divisor"), reader.integer("minimum"), reader.integer("maximum")
        )
        reader.end()
        return dim


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor on the device.

    `shape` holds dim names and expressions over dims; every dim is the bare extent of at least one shape. `strides` are
    in elements: the variable ``"<name>.stride<i>"`` means that the stride is read from the tensor (it must be positive
    and a multiple of `stride_divisor`), anything else is an expression over dims that the tensor's stride must equal.
    The stride of a dim whose extent is 0 or 1 is never looked at. `alignment` is that of the first element's address,
    in bytes. `in_place_of`, of an output: the input, of the same dtype and shape, that it may be written over; both
    then have the same address and strides.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    stride_divisor: int = 1
    alignment: int = 16
    in_place_of: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(freeze(item) for item in self.shape))
        object.__setattr__(self, "strides", tuple(freeze(item) for item in self.strides))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].bytes

    @property
    def written(self) -> bool:
        return self.role in ("output", "inout")

    def stride_variable(self, index: int) -> str:
        return f"{self.name}.stride{index}"

    def reads_stride(self, index: int) -> bool:
        """Whether the stride of dim `index` is taken from the tensor instead of being prescribed."""
        return self.strides[index] == self.stride_variable(index)

    def check(self, where: str, dims: frozenset[str]) -> None:
        _check_argument_name(self.name, where)
        if self.role not in ROLES:
            raise RecordError(f"{where}.role: {self.role!r}; it must be one of {', '.join(ROLES)}")
        if self.dtype not in ARGUMENTS:
            raise RecordError(f"{where}.dtype: {self.dtype!r}; it must be one of {', '.join(ARGUMENTS)}")
        if len(self.strides) != len(self.shape):
            raise RecordError(f"{where}.strides: {len(self.strides)} strides for a shape of rank {len(self.shape)}")
        for index, extent in enumerate(self.shape):
            validate(extent, f"{where}.shape[{index}]", dims)
        for index, stride in enumerate(self.strides):
            if not self.reads_stride(index):
                validate(stride, f"{where}.strides[{index}]", dims)
        if self.stride_divisor < 1:
            raise RecordError(f"{where}.stride_divisor: {self.stride_divisor}; it must be at least 1")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise RecordError(f"{where}.alignment: {self.alignment}; it must be a power of two")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "tensor", "name": self.name, "role": self.role, "dtype": self.dtype,
            "shape": thaw(self.shape), "strides": thaw(self.strides),
            "stride_divisor": self.stride_divisor, "alignment": self.alignment,
            **({"in_place_of": self.in_place_of} if self.in_place_of else {}),
        }  # fmt: skip

    @classmethod
    def read(cls, reader: RecordReader) -> TensorArgument:
        return cls(
            name=reader.string("name"),
            role=reader.string("role", ROLES),
            dtype=reader.string("dtype", ARGUMENTS),
            shape=reader.array("shape", expression),
            strides=reader.array("strides", expression),
            stride_divisor=reader.integer("stride_divisor"),
            alignment=reader.integer("alignment"),
            in_place_of=reader.string("in_place_of") if "in_place_of" in reader else "",
        )


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A number passed by value. `default` None means that the caller must give it; infinity is allowed for floats.

    A bf16 or fp16 is the nearest one to the nearest f32. An i32 is a multiple of `divisor` from `minimum` to `maximum`.
    """

    name: str
    dtype: str
    default: float | int | None = None
    minimum: int = -(2**31)
    maximum: int = 2**31 - 1
    divisor: int = 1

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_integer(self) -> bool:
        return self.dtype in WHOLE

    def rounded(self, value: float) -> float:
        """`value`, a float, as a number of the type."""
        return value if self.dtype == "f64" else rounded(rounded(value), self.dtype)

    @property
    def bounded(self) -> bool:
        """Whether not every i32 is allowed."""
        return (self.minimum, self.maximum, self.divisor) != (*WHOLE.get(self.dtype, WHOLE["i32"]), 1)

    @property
    def rule(self) -> str:
        """What an i32 must be, in words."""
        many = f"a multiple of {self.divisor} from " if self.divisor > 1 else ""
        return f"must be {many}{self.minimum} to {self.maximum}"

    def allows(self, value: int) -> bool:
        """Whether `value` keeps to the bounds."""
        return self.minimum <= value <= self.maximum and value % self.divisor == 0

    def check(self, where: str) -> None:
        _check_argument_name(self.name, where)
        if self.dtype not in SCALARS:
            raise RecordError(f"{where}.dtype: {self.dtype!r}; it must be one of {', '.join(SCALARS)}")
        if self.default is not None and self.is_integer and not isinstance(self.default, int):
            raise RecordError(f"{where}.default: {self.default!r}; an {self.dtype} scalar has an integer default")
        if self.bounded and not self.is_integer:
            raise RecordError(f"{where}.minimum: only an i32 or i64 scalar has bounds")
        least, most = WHOLE.get(self.dtype, WHOLE["i32"])
        if self.divisor < 1 or not least <= self.minimum <= self.maximum <= most:
            raise RecordError(
                f"{where}: minimum {self.minimum}, maximum {self.maximum}, divisor {self.divisor}; minimum <= maximum,"
                f" both of {DTYPES[self.dtype].bits} bits, and the divisor at least 1"
            )
        if isinstance(self.default, int) and self.is_integer and not self.allows(self.default):
            raise RecordError(f"{where}.default: {self.default}; it {self.rule}")
        narrow = self.is_float and self.dtype != "f64"
        if self.default is not None and narrow and F32_END <= abs(self.default) < math.inf:
            raise RecordError(f"{where}.default: {self.default}; an f32 ends at 3.4028235e38; say inf, or less")

    def to_json(self) -> dict[str, Any]:
        default: Any = self.default
        if isinstance(default, float) and not math.isfinite(default):
            default = str(default)  # JSON has no infinity: "inf", "-inf", "nan"
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "divisor": self.divisor}
        document = {"kind": "scalar", "name": self.name, "dtype": self.dtype, "default": default}
        return {**document, **(bounds if self.bounded else {})}

    @classmethod
    def read(cls, reader: RecordReader) -> ScalarArgument:
        name, dtype = reader.string("name"), reader.string("dtype", SCALARS)
        default = scalar_from_json(reader.take("default"), reader.path("default"))
        if "minimum" not in reader:
            return cls(name, dtype, default, *WHOLE.get(dtype, WHOLE["i32"]))
        bounds = (reader.integer("minimum"), reader.integer("maximum"), reader.integer("divisor"))
        return cls(name, dtype, default, *bounds)


@dataclass(frozen=True, slots=True)
class PeersArgument:
    """The windows (IPC buffers, symmetric memory) of `count` ranks: memory of one layout on each of as many devices,
    that every rank can address.

    The caller gives one address for each rank, in the order of ranks. `bytes` is an expression over dims and i32
    scalars: how large each window is at least. `alignment` is that of each address, in bytes.

    Everything after the caller knows the windows as tensors without dims, called ``"<name>.<rank>"``.
    """

    name: str
    count: int
    bytes: Expr = 1
    alignment: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", freeze(self.bytes))

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """One for each rank."""
        return tuple(
            TensorArgument(f"{self.name}.{rank}", PEER, "u8", (), (), alignment=self.alignment)
            for rank in range(self.count)
        )

    def check(self, where: str, known: frozenset[str]) -> None:
        _check_argument_name(self.name, where)
        if not 1 <= self.count <= MOST_PEERS:
            raise RecordError(f"{where}.count: {self.count}; there are 1 to {MOST_PEERS} ranks")
        validate(self.bytes, f"{where}.bytes", known)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise RecordError(f"{where}.alignment: {self.alignment}; it must be a power of two")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "peers", "name": self.name, "count": self.count, "bytes": thaw(self.bytes),
            "alignment": self.alignment,
        }  # fmt: skip

    @classmethod
    def read(cls, reader: RecordReader) -> PeersArgument:
        return cls(reader.string("name"), reader.integer("count"), reader.expr("bytes"), reader.integer("alignment"))


Argument = TensorArgument | ScalarArgument | PeersArgument


def tensors_of(arguments: tuple[Argument, ...]) -> tuple[TensorArgument, ...]:
    """The tensors among `arguments` in order, peers as one for each rank."""
    tensors: list[TensorArgument] = []
    for argument in arguments:
        if isinstance(argument, TensorArgument):
            tensors.append(argument)
        elif isinstance(argument, PeersArgument):
            tensors += argument.tensors
    return tuple(tensors)


def _check_argument_name(name: str, where: str) -> None:
    check_name(name, f"{where}.name")
    if name in RESERVED:
        raise RecordError(f"{where}.name: {name!r} is reserved; reserved are {', '.join(sorted(RESERVED))}")


def scalar_from_json(value: Any, where: str) -> float | int | None:
    """A scalar's JSON form: null, a number, or one of the strings inf, -inf, nan."""
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RecordError(f'{where}: {describe(value)}; it must be null, a number, "inf", "-inf" or "nan"')
    return value


def argument_from_json(value: Any, where: str) -> Argument:
    reader = RecordReader(value, where)
    kinds: dict[str, type[TensorArgument | ScalarArgument | PeersArgument]] = {
        "tensor": TensorArgument, "scalar": ScalarArgument, "peers": PeersArgument,
    }  # fmt: skip
    argument: Argument = kinds[reader.string("kind", tuple(kinds))].read(reader)
    reader.end()
    return argument


def bare_dims(arguments: tuple[Argument, ...]) -> set[str]:
    """The dims that some tensor's shape states by their bare name, so that a launcher can read them off."""
    return {
        extent
        for argument in arguments
        if isinstance(argument, TensorArgument)
        for extent in argument.shape
        if isinstance(extent, str)
    }


def shape_dims(arguments: tuple[Argument, ...]) -> set[str]:
    """Every dim that some tensor's shape mentions."""
    names: set[str] = set()
    for argument in arguments:
        if isinstance(argument, TensorArgument):
            for extent in argument.shape:
                names |= variables(extent)
    return names


class WithArguments:
    """The members `arguments` of a class, by their kinds."""

    arguments: tuple[Argument, ...]

    @cached_property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """The tensors among the arguments, in order; peers are one for each rank."""
        return tensors_of(self.arguments)

    @cached_property
    def peers(self) -> tuple[PeersArgument, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, PeersArgument))

    @cached_property
    def scalars(self) -> tuple[ScalarArgument, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, ScalarArgument))

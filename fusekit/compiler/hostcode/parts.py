"""What was read of launches, while its expressions are still terms; and how it is written into a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusekit.abi import (
    Constraint,
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchStep,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorMapParameter,
    render,
)
from fusekit.compiler.hostcode.expressions import Writer
from fusekit.compiler.hostcode.lower import Guard
from fusekit.compiler.hostcode.terms import Term


@dataclass(slots=True)
class Part:
    """A parameter or a field of one. kind: integer, pointer, float, map or struct.

    value: a term, a float expression, map fields, or the parts of a struct. argument: of a pointer, of a map, or of a
    float that is an argument's own value.
    """

    kind: str
    offset: int
    size: int
    value: Any
    argument: str = ""


@dataclass(slots=True)
class Launch:
    """What was read of one launch; the fields are those of LaunchStep, its expressions still terms."""

    symbol: str
    grid: list[Term]
    block: tuple[int, int, int]
    dynamic_shared: int
    cluster: tuple[int, int, int]
    attributes: dict[str, int]
    parameters: list[Part]

    def terms(self) -> Iterator[Term]:
        """Everything that will be an expression."""
        yield from self.grid
        for part in self.parameters:
            yield from _terms(part)

    def step(self, writer: Writer) -> LaunchStep:
        """As a record has it."""
        names: set[str] = set()
        x, y, z = (writer.write(extent) for extent in self.grid)
        return LaunchStep(
            parameters=tuple(_written(part, writer, names) for part in self.parameters),
            grid=(x, y, z),
            block=self.block,
            cluster=self.cluster,
            dynamic_shared=self.dynamic_shared,
            symbol=self.symbol,
            attributes=self.attributes,
        )


def constraint(guard: Guard, writer: Writer) -> Constraint:
    """0 where the guard holds."""
    term = writer.write(guard.term)
    over: list[Expr] = []
    rules = []
    if guard.term.low < guard.low:
        over.append(("sub", guard.low, term))
        rules.append(f"at least {guard.low}")
    if guard.term.high > guard.high:
        most = min(guard.high, 2**63 - 1)  # what a launcher computes with
        over.append(("sub", term, most))
        rules.append(f"at most {most}")
    expr: Expr = ("max", 0, *over)
    if not guard.condition.is_const:
        expr = ("if", writer.write(guard.condition), expr, 0)
    return Constraint(
        expr, f"{render(term)} must be {' and '.join(rules)}: the kernel's host code computes with no more bits"
    )


def _written(part: Part, writer: Writer, names: set[str]) -> Parameter:
    if part.kind == "map":
        return _map(part, writer, _name(f"map_{part.argument}", names))
    if part.kind == "struct":
        name, inside = _name("struct", names), set[str]()
        fields = tuple(_scalar(item, writer, inside) for item in part.value)
        return StructParameter(name, part.size, fields, part.offset)
    return _scalar(part, writer, names)


def _scalar(part: Part, writer: Writer, names: set[str]) -> PointerParameter | IntegerParameter | FloatParameter:
    if part.kind == "pointer":
        name = _name(f"{part.argument}_pointer", names)
        return PointerParameter(name, part.argument, part.offset, shift=writer.write(part.value))
    if part.kind == "float":
        if part.argument:
            return FloatParameter(_name(f"{part.argument}_value", names), part.argument, part.offset)
        return FloatParameter(_name("float", names), "", part.offset, part.value)
    value = writer.write(part.value)
    name = _name(value.replace(".", "_") if isinstance(value, str) else "integer", names)
    return IntegerParameter(name, _integer_type(part), value, part.offset)


def _terms(part: Part) -> list[Term]:
    if part.kind == "map":
        return [part.value.address, *part.value.dims, *part.value.strides]
    if part.kind == "struct":
        return [term for item in part.value for term in _terms(item)]
    return [part.value] if isinstance(part.value, Term) else []


def _map(part: Part, writer: Writer, name: str) -> TensorMapParameter:
    fields = part.value
    modes = fields.modes
    return TensorMapParameter(
        name,
        part.argument,
        part.offset,
        address=writer.write(fields.address),
        dtype=modes.dtype,
        dims=tuple(writer.write(dim) for dim in fields.dims),
        strides=tuple(writer.write(stride) for stride in fields.strides),
        box=modes.box,
        element_strides=modes.element_strides,
        interleave=modes.interleave,
        swizzle=modes.swizzle,
        l2_promotion=modes.l2_promotion,
        oob_fill=modes.oob_fill,
        encoding="raw" if fields.raw else "driver",
    )


def _integer_type(part: Part) -> str:
    """Without a sign where only that holds all values, or for a byte."""
    term, bits = part.value, 8 * part.size
    half = 1 << bits - 1
    unsigned = term.low >= 0 and half <= term.high < 2 * half
    return f"{'u' if unsigned else 'i'}{bits}"


def _name(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name

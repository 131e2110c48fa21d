"""The parameters of a launch, read out of the memory that host code filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    Parameter,
    PointerParameter,
    StructParameter,
    TensorArgument,
    TensorMapParameter,
    render,
)
from fusekit.abi.arguments import PEER
from fusekit.compiler.cubin import Cubin
from fusekit.compiler.hostcode import maps
from fusekit.compiler.hostcode.arguments import ADDRESS_BITS
from fusekit.compiler.hostcode.bits import Bits, Pointer
from fusekit.compiler.hostcode.expressions import ExpressionWriter, terms_of, written
from fusekit.compiler.hostcode.floats import Floats
from fusekit.compiler.hostcode.layout import Layout, Leaf
from fusekit.compiler.hostcode.lower import Lowering
from fusekit.compiler.hostcode.machine import Call
from fusekit.compiler.hostcode.terms import Term
from fusekit.compiler.hostfunction import Signature
from fusekit.dtypes import DTYPES, FLOATS
from fusekit.errors import BuildError

Draft = Callable[[ExpressionWriter, set[str]], Any]
"""Makes a parameter or a field, once all terms are known. The set has the names that are taken."""

_MAP_BYTES = 128
_MODES = ("dtype", "box", "element_strides", "interleave", "swizzle", "l2_promotion", "oob_fill")


class Parameters:
    """Reads parameters. terms: everything in them that will be an expression. alignments: of arguments, in bytes, what
    the descriptors that are made of them need.

    reaches: (what must be 0 or less, rule) of tensor maps that may reach beyond their tensor.

    types: of each piece of host memory. allow: called with what a launcher refuses by itself. changing: the kernels
    that change their tensor maps, so that what they are given says nothing of what is read and written.
    """

    def __init__(
        self,
        types: Mapping[int, Layout],
        lowering: Lowering,
        floats: Floats,
        signature: Signature,
        allow: Callable[[Term, int, int], None],
        changing: frozenset[str] = frozenset(),
    ) -> None:
        self.terms: list[Term] = []
        self.alignments: dict[str, int] = {}
        self._types, self._lowering, self._algebra = types, lowering, lowering.algebra
        self._floats, self._allow, self._changing = floats, allow, changing
        self._scalars = {scalar.name: scalar for scalar in signature.scalars}
        self._tensors = {tensor.name: tensor for tensor in signature.tensors if tensor.role != PEER}
        self.reaches: list[tuple[Term, str]] = []

    def of(self, call: Call, pointers: Pointer, kernel: Cubin) -> list[Draft]:
        """The parameters of the launch `call`, whose addresses lie at `pointers`."""
        drafts = []
        for index, place in enumerate(kernel.parameters):
            at = call.cell(pointers, 8 * index)
            layout = self._types[at.memory] if isinstance(at, Pointer) else None
            if layout is None or layout.size != place.size:
                raise BuildError(
                    f"host code: parameter {index} of {kernel.symbol} has {layout.size if layout else 0} bytes, in the"
                    f" cubin {place.size}: {call.at.place}"
                )
            drafts.append(self._parameter(call, at, layout, place.offset, kernel.symbol in self._changing))
        if call.cell(pointers, 8 * len(kernel.parameters)) is not None:
            raise BuildError(f"host code: it passes more parameters than {kernel.symbol} has: {call.at.place}")
        return drafts

    def _parameter(self, call: Call, at: Pointer, layout: Layout, offset: int, changed: bool) -> Draft:
        if _is_map(layout):
            return self._map(call, at, offset, changed)
        cells = [(leaf, call.cell(at, leaf.offset)) for leaf in layout.leaves]
        # The others are padding, or fields that the kernel does not read.
        filled = [(leaf, bits) for leaf, bits in cells if bits is not None and getattr(bits, "op", "") != "undefined"]
        if len(cells) == len(filled) == 1 and cells[0][0].size == layout.size:
            return self._scalar(call, *filled[0], offset)
        fields = [self._scalar(call, leaf, bits, leaf.offset) for leaf, bits in filled]

        def draft(writer: ExpressionWriter, names: set[str]) -> Parameter:
            inside: set[str] = set()
            members = tuple(field(writer, inside) for field in fields)
            return StructParameter(_name("struct", names), layout.size, members, offset)

        return draft

    def _map(self, call: Call, at: Pointer, offset: int, changed: bool) -> Draft:
        fields = maps.read([call.cell(at, 8 * index) for index in range(maps.WORDS)], self._lowering)
        if not fields.raw:
            for dim in fields.dims:
                self._allow(dim, 1, 2**32)
            for stride in fields.strides:
                self._allow(stride, 0, 2**40 - 1)
        address = self._aligned(fields.address)
        argument, shift = self._base(address, call)
        if not fields.raw and not changed and argument in self._tensors:
            self._bound(self._tensors[argument], fields, shift)
        self.terms += [address, *fields.dims, *fields.strides]
        return lambda writer, names: TensorMapParameter(
            _name(f"map_{argument}", names),
            argument,
            offset,
            address=writer.write(address),
            dims=tuple(writer.write(dim) for dim in fields.dims),
            strides=tuple(writer.write(stride) for stride in fields.strides),
            encoding="raw" if fields.raw else "driver",
            **{mode: getattr(fields.modes, mode) for mode in _MODES},
        )

    def _bound(self, tensor: TensorArgument, fields: maps.MapFields, shift: Term) -> None:
        """Keeps a tensor map within the tensor that it is made over: the kernel reads and writes what the map has."""
        algebra, bits = self._algebra, DTYPES[fields.modes.dtype].bits
        ends = algebra.floordiv(algebra.plus(algebra.scale(fields.dims[0], bits), 7), algebra.const(8))
        for dim, stride in zip(fields.dims[1:], fields.strides, strict=True):
            ends = algebra.add(ends, algebra.mul(algebra.plus(dim, -1), stride))
        span = algebra.const(1)
        for extent, step in zip(tensor.shape, tensor.strides, strict=True):
            # A kernel that runs without rows has a map of one, which it does not read.
            steps = algebra.maximum(algebra.plus(algebra.term(extent), -1), algebra.const(0))
            span = algebra.add(span, algebra.mul(steps, algebra.term(step)))
        beyond = algebra.sub(algebra.add(ends, shift), algebra.scale(span, tensor.itemsize))
        if ends.low >= 1 << ADDRESS_BITS:  # beyond all memory: its coordinates are meant to wrap
            return
        if beyond.high > 0:
            rule = f"{tensor.name} is smaller than what the kernel's tensor map over it reaches: give it all"
            self.reaches.append((beyond, f"{rule} of its elements, or smaller sizes"))
        if shift.low < 0:
            before = f"the kernel's tensor map over {tensor.name} begins before it; give other sizes"
            self.reaches.append((algebra.scale(shift, -1), before))

    def _aligned(self, address: Term) -> Term:
        """An address that host code rounds, with what is rounded apart: the argument must be aligned, or the launch is
        refused.
        """
        algebra = self._algebra
        for part, times in algebra.linear(address)[1].items():
            if part.op not in ("floordiv", "mod") or not part.args[1].is_const:
                continue
            whole, divisor = part.args
            names = [name for name, factor in algebra.linear(whole)[1].items() if factor == 1 and _is_address(name)]
            if len(names) == 1 and (part.op == "mod" or times == divisor.value):
                argument = names[0].args[0].removesuffix(".address")
                self.alignments[argument] = math.lcm(self.alignments.get(argument, 1), divisor.value)
                rest = algebra.sub(whole, names[0])
                rounded = [(algebra.mod(rest, divisor), times)]
                if part.op == "floordiv":
                    rounded = [(names[0], 1), (algebra.floordiv(rest, divisor), times)]
                return algebra.combine([(address, 1), (part, -times), *rounded])
        return address

    def _scalar(self, call: Call, leaf: Leaf, bits: Any, offset: int) -> Draft:
        if not isinstance(bits, Bits):
            raise BuildError(f"host code: a parameter is an address of the host's memory: {call.at.place}")
        if leaf.kind == "float":
            return self._float(call, leaf, bits, offset)
        term = self._lowering.condition(bits) if bits.width == 1 else self._lowering.lower(bits)
        if leaf.kind == "pointer" and not term.is_const:
            return self._pointer(call, term, offset)
        if leaf.kind == "integer":
            term = self._within(term, 8 * leaf.size, bits.op == "trunc")
        self.terms.append(term)

        def draft(writer: ExpressionWriter, names: set[str]) -> Parameter:
            value = writer.write(term)
            name = _name(value.replace(".", "_") if isinstance(value, str) else "integer", names)
            return IntegerParameter(name, _integer_type(term, 8 * leaf.size), value, offset)

        return draft

    def _float(self, call: Call, leaf: Leaf, bits: Bits, offset: int) -> Draft:
        value = self._floats.lower(bits)
        self.terms += terms_of(value)
        scalar = self._scalars.get(value) if isinstance(value, str) else None
        dtype = {32: "f32", 64: "f64"}.get(leaf.width, "")
        if not dtype:
            dtype = scalar.dtype if scalar is not None else value[0] if isinstance(value, tuple) else ""
        if dtype not in FLOATS or 8 * DTYPES[dtype].bytes != leaf.width:
            raise BuildError(
                f"host code: a float parameter of {leaf.width} bits whose type is unknown: {call.at.place}"
            )
        if scalar is not None and scalar.dtype == dtype:
            name = scalar.name
            return lambda writer, names: FloatParameter(_name(f"{name}_value", names), name, offset, dtype=dtype)
        return lambda writer, names: FloatParameter(
            _name("float", names), "", offset, written(value, writer), dtype=dtype
        )

    def _pointer(self, call: Call, term: Term, offset: int) -> Draft:
        argument, shift = self._base(self._aligned(term), call)
        self.terms.append(shift)
        return lambda writer, names: PointerParameter(
            _name(f"{argument.replace('.', '_')}_pointer", names), argument, offset, shift=writer.write(shift)
        )

    def _within(self, term: Term, bits: int, cut: bool) -> Term:
        """`term` as a word of `bits` bits: a launcher refuses what does not fit.

        cut: whether it was made of a wider value, and may be meant without a sign.
        """
        half = 1 << bits - 1
        signed, unsigned = term.low >= -half and term.high < half, term.low >= 0 and term.high < 2 * half
        if signed or unsigned or not cut:
            self._allow(term, -half, 2 * half - 1)
            return term
        if term.low < -half or term.high >= 2 * half:
            self._lowering.guard(term, -half, 2 * half - 1)
        return self._algebra.mod(term, self._algebra.const(2 * half))

    def _base(self, term: Term, call: Call) -> tuple[str, Term]:
        """(the argument whose address a pointer is made of, what is added to it in bytes)."""
        _, parts = self._algebra.linear(term)
        names = [part for part in parts if _is_address(part)]
        if len(names) != 1 or parts[names[0]] != 1:
            text = render(ExpressionWriter([term]).write(term))
            raise BuildError(
                f"host code: a pointer is {text}; a launch record knows an argument's address and an offset to it:"
                f" {call.at.place}"
            )
        return names[0].args[0].removesuffix(".address"), self._algebra.sub(term, names[0])


def _is_address(term: Term) -> bool:
    return term.op == "variable" and bool(term.args[0].endswith(".address"))


def _is_map(layout: Layout) -> bool:
    words = tuple(leaf.width for leaf in layout.leaves if leaf.kind == "integer")
    return layout.size == _MAP_BYTES and words == (64,) * 16 and layout.alignment == 8


def _integer_type(term: Term, bits: int) -> str:
    """Without a sign where only that holds all values, or for a byte."""
    half = 1 << bits - 1
    return f"{'u' if term.low >= 0 and half <= term.high < 2 * half else 'i'}{bits}"


def _name(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name

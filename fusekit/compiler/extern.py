"""Kernels that are not fusekit's: a Python function gives the host function and its fake arguments.

What the host code computes is read out of it, as for every kernel. The spec gives the rest: roles, names of dims, sizes
of workspaces. Divisors and alignments are those of the fakes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusekit.abi import Argument, Constraint, Dim, Expr, ScalarArgument, TensorArgument, render, variables
from fusekit.abi.arguments import WHOLE
from fusekit.abi.expr import evaluate, freeze, validate
from fusekit.compiler import dsl, fakes, hardware
from fusekit.compiler.hostfunction import (
    HostArgument,
    HostInteger,
    HostMemory,
    HostPointer,
    HostScalar,
    HostStream,
    HostTensor,
    Lifted,
    Signature,
    TracePlan,
    plus,
    rounded_up,
)
from fusekit.compiler.leaves import (
    BIT,
    EVENT,
    FLOAT,
    INTEGER,
    NARROW,
    POINTER,
    STREAM,
    TENSOR,
    Leaf,
    argument_name,
    host_callable,
    leaves,
)
from fusekit.compiler.lift import LIFT_VALUES
from fusekit.compiler.source_call import call_lifted
from fusekit.dtypes import DTYPES
from fusekit.errors import BuildError
from fusekit.spec import ExternSpec
from fusekit.spec.extern import OF_CALLERS

FREE = "free"
MEMORY_ALIGNMENT = 256
_OF_THE_DEVICE = frozenset({"sm_count", "cluster_margin", "active_clusters"})
_DIVIDING = ("floordiv", "ceildiv", "mod")


def plan(spec: ExternSpec) -> TracePlan:
    """Trace plan of a foreign kernel. Runs its source, and imports the DSL.

    Raises BuildError, in words, for a source that cannot be called, and for arguments whose
    facts neither the trace nor the spec gives.
    """
    if not spec.lift:
        with hardware.answering(LIFT_VALUES[0]) as asked:
            first = _plan(spec, {})
        return replace(first, again=lambda: _plan(spec, {}), asked=asked)
    first, second = (_plan(spec, dict.fromkeys(spec.lift, value)) for value in LIFT_VALUES)
    exprs = {freeze(expr) for expr in spec.lift.values()}
    if len(exprs) > 1:
        raise BuildError("lift: every lifted argument must be the same expression; compute the others from one of them")
    (expr,) = exprs
    return replace(first, lifted=Lifted(expr, LIFT_VALUES, second))


def _plan(spec: ExternSpec, lifted: Mapping[str, int]) -> TracePlan:
    function, arguments, keywords = call_lifted(spec, lifted)
    traced = leaves(function, arguments, keywords)
    # By place where that can be: an argument may have the name of one of cute.compile's own.
    bound = inspect.signature(host_callable(function)).bind(*arguments, **keywords)
    arguments, keywords = bound.args, bound.kwargs
    reading = _Reading(spec, traced)
    hosts, signature = reading.signature()
    options = spec.params.get("options", "") if fakes.FAKES in spec.params else ""
    return TracePlan(
        function, arguments, hosts, signature, keywords, tuple(leaf.fake for leaf in traced), options=options,
        traced=reading.traced,
    )  # fmt: skip


class _Reading:
    """From the fakes and the spec to a signature."""

    def __init__(self, spec: ExternSpec, traced: Sequence[Leaf]) -> None:
        self._spec, self._leaves = spec, traced
        self._constants = {name: value for name, value in spec.params.items() if type(value) is int}
        self._symbols: dict[int, tuple[Expr, str]] = {}  # a symbolic extent -> its expression, where the spec gives it
        self._keep: list[Any] = []
        self._divisors: dict[str, int] = {}
        self._strides: dict[int, str] = {}
        self._constraints: list[Constraint] = []
        self._memory: dict[str, Expr] = {"workspace": 0, "scratch": 0}
        self._expressions: list[tuple[str, Expr]] = []  # expressions of the spec that read the other arguments
        self.traced: dict[str, int] = {}

    def signature(self) -> tuple[tuple[HostArgument, ...], Signature]:
        self._check()
        hosts: list[HostArgument] = []
        arguments: list[Argument] = []
        pairs: dict[int, tuple[HostArgument, Argument | None]] = {}
        for place in sorted(range(len(self._leaves)), key=lambda place: self._leaves[place].kind == INTEGER):
            pairs[place] = self._argument(self._leaves[place])  # integers last: an extent of a tensor may be one
        for _, (host, argument) in sorted(pairs.items()):
            hosts.append(host)
            if argument is not None:
                arguments.append(argument)
        scalars = {argument.name for argument in arguments if isinstance(argument, ScalarArgument)}
        tensors = [argument for argument in arguments if isinstance(argument, TensorArgument)]
        strides = {tensor.stride_variable(index) for tensor in tensors for index in range(tensor.rank)}
        for where, expr in self._expressions:
            validate(expr, where, _OF_THE_DEVICE.union(strides, scalars, self._divisors))
        both = sorted(scalars & self._divisors.keys())
        if both:  # the launch would take the one for the other
            raise BuildError(
                f"{both[0]!r} is an extent of a tensor and a scalar argument; name the extent otherwise in"
                f' arguments.NAME.shape, or say arguments.{both[0]}.rename = "TEXT"'
            )
        dims = tuple(self._dim(name) for name in self._divisors)
        for dim in dims:
            dim.check(f"dims.{dim.name}")
        for place, (_, argument) in pairs.items():  # a record's own checks, by the spec's names
            where = f"arguments.{self._leaves[place].name}"
            if isinstance(argument, TensorArgument):
                argument.check(where, frozenset(self._divisors))
            elif isinstance(argument, ScalarArgument):
                argument.check(where)
        for name in self._spec.dims:
            if name not in self._divisors:
                known = ", ".join(self._divisors) or "none"
                raise BuildError(f"dims.{name}: no shape has this dim; the dims are {known}")
        skip = tuple(name for name, table in self._spec.dims.items() if table.get("skip_if_zero"))
        return tuple(hosts), Signature(
            self._spec.arch,
            tuple(arguments),
            dims,
            tuple(self._constraints),
            workspace=self._memory["workspace"],
            workspace_zeroed=self._memory["workspace"] != 0,
            scratch=self._memory["scratch"],
            skip_if_zero=skip,
        )

    def _check(self) -> None:
        """Raises BuildError for a table without an argument, and for facts that are missing."""
        names = {leaf.name for leaf in self._leaves if leaf.kind != STREAM}
        has = ", ".join(str(leaf) for leaf in self._leaves if leaf.kind != STREAM)
        for name, field in self._spec.arguments.items():
            if name not in names and not field.get("optional"):
                raise BuildError(f"arguments.{name}: the trace has no such argument; it has {has}")
        missing = []
        for leaf in self._leaves:
            table = self._table(leaf)
            if leaf.kind in (TENSOR, POINTER):
                needs = ("role",) if table.get("role") == "workspace" else ("role", "shape")
                lacks = [key for key in needs if key not in table]
                if lacks:
                    missing.append(f"{leaf} lacks {' and '.join(lacks)}")
        if missing:
            raise BuildError(
                f"the host code cannot tell what these arguments are: {'; '.join(missing)}; say it in the spec, such as"
                ' arguments.x = { role = "input", shape = ["M", "N"] }'
            )

    def _table(self, leaf: Leaf) -> Mapping[str, Any]:
        return self._spec.arguments.get(leaf.name, {})

    def _name(self, leaf: Leaf) -> str:
        renamed: str = self._table(leaf).get("rename", leaf.name)
        name = argument_name(renamed)
        if name != renamed and "rename" in self._table(leaf):
            raise BuildError(f"arguments.{leaf.name}.rename: {renamed!r} is reserved; take another name")
        return name

    def _argument(self, leaf: Leaf) -> tuple[HostArgument, Argument | None]:
        table, name = self._table(leaf), self._name(leaf)
        if leaf.kind == STREAM:
            return HostStream(), None
        if table.get("role") == "workspace":
            return self._workspace(leaf, table), None
        if leaf.kind == TENSOR:
            return self._tensor(leaf, name, table)
        if leaf.kind == POINTER:
            return self._pointer(leaf, name, table)
        if leaf.kind == EVENT:
            return HostScalar(name), ScalarArgument(name, "i64", None, 1, WHOLE["i64"][1])
        if "value" in table:
            if leaf.kind == FLOAT:
                raise BuildError(f"arguments.{leaf.name}.value: only integers are computed; leave it out")
            return HostInteger(self._read(table["value"], f"arguments.{leaf.name}.value"), leaf.dtype), None
        if leaf.kind == INTEGER and id(leaf.fake) in self._symbols:
            return HostInteger(self._symbols[id(leaf.fake)][0], leaf.dtype), None
        bounds: dict[str, int] = {key: table[key] for key in ("minimum", "maximum", "divisor") if key in table}
        if leaf.dtype in NARROW:
            least, most = NARROW[leaf.dtype]
            bounds["minimum"] = max(least, bounds.get("minimum", least))
            bounds["maximum"] = min(most, bounds.get("maximum", most))
        dtype = leaf.dtype if leaf.kind == FLOAT else "i32"
        if leaf.dtype == "i64" and not -(2**31) <= bounds.get("minimum", 0) <= bounds.get("maximum", 0) < 2**31:
            least, most = WHOLE["i64"]
            bounds = {"minimum": least, "maximum": most, **bounds}
            return HostScalar(name), ScalarArgument(name, "i64", table.get("default"), **bounds)
        value = getattr(leaf.fake, "value", leaf.fake)
        # An integer of a hand-written source may be any; a captured call has those of a launch.
        meant = leaf.dtype == BIT or fakes.FAKES in self._spec.params
        if isinstance(value, int) and meant and not table.keys() & OF_CALLERS:
            self.traced[name] = int(value)
        host = HostInteger(name, leaf.dtype) if leaf.dtype == "i64" else HostScalar(name)  # of which 32 bits are used
        return host, ScalarArgument(name, dtype, table.get("default"), **bounds)

    def _workspace(self, leaf: Leaf, table: Mapping[str, Any]) -> HostArgument:
        if leaf.kind not in (TENSOR, POINTER):
            raise BuildError(f"arguments.{leaf.name}: {leaf} is no memory; a workspace is a pointer or a tensor")
        size, where = self._expr(table["bytes"]), f"arguments.{leaf.name}"
        memory = "workspace" if table.get("zeroed") else "scratch"
        # A launch record has one of each; several lie in it one after the other.
        begin = rounded_up(self._memory[memory], MEMORY_ALIGNMENT)
        self._memory[memory] = size if begin == 0 else plus(begin, size)
        fixed = leaf.kind == POINTER or all(isinstance(item, int) for item in (*leaf.fake.shape, *leaf.fake.stride))
        if fixed and not {"shape", "strides"} & table.keys():
            least = _bytes_of(leaf)
            if isinstance(size, int) and size < least:
                raise BuildError(f"{where}.bytes is {size}; {leaf} takes {least}; say {least} or more")
            return HostPointer(memory, begin)
        shape, strides = ([self._expr(item) for item in table.get(key, ())] for key in ("shape", "strides"))
        if len(shape) != leaf.rank or len(strides) != leaf.rank:
            raise BuildError(
                f"{where}: the trace leaves extents of {leaf} open; say {where}.shape and {where}.strides, with"
                f" {leaf.rank} expressions each"
            )
        fake = leaf.fake
        for key, exprs, symbols in (("shape", shape, fake.shape), ("strides", strides, fake.stride)):
            for mode, (expr, symbol) in enumerate(zip(exprs, symbols, strict=True)):
                if isinstance(symbol, int) or not isinstance(expr, int):
                    exprs[mode] = self._extent(expr, symbol, 1, f"{where}.{key}[{mode}]")
        steps = (("mul", ("sub", extent, 1), stride) for extent, stride in zip(shape, strides, strict=True))
        needed = _times(("add", 1, *steps), DTYPES[leaf.dtype].bytes)
        self._constraints.append(
            Constraint(("max", 0, ("sub", needed, size)), f"{where}.bytes is {_shown(size)}; its extents take more")
        )
        return HostMemory(memory, begin, tuple(shape), tuple(strides))

    def _tensor(self, leaf: Leaf, name: str, table: Mapping[str, Any]) -> tuple[HostTensor, TensorArgument]:
        shape, fake = table["shape"], leaf.fake
        if len(shape) != leaf.rank:
            raise BuildError(f"arguments.{leaf.name}.shape has {len(shape)} dims; {leaf}")
        rules = table.get("strides", [FREE] * leaf.rank)
        if len(rules) != leaf.rank:
            raise BuildError(f"arguments.{leaf.name}.strides has {len(rules)} entries; {leaf}")
        contiguous = leaf.contiguous
        extents: list[Expr] = []
        hosts: list[Expr] = []
        for mode, (written, symbol) in enumerate(zip(shape, fake.shape, strict=True)):
            where = f"arguments.{leaf.name}.shape[{mode}]"
            factor = leaf.packed if mode == contiguous else 1
            extent = self._extent(self._expr(written), symbol, factor, where)
            extents.append(extent)
            hosts.append(_times(extent, factor))
        strides: list[Expr] = []
        host_strides: list[Expr] = []
        divisor = 1
        for mode, (rule, symbol) in enumerate(zip(rules, fake.stride, strict=True)):
            stride, host, step = self._stride(leaf, name, mode, rule, symbol, contiguous)
            strides.append(stride)
            host_strides.append(host)
            divisor = math.lcm(divisor, step)
        tensor = TensorArgument(
            name, table["role"], leaf.dtype, tuple(extents), tuple(strides), divisor, max(dsl.alignment(fake), 1)
        )
        shape_, strides_ = tuple(map(freeze, hosts)), tuple(map(freeze, host_strides))
        return HostTensor(name, shape_, strides_, large=table.get("large", False)), tensor

    def _extent(self, written: Expr, symbol: Any, factor: int, where: str) -> Expr:
        """The record's extent of a mode whose extent in the trace is `symbol`, a number or symbolic."""
        if isinstance(symbol, int):
            count = symbol // factor
            if written == "*":
                return count
            if written != count:
                rule = f'the trace fixes this extent at {count}; say {count}, a param of that value, or "*"'
                raise BuildError(f"{where} is {_shown(written)}; {rule}")
            return count
        if isinstance(written, int):
            raise BuildError(f"{where} is {written}, but the trace leaves this extent open; name it")
        if written == "*":
            raise BuildError(f'{where} is "*", but the trace leaves this extent open; name it')
        known = self._symbols.get(id(symbol))
        whole = _times(written, factor)
        if known is not None and known[0] != whole:
            raise BuildError(
                f"{where} is {_shown(written)}; the trace has one extent for it and for {known[1]}, which is"
                f" {_shown(known[0])}; call both the same"
            )
        self._symbols[id(symbol)] = whole, where
        self._keep.append(symbol)
        for variable in variables(written):
            self._divisors.setdefault(variable, 1)
        if isinstance(written, str):
            step = symbol.divisibility // math.gcd(symbol.divisibility, factor)
            self._divisors[written] = math.lcm(self._divisors[written], step)
        return written

    def _stride(
        self, leaf: Leaf, name: str, mode: int, rule: Any, symbol: Any, contiguous: int
    ) -> tuple[Expr, Expr, int]:
        """(the record's stride, the host function's, what a stride that is read is a multiple of)."""
        where = f"arguments.{leaf.name}.strides[{mode}]"
        factor = 1 if mode == contiguous else leaf.packed
        if isinstance(symbol, int):
            stride: Expr = symbol // factor
            if rule != FREE and self._expr(rule) != stride:
                raise BuildError(f"{where} is {_shown(rule)}; the trace fixes this stride at {stride}")
            return stride, symbol, 1
        if rule != FREE:
            stride = self._read(rule, where)
            return stride, _times(stride, factor), 1
        if id(symbol) in self._symbols:
            return self._symbols[id(symbol)][0], self._symbols[id(symbol)][0], 1
        variable = f"{name}.stride{mode}"
        before = self._strides.setdefault(id(symbol), variable)
        self._keep.append(symbol)
        if before != variable:
            self._constraints.append(
                Constraint(("sub", variable, before), f"the stride {variable} must be {before}: the kernel takes one")
            )
        return variable, _times(variable, factor), symbol.divisibility // math.gcd(symbol.divisibility, factor)

    def _pointer(self, leaf: Leaf, name: str, table: Mapping[str, Any]) -> tuple[HostArgument, Argument]:
        """A pointer is a tensor whose rows follow upon one another."""
        shape = [self._expr(written) for written in table["shape"]]
        for size in shape:
            for dim in variables(size):
                self._divisors.setdefault(dim, 1)
        strides: list[Expr] = []
        span: Expr = 1
        for extent in reversed(shape):
            strides.insert(0, span)
            span = extent if span == 1 else ("mul", extent, span)
        align = max(dsl.alignment(leaf.fake, 0) or 0, DTYPES[leaf.dtype].bytes)
        return HostPointer(name), TensorArgument(
            name, table["role"], leaf.dtype, tuple(shape), tuple(strides), alignment=align
        )

    def _read(self, written: Any, where: str) -> Expr:
        """`_expr` of what may read any other argument."""
        self._expressions.append((where, expr := self._expr(written)))
        return expr

    def _expr(self, written: Any) -> Expr:
        """The expression with params for their values; worked out where nothing else is left."""
        if isinstance(written, str):
            return self._constants.get(written, written)
        if isinstance(written, int):
            return written
        expr = (written[0], *(self._expr(item) for item in written[1:]))
        validate(expr, "the spec's expression")
        operator, *_, divisor = expr
        if operator in _DIVIDING and isinstance(divisor, int) and divisor < 1:
            raise BuildError(f"the spec's expression {_shown(expr)} divides by {divisor}; a divisor is 1 or more")
        return evaluate(expr, {}) if not variables(expr) else expr

    def _dim(self, name: str) -> Dim:
        table = self._spec.dims.get(name, {})
        divisor = math.lcm(self._divisors[name], table.get("divisor", 1))
        least = 0 if table.get("skip_if_zero") else divisor
        return Dim(name, divisor, table.get("minimum", least), table.get("maximum", 2**31 - 1))


def _bytes_of(leaf: Leaf) -> int:
    """What a workspace takes at least: a tensor's elements, of a pointer one."""
    if leaf.kind == POINTER:
        return DTYPES[leaf.dtype].bytes
    last: int = sum((extent - 1) * stride for extent, stride in zip(leaf.fake.shape, leaf.fake.stride, strict=True))
    return (last // leaf.packed + 1) * DTYPES[leaf.dtype].bytes


def _times(expr: Expr, factor: int) -> Expr:
    if factor == 1:
        return expr
    return expr * factor if isinstance(expr, int) else ("mul", factor, expr)


def _shown(expr: Any) -> str:
    return render(freeze(expr))

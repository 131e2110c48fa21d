"""How strong the proof is: every operator, constant, variable and mode of a record is changed once, and the argument
sets of the true record must notice. `python -m tests.compiler.mutations [PATTERN ...]` does it for packaged kernels.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusekit.abi import (
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    RecordError,
    TensorMapParameter,
    Truncated,
)
from fusekit.compiler.hostcode.arguments import ranges
from fusekit.compiler.hostcode.terms import Algebra, Range
from fusekit.compiler.prove import compare
from fusekit.compiler.samples import ArgumentSet, argument_sets
from fusekit.errors import ProofError

OTHER = {
    "add": "sub", "sub": "add", "mul": "add", "floordiv": "ceildiv", "ceildiv": "floordiv", "mod": "floordiv",
    "min": "max", "max": "min", "lt": "le", "le": "lt", "eq": "ne", "ne": "eq", "exp2": "bit_length",
    "bit_length": "exp2",
}  # fmt: skip
OTHER_FLOAT = {
    "fadd": "fsub", "fsub": "fadd", "fmul": "fdiv", "fdiv": "fmul", "dadd": "dsub", "dsub": "dadd", "dmul": "ddiv",
    "ddiv": "dmul", "flt": "fle", "fle": "flt", "floor": "ceil", "ceil": "floor",
    "trunc": "ceil", "abs": "neg",
}  # fmt: skip
MODES = {
    "swizzle": ("none", "32B", "64B", "128B"), "l2_promotion": ("none", "64B", "128B", "256B"),
    "oob_fill": ("none", "nan_zero"), "interleave": ("none", "16B", "32B"), "dtype": ("bf16", "fp16", "f32", "i32"),
}  # fmt: skip


@dataclass
class Tally:
    """Counts of mutants. equivalent: those that mean the same for every allowed argument; refused: no record."""

    noticed: int = 0
    equivalent: int = 0
    refused: int = 0
    missed: list[str] = field(default_factory=list)


def tally(record: LaunchRecord, recorded: Sequence[tuple[ArgumentSet, Any]]) -> Tally:
    """recorded: argument sets, and what the host code launched with each."""
    named = {name: Range(-(2**63), 2**63 - 1) for name in record.values}
    algebra, result = Algebra(ranges(record) | named), Tally()
    for label, make, pair in mutants(record):
        if pair is not None and algebra.term(pair[0]) is algebra.term(pair[1]):
            result.equivalent += 1
            continue
        try:
            launches = make().launches
        except RecordError:
            result.refused += 1
            continue
        if any(differs(launches, launched, arguments) for arguments, launched in recorded):
            result.noticed += 1
        else:
            result.missed.append(label)
    return result


def differs(launches: Sequence[LaunchRecord], launched: Any, arguments: ArgumentSet) -> bool:
    try:
        if launches[0].deciding:
            values = launches[0].environment(arguments.values, arguments.floats)
            arguments = replace(arguments, values=values)
        compare(launches, launched, arguments)
    except (ProofError, RecordError):
        return True
    return False


def mutants(record: LaunchRecord) -> Iterator[tuple[str, Any, tuple[Expr, Expr] | None]]:
    """(what was changed, a function that makes the mutant, the expressions before and after where it is one)."""
    for name in ("grid", "block", "cluster", "preferred_cluster"):
        for axis, extent in enumerate(getattr(record, name)):
            for mutant in expressions(extent, record):
                changed = (*getattr(record, name)[:axis], mutant, *getattr(record, name)[axis + 1 :])
                changes = {name: changed}
                yield f"{name}[{axis}]: {mutant}", lambda changes=changes: replace(record, **changes), (extent, mutant)
    for name, value in record.values.items():
        for mutant in floats(value.expr) if isinstance(value, Truncated) else ():
            changes = {"values": {**record.values, name: Truncated(mutant)}}
            yield f"{name}: {mutant}", lambda changes=changes: replace(record, **changes), None
    for name in ("dynamic_shared", "when"):
        for mutant in () if (expr := getattr(record, name)) == 1 else expressions(expr, record):
            yield (
                f"{name}: {mutant}",
                lambda name=name, mutant=mutant: replace(record, **{name: mutant}),
                (expr, mutant),
            )
    for index, parameter in enumerate(record.parameters):
        for label, changes, pair in parameter_mutants(parameter, record):

            def make(index: int = index, changes: dict[str, Any] = changes) -> LaunchRecord:
                before = record.parameters
                changed = replace(before[index], **changes)
                return replace(record, parameters=(*before[:index], changed, *before[index + 1 :]))

            yield f"{parameter.name}: {label}", make, pair


def parameter_mutants(
    parameter: Any, record: LaunchRecord
) -> Iterator[tuple[str, dict[str, Any], tuple[Expr, Expr] | None]]:
    tensors = [tensor.name for tensor in record.tensors]
    if isinstance(parameter, IntegerParameter):
        for mutant in expressions(parameter.value, record):
            yield f"{mutant}", {"value": mutant}, (parameter.value, mutant)
    elif isinstance(parameter, PointerParameter):
        for other in (*tensors, "workspace", "scratch"):
            if other != parameter.argument:
                yield other, {"argument": other}, None
                break
    elif isinstance(parameter, FloatParameter):
        for scalar in record.scalars:
            if scalar.dtype == "f32" and scalar.name != parameter.argument:
                yield scalar.name, {"argument": scalar.name, "value": ""}, None
                break
    elif isinstance(parameter, TensorMapParameter):
        for mutant in expressions(parameter.address, record):
            yield f"address {mutant}", {"address": mutant}, (parameter.address, mutant)
        for name in ("dims", "strides"):
            fields = getattr(parameter, name)
            for index, expr in enumerate(fields):
                for mutant in expressions(expr, record):
                    changed = (*fields[:index], mutant, *fields[index + 1 :])
                    yield f"{name}[{index}] {mutant}", {name: changed}, (expr, mutant)
        for name, step in (("box", -1), ("element_strides", 1)):
            fields = getattr(parameter, name)
            for index, extent in enumerate(fields):
                yield f"{name}[{index}]", {name: (*fields[:index], extent + step, *fields[index + 1 :])}, None
        for name, modes in MODES.items():
            yield name, {name: next(mode for mode in modes if mode != getattr(parameter, name))}, None


def expressions(expr: Expr, record: LaunchRecord) -> Iterator[Expr]:
    """`expr` with one thing changed, for each thing in it."""
    if isinstance(expr, int):
        yield expr + 1
    elif isinstance(expr, str):
        names = [dim.name for dim in record.dims]
        names += [tensor.stride_variable(0) for tensor in record.tensors if tensor.reads_stride(0)]
        names += ["sm_count", "cluster_margin"]
        if expr.endswith(".address"):
            names = [f"{tensor.name}.address" for tensor in record.tensors]
        yield next(name for name in names if name != expr)
    else:
        operator, *operands = expr
        yield ("if", operands[0], *operands[:0:-1]) if operator == "if" else (OTHER[operator], *operands)
        for index, operand in enumerate(operands):
            for mutant in expressions(operand, record):
                yield (operator, *operands[:index], mutant, *operands[index + 1 :])


def floats(expr: Any) -> Iterator[Any]:
    """The float expression `expr` with one thing changed, for each number and operator in it."""
    if isinstance(expr, float):
        yield expr + 0.125
    elif isinstance(expr, tuple):
        operator, *operands = expr
        if operator in OTHER_FLOAT:
            yield (OTHER_FLOAT[operator], *operands)
        for index, operand in enumerate(operands):
            for mutant in floats(operand):
                yield (operator, *operands[:index], mutant, *operands[index + 1 :])


def recorded_launches(plan: Any, record: LaunchRecord, host: Any, seed: str) -> list[tuple[ArgumentSet, Any]]:
    """What the host code launches with each of the proof's argument sets."""
    from fusekit.compiler.hostcall import pack
    from fusekit.compiler.prove import LAUNCHES

    sets = argument_sets(record, seed, LAUNCHES)
    return [(item, host.call(pack(plan, item), item.values["sm_count"])) for item in sets]


def main(patterns: list[str]) -> None:
    from fusekit.compiler import hostcode
    from fusekit.compiler.trace import trace
    from fusekit.compiler.worker import plan
    from fusekit.spec import find

    total = Tally()
    for spec in find(patterns):
        trace_plan = plan(spec)
        with tempfile.TemporaryDirectory() as scratch:
            traced = trace(trace_plan, Path(scratch))
        _, record = hostcode.read(traced.module, trace_plan, traced.cubin)
        result = tally(record, recorded_launches(trace_plan, record, traced.host(record), spec.full_name))
        for name in ("noticed", "equivalent", "refused"):
            setattr(total, name, getattr(total, name) + getattr(result, name))
        total.missed += [f"{spec.full_name} {label}" for label in result.missed]
    lines = [f"noticed {total.noticed}, equivalent {total.equivalent}, no record {total.refused}"]
    lines += [f"missed {len(total.missed)}", *(f"  {label}" for label in total.missed)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Kernels for the proof of a C launcher: of every shape that a launch record has."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import (
    Constraint,
    FloatParameter,
    IntegerParameter,
    LaunchEvent,
    LaunchRecord,
    LaunchStep,
    PeersArgument,
    PointerParameter,
    ScalarArgument,
    StructParameter,
    TensorArgument,
    TensorMapParameter,
    Truncated,
)
from fusekit.abi.floats import FLOAT_OPERATORS, SCHEMA_2_FLOATS
from fusekit.cabi import Exported
from fusekit.dtypes import FLOATS
from fusekit.spec import find, parse_file
from tests.records import read_plan, read_record
from tests.runtime.samples import following, record

from .launcher import CUBIN, complete

BACKWARD = Path(__file__).parents[1] / "gpu" / "matrix_backward.toml"
HOST_FUNCTIONS = (
    "two", "fast_division", "branch", "floats", "inside", "overflow", "either", "by_size", "float_grid",
    "integers_of_floats",
)  # fmt: skip


@functools.cache
def samples() -> list[Exported]:
    """GEMMs as they are built, small host functions, and `hand_written`."""
    hostfunctions = pytest.importorskip(
        "tests.compiler.hostfunctions", reason="the CuTe DSL (extra `build`) is not installed"
    )
    model = [find([f"gpt-oss-20b/{name}"])[0] for name in ("fc1-fwd", "fc2-fwd")]
    specs = [*find(["quickstart"]), *model]
    exported = [Exported(spec.full_name, complete(read_record(spec)), CUBIN, spec.defaults()) for spec in specs]
    sums = next(
        spec for spec in parse_file(BACKWARD) if spec.operands["dprob"] and spec.operands["dbias"]
    )  # with scratch
    exported.append(Exported(sums.full_name, complete(read_record(sums)), CUBIN, sums.defaults()))
    for name in HOST_FUNCTIONS:
        compiled = read_plan(hostfunctions.plan(getattr(hostfunctions, name)))
        exported.append(Exported(f"host/{name}@1", complete(compiled), CUBIN, {}))
    return [*exported, *hand_written()]


@functools.cache
def hand_written() -> list[Exported]:
    """Records with whatever one may hold; nothing is compiled for them."""
    base = record()
    everything = record(
        arguments=(*base.arguments, ScalarArgument("shift", "i32", 3)),
        parameters=(
            *base.parameters, PointerParameter("counters", "workspace", 296), IntegerParameter("shifted", "i64",
            ("add", "shift", ("mod", ("sub", "M", "shift"), 7)), 304), PointerParameter("partial", "scratch", 312),
        ),
        constraints=(*base.constraints,),
        workspace=("mul", "sm_count", 64), workspace_zeroed=True,
        scratch=("mul", 4, ("mul", "M", ("min", "sm_count", "I"))),
        attributes={"cooperative": 1, "programmatic_stream_serialization": 1, "preferred_shared_memory_carveout": 50,
                    "non_portable_cluster_size_allowed": 1},
    )  # fmt: skip
    rows = {
        "following": following(),
        "events": of_events(),
        "floats": of_floats(),
        "peers": peers(),
        "expressions": expressions(),
        "schema-2": schema_2(),
        "every-field": everything,
    }
    defaults = {"peers": {"timeout": 1000}, "every-field": {"cluster_margin": 4}}
    return [
        Exported(f"sample/{name}@1", complete(built), CUBIN, defaults.get(name, {})) for name, built in rows.items()
    ]


def of_events() -> LaunchRecord:
    """Two launches: the first records two events, the second one of them."""
    base = record()
    handles = tuple(ScalarArgument(name, "i64", None, 1, 2**53) for name in ("ready", "begun"))
    both = LaunchEvent("launch_completion", "begun", 1), LaunchEvent("programmatic", "ready", 0, 1)
    step = LaunchStep(
        (PointerParameter("out", "y"),), ("E", 1, 1), (32, 1, 1), events=(LaunchEvent("programmatic", "begun"),)
    )
    return replace(base, arguments=(*base.arguments, *handles), events=both, then=(step,))


def peers() -> LaunchRecord:
    """The windows of three ranks, and integers within bounds."""
    base = record()
    windows = PeersArgument("window", 3, ("mul", "capacity", ("mul", 2, "K")), 128)
    scalars = (
        ScalarArgument("rank", "i32", 1, 0, 2), ScalarArgument("capacity", "i32", 1024, 128, 2**20, 128),
        ScalarArgument("timeout", "i32", 5, 1, 2**31 - 1),
    )  # fmt: skip
    addresses = (PointerParameter(f"window_{rank}", f"window.{rank}", shift=16 * rank) for rank in range(3))
    return replace(
        base,
        arguments=(*base.arguments, windows, *scalars),
        parameters=(*base.parameters, *addresses, *(IntegerParameter(f"{s.name}_", "i32", s.name) for s in scalars)),
        constraints=(*base.constraints, Constraint(("max", 0, ("sub", "M", ("mul", 64, "capacity"))), "too many rows")),
    )


def random_expression(source: random.Random, depth: int) -> Any:
    """An expression of any operators that has a value below 2**40 for all arguments."""
    if depth == 0:
        return source.choice(
            ["M", "K", "E", "I", "x.stride0", "w.stride1", "shift", "sm_count", source.randrange(-9, 9)]
        )
    one, other, third = (random_expression(source, source.randrange(depth)) for _ in range(3))
    operator = source.choice(["add", "sub", "min", "max", "eq", "ne", "lt", "le"])
    expr = source.choice([
        (operator, one, other), ("add", one, other, third), ("mul", 3, one, 5), ("if", one, other, third),
        ("if", ("lt", one, other), third, other), ("floordiv", one, ("max", 1, other)),
        ("ceildiv", one, ("add", 1, ("mod", other, 7))), ("mod", one, ("exp2", ("mod", other, 41))),
        ("exp2", ("mod", one, 40)), ("bit_length", ("max", 0, one)),
        ("if", one, ("mod", other, ("max", 1, one)), third),
    ])  # fmt: skip
    return expr if source.random() < 0.5 else ("sub", ("mod", expr, 2**39), 2**38)


def random_float(source: random.Random, depth: int, operators: dict[str, int]) -> Any:
    """operators: how many operands each takes."""
    if depth == 0:
        leaves = ["act_alpha", "act_limit", source.gauss(0, 3), 1e-40, 3e38, 7, "inf", "-inf"]
        return source.choice(leaves)
    operator, count = source.choice(sorted(operators.items()))
    if operator in ("fint", "dint"):
        return operator, source.choice(["M", "w.stride0", "shift"])
    return (operator, *(random_float(source, source.randrange(depth), operators) for _ in range(count)))


def expressions() -> LaunchRecord:
    """As many expressions, of integers and of floats, as fit into two structs."""
    source = random.Random(31)
    base = record()
    integers = [IntegerParameter(f"n{n}", "i64", random_expression(source, 5), 8 * n) for n in range(300)]
    single = dict.fromkeys(sorted(SCHEMA_2_FLOATS), 2)
    floats = [FloatParameter(f"f{n}", "", 4 * n, random_float(source, 4, single)) for n in range(100)]
    structs = StructParameter("integers", 2400, tuple(integers)), StructParameter("floats", 400, tuple(floats))
    arguments = (*base.arguments, ScalarArgument("shift", "i32", 3))
    return replace(base, arguments=arguments, parameters=(*base.parameters, *structs))


def of_floats() -> LaunchRecord:
    """Whatever schema 5 computes of floats, and scalars of every type of float."""
    base, source = record(), random.Random(11)
    scalars = tuple(ScalarArgument(f"a_{dtype}", dtype, 0.1) for dtype in FLOATS)
    wide = (
        ScalarArgument("wide", "i64", -5, -(2**53), 2**53), ScalarArgument("bound", "i64", 2**40, -(2**50), 2**50, 8)
    )  # fmt: skip
    whole = [IntegerParameter(f"{item.name}_", "i64", item.name) for item in wide]
    given = [FloatParameter(f"{item.name}_", item.name, dtype=item.dtype) for item in scalars]
    computed = [
        FloatParameter(f"f{number}", "", value=random_float(source, 5, FLOAT_OPERATORS), dtype=FLOATS[number % 4])
        for number in range(80)
    ]
    computed += [
        FloatParameter(f"{root}_{dtype}_{to}", "", value=(root, ("dmul", ("dint", "M"), f"a_{dtype}")), dtype=to)
        for dtype in FLOATS for root in ("fsqrt", "dsqrt") for to in FLOATS
    ]  # fmt: skip
    values: dict[str, Any] = {"rounds": Truncated(("floor", ("dmul", "act_alpha", ("dint", "M"))))}
    values |= {f"t{number}": Truncated(random_float(source, 5, FLOAT_OPERATORS)) for number in range(60)}
    values["of_a_value"] = Truncated(("fmul", ("fint", "rounds"), 0.3))
    whole += [IntegerParameter(f"{name}_", "i64", name) for name in values]
    return replace(
        base, arguments=(*base.arguments, ScalarArgument("shift", "i32", -3), *wide, *scalars),
        parameters=(*base.parameters, *whole, *given, *computed), values=values,
        grid=(("max", 1, ("min", "rounds", 9)), 2, 1), cluster=(1, 1, 1), when=("le", "t0", 2**40),
    )  # fmt: skip


def schema_2() -> LaunchRecord:
    """Whatever schema 2 adds, in three launches."""
    base = record()
    rows = ("min", "M", ("exp2", ("bit_length", "E")))
    divider = StructParameter(
        "divider", 72, (
            PointerParameter("base", "offsets", 0, shift=("mul", 4, "E")),
            PointerParameter("before", "y", 8, shift=("sub", 0, ("mul", 2**40, ("mul", "K", "y.stride0")))),
            IntegerParameter("divisor", "u32", "tiles", 16),
            IntegerParameter("log", "u8", ("bit_length", ("sub", "tiles", 1)), 20),
            IntegerParameter("sign", "i8", ("sub", 0, ("mod", "M", 129)), 21),
            IntegerParameter("short", "i16", ("sub", ("min", "K", 32767), 4), 22),
            IntegerParameter("multiplier", "u64", ("ceildiv", ("exp2", 62), "tiles"), 24),
            FloatParameter("scale", "", 32, ("fdiv", ("fmul", "act_alpha", 1.4426950216293335),
                                             ("fsub", "act_limit", ("fadd", 0.1, "-inf")))),
            FloatParameter("one", "", 36, 1),
            FloatParameter("alpha", "act_alpha", 40),
            PointerParameter("counters", "workspace", 48, shift=16),
            PointerParameter("partial", "scratch", 56, shift=4096),
            IntegerParameter("odd", "u16", ("ne", ("mod", "M", 2), 0), 64),
        ),
    )  # fmt: skip
    fp8 = TensorMapParameter(
        "fp8_map", "fp8", dtype="u8", dims=("K", "M"), strides=("fp8.stride0",), box=(64, 64), swizzle="64B",
    )  # fmt: skip
    raw = TensorMapParameter(
        "raw_map", "x", dtype="u4_align16", dims=(("mul", 2**33, "K"), ("add", "M", 2**32), "E"), encoding="raw",
        strides=(("sub", 2**40, ("mul", 2, "x.stride0")), ("sub", 0, ("mul", 16, ("mul", 2**50, "K")))),
        box=(64, 8, 3), element_strides=(1, 2, 8), swizzle="32B", l2_promotion="256B", oob_fill="none",
        address=("sub", ("add", "x.address", ("floordiv", "K", 3)), ("mul", 2**57, "M")),
    )  # fmt: skip
    tf32 = TensorMapParameter(
        "tf32_map", "scales", dtype="tf32", dims=("M",), box=(32,), swizzle="128B", oob_fill="nan_zero"
    )
    second = LaunchStep(
        parameters=(fp8, PointerParameter("out", "y"), raw, IntegerParameter("clusters", "i32", "active_clusters")),
        grid=("resident", 1, ("if", ("le", "M", 64), 1, ("min", "E", 8))), block=(128, 1, 1), cluster=(2, 1, 1),
        dynamic_shared=1024, attributes={"non_portable_cluster_size_allowed": 1},
    )  # fmt: skip
    last = LaunchStep(
        parameters=(PointerParameter("partial", "scratch"), tf32, divider), grid=("shift", "tiles", 1), block=(32, 2, 1)
    )
    return replace(
        base,
        arguments=(
            *base.arguments, TensorArgument("fp8", "input", "e4m3", ("M", "K"), ("fp8.stride0", 1), 16),
            TensorArgument("scales", "input", "f32", ("M",), (1,)),
            TensorArgument("packed", "inout", "e2m1x2", ("M", ("floordiv", "K", 2)), (("floordiv", "K", 2), 1)),
            ScalarArgument("shift", "i32", 3),
        ),
        dims=(*(replace(dim, maximum=2**20) for dim in base.dims),),
        values={
            "tiles": ("ceildiv", "M", 128),
            "resident": ("mul", 2, ("max", 1, ("sub", "active_clusters", "cluster_margin"))),
            "safe": ("if", ("lt", "M", 100), ("if", ("eq", "M", 0), 1, ("floordiv", 1000, "M")), ("mod", 7, "K")),
        },
        constraints=(
            *base.constraints, Constraint(("max", 0, ("sub", "tiles", 5000)), "at most 5000 tiles of 128 rows"),
            Constraint(("lt", "shift", 1), "shift must be at least 1"),
        ),
        parameters=(
            *base.parameters, replace(divider, name="first_divider"), IntegerParameter("safe", "i32", "safe"),
            IntegerParameter("rows_of_tile", "u16", rows),
        ),
        then=(second, last), workspace=("mul", "sm_count", 64), workspace_zeroed=True,
        scratch=("add", 8192, ("mul", 4, "M")),
    )  # fmt: skip

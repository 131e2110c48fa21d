"""What schema 2 adds: it comes back from JSON, means what it says, and is not taken for schema 1."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.abi import (
    Constraint,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    LaunchStep,
    PointerParameter,
    RecordError,
    ScalarArgument,
    StructParameter,
    TensorArgument,
    evaluate,
    flat,
)
from fusekit.abi.expr import thaw
from fusekit.abi.floats import evaluate_float, rounded
from fusekit.abi.tensormap import TensorMap, encode, encode_raw
from tests.runtime.samples import again, record

DIVIDER = StructParameter(
    "divider",
    24,
    (
        PointerParameter("base", "offsets", 0, shift=("mul", 4, "E")),
        IntegerParameter("count", "u32", "tiles", 8),
        IntegerParameter("log", "u8", ("bit_length", ("sub", "tiles", 1)), 12),
        FloatParameter("scale", "", 16, ("fmul", "act_alpha", 1.5)),
    ),
    296,
)


def step(**changes: Any) -> LaunchStep:
    parts: dict[str, Any] = {
        "parameters": (PointerParameter("y_pointer", "y", 0),), "grid": ("tiles", 1, 1), "block": (32, 1, 1),
        "symbol": "second",
    }  # fmt: skip
    return LaunchStep(**(parts | changes))


def whole() -> LaunchRecord:
    """Everything of schema 2 in one record."""
    base = record()
    return replace(
        base,
        parameters=(*base.parameters, DIVIDER),
        values={"tiles": ("ceildiv", "M", 128), "twice": ("mul", 2, "tiles")},
        constraints=(*base.constraints, Constraint(("max", 0, ("sub", "twice", 99)), "too many tiles")),
        then=(step(),),
    )


def test_a_record_with_all_of_it_comes_back() -> None:
    assert whole().schema == 2
    assert again(whole()) == whole()
    assert again(replace(whole(), then=(step(grid=("active_clusters", 1, 1)),))).reads("active_clusters")


def new_parameter(parameter: Any) -> dict[str, Any]:
    return {"parameters": (*record().parameters, replace(parameter, offset=296))}


SECOND = {
    "values": {"values": {"v": "M"}},
    "several launches": {"then": (step(grid=(1, 1, 1)),)},
    "an operator": {"grid": (("if", ("lt", "M", 8), 1, 2), 1, 1)},
    "a constraint on the device": {"constraints": (Constraint(("mod", "sm_count", 2), "even"),)},
    "clusters at a time": {"grid": ("active_clusters", 1, 1)},
    "a narrow integer": new_parameter(IntegerParameter("n", "u8", 1)),
    "a pointer inside": new_parameter(PointerParameter("p", "y", shift=2)),
    "a computed float": new_parameter(FloatParameter("f", "", value=("fadd", "act_alpha", 1.0))),
    "a struct": new_parameter(StructParameter("s", 4, (IntegerParameter("n", "i32", 1, 0),))),
    "a raw tensor map": {"parameters": (replace(record().parameters[0], encoding="raw"), *record().parameters[1:])},
    "FP8 values": {"arguments": (*record().arguments, TensorArgument("q", "input", "e4m3", ("M",), (1,)))},
}  # fmt: skip


@pytest.mark.parametrize("changes", SECOND.values(), ids=SECOND)
def test_only_what_needs_it_is_schema_2(changes: dict[str, Any]) -> None:
    assert record().schema == 1
    changed = replace(record(), **changes)
    assert changed.schema == 2
    assert again(changed) == changed
    with pytest.raises(RecordError, match="schema: 1; the record says what only schema 2 can"):
        LaunchRecord.from_json(changed.to_json() | {"schema": 1})


def test_each_launch_is_a_record_of_its_own() -> None:
    record = whole()
    first, second = record.launches
    assert record.launches is record.launches  # a launch of new shapes checks no record again
    assert (first.symbol, second.symbol) == ("kernel", "second")
    assert second.grid == ("tiles", 1, 1)
    assert second.values == whole().values
    assert second.launches == (second,)


def test_values_are_evaluated_in_order() -> None:
    assert whole().environment({"M": 300}) == {"M": 300, "tiles": 3, "twice": 6}
    with pytest.raises(RecordError, match=r"values\.b: unknown variable 'c'"):
        replace(record(), values={"b": "c", "c": 1})
    with pytest.raises(RecordError, match=r"values\.M: the name is taken"):
        replace(record(), values={"M": 1})


def test_a_record_from_elsewhere_is_refused_in_words() -> None:
    document = whole().to_json()
    twice = document | {"values": [*document["values"], {"name": "tiles", "value": 1}]}
    with pytest.raises(RecordError, match=r"values\[2\].name: 'tiles' occurs twice"):
        LaunchRecord.from_json(twice)
    with pytest.raises(RecordError, match="size: -8; a struct has at least 1 byte"):
        replace(record(), **new_parameter(StructParameter("s", -8, ())))
    with pytest.raises(RecordError, match="must be \\[operator, a, b\\] with fadd"):
        again(replace(record(), **new_parameter(FloatParameter("f", "", value=((1, 2), 1.0, 2.0)))))
    with pytest.raises(RecordError, match="'nan' is reserved"):
        replace(record(), arguments=(*record().arguments, ScalarArgument("nan", "f32")))
    assert rounded(10**400) == math.inf and rounded(-(10**400)) == -math.inf


def test_a_struct_is_its_fields_at_their_places() -> None:
    assert [(offset, item.name) for offset, item in flat(whole().parameters)][-4:] == [
        (296, "base"), (304, "count"), (308, "log"), (312, "scale"),
    ]  # fmt: skip
    with pytest.raises(RecordError, match=r"fields\[1\].offset: 2; it must be a multiple of 4, from 4"):
        bad = StructParameter("s", 8, (IntegerParameter("a", "i32", 1, 0), IntegerParameter("b", "i32", 1, 2)))
        replace(record(), **new_parameter(bad))


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (("if", ("lt", "x", 3), ("floordiv", 7, "x"), ("sub", 0, 1)), -1), (("if", 0, ("floordiv", 1, 0), 4), 4),
        (("bit_length", "x"), 3), (("bit_length", 0), 0), (("exp2", "x"), 32), (("le", "x", 5), 1), (("lt", "x", 5), 0),
        (("eq", "x", 5), 1), (("ne", "x", 5), 0),
    ],
)  # fmt: skip
def test_operators(expr: Any, value: int) -> None:
    assert evaluate(expr, {"x": 5}) == value
    assert evaluate(thaw(expr), {"x": 5}) == value


@pytest.mark.parametrize("expr", [("bit_length", -1), ("exp2", -1), ("exp2", 63)])
def test_operators_refuse(expr: Any) -> None:
    with pytest.raises(RecordError, match=str(expr[1])):
        evaluate(expr, {})


SINGLE = st.floats(width=32)


@settings(deadline=None)
@given(SINGLE, SINGLE, st.sampled_from(["fadd", "fsub", "fmul", "fdiv"]))
def test_float_steps_are_those_of_binary32(a: float, b: float, operator: str) -> None:
    np = pytest.importorskip("numpy")
    with np.errstate(all="ignore"):
        x, y = np.float32(a), np.float32(b)
        want = {"fadd": x + y, "fsub": x - y, "fmul": x * y, "fdiv": x / y}[operator]
    got = evaluate_float((operator, "a", "b"), {"a": a, "b": b})
    assert math.isnan(got) if np.isnan(want) else struct.pack("<f", got) == want.tobytes()


def test_a_raw_descriptor_wraps() -> None:
    tensor_map = TensorMap(2**40, "bf16", (64, 8), (128,), (64, 8), (1, 1))
    assert encode_raw(tensor_map) == encode(tensor_map)
    wrapped = TensorMap(2**40 - 2**57, "bf16", (64 + 2**32, 8), (128 - 2**40,), (64, 8), (1, 1))
    assert encode_raw(wrapped) == encode(tensor_map)
    with pytest.raises(RecordError, match="address"):
        encode(wrapped)

"""What schema 5 adds: conditions of launches, block and shared memory as expressions, preferred clusters."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.abi import FloatParameter, LaunchEvent, LaunchRecord, RecordError, ScalarArgument, Truncated
from fusekit.abi.floats import evaluate_float, with_integers
from fusekit.dtypes import FLOATS
from fusekit.errors import ArgumentError
from fusekit.runtime.binding import check_scalar
from tests.runtime.samples import following, record


def test_it_comes_back_from_json():
    built = following()
    document = json.loads(json.dumps(built.to_json()))
    assert document["schema"] == built.schema == 5
    assert LaunchRecord.from_json(document) == built
    first, second = built.launches
    assert (first.when, second.when) == (("lt", 64, "M"), 1)
    assert (document["when"], "when" in document["then"][0]) == (["lt", 64, "M"], False)
    assert "preferred_cluster" not in record().to_json()


NUMBERS = st.floats() | st.floats(width=32) | st.floats(width=16) | st.integers(-(2**63), 2**63 - 1).map(float)


@settings(deadline=None, max_examples=200)
@given(NUMBERS, NUMBERS, st.integers(-(2**63), 2**63 - 1))
def test_floats_are_those_of_ieee_754(a: float, b: float, whole: int) -> None:
    np = pytest.importorskip("numpy")
    with np.errstate(all="ignore"):
        x, y, narrow = np.float64(a), np.float64(b), np.float32(a)
        want = {
            ("dadd", a, b): x + y, ("dsub", a, b): x - y, ("dmul", a, b): x * y, ("ddiv", a, b): x / y,
            ("dsqrt", a): np.sqrt(x), ("fsqrt", a): np.sqrt(narrow), ("f32", a): narrow, ("fp16", a): np.float16(x),
            ("neg", a): -x, ("fint", "n"): np.float32(np.int64(whole)), ("dint", "n"): np.float64(np.int64(whole)),
            ("feq", a, b): x == y, ("flt", a, b): x < y, ("fle", a, b): x <= y, ("fif", ("flt", a, b), a, b):
            x if x < y else y, ("floor", a): np.floor(x), ("ceil", a): np.ceil(x), ("trunc", a): np.trunc(x),
            ("abs", a): np.abs(x),
        }  # fmt: skip
    for expr, value in want.items():
        got = evaluate_float(with_integers(expr, {"n": whole}), {}, single=False)
        assert struct.pack("<d", got) == struct.pack("<d", value) or (got != got and np.isnan(value)), expr


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-40, 0x3F81), (-0.0, 0x8000),
     (2.0**-133, 1), (2.0**-134, 0), (1.5 * 2.0**-134, 1), (-(2.0**-200), 0x8000), (3.5e38, 0x7F80), (3.38e38, 0x7F7E)],
)  # fmt: skip
def test_bf16_is_rounded_to_nearest_even(value: float, bits: int) -> None:
    assert FloatParameter("f", "", value=value, dtype="bf16").to_bytes(value) == bits.to_bytes(2, "little")


def test_scalars_and_parameters_of_every_float_come_back_from_json() -> None:
    scalars = tuple(ScalarArgument(f"a_{dtype}", dtype, 0.5) for dtype in FLOATS)
    values = [FloatParameter(f"p_{item.name}", item.name, dtype=item.dtype) for item in scalars]
    values.append(FloatParameter("root", "", value=("fsqrt", ("fint", "M")), dtype="f32"))
    base = record()
    offset, built = 304, []
    for parameter in values:
        offset = -(-offset // parameter.size) * parameter.size
        built.append(replace(parameter, offset=offset))
        offset += parameter.size
    whole = replace(base, arguments=(*base.arguments, *scalars), parameters=(*base.parameters, *built))
    assert (whole.schema, LaunchRecord.from_json(json.loads(json.dumps(whole.to_json())))) == (5, whole)
    for value, text in (("a_f64", "this kind of parameter may name .*a_f32"), ("", "takes the name of a variable")):
        wrong = FloatParameter("w", value, value=("fint", "rows"))
        with pytest.raises(RecordError, match=text):
            replace(whole, parameters=(*whole.parameters, wrong))


@pytest.mark.parametrize(
    ("number", "whole"),
    [(0.99, 0), (-0.99, 0), (-7.5, -7), (2.0**53, 2**53), (2.0**62 - 512, 2**62 - 512), (2.0**62, -(2**62)),
     (-(2.0**62), -(2**62)), (float("inf"), -(2**62)), (float("nan"), -(2**62))],
)  # fmt: skip
def test_a_value_may_be_a_float_without_its_fraction(number: float, whole: int) -> None:
    built = replace(record(), values={"blocks": Truncated("act_limit"), "more": ("add", "blocks", 1)})
    assert built.environment({}, {"act_limit": number}) == {"blocks": whole, "more": whole + 1}


def test_the_floats_that_decide_a_launch() -> None:
    blocks = Truncated(("fmul", ("fint", "M"), ("ceil", "act_limit")))
    built = replace(record(), values={"blocks": blocks}, grid=("blocks", 1, 1))
    document = json.loads(json.dumps(built.to_json()))
    assert document["values"] == [{"name": "blocks", "truncated": ["fmul", ["fint", "M"], ["ceil", "act_limit"]]}]
    assert (built.schema, built.deciding, LaunchRecord.from_json(document)) == (5, {"act_limit"}, built)
    assert str(blocks) == "int(M * ceil(act_limit))"
    for expr, text in (("other", "unknown f32 scalar 'other'"), (("fint", "blocks"), "takes the name of a variable")):
        with pytest.raises(RecordError, match=f"values.blocks.*{text}"):
            replace(built, values={"blocks": Truncated(expr)})
    document["values"][0]["truncated"] = ["fmul", 1.0]
    with pytest.raises(RecordError, match=r"values\[0\].truncated: .*it must be \[operator, a, b\]"):
        LaunchRecord.from_json(document)
    sizes = {"many": Truncated(("fint", "sm_count"))}
    with pytest.raises(RecordError, match="when: it reads sm_count"):
        replace(record(), values=sizes, when="many")


def with_handle(*events: LaunchEvent) -> LaunchRecord:
    handle = ScalarArgument("done", "i64", None, 1, 2**63 - 1)
    return replace(record(), arguments=(*record().arguments, handle), events=events)


def test_events_come_back_from_json() -> None:
    built = with_handle(LaunchEvent("programmatic", "done", 1, 1), LaunchEvent("launch_completion", "done"))
    document = json.loads(json.dumps(built.to_json()))
    assert document["events"] == [
        {"kind": "programmatic", "argument": "done", "flags": 1, "at_block_start": 1},
        {"kind": "launch_completion", "argument": "done", "flags": 0},
    ]
    assert (built.schema, LaunchRecord.from_json(document)) == (5, built)


@pytest.mark.parametrize(
    ("events", "text"),
    [([LaunchEvent("programmatic", "M")], r"events\[0\].argument: 'M'; it names an i64 scalar: done"),
     ([LaunchEvent("done", "done")], r"events\[0\].kind: 'done'; a launch has one each of programmatic, launch"),
     ([LaunchEvent("programmatic", "done")] * 2, r"events\[1\].kind: 'programmatic'; a launch has one each"),
     ([LaunchEvent("programmatic", "done", -1)], r"events\[0\].flags: -1; it must be 0 to"),
     ([LaunchEvent("programmatic", "done", 0, 2)], r"events\[0\].at_block_start: 2; it must be 0 to 1")],
)  # fmt: skip
def test_what_events_may_be_is_checked(events: list[LaunchEvent], text: str) -> None:
    with pytest.raises(RecordError, match=text):
        with_handle(*events)


def test_an_integer_of_64_bits_has_all_of_them_or_bounds() -> None:
    base, full = record(), ScalarArgument("wide", "i64", 2**40, -(2**63), 2**63 - 1)
    whole = replace(base, arguments=(*base.arguments, full))
    document = json.loads(json.dumps(whole.to_json()))
    assert (whole.schema, "minimum" in document["arguments"][-1]) == (5, False)
    assert LaunchRecord.from_json(document) == whole
    narrow = replace(full, minimum=0)
    assert (narrow.bounded, narrow.allows(2**63 - 1), narrow.allows(-1)) == (True, True, False)
    assert (check_scalar(full, -(2**63)), check_scalar(narrow, 2**62 + 1)) == (-(2**63), 2**62 + 1)
    for scalar, value in ((full, 2**63), (narrow, -1)):
        with pytest.raises(ArgumentError, match=r"wide is .*it must be"):
            check_scalar(scalar, value)


@pytest.mark.parametrize(
    "changes",
    [
        {"when": ("lt", 0, "M")},
        {"block": ("M", 1, 1)},
        {"dynamic_shared": "M"},
        {"preferred_cluster": (4, 1, 1)},
        {"values": {"one": Truncated(1.0)}},
    ],
)
def test_each_of_it_is_schema_5(changes):
    built = replace(record(), **changes)
    assert (record().schema, built.schema) == (1, 5)
    with pytest.raises(RecordError, match="only schema 5 can"):
        LaunchRecord.from_json({**built.to_json(), "schema": 4})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"when": ("lt", 0, "rows")}, r"when\[2\]: .*'rows'"),
        ({"when": ("lt", 0, "clusters")}, "when: it reads sm_count; a launch depends on arguments alone"),
        ({"block": ("M", 0, 1)}, "block: 1x0x1; each is at least 1"),
        ({"block": ("M", 1, "rows")}, r"block\[2\].*'rows'"),
        ({"dynamic_shared": ("mul", "rows", 4)}, r"dynamic_shared\[1\]: .*'rows'"),
        ({"preferred_cluster": (3, 1, 1)}, "preferred_cluster: 3x1x1; each is a multiple of the cluster's, 2x1x1"),
        ({"preferred_cluster": (4, 8, 1)}, "preferred_cluster: 4x8x1; .* their product at most 16"),
        ({"preferred_cluster": (4, 1)}, "preferred_cluster: 2 entries; it has 3"),
        (
            {"grid": ("active_clusters", 1, 1), "block": ("M", 1, 1)},
            "block: active_clusters is of a launch whose block",
        ),
    ],
)
def test_what_it_may_hold_is_checked(changes, text):
    with pytest.raises(RecordError, match=text):
        replace(record(), values={"clusters": ("floordiv", "sm_count", 2)}, **changes)

"""What schema 3 adds, windows of ranks and bounds of integers: it comes back from JSON, and is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import (
    IntegerParameter,
    LaunchRecord,
    PeersArgument,
    PointerParameter,
    RecordError,
    ScalarArgument,
)
from tests.runtime.samples import record

WINDOW = PeersArgument("window", 2, ("mul", "capacity", "K"), 128)
CAPACITY = ScalarArgument("capacity", "i32", None, 128, 1 << 20, 128)


def whole(*more: Any) -> LaunchRecord:
    base = record()
    parameters = (
        PointerParameter("first", "window.0", 296), PointerParameter("second", "window.1", 304, shift=64),
        IntegerParameter("room", "i32", "capacity", 312),
    )  # fmt: skip
    return replace(
        base, arguments=(*base.arguments, WINDOW, CAPACITY, *more), parameters=(*base.parameters, *parameters)
    )


def test_it_comes_back_from_json():
    built = whole()
    document = json.loads(json.dumps(built.to_json()))
    assert document["schema"] == built.schema == 3
    assert LaunchRecord.from_json(document) == built
    assert document["arguments"][-2:] == [
        {"kind": "peers", "name": "window", "count": 2, "bytes": ["mul", "capacity", "K"], "alignment": 128},
        {"kind": "scalar", "name": "capacity", "dtype": "i32", "default": None, "minimum": 128, "maximum": 1 << 20,
         "divisor": 128},
    ]  # fmt: skip


def test_windows_are_tensors_without_dims():
    assert [(tensor.name, tensor.rank, tensor.written) for tensor in whole().tensors[-2:]] == [
        ("window.0", 0, False), ("window.1", 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "built", [record(), replace(record(), arguments=(*record().arguments, ScalarArgument("n", "i32")))]
)
def test_what_needs_neither_is_of_an_earlier_schema(built):
    assert built.schema < 3


@pytest.mark.parametrize("schema", [1, 2, 6])
def test_another_schema_is_refused(schema):
    with pytest.raises(RecordError, match="schema"):
        LaunchRecord.from_json({**whole().to_json(), "schema": schema})


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (PeersArgument("more", 0), "there are 1 to 32 ranks"),
        (PeersArgument("more", 33), "there are 1 to 32 ranks"),
        (PeersArgument("more", 2, "nothing"), "nothing"),
        (PeersArgument("more", 2, 16, 24), "power of two"),
        (PeersArgument("stream", 2), "reserved"),
        (PeersArgument("x", 2), "names are unique"),
        (ScalarArgument("n", "f32", None, 0, 5), "only an i32 or i64 scalar has bounds"),
        (ScalarArgument("n", "i32", None, 5, 4), "minimum <= maximum"),
        (ScalarArgument("n", "i32", None, 0, 4, 0), "the divisor at least 1"),
    ],
)
def test_parts_that_do_not_fit(argument, text):
    with pytest.raises(RecordError, match=text):
        whole(argument)


def test_a_pointer_names_a_window_that_there_is():
    built = whole()
    with pytest.raises(RecordError, match=r"window\.2"):
        replace(built, parameters=(*built.parameters, PointerParameter("third", "window.2", 320)))

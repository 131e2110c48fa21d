"""What schema 4 adds, an output over an input: it comes back from JSON, and is checked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusekit.abi import LaunchRecord, RecordError, TensorArgument
from tests.runtime.samples import over_x, record


def test_it_comes_back_from_json():
    built = over_x()
    document = json.loads(json.dumps(built.to_json()))
    assert document["schema"] == built.schema == 4
    assert LaunchRecord.from_json(document) == built
    assert document["arguments"][-1]["in_place_of"] == "x"
    assert record().schema < 4 and not any("in_place_of" in item for item in record().to_json()["arguments"])


@pytest.mark.parametrize("schema", [1, 2, 3, 6])
def test_another_schema_is_refused(schema):
    with pytest.raises(RecordError, match="schema"):
        LaunchRecord.from_json({**over_x().to_json(), "schema": schema})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"in_place_of": "z"}, r"arguments\[6\].in_place_of: .*'z'"),
        ({"in_place_of": "y"}, r"arguments\[6\].in_place_of: .*'y'"),
        ({"role": "inout"}, "'x'; dx is inout; of an output alone"),
        ({"dtype": "fp16"}, "'x' is no dx in dtype and shape; both must be the same"),
        ({"shape": ("K", "M")}, "'x' is no dx in dtype and shape; both must be the same"),
    ],
)
def test_what_an_output_may_lie_over_is_checked(changes, text):
    built = over_x()
    with pytest.raises(RecordError, match=text):
        replace(built, arguments=(*built.arguments[:-1], replace(built.arguments[-1], **changes)))


def test_two_outputs_cannot_lie_over_one_input():
    built = over_x()
    second = TensorArgument("again", "output", "bf16", ("M", "K"), ("again.stride0", 1), in_place_of="x")
    with pytest.raises(RecordError, match=r"arguments\[7\].in_place_of: .*'x'"):
        replace(built, arguments=(*built.arguments, second))

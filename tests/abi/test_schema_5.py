"""What schema 5 adds: conditions of launches, block and shared memory as expressions, preferred clusters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusekit.abi import LaunchRecord, RecordError
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


@pytest.mark.parametrize(
    "changes",
    [{"when": ("lt", 0, "M")}, {"block": ("M", 1, 1)}, {"dynamic_shared": "M"}, {"preferred_cluster": (4, 1, 1)}],
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

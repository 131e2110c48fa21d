"""Argument sets: deterministic, launchable, at the edges."""

from dataclasses import replace

import pytest

from fusekit.abi import Constraint, Dim, LaunchRecord, PointerParameter, TensorArgument, TensorMapParameter
from fusekit.compiler.samples import argument_sets, expected_map
from fusekit.errors import BuildError


def record(**changes):
    made = LaunchRecord(
        arch="sm_90a",
        arguments=(
            TensorArgument("x", "input", "bf16", ("M", "K"), ("x.stride0", 1), stride_divisor=8),
            TensorArgument("table", "input", "i32", ("E",), (1,), alignment=4),
        ),
        dims=(Dim("M"), Dim("K", divisor=8, minimum=8), Dim("E", minimum=1, maximum=100)),
        parameters=(
            TensorMapParameter("x_map", "x", dims=("K", "M"), strides=(["mul", 2, "x.stride0"],), box=(64, 64)),
            PointerParameter("table_pointer", "table"),
        ),
        grid=(["ceildiv", "M", 64], 1, 1),
        block=(128, 1, 1),
        skip_if_zero=("M",),
    )
    return replace(made, **changes)


def test_the_same_seed_gives_the_same_sets():
    assert argument_sets(record(), "a", 16) == argument_sets(record(), "a", 16)
    assert argument_sets(record(), "a", 16) != argument_sets(record(), "b", 16)


def test_edges_and_rules():
    made = record()
    sets = argument_sets(made, "a", 64)
    assert len(sets) == 64
    by_label = {each.label: each.values for each in sets}
    assert (by_label["smallest"]["M"], by_label["smallest"]["K"], by_label["smallest"]["E"]) == (1, 8, 1)
    assert (by_label["next to smallest"]["M"], by_label["next to smallest"]["K"]) == (2, 16)
    assert by_label["largest M"]["M"] == 2**31 - 1
    assert by_label["largest E"]["E"] == 100
    assert by_label["largest K"]["K"] == 2**31 - 8
    for each in sets:
        values = each.values
        assert values["K"] % 8 == 0
        assert values["K"] >= 8
        assert 1 <= values["E"] <= 100
        assert values["x.stride0"] % 8 == 0
        assert values["x.stride0"] >= values["K"]
        assert values["x.address"] % 16 == 0
        assert values["table.address"] % 4 == 0
        assert values["x.address"] + 2 * values["M"] * values["x.stride0"] < 2**47
        expected_map(made.parameters[0], values).check()
    assert any(each.values["x.stride0"] > each.values["K"] for each in sets)
    assert any(each.values["cluster_margin"] for each in sets)
    assert len({each.values["sm_count"] for each in sets}) > 3


def test_a_dim_that_may_be_zero_is_tried_at_zero():
    made = record(dims=(Dim("M", minimum=1), Dim("K", divisor=8, minimum=8), Dim("E")), skip_if_zero=())
    assert argument_sets(made, "a", 8)[0].values["E"] == 0


def test_constraints_hold():
    made = record(constraints=(Constraint(["mod", "K", 32], "K must be a multiple of 32"),))
    assert all(each.values["K"] % 32 == 0 for each in argument_sets(made, "a", 24))


def test_rules_that_nothing_meets_are_an_error():
    made = record(constraints=(Constraint(["add", "K", 1], "K must be -1"),))
    with pytest.raises(BuildError, match=r"no launchable arguments in 400 random tries.*K must be -1"):
        argument_sets(made, "a", 8)

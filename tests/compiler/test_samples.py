"""Argument sets: deterministic, launchable, at the edges."""

import itertools
from dataclasses import replace

import pytest

from fusekit.abi import Constraint, Dim, LaunchRecord, LaunchStep, PointerParameter, TensorArgument, TensorMapParameter
from fusekit.compiler.samples import argument_sets, expected_map
from fusekit.errors import BuildError


def record(**changes):
    base = LaunchRecord(
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
    return replace(base, **changes)


def test_the_same_seed_gives_the_same_sets():
    assert argument_sets(record(), "a", 16) == argument_sets(record(), "a", 16)
    assert argument_sets(record(), "a", 16) != argument_sets(record(), "b", 16)


def test_edges_and_rules():
    launch = record()
    sets = argument_sets(launch, "a", 64)
    assert len([item for item in sets if ":" not in item.label]) == 64
    by_label = {item.label: item.values for item in sets}
    assert (by_label["smallest"]["M"], by_label["smallest"]["K"], by_label["smallest"]["E"]) == (1, 8, 1)
    assert (by_label["next to smallest"]["M"], by_label["next to smallest"]["K"]) == (2, 16)
    assert by_label["largest M"]["M"] == 2**31 - 1
    assert by_label["largest E"]["E"] == 100
    assert by_label["largest K"]["K"] == 2**31 - 8
    for entry in sets:
        values = entry.values
        assert values["K"] % 8 == 0
        assert values["K"] >= 8
        assert 1 <= values["E"] <= 100
        assert values["x.stride0"] % 8 == 0
        assert values["x.stride0"] >= values["K"]
        assert values["x.address"] % 16 == 0
        assert values["table.address"] % 4 == 0
        assert values["x.address"] + 2 * values["M"] * values["x.stride0"] < 2**47
        expected_map(launch.parameters[0], values).check()
    assert any(item.values["x.stride0"] > item.values["K"] for item in sets)
    assert any(item.values["cluster_margin"] for item in sets)
    assert len({item.values["sm_count"] for item in sets}) > 3


def test_boundaries_have_sets_on_both_sides():
    tiles = ["max", 1, ["min", ["floordiv", "sm_count", 2], ["ceildiv", "M", 64]]]
    sets = argument_sets(record(grid=(tiles, ["if", ["lt", "E", 7], 1, 2], 1)), "a", 8)
    rows, experts = {item.values["M"] for item in sets}, {item.values["E"] for item in sets}
    assert {63, 64, 65} <= rows  # a tile
    assert {132 * 64, 132 * 64 + 1} <= rows  # as many tiles as half of 264 multiprocessors, and one more
    assert {6, 7} <= experts
    assert {item.values["sm_count"] for item in sets} >= {1, 2, 3}  # a multiple of 2, and where the maximum takes over


def test_boundaries_are_those_of_named_values_and_of_every_launch():
    step = LaunchStep((), (["ceildiv", "wide", 5], 1, 1), (32, 1, 1))
    sets = argument_sets(record(values={"wide": ["mul", 3, "E"]}, then=(step,)), "a", 8)
    assert {item.values["E"] for item in sets if item.label.startswith("multiples of 5")} >= {4, 5, 6}


def test_values_that_read_others_many_times_are_sampled_in_time():
    """Written out, the last would have 2**60 parts."""
    names = ["M", *(f"v{step}" for step in range(60))]
    values = {now: ["if", ["lt", before, 9], before, ["sub", before, 1]] for before, now in itertools.pairwise(names)}
    sets = argument_sets(record(values=values, grid=(["add", 1, ["floordiv", names[-1], 64]], 1, 1)), "a", 8)
    assert {item.values["M"] for item in sets} >= {8, 9, 10}


def test_a_dim_that_may_be_zero_is_tried_at_zero():
    launch = record(dims=(Dim("M", minimum=1), Dim("K", divisor=8, minimum=8), Dim("E")), skip_if_zero=())
    assert argument_sets(launch, "a", 8)[0].values["E"] == 0


def test_constraints_hold():
    launch = record(constraints=(Constraint(["mod", "K", 32], "K must be a multiple of 32"),))
    assert all(argument_set.values["K"] % 32 == 0 for argument_set in argument_sets(launch, "a", 24))


def test_rules_that_nothing_meets_are_an_error():
    launch = record(constraints=(Constraint(["add", "K", 1], "K must be -1"),))
    with pytest.raises(BuildError, match=r"no launchable arguments in 400 random tries.*K must be -1"):
        argument_sets(launch, "a", 8)


def test_multiples_are_found_without_a_search():
    """The first multiple lies 2**30 steps away: arithmetic finds it, and the places are those of a search."""
    from fusekit.compiler.boundaries import Axis, _multiples

    far = Axis("n", 0, 2**31 - 1, 1)
    assert next(_multiples(2**31, lambda index: 2**30 + index * 3, far)) == -(2**30) * pow(3, -1, 2**31) % 2**31
    for divisor in range(2, 20):
        for slope in (-7, -4, 1, 6, 12):
            for start in range(-9, 9):
                wanted = [index for index in range(1, divisor + 1) if (start + index * slope) % divisor == 0][:1]
                actual = list(_multiples(divisor, lambda index, a=start, b=slope: a + index * b, far))
                assert actual[:1] == wanted

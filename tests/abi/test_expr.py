"""Expressions: the value of exact arithmetic where each step fits into 64 bits; refused where not as the page says."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.abi import RecordError, evaluate, evaluate_address, render, validate, variables
from fusekit.abi.expr import MAX_DEPTH, OPERATORS, SCHEMA_2_OPERATORS, freeze, thaw

NAMES = ("M", "N", "x.stride0", "sm_count")
LEAVES = st.one_of(st.integers(-(2**31), 2**31), st.sampled_from(NAMES))


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.tuples(st.sampled_from(["add", "mul", "min", "max"]), children, children, children)
    two = st.tuples(st.sampled_from(["sub", "add", "mul"]), children, children)
    divided = st.tuples(st.sampled_from(["floordiv", "ceildiv", "mod"]), children, st.integers(1, 1000))
    return st.one_of(many, two, divided)


EXPRS = st.recursive(LEAVES, nodes, max_leaves=12)
RING = st.recursive(
    st.one_of(LEAVES, st.just("x.address")),
    lambda children: st.tuples(st.sampled_from(["add", "sub", "mul"]), children, children),
    max_leaves=8,
)
VALUES = st.fixed_dictionaries({name: st.integers(0, 2**31 - 1) for name in NAMES})


def steps(values: list[int], function: Callable[[int, int], int]) -> int:
    """From left to right; OverflowError for one that does not fit into 64 bits."""
    result = list(itertools.accumulate(values, function))
    if not all(-(2**63) <= value < 2**63 for value in result):
        raise OverflowError
    return result[-1]


def meaning(expr: Any, env: dict[str, int]) -> int:
    """The table of the module docstring, said another way."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, str):
        return env[expr]
    values = [meaning(item, env) for item in expr[1:]]
    match expr[0]:
        case "add":
            return steps(values, operator.add)
        case "sub":
            return steps(values, operator.sub)
        case "mul":
            return steps(values, operator.mul)
        case "floordiv":
            return divmod(values[0], values[1])[0]
        case "ceildiv":
            return -divmod(-values[0], values[1])[0]
        case "mod":
            return divmod(values[0], values[1])[1]
        case "min":
            return sorted(values)[0]
        case _:
            return sorted(values)[-1]


@given(EXPRS, VALUES)
def test_json_changes_nothing(expr: Any, env: dict[str, int]) -> None:
    validate(expr, known=frozenset(NAMES))
    again = freeze(json.loads(json.dumps(thaw(expr))))
    assert again == expr
    try:
        value = meaning(expr, env)
    except OverflowError:
        with pytest.raises(RecordError, match="does not fit into 64 bits"):
            evaluate(again, env)
    else:
        assert evaluate(again, env) == evaluate(thaw(expr), env) == value
    assert variables(expr) <= set(NAMES)
    assert render(expr)


@given(RING, VALUES, st.integers(0, 2**64 - 1))
def test_wrapping_addresses_early_or_late_gives_the_same(expr: Any, env: dict[str, int], address: int) -> None:
    validate(expr)

    def wrapping(node: Any) -> int:
        if isinstance(node, tuple):
            left, right = wrapping(node[1]), wrapping(node[2])
            return {"add": left + right, "sub": left - right, "mul": left * right}[node[0]] % 2**64
        return (env | {"x.address": address})[node] % 2**64 if isinstance(node, str) else node % 2**64

    assert evaluate_address(expr, env | {"x.address": address}) == wrapping(expr)


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (("floordiv", -7, 2), -4), (("ceildiv", -7, 2), -3), (("mod", -7, 4), 1), (("ceildiv", 0, 5), 0),
        (("min", 3, -1, 2), -1), (("max", 3, "M", 2), 9), (("add", 1, 2, 3, "M"), 15), (("mul", 2, "M", 3), 54),
    ],
)  # fmt: skip
def test_values(expr: Any, value: int) -> None:
    assert evaluate(expr, {"M": 9}) == value


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (1.5, "a float; an expression is an integer"), (True, "a bool; an expression"), (None, "a NoneType"),
        ([], "unknown operator None"), (["pow", 2, 3], "unknown operator 'pow'; the operators are add, bit"),
        ([["add"], 1, 2], "unknown operator"), (["add", 1], "add takes 2 or more operands, it has 1"),
        (["sub", 1, 2, 3], "sub takes 2 operands, it has 3"), (["add", 1, ["mul", 2, "Q"]], r"e\[2\]\[2\]: unknown"),
        ("", "must not be empty"), (2**63, "does not fit into a signed 64-bit"),
        (["floordiv", ["add", "x.address", 1], 2], "floordiv of an address"),
        (["max", 0, "x.address"], "max of an address"),
    ],
)  # fmt: skip
def test_what_is_no_expression(expr: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        validate(expr, "e", frozenset({"M", "x.address"}))


def test_depth_is_bounded() -> None:
    expr: Any = "M"
    for _ in range(MAX_DEPTH + 1):
        expr = ("add", expr, 1)
    with pytest.raises(RecordError, match="nested deeper than 32"):
        validate(expr)


@pytest.mark.parametrize("operator", ["floordiv", "ceildiv", "mod"])
@pytest.mark.parametrize("divisor", [0, -3])
def test_a_divisor_is_positive(operator: str, divisor: int) -> None:
    with pytest.raises(RecordError, match=f"{operator} of 7 by {divisor}; a divisor must be positive"):
        evaluate((operator, 7, "d"), {"d": divisor})


def test_an_unknown_variable_is_named() -> None:
    with pytest.raises(RecordError, match="reads 'Q', which has no value; known are M, N"):
        evaluate(("add", "Q", 1), {"M": 1, "N": 2})
    with pytest.raises(RecordError, match="unknown operator 'pow'"):
        evaluate(("pow", 1, 2), {})


def test_render() -> None:
    assert render(("mul", 2, ("add", "I", 1))) == "2 * (I + 1)"
    assert render(("ceildiv", "M", 128)) == "ceildiv(M, 128)"
    assert render(("if", ("lt", "M", 8), ("add", "M", 1), ("exp2", 3))) == "(M + 1) if (M < 8) else exp2(3)"
    first = {"add", "sub", "mul", "floordiv", "ceildiv", "mod", "min", "max"}
    assert set(OPERATORS) - SCHEMA_2_OPERATORS == first

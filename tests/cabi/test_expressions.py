"""Expressions have the same value in Python and in C, or in neither."""

import ctypes
import random
from typing import Any

import pytest

from fusekit.abi import RecordError, evaluate, evaluate_address
from fusekit.cabi import Exported, flat, generate
from fusekit.cabi.layout import LAUNCH_VARIABLES
from tests.conftest import PARTS
from tests.runtime.samples import record

from .launcher import CUBIN, build, complete

DIMS = ("M", "K", "E", "I")
SOURCE = """
int tried(const int64_t *steps, int64_t count, const int64_t *variables, int wraps, int64_t *result) {
    fk_expression expression;
    expression.steps = (const fk_step *)steps;
    expression.count = count;
    return fk_evaluate(&expression, variables, wraps, result);
}
"""
LARGE = (0, 1, -1, 2, 3, 7, 62, 63, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), -(2**62))
OPERATORS = {"add": 3, "sub": 2, "mul": 3, "floordiv": 2, "ceildiv": 2, "mod": 2, "min": 2, "max": 3, "eq": 2, "ne": 2,
             "lt": 2, "le": 2, "if": 3, "bit_length": 1, "exp2": 1}  # fmt: skip


def drawn(source: random.Random, depth: int) -> Any:
    if depth == 0 or source.random() < 0.2:
        return source.choice((*DIMS, *LARGE))
    operator = source.choice(list(OPERATORS))
    return (operator, *(drawn(source, depth - 1) for _ in range(OPERATORS[operator])))


@pytest.mark.parametrize(("wraps", "value"), [(0, evaluate), (1, evaluate_address)])
def test_a_step_beyond_64_bits_has_no_value_anywhere(tmp_path, soak, soak_part, wraps, value):
    built = complete(record())
    kernel = Exported("sample/x@1", built, CUBIN)
    texts = generate([kernel], "fusekit")
    texts["fusekit.c"] += SOURCE
    library = ctypes.CDLL(str(build(tmp_path, texts, "fusekit")))
    assert tuple(dim.name for dim in built.dims) == DIMS
    writer, source = flat._RecordWriter("x", built, {}, False), random.Random(f"expressions {wraps} {soak_part}")
    none = 0
    for _ in range(180_000 // PARTS if soak else 6_000):
        expr = drawn(source, 3)
        env = {name: source.choice((source.randrange(100), source.randrange(2**31), *LARGE)) for name in DIMS}
        steps = writer.steps(expr)
        words = flat.words([item for step in steps for item in step])
        variables = (ctypes.c_int64 * 64)(*([0] * len(LAUNCH_VARIABLES)), *env.values())
        actual = ctypes.c_int64()
        known = library.tried(words, ctypes.c_int64(len(steps)), variables, wraps, ctypes.byref(actual))
        try:
            expected = value(expr, env)
        except RecordError:
            expected = None
            none += 1
        assert bool(known) == (expected is not None), (expr, env)
        if expected is not None:
            assert (actual.value - expected) % 2**64 == 0, (expr, env)
    assert none > 100

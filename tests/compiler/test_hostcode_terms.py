"""Terms and machine words against direct evaluation: whatever is simplified means the same for all allowed values."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusekit.abi import RecordError, evaluate
from fusekit.compiler.hostcode.bits import Bits, Graph
from fusekit.compiler.hostcode.expressions import ExpressionWriter
from fusekit.compiler.hostcode.lower import Lowering
from fusekit.compiler.hostcode.sums import INFINITY
from fusekit.compiler.hostcode.terms import Algebra, Range, Term
from fusekit.errors import BuildError

RANGES = {
    "M": Range(0, 2**30), "N": Range(8, 2**29, 8), "s": Range(0, 2**56, 8), "x.address": Range(0, 2**57 - 1, 16),
    "E": Range(1, 100), "i": Range(-(2**31), 2**31 - 1),
}  # fmt: skip
NAMES = st.sampled_from(sorted(RANGES))
CONSTANTS = st.one_of(st.integers(-9, 9), st.sampled_from([16, 64, 127, 128, 192, 256, 2**16, 2**31, 2**32, 2**40]))
DIVISORS = st.sampled_from([1, 2, 3, 8, 16, 48, 127, 128, 2**16, 2**32])
BINARY = st.sampled_from(["add", "sub", "mul", "min", "max", "eq", "ne", "lt", "le"])


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(BINARY, inner, inner),
        st.tuples(st.sampled_from(["floordiv", "ceildiv", "mod"]), inner, DIVISORS),
        st.tuples(st.sampled_from(["floordiv", "ceildiv", "mod"]), inner, st.just("E")),
        st.tuples(st.just("if"), st.tuples(st.sampled_from(["eq", "lt", "le"]), inner, inner), inner, inner),
        st.tuples(st.just("bit_length"), st.tuples(st.just("max"), st.just(0), inner)),
        st.tuples(
            st.just("exp2"), st.tuples(st.just("max"), st.just(0), st.tuples(st.just("min"), st.just(40), inner))
        ),
    )


EXPRESSIONS = st.recursive(st.one_of(NAMES, CONSTANTS), compound, max_leaves=14)


def values(source: random.Random) -> dict[str, int]:
    """Allowed ones, often at the ends and near one another."""
    results = {}
    for name, known in RANGES.items():
        steps = (known.high - known.low) // known.divisor
        near = source.choice((0, 1, steps, source.randrange(300), source.randrange(steps + 1)))
        low = -(-known.low // known.divisor) * known.divisor
        results[name] = min(low + near % (steps + 1) * known.divisor, known.high // known.divisor * known.divisor)
    return results


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS, st.integers())
@example(("mul", ("mul", "s", "s"), ("mul", "s", "s")), 0)  # beyond what a bound can say
def test_a_term_means_what_its_expression_means(expr: Any, seed: int) -> None:
    term = Algebra(RANGES).term(expr)
    writer = ExpressionWriter([term])
    written = writer.write(term)
    source = random.Random(seed)
    for _ in range(12):
        env = values(source)
        try:
            want = evaluate(expr, env)
            for name, value in writer.values.items():
                env[name] = evaluate(value, env)
            got = evaluate(written, env)
        except RecordError:  # a step of more than 64 bits: such a launch is refused
            continue
        assert got == want
        assert term.low <= want or term.low == -INFINITY
        assert want <= term.high or term.high == INFINITY
        assert want % term.divisor == 0 if term.divisor else want == 0


def test_the_largest_product_may_be_that_of_the_lowest_factors() -> None:
    square = Algebra(RANGES).term(("mul", "i", "i"))
    assert (square.low, square.high) == (-(2**31) * (2**31 - 1), 2**62)


@settings(max_examples=80, deadline=None)
@given(EXPRESSIONS)
def test_writing_and_reading_a_term_again_changes_nothing(expr: Any) -> None:
    algebra = Algebra(RANGES)
    term = algebra.term(expr)
    writer = ExpressionWriter([])
    assert algebra.term(writer.write(term)).low <= term.high


SHORTER = {
    "a multiple drops out of a quotient": (("floordiv", ("add", ("mul", 128, "E"), "M"), 128),
                                           ("add", "E", ("floordiv", "M", 128))),
    "a remainder of a multiple": (("mod", "N", 8), 0),
    "a quotient of a quotient": (("floordiv", ("floordiv", "M", 3), 5), ("floordiv", "M", 15)),
    "rounded up, as the DSL writes it": (
        ("if", ("ne", "M", ("mul", 128, ("floordiv", "M", 128))), ("add", ("floordiv", "M", 128), 1),
         ("floordiv", "M", 128)), ("ceildiv", "M", 128)),
    "an exact quotient, multiplied again": (("mul", 16, ("floordiv", "x.address", 16)), "x.address"),
    "a minimum by comparison": (("if", ("lt", "M", "E"), "M", "E"), ("min", "M", "E")),
    "a maximum by comparison": (("if", ("le", "M", "E"), "E", "M"), ("max", "M", "E")),
    "a comparison that bounds decide": (("if", ("lt", "E", 101), "M", 5), "M"),
    "a remainder of a smaller value": (("mod", "E", 128), "E"),
    "a wrapped difference, masked": (
        ("mod", ("mod", ("sub", "M", "E"), 2**64), 2**32), ("mod", ("sub", "M", "E"), 2**32)),
    "2 to the rounded-up logarithm is not less": (
        ("max", 0, ("sub", ("exp2", ("bit_length", ("sub", "E", 1))), "E")),
        ("sub", ("exp2", ("bit_length", ("sub", "E", 1))), "E")),
    "the logarithm of fast division": (
        ("if", ("eq", "E", 1), 0, ("max", 1, ("bit_length", ("sub", "E", 1)))), ("bit_length", ("sub", "E", 1))),
}  # fmt: skip


@pytest.mark.parametrize(("long", "short"), SHORTER.values(), ids=SHORTER)
def test_what_is_recognised(long: Any, short: Any) -> None:
    algebra = Algebra(RANGES)
    assert algebra.term(long) is algebra.term(short)


def test_shared_parts_get_names() -> None:
    algebra = Algebra(RANGES)
    part: Any = ("mul", ("ceildiv", "M", 128), ("ceildiv", "N", 192))
    for _ in range(5):
        part = ("max", ("floordiv", ("mul", part, "E"), 7), ("mod", part, 1000))
    term = algebra.term(part)
    writer = ExpressionWriter([term])
    assert writer.values
    env = {"M": 12345, "N": 4096, "E": 9}
    want = evaluate(part, env)
    for name, value in writer.values.items():
        env[name] = evaluate(value, env)
    assert evaluate(writer.write(term), env) == want


# Machine words -----------------------------------------------------------------------------------------------------


def word(graph: Graph, source: random.Random, width: int, depth: int) -> Bits:
    """A random word over the arguments."""
    if depth == 0 or source.random() < 0.15:
        if source.random() < 0.3:
            return graph.const(source.choice((0, 1, 7, 8, 16, 127, 255, (1 << width) - 1, 1 << width - 1)), width)
        return graph.argument(source.choice(["M", "N", "i"] if width == 32 else ["s", "x.address"]), width)
    kinds = "add sub mul shl lshr ashr udiv sdiv urem srem and or select cast smin umax flag ctlz"
    kind = source.choice(kinds.split())
    inner = word(graph, source, width, depth - 1)
    if kind in ("shl", "lshr", "ashr"):
        return graph.make(kind, width, inner, graph.const(source.randrange(width), width))
    if kind in ("udiv", "sdiv", "urem", "srem"):
        return graph.make(kind, width, inner, graph.const(source.choice((1, 2, 8, 127, 128, 1000)), width))
    if kind == "and":
        return graph.make(kind, width, inner, graph.const(source.choice((15, 255, 0xF0, (1 << width) - 16)), width))
    if kind == "or":
        low = graph.make("and", width, inner, graph.const(255, width))
        high = graph.make("shl", width, word(graph, source, width, depth - 1), graph.const(8, width))
        return graph.make("or", width, high, low)
    if kind == "cast":
        other = 64 if width == 32 else 32
        operand = word(graph, source, other, depth - 1)
        return graph.make("trunc" if other > width else source.choice(("zext", "sext")), width, operand)
    if kind == "ctlz":
        return graph.make(kind, width, inner)
    other_word = word(graph, source, width, depth - 1)
    condition = graph.compare(source.choice(("eq", "ne", "slt", "sle", "ult", "ugt", "sge")), inner, other_word)
    if kind == "flag":
        return graph.make("zext", width, condition)
    if kind == "select":
        return graph.make("select", width, condition, inner, word(graph, source, width, depth - 1))
    return graph.make(kind, width, inner, other_word)


def run(node: Bits, env: dict[str, int], graph: Graph) -> int:
    """The node's value without a sign, by the graph's own arithmetic on constants."""
    if node.op == "argument":
        return env[node.args[0]] % (1 << node.width)
    if node.op == "const":
        return node.number
    args = [graph.const(run(item, env, graph), item.width) if isinstance(item, Bits) else item for item in node.args]
    result = graph.make(node.op, node.width, *args)
    assert result.is_const
    return result.number


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([32, 64]), st.integers(1, 5))
def test_a_lowered_word_is_the_word_wherever_its_guards_hold(seed: int, width: int, depth: int) -> None:
    source, graph, algebra = random.Random(seed), Graph(), Algebra(RANGES)
    node = word(graph, source, width, depth)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    try:
        term = lowering.lower(node)
        whole = lowering.unsigned(node)
    except BuildError:  # an `or` of what may share bits, a value that always overflows
        return
    for _ in range(10):
        env = values(source)
        try:
            held = all(holds(guard, env) for guard in lowering.guards)
        except RecordError:
            held = False
        if held:
            want = run(node, env, graph)
            try:
                got = value(term, env), value(whole, env)
            except RecordError:  # a step of more than 64 bits: such a launch is refused
                continue
            assert (got[0] % (1 << width), got[1]) == (want, want)


@pytest.mark.parametrize(
    ("op", "number", "by", "want"),
    [("ashr", -16, 2, -4), ("ashr", 16, 2, 4), ("lshr", -16, 30, 3), ("sdiv", -7, 2, -3), ("srem", -7, 2, -1),
     ("udiv", -8, 2**31, 1), ("smin", -1, 1, -1), ("umin", -1, 1, 1), ("smax", -1, 1, 1), ("umax", -1, 1, -1)],
)  # fmt: skip
def test_numbers_are_computed_as_the_machine_does(op: str, number: int, by: int, want: int) -> None:
    graph = Graph()
    result = graph.make(op, 32, graph.const(number % 2**32, 32), graph.const(by, 32))
    assert result.is_const
    assert result.number == want % 2**32


def value(term: Term, env: dict[str, int]) -> int:
    return evaluate(ExpressionWriter([]).write(term), env)


def holds(guard: Any, env: dict[str, int]) -> bool:
    return not value(guard.condition, env) or guard.low <= value(guard.term, env) <= guard.high


def test_an_overflow_becomes_a_guard_and_a_meant_wrap_does_not() -> None:
    graph, algebra = Graph(), Algebra(RANGES)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    m, n = graph.argument("M", 32), graph.argument("N", 32)
    difference = graph.make("sub", 32, m, n)
    assert lowering.unsigned(difference) is algebra.term(("mod", ("sub", "M", "N"), 2**32))
    assert not lowering.guards
    product = graph.make("mul", 32, m, n)
    assert lowering.signed(product) is algebra.term(("mul", "M", "N"))
    (guard,) = lowering.guards
    assert (guard.high, guard.term) == (2**31 - 1, algebra.term(("mul", "M", "N")))


def test_a_guard_under_a_condition_holds_there_only() -> None:
    graph, algebra = Graph(), Algebra(RANGES)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    m, n = graph.argument("M", 32), graph.argument("N", 32)
    wide = graph.make("sext", 64, graph.make("mul", 32, m, n))
    small = graph.compare("slt", m, graph.const(4, 32))
    lowering.lower(graph.make("select", 64, small, wide, graph.const(0, 64)))
    (guard,) = lowering.guards
    assert guard.condition is algebra.term(("lt", "M", 4))
    lowering.lower(wide)
    assert any(guard.condition.is_const for guard in lowering.guards)


def test_guards_of_both_ways_are_one_and_none_occurs_twice() -> None:
    graph, algebra = Graph(), Algebra(RANGES)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    m, n = graph.argument("M", 32), graph.argument("N", 32)
    wide = graph.make("sext", 64, graph.make("mul", 32, m, n))
    small = graph.compare("slt", m, graph.const(4, 32))
    one = graph.const(1, 64)
    lowering.lower(graph.make("select", 64, small, graph.make("add", 64, wide, one), wide))
    (guard,) = lowering.guards
    assert guard.condition is algebra.const(1)


def test_choices_upon_choices_are_lowered_in_time() -> None:
    """Each step reads the one before three times: 3**60 ways lead to the first."""
    graph, algebra = Graph(), Algebra(RANGES)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    m = graph.argument("M", 32)
    node = graph.make("sext", 64, graph.make("mul", 32, m, graph.argument("N", 32)))
    for step in range(60):
        odd = graph.make("xor", 1, graph.compare("slt", node, graph.const(1 << step, 64)), graph.const(1, 1))
        node = graph.make("select", 64, odd, graph.make("sub", 64, node, graph.const(step, 64)), node)
    lowering.unsigned(graph.make("add", 64, node, graph.argument("x.address", 64)))
    assert len(lowering.guards) == 1


def test_a_word_that_was_widened_keeps_its_guard() -> None:
    """2**64, which no record can hold, is in none of these."""
    graph, algebra = Graph(), Algebra(RANGES)
    lowering = Lowering(graph, algebra, {name: algebra.variable(name) for name in RANGES})
    product = graph.make("mul", 32, graph.argument("i", 32), graph.argument("E", 32))
    wide, long = graph.make("zext", 64, product), graph.make("sext", 64, product)
    assert lowering.unsigned(wide) is lowering.signed(wide) is lowering.signed(long) is algebra.term(("mul", "i", "E"))
    divided = graph.make("udiv", 64, graph.const(2**40, 64), wide)
    assert lowering.lower(divided) is algebra.term(("floordiv", 2**40, ("mul", "i", "E")))
    assert (0, 2**32 - 1) in {(guard.low, guard.high) for guard in lowering.guards}

"""Small host functions, read and proved: each thing that a launch may be made of, and each refusal in words."""

from dataclasses import replace
from pathlib import Path

import pytest

from fusekit.abi import LaunchEvent, LaunchRecord, StructParameter, Truncated, evaluate, flat
from fusekit.compiler import hostcode
from fusekit.compiler.prove import prove
from fusekit.compiler.trace import compile_plan, trace
from fusekit.errors import BuildError, ProofError
from tests.compiler.mutations import recorded_launches, tally

hostfunctions = pytest.importorskip("hostfunctions", reason="the CuTe DSL (extra `build`) is not installed")


def of(name):
    return hostfunctions.plan(getattr(hostfunctions, name))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """traced(name) -> (plan, record, host function), once each."""
    cache = {}

    def get(name):
        if name == "roots" and "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("the DSL does not link bf16 conversions of host code on this processor: __truncsfbf2")
        if name not in cache:
            plan = hostfunctions.plan_with_events() if name == "with_events" else of(name)
            each = trace(plan, tmp_path_factory.mktemp("scratch"))
            _, record = hostcode.read(each.module, plan, each.cubin)
            cache[name] = plan, record, each.host(record)
        return cache[name]

    return get


def value_of(record, name, env):
    """The integer in the parameter or field called `name`."""
    (item,) = (item for _, item in flat(record.parameters) if item.name == name)
    return evaluate(item.value, record.environment(env))


READ = (
    "tiles", "fast_division", "branch", "floats", "two", "inside", "cooperative", "overflow", "idle_loop", "either",
    "by_size", "next_power", "roots", "float_grid", "integers_of_floats",
)  # fmt: skip


@pytest.mark.parametrize("name", [*READ, "sizes_of_floats", "with_events"])
def test_it_is_read_and_proved(traced, name):
    plan, record, host = traced(name)
    assert prove(plan, record, host, "seed")["launches"] >= 64
    assert LaunchRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("name", READ)
def test_the_proof_notices_every_change(traced, name):
    plan, record, host = traced(name)
    result = tally(record, recorded_launches(plan, record, host, "seed"))
    assert result.noticed >= 5
    assert not result.missed


def test_a_tensor_by_value_is_a_struct(traced):
    _, record, _ = traced("tiles")
    struct, number = record.parameters
    assert isinstance(struct, StructParameter)
    assert [(item.offset, item.name) for item in struct.fields] == [(0, "x_pointer"), (8, "M")]
    assert (number.name, number.value) == ("n", "n")
    assert record.grid == (("ceildiv", "M", 128), 1, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 100, 8192, 8193, 2**23])
def test_fast_division_divides(traced, count):
    """Multiplier and shifts give quotients: what the DSL's loop finds is the rounded-up logarithm."""
    _, record, _ = traced("fast_division")
    env = {"M": 128 * count}
    divisor, multiplier = value_of(record, "integer", env), value_of(record, "integer_2", env)
    first, second = value_of(record, "integer_3", env), value_of(record, "integer_4", env)
    assert divisor == count
    assert 0 <= multiplier < 2**32
    for number in (0, 1, count - 1, count, 12345, 2**31 - 1):
        high = number * multiplier >> 32
        assert (high + (number - high >> first)) >> second == number // count


def test_branches_become_choices(traced):
    _, record, _ = traced("branch")
    for n, m, want in ((6, 300, 12), (6, 304, 6 - 304), (5, 304, 5), (-7, 4, 1)):
        assert value_of(record, "integer", {"n": n, "M": m}) == want


def test_float_arithmetic_is_kept_in_single_precision(traced):
    (item,) = (item for _, item in flat(traced("floats")[1].parameters) if item.name == "float")
    assert item.value == ("fsub", ("fmul", "scale", 1.4426950216293335), 0.5)


def test_every_launch_is_read_in_order(traced):
    _, record, _ = traced("two")
    first, second = record.launches
    assert first.symbol != second.symbol
    assert (second.grid, second.block, second.dynamic_shared) == ((("ceildiv", "M", 256), 1, 1), (64, 1, 1), 4096)
    assert (first.block, first.dynamic_shared) == ((32, 1, 1), 0)


def test_a_pointer_into_a_tensor_keeps_its_distance(traced):
    pointer = traced("inside")[1].parameters[0]
    assert (pointer.argument, pointer.shift) == ("x", ("mul", 2, "M"))


def test_attributes_and_the_cluster_are_read(traced):
    _, record, _ = traced("cooperative")
    assert record.cluster == (16, 1, 1)
    assert record.attributes == {
        "cooperative": 1, "programmatic_stream_serialization": 1, "non_portable_cluster_size_allowed": 1,
    }  # fmt: skip


def test_events_are_arguments(traced):
    plan, record, host = traced("with_events")
    first, second = record.launches
    assert record.schema == 5
    assert first.events == (LaunchEvent("launch_completion", "begun", 1), LaunchEvent("programmatic", "ready", 0, 1))
    assert second.events == (LaunchEvent("programmatic", "begun"),)
    for wrong in (
        first.events[:1], second.events, (replace(first.events[0], flags=0), first.events[1]),
        (first.events[0], replace(first.events[1], argument="begun")),
        (first.events[0], replace(first.events[1], at_block_start=0)),
    ):  # fmt: skip
        with pytest.raises(ProofError, match="events"):
            prove(plan, replace(record, events=wrong), host, "seed")


def test_a_branch_decides_what_is_launched(traced):
    """What is refused for one launch is not refused where that is left out."""
    _, record, _ = traced("either")
    first, second = record.launches
    assert (first.when, second.when) == (("le", 6, "n"), ("if", ("le", "n", 5), ("lt", 0, "n"), 0))
    assert (second.cluster, second.preferred_cluster, first.preferred_cluster) == ((2, 1, 1), (4, 1, 1), ())
    (guard,) = record.constraints
    assert evaluate(guard.expr, {"n": 4, "M": 2**30}) == 0 < evaluate(guard.expr, {"n": 8, "M": 2**30})


def test_floats_of_host_code_are_exact(traced):
    """Square root, comparison, choice, conversions and quotients, in the types of the host code."""
    _, record, _ = traced("roots")
    wide, half = (item for _, item in flat(record.parameters) if item.name.startswith("float"))
    assert (wide.dtype, wide.value) == ("f64", ("ddiv", 1.0, ("dsqrt", ("dint", "M"))))
    assert (half.dtype, half.value[0]) == ("bf16", "bf16")
    assert half.evaluate({"scale": 5.0}, {"n": 4}) == 5 and half.evaluate({"scale": 0.0}, {"n": 16}) == 0.25


def test_an_integer_of_a_float_has_no_fraction_and_fits(traced):
    """LLVM leaves open what another number becomes: the record refuses it."""
    _, record, _ = traced("float_grid")
    assert (record.schema, record.values, record.grid) == (5, {"v0": Truncated(("fmul", "scale", 4.0))}, ("v0", 1, 1))
    (guard,) = record.constraints
    assert guard.message.startswith("int(scale * 4.0) must be at least -2147483648 and at most 2147483647: ")
    for scale, blocks in ((0.25, 1), (0.4999999701976776, 1), (0.5, 2), (-0.9, -3), (2.0**29 - 64, 2**31 - 256)):
        env = record.environment({}, {"scale": scale})
        assert (env["v0"], evaluate(guard.expr, env)) == (blocks, 0)
    for scale in (2.0**29, -(2.0**29) - 64, 1e30, float("inf"), float("-inf"), float("nan")):
        assert evaluate(guard.expr, record.environment({}, {"scale": scale})) > 0


def test_a_float_decides_what_is_launched(traced):
    _, record, _ = traced("integers_of_floats")
    assert record.values[record.launches[0].when] == Truncated(("flt", "scale", 2.0))
    for scale, launched in ((1.9999998807907104, 1), (2.0, 0), (float("nan"), 0), (-1e5, 0)):
        env = record.environment({"M": 40}, {"scale": scale})
        assert env[record.launches[0].when] == (launched if scale == scale and scale > -1e5 else scale < 2)
        refused = any(evaluate(each.expr, env) for each in record.constraints)
        assert refused == (not -32768 <= scale < 32768)  # an Int16 of it is made in every case


def test_the_next_power_of_two(traced):
    _, record, _ = traced("next_power")
    for extent, power in (
        (-5, 1),
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 8),
        (8, 8),
        (9, 16),
        (2**20, 2**20),
        (2**20 + 1, 2**21),
        (2**30, 2**30),
    ):
        assert evaluate(record.grid[0], {"n": extent}) == power
    assert evaluate(record.constraints[0].expr, {"n": 2**30 + 1}) > 0  # the host code would not end


def test_block_and_shared_memory_follow_the_arguments(traced):
    record = traced("by_size")[1]
    assert (record.block, record.dynamic_shared, record.constraints) == (("n", 2, 1), ("mul", 4, "M"), ())


def test_an_overflow_of_the_host_code_is_refused_in_words(traced):
    (guard,) = traced("overflow")[1].constraints
    assert "M * M must be at most 2147483647" in guard.message
    assert evaluate(guard.expr, {"M": 46340}) == 0
    assert evaluate(guard.expr, {"M": 46344}) > 0


REFUSED = {
    "many": "a loop on the arguments makes calls: .*a launch record launches always the same",
    "loop": "a loop on the arguments makes it: .*no launch can be made of it",
    "power": r"intr.exp2 is an operation .*compute it before the launch, and pass the result",
    "other_stream": "another stream than the one that it is given",
    "nothing": "launches no kernel",
    "wide_number": "argument 1 has 64 bits, the source gives a number of 32; give it in the parameter's own type",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_can_say_is_refused_in_words(name, tmp_path):
    with pytest.raises(BuildError, match=REFUSED[name]):
        compile_plan(hostfunctions.plan(getattr(hostfunctions, name)), Path(tmp_path))

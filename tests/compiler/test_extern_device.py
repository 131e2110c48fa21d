"""op = "extern": constants that are lifted into variables, and what is asked of the device."""

from dataclasses import replace

import pytest

from fusekit.abi import Dim, LaunchRecord, TensorArgument, evaluate
from fusekit.compiler.lift import LIFT_VALUES, unify
from fusekit.errors import BuildError

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from .externs import FILLED, FLAGGED, TWICE, compiled, refused


def test_a_constant_that_no_cubin_depends_on_is_lifted(tmp_path):
    lift = 'lift = { clusters = ["max", 1, ["sub", "active_clusters", "cluster_margin"]] }'
    record, kernel = compiled(tmp_path, "filled", FILLED + lift)
    margin = ("max", 1, ("sub", "active_clusters", "cluster_margin"))
    assert record.grid[0] in (("min", margin, ("ceildiv", "N", 128)), ("min", ("ceildiv", "N", 128), margin))
    plain, alone = compiled(tmp_path, "filled", FILLED + "params.clusters = 59")
    assert kernel.cubin == alone.cubin
    assert kernel.proof["launches"] >= 2 * 64
    values = {"N": 128 * 500, "active_clusters": 61, "cluster_margin": 2}
    from fusekit.abi.expr import evaluate

    assert evaluate(record.grid[0], values) == evaluate(plain.grid[0], values) == 59


def test_what_cannot_be_lifted(tmp_path):
    with pytest.raises(BuildError, match=r"lift: the cubin for 106 is not the one for 59|lift: .*block"):
        compiled(tmp_path, "filled", FILLED + 'params.by_size = true\nlift.clusters = "active_clusters"')
    assert "lift.other: neither foreignkernels:filled nor its host function takes an integer" in refused(
        "filled", FILLED + 'lift.other = "active_clusters"'
    )
    with pytest.raises(BuildError, match="the launch does not depend on the lifted argument"):
        compiled(tmp_path, "twice_with_more", TWICE + 'lift.more = "active_clusters"')


@pytest.mark.parametrize(
    ("function", "expr"),
    [
        (lambda value: value, "active_clusters"),
        (lambda value: 2 * value, ("mul", 2, "active_clusters")),
        (lambda value: value - 3, ("add", "active_clusters", -3)),
        (lambda value: value // 2, None),
        (lambda value: -(-value // 4), None),
        (lambda value: min(value, 64), None),
        (lambda value: max(value, 64), None),
        (lambda value: value**2, None),
        (lambda value: value * (value + 1) // 2, None),
        (lambda value: value**2 - value, None),
        (lambda value: value & ~7, None),
        *(
            (lambda value, by=by: value // by * by, ("mul", by, ("floordiv", "active_clusters", by)))
            for by in (2, 3, 6, 10)
        ),
        *((lambda value, by=by: value // by * by, None) for by in (4, 8, 12, 16, 17, 32)),  # 4 and 8 are the same
        (lambda value: value.bit_length(), None),
        (lambda value: 2 * value + 1, None),
    ],
)
def test_two_values_tell_what_a_record_may_be_of_a_lifted_argument(function, expr):
    x = TensorArgument("x", "input", "bf16", ("M",), (1,))
    record = LaunchRecord("sm_90a", (x,), (Dim("M"),), parameters=(), grid=(1, 1, 1), block=(32, 1, 1), symbol="k")
    values = LIFT_VALUES
    records = tuple(replace(record, grid=(("mul", "M", function(value)), 1, 1)) for value in values)
    if expr is None:
        with pytest.raises(BuildError, match=r"lift: record.grid\[0\]\[2\] is .* which is no multiple of it"):
            unify(records, values, "active_clusters")
    else:
        assert unify(records, values, "active_clusters").grid[0] == ("mul", "M", expr)


ASKED = FLAGGED + "params.what = "


def test_what_is_asked_of_the_device_in_a_trace_is_a_variable(tmp_path):
    values = {"N": 128 * 200, "sm_count": 131, "active_clusters": 66, "cluster_margin": 2}
    for what, grid in (("multiprocessors", 131), ("even", 130), ("clusters", 2 * 64)):
        record, kernel = compiled(tmp_path, "asking", ASKED + f'"{what}"')
        assert evaluate(record.grid[0], values) == grid
        assert evaluate(record.grid[0], values | {"N": 128}) == (2 if what == "clusters" else 1)
        assert kernel.proof["launches"] >= 128


def test_a_source_may_ask_the_device_as_well(tmp_path):
    """As examples of CUTLASS do, which give the host function the answer."""
    record, kernel = compiled(tmp_path, "asking_itself", FLAGGED)
    values = {"N": 128 * 200, "sm_count": 131, "active_clusters": 66, "cluster_margin": 2}
    assert (evaluate(record.grid[0], values), evaluate(record.grid[0], values | {"N": 128})) == (2 * 64, 2)
    assert kernel.proof["launches"] >= 128
    for params, words in (
        ('params.more = "multiprocessors"', "the source and its host function ask the device for several things"),
        ('params.what = "other clusters"', "several things"), ('params.what = "half"', "the source or its host .*lift"),
    ):  # fmt: skip
        with pytest.raises(BuildError, match=words):
            compiled(tmp_path, "asking_itself", FLAGGED + params)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_blocks_that_are_to_fit_into_a_multiprocessor(tmp_path, arch):
    """They prefer as much shared memory as they need together: 4 x 16 KiB, and what the driver keeps."""
    record, _ = compiled(tmp_path, "dense", FLAGGED, arch)
    percent = record.attributes["preferred_shared_memory_carveout"]
    whole = {"sm_90a": 228, "sm_120a": 100}[arch]
    assert 4 * 16 <= percent * whole / 100 <= 4 * 18
    none, _ = compiled(tmp_path, "dense", FLAGGED + "params.bytes = 0", arch)
    assert none.attributes == {"preferred_shared_memory_carveout": 0}


def test_what_depends_on_the_device_and_has_no_expression_is_refused(tmp_path):
    for what, words in (
        ("both", "ask the device for several things"), ("other clusters", "ask the device for several things"),
        ("half", "asks the device for sm_count, and makes of it what .*lift: record.grid"),
    ):  # fmt: skip
        with pytest.raises(BuildError, match=words):
            compiled(tmp_path, "asking", ASKED + f'"{what}"')

"""The proof: a true record passes on enough launches, and every kind of error planted in a record is caught by name."""

import dataclasses

import pytest

from fusekit.abi import Dim, FloatParameter, IntegerParameter, LaunchRecord, ScalarArgument
from fusekit.compiler.plan import HostInteger, HostScalar, HostTensor
from fusekit.compiler.trace import compile_plan
from fusekit.errors import BuildError, ProofError

replace = dataclasses.replace


def with_parameter(record, name, **changes):
    assert any(parameter.name == name for parameter in record.parameters)
    parameters = [replace(each, **changes) if each.name == name else each for each in record.parameters]
    return replace(record, parameters=tuple(parameters))


def with_argument(record, name, **changes):
    arguments = [replace(each, **changes) if each.name == name else each for each in record.arguments]
    return replace(record, arguments=tuple(arguments))


def test_a_true_record_is_proven(compiled):
    proof = compiled.proof
    assert proof["launches"] >= 8
    assert proof["edges"] == ["smallest", "next to smallest", "largest M", "largest N"]
    assert proof["parameters"] == ["x_map", "y_map", "table_pointer", "scale_value", "rows", "total"]
    assert len(proof["digest"]) == 64


def test_the_complete_record_reads_back(compiled):
    record = LaunchRecord.from_json(compiled.launch)
    assert record.to_json() == compiled.launch
    assert [parameter.offset for parameter in record.parameters] == sorted(p.offset for p in record.parameters)
    assert record.symbol


MAP_ERRORS = [
    ({"box": (32, 64)}, "x_map", r"box\[0\] is 32 in the launch record and 64 in the DSL"),
    ({"box": (64, 32)}, "x_map", r"box\[1\] is 32 in the launch record and 64"),
    ({"swizzle": "64B", "box": (32, 64)}, "x_map", r"box\[0\] is 32"),
    ({"l2_promotion": "256B"}, "x_map", "l2_promotion is 256B in the launch record and 128B"),
    ({"dtype": "fp16"}, "x_map", "dtype is fp16 in the launch record and bf16"),
    ({"dims": ("M", "N")}, "x_map", r"dims\[0\] is \d+ in the launch record and \d+"),
    ({"strides": (["mul", 4, "x.stride0"],)}, "x_map", r"strides\[0\] is"),
    ({"strides": (["mul", 2, "N"],)}, "x_map", r"strides\[0\] is"),
    ({"element_strides": (1, 2)}, "x_map", r"element_strides\[1\] is 2 in the launch record and 1"),
    ({"oob_fill": "nan_zero"}, "x_map", "oob_fill is nan_zero in the launch record and none"),
    ({"address": ["add", "x.address", 64]}, "x_map", "address is"),
    ({"argument": "y", "address": "y.address"}, "x_map", "address is"),
    (
        {"dims": ("N", "M", 1), "strides": (["mul", 2, "x.stride0"], 16), "box": (64, 64, 1), "element_strides": ()},
        "x_map",
        "rank is 3 in the launch record and 2",
    ),
]


@pytest.mark.parametrize(("change", "parameter", "message"), MAP_ERRORS)
def test_a_wrong_tensor_map_is_caught(tilecopy, tmp_path, change, parameter, message):
    plan = tilecopy.plan()
    plan = replace(plan, record=with_parameter(plan.record, parameter, **change))
    with pytest.raises(ProofError, match=rf"^{parameter}: {message}") as caught:
        compile_plan(plan, tmp_path)
    assert caught.value.parameter == parameter
    assert "Argument set " in str(caught.value)
    assert "M=" in str(caught.value)


def test_a_wrong_swizzle_is_caught(tilecopy, tmp_path):
    # A swizzle other than 128B cannot stand beside a 128-byte box, so none is what a record could wrongly say.
    plan = tilecopy.plan()
    plan = replace(plan, record=with_parameter(plan.record, "y_map", swizzle="none"))
    with pytest.raises(ProofError, match=r"^y_map: swizzle is none in the launch record and 128B in the DSL"):
        compile_plan(plan, tmp_path)


@pytest.mark.parametrize(
    ("change", "subject", "message"),
    [
        (lambda r: with_parameter(r, "rows", value="N"), "rows", "value is"),
        (lambda r: with_parameter(r, "rows", value=["add", "M", 1]), "rows", "value is"),
        (lambda r: with_parameter(r, "total", value=["mul", "M", "M"]), "total", "value is"),
        (lambda r: with_parameter(r, "table_pointer", argument="x"), "table_pointer", "address is"),
        (lambda r: replace(r, grid=(["ceildiv", "M", 64], r.grid[1], 1)), "grid", "x is"),
        (lambda r: replace(r, grid=(r.grid[0], ["ceildiv", "N", 32], 1)), "grid", "y is"),
        (lambda r: replace(r, grid=(*r.grid[:2], 2)), "grid", "z is 2 in the launch record and 1"),
        (lambda r: replace(r, block=(64, 1, 1)), "block", "64, 1, 1"),
        (lambda r: replace(r, block=(64, 2, 1)), "block", "64, 2, 1"),
        (lambda r: replace(r, cluster=(2, 1, 1)), "cluster", "2, 1, 1"),
        (lambda r: replace(r, dynamic_shared=1024), "dynamic shared memory", "1024 in the launch record and 2048"),
        (lambda r: replace(r, attributes={"cooperative": 1}), "attributes", "cooperative is 1"),
        (
            lambda r: replace(r, attributes={"programmatic_stream_serialization": 1}),
            "attributes",
            "programmatic_stream_serialization is 1 in the launch record and 0",
        ),
        (lambda r: replace(r, attributes={"preferred_shared_memory_carveout": 50}), "attributes", "preferred"),
    ],
)
def test_a_wrong_scalar_or_launch_is_caught(tilecopy, tmp_path, change, subject, message):
    plan = tilecopy.plan()
    plan = replace(plan, record=change(plan.record))
    with pytest.raises(ProofError, match=rf"^{subject}.*{message}") as caught:
        compile_plan(plan, tmp_path)
    assert caught.value.parameter == subject


def test_a_wrong_float_is_caught(tilecopy, tmp_path):
    plan = tilecopy.plan()
    record = replace(plan.record, arguments=(*plan.record.arguments, ScalarArgument("other", "f32")))
    plan = replace(plan, record=with_parameter(record, "scale_value", argument="other"))
    with pytest.raises(ProofError, match=r"^scale_value: value is") as caught:
        compile_plan(plan, tmp_path)
    assert caught.value.parameter == "scale_value"


def test_two_integers_that_changed_places_are_caught(tilecopy, tmp_path):
    plan = tilecopy.plan()
    hosts = list(plan.host_arguments)
    hosts[4] = HostInteger("N")
    with pytest.raises(ProofError, match=r"^rows: value is"):
        compile_plan(replace(plan, host_arguments=tuple(hosts)), tmp_path)


def test_a_record_that_allows_more_rows_than_were_compiled_is_caught(tilecopy, tmp_path):
    plan = tilecopy.plan()
    plan = replace(plan, arguments=(tilecopy.matrix(stride_divisor=16), *plan.arguments[1:]))
    with pytest.raises(ProofError, match=r"^x: stride of mode 0 is compiled as a multiple of 16, .* x.stride0 = \d+"):
        compile_plan(plan, tmp_path)


def test_a_record_that_allows_more_columns_than_were_compiled_is_caught(tilecopy, tmp_path):
    plan = tilecopy.plan()
    record = replace(plan.record, dims=(Dim("M"), Dim("N", divisor=4)))
    with pytest.raises(ProofError, match=r"^x: extent of mode 1 is compiled as a multiple of 8, .* N = 4"):
        compile_plan(replace(plan, record=record), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, record=with_argument(p.record, "x", alignment=8)), "16-byte alignment"),
        (lambda p: replace(p, record=with_argument(p.record, "table", dtype="bf16")), "table is traced as Float32"),
        (lambda p: replace(p, host_arguments=p.host_arguments[1:]), "correspond one for one"),
        (
            lambda p: replace(p, host_arguments=(HostTensor("z"), *p.host_arguments[1:])),
            "a host tensor names 'z'; the record's tensors are x, y, table",
        ),
        (
            lambda p: replace(p, host_arguments=(HostTensor("x", shape=("M",)), *p.host_arguments[1:])),
            "x is traced with 2 modes, its layout here has 1",
        ),
        (
            lambda p: replace(p, record=replace(p.record, parameters=p.record.parameters[:-1])),
            "parameters of x_map 128, .* bytes; the cubin's have 128, 128, 8, 4, 4, 8",
        ),
        (lambda p: replace(p, record=replace(p.record, block=(256, 1, 1))), "the cubin allows 128 threads"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tilecopy, tmp_path, change, message):
    with pytest.raises(BuildError, match=message):
        compile_plan(change(tilecopy.plan()), tmp_path)


def test_the_swapped_order_of_parameters_is_refused(tilecopy, tmp_path):
    plan = tilecopy.plan()
    order = [*plan.record.parameters]
    order[3], order[4] = order[4], order[3]
    assert isinstance(order[3], IntegerParameter)
    assert isinstance(order[4], FloatParameter)
    with pytest.raises(ProofError, match=r"^rows: value is"):
        compile_plan(replace(plan, record=replace(plan.record, parameters=tuple(order))), tmp_path)


def test_scalars_are_compared_as_bits(tilecopy, tmp_path):
    # HostScalar packs what the record's scalar holds; -0.0 and denormals are among the values tried.
    plan = tilecopy.plan()
    assert isinstance(plan.host_arguments[3], HostScalar)
    assert compile_plan(plan, tmp_path).proof["launches"] >= 8

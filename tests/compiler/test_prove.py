"""The proof: a true record passes on enough launches, and every kind of error planted in a record is caught by name."""

import dataclasses

import pytest

from fusekit.abi import Dim, LaunchRecord, ScalarArgument
from fusekit.compiler.hostfunction import HostInteger, HostTensor
from fusekit.errors import BuildError, ProofError

replace = dataclasses.replace


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(plan, record, host function, compile) of tilecopy; `compile` is `compile_plan`."""
    tilecopy = pytest.importorskip("tilecopy", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler import hostcode
    from fusekit.compiler.trace import trace

    plan = tilecopy.plan()
    result = trace(plan, tmp_path_factory.mktemp("scratch"))
    _, record = hostcode.read(result.module, plan, result.cubin)
    return plan, record, result.host(record)


def prove(traced, change=lambda record: record, plan=None):
    from fusekit.compiler.prove import prove

    own, record, host = traced
    return prove(plan or own, change(record), host, "seed")


def with_parameter(record, name, **changes):
    assert any(parameter.name == name for parameter in record.parameters)
    parameters = [
        replace(parameter, **changes) if parameter.name == name else parameter for parameter in record.parameters
    ]
    return replace(record, parameters=tuple(parameters))


def with_argument(plan, of, **changes):
    arguments = [
        replace(argument, **changes) if argument.name == of else argument for argument in plan.signature.arguments
    ]
    return replace(plan, signature=replace(plan.signature, arguments=tuple(arguments)))


def test_a_true_record_is_proven(compiled):
    proof = compiled.proof
    assert proof["launches"] >= 8
    assert proof["edges"][:4] == ["smallest", "next to smallest", "largest M", "largest N"]
    assert "multiples of 64 in M: M = 64" in proof["edges"]
    assert "the sign of ceildiv(M, 64) - sm_count: M = 16897" in proof["edges"]  # one tile more than multiprocessors
    assert proof["parameters"] == ["map_x", "map_y", "table_pointer", "scale_value", "M", "integer"]
    assert len(proof["digest"]) == 64


def test_the_complete_record_reads_back(compiled):
    record = LaunchRecord.from_json(compiled.launch)
    assert record.to_json() == compiled.launch
    assert [parameter.offset for parameter in record.parameters] == sorted(p.offset for p in record.parameters)
    assert record.symbol


MAP_ERRORS = [
    ({"box": (32, 64)}, "map_x", r"box\[0\] is 32 in the launch record and 64 in the DSL"),
    ({"box": (64, 32)}, "map_x", r"box\[1\] is 32 in the launch record and 64"),
    ({"swizzle": "64B", "box": (32, 64)}, "map_x", r"box\[0\] is 32"),
    ({"l2_promotion": "256B"}, "map_x", "l2_promotion is 256B in the launch record and 128B"),
    ({"dtype": "fp16"}, "map_x", "dtype is fp16 in the launch record and bf16"),
    ({"dims": ("M", "N")}, "map_x", r"dims\[0\] is \d+ in the launch record and \d+"),
    ({"strides": (["mul", 4, "x.stride0"],)}, "map_x", r"strides\[0\] is"),
    ({"strides": (["mul", 2, "N"],)}, "map_x", r"strides\[0\] is"),
    ({"element_strides": (1, 2)}, "map_x", r"element_strides\[1\] is 2 in the launch record and 1"),
    ({"oob_fill": "nan_zero"}, "map_x", "oob_fill is nan_zero in the launch record and none"),
    ({"address": ["add", "x.address", 64]}, "map_x", "address is"),
    ({"argument": "y", "address": "y.address"}, "map_x", "address is"),
    (
        {"dims": ("N", "M", 1), "strides": (["mul", 2, "x.stride0"], 16), "box": (64, 64, 1), "element_strides": ()},
        "map_x",
        "rank is 3 in the launch record and 2",
    ),
]


@pytest.mark.parametrize(("change", "parameter", "message"), MAP_ERRORS)
def test_a_wrong_tensor_map_is_caught(traced, change, parameter, message):
    with pytest.raises(ProofError, match=rf"^{parameter}: {message}") as caught:
        prove(traced, lambda record: with_parameter(record, parameter, **change))
    assert caught.value.parameter == parameter
    assert "Argument set " in str(caught.value)
    assert "M=" in str(caught.value)


def test_a_wrong_swizzle_is_caught(traced):
    # A swizzle other than 128B cannot stand next to a 128-byte box, so none is what a record could wrongly say.
    with pytest.raises(ProofError, match=r"^map_y: swizzle is none in the launch record and 128B in the DSL"):
        prove(traced, lambda record: with_parameter(record, "map_y", swizzle="none"))


@pytest.mark.parametrize(
    ("change", "subject", "message"),
    [
        (lambda r: with_parameter(r, "M", value="N"), "M", "value is"),
        (lambda r: with_parameter(r, "M", value=["add", "M", 1]), "M", "value is"),
        (lambda r: with_parameter(r, "integer", value=["mul", "M", "M"]), "integer", "value is"),
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
def test_a_wrong_scalar_or_launch_is_caught(traced, change, subject, message):
    with pytest.raises(ProofError, match=rf"^{subject}.*{message}") as caught:
        prove(traced, change)
    assert caught.value.parameter == subject


def test_a_wrong_float_is_caught(traced):
    def change(record):
        record = replace(record, arguments=(*record.arguments, ScalarArgument("other", "f32")))
        return with_parameter(record, "scale_value", argument="other")

    with pytest.raises(ProofError, match=r"^scale_value: value is") as caught:
        prove(traced, change)
    assert caught.value.parameter == "scale_value"


def test_a_launch_that_is_missing_is_caught(traced):
    from fusekit.compiler.prove import compare
    from fusekit.compiler.samples import argument_sets

    _, record, _ = traced
    with pytest.raises(ProofError, match=r"^launches is 1 in the launch record and 0"):
        compare(record.launches, [], argument_sets(record, "seed", 1)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": 7}, "stream is .* in the launch record and 7 in"),
        ({"symbol": "another"}, "symbol is .* in the launch record and another"),
        ({"launch_attributes": {99: bytes(64)}}, "launch attribute 99 is absent in the launch record and set"),
        ({"kernel_attributes": {99: 5}}, "kernel attribute 99 is absent in the launch record and 5"),
    ],
)
def test_what_a_record_does_not_have_is_caught(traced, changes, message):
    from fusekit.compiler.hostcall import pack
    from fusekit.compiler.prove import compare
    from fusekit.compiler.samples import argument_sets

    plan, record, host = traced
    arguments = argument_sets(record, "seed", 1)[0]
    (launch,) = host.call(pack(plan, arguments), arguments.values["sm_count"])
    assert compare(record.launches, [launch], arguments)
    with pytest.raises(ProofError, match=message):
        compare(record.launches, [replace(launch, **changes)], arguments)


def test_two_integers_that_changed_places_are_caught(traced):
    hosts = list(traced[0].host_arguments)
    hosts[4] = HostInteger("N")
    with pytest.raises(ProofError, match=r"^M: value is"):
        prove(traced, plan=replace(traced[0], host_arguments=tuple(hosts)))


def test_a_record_that_allows_more_rows_than_were_compiled_is_caught(tilecopy, traced):
    plan = replace(traced[0], arguments=(tilecopy.matrix(stride_divisor=16), *traced[0].arguments[1:]))
    with pytest.raises(ProofError, match=r"^x: stride of mode 0 is compiled as a multiple of 16, .* x.stride0 = \d+"):
        prove(traced, plan=plan)


def test_a_record_that_allows_more_columns_than_were_compiled_is_caught(traced):
    with pytest.raises(ProofError, match=r"^x: extent of mode 1 is compiled as a multiple of 8, .* N = 4"):
        prove(traced, lambda record: replace(record, dims=(Dim("M"), Dim("N", divisor=4))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: with_argument(p, "x", alignment=8), "16-byte alignment"),
        (lambda p: with_argument(p, "x", name="priority"), "'priority', which is an option of launches; rename it"),
        (lambda p: with_argument(p, "table", dtype="bf16"), "table is traced as Float32"),
        (lambda p: replace(p, host_arguments=p.host_arguments[1:]), "correspond one for one"),
        (
            lambda p: replace(p, host_arguments=(HostTensor("z"), *p.host_arguments[1:])),
            "a host tensor names 'z'; the signature's tensors are x, y, table",
        ),
        (
            lambda p: replace(p, host_arguments=(HostTensor("x", shape=("M",)), *p.host_arguments[1:])),
            "x is traced with 2 modes, its layout here has 1",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(traced, change, message):
    with pytest.raises(BuildError, match=message):
        prove(traced, plan=change(traced[0]))

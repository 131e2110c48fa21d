"""op = "extern": what is read of a stranger's kernel, what its spec must say, and what is refused in words."""

import inspect
from dataclasses import replace

import pytest

from fusekit.abi import Dim, LaunchRecord, RecordError, TensorArgument, evaluate, flat
from fusekit.abi.arguments import OPTIONS
from fusekit.compiler.lift import LIFT_VALUES, unify
from fusekit.errors import ArgumentError, BuildError, FusekitError
from fusekit.runtime.binding import bind
from fusekit.runtime.checked import CheckedKernel
from fusekit.runtime.kernel import Kernel
from fusekit.runtime.tensors import View
from fusekit.spec import parse_text

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

TWICE = """
arguments.x = { role = "input", shape = ["M", "N"], doc = "What is scaled." }
arguments.y = { role = "output", shape = ["M", "N"] }
"""
FILLED = """
arguments.y = { role = "output", shape = ["N"] }
arguments.memory = { role = "workspace", bytes = ["mul", 4, "N"] }
arguments.count = { value = ["mul", 2, "N"] }
"""


def spec_of(function, rest, arch="sm_90a"):
    text = f"""schema = 1
        [[kernel]]
        name = "k"
        op = "extern"
        source = "foreignkernels:{function}"
        arch = "{arch}"
        {rest}"""
    (spec,) = parse_text(text, "own")
    return spec


def compiled(tmp_path, function, rest, arch="sm_90a"):
    from fusekit.compiler.trace import compile_plan
    from fusekit.compiler.worker import plan

    result = compile_plan(plan(spec_of(function, rest, arch)), tmp_path)
    return LaunchRecord.from_json(result.launch), result


def refused(function, rest):
    from fusekit.compiler.worker import plan

    with pytest.raises(FusekitError) as error:
        plan(spec_of(function, rest))
    return str(error.value)


def test_two_launches_with_strides_and_scalars(tmp_path):
    record, kernel = compiled(tmp_path, "twice", TWICE)
    assert len(record.launches) == 2
    assert kernel.proof["launches"] >= 64
    x, y, factor, rows = record.arguments
    assert (x.name, x.role, x.dtype, x.shape, x.strides) == ("x", "input", "f32", ("M", "N"), ("x.stride0", 1))
    assert (x.stride_divisor, x.alignment, y.role) == (4, 16, "output")
    assert [(dim.name, dim.divisor, dim.minimum) for dim in record.dims] == [("M", 1, 1), ("N", 4, 4)]
    # Members of a NamedTuple; a name that records reserve is given an underscore.
    assert [(item.name, item.dtype) for item in (factor, rows)] == [
        ("options_factor", "f32"),
        ("options_sm_count", "i32"),
    ]
    assert record.grid == (("ceildiv", "N", 128), 1, 1)


@pytest.mark.parametrize(
    ("element", "internal", "dtype"),
    [("Float32", None, "f32"), ("Float32", "TFloat32", "tf32"), ("Float4E2M1FN", None, "u4_align8"),
     ("Float4E2M1FN", "Uint8", "u4_align16")],
)  # fmt: skip
def test_types_of_tensor_maps(tmp_path, element, internal, dtype):
    params = {"element": element} | ({"internal": internal} if internal else {})
    listed = ", ".join(f'{name} = "{value}"' for name, value in params.items())
    rest = f"""params = {{ {listed} }}
        arguments.x = {{ role = "input", shape = ["M", "N"] }}"""
    record, _ = compiled(tmp_path, "mapped", rest, arch="sm_100a")
    (parameter,) = record.parameters
    # With 4-bit values a tensor counts bytes, a tensor map values.
    columns = ("mul", 2, "N") if dtype.startswith("u4") else "N"
    assert (parameter.dtype, parameter.dims, parameter.box, parameter.encoding) == (
        dtype,
        (columns, "M"),
        (128, 64),
        "driver",
    )


MAPPED = """
params = { element = "Float32", align = 4 }
arguments.x = { role = "input", shape = ["M", "N"] }
"""


def test_a_tensor_map_demands_the_alignment_that_the_trace_does_not_promise(tmp_path):
    record, _ = compiled(tmp_path, "mapped", MAPPED)
    assert (record.arguments[0].alignment, record.parameters[0].address) == (16, "x.address")


def test_a_pointer_that_host_code_rounds_down_demands_the_alignment(tmp_path):
    record, _ = compiled(tmp_path, "rounded", FLAGGED)
    (pointer,) = [item for _, item in flat(record.parameters) if getattr(item, "shift", 0)]
    assert (record.arguments[0].alignment, pointer.argument, pointer.shift) == (64, "y", 512)


def test_a_stride_of_32_bits_in_a_tensor_map(tmp_path):
    record, _ = compiled(tmp_path, "narrow", 'arguments.x = { role = "input", shape = ["N"] }')
    (stride,) = record.parameters[0].strides
    assert evaluate(stride, {"rows": 5}) == 4 * 8 * 5 * 5
    assert evaluate(stride, {"rows": 2**15}) == 4 * 8 * 2**30


def test_a_tensor_map_that_the_driver_encodes(tmp_path):
    record, kernel = compiled(tmp_path, "encoded", 'arguments.x = { role = "input", shape = ["M", "N"] }')
    (result,) = record.parameters
    assert (result.dtype, result.dims, result.strides, result.box, result.swizzle, result.encoding) == (
        "fp16", ("N", "M"), (("mul", 2, "N"),), (64, 32), "128B", "driver",
    )  # fmt: skip
    assert record.grid == (("floordiv", "M", 32), 1, 1)
    assert kernel.proof["launches"] >= 64


FLAGGED = 'arguments.y = { role = "output", shape = ["N"] }\n'


def test_a_truth_value_is_a_number_of_0_or_1_and_the_default_stream_is_the_launchers(tmp_path):
    record, kernel = compiled(tmp_path, "flagged", FLAGGED)
    flag = record.arguments[1]
    assert (flag.name, flag.dtype, flag.minimum, flag.maximum) == ("wide", "i32", 0, 1)
    assert [evaluate(record.grid[0], {"wide": wide, "N": 300}) for wide in (0, 1)] == [1, 3]
    assert kernel.proof["launches"] >= 64


def test_a_truth_value_may_be_fixed(tmp_path):
    record, _ = compiled(tmp_path, "flagged", FLAGGED + "arguments.wide = { value = 1 }")
    assert [argument.name for argument in record.arguments] == ["y"]
    assert record.grid[0] == ("ceildiv", "N", 128)


def test_what_no_record_can_have_is_reported_by_the_specs_names(tmp_path):
    with pytest.raises(RecordError, match=r"^arguments\.wide\.default: 2; "):
        compiled(tmp_path, "flagged", FLAGGED + "arguments.wide = { default = 2 }")


CONFIGURED = FLAGGED + "arguments.threads = { value = 64 }\narguments.shared = { value = 1024 }\n"


@pytest.mark.parametrize("early", [True, False])
def test_a_truth_value_that_configures_the_launch_is_that_of_the_trace(tmp_path, early):
    record, kernel = compiled(tmp_path, "configuring", CONFIGURED + f"params = {{ early = {str(early).lower()} }}")
    assert [argument.name for argument in record.arguments] == ["y", "priority_"]
    assert record.attributes == ({"programmatic_stream_serialization": 1} if early else {})
    assert (record.block, record.dynamic_shared, len(record.launches)) == ((64, 1, 1), 1024, 1 + early)
    assert kernel.proof["launches"] >= 64


@pytest.mark.parametrize(
    ("said", "words"),
    [(FLAGGED, "arguments.n.value = 1"), (CONFIGURED + "arguments.early = { default = 1 }", "decides whether")],
)
def test_what_configures_the_launch_and_is_the_callers_is_refused(tmp_path, said, words):
    """An integer in a source that somebody wrote may stand for any."""
    with pytest.raises(BuildError, match=words):
        compiled(tmp_path, "configuring", said)


def test_no_argument_has_the_name_of_an_option_of_launches():
    options = set()
    for function in (Kernel.__call__, Kernel.bind, CheckedKernel.__call__, CheckedKernel.bind):
        parameters = inspect.signature(function).parameters.values()
        options |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    assert options == OPTIONS
    message = refused("configuring", CONFIGURED + 'arguments.priority = { rename = "stream" }')
    assert message == "arguments.priority.rename: 'stream' is reserved; take another name"


def test_a_stream_that_is_given_and_not_launched_on_is_refused(tmp_path):
    with pytest.raises(BuildError, match="another stream than the one that it is given"):
        compiled(tmp_path, "flagged", FLAGGED + "params = { stream = true }")


def test_a_default_that_no_pickle_holds(tmp_path):
    assert len(compiled(tmp_path, "defaulted", FLAGGED)[0].launches) == 1


VOLUMES = 'arguments.y = { role = "output", shape = ["A", "B", "C", "D", "E", "F"] }\n'


def test_many_numbers_that_are_multiplied_are_proved(tmp_path):
    assert compiled(tmp_path, "volumes", VOLUMES)[1].proof["launches"] >= 64


def test_bounds_of_an_integer(tmp_path):
    record, _ = compiled(tmp_path, "volumes", VOLUMES + "arguments.a = { minimum = 2, maximum = 8, divisor = 2 }")
    bounds = {scalar.name: (scalar.minimum, scalar.maximum, scalar.divisor) for scalar in record.scalars}
    assert (bounds["a"], bounds["b"]) == ((2, 8, 2), (-(2**31), 2**31 - 1, 1))


def test_an_integer_that_is_an_extent_is_read_from_the_tensor(tmp_path):
    record, _ = compiled(tmp_path, "sized", 'arguments.y = { role = "output", shape = ["N"] }')
    assert [argument.name for argument in record.arguments] == ["y", "sizes_1"]
    assert record.grid == ("sizes_1", 1, 1)
    assert ("N", "i64") in [(item.value, item.dtype) for _, item in flat(record.parameters) if hasattr(item, "value")]


def test_dims_bounds_defaults_and_names(tmp_path):
    rest = (
        TWICE
        + """
        arguments.options_sm_count = { rename = "rows", default = 1 }
        dims.M = { skip_if_zero = true }
        dims.N = { divisor = 6, maximum = 1200 }
        """
    )
    record, _ = compiled(tmp_path, "twice", rest)
    assert [(dim.name, dim.divisor, dim.minimum, dim.maximum) for dim in record.dims] == [
        ("M", 1, 0, 2**31 - 1), ("N", 12, 12, 1200),
    ]  # fmt: skip
    assert record.skip_if_zero == ("M",)
    assert record.scalars[-1].name == "rows" and record.scalars[-1].default == 1


def test_a_fixed_extent_is_a_number_a_param_or_a_star(tmp_path):
    for message in ("96", '"columns"', '"*"', '["mul", "columns", 1]'):
        rest = f"""params.columns = 96
            arguments.x = {{ role = "input", shape = ["M", {message}] }}
            arguments.y = {{ role = "output", shape = ["M", 96] }}"""
        record, _ = compiled(tmp_path, "twice", rest)
        assert record.tensors[0].shape == ("M", 96)
    message = refused("twice", rest.replace("96] }", "95] }"))
    assert message == (
        'arguments.y.shape[1] is 95; the trace fixes this extent at 96; say 96, a param of that value, or "*"'
    )


def test_one_name_ties_two_extents_and_expressions_derive_them(tmp_path):
    rest = """arguments.x = { role = "input", shape = ["M", "N"] }
        arguments.y = { role = "output", shape = ["M", ["floordiv", "N", 2]] }"""
    record, _ = compiled(tmp_path, "halves", rest)
    assert [(dim.name, dim.divisor) for dim in record.dims] == [("M", 1), ("N", 8)]
    assert record.tensors[1].shape == ("M", ("floordiv", "N", 2))


def test_an_extent_has_one_name():
    rest = TWICE.replace('["M", "N"] }', '["M", "J"] }')
    assert refused("twice", rest) == (
        "arguments.y.shape[1] is J; the trace has one extent for it and for arguments.x.shape[1], which is N; call both"
        " the same"
    )


def test_prescribed_strides(tmp_path):
    rest = TWICE.replace('"output", shape', '"output", strides = ["N", 1], shape')
    record, _ = compiled(tmp_path, "twice", rest)
    assert record.tensors[1].strides == ("N", 1)
    message = refused("twice", TWICE.replace('"output", shape', '"output", strides = ["N", 2], shape'))
    assert message == "arguments.y.strides[1] is 2; the trace fixes this stride at 1"


def test_a_workspace_and_a_computed_integer(tmp_path):
    record, _ = compiled(tmp_path, "filled", FILLED)
    assert (record.scratch, record.workspace, [argument.name for argument in record.arguments]) == (
        ("mul", 4, "N"),
        0,
        ["y"],
    )
    zeroed = FILLED.replace('bytes = ["mul", 4, "N"]', "bytes = 64, zeroed = true")
    record, _ = compiled(tmp_path, "filled", zeroed)
    assert (record.scratch, record.workspace, record.workspace_zeroed) == (0, 64, True)


CHOSEN = """
arguments.x = { role = "input", shape = ["N"] }
arguments.y = { role = "output", shape = ["N"] }
arguments.memory = { role = "workspace", bytes = 128 }
"""


@pytest.mark.parametrize(("dtype", "recorded"), [("Boolean", "u8"), ("Int8", "u8"), ("Int16", "u16")])
def test_tensors_by_their_own_names_of_types_that_no_record_has(tmp_path, dtype, recorded):
    record, kernel = compiled(tmp_path, "chosen", CHOSEN + f'params.dtype = "{dtype}"')
    assert [(argument.name, argument.dtype) for argument in record.arguments] == [("x", recorded), ("y", "i32")]
    assert kernel.proof["launches"] >= 64


@pytest.mark.parametrize(
    ("function", "rest", "words"),
    [
        ("chosen", CHOSEN.replace("128", "124"),
         "arguments.memory.bytes is 124; memory (i32, rank 1: [32]) takes 128; say 128 or more"),
        ("clashing", "", "the host function has two arguments called options_factor: "),
        ("filled", FILLED.replace('["mul", 2, "N"]', '["mul", 2, "rows"]'),
         "arguments.count.value[2]: unknown variable 'rows'; known are N, active_clusters,"),
        ("filled", FILLED.replace('["mul", 2, "N"]', '["floordiv", "N", 0]'),
         "the spec's expression N // 0 divides by 0; a divisor is 1 or more"),
        ("twice", TWICE.replace('"output", shape', '"output", strides = ["K", 1], shape'),
         "arguments.y.strides[0]: unknown variable 'K'"),
    ],
)  # fmt: skip
def test_what_cannot_be_as_the_spec_says(function, rest, words):
    assert refused(function, rest).startswith(words)


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


def test_of_a_64_bit_integer_callers_pass_values_of_32(tmp_path):
    record, kernel = compiled(tmp_path, "filled", FILLED.replace('value = ["mul", 2, "N"]', "minimum = 0"))
    count = record.arguments[-1]
    assert (count.name, count.dtype, count.minimum, count.maximum) == ("count", "i32", 0, 2**31 - 1)
    (field,) = [item for _, item in flat(record.parameters) if getattr(item, "value", None) == "count"]
    assert (field.dtype, kernel.proof["launches"] >= 64) == ("i64", True)


def test_a_number_of_python_is_as_wide_as_its_parameter(tmp_path):
    """The host code reads 64 bits of it, and the upper ones of a negative number are not 0."""
    record, kernel = compiled(tmp_path, "plainly", FILLED.replace('arguments.count = { value = ["mul", 2, "N"] }', ""))
    (field,) = [item for _, item in flat(record.parameters) if getattr(item, "value", None) == "count"]
    assert (field.dtype, kernel.proof["launches"] >= 64) == ("i64", True)


@pytest.mark.parametrize("kind", ["dict", "event", "set"])
def test_a_type_that_no_record_knows_is_named(kind):
    message = refused("anything", Y_ALONE + f'params.kind = "{kind}"')
    name = {"event": "cudaEvent_t"}.get(kind, kind)
    assert message.startswith(f"what is a {name}, which launch records do not know; pass tensors, pointers, Int32, ")


@pytest.mark.parametrize("kind", ["None", "function"])
def test_the_runtimes_stream_is_a_stream_and_a_function_is_no_argument(tmp_path, kind):
    record, _ = compiled(tmp_path, "anything", Y_ALONE + f'params.kind = "{kind}"')
    assert [argument.name for argument in record.arguments] == ["y"]


Y_ALONE = 'arguments.y = { role = "output", shape = ["N"] }\n'
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


def test_what_the_spec_forgets_is_asked_for():
    assert refused("twice", "") == (
        "the host code cannot tell what these arguments are: x (f32, rank 2: [?, ?]) lacks role and shape; y (f32, rank"
        ' 2: [?, ?]) lacks role and shape; say it in the spec, such as arguments.x = { role = "input", shape ='
        ' ["M", "N"] }'
    )


def test_what_the_trace_does_not_have():
    message = refused("twice", TWICE + 'arguments.z = { role = "input", shape = ["M"] }')
    assert message.startswith("arguments.z: the trace has no such argument; it has x (f32, rank 2: [?, ?]), y (f32,")
    refusals = {
        'arguments.z = { role = "input", shape = ["M"], optional = true }': None,
        "dims.K = { divisor = 2 }": "dims.K: no shape has this dim; the dims are M, N",
        "params.rows = 1": "source foreignkernels:twice: got an unexpected keyword argument 'rows'; its arguments are"
        " columns; fix params",
    }
    from fusekit.compiler.worker import plan

    for rest, words in refusals.items():
        if words is None:
            plan(spec_of("twice", TWICE + rest))
        else:
            assert refused("twice", TWICE + rest) == words
    assert refused("twice", TWICE.replace('"input", shape = ["M", "N"]', '"input", shape = ["M"]')) == (
        "arguments.x.shape has 1 dims; x (f32, rank 2: [?, ?])"
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken", "source foreignkernels:broken raised RuntimeError: no luck"),
        ("empty", "source foreignkernels:empty returned int; it must return (function, arguments)"),
        ("no_arguments", "source foreignkernels:no_arguments returned tuple; it must return (function, arguments)"),
        ("leaving", "source foreignkernels:leaving raised SystemExit: 3"),
        ("interrupted", "source foreignkernels:interrupted raised KeyboardInterrupt"),
        ("missing", "source foreignkernels:missing: foreignkernels has no function missing; fix the source"),
    ],
)
def test_sources_that_fail(function, words):
    assert refused(function, "").startswith(words)


def test_an_extent_and_a_scalar_of_one_name():
    rest = FILLED.replace('"N"', '"count"').rpartition("arguments.count")[0]
    assert refused("filled", rest).startswith("'count' is an extent of a tensor and a scalar argument; name the extent")


def test_a_module_that_is_not_there():
    from fusekit.compiler.source_call import call_source

    with pytest.raises(BuildError, match="source no_such_module:f: there is no module 'no_such_module'"):
        call_source("no_such_module:f", {}, "sm_90a")


ROWS = """
arguments.x = { role = "input", shape = ["M", 128] }
arguments.y = { role = "output", shape = ["M", 128] }
"""


@pytest.mark.parametrize(("bits", "large", "bounded"), [(0, False, 2), (32, False, 2), (64, False, 0), (32, True, 1)])
def test_address_sums_of_32_bits_do_not_reach_2_31_elements(tmp_path, bits, large, bounded):
    rest = ROWS.replace("128] }", "128], large = true }", 1) if large else ROWS
    record, _ = compiled(tmp_path, "rows", f"{rest}params.bits = {bits}")
    assert len([constraint for constraint in record.constraints if "2**31 elements" in constraint.message]) == bounded
    most = 2**24 if bits == 0 else (2**31 - 128) // 200 + 1
    for m, fits in ((1, True), (most, True), (most + 1, bounded == 0)):
        views = [View("fp16", (m, 128), (200 if bits else 128, 1), 0) for _ in range(2)]
        if fits:
            bind(record, views)
            continue
        name = "y" if large else "x"
        words = rf"{name} must span fewer than 2\*\*31 elements: .*, or say arguments\.{name}\.large = true in its spec"
        with pytest.raises(ArgumentError, match=words):
            bind(record, views)


def test_a_tensor_map_stays_within_its_tensor(tmp_path):
    record, kernel = compiled(tmp_path, "mapped_by_sizes", 'arguments.x = { role = "input", shape = ["elements"] }')
    (constraint,) = record.constraints
    assert kernel.proof["launches"] >= 64
    assert constraint.message.startswith("x is smaller than what the kernel's tensor map over it reaches: give it all")
    for m, n, elements, fits in ((4, 64, 256, True), (4, 64, 255, False), (5, 64, 256, False), (1, 64, 64, True)):
        assert (evaluate(constraint.expr, {"m": m, "n": n, "elements": elements}) == 0) == fits


def test_large_is_a_key_of_tensors():
    with pytest.raises(FusekitError, match=r"arguments\.count\.large"):
        spec_of("filled", FILLED.replace('value = ["mul", 2, "N"]', "large = true, value = 3"))

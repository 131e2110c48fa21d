"""op = "extern": what is read of a stranger's kernel, what its spec must say, and what is refused in words."""

import inspect
from dataclasses import replace

import pytest

from fusekit.abi import IntegerParameter, LaunchEvent, LaunchRecord, RecordError, ScalarArgument, evaluate, flat
from fusekit.abi.arguments import OPTIONS
from fusekit.compiler.samples import expected_map
from fusekit.errors import BuildError, ProofError
from fusekit.runtime.checked import CheckedKernel
from fusekit.runtime.kernel import Kernel

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from cuda.bindings.driver import CUevent

from .externs import FILLED, FLAGGED, TWICE, compiled, refused, spec_of


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


def test_a_truth_value_is_a_number_of_0_or_1_and_the_default_stream_is_the_launchers(tmp_path):
    record, kernel = compiled(tmp_path, "flagged", FLAGGED)
    flag = record.arguments[1]
    assert (flag.name, flag.dtype, flag.minimum, flag.maximum) == ("wide", "i32", 0, 1)
    assert [evaluate(record.grid[0], {"wide": wide, "N": 300}) for wide in (0, 1)] == [1, 3]
    assert kernel.proof["launches"] >= 64


def test_integers_of_8_and_16_bits_keep_to_their_bounds(tmp_path):
    said = FLAGGED + "arguments.b = { minimum = -5, maximum = 99999 }"
    record, kernel = compiled(tmp_path, "small_numbers", said)
    bounds = {each.name: (each.dtype, each.minimum, each.maximum) for each in record.arguments[1:]}
    assert bounds == {
        "a": ("i32", -128, 127), "b": ("i32", -5, 32767), "c": ("i32", 0, 255), "d": ("i32", 0, 65535),
    }  # fmt: skip
    taken = [(each.name, each.dtype) for each in record.parameters if isinstance(each, IntegerParameter)]
    assert taken == [("a", "i8"), ("b", "i16"), ("c", "u8")]
    assert record.grid == ("d", 1, 1)
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


def test_what_configures_the_launch_is_the_callers_where_a_record_can_hold_it(tmp_path):
    """An integer in a source that somebody wrote may stand for any."""
    record, _ = compiled(tmp_path, "configuring", FLAGGED)
    assert (record.block, record.dynamic_shared) == (("threads", 1, 1), "shared")
    with pytest.raises(BuildError, match=r"launch attribute 6 of a launch is .*early.*arguments\.n\.value = 1"):
        compiled(tmp_path, "configuring", CONFIGURED + "arguments.early = { default = 1 }")


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


def test_an_object_that_compiles_itself_is_a_source(tmp_path):
    assert compiled(tmp_path, "compiling", FILLED)[0] == compiled(tmp_path, "filled", FILLED)[0]


WINDOW = """
arguments.x = { role = "input", shape = ["W"] }
arguments.y = { role = "output", shape = ["N"] }
"""


def test_an_extent_of_a_map_that_is_a_scalar_is_bounded_by_itself(tmp_path):
    """Read as a number without a sign, a negative one has no expression: it is refused."""
    record, kernel = compiled(tmp_path, "windowed", WINDOW)
    (bound, reach) = record.constraints
    (tiled,) = (item for item in record.parameters if hasattr(item, "dims"))
    assert (tiled.dims, kernel.proof["launches"] >= 64) == ((256, ("add", "n", 1)), True)
    assert evaluate(bound.expr, {"n": 2**31 - 2}) == 0 < evaluate(bound.expr, {"n": 2**31 - 1})
    with pytest.raises(RecordError, match="dims"):  # as every launcher does
        expected_map(tiled, {"n": -1, "x.address": 256}).check()
    assert evaluate(reach.expr, {"n": 3, "W": 1024}) == 0 < evaluate(reach.expr, {"n": 4, "W": 1024})


SEVERAL = """
arguments.y = { role = "output", shape = ["N"] }
arguments.first = { role = "workspace", bytes = 1000 }
arguments.second = { role = "workspace", bytes = 512, zeroed = true }
arguments.third = { role = "workspace", bytes = ["mul", 8, "N"], shape = [["mul", 2, "N"]], strides = [1] }
"""


def test_several_workspaces_lie_one_after_the_other(tmp_path):
    record, kernel = compiled(tmp_path, "memories", SEVERAL)
    assert (record.workspace, record.scratch) == (512, ("add", 1024, ("mul", 8, "N")))
    pointers = {item.argument: item.shift for _, item in flat(record.parameters) if hasattr(item, "shift")}
    assert pointers == {"y": 0, "workspace": 0, "scratch": 1024}
    extents = [item.value for _, item in flat(record.parameters) if hasattr(item, "value")]
    assert (extents, kernel.proof["launches"] >= 64) == (["N", ("mul", 2, "N")], True)
    too_few = SEVERAL.replace('["mul", 8, "N"]', '["mul", 4, "N"]')
    with pytest.raises(BuildError, match=r"arguments.third.bytes is 4 \* N; its extents take more"):
        compiled(tmp_path, "memories", too_few)
    with pytest.raises(BuildError, match=r"open; say arguments.third.shape and arguments.third.strides, with 1"):
        compiled(tmp_path, "memories", SEVERAL.replace(", strides = [1]", ""))


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


def test_of_a_64_bit_integer_callers_pass_values_of_32(tmp_path):
    record, kernel = compiled(tmp_path, "filled", FILLED.replace('value = ["mul", 2, "N"]', "minimum = 0"))
    count = record.arguments[-1]
    assert (count.name, count.dtype, count.minimum, count.maximum) == ("count", "i32", 0, 2**31 - 1)
    (field,) = [item for _, item in flat(record.parameters) if getattr(item, "value", None) == "count"]
    assert (field.dtype, kernel.proof["launches"] >= 64) == ("i64", True)


def test_a_64_bit_integer_is_one_where_its_bounds_say_so(tmp_path):
    wide = FILLED.replace('value = ["mul", 2, "N"]', f"minimum = 0, maximum = {2**40}")
    record, kernel = compiled(tmp_path, "filled", wide)
    count = record.arguments[-1]
    assert (count.name, count.dtype, count.maximum, record.schema) == ("count", "i64", 2**40, 5)
    assert (LaunchRecord.from_json(record.to_json()), kernel.proof["launches"] >= 64) == (record, True)


def test_a_number_of_python_is_as_wide_as_its_parameter(tmp_path):
    """The host code reads 64 bits of it, and the upper ones of a negative number are not 0."""
    record, kernel = compiled(tmp_path, "plainly", FILLED.replace('arguments.count = { value = ["mul", 2, "N"] }', ""))
    (field,) = [item for _, item in flat(record.parameters) if getattr(item, "value", None) == "count"]
    assert (field.dtype, kernel.proof["launches"] >= 64) == ("i64", True)


def test_an_event_is_a_handle_that_callers_pass(tmp_path):
    """Also one of a captured call."""
    from fusekit.compiler import fakes

    record, kernel = compiled(tmp_path, "recording", FLAGGED)
    assert record.events == (LaunchEvent("programmatic", "done"),)
    assert record.arguments[1] == ScalarArgument("done", "i64", None, 1, 2**63 - 1)
    assert kernel.proof["launches"] >= 64
    data = fakes.CallWriter().value(CUevent(0), "done")
    assert data == {"event": True}
    assert isinstance(fakes.CallReader({}).value(data), CUevent)


GATHERED = """
arguments.pointers = { role = "input", shape = ["N"] }
arguments.y = { role = "output", shape = ["B", "N", 64] }
dims.B = { maximum = 64 }
"""


def test_memory_that_cute_experimental_adds_is_scratch(tmp_path):
    """Each launch has its own, and its tensor map, which the kernel changes, has no rule about what it reaches."""
    from fusekit.compiler import hostcode
    from fusekit.compiler.prove import prove
    from fusekit.compiler.trace import trace
    from fusekit.compiler.worker import plan

    planned = plan(spec_of("experimentalkernels:gathered", GATHERED))
    traced = trace(planned, tmp_path)
    planned, record = hostcode.read(traced.module, planned, traced.cubin)
    first, second = record.launches
    assert record.scratch == 2 * 256 * 128  # a tensor map for each multiprocessor
    assert [step.parameters[3].shift for step in (first, second)] == [0, 256 * 128]
    assert not [rule for rule in record.constraints if "tensor map" in rule.message]
    host = traced.host(record)
    assert prove(planned, record, host, "seed")["launches"] >= 64
    wrong = replace(first.parameters[3], shift=256)
    with pytest.raises(ProofError, match="scratch_pointer: address"):
        prove(planned, replace(record, parameters=(*first.parameters[:3], wrong)), host, "seed")


@pytest.mark.parametrize(
    ("size", "alignment", "text"),
    [("%count", "%c", "workspace that cute.experimental gives k follows the arguments; give the kernel a workspace"),
     ("%c", "%large", "k wants its workspace aligned to 512 bytes")],
)  # fmt: skip
def test_other_memory_that_cute_experimental_adds_is_refused(size, alignment, text):
    from fusekit.compiler import dsl
    from fusekit.compiler.hostcode.implicit import implicit

    ir = dsl.ir()
    module = f"""module attributes {{lir.kernel_extra_args = {{k = 1 : i64, total_added_arguments = 1 : i64}}}} {{
      llvm.func @k_queryDeviceWorkspace(%arguments: !llvm.ptr, %answer: !llvm.ptr) -> i32 {{
        %c = llvm.mlir.constant(64 : i64) : i64
        %large = llvm.mlir.constant(512 : i64) : i64
        %zero = llvm.mlir.constant(0 : i32) : i32
        %first = llvm.load %arguments : !llvm.ptr -> !llvm.ptr
        %count = llvm.ptrtoint %first : !llvm.ptr to i64
        %at = llvm.getelementptr %answer[0, 1] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(i64, i64)>
        llvm.store {size}, %answer : i64, !llvm.ptr
        llvm.store {alignment}, %at : i64, !llvm.ptr
        llvm.return %zero : i32
      }}
    }}"""
    with ir.Context(), pytest.raises(BuildError, match=text):
        implicit(ir.Module.parse(module))


@pytest.mark.parametrize("kind", ["dict", "set"])
def test_a_type_that_no_record_knows_is_named(kind):
    message = refused("anything", FLAGGED + f'params.kind = "{kind}"')
    assert message.startswith(f"what is a {kind}, which launch records do not know; pass tensors, pointers, integers, ")


@pytest.mark.parametrize("kind", ["None", "function"])
def test_the_runtimes_stream_is_a_stream_and_a_function_is_no_argument(tmp_path, kind):
    record, _ = compiled(tmp_path, "anything", FLAGGED + f'params.kind = "{kind}"')
    assert [argument.name for argument in record.arguments] == ["y"]


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


def test_a_module_that_is_not_there():
    from fusekit.compiler.source_call import call_source

    with pytest.raises(BuildError, match="source no_such_module:f: there is no module 'no_such_module'"):
        call_source("no_such_module:f", {}, "sm_90a")

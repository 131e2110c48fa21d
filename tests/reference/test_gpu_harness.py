"""The GPU tests' buffers and verdicts, on the CPU: a stand-in kernel passes, and each way of being wrong is found."""

from pathlib import Path

import numpy as np
import pytest

from fusekit import reference
from fusekit.abi import TensorArgument, evaluate
from fusekit.reference import formats
from fusekit.reference.fp8_output import coded_outputs, written
from fusekit.reference.meaning import meaning
from fusekit.spec import parse_file
from tests.gpu.cases import Case, cases_of
from tests.gpu.harness import GUARD, Buffer, differences, faults, guarded, in_place, laid_over, prepare
from tests.soak import sample

SPECS = {
    spec.full_name.partition("/")[2]: spec
    for name in ("matrix.toml", "matrix_backward.toml", "matrix_fp8.toml", "matrix_fp8_output.toml")
    for spec in parse_file(Path(__file__).parents[1] / "gpu" / name)
}
WHOLE = SPECS["whole-epilogue@128x128-c1x1"]
CASE = Case("hard", (70, 0, 33, 64), 48, 72, spare=5, pad=24)
WGRAD = SPECS["wgrad@128x192-c1x1"]
ACCUMULATE = SPECS["wgrad-accumulate@128x192-c1x2"]
SUMS = [SPECS["wgrad-dbias@128x192-c1x2-dynamic"], SPECS["wgrad-dbias-accumulate@256x128-c2x1"]]
BACKWARD = SPECS["dswiglu-whole@128x160-c1x1"]


def as_fp8(launch, inputs):
    """FP8 values of the results, in the launch's buffers."""
    means = meaning(launch.spec)
    wide = launch.spec.canonical() | {
        "quant": launch.spec.quant.canonical() + ("" if means.quant.keep else " keep=true")
    }
    results = {name: formats.encode(value, "bf16") for name, value in reference.gemm(wide, inputs).items()}
    ends = inputs.get("offsets", np.array([launch.case.rows]))
    for name, value in coded_outputs(means, results, ends).items():
        where = written(means, name, value.shape, ends)
        launch.arguments[name].array[where] = value[where]


def stand_in(launch, **changes):
    """What the kernel should do, from the launch's own buffers; ``changes`` replace inputs."""
    inputs = {name: value.array if isinstance(value, Buffer) else value for name, value in launch.arguments.items()}
    if meaning(launch.spec).quant.coded:
        as_fp8(launch, inputs)
    for name, value in reference.gemm(launch.spec, inputs | changes).items():
        if name in launch.outputs:
            buffer = launch.arguments[name]
            owned = len(value) if name in reference.BY_GROUP else launch.case.rows
            buffer.array[:owned] = formats.encode(value, buffer.dtype)[:owned]
    return launch


STAND_INS = [
    "whole-epilogue@64x192-c2x1",
    "reglu-interleaved-n@128x64-c1x2",
    "dense@128x128-c1x1",
    "wgrad-low@64x128-c2x1",
    "wgrad-accumulate@128x192-c1x2",
    "wgrad-dbias@128x192-c1x2-dynamic",
    "wgrad-dbias-accumulate@256x128-c2x1",
    "dense-f32@64x64-c1x1",
    "f32-swiglu-interleaved@128x160-c1x2-dynamic",
    "dense-wgrad@128x128-c1x1",
    "dense-wgrad-split-accumulate@256x128-c1x2",
    "dswiglu-whole@128x160-c1x1",
    "dgeglu-dbias@64x128-c2x1",
    "dense-dgeglu-whole@128x128-c1x1",
    "gather@64x64-c2x1",
    "gather-dense@256x128-c2x1",
    "gather-dswiglu@128x128-c2x1-dynamic",
    "wgrad-gather-x@128x192-c1x2",
    "wgrad-gather-dy-dbias@128x192-c1x1-dynamic",
    "row-swiglu-interleaved@128x192-c1x2",
    "block-swiglu-interleaved@128x192-c1x2-coop-dynamic",
    "tensor-e5m2@128x192-c1x2",
    "wgrad@128x192-c2x1-coop-dynamic",
    "tensor-dswiglu@128x128-c2x1-dynamic",
    "turned@128x256-c2x1-dynamic",
    "turned-kept-interleaved@128x256-c1x2",
    "bf16-rows-kept@128x256-c2x1-dynamic",
    "dense-turned-kept@128x256-c2x1-dynamic",
    "dz@128x128-c2x1-coop-dynamic",
    "dz-kept-interleaved@128x128-c1x2-coop",
    "dz-turned@128x128-c2x1-coop-dynamic",
    "dz-turned-kept-interleaved-32@128x128-c1x1-coop-dynamic",
    "gathered-rows@128x256-c2x1-dynamic",
    "gather-awaits@128x192-c2x1-dynamic",
    "wgrad-dense@128x192-c2x1-coop-dynamic",
]


# Each kernel's cases, but for the large ones, which are the GPU's.
SMALL = {name: [case for case in cases_of(SPECS[name]) if case.sample is None] for name in STAND_INS}
FIRST = {case.name: name for name in reversed(STAND_INS) for case in SMALL[name]}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_stand_in_passes_every_case(name, soak):
    """One of a kernel's cases and those that no kernel before it has; all with --soak."""
    one = SMALL[name][STAND_INS.index(name) % len(SMALL[name])]
    for case in SMALL[name]:
        if soak or case == one or FIRST[case.name] == name:
            assert faults(stand_in(prepare(SPECS[name], case))) == [], case.name


def test_sampled_rows_are_checked_and_all_are_looked_at():
    case = Case("sampled", (900, 0, 300), 32, 24, sample=40)
    launch = stand_in(prepare(WHOLE, case))
    assert faults(launch) == []
    launch.arguments["y"].array[517, 3] = reference.POISON
    assert any("1 elements not written, first at 517, 3" in line for line in faults(launch))


def outside(launch, name, element):
    """One element of the whole allocation, counted from the tensor's first."""
    size = launch.arguments[name].itemsize
    launch.arguments[name].image[GUARD + size * element :][:size] = 0


@pytest.mark.parametrize("name", ["y", "preactivation"])
@pytest.mark.parametrize("place", ["before", "after", "padding", "spare"])
def test_a_stray_write_is_found(name, place):
    launch = stand_in(prepare(WHOLE, CASE))
    buffer = launch.arguments[name]
    stride = buffer.strides[0]
    element = {"before": -1, "after": stride * 172, "padding": stride * 3 - 1, "spare": stride * 167 + 2}[place]
    assert faults(launch) == []
    outside(launch, name, element)
    assert [line for line in faults(launch) if line.startswith(f"{name}: 2 bytes written outside rows 0..166")]


@pytest.mark.parametrize("spec", [WGRAD, ACCUMULATE], ids=lambda spec: spec.kernel)
@pytest.mark.parametrize("place", ["before", "after", "padding"])
def test_a_stray_write_to_a_weight_gradient_is_found(spec, place):
    launch = stand_in(prepare(spec, CASE))
    assert launch.arguments["dw"].strides == (48 * 96, 96, 1)
    assert faults(launch) == []
    outside(launch, "dw", {"before": -1, "after": 4 * 48 * 96, "padding": 3 * 96 - 1}[place])
    size = launch.arguments["dw"].itemsize
    assert [line for line in faults(launch) if line.startswith(f"dw: {size} bytes written outside rows 0..3")]


@pytest.mark.parametrize("spec", [WGRAD, ACCUMULATE], ids=lambda spec: spec.kernel)
def test_a_wrong_weight_gradient_is_found(spec):
    right = stand_in(prepare(spec, CASE))
    assert faults(right) == []
    moved = {"offsets": np.array([71, 71, 103, 167], np.int32)}
    assert faults(stand_in(prepare(spec, CASE), **moved))
    gap = stand_in(prepare(spec, CASE))
    gap.arguments["dw"].array[2, 5, 3] = np.full(1, -1, np.int32).view(gap.arguments["dw"].array.dtype)[0]
    assert any("1 elements not written, first at 2, 5, 3" in line for line in faults(gap))
    touched = stand_in(prepare(spec, CASE))
    touched.arguments["dw"].array[1, 2, 3] += 1
    assert "dw: 1 elements of empty groups are wrong" in faults(touched)


@pytest.mark.parametrize("spec", SUMS, ids=lambda spec: spec.kernel)
def test_a_wrong_bias_gradient_beside_a_weight_gradient_is_found(spec):
    def harmed(change, case=CASE):
        launch = stand_in(prepare(spec, case))
        assert faults(launch) == []
        change(launch.arguments["dbias"])
        return faults(launch)

    def outside(buffer):
        buffer.image[buffer.guard + buffer.array.nbytes :][:4] = 0

    def wrong(buffer):
        buffer.array[2, 5] += 1e-2

    def missing(buffer):
        buffer.array.view(np.uint32)[3, 47] = 0xFFFFFFFF

    def touched(buffer):
        buffer.array[1, 5] += 1e-6

    sampled = Case("sampled", (900, 0, 300), 64, 24, sample=64)
    assert any("dbias: 4 bytes written outside rows 0..3" in line for line in harmed(outside))
    for case in (CASE, sampled):
        assert any(line.startswith("dbias: WRONG") and "row 2 column 5" in line for line in harmed(wrong, case))
    assert any("dbias: 1 elements not written, first at 3, 47" in line for line in harmed(missing))
    assert "dbias: 1 elements of empty groups are wrong" in harmed(touched)


@pytest.mark.parametrize("name", ["dz", "y", "dprob", "dbias"])
@pytest.mark.parametrize("place", ["before", "after", "spare"])
def test_a_stray_write_of_a_backward_kernel_is_found(name, place):
    launch = stand_in(prepare(BACKWARD, CASE))
    assert faults(launch) == []
    buffer = launch.arguments[name]
    parts = 4 if name == "dbias" else 172
    end = parts * buffer.strides[0]
    element = {"before": -1, "after": end, "spare": end if name == "dbias" else 167 * buffer.strides[0]}[place]
    buffer.image[buffer.guard + buffer.itemsize * element :][: buffer.itemsize] = 0
    last = 3 if name == "dbias" else 166
    assert any(f"{name}: {buffer.itemsize} bytes written outside rows 0..{last}" in line for line in faults(launch))


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([71, 71, 103, 167], np.int32)},
        {"row_scale": np.ones(172, np.float32)},
        {"act_limit": np.inf},
        {"act_alpha": 1.0},
        {"act_up_offset": 0.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_backward_epilogue_is_found(change):
    assert faults(stand_in(prepare(BACKWARD, CASE), **change))


def test_a_group_whose_bias_gradient_is_wrong_is_found():
    launch = stand_in(prepare(BACKWARD, CASE))
    launch.arguments["dbias"].array[1, 5] = 1e-3
    got = faults(launch)
    assert "dbias: 1 elements of empty groups are wrong" in got
    assert any("row 1 column 5" in line for line in got)
    launch.arguments["dbias"].array[1, 5] = 0
    case = Case("sampled", (900, 0, 300), 64, 24, sample=40)
    launch = stand_in(prepare(BACKWARD, case))
    assert faults(launch) == []
    launch.arguments["dbias"].array[2, 126] += 0.01  # the gate of the last column
    assert any(line.startswith("dbias: WRONG") for line in faults(launch))


def test_a_nan_that_leaks_into_a_neighbours_sums_is_found():
    case = Case("nan", (70, 33, 65), 64, 72, nan_group=1)
    launch = stand_in(prepare(BACKWARD, case))
    assert np.isnan(launch.arguments["dbias"].array[1]).all()
    assert np.isnan(launch.arguments["dprob"].array[70:103]).all()
    assert faults(launch) == []
    for name, index in (("dbias", (2, 3)), ("dprob", (69,)), ("dz", (103, 5))):
        harmed = stand_in(prepare(BACKWARD, case))
        array = harmed.arguments[name].array
        array[index] = np.nan if array.dtype == np.float32 else 0x7FC0
        assert faults(harmed), name


def test_a_weight_gradient_added_twice_is_found():
    first = prepare(ACCUMULATE, CASE)
    twice = stand_in(first.fresh(), dw=stand_in(first).arguments["dw"].array)
    assert any(line.startswith("dw: WRONG") for line in faults(twice))
    assert np.array_equal(first.fresh().arguments["dw"].array, first.inputs["dw"])


def test_a_nan_that_leaks_into_a_neighbours_weights_is_found():
    case = Case("nan", (70, 33, 65), 48, 72, nan_group=1)
    launch = stand_in(prepare(WGRAD, case))
    assert np.isnan(formats.decode(launch.arguments["dw"].array[1], "bf16")).all()
    assert faults(launch) == []
    launch.arguments["dw"].array[0, 3] = formats.encode(np.array([np.nan]), "bf16")
    assert faults(launch)


def test_sampled_weights_are_checked_and_all_are_looked_at():
    launch = stand_in(prepare(ACCUMULATE, Case("sampled", (900, 0, 300), 304, 200, sample=20)))
    assert faults(launch) == []
    launch.arguments["dw"].array[2, 0, 199] += 1
    assert any("group 2 row 0 column 199" in line for line in faults(launch))


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([71, 71, 103, 167], np.int32)},  # one row goes to its neighbour
        {"offsets": np.array([70, 70, 103, 166], np.int32)},  # the last row is left out
        {"alpha": np.ones(4, np.float32)},
        {"bias": np.zeros((4, 48), np.uint16)},
        {"row_scale": np.ones(172, np.float32)},
        {"act_up_offset": 0.0},
        {"act_alpha": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_epilogue_or_group_is_found(change):
    assert faults(stand_in(prepare(WHOLE, CASE), **change))


def test_a_clamp_that_is_forgotten_is_found_by_a_loud_input():
    case = Case("loud", (70, 33), 48, 72, loud=True)
    assert faults(stand_in(prepare(WHOLE, case))) == []
    assert faults(stand_in(prepare(WHOLE, case), act_limit=np.inf))


def test_nothing_written_is_found():
    assert [line.split(":")[0] for line in faults(prepare(WHOLE, CASE))] == ["y", "preactivation"] * 2


def test_a_leaking_nan_is_found():
    case = Case("nan", (70, 33, 65), 48, 72, nan_group=1)
    launch = stand_in(prepare(WHOLE, case))
    assert faults(launch) == []
    launch.arguments["y"].array[69] = formats.encode(np.array([np.nan]), "bf16")
    assert faults(launch)


def test_what_must_not_be_read_is_nan():
    case = Case("guards", (70, 0), 48, 72, spare=4, pad=8, nan_empty_weights=True)
    launch = prepare(WHOLE, case)
    x, w = launch.arguments["x"], launch.arguments["w"]
    assert np.isnan(formats.decode(x.array[70:], "bf16")).all()
    assert np.isnan(formats.decode(w.array[1], "bf16")).all()
    assert np.isfinite(formats.decode(w.array[0], "bf16")).all()
    whole_rows = x.image[GUARD:-GUARD].view(np.uint16).reshape(74, 80)
    assert (whole_rows[:, 72:] == reference.POISON).all()
    assert (x.image[:GUARD] == 0xFF).all()
    assert np.isnan(launch.arguments["row_scale"].array[70:]).all()


def test_other_bits_the_second_time_are_found():
    first, second = stand_in(prepare(WHOLE, CASE)), stand_in(prepare(WHOLE, CASE).fresh())
    assert differences(first, second) == []
    second.arguments["preactivation"].array[3, 3] ^= 1
    assert differences(first, second) == ["preactivation: the same launch twice gave other bits"]


def test_an_output_over_an_input_leaves_all_other_rows_of_it():
    launch = stand_in(prepare(BACKWARD, CASE))
    z, dz = (launch.arguments[name].array[:167] for name in ("preactivation", "dz"))
    third, wanted = in_place(launch, "dz", "preactivation"), laid_over(launch, "dz", "preactivation")
    assert np.array_equal(third.arguments["dz"].image, launch.arguments["preactivation"].image)
    assert {line.partition(":")[0] for line in differences(wanted, third)} == set(launch.outputs)
    for name in launch.outputs:
        third.arguments[name].array[...] = launch.arguments[name].array
    third.arguments["dz"].array[167:] = launch.arguments["preactivation"].array[167:]
    assert differences(wanted, third) == [] and not np.array_equal(z, dz)
    third.arguments["dz"].array[170] = 0
    assert differences(wanted, third) == ["dz: the same launch twice gave other bits"]


def test_guarded_buffers_hold_their_data():
    data = np.arange(2 * 3 * 8, dtype=np.uint16).reshape(2, 3, 8)
    buffer = guarded(data.shape, "bf16", 8, data)
    assert buffer.strides == (48, 16, 1)
    assert np.array_equal(buffer.array, data)
    assert np.count_nonzero(buffer.image != 0xFF) <= data.nbytes
    assert guarded((0, 8), "bf16").array.shape == (0, 8)
    assert guarded((5,), "f32").strides == (1,)


@pytest.mark.parametrize(
    "spec",
    sample([spec for spec in SPECS.values() if spec.plan.quant.coded_inputs], most=16),
    ids=lambda spec: spec.full_name,
)
def test_buffers_of_quantised_kernels_are_what_a_launch_takes(spec):
    """Strides and alignment of every case, against what the kernel's arguments ask for."""
    tensors = [argument for argument in spec.plan.arguments if isinstance(argument, TensorArgument)]
    for case in cases_of(spec):
        if case.sample is not None:
            continue
        launch = prepare(spec, case)
        shapes = {tensor.name: launch.arguments[tensor.name].shape for tensor in tensors}
        dims = {dim: size for tensor in tensors for dim, size in zip(tensor.shape, shapes[tensor.name], strict=True)
                if isinstance(dim, str)}  # fmt: skip
        for tensor in tensors:
            buffer = launch.arguments[tensor.name]
            assert buffer.guard % tensor.alignment == 0, tensor.name
            assert buffer.shape == tuple(evaluate(extent, dims) for extent in tensor.shape), tensor.name
            for index, stride in enumerate(buffer.strides):
                if buffer.shape[index] > 1 and tensor.reads_stride(index):
                    assert stride % tensor.stride_divisor == 0, tensor.name
                elif buffer.shape[index] > 1:
                    assert stride == evaluate(tensor.strides[index], dims), tensor.name

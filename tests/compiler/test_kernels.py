"""Real kernels, built: the quickstart, gpt-oss-20b forward, and a sample of the matrix. What their machine code does,
and that the proof catches errors planted in the record of a real one.
"""

import dataclasses
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")

from fusekit.abi import LaunchRecord, TensorMapParameter, evaluate
from fusekit.compiler import trace
from fusekit.compiler.build import execute, plan_build
from fusekit.compiler.prove import prove
from fusekit.compiler.samples import expected_map
from fusekit.compiler.worker import plan
from fusekit.errors import ProofError, ToolchainError
from fusekit.kernels.gemm.sm90.dequantised import HEIGHTS
from fusekit.plan.arch.sm_90a import ROW as SM90A
from fusekit.plan.quant import Quant
from fusekit.spec import find, parse_file
from fusekit.store import Store
from tests.compiler import sass
from tests.compiler.mutations import recorded_launches, tally
from tests.soak import sample

GPU = Path(__file__).parents[1] / "gpu"
MATRIX = {
    spec.full_name: spec
    for name in ("matrix.toml", "matrix_backward.toml", "matrix_fp8.toml", "matrix_fp8_output.toml")
    for spec in parse_file(GPU / name)
}
# Between them: both main loops and operand orders, every layout and cluster, fp16, erf and tanh, every operand.
SAMPLE = (
    "swiglu-concat@128x160-c1x1", "swiglu-interleaved-32@128x192-c1x2", "geglu-interleaved@64x128-c1x1",
    "whole-epilogue@128x128-c1x1", "identity-fp16@128x192-c1x2", "dense@128x128-c1x1",
    "dense-f32@64x64-c1x1", "f32-swiglu-interleaved@128x160-c1x2-dynamic",
)  # fmt: skip
FP8 = (
    "row@256x192-c1x2-dynamic", "row-swiglu-concat@128x160-c2x1-dynamic", "tensor-e5m2@128x192-c1x2",
    "tensor-dswiglu@128x128-c2x1-dynamic", "row-dense@128x160-c2x1", "block@128x192-c2x1-coop-dynamic",
    "block@256x128-c1x2-dynamic", "block-dswiglu@128x128-c2x1-coop-dynamic", "row-promoted@128x192-c2x1-coop-dynamic",
    "wgrad-bf16@128x128-c1x2-coop", "wgrad-dense@128x192-c2x1-coop-dynamic",
    "weights-swiglu-concat@16x128-c1x1-dynamic", "weights-swiglu-concat-many@128x128-c2x1-coop-dynamic",
    "mxfp4@128x128-c1x1-coop-dynamic", "mxfp4-swiglu-interleaved@128x128-c1x1-coop",
)  # fmt: skip
CODED = [name for name in MATRIX if name.startswith("matrix_fp8_output/")]
# Each way to store FP8 values, from each kind of factors, in each layout, and every operand that such a kernel may
# have.
CODED_SAMPLE = [
    f"matrix_fp8_output/{name}"
    for name in (
        "rows@128x256-c2x1-dynamic", "turned-kept-interleaved@128x256-c1x2", "bf16-64-rows@64x256-c1x1",
        "bias-turned-kept@128x128-c2x1-coop-dynamic", "dz-turned-weighted@128x128-c2x1-coop-dynamic",
        "dz-turned-kept-sums@128x128-c1x2-coop", "dz-turned-sums-plain@128x128-c2x1-coop-dynamic",
        "gathered-dz-kept@128x128-c2x1-dynamic", "turned-squares-kept-f32@128x256-c1x2",
        "mx-turned-swizzled-kept@128x128-c2x1-coop-dynamic", "dz-mx-turned-kept@128x128-c2x1-coop-dynamic",
        "dz-mx-turned-bias@128x128-c1x2-coop-dynamic",
        "amax-coded@128x256-c1x2-dynamic", "dz-amax-interleaved-32@128x128-c2x1-dynamic",
    )
]  # fmt: skip
FC1 = "gpt-oss-20b/fc1-fwd@128x160-c2x1-dynamic"


def distinct(specs):
    """Those of which no other is the same kernel."""
    return tuple({repr(spec.device_spec()): spec for spec in reversed(specs)}.values())[::-1]


# The epilogues with most to hold next to accumulators, in every tile that a packaged layer offers; and other layouts.
CROWDED = (
    *distinct(find(["*/moe.fc2-dgrad@*", "*/moe-fp8.fc2-dgrad@*"])),
    *find([f"{GPU}/layers.toml/{name}.fc2-dgrad@128x192-c2x1-dynamic" for name in ("llama4", "mlp", "plain")]),
)
SPECS = (
    *find(
        [
            "quickstart",
            FC1,
            "mixtral-8x7b/fc2-fwd@128x256-c2x1-dynamic",
            "gpt-oss-20b/fc2-fwd@128x192-c2x1-dynamic",
            "gpt-oss-20b/fc1-wgrad@128x192-c1x2-dynamic",
        ]
    ),
    *(MATRIX[f"matrix/{name}"] for name in SAMPLE),
    *(MATRIX[f"matrix_backward/dswiglu-{name}"] for name in ("dbias@256x128-c1x2-dynamic", "dprob@128x128-c2x1")),
    MATRIX["matrix_backward/wgrad-dbias@128x192-c1x2-dynamic"],
    MATRIX["matrix_backward/dense-wgrad-accumulate@256x128-c1x2-dynamic"],
    MATRIX["matrix/gather-swiglu@128x160-c2x1-dynamic"],
    MATRIX["matrix/few-rows-gathered@32x128-c1x1"],
    MATRIX["matrix/few-rows-interleaved-32@16x192-c1x1"],
    MATRIX["matrix/gather-awaits@128x192-c2x1-dynamic"],
    *(MATRIX[f"matrix_backward/gather-dswiglu@{name}-c2x1-dynamic"] for name in ("128x128", "256x128")),
    *(MATRIX[f"matrix_backward/wgrad-gather-{name}"] for name in ("x@128x192-c1x2", "dy@256x128-c2x1-dynamic")),
    *(MATRIX[f"matrix_fp8/{name}"] for name in FP8),
    *CROWDED,
)
SPLIT = [spec for spec in MATRIX.values() if spec.operands["split"]]
# What is built without --soak: of each main loop, epilogue, operand and way to store one, the most crowded.
CORE = (
    FC1, "matrix/whole-epilogue@128x128-c1x1", "matrix_backward/dense-wgrad-accumulate@256x128-c1x2-dynamic",
    "matrix_backward/wgrad-gather-dy@256x128-c2x1-dynamic", "matrix_fp8/wgrad-bf16@128x128-c1x2-coop",
    "deepseek-v3/moe-fp8.fc2-dgrad@128x128-c2x1-coop-dynamic", "matrix/few-rows-gathered@32x128-c1x1",
    "matrix_fp8/weights-swiglu-concat@16x128-c1x1-dynamic",
    "matrix_fp8/weights-swiglu-concat-many@128x128-c2x1-coop-dynamic",
    "matrix_fp8/mxfp4-swiglu-interleaved@128x128-c1x1-coop", "matrix_fp8_output/dz-turned-kept-sums@128x128-c1x2-coop",
    "matrix_fp8_output/dz-mx-turned-bias@128x128-c1x2-coop-dynamic",
    "matrix_fp8_output/dz-amax-interleaved-32@128x128-c2x1-dynamic",
)  # fmt: skip
assert {*(spec.full_name for spec in SPECS), *CODED_SAMPLE}.issuperset(CORE)


def coded(config):
    """The kernels that store FP8 values: all of the matrix with --soak."""
    return CODED if config.getoption("--soak") else [name for name in CODED_SAMPLE if name in CORE]


def every(config):
    """What is built: all with --soak."""
    specs = SPECS if config.getoption("--soak") else [spec for spec in SPECS if spec.full_name in CORE]
    return *specs, *(MATRIX[name] for name in coded(config))


def pytest_generate_tests(metafunc):
    specs, names = every(metafunc.config), coded(metafunc.config)
    cases = {
        "spec": specs,
        "gathering": [spec for spec in specs if spec.operands["gather"] != "none"],
        "split": sample(SPLIT, SPLIT[-1]),
    }
    cases |= {"name": names, "summed": [name for name in names if "-sums" in name]}
    for argument in cases.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(argument, cases[argument], ids=lambda each: getattr(each, "full_name", each))


@pytest.fixture(scope="module")
def built(tmp_path_factory, pytestconfig):
    """The store with all of these kernels in it, and the report of its build."""
    store = Store(tmp_path_factory.mktemp("store"))
    return store, execute(plan_build(every(pytestconfig), store), store)


def loaded(built, spec):
    store, _ = built
    return store.load(store.find_name(spec.full_name, spec.arch).key)


def product_of(record):
    """The launch that multiplies: small ones may go before it and follow."""
    return max(record.launches, key=lambda launch: launch.dynamic_shared)


def instructions(entry, cubin):
    try:
        return sass.instructions(cubin, product_of(LaunchRecord.from_json(dict(entry.launch))).symbol)
    except ToolchainError as error:
        pytest.skip(str(error))


def test_all_are_built_and_proven(built, pytestconfig):
    store, report = built
    assert not report.failed
    assert {item.name for item in report.built} == {spec.full_name for spec in every(pytestconfig)}
    assert all(item.proved_launches >= 8 for item in report.built)
    assert not store.verify(full=True).bad


def test_launches_of_no_rows_are_proved_too(built, spec):
    """Such a set of arguments is left out where no launch could be, as of a map that would be empty."""
    assert loaded(built, spec)[0].proof["edges"][0] == "smallest"


def test_nothing_is_spilled(built, spec):
    entry, cubin = loaded(built, spec)
    assert entry.resources["spill_bytes"] == 0
    counted = sass.counts(instructions(entry, cubin))
    assert (counted["STL"], counted["LDL"]) == (0, 0)
    # What __launch_bounds__ of 384 or 512 threads leaves to each; the warpgroups then share it out anew.
    assert entry.resources["registers"] == 65536 // spec.plan.threads // 8 * 8
    assert counted["USETMAXREG"] >= 2


def test_tensor_cores_multiply_what_tma_brings(built, spec):
    code = instructions(*loaded(built, spec))
    products = {item.opcode.partition(".F32")[0] for item in code if item.base in ("HGMMA", "QGMMA")}
    kind, depth = ("QGMMA", 32) if spec.plan.quant.coded_inputs else ("HGMMA", 16)
    columns = {spec.tile[0] if spec.plan.exchanged else spec.tile[1] // spec.plan.waves}
    if spec.plan.quant.weights_alone:  # of a high tile, no more rows than it needs
        columns |= {height for height in HEIGHTS if height < spec.tile[0]}
    assert products == {f"{kind}.64x{each}x{depth}" for each in columns}
    loads = [item.opcode for item in code if item.base == "UTMALDG"]
    assert loads
    assert any("MULTICAST" in load for load in loads) is (spec.cluster != (1, 1))
    assert any(item.base in ("UTMASTG", "UTMAREDG") for item in code)  # stored, or added
    assert not any(item.base == "HMMA" for item in code)  # the older tensor core path


def test_no_product_is_waited_for_before_the_next_begins(built, spec):
    """Where ptxas runs out of registers for the pipeline, it waits after every wgmma, and nobody is told."""
    code = [
        instruction
        for instruction in instructions(*loaded(built, spec))
        if instruction.opcode.startswith(("HGMMA", "QGMMA", "WARPGROUP.DEPBAR"))
    ]
    groups = [list(group) for base, group in groupby(code, key=lambda each: each.base) if base != "WARPGROUP"]
    assert groups
    # A stage has four steps of 32 bytes along K; two at a time where w comes from registers, of which four sets turn.
    assert min(len(group) for group in groups) >= (2 if spec.plan.quant.weights_alone else 4)


def test_the_record_says_what_the_cubin_takes(built, spec):
    entry, _ = loaded(built, spec)
    record = LaunchRecord.from_json(dict(entry.launch))
    product = product_of(record)
    assert entry.resources["static_shared"] == 0
    assert entry.resources["dynamic_shared"] == product.dynamic_shared == spec.plan.shared.bytes
    assert entry.resources["max_threads"] == spec.plan.threads
    last = max(product.parameters, key=lambda parameter: parameter.offset)
    assert last.offset + last.size == entry.resources["parameter_bytes"]
    assert entry.proof["parameters"] == [
        parameter.name for launch in record.launches for parameter in launch.parameters
    ]


def variables(record):
    """What the record's expressions read when compact tensors of some problem are passed."""
    env = {"M": 1000, "P": 1664, "E": 5, "K": 144, "N": 384, "I": 192, "T": 300, "sm_count": 132, "cluster_margin": 0}
    env |= {"workspace.address": 1 << 39, "scratch.address": 1 << 38}
    for number, tensor in enumerate(record.tensors, start=1):
        step = 1
        env[f"{tensor.name}.address"] = number << 40
        for index in reversed(range(tensor.rank)):
            env[f"{tensor.name}.stride{index}"] = step
            step *= evaluate(tensor.shape[index], env)
    return env


def test_what_was_read_is_what_was_planned(built, spec):
    """Block, cluster, shared memory, boxes and the grid, which are the kernel's own words, against the spec's."""
    entry, _ = loaded(built, spec)
    record, plan = LaunchRecord.from_json(dict(entry.launch)), spec.plan
    # Of schema 2 are a stride in 32 bits, and types of 8; of 4 a dz that may lie over z.
    dz = spec.activation.backward and plan.quant.wide
    gathers, bytes_of_w = spec.operands["gather"] != "none", spec.quant.mx_weights
    old = not gathers and (spec.quant == Quant() or bytes_of_w)
    assert record.schema == (4 if dz else 1 if old else 2)
    padded = plan.quant.transpose and plan.quant.by_blocks
    assert bool(record.constraints) is (gathers or padded or bytes_of_w)
    product = product_of(record)
    assert product.block == (plan.threads, 1, 1)
    assert product.cluster == (spec.cluster[0] * spec.cluster[1], 1, 1)
    assert product.dynamic_shared == plan.shared.bytes <= SM90A.shared_bytes
    env = variables(record)
    for parameter in product.parameters:
        if isinstance(parameter, TensorMapParameter):
            expected_map(parameter, env).check()
    size, blocks = product.cluster[0], evaluate(product.grid[0], env)
    assert blocks % size == 0
    assert size <= blocks <= 132
    assert evaluate(product.grid[0], env | {"cluster_margin": 10}) == min(blocks, (132 // size - 10) * size)
    assert evaluate(product.grid[0], env | {"cluster_margin": 10**6}) == size


def test_parts_of_rows_are_added_up_by_a_second_launch(split, tmp_path):
    compiled = trace.compile_plan(plan(split), tmp_path)
    record = LaunchRecord.from_json(compiled.launch)
    first, second = record.launches
    assert compiled.proof["launches"] >= 8
    assert (compiled.resources["registers"], compiled.resources["spill_bytes"]) == (65536 // 384 // 8 * 8, 0)
    assert (first.dynamic_shared, second.dynamic_shared) == (split.plan.shared.bytes, 0)
    for launch in record.launches:
        try:
            code = sass.instructions(compiled.cubin, launch.symbol)
        except ToolchainError as error:
            pytest.skip(str(error))
        counted = sass.counts(code)
        assert (counted["STL"], counted["LDL"], counted["UTMASTG"], counted["UTMAREDG"]) == (0, 0, 0, 0)
        assert not any("F32" in item.opcode for item in code if item.base.startswith(("ATOM", "RED")))
    for problem, parts in (
        ({"M": 24576, "N": 128, "K": 2880}, 8),
        ({"M": 1025, "N": 128, "K": 2880}, 3),
        ({"M": 0, "N": 8, "K": 8}, 1),
        ({"M": 10**9, "N": 8, "K": 8}, 132),
        ({"M": 10**6, "N": 4096, "K": 4096}, 1),
    ):
        env = variables(record) | problem
        assert evaluate(record.scratch, env) == 4 * parts * problem["N"] * (problem["K"] + 1)
        counts = {evaluate(parameter.value, env) for parameter in second.parameters if parameter.name == "integer"}
        assert counts == {parts}
        assert evaluate(second.grid[0], env) == problem["N"] * -(-problem["K"] // 512)


def test_sums_of_blocks_are_added_up_by_another_launch(built, summed):
    entry, cubin = loaded(built, MATRIX[summed])
    record = LaunchRecord.from_json(dict(entry.launch))
    *_, second = record.launches
    try:
        code = sass.instructions(cubin, second.symbol)
    except ToolchainError as error:
        pytest.skip(str(error))
    assert not any(item.base in ("STL", "LDL") or item.base.startswith(("ATOM", "RED.")) for item in code)
    env = variables(record)
    groups, sides = (1, 1) if MATRIX[summed].op == "dense-gemm" else (5, 2)
    for i in (384, 16, 2880):
        env |= {"N": i, "I": i}
        columns = i * sides
        assert evaluate(second.grid[0], env) == groups * -(-columns // 512)
        most = sum(-(-size // 128) for size in [env["M"] - groups + 1, *[1] * (groups - 1)])  # blocks that groups have
        assert evaluate(record.scratch, env) >= 4 * most * columns
    assert record.skip_if_zero == ()


def test_fp8_values_wait_for_no_barrier_of_the_cta(built, name):
    """None joins both consumer warpgroups; the transpose goes through stmatrix."""
    spec = MATRIX[name]
    code = instructions(*loaded(built, spec))
    barriers = [item for item in code if item.opcode.startswith("BAR.SYNC")]
    assert sum(barrier.operands.startswith("0x0") for barrier in barriers) <= 2  # before the roles part, and at the end
    if not spec.plan.pingpong:  # which takes turns in the main loop
        assert not any(barrier.operands.endswith(",0x100") for barrier in barriers)
    turned = [item.opcode for item in code if item.base == "STSM"]
    assert any(".MT88" in item for item in turned) is spec.plan.quant.transpose
    stores = sum(item.base == "UTMASTG" for item in code)
    assert stores >= 1 + spec.plan.quant.keep + spec.plan.quant.transpose


def test_chosen_rows_come_by_copies_of_16_bytes_that_a_barrier_tracks(built, gathering):
    entry, cubin = loaded(built, gathering)
    code = instructions(entry, cubin)
    wgrad = gathering.op == "grouped-wgrad"
    rows = 64 if wgrad else gathering.tile[0]
    a_row = (
        2 * gathering.tile[gathering.operands["gather"] == "x"]
        if wgrad
        else gathering.plan.tile_k * gathering.plan.element
    )
    copies = [number for number, item in enumerate(code) if item.base == "LDGSTS"]
    assert len(copies) == 2 * rows * a_row // 16 // 32 // 4  # of a stage, of one warp of four; the last stages apart
    assert {code[number].opcode for number in copies} == {"LDGSTS.E.BYPASS.LTC256B.128"}
    assert sass.counts(code)["ARRIVES"] == 2
    maps = {
        parameter.name
        for parameter in product_of(LaunchRecord.from_json(dict(entry.launch))).parameters
        if "map" in parameter.name
    }
    other = ({"x": "dy", "dy": "x"} if wgrad else {"x": "w"})[gathering.operands["gather"]]
    assert f"map_{gathering.operands['gather']}" not in maps
    assert f"map_{other}" in maps


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """What `prove` is called with for FC1: (plan, record, host function, seed)."""
    (spec,) = find([FC1])
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "prove", lambda *arguments: calls.append(arguments) or {})
        trace.compile_plan(plan(spec), tmp_path_factory.mktemp("scratch"))
    return calls[0]


def changed(record, name, **changes):
    assert any(parameter.name == name for parameter in record.parameters)
    parameters = (dataclasses.replace(p, **changes) if p.name == name else p for p in record.parameters)
    return dataclasses.replace(record, parameters=tuple(parameters))


PLANTED = {
    "box": ("map_w", r"box\[1\] is 160", lambda r: changed(r, "map_w", box=(64, 160, 1))),
    "swizzle": ("map_x", "swizzle is none", lambda r: changed(r, "map_x", swizzle="none")),
    "order-of-dims": ("map_w", r"dims\[1\] is", lambda r: changed(r, "map_w", dims=("K", "I", "E"))),
    "stride": ("map_y", r"strides\[0\] is", lambda r: changed(
        r, "map_y", strides=(["mul", 4, "y.stride0"], *r.parameters[2].strides[1:]))),
    "l2-promotion": ("map_x", "l2_promotion is 256B", lambda r: changed(r, "map_x", l2_promotion="256B")),
    "scalar": ("integer", "value is", lambda r: changed(r, "integer", value="I")),
    "float": ("act_limit_value", "value is", lambda r: changed(r, "act_limit_value", argument="act_alpha")),
    "pointer": ("bias_pointer", "address is", lambda r: changed(r, "bias_pointer", argument="offsets")),
    "grid": ("grid", "x is", lambda r: dataclasses.replace(r, grid=(["mul", 2, ["floordiv", "sm_count", 2]], 1, 1))),
    "cluster": ("cluster", "is", lambda r: dataclasses.replace(r, cluster=(1, 1, 1))),
    "block": ("block", "is", lambda r: dataclasses.replace(r, block=(256, 1, 1))),
    "shared-memory": (
        "dynamic shared memory", "is", lambda r: dataclasses.replace(r, dynamic_shared=r.dynamic_shared - 1024)),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_an_error_planted_in_a_real_record_is_caught(proven, planted):
    traced, record, host, seed = proven
    assert prove(traced, record, host, seed, 8)["launches"] >= 8
    parameter, message, change = PLANTED[planted]
    with pytest.raises(ProofError, match=f"^{parameter}: {message}|^{parameter} {message}") as caught:
        prove(traced, change(record), host, seed, 8)
    assert caught.value.parameter == parameter


def test_the_proof_notices_every_change_of_a_real_record(proven):
    """`python -m tests.compiler.mutations` does this for all packaged kernels: none of 14,588 goes unnoticed there."""
    traced, record, host, seed = proven
    result = tally(record, recorded_launches(traced, record, host, seed))
    assert result.noticed >= 100
    assert not result.missed
